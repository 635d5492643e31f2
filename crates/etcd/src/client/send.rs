//! Sends reads and changes to the members of a cluster.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use etcd_client::Client;
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, timeout};

use super::{Connection, EtcdClient};
use crate::answer::{LEADER_CHANGED, NOT_FOR_LEARNER, UNHEALTHY, classify, most_specific, of_read};
use crate::limits::MAX_ENDPOINTS;
use crate::login::{NOT_HEDGED, asks_for_token};
use crate::port::Error;

impl EtcdClient {
    /// Sends a read to one member. `deadline` includes the time for the connection.
    pub(super) async fn ask<T, C, F>(
        &self,
        endpoint: &str,
        deadline: Duration,
        call: C,
    ) -> Result<T, Error>
    where
        C: Fn(Client) -> F + Send + Sync,
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
        T: Send,
    {
        let answer = self.send(endpoint, deadline, call).await;
        answer.map_err(of_read)
    }

    /// Sends a change to one member, at most once. `deadline` includes the time for the connection.
    pub(super) async fn send<T, C, F>(
        &self,
        endpoint: &str,
        deadline: Duration,
        call: C,
    ) -> Result<T, Error>
    where
        C: Fn(Client) -> F + Send + Sync,
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
        T: Send,
    {
        self.ask_hedged(endpoint, deadline, &NOT_HEDGED, call).await
    }

    /// Sends a read to one member, while other members may get the same read. `overtaken` is set when another member
    /// has responded first.
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
            // A call with a short deadline and a certificate is sent without a new login. Without a quorum, no member
            // issues a token, so the login would delay the call.
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
            // If authentication was disabled at the last login, the client has no token. If it was enabled since then,
            // etcd denies the call to the user that the certificate names.
            let is_enabled_since = denied(&answer) && self.session.is_off(login);
            if self.session.has_credentials() && (asks(&answer) || is_enabled_since) {
                // The client logs in again, because the member rejects the current token or requires one. For
                // example, the member lost the token in a restart, the token has expired, or no etcd user has the
                // name in the certificate.
                login = Box::pin(self.logged_in(endpoint, login, deadline)).await?;
                answer = self.call_with_login(login, overtaken, call(&client)).await;
            }
            if self.session.has_credentials() && login.is_none() && denied(&answer) {
                // The call had no token, so etcd applied the permissions of the certificate's user. The user in the
                // credentials may have more permissions, so the client reports the missing token instead of the denial.
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
            Err(Error::Unreachable(_) | Error::Timeout(_) | Error::AnswerLost(_) | Error::Tls(_))
        ) {
            self.connections().remove(endpoint);
        }
        answer
    }

    /// Repeats a read that an election interrupts. etcd usually elects a new leader within a second.
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
                answer => return answer.map_err(of_read),
            }
        }
    }

    /// The members in the order in which the client calls them, at most [`MAX_ENDPOINTS`]. The member that responded
    /// last comes first.
    pub(super) fn ordered<'a>(&self, via: &'a [String]) -> Vec<&'a str> {
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

    /// Sends a read that any member may answer. If a member does not respond in time, the client also sends the read to
    /// the next member, and returns the first response.
    pub(super) async fn read<T, C, F>(&self, via: &[String], call: C) -> Result<T, Error>
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

    /// Sends one change within the deadline of a call. See [`Self::change_before`].
    pub(super) async fn change<T, C, F>(&self, via: &[String], call: C) -> Result<T, Error>
    where
        C: Fn(Client) -> F + Send + Sync,
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
        T: Send,
    {
        let end = Instant::now() + self.deadlines.call;
        self.change_before(end, via, call).await
    }

    /// Sends one change. The next member gets the change only if the previous member certainly did not apply it: the
    /// change did not reach this member, or this member rejected it with [`NOT_FOR_LEARNER`] or [`UNHEALTHY`].
    ///
    /// After any other error, etcd may have applied the change. The client then does not repeat it, and the caller
    /// reads the state again.
    ///
    /// `call` must send exactly one request, because a repetition repeats all requests of `call`.
    pub(super) async fn change_before<T, C, F>(
        &self,
        end: Instant,
        via: &[String],
        call: C,
    ) -> Result<T, Error>
    where
        C: Fn(Client) -> F + Send + Sync,
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
        T: Send,
    {
        self.session.set_members(via);
        let mut errors = Vec::new();
        for endpoint in self.ordered(via) {
            let left = end.saturating_duration_since(Instant::now());
            match self.send(endpoint, left, &call).await {
                Err(error @ (Error::Unreachable(_) | Error::Tls(_))) => errors.push(error),
                Err(Error::Unavailable(text)) if is_rejected_by_member(&text) => {
                    errors.push(Error::Unavailable(text));
                }
                answer => return answer,
            }
        }
        Err(most_specific(errors))
    }
}

/// True if another member may accept the change, because only the called member rejects it. `text` is the text of an
/// [`Error::Unavailable`].
fn is_rejected_by_member(text: &str) -> bool {
    let reason = text.rsplit(": ").next().unwrap_or_default();
    [NOT_FOR_LEARNER, UNHEALTHY]
        .iter()
        .any(|rejection| rejection.trim_start_matches("etcdserver: ") == reason)
}
