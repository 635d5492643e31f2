//! Leader election over a Lease named like the binary. A standby asks again every two seconds, so that a
//! lease released at a shutdown is taken over at once; a leader that cannot renew gives up before another
//! may begin.
//!
//! A lease has no fencing: for a moment two processes can believe that they lead. Nothing here makes
//! that harmless; the operators' steps do (invariant 11).

use std::time::{Duration, Instant};

use kube::{Client, Config};
use kube_lease_manager::{LeaseManager, LeaseManagerBuilder, LeaseManagerError};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::client::sending_once;

/// How long a lease is valid after its last renewal.
const DURATION: Duration = Duration::from_secs(20);
/// How long before its end a lease is renewed; also how long a leader tries in vain before it gives up.
const GRACE: Duration = Duration::from_secs(12);
/// How often a standby looks.
const RETRY: Duration = Duration::from_secs(2);
/// No call about the lease may take longer: a hanging connection must not outlive the lease. Longer than a standby's
/// pause, because it also ends idle connections.
const CALL_TIMEOUT: Duration = Duration::from_secs(4);

/// Why the process does not lead.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The client for the lease could not be made.
    #[error("no client for the lease")]
    Client(#[source] kube::Error),
    /// Another process holds the lease.
    #[error("the lease {name} was taken over by another process")]
    Taken {
        /// The Lease's name.
        name: String,
    },
    /// The lease could not be renewed in time.
    #[error("the lease {name} could not be renewed in time")]
    NotRenewed {
        /// The Lease's name.
        name: String,
        /// The last failure.
        #[source]
        source: LeaseManagerError,
    },
}

/// Who wants to lead, and where the Lease stands.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The Lease's name: the name of the binary.
    pub name: String,
    /// The Lease's namespace: the operator's own.
    pub namespace: String,
    /// Unique among the processes: the pod's name.
    pub identity: String,
}

/// A lease that is held.
pub struct Lease {
    candidate: Candidate,
    lock: LeaseManager,
}

/// A client of its own for the lease: its calls end long before the lease does, so they are not sent again by
/// themselves when the API server refuses them for now (429, 503, 504): that may go on for minutes.
pub fn client(mut config: Config) -> Result<Client, Error> {
    config.connect_timeout = Some(CALL_TIMEOUT);
    config.read_timeout = Some(CALL_TIMEOUT);
    sending_once(config).map_err(Error::Client)
}

/// Waits until this process leads. Failures are told once and tried again: a standby has nothing else to do.
pub async fn acquire(client: &Client, candidate: Candidate) -> Lease {
    let mut told = false;
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
            Ok(None) if !told => {
                info!(lease = candidate.name, "standing by: another process leads");
                told = true;
            }
            Ok(None) => {}
            Err(error) => {
                let cause = crate::outcome::Chain(&error).to_string();
                warn!(
                    lease = candidate.name,
                    error = cause,
                    "the lease cannot be read or taken"
                );
                sleep(RETRY).await;
            }
        }
    }
}

/// Tries for one retry period. The lock is made anew each time because it looks at the Lease only when made
/// and when the lease it knows of ends.
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
    /// Renews the lease for as long as that works; returns why it does not any more.
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
                    let cause = crate::outcome::Chain(&error).to_string();
                    warn!(
                        lease = self.candidate.name,
                        error = cause,
                        "the lease is not renewed yet"
                    );
                    sleep(Duration::from_millis(500)).await;
                }
            }
        }
    }

    /// Gives the lease back, so that another process leads within its retry period.
    pub async fn release(self) {
        match timeout(GRACE, self.lock.release()).await {
            Ok(Ok(())) => info!(lease = self.candidate.name, "lease released"),
            Ok(Err(error)) => {
                let cause = crate::outcome::Chain(&error).to_string();
                warn!(
                    lease = self.candidate.name,
                    error = cause,
                    "the lease is left to run out"
                );
            }
            Err(_) => warn!(
                lease = self.candidate.name,
                "the lease is left to run out: no answer in time"
            ),
        }
    }
}

/// Failures that follow each other closely are one outage; a renewal in between makes a long pause.
#[derive(Default)]
struct Outage {
    began: Option<Instant>,
    last: Option<Instant>,
}

impl Outage {
    fn is_over_limit(&mut self, now: Instant) -> bool {
        let goes_on = self
            .last
            .is_some_and(|last| now.duration_since(last) < DURATION.saturating_sub(GRACE));
        let began = match self.began {
            Some(began) if goes_on => began,
            _ => now.checked_sub(CALL_TIMEOUT).unwrap_or(now), // The first failure may have taken that long to show.
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
    fn a_leader_gives_up_before_its_lease_runs_out() {
        let renewed = Instant::now();
        let first = renewed + DURATION.saturating_sub(GRACE) + CALL_TIMEOUT;
        let mut outage = Outage::default();
        let mut gave_up = first;
        while !outage.is_over_limit(gave_up) {
            gave_up += CALL_TIMEOUT + Duration::from_millis(500);
        }
        assert!(gave_up > first, "one failure is not the end");
        assert!(
            gave_up <= renewed + DURATION,
            "gave up {:?} after the renewal",
            gave_up - renewed
        );
    }

    /// An API server that refuses for now may do so for minutes: whoever has not heard of a renewal does not lead on.
    #[tokio::test]
    async fn a_call_about_the_lease_is_sent_once() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};

        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        tokio::spawn({
            let asked = std::sync::Arc::clone(&asked);
            async move {
                while let Ok((mut caller, _)) = listener.accept().await {
                    let mut request = [0; 4096];
                    let _ = caller.read(&mut request).await;
                    asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    let refusal = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                    let _ = caller.write_all(refusal.as_bytes()).await;
                }
            }
        });
        let client = client(Config::new(url.parse().unwrap())).unwrap();
        let answer = client.apiserver_version().await;
        assert!(answer.is_err());
        assert_eq!(asked.load(std::sync::atomic::Ordering::SeqCst), 1);
    }

    #[test]
    fn an_outage_that_ended_is_not_held_against_the_leader() {
        let start = Instant::now();
        let mut outage = Outage::default();
        assert!(!outage.is_over_limit(start));
        assert!(!outage.is_over_limit(start + Duration::from_secs(9)));
        assert!(!outage.is_over_limit(start + Duration::from_secs(11)));
    }
}
