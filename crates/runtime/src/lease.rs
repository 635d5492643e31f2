//! Leader election with a Lease. A standby tries to take the Lease every two seconds, so it takes over a released Lease
//! within about two seconds. A leader that cannot renew its lease stops before another process can take it over.
//!
//! An operator with `--shards` has one Lease for each shard: see [`crate::shards`].
//!
//! A lease does not guarantee a single leader: for a short time, two processes may regard themselves as the leader. The
//! preconditions of the operators' writes make this harmless (invariant 11).

use std::time::{Duration, Instant};

use kube::{Client, Config};
use kube_lease_manager::{LeaseManager, LeaseManagerBuilder, LeaseManagerError};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::client::sending_once;

/// How long a lease is valid after its last renewal.
const DURATION: Duration = Duration::from_secs(20);
/// A leader starts to renew its lease this long before the expiry. If all renewals fail, the leader stops before this
/// time has passed.
const GRACE: Duration = Duration::from_secs(12);
/// How often a standby tries to take the lease.
const RETRY: Duration = Duration::from_secs(2);
/// Time limit for each request about the lease, so that no request hangs until the lease expires. The limit also closes
/// idle connections. It is longer than a standby's retry interval, so that the connection stays open between two
/// attempts.
const CALL_TIMEOUT: Duration = Duration::from_secs(4);

/// Why the leader election failed or the lease was lost.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The client for the lease cannot be created.
    #[error("cannot create the client for the lease")]
    Client(#[source] kube::Error),
    /// Another process holds the lease.
    #[error("the lease {name} was taken over by another process")]
    Taken {
        /// The name of the Lease that another process holds.
        name: String,
    },
    /// The lease could not be renewed in time.
    #[error("the lease {name} was not renewed in time")]
    NotRenewed {
        /// The name of the Lease that this process held.
        name: String,
        /// The error of the last attempt.
        #[source]
        source: LeaseManagerError,
    },
    /// The Leases of the shards could not be renewed in time.
    #[error("the leases of the shards of {name} were not renewed in time")]
    ShardsNotRenewed {
        /// The name of the operator's Lease.
        name: String,
    },
}

/// A candidate of the leader election, and its Lease.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Name of the Lease. The default is the name of the binary.
    pub name: String,
    /// Namespace of the Lease, which is the namespace of the operator.
    pub namespace: String,
    /// The name of the operator's pod, which identifies the candidate.
    pub identity: String,
}

/// A lease that this process holds.
pub struct Lease {
    candidate: Candidate,
    lock: LeaseManager,
}

/// Creates the client for the lease. Its requests time out long before the lease expires, and are not retried after
/// 429, 503 or 504, because such retries can take minutes.
///
/// # Errors
/// Fails if the client cannot be created from `config`.
pub fn client(mut config: Config) -> Result<Client, Error> {
    config.connect_timeout = Some(CALL_TIMEOUT);
    config.read_timeout = Some(CALL_TIMEOUT);
    sending_once(config).map_err(Error::Client)
}

/// Waits until this process holds the lease. Logs failures, and retries without limit.
pub async fn acquire(client: &Client, candidate: Candidate) -> Lease {
    let mut logged = false;
    loop {
        match attempt(client, &candidate).await {
            Ok(Some(lock)) => {
                info!(
                    lease = candidate.name,
                    identity = candidate.identity,
                    "leading"
                );
                return Lease { candidate, lock };
            }
            Ok(None) if !logged => {
                info!(
                    lease = candidate.name,
                    "standby: another process holds the lease"
                );
                logged = true;
            }
            Ok(None) => {}
            Err(error) => {
                let cause = api::problem::Chain(&error).to_string();
                warn!(
                    lease = candidate.name,
                    error = cause,
                    "cannot read or take the lease; retrying"
                );
                sleep(RETRY).await;
            }
        }
    }
}

/// For one retry interval, tries to take the lease. Returns `None` if this process has not got the lease. Each attempt
/// creates a new `LeaseManager`, because an existing `LeaseManager` reads the Lease again only after the lease that it
/// has read expires.
async fn attempt(
    client: &Client,
    candidate: &Candidate,
) -> Result<Option<LeaseManager>, LeaseManagerError> {
    let lock = LeaseManagerBuilder::new(client.clone(), &candidate.name)
        .with_namespace(&candidate.namespace)
        .with_identity(&candidate.identity)
        .with_field_manager(format!("lease-{}", candidate.identity))
        .with_duration(DURATION.as_secs())
        .with_grace(GRACE.as_secs())
        .build()
        .await?;
    match timeout(RETRY, lock.changed()).await {
        Ok(Ok(true)) => Ok(Some(lock)),
        Ok(Ok(false)) | Err(_) => Ok(None),
        Ok(Err(error)) => Err(error),
    }
}

