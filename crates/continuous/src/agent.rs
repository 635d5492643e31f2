//! Records all changes of an etcd cluster in a store. The agent takes a base (a snapshot), and records the changes
//! after it in segments. It takes the next base after a gap, or when the base has reached its maximum age or its
//! segments have reached their maximum size.
//!
//! A base and its segments are a chain. While the agent takes the next base, it continues the old chain up to the
//! revision of the next base. All revisions since the first base can therefore be restored, except after a gap.

use std::future::{Future, pending};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use etcd::{Etcd, EtcdClient};
use futures::future::join_all;
use store::Store;
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, sleep_until};

use crate::base::{BaseEncryption, StoredBase};
use crate::capture::{Capture, CaptureError, End, Extras, now_micros};
use crate::outbox::Spool;
use crate::progress::Monitor;
use crate::record::GapReason;
use crate::recorder::{Limits, Recorder, RecorderError};
use crate::retention::tidy;
use crate::snapshot::{TakeError, take_described_base};
use crate::stored::{ReadError, bases, read_base, tip};

/// Pause after a failed attempt to take the base of a new chain, and after an interrupted capture.
const RETRY: Duration = Duration::from_secs(1);

/// Pause after a failure to take the next base, to read the stored chain, or to delete old bases.
const RENEWAL_RETRY: Duration = Duration::from_secs(10);

/// Interval between two checks whether the next base is due, and between two requests for etcd's revision.
const CHECK: Duration = Duration::from_secs(1);

/// The agent takes a new base when the last base has this number of segments. A listing of a store has at most 12 MiB
/// of keys (`limits.rs` of the crate `store`), so the segments of a base can be listed if their keys have up to 400
/// bytes.
const MAX_SEGMENTS: u64 = 30_000;

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
    /// The agent takes a new base when the segments of the last base have reached this number of bytes.
    pub max_bytes: u64,
    /// The agent keeps every revision that was the newest revision at some time in this window. The window ends at the
    /// time of the newest base.
    pub window: Duration,
    /// The directory in which segments wait if the store is slow or unavailable. With `None`, segments wait only in
    /// memory.
    pub spool: Option<Spool>,
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

/// A base with the recorder of its chain.
struct Begun {
    base: StoredBase,
    recorder: Recorder,
    /// The number and the total bytes of the base's segments that the store contains.
    stored: (u64, u64),
}

/// Records a cluster.
pub struct Agent<'a> {
    client: &'a EtcdClient,
    store: &'a dyn Store,
    /// The description of the encryption with which the store encrypts its objects.
    encryption: Option<BaseEncryption>,
    settings: Settings,
    endpoints: Vec<String>,
    monitor: Monitor,
    /// Notified when a chain begins.
    begins: Arc<Notify>,
    /// Number of failed attempts. After each failure, the agent uses the next member.
    failures: usize,
}

impl<'a> Agent<'a> {
    /// Creates an agent that records a cluster through one member. `endpoints` are client URLs of the cluster. After a
    /// failure, the agent uses the next member.
    pub fn new(
        client: &'a EtcdClient,
        endpoints: Vec<String>,
        store: &'a dyn Store,
        settings: Settings,
    ) -> Self {
        Self {
            client,
            store,
            encryption: None,
            settings,
            endpoints,
            monitor: Monitor::default(),
            begins: Arc::default(),
            failures: 0,
        }
    }

    /// Writes the description `encryption` into each new base. The store of the agent must be an
    /// [`EncryptedStore`](crate::EncryptedStore) with the key that `encryption` describes.
    #[must_use]
    pub fn encrypted(self, encryption: BaseEncryption) -> Self {
        Self {
            encryption: Some(encryption),
            ..self
        }
    }

    /// The progress of the agent.
    pub fn monitor(&self) -> Monitor {
        self.monitor.clone()
    }

