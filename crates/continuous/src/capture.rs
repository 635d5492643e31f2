//! Records the changes of a running etcd in a store, with a watch and a recorder.
//!
//! Complete segments are written to the store while further events are read. If too many segments wait for the store,
//! no events are read. etcd then keeps the events in its database, and sends them later. If the store is unavailable
//! until etcd has compacted these events, the chain ends with a gap.

use std::future::Future;
use std::pin::pin;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use etcd::{WatchBatch, WatchError};
use store::Store;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::assemble::Assembler;
use crate::base::StoredBase;
use crate::outbox::{Outbox, Spool};
use crate::progress::Monitor;
use crate::record::{GapReason, Hash, Lease, LeaseEnd, Record, Transaction};
use crate::recorder::{Recorder, RecorderError};
use crate::source::{Changes, Source};

/// Number of leases in one check.
const LEASES_PER_CHECK: usize = 64;

/// If etcd sends nothing for this time, the capture requests a progress notification.
const SILENCE: Duration = Duration::from_secs(5);

/// If etcd sends nothing for this time after the request for a progress notification, the watch has failed.
const NOTIFICATION_DEADLINE: Duration = Duration::from_secs(10);

/// How a capture has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The caller has stopped the capture, or the capture has recorded the revision of [`Capture::end_at`]. The store
    /// has all received transactions.
    Stopped,
    /// The chain ends with a gap, and the gap is recorded in the store. The caller must continue with a new base.
    Gap(GapReason),
}

/// Why a capture was interrupted. Except after [`Self::Recorder`], the caller can continue it with [`Capture::run`],
/// also through another member.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The watch has failed.
    #[error("the watch of all keys has failed")]
    Watch(#[source] etcd::Error),
    /// The watch has sent a batch that is too large, or has ended.
    #[error("the watch of all keys has failed")]
    Batch(#[source] WatchError),
    /// A lease or the newest revision cannot be read.
    #[error("etcd does not answer")]
    Etcd(#[source] etcd::Error),
    /// The recorder has failed, so the capture cannot continue.
    #[error("the changes cannot be recorded")]
    Recorder(#[from] RecorderError),
}

/// The data that a capture records in addition to the transactions.
#[derive(Clone, Copy, Debug)]
pub struct Extras {
    /// Time between two hashes of all keys. With `None`, no hashes are recorded. For each hash, the member reads its
    /// whole database.
    pub hash_interval: Option<Duration>,
    /// Time between two checks whether the recorded leases still exist.
    pub lease_interval: Duration,
}

impl Default for Extras {
    fn default() -> Self {
        Self {
            hash_interval: Some(Duration::from_mins(1)),
            lease_interval: Duration::from_secs(10),
        }
    }
}

/// Records one chain.
pub struct Capture<'a> {
    client: &'a dyn Source,
    base: StoredBase,
    recorder: Recorder,
    extras: Extras,
    /// Complete segments that are not in the store yet.
    outbox: Outbox<'a>,
    /// The revision of the last recorded hash.
    hashed: i64,
    hash_at: Instant,
    lease_check_at: Instant,
    /// The ID of the last lease that was checked.
    checked_lease: i64,
    /// The capture ends when it has recorded this revision.
    end_revision: Option<i64>,
    /// The reason of the recorded gap, which is the end of the chain.
    gap: Option<GapReason>,
}

/// The current time in microseconds since the epoch.
pub(crate) fn now_micros() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
    })
}

impl<'a> Capture<'a> {
    /// Continues the chain of a recorder. `prefix` is empty or ends with a slash.
    pub fn new(
        client: &'a dyn Source,
        store: &'a dyn Store,
        prefix: &str,
        base: StoredBase,
        recorder: Recorder,
        extras: Extras,
    ) -> Self {
        let now = Instant::now();
        Self {
            client,
            outbox: Outbox::new(store, prefix, base.name),
            base,
            recorder,
            hashed: 0,
            hash_at: now + extras.hash_interval.unwrap_or_default(),
            lease_check_at: now + extras.lease_interval,
            checked_lease: i64::MIN,
            end_revision: None,
            gap: None,
            extras,
        }
    }

    /// Segments that do not fit into memory wait in the directory of `spool`. The capture reports its progress to
    /// `monitor`.
    #[must_use]
    pub fn with_spool(self, spool: Option<Spool>, monitor: Monitor) -> Self {
        Self {
            outbox: self.outbox.with(spool, monitor),
            ..self
        }
    }

    /// Waits for `time`, and uploads complete segments during this time.
    pub async fn pause(&mut self, time: Duration) {
        self.outbox.drive_during(sleep(time)).await;
    }

