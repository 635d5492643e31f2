//! One attempt of a mirror: connects to both clusters, reads the checkpoint, and copies until a failure.

use std::time::Duration;

use bytes::Bytes;
use etcd::{
    ClusterId, Error, Etcd, EtcdClient, KeyPage, KeyRange, Operation, PageError, Precondition,
    WatchError,
};
use futures::FutureExt;
use jiff::Timestamp;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::checkpoint::{
    Checkpoint, CopyReason, Identity, Phase, Stored, checkpoint_key, checkpoint_prefix,
    registry_key,
};
use crate::compare::compare;
use crate::decide::{Beginning, Refusal, begin, check_overlap, is_same_source};
use crate::ends::{End, Ends};
use crate::failure::{Failure, Side};
use crate::follow::{FollowError, Follower, trusts_progress};
use crate::mapping::records;
use crate::progress::Monitor;
use crate::step::{Step, divided};

/// Maximum size of a page in bytes. A mirror has at most one page of each cluster, or one batch of a watch, in memory.
const MAX_PAGE: usize = 16 << 20;

/// After a page with fewer bytes, the mirror requests twice as many keys for the next page.
const SMALL_PAGE: usize = 1 << 20;

/// Number of keys that a copy requests for its first page.
const FIRST_KEYS: i64 = 128;
/// Maximum number of keys of a page.
const MAX_KEYS: i64 = 4_096;

/// Maximum number of checkpoints that one call reads during the search for overlapping mirrors.
const CHECKPOINTS: i64 = 100;

/// Interval at which a mirror reads the newest revision of its source.
const PROBE: Duration = Duration::from_secs(5);

/// Interval at which a mirror writes its checkpoint while no copied key changes in the source. A newer checkpoint makes
/// a copy of all keys after a compaction less probable, but each checkpoint is a write to the destination.
const IDLE_CHECKPOINT: Duration = Duration::from_mins(1);

/// If a mirror makes no progress for this time, although the source has newer revisions, the attempt fails, and the
/// next attempt starts a new watch.
const STALL: Duration = Duration::from_mins(1);

/// Number of keys to request for the next page, so that the page stays within `MAX_PAGE`.
struct PageSize(i64);

impl PageSize {
    fn read(&mut self, page: &KeyPage) {
        let entries = page.entries.iter();
        let bytes: usize = entries.map(|(key, value)| key.len() + value.len()).sum();
        if bytes < SMALL_PAGE {
            self.0 = (self.0 * 2).min(MAX_KEYS);
        }
    }
}

/// One attempt of a mirror.
pub(crate) struct Attempt<'a> {
    identity: &'a Identity,
    ends: &'a Ends,
    monitor: &'a Monitor,
    /// Called when the state of the mirror has changed, so that its EtcdMirror is reconciled.
    changed: &'a (dyn Fn() + Send + Sync),
    source: EtcdClient,
    destination: EtcdClient,
    /// The client URL of the source's member that this attempt uses.
    from: &'a str,
    /// The client URL of the destination's member that this attempt uses.
    to: &'a str,
}