    /// Records until `stop` completes and the store has all segments. Continues the newest stored chain. Takes a new
    /// base if that chain ends with a gap or belongs to another cluster.
    ///
    /// # Errors
    /// Fails if the recorder fails. Failures of etcd and of the store are retried. If the stored chain is damaged, the
    /// agent takes a new base.
    pub async fn run(&mut self, stop: impl Future<Output = ()>) -> Result<(), AgentError> {
        let (sender, stopped) = watch::channel(false);
        let mut stop = pin!(stop);
        let (client, endpoints) = (self.client, self.endpoints.clone());
        let mut probe = pin!(probe(client, endpoints, self.monitor.clone()));
        let mut retention = pin!(keep_tidy(
            self.store,
            self.settings.clone(),
            self.begins.clone(),
            self.monitor.clone(),
        ));
        let mut record = pin!(self.record_all(stopped));
        tokio::select! {
            ended = &mut record => return ended,
            () = &mut stop => {}
            // `select!` drives `probe` and `retention`, which never complete.
            () = &mut probe => {}
            () = &mut retention => {}
        }
        let _ = sender.send(true);
        record.await
    }

    async fn record_all(&mut self, stopped: watch::Receiver<bool>) -> Result<(), AgentError> {
        let mut next = Box::pin(self.resume(&stopped)).await?;
        while let Some(begun) = next {
            next = Box::pin(self.record(begun, &stopped)).await?;
        }
        Ok(())
    }

    /// Selects the member through which the agent records: a follower if one answers, because the leader has more work.
    async fn member(&self) -> String {
        let listed = self.client.members(&self.endpoints).await.ok();
        let members = listed.iter().flat_map(|listed| &listed.members);
        let advertised = members.flat_map(|member| &member.client_urls);
        let urls = all_urls(advertised, &self.endpoints);
        let answers = join_all(urls.iter().map(|url| self.client.status(url))).await;
        let mut usable: Vec<(bool, &String)> = Vec::new();
        for (url, answer) in urls.iter().zip(answers) {
            let Ok(status) = answer else { continue };
            // A member may advertise a URL such as http://localhost:2379. For the agent, this URL may lead to an etcd
            // of another cluster.
            let is_own = listed
                .as_ref()
                .is_none_or(|listed| listed.cluster_id == status.cluster_id);
            if is_own && !status.is_learner && status.leader.is_some() {
                usable.push((status.leader == Some(status.member_id), url));
            }
        }
        usable.sort_by_key(|(is_leader, _)| *is_leader);
        let choices: Vec<&String> = if usable.is_empty() {
            self.endpoints.iter().collect()
        } else {
            usable.into_iter().map(|(_, url)| url).collect()
        };
        let index = self.failures % choices.len().max(1);
        choices.get(index).copied().cloned().unwrap_or_default()
    }

    fn report(&self, error: &dyn std::error::Error) {
        let problem = error_text(error);
        tracing::warn!(problem, "recording is interrupted and is retried");
        self.monitor.fails(&problem);
    }

    /// Returns the newest stored chain, or takes a new base if no stored chain can be continued. `None` if the agent
    /// was stopped.
    async fn resume(
        &mut self,
        stopped: &watch::Receiver<bool>,
    ) -> Result<Option<Begun>, AgentError> {
        loop {
            match self.stored().await {
                Ok(Some(begun)) => return Ok(Some(begun)),
                Ok(None) => return Ok(Box::pin(self.begin(stopped)).await),
                Err(AgentError::Read(error @ ReadError::Store { .. })) if !is_excessive(&error) => {
                    self.report(&error);
                }
                Err(AgentError::Read(error)) => {
                    self.report(&error);
                    return Ok(Box::pin(self.begin(stopped)).await);
                }
                Err(error) => return Err(error),
            }
            tokio::select! {
                () = until_stopped(stopped.clone()) => return Ok(None),
                () = sleep(RENEWAL_RETRY) => {}
            }
        }
    }

