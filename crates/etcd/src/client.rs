//! The real client, based on `etcd-client`. It keeps one connection to each member until the connection fails or is
//! idle.
//!
//! The client sends each call within a deadline and converts the response. It makes no decisions about membership.

mod append;
mod auth;
mod calls;
mod convert;
mod deadlines;
mod keys;
mod plain;
mod pulse;
mod restored;
mod send;
mod snapshot;
mod users;
mod watch;

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use tokio::time::Instant;

pub use deadlines::Deadlines;
pub use keys::{KeyPage, Operation, PageError, Precondition};
pub use restored::{Served, served};
pub use watch::{
    Change, LeaseTtl, MAX_WATCH_MESSAGE, Value, Watch, WatchBatch, WatchError, WatchEvent,
};

use crate::access::{Access, split};
use crate::answer::classify;
use crate::limits::{MAX_ANSWER, MAX_SNAPSHOT};
use crate::login::Session;
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
    max_answer: usize,
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
            max_answer: MAX_ANSWER,
            connections: Mutex::new(HashMap::new()),
        }
    }

    /// Sets the maximum size of a snapshot in bytes.
    #[must_use]
    pub fn with_max_snapshot(mut self, bytes: u64) -> Self {
        self.max_snapshot = bytes;
        self
    }

    /// Sets the maximum size of a response in bytes, except of a snapshot and of a watch. The default is sufficient for
    /// all calls except [`EtcdClient::page`].
    #[must_use]
    pub fn with_max_answer(self, bytes: usize) -> Self {
        Self {
            max_answer: bytes,
            session: self.session.with_max_answer(bytes),
            ..self
        }
    }

    fn connections(&self) -> std::sync::MutexGuard<'_, HashMap<String, Connection>> {
        // A poisoned lock is safe to use, because every operation under the lock keeps the map consistent.
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The client URL in `endpoint`, and the options of a connection to this URL.
    fn options<'a>(&self, endpoint: &'a str) -> Result<(&'a str, ConnectOptions), Error> {
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
        Ok((url, options))
    }

    async fn connect(&self, endpoint: &str) -> Result<Client, Error> {
        let (url, options) = self.options(endpoint)?;
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
}

/// Whether the client has a certificate. The certificate authenticates the client if its common name is the name of an
/// etcd user (`AuthInfoFromTLS` in etcd's `server/auth/store.go`).
fn has_certificate(access: &Access) -> bool {
    let tls = access.tls.as_ref();
    tls.is_some_and(|tls| tls.identity.is_some())
}