impl<'a> Attempt<'a> {
    /// Creates an attempt. `number` is the number of the attempt. It selects one member of each cluster, so that
    /// consecutive attempts use all pairs of members.
    pub(crate) fn new(
        identity: &'a Identity,
        ends: &'a Ends,
        (monitor, changed): (&'a Monitor, &'a (dyn Fn() + Send + Sync)),
        number: usize,
    ) -> Self {
        let client =
            |access: &etcd::Access| EtcdClient::new(access.clone()).with_max_answer(MAX_PAGE);
        let choose = |endpoints: &'a [String], number: usize| {
            let index = number % endpoints.len().max(1);
            endpoints.get(index).map(String::as_str).unwrap_or_default()
        };
        let (source, destination) = (&ends.source, &ends.destination);
        Self {
            identity,
            ends,
            monitor,
            changed,
            source: client(&source.access),
            destination: client(&destination.access),
            from: choose(&source.endpoints, number),
            // The member of the destination changes after each member of the source was used with it, so that the
            // attempts use all pairs of members.
            to: choose(
                &destination.endpoints,
                number / source.endpoints.len().max(1),
            ),
        }
    }

    /// Runs the attempt until a failure: copies all keys if necessary, and then applies the changes of the source.
    pub(crate) async fn run(&self) -> Result<(), Failure> {
        let source = self.newest().await?;
        let destination = self
            .destination_page(&KeyRange::key(&registry_key()), 1)
            .await?;
        check_cluster(
            Side::Destination,
            destination.cluster_id,
            &self.ends.destination,
        )?;
        let stored = self.stored().await?;
        let accepted = self.ends.accepted.as_deref();
        let begun = begin(
            self.identity,
            stored.as_ref(),
            source,
            destination.cluster_id,
            accepted,
        )?;
        let mut stored = match (begun, stored) {
            // Invariant 42: another process may have promoted the destination, and thereby deleted the checkpoint. This
            // process must not create the checkpoint again, although an empty destination would permit this.
            (Beginning::Register(_), _) if self.monitor.is_registered(destination.cluster_id) => {
                return Err(Refusal::CheckpointDeleted.into());
            }
            (Beginning::Register(checkpoint), _) => self.register(checkpoint).await?,
            (Beginning::Restart(checkpoint), Some(stored)) => {
                self.commit(&stored, only_checkpoint(checkpoint)).await?
            }
            (Beginning::Copy | Beginning::Follow, Some(stored)) => stored,
            (_, None) => return Err(Failure::CheckpointChanged),
        };
        self.monitor.register(destination.cluster_id);
        loop {
            self.report(&stored);
            stored = match stored.checkpoint.phase {
                Phase::Copying { reason, .. } => {
                    self.monitor.begin_copy(reason);
                    let copied = Box::pin(self.copy(stored)).await?;
                    if matches!(copied.checkpoint.phase, Phase::Following { .. }) {
                        self.monitor.complete_copy();
                    }
                    copied
                }
                Phase::Following { .. } => Box::pin(self.follow(stored)).await?,
            };
        }
    }

    /// The cluster ID and the newest revision of the source.
    async fn newest(&self) -> Result<(ClusterId, i64), Failure> {
        // Every response of etcd contains the cluster ID and the revision. The mirror reads the first key of its range,
        // because its etcd user may have permissions only for the copied keys.
        let range = self.identity.mapping.source_range();
        let first = KeyRange::key(&range.start);
        let page = self.source.page(self.from, &first, 0, 1).await;
        let page = page.map_err(|error| Failure::of_page(Side::Source, error))?;
        check_cluster(Side::Source, page.cluster_id, &self.ends.source)?;
        Ok((page.cluster_id, page.revision))
    }

    async fn destination_page(&self, range: &KeyRange, limit: i64) -> Result<KeyPage, Failure> {
        let page = self.destination.page(self.to, range, 0, limit).await;
        page.map_err(|error| Failure::of_page(Side::Destination, error))
    }

    /// The checkpoint in the destination. `None` if there is none.
    async fn stored(&self) -> Result<Option<Stored>, Failure> {
        stored(&self.destination, self.to, &self.identity.uid).await
    }

    /// Creates the checkpoint of a new mirror. If another process or another mirror changes the destination during the
    /// call, the call fails, and the next attempt reads the destination again.
    ///
    /// Invariant 42: the transaction succeeds only if the destination has no key with the mirror's prefix, and if no
    /// other mirror has created a checkpoint since the read of the registry, which precedes `check_mirrors`.
    async fn register(&self, checkpoint: Checkpoint) -> Result<Stored, Failure> {
        let stored = Stored::new(checkpoint);
        let key = checkpoint_key(&self.identity.uid);
        let range = self.identity.mapping.destination_range();
        let parts = range.without(&records());
        let registry = KeyRange::key(&registry_key());
        let registry = self.destination_page(&registry, 1).await?;
        self.check_mirrors().await?;
        // The transaction requires that these ranges are empty, and for this, etcd reads all their keys. The mirror
        // therefore first reads one key of each range.
        for part in &parts {
            let is_empty = self.destination_page(part, 1).await?.entries.is_empty();
            if !is_empty && self.stored().await?.is_none() {
                let prefix = self.identity.mapping.destination_prefix().to_owned();
                return Err(Refusal::NotEmpty { prefix }.into());
            }
        }
        let changed = |key, revision| Precondition::Changed { key, revision };
        let mut preconditions = vec![
            changed(registry_key(), registry.first_changed),
            changed(key.clone(), 0),
        ];
        preconditions.extend(parts.into_iter().map(Precondition::Empty));
        let put = |key, value| Operation::Put { key, value };
        let operations = [
            put(registry_key(), Bytes::from(self.identity.uid.clone())),
            put(key, stored.value.clone()),
        ];
        if self.send(&preconditions, &operations).await? {
            Ok(stored)
        } else {
            Err(Failure::CheckpointChanged)
        }
    }

    /// Checks that no other mirror writes to the same keys.
    async fn check_mirrors(&self) -> Result<(), Failure> {
        let mut range = KeyRange::prefix(checkpoint_prefix().as_bytes());
        loop {
            let others = self.destination_page(&range, CHECKPOINTS).await?;
            check_overlap(self.identity, &others)?;
            match others.entries.last() {
                Some((last, _)) if others.has_more => range = range.after(Some(last)),
                _ => return Ok(()),
            }
        }
    }

    /// Copies all keys that the source has at the revision of the checkpoint. Returns the checkpoint after the copy, or
    /// the checkpoint of a new copy if the source has compacted the revision.
    async fn copy(&self, mut stored: Stored) -> Result<Stored, Failure> {
        let mapping = &self.identity.mapping;
        let mut sizes = (PageSize(FIRST_KEYS), PageSize(FIRST_KEYS));
        while matches!(stored.checkpoint.phase, Phase::Copying { .. }) {
            let (after, revision) = (stored.checkpoint.last_copied(), stored.checkpoint.revision);
            let range = mapping.source_range().after(after.as_deref());
            let source = (&self.source, self.from, Side::Source);
            let Some(page) = page(source, &range, revision, &mut sizes.0).await? else {
                return self.restart(&stored, CopyReason::Compacted).await;
            };
            check_source(&stored.checkpoint, (page.cluster_id, page.revision))?;
            let last = page.entries.last().filter(|_| page.has_more);
            let last = last.map(|(key, _)| key.clone());
            let range = mapping.destination_part(after.as_deref(), last.as_deref());
            let destination = (&self.destination, self.to, Side::Destination);
            let Some(existing) = self::page(destination, &range, 0, &mut sizes.1).await? else {
                continue;
            };
            let found = compare(mapping, page, existing);
            let is_put = |operation: &&Operation| matches!(operation, Operation::Put { .. });
            let written = found.operations.iter().filter(is_put).count();
            let deleted = found.operations.len() - written;
            let groups = divided(found.operations, self.ends.limits);
            let count = groups.len();
            for (index, operations) in groups.into_iter().enumerate() {
                // Only the last group advances the checkpoint. If the attempt ends before the last group, the next
                // attempt compares the same keys again.
                let next = if index + 1 == count {
                    stored.checkpoint.copied(found.up_to.as_deref())
                } else {
                    stored.checkpoint.clone()
                };
                let step = Step {
                    operations,
                    ..only_checkpoint(next)
                };
                stored = self.commit(&stored, step).await?;
            }
            self.monitor.add_copied(found.compared, written, deleted);
        }
        Ok(stored)
    }

    /// Begins a copy of all keys at the newest revision of the source.
    async fn restart(&self, stored: &Stored, reason: CopyReason) -> Result<Stored, Failure> {
        let source = self.newest().await?;
        check_source(&stored.checkpoint, source)?;
        let next = stored.checkpoint.restarted(source, reason);
        self.commit(stored, only_checkpoint(next)).await
    }

    /// Applies the changes of the source until a failure. Returns the checkpoint of a new copy if the source has
    /// compacted changes, or has sent them out of order.
    async fn follow(&self, mut stored: Stored) -> Result<Stored, Failure> {
        let from_source = |error: Error| Failure::Etcd(Side::Source, error);
        let status = self.source.status(self.from).await;
        let trusted = status.is_ok_and(|status| trusts_progress(&status.version));
        let range = self.identity.mapping.source_range();
        let revision = stored.checkpoint.revision;
        let watch = self.source.watch_range(self.from, &range, revision);
        let mut watch = watch.boxed().await.map_err(from_source)?;
        self.monitor.begin_watch();
        let mut follower = Follower::new(
            stored.checkpoint.clone(),
            self.identity.mapping.clone(),
            self.ends.limits,
            trusted,
        );
        let mut probe = interval(PROBE);
        probe.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last_record = Instant::now();
        let mut advanced = (follower.position(), Instant::now());
        loop {
            while let Some(step) = follower.next_step() {
                stored = self.commit(&stored, step.clone()).await?;
                follower.applied(&step);
                last_record = Instant::now();
            }
            if last_record.elapsed() >= IDLE_CHECKPOINT
                && let Some(step) = follower.idle()
            {
                stored = self.commit(&stored, step.clone()).await?;
                follower.applied(&step);
                last_record = Instant::now();
            }
            if self.monitor.measure(follower.position()) {
                (self.changed)();
            }
            tokio::select! {
                batch = watch.next() => match batch {
                    Ok(batch) => match follower.push(batch) {
                        Ok(()) => {}
                        Err(FollowError::OutOfOrder { .. }) => {
                            return self.restart(&stored, CopyReason::OutOfOrder).await;
                        }
                        Err(error) => return Err(error.into()),
                    },
                    Err(WatchError::Compacted { .. }) => {
                        return self.restart(&stored, CopyReason::Compacted).await;
                    }
                    Err(WatchError::Ended(error)) => return Err(from_source(error)),
                    Err(error @ WatchError::TooLarge(_)) => {
                        return Err(from_source(Error::Unavailable(error.to_string())));
                    }
                },
                _ = probe.tick() => {
                    let at = Timestamp::now();
                    let source = self.newest().await?;
                    check_source(&stored.checkpoint, source)?;
                    let (_, newest) = source;
                    self.monitor.observe(newest, at);
                    if follower.position() > advanced.0 || follower.position() >= newest {
                        advanced = (follower.position(), Instant::now());
                    } else if advanced.1.elapsed() > STALL {
                        return Err(Failure::WatchStalled);
                    }
                    // The request fails only if the connection has ended, and then `next` returns the error.
                    let _ = watch.request_progress().await;
                }
            }
        }
    }

    /// Sends a step. Returns the checkpoint that the destination stores after the step.
    async fn commit(&self, stored: &Stored, step: Step) -> Result<Stored, Failure> {
        let begins_split = step.begins_split;
        let (precondition, operations, next) = step.request(stored);
        if !self.send(&[precondition], &operations).await? {
            return Err(Failure::CheckpointChanged);
        }
        self.monitor.count_transaction(begins_split);
        self.report(&next);
        Ok(next)
    }

    async fn send(
        &self,
        preconditions: &[Precondition],
        operations: &[Operation],
    ) -> Result<bool, Failure> {
        let sent = self.destination.commit(self.to, preconditions, operations);
        let applied = sent.await;
        let applied = applied.map_err(|error| Failure::Etcd(Side::Destination, error))?;
        Ok(applied.is_some())
    }

    fn report(&self, stored: &Stored) {
        if self.monitor.reach(&stored.checkpoint) {
            (self.changed)();
        }
    }
}