    /// The newest stored chain. `None` if there is no chain that can be continued.
    async fn stored(&self) -> Result<Option<Begun>, AgentError> {
        let prefix = &self.settings.prefix;
        // The newest base has the latest creation time, and not always the highest revision, because a restored
        // cluster can have a lower revision.
        let mut newest: Option<StoredBase> = None;
        for name in bases(self.store, prefix).await? {
            let base = match read_base(self.store, prefix, name).await {
                Ok(base) => base,
                Err(error @ ReadError::Store { .. }) => return Err(error.into()),
                Err(error) => {
                    tracing::warn!(%error, %name, "a base cannot be read");
                    continue;
                }
            };
            let created = newest.as_ref().map(|newest| newest.base.created);
            if created.is_none_or(|created| created <= base.base.created) {
                newest = Some(base);
            }
        }
        let Some(base) = newest else {
            return Ok(None);
        };
        if base.base.encryption.is_some() != self.encryption.is_some() {
            // The segments of a base are all encrypted, or none is. If the encryption was switched on or off, the agent
            // therefore cannot continue the stored chain.
            return Ok(None);
        }
        let limits = self.settings.limits;
        let tip = tip(self.store, prefix, base.name).await?;
        let recorder = match &tip.segment {
            None => Ok(Recorder::new(&base, limits)),
            Some(segment) => Recorder::resume(&base, segment, limits),
        };
        match recorder {
            Ok(recorder) => Ok(Some(Begun {
                base,
                recorder,
                stored: (tip.segments, tip.bytes),
            })),
            Err(RecorderError::Ended { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes a new base, and retries until it is stored. Returns `None` if the agent was stopped.
    async fn begin(&mut self, stopped: &watch::Receiver<bool>) -> Option<Begun> {
        loop {
            let member = self.member().await;
            let taken = self.take_base(&member);
            tokio::select! {
                () = until_stopped(stopped.clone()) => return None,
                taken = taken => match taken {
                    Ok(base) => return Some(self.chain_of(base)),
                    Err(error) => self.report(&error),
                },
            }
            self.failures += 1;
            sleep(RETRY).await;
        }
    }

    async fn take_base(&self, member: &str) -> Result<StoredBase, TakeError> {
        let target = (self.store, self.encryption.as_ref());
        take_described_base(self.client, member, target, &self.settings.prefix).await
    }

    fn chain_of(&self, base: StoredBase) -> Begun {
        Begun {
            recorder: Recorder::new(&base, self.settings.limits),
            base,
            stored: (0, 0),
        }
    }

    /// Records one chain until its end. Returns the next base with its recorder, or `None` if the agent was stopped.
    async fn record(
        &mut self,
        begun: Begun,
        stopped: &watch::Receiver<bool>,
    ) -> Result<Option<Begun>, AgentError> {
        let Begun {
            base,
            recorder,
            stored,
        } = begun;
        let renew_at = Instant::now() + self.renewal(&base);
        let mut not_before = Instant::now();
        let last = (recorder.last(), recorder.time());
        self.monitor.begin(&base, last, stored);
        self.begins.notify_one();
        let prefix = self.settings.prefix.clone();
        let extras = self.settings.extras;
        let capture = Capture::new(self.client, self.store, &prefix, base, recorder, extras);
        let mut capture = capture.with_spool(self.settings.spool.clone(), self.monitor.clone());
        let mut next: Option<Begun> = None;
        loop {
            if *stopped.borrow() {
                return Ok(None);
            }
            let member = self.member().await;
            let mut taken = None;
            let is_last = next.is_some();
            let renew = async {
                if is_last {
                    pending::<()>().await;
                }
                // A failed attempt to take the next base is repeated, and does not end the capture. A capture that ends
                // reads no further changes until the store has all segments.
                loop {
                    self.until_renewal(renew_at, not_before).await;
                    let member = self.member().await;
                    match self.take_base(&member).await {
                        Ok(base) => {
                            taken = Some(base);
                            break;
                        }
                        Err(error) => self.report(&error),
                    }
                    not_before = Instant::now() + RENEWAL_RETRY;
                }
            };
            let stop = async {
                tokio::select! {
                    () = renew => {}
                    () = until_stopped(stopped.clone()) => {}
                }
            };
            let ended = Box::pin(capture.run(&member, stop)).await;
            if let Some(base) = taken {
                // The current chain ends at the revision of `base`, where the next chain starts.
                capture.end_at(base.base.revision);
                next = Some(self.chain_of(base));
            }
            match ended {
                Ok(End::Gap(reason)) => {
                    tracing::warn!(?reason, "changes are missing: a new base is taken");
                    if reason == GapReason::RevisionReset {
                        self.monitor.resets();
                        // `RevisionReset` means that etcd's data was restored. The snapshot of `next` may be older than
                        // the restore, so a new base is taken.
                        next = None;
                    }
                    return match next {
                        Some(next) => Ok(Some(next)),
                        None => Ok(Box::pin(self.begin(stopped)).await),
                    };
                }
                Ok(End::Stopped) => {
                    let reached = |begun: &Begun| capture.last() >= begun.base.base.revision;
                    if next.as_ref().is_some_and(reached) {
                        return Ok(next);
                    }
                }
                Err(CaptureError::Recorder(error)) => return Err(error.into()),
                Err(error) => {
                    self.report(&error);
                    self.failures += 1;
                    capture.pause(RETRY).await;
                }
            }
        }
    }

    /// Waits until `not_before`, and then until `at` or until the segments of the base have reached their maximum
    /// number or size.
    async fn until_renewal(&self, at: Instant, not_before: Instant) {
        sleep_until(not_before.into()).await;
        let max_bytes = self.settings.max_bytes;
        while Instant::now() < at && !is_full(self.monitor.base_size(), max_bytes) {
            sleep(CHECK.min(at.saturating_duration_since(Instant::now()))).await;
        }
    }

    /// The remaining time until the next base is due.
    fn renewal(&self, base: &StoredBase) -> Duration {
        let age = now_micros().saturating_sub(base.base.created);
        let age = Duration::from_micros(u64::try_from(age).unwrap_or_default());
        self.settings.max_age.saturating_sub(age)
    }
}

/// True if the segments of a base have reached their maximum number or size. `size` is their number and their bytes.
fn is_full(size: (u64, u64), max_bytes: u64) -> bool {
    let (segments, bytes) = size;
    segments >= MAX_SEGMENTS || bytes >= max_bytes
}

/// The URLs that members advertise, and then the given endpoints. If all endpoints have TLS, advertised URLs without
/// TLS are ignored, because the agent would send its password and read all data over them without encryption.
fn all_urls<'a>(
    advertised: impl Iterator<Item = &'a String>,
    endpoints: &'a [String],
) -> Vec<String> {
    let needs_tls = endpoints.iter().all(|url| url.starts_with("https://"));
    let usable = advertised.filter(|url| !needs_tls || url.starts_with("https://"));
    usable.chain(endpoints).cloned().collect()
}

/// An error with its cause.
fn error_text(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// True if the chain has too many segments for a listing. A retry would fail for the same reason.
fn is_excessive(error: &ReadError) -> bool {
    let ReadError::Store { error, .. } = error else {
        return false;
    };
    matches!(error, store::Error::Excessive { .. })
}

/// Requests etcd's revision at regular intervals. The monitor calculates the agent's delay from this revision. Never
/// completes.
async fn probe(client: &EtcdClient, endpoints: Vec<String>, monitor: Monitor) {
    loop {
        for endpoint in &endpoints {
            let time = now_micros();
            // A learner, or a member without a leader, can be far behind. With the old revision of such a member, the
            // agent would report too early that all changes are in the store.
            if let Ok(status) = client.status(endpoint).await
                && !status.is_learner
                && status.leader.is_some()
            {
                monitor.probed(status.cluster_id, status.revision, time);
                break;
            }
        }
        sleep(CHECK).await;
    }
}

/// Applies the retention window after each new chain. Never completes.
async fn keep_tidy(store: &dyn Store, settings: Settings, begins: Arc<Notify>, monitor: Monitor) {
    let since = now_micros() / 1_000_000;
    loop {
        begins.notified().await;
        let (prefix, window) = (&settings.prefix, settings.window);
        while let Err(error) = Box::pin(tidy(store, prefix, window, since, &monitor)).await {
            let error = error_text(&error);
            tracing::warn!(error, "old bases cannot be deleted, which is retried");
            monitor.retention_ends(Some(&format!("old bases cannot be deleted: {error}")));
            sleep(RENEWAL_RETRY).await;
        }
    }
}

async fn until_stopped(mut stopped: watch::Receiver<bool>) {
    // An error of `wait_for` means that the sender was dropped, which also stops the agent.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

#[cfg(test)]
mod tests;
