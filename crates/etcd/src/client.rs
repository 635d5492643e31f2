//! The real client, based on `etcd-client`. It keeps one connection for each member, until the connection fails or is
//! idle.
//!
//! The client makes no decisions about membership. It connects, sends a call within a deadline, and converts the
//! response.

mod append;
mod auth;
mod calls;
mod convert;
mod deadlines;
mod pulse;
mod snapshot;

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, timeout};

pub use deadlines::Deadlines;

use crate::access::{Access, split};
use crate::answer::{LEADER_CHANGED, NOT_FOR_LEARNER, classify, most_specific};
use crate::limits::{MAX_ENDPOINTS, MAX_SNAPSHOT};
use crate::login::{NOT_HEDGED, Session, asks_for_token};
use crate::port::Error;

struct Connection {
    client: Client,
    answered: Instant,
}

/// The client through which the operators call etcd.
pub struct EtcdClient {
    access: Access,
    deadlines: Deadlines,
    max_snapshot: u64,
    connections: Mutex<HashMap<String, Connection>>,
    session: Session,
}

impl EtcdClient {
    /// Creates a client for one cluster, or for several clusters with the same access.
    pub fn new(access: Access) -> Self {
        Self::with_deadlines(access, Deadlines::default())
    }

    /// Like [`EtcdClient::new`], but with these deadlines.
    pub fn with_deadlines(access: Access, deadlines: Deadlines) -> Self {
        Self {
            session: Session::new(access.credentials.clone(), has_certificate(&access)),
            access,
            deadlines,
            max_snapshot: MAX_SNAPSHOT,
            connections: Mutex::new(HashMap::new()),
        }
    }

    /// Sets the maximum size of a snapshot in bytes.
    #[must_use]
    pub fn with_max_snapshot(mut self, bytes: u64) -> Self {
        self.max_snapshot = bytes;
        self
    }

    fn connections(&self) -> std::sync::MutexGuard<'_, HashMap<String, Connection>> {
        // No operation under the lock can leave the map inconsistent, so a poisoned lock is safe to use.
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(&self, endpoint: &str) -> Result<Client, Error> {
        let mut options = ConnectOptions::new().with_connect_timeout(self.deadlines.connect);
        let (url, name) = split(endpoint);
        if url.starts_with("https://") {
            let Some(tls) = &self.access.tls else {
                return Err(Error::Tls(format!(
                    "{endpoint}: an https URL requires the cluster's CA certificate"
                )));
            };
            let mut config = TlsOptions::new().ca_certificate(Certificate::from_pem(&tls.ca));
            if let Some((certificate, key)) = &tls.identity {
                config = config.identity(Identity::from_pem(certificate, key));
            }
            if let Some(name) = name {
                config = config.domain_name(name);
            }
            options = options.with_tls(config);
        } else if !url.starts_with("http://") {
            return Err(Error::Other(format!(
                "{endpoint}: a client URL must start with http:// or https://"
            )));
        }
        self.session
            .connect(url, options)
            .await
            .map_err(|error| classify(endpoint, &error))
    }

    async fn connection(&self, endpoint: &str) -> Result<Client, Error> {
        self.close_idle();
        let client = self
            .connections()
            .get(endpoint)
            .map(|found| found.client.clone());
        match client {
            Some(client) => Ok(client),
            None => self.connect(endpoint).await,
        }
    }

    /// Closes connections that were not used for [`Deadlines::idle`], because their members may no longer exist.
    pub fn close_idle(&self) {
        let idle = self.deadlines.idle;
        self.connections()
            .retain(|_, connection| connection.answered.elapsed() < idle);
    }

    /// Sends a call to one member. `deadline` includes the time for the connection.
    async fn ask<T, C, F>(&self, endpoint: &str, deadline: Duration, call: C) -> Result<T, Error>
    where
        C: Fn(Client) -> F + Send + Sync,
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
        T: Send,
    {
        self.ask_hedged(endpoint, deadline, &NOT_HEDGED, call).await
    }

    /// Like [`Self::ask`], for a call that is sent to several members. `overtaken` is true as soon as another member
    /// has responded.
    async fn ask_hedged<T, C, F>(
        &self,
        endpoint: &str,
        deadline: Duration,
        overtaken: &AtomicBool,
        call: C,
    ) -> Result<T, Error>
    where
        C: Fn(Client) -> F + Send + Sync,
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
        T: Send,
    {
        let call = |client: &Client| Box::pin(call(client.clone()));
        let answer = timeout(deadline, async {
            let client = self.connection(endpoint).await?;
            // A short call to one member does not wait for a login, because no member issues a token without a quorum.
            // The client certificate authenticates the call.
            let brief = self.session.has_certificate() && deadline <= self.deadlines.status;
            let mut login = if brief {
                self.session.login_number()
            } else {
                Box::pin(self.logged_in(endpoint, None, deadline)).await?
            };
            let mut answer = self.call_with_login(login, overtaken, call(&client)).await;
            let asks = |answer: &Result<T, _>| answer.as_ref().is_err_and(asks_for_token);
            let denied = |answer: &Result<T, _>| {
                let error = answer.as_ref().err().map(|it| classify(endpoint, it));
                matches!(error, Some(Error::AccessDenied(_)))
            };
            if login.is_none()
                && (asks(&answer) || denied(&answer))
                && let Some(former) = self.session.restore_login()
            {
                login = Some(former);
                answer = self.call_with_login(login, overtaken, call(&client)).await;
            } else if brief && login.is_some() && asks(&answer) {
                self.session.drop_token();
                login = None;
                answer = call(&client).await;
            }
            if self.session.has_credentials() && asks(&answer) {
                // The member requires a new token: the member was restarted and lost the token, the token has expired,
                // or no user has the name in the certificate.
                login = Box::pin(self.logged_in(endpoint, login, deadline)).await?;
                answer = self.call_with_login(login, overtaken, call(&client)).await;
            }
            if self.session.has_credentials() && login.is_none() && denied(&answer) {
                // The user of the certificate may lack permissions. A token would have all permissions.
                let text = format!("{endpoint}: no member has issued a token yet");
                return Err(Error::Unavailable(text));
            }
            match answer {
                Ok(answer) => {
                    let connection = Connection {
                        client,
                        answered: Instant::now(),
                    };
                    self.connections().insert(endpoint.to_owned(), connection);
                    Ok(answer)
                }
                Err(error) => Err(classify(endpoint, &error)),
            }
        })
        .await
        .unwrap_or_else(|_| Err(Error::Timeout(endpoint.to_owned())));
        if matches!(
            answer,
            Err(Error::Unreachable(_) | Error::Timeout(_) | Error::Tls(_))
        ) {
            self.connections().remove(endpoint);
        }
        answer
    }