/// Reads the checkpoint of a mirror. `None` if there is none.
pub(crate) async fn stored(
    destination: &EtcdClient,
    member: &str,
    uid: &str,
) -> Result<Option<Stored>, Failure> {
    let key = checkpoint_key(uid);
    let page = destination.page(member, &KeyRange::key(&key), 0, 1).await;
    let page = page.map_err(|error| Failure::of_page(Side::Destination, error))?;
    let Some((_, value)) = page.entries.into_iter().next() else {
        return Ok(None);
    };
    let Ok(stored) = Stored::parse(value) else {
        let key = String::from_utf8_lossy(&key).into_owned();
        return Err(Refusal::Unreadable { key }.into());
    };
    Ok(Some(stored))
}

/// Reads the next page. Requests fewer keys if a response is too large, or too slow for the time limit of a call.
/// `None` if the revision is compacted.
async fn page(
    (client, member, side): (&EtcdClient, &str, Side),
    range: &KeyRange,
    revision: i64,
    keys: &mut PageSize,
) -> Result<Option<KeyPage>, Failure> {
    loop {
        match client.page(member, range, revision, keys.0).await {
            Ok(page) => {
                keys.read(&page);
                return Ok(Some(page));
            }
            Err(PageError::Compacted) => return Ok(None),
            Err(PageError::TooLarge | PageError::Failed(Error::Timeout(_))) if keys.0 > 1 => {
                keys.0 = (keys.0 / 4).max(1);
            }
            Err(error) => return Err(Failure::of_page(side, error)),
        }
    }
}

/// Checks that an endpoint belongs to the EtcdCluster, because another pod may get the address of a deleted pod
/// (invariant 28).
pub(crate) fn check_cluster(side: Side, found: ClusterId, end: &End) -> Result<(), Failure> {
    match end.cluster_id {
        Some(expected) if expected != found => Err(Failure::OtherCluster {
            side,
            found,
            expected,
        }),
        _ => Ok(()),
    }
}

/// Invariant 42: the mirror copies no keys of another source without an approval. If the source is replaced during an
/// attempt, the attempt fails, and the next attempt requires the approval.
fn check_source(checkpoint: &Checkpoint, source: (ClusterId, i64)) -> Result<(), Failure> {
    if is_same_source(checkpoint, source) {
        Ok(())
    } else {
        Err(Failure::SourceChanged)
    }
}

fn only_checkpoint(next: Checkpoint) -> Step {
    Step {
        operations: Vec::new(),
        next,
        events: 0,
        begins_split: false,
    }
}