impl Lease {
    /// Renews the lease. Returns the error when renewals have failed for too long, or when another process has taken
    /// the lease.
    pub async fn hold(&self) -> Error {
        let mut outage = Outage::default();
        loop {
            match self.lock.changed().await {
                Ok(true) => debug!(lease = self.candidate.name, "still leading"),
                Ok(false) => {
                    return Error::Taken {
                        name: self.candidate.name.clone(),
                    };
                }
                Err(source) if outage.is_over_limit(Instant::now()) => {
                    return Error::NotRenewed {
                        name: self.candidate.name.clone(),
                        source,
                    };
                }
                Err(error) => {
                    let cause = api::problem::Chain(&error).to_string();
                    warn!(
                        lease = self.candidate.name,
                        error = cause,
                        "cannot renew the lease; retrying"
                    );
                    sleep(Duration::from_millis(500)).await;
                }
            }
        }
    }

    /// Releases the lease, so that a standby can take it within its retry interval.
    pub async fn release(self) {
        match timeout(GRACE, self.lock.release()).await {
            Ok(Ok(())) => info!(lease = self.candidate.name, "lease released"),
            Ok(Err(error)) => {
                let cause = api::problem::Chain(&error).to_string();
                warn!(
                    lease = self.candidate.name,
                    error = cause,
                    "cannot release the lease; the lease will expire"
                );
            }
            Err(_) => warn!(
                lease = self.candidate.name,
                "cannot release the lease in time; the lease will expire"
            ),
        }
    }
}

/// Groups failed renewals into outages. After a long pause, a failure starts a new outage, because a renewal must have
/// succeeded in the pause.
#[derive(Default)]
struct Outage {
    began: Option<Instant>,
    last: Option<Instant>,
}

impl Outage {
    fn is_over_limit(&mut self, now: Instant) -> bool {
        let continues = self
            .last
            .is_some_and(|last| now.duration_since(last) < DURATION.saturating_sub(GRACE));
        let began = match self.began {
            Some(began) if continues => began,
            _ => now.checked_sub(CALL_TIMEOUT).unwrap_or(now), // The first failed request may have hung for the whole timeout.
        };
        self.began = Some(began);
        self.last = Some(now);
        now.duration_since(began) >= GRACE.saturating_sub(CALL_TIMEOUT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leader_stops_before_lease_expires() {
        let renewed = Instant::now();
        let first = renewed + DURATION.saturating_sub(GRACE) + CALL_TIMEOUT;
        let mut outage = Outage::default();
        let mut gave_up = first;
        while !outage.is_over_limit(gave_up) {
            gave_up += CALL_TIMEOUT + Duration::from_millis(500);
        }
        assert!(gave_up > first, "the leader gave up after one failure");
        assert!(
            gave_up <= renewed + DURATION,
            "the leader stopped {:?} after its last renewal",
            gave_up - renewed
        );
    }

    /// With retries for minutes, a leader would detect too late that its lease was not renewed.
    #[tokio::test]
    async fn lease_requests_are_not_retried() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};

        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        tokio::spawn({
            let requests = std::sync::Arc::clone(&requests);
            async move {
                while let Ok((mut caller, _)) = listener.accept().await {
                    let mut request = [0; 4096];
                    let _ = caller.read(&mut request).await;
                    requests.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    let refusal = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                    let _ = caller.write_all(refusal.as_bytes()).await;
                }
            }
        });
        let client = client(Config::new(url.parse().unwrap())).unwrap();
        let answer = client.apiserver_version().await;
        assert!(answer.is_err());
        assert_eq!(requests.load(std::sync::atomic::Ordering::SeqCst), 1);
    }

    #[test]
    fn lease_failures_with_long_gap_are_separate_outages() {
        let start = Instant::now();
        let mut outage = Outage::default();
        assert!(!outage.is_over_limit(start));
        assert!(!outage.is_over_limit(start + Duration::from_secs(9)));
        assert!(!outage.is_over_limit(start + Duration::from_secs(11)));
    }
}
