//! Records a cluster permanently: takes a base, records the changes after it, and takes the next base after a gap or
//! when the base has reached its maximum age.
//!
//! While the agent takes the next base, it still records the old chain, up to the revision of the next base. All
//! revisions since the first base can therefore be restored, except after a gap.

use std::future::Future;
use std::pin::pin;
use std::time::{Duration, Instant};

use etcd::EtcdClient;
use store::Store;
use tokio::sync::watch;
use tokio::time::{sleep, sleep_until};

use crate::base::StoredBase;
use crate::capture::{Capture, CaptureError, End, Extras, now_micros};
use crate::recorder::{Limits, Recorder, RecorderError};
use crate::snapshot::take_base;
use crate::stored::{ReadError, bases, read_base, tip};

/// Pause after a failure of etcd.
const RETRY: Duration = Duration::from_secs(1);

/// Pause after a failure to take the next base. The agent still records the chain of the last base.
const RENEWAL_RETRY: Duration = Duration::from_secs(10);

/// Settings of an agent.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The prefix of all objects. It is empty or ends with a slash.
    pub prefix: String,
    /// The limits at which a segment is complete.
    pub limits: Limits,
    /// The data that is recorded in addition to the transactions.
    pub extras: Extras,
    /// The agent takes a new base when the last base has this age.
    pub max_age: Duration,
}

/// Why an agent has ended.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The stored chain cannot be read.
    #[error("the stored chain cannot be read")]
    Read(#[from] ReadError),
    /// The recorder has failed.
    #[error("the changes cannot be recorded")]
    Recorder(#[from] RecorderError),
}

/// Records a cluster.
pub struct Agent<'a> {
    client: &'a EtcdClient,
    store: &'a dyn Store,
    settings: Settings,
    members: Vec<String>,
    /// Number of failed attempts. After each failure, the agent uses the next member.
    failures: usize,
}

impl<'a> Agent<'a> {
    /// Creates an agent that records through one of these members. After a failure, it uses the next member.
    pub fn new(
        client: &'a EtcdClient,
        members: Vec<String>,
        store: &'a dyn Store,
        settings: Settings,
    ) -> Self {
        Self {
            client,
            store,
            settings,
            members,
            failures: 0,
        }
    }

    /// Records until `stop` completes and the store has all segments. Continues the newest stored chain, or takes a new
    /// base if that chain has ended with a gap.
    ///
    /// # Errors
    /// Fails if the stored chain cannot be continued. Retries failures of etcd.
    pub async fn run(&mut self, stop: impl Future<Output = ()>) -> Result<(), AgentError> {
        let (sender, stopped) = watch::channel(false);
        let mut stop = pin!(stop);
        let mut record = pin!(self.record_all(stopped));
        tokio::select! {
            ended = &mut record => return ended,
            () = &mut stop => {}
        }
        let _ = sender.send(true);
        record.await
    }

    async fn record_all(&mut self, stopped: watch::Receiver<bool>) -> Result<(), AgentError> {
        let mut next = self.resume(&stopped).await?;
        while let Some((base, recorder)) = next {
            next = Box::pin(self.record(base, recorder, &stopped)).await?;
        }
        Ok(())
    }

    fn member(&self) -> &str {
        let index = self.failures % self.members.len().max(1);
        self.members.get(index).map_or("", String::as_str)
    }