    /// Ends [`Capture::run`] when this revision is recorded.
    pub fn end_at(&mut self, revision: i64) {
        self.end_revision = Some(revision);
    }

    /// The last recorded revision. The store may not have it yet.
    pub fn last(&self) -> i64 {
        self.recorder.last()
    }

    /// Records changes through one member until `stop` completes and the store has all segments. If the caller drops
    /// the future, the next call continues after the last recorded revision.
    ///
    /// # Errors
    /// Fails if the watch or etcd fails. No received transaction is lost.
    pub async fn run(
        &mut self,
        member: &str,
        stop: impl Future<Output = ()>,
    ) -> Result<End, CaptureError> {
        if let Some(reason) = self.gap {
            // An earlier call has recorded the gap, but the caller dropped the future of that call before it returned.
            self.outbox.drain().await;
            return Ok(End::Gap(reason));
        }
        let mut assembler = Assembler::new(self.base.base.cluster_id, self.recorder.last());
        let request = self.client.watch(member, assembler.last());
        let watch = self.outbox.drive_during(request).await;
        let mut watch = watch.map_err(CaptureError::Watch)?;
        if let Some(reason) = self.replaced(member).await? {
            return self.end(reason).await;
        }
        let mut stop = pin!(stop);
        let mut silence = Silence::default();
        while self.end_revision.is_none_or(|end| self.last() < end) {
            if self.outbox.is_full() {
                tokio::select! {
                    biased;
                    () = &mut stop => break,
                    () = self.outbox.step() => silence = Silence::default(),
                }
                continue;
            }
            let due = self.next_task().min(silence.due());
            tokio::select! {
                biased;
                () = &mut stop => break,
                () = self.outbox.step() => {}
                batch = watch.next() => {
                    silence = Silence::default();
                    let end = self.receive(member, &mut assembler, batch).await?;
                    if let Some(end) = end {
                        return Ok(end);
                    }
                }
                () = sleep_until(due) => silence.check(watch.as_mut(), member).await?,
            }
            self.do_due_tasks(member).await?;
        }
        self.flush()?;
        self.outbox.drain().await;
        Ok(End::Stopped)
    }

    /// Checks that etcd has the history of this chain. Returns a reason if etcd has another cluster ID or a lower
    /// revision. A watch does not detect a lower revision: it sends nothing until etcd reaches the last recorded
    /// revision, and then sends the revisions of another history.
    async fn replaced(&mut self, member: &str) -> Result<Option<GapReason>, CaptureError> {
        let request = self.client.newest_revision(member);
        let newest = self.outbox.drive_during(request).await;
        let (cluster_id, revision) = newest.map_err(CaptureError::Etcd)?;
        if cluster_id != self.base.base.cluster_id {
            return Ok(Some(GapReason::ClusterChanged));
        }
        Ok((revision < self.last()).then_some(GapReason::RevisionReset))
    }

    /// Records a batch. Returns the end of the capture if the batch leads to a gap.
    async fn receive(
        &mut self,
        member: &str,
        assembler: &mut Assembler,
        batch: Result<WatchBatch, WatchError>,
    ) -> Result<Option<End>, CaptureError> {
        let error = match batch {
            Ok(batch) => {
                let found = assembler.push(batch, now_micros());
                for transaction in found.transactions {
                    self.record(member, transaction).await?;
                }
                return match found.gap {
                    Some(reason) => self.end(reason).await.map(Some),
                    None => Ok(None),
                };
            }
            Err(WatchError::Compacted { .. }) => {
                return self.end(GapReason::Compacted).await.map(Some);
            }
            Err(WatchError::Ended(error)) => CaptureError::Watch(error),
            Err(error) => CaptureError::Batch(error),
        };
        self.flush()?;
        Err(error)
    }

    /// The time of the next task of [`Self::do_due_tasks`]: a hash, a check of leases, or the completion of a segment.
    fn next_task(&self) -> Instant {
        let mut due = self.lease_check_at;
        if self.extras.hash_interval.is_some() {
            due = due.min(self.hash_at);
        }
        let deadline = self.recorder.deadline().map(Instant::from_std);
        deadline.map_or(due, |at| due.min(at))
    }

    async fn do_due_tasks(&mut self, member: &str) -> Result<(), CaptureError> {
        let now = Instant::now();
        if let Some(interval) = self.extras.hash_interval
            && now >= self.hash_at
        {
            self.hash_at = now + interval;
            self.record_hash(member).await?;
        }
        if now >= self.lease_check_at {
            self.lease_check_at = now + self.extras.lease_interval;
            self.check_leases(member).await?;
        }
        let deadline = self.recorder.deadline().map(Instant::from_std);
        if deadline.is_some_and(|at| now >= at) {
            self.flush()?;
        }
        Ok(())
    }