    /// Repeats a read if a leader election interrupts it. The members usually elect a leader within a second.
    async fn ask_through_election<T, C, F>(
        &self,
        endpoint: &str,
        deadline: Duration,
        overtaken: &AtomicBool,
        call: &C,
    ) -> Result<T, Error>
    where
        C: Fn(Client) -> F + Send + Sync,
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
        T: Send,
    {
        const ELECTION_RETRY: Duration = Duration::from_millis(100);
        let end = Instant::now() + deadline;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.ask_hedged(endpoint, left, overtaken, call).await {
                Err(Error::Unavailable(text))
                    if text.ends_with(LEADER_CHANGED) && left > ELECTION_RETRY =>
                {
                    tokio::time::sleep(ELECTION_RETRY).await;
                }
                answer => return answer,
            }
        }
    }

    /// The members in the order in which they are called, at most [`MAX_ENDPOINTS`]. The member that responded last
    /// comes first.
    fn ordered<'a>(&self, via: &'a [String]) -> Vec<&'a str> {
        let connections = self.connections();
        let mut ordered: Vec<&str> = via.iter().map(String::as_str).collect();
        ordered.sort_by_key(|endpoint| {
            connections
                .get(*endpoint)
                .map_or(Duration::MAX, |connection| connection.answered.elapsed())
        });
        ordered.truncate(MAX_ENDPOINTS);
        ordered
    }

    /// Sends a read that any member can answer. If a member does not respond in time, the read is also sent to the next
    /// member. The first response counts.
    async fn read<T, C, F>(&self, via: &[String], call: C) -> Result<T, Error>
    where
        C: Fn(Client) -> F + Send + Sync,
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
        T: Send,
    {
        self.session.set_members(via);
        let ordered = self.ordered(via);
        let mut waiting = ordered.iter();
        let overtaken = AtomicBool::new(false);
        let mut asked = FuturesUnordered::new();
        let mut errors = Vec::new();
        let end = Instant::now() + self.deadlines.call;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if let Some(endpoint) = waiting.next() {
                asked.push(self.ask_through_election(endpoint, left, &overtaken, &call));
            }
            let wait = if waiting.len() == 0 {
                left
            } else {
                self.deadlines.hedge.min(left)
            };
            match timeout(wait, asked.next()).await {
                Ok(Some(Ok(answer))) => {
                    overtaken.store(true, Ordering::Relaxed);
                    return Ok(answer);
                }
                Ok(Some(Err(error))) => errors.push(error),
                Ok(None) => return Err(most_specific(errors)),
                Err(_) if Instant::now() >= end => {
                    errors.push(Error::Timeout(via.join(", ")));
                    return Err(most_specific(errors));
                }
                Err(_) => {}
            }
        }
    }

    /// Sends a change to one member after the other. The change is sent to the next member only if it certainly did not
    /// reach the previous member, or a learner rejected it. A timeout ends the call, because a member that does not
    /// respond may have applied the change.
    async fn change<T, C, F>(&self, via: &[String], call: C) -> Result<T, Error>
    where
        C: Fn(Client) -> F + Send + Sync,
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
        T: Send,
    {
        self.session.set_members(via);
        let mut errors = Vec::new();
        let end = Instant::now() + self.deadlines.call;
        for endpoint in self.ordered(via) {
            let left = end.saturating_duration_since(Instant::now());
            match self.ask(endpoint, left, &call).await {
                Err(error @ (Error::Unreachable(_) | Error::Tls(_))) => errors.push(error),
                Err(Error::Unavailable(text))
                    if NOT_FOR_LEARNER.ends_with(text.rsplit(": ").next().unwrap_or_default()) =>
                {
                    errors.push(Error::Unavailable(text));
                }
                answer => return answer,
            }
        }
        Err(most_specific(errors))
    }
}

/// Whether the client has a certificate. If etcd has a user with the common name of the certificate, the certificate
/// authenticates the client as this user (`AuthInfoFromTLS` in etcd's `server/auth/store.go`).
fn has_certificate(access: &Access) -> bool {
    let tls = access.tls.as_ref();
    tls.is_some_and(|tls| tls.identity.is_some())
}