    /// Returns the newest stored chain, or a new base if that chain has ended. `None` if the agent was stopped.
    async fn resume(
        &mut self,
        stopped: &watch::Receiver<bool>,
    ) -> Result<Option<(StoredBase, Recorder)>, AgentError> {
        let prefix = &self.settings.prefix;
        let Some(name) = bases(self.store, prefix).await?.pop() else {
            return Ok(self.begin(stopped).await);
        };
        let base = read_base(self.store, prefix, name).await?;
        let limits = self.settings.limits;
        let recorder = match tip(self.store, prefix, name).await? {
            None => Ok(Recorder::new(&base, limits)),
            Some(tip) => Recorder::resume(&base, &tip, limits),
        };
        match recorder {
            Ok(recorder) => Ok(Some((base, recorder))),
            Err(RecorderError::Ended { .. }) => Ok(self.begin(stopped).await),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes a new base, and retries until it is stored. Returns `None` if the agent was stopped.
    async fn begin(&mut self, stopped: &watch::Receiver<bool>) -> Option<(StoredBase, Recorder)> {
        loop {
            let taken = take_base(
                self.client,
                self.member(),
                self.store,
                &self.settings.prefix,
            );
            tokio::select! {
                () = until_stopped(stopped.clone()) => return None,
                taken = taken => match taken {
                    Ok(base) => {
                        let recorder = Recorder::new(&base, self.settings.limits);
                        return Some((base, recorder));
                    }
                    Err(error) => report(&error),
                },
            }
            self.failures += 1;
            sleep(RETRY).await;
        }
    }

    /// Records one chain until its end. Returns the next base with its recorder, or `None` if the agent was stopped.
    async fn record(
        &mut self,
        base: StoredBase,
        recorder: Recorder,
        stopped: &watch::Receiver<bool>,
    ) -> Result<Option<(StoredBase, Recorder)>, AgentError> {
        let mut renew_at = Instant::now() + self.renewal(&base);
        let prefix = self.settings.prefix.clone();
        let extras = self.settings.extras;
        let mut capture = Capture::new(self.client, self.store, &prefix, base, recorder, extras);
        let mut next: Option<(StoredBase, Recorder)> = None;
        loop {
            if *stopped.borrow() {
                return Ok(None);
            }
            let member = self.member().to_owned();
            let ended = if next.is_some() {
                Box::pin(capture.run(&member, until_stopped(stopped.clone()))).await
            } else {
                let mut taken = None;
                let renew = async {
                    sleep_until(renew_at.into()).await;
                    taken = Some(take_base(self.client, &member, self.store, &prefix).await);
                };
                let stop = async {
                    tokio::select! {
                        () = renew => {}
                        () = until_stopped(stopped.clone()) => {}
                    }
                };
                let ended = Box::pin(capture.run(&member, stop)).await;
                match taken {
                    Some(Ok(base)) => {
                        // The current chain ends at the revision of `base`, where the next chain starts.
                        capture.end_at(base.base.revision);
                        let recorder = Recorder::new(&base, self.settings.limits);
                        next = Some((base, recorder));
                    }
                    Some(Err(error)) => {
                        report(&error);
                        renew_at = Instant::now() + RENEWAL_RETRY;
                    }
                    None => {}
                }
                ended
            };
            match ended {
                Ok(End::Gap(reason)) => {
                    tracing::warn!(?reason, "changes are missing: a new base is taken");
                    return match next {
                        Some(next) => Ok(Some(next)),
                        None => Ok(self.begin(stopped).await),
                    };
                }
                Ok(End::Stopped) => {
                    if let Some((base, recorder)) = next.take() {
                        if capture.last() >= base.base.revision {
                            return Ok(Some((base, recorder)));
                        }
                        next = Some((base, recorder));
                    }
                }
                Err(CaptureError::Recorder(error)) => return Err(error.into()),
                Err(error) => {
                    report(&error);
                    self.failures += 1;
                    sleep(RETRY).await;
                }
            }
        }
    }

    /// The remaining time until the next base is due.
    fn renewal(&self, base: &StoredBase) -> Duration {
        let age = now_micros().saturating_sub(base.base.created);
        let age = Duration::from_micros(u64::try_from(age).unwrap_or_default());
        self.settings.max_age.saturating_sub(age)
    }
}

async fn until_stopped(mut stopped: watch::Receiver<bool>) {
    // An error of `wait_for` means that the sender was dropped, which also stops the agent.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

fn report(error: &dyn std::error::Error) {
    let cause = error.source().map(ToString::to_string);
    tracing::warn!(%error, cause, "recording is interrupted and is retried");
}