    async fn record(&mut self, member: &str, transaction: Transaction) -> Result<(), CaptureError> {
        for id in self.recorder.unknown_leases(&transaction) {
            // If etcd does not answer, the lease is recorded without a TTL, because an error here would lose the
            // transaction.
            let request = self.client.lease(member, id);
            let found = self.outbox.drive_during(request).await.ok();
            self.push(Record::Lease(Lease {
                id,
                ttl: found.and_then(|found| found.granted),
                seen: found.map_or(transaction.revision, |found| found.revision),
            }))?;
        }
        self.push(Record::Transaction(transaction))
    }

    /// Records the hash at the last revision, unless this revision already has a hash.
    async fn record_hash(&mut self, member: &str) -> Result<(), CaptureError> {
        let revision = self.recorder.last();
        if revision == self.hashed {
            return Ok(());
        }
        // The capture continues if `hash` fails, because a later hash also covers this revision. For example, `hash`
        // fails if etcd has sent the events of a transaction, but does not accept reads of its revision yet (`End` in
        // etcd's `watchable_store_txn.go`).
        let request = self.client.hash(member, revision);
        let hash = self.outbox.drive_during(request).await;
        let hash = hash.unwrap_or_else(|error| {
            tracing::warn!(%error, revision, "etcd did not return a hash");
            None
        });
        if let Some(hash) = hash {
            self.hashed = revision;
            self.push(Record::Hash(Hash {
                revision,
                hash,
                observed: now_micros(),
            }))?;
        }
        Ok(())
    }

    /// Records the end of leases that no longer exist. Each call checks some of the leases.
    async fn check_leases(&mut self, member: &str) -> Result<(), CaptureError> {
        let leases = self
            .recorder
            .leases_after(self.checked_lease, LEASES_PER_CHECK);
        self.checked_lease = if leases.len() < LEASES_PER_CHECK {
            i64::MIN
        } else {
            leases.last().copied().unwrap_or(i64::MIN)
        };
        for id in leases {
            let request = self.client.lease(member, id);
            let found = self.outbox.drive_during(request).await;
            let found = found.map_err(CaptureError::Etcd)?;
            if found.granted.is_none() {
                let seen = found.revision;
                self.push(Record::LeaseEnd(LeaseEnd { id, seen }))?;
            }
        }
        Ok(())
    }

    fn push(&mut self, record: Record) -> Result<(), CaptureError> {
        let time = self.recorder.time();
        let now = Instant::now().into_std();
        if let Some(full) = self.recorder.push(record, now)? {
            self.outbox.push(full, time);
        }
        Ok(())
    }

    /// Completes the segment. The outbox writes it to the store.
    fn flush(&mut self) -> Result<(), CaptureError> {
        if let Some(sealed) = self.recorder.seal()? {
            self.outbox.push(sealed, self.recorder.time());
        }
        Ok(())
    }

    async fn end(&mut self, reason: GapReason) -> Result<End, CaptureError> {
        let time = self.recorder.time();
        let now = Instant::now().into_std();
        for sealed in self.recorder.end(reason, now_micros(), now)? {
            self.outbox.push(sealed, time);
        }
        self.gap = Some(reason);
        self.outbox.drain().await;
        Ok(End::Gap(reason))
    }
}

/// Detects that etcd no longer answers on the connection of the watch.
struct Silence {
    /// The time at which the last batch arrived.
    heard: Instant,
    /// The time of the request for a progress notification. `None` if no request is open.
    asked: Option<Instant>,
}

impl Default for Silence {
    fn default() -> Self {
        Self {
            heard: Instant::now(),
            asked: None,
        }
    }
}

impl Silence {
    /// The time at which [`Self::check`] must be called next.
    fn due(&self) -> Instant {
        let heard = self.heard + SILENCE;
        self.asked
            .map_or(heard, |asked| asked + NOTIFICATION_DEADLINE)
    }

    /// Requests a progress notification if etcd has sent nothing for [`SILENCE`]. Fails if etcd then sends nothing for
    /// [`NOTIFICATION_DEADLINE`].
    async fn check(&mut self, watch: &mut dyn Changes, member: &str) -> Result<(), CaptureError> {
        let timed_out = || CaptureError::Watch(etcd::Error::Timeout(member.to_owned()));
        if Instant::now() < self.due() {
            return Ok(());
        }
        if self.asked.is_some() {
            return Err(timed_out());
        }
        self.asked = Some(Instant::now());
        let requested = timeout(NOTIFICATION_DEADLINE, watch.request_progress()).await;
        requested
            .map_err(|_| timed_out())?
            .map_err(CaptureError::Batch)
    }
}

#[cfg(test)]
mod tests;
