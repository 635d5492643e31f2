//! Finds the revision, the base and the segments of a requested point, before a restore changes anything.
//!
//! A point is only found if the stored chains prove the state at this point (invariant 38). Otherwise the error names
//! the nearest points.

use etcd::ClusterId;
use futures::future::join_all;
use store::Store;

use crate::base::{BaseKey, StoredBase};
use crate::chain::ChainFault;
use crate::locate::in_chain;
use crate::name::{BaseName, SegmentName};
use crate::record::{Gap, GapReason, Moment};
use crate::stored::{ReadError, SizedChain, bases, read_own_base, read_times};

/// Maximum number of bases in a search. A recorder with the shortest `maxBaseAge` (10 minutes) and the longest
/// `retentionWindow` (8,760 hours) keeps 52,560 bases.
const MAX_BASES: usize = 60_000;

/// Number of bases that are read concurrently. Each has up to 64 KiB ([`MAX_BASE`](crate::MAX_BASE)).
const CONCURRENT: usize = 16;

/// A requested point in the recorded history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// The state at this time, in microseconds since the epoch.
    Time(i64),
    /// The state at this revision.
    Revision(i64),
    /// The newest recorded state.
    Latest,
}

/// The objects from which a point is restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundPoint {
    /// The base.
    pub base: StoredBase,
    /// The revision, and the time at which the recorder received it.
    pub at: Moment,
    /// Number of segments between the base and the point.
    pub segments: u64,
    /// Size of these segments in bytes.
    pub bytes: u64,
}

/// Why a point cannot be restored exactly.
#[derive(Debug, thiserror::Error)]
pub enum PointError {
    /// The store fails, or an object is damaged.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// No base is stored.
    #[error("the store has no base of a continuous backup")]
    NoBase,
    /// The store has more bases than a search reads.
    #[error("the store has more than {limit} bases of a continuous backup")]
    TooManyBases {
        /// The maximum number of bases.
        limit: usize,
    },
    /// The point is before the oldest base.
    #[error("the point is before the oldest base, which has revision {}", .0.revision)]
    BeforeOldest(Moment),
    /// The point is after the newest recorded change.
    #[error("the point is after the newest recorded change, which has revision {}", .0.revision)]
    AfterNewest(Moment),
    /// Changes are missing at this point.
    #[error("changes between the revisions {} and {} are missing", .before.revision, .after.revision)]
    InGap {
        /// The last point before the missing changes.
        before: Moment,
        /// The first point after the missing changes.
        after: Moment,
    },
    /// Segments that the point needs are missing.
    #[error("the chain is broken after revision {}{}", .last.revision, texts(.faults))]
    Broken {
        /// The last point of the usable chain.
        last: Moment,
        /// The problems of the chain.
        faults: Vec<ChainFault>,
    },
    /// The point is in a chain that is not encrypted, but the restore requires encryption.
    #[error("the base with revision {} is not encrypted", .0.revision)]
    NotEncrypted(Moment),
    /// The point is in an encrypted chain, but the restore has no keys.
    #[error("the base is encrypted with the key {:?} (ID {})", .0.name, .0.id)]
    Encrypted(BaseKey),
    /// Several clusters have this revision, because the recorded cluster was restored.
    #[error("the clusters {first} and {second} both have this revision")]
    Ambiguous {
        /// A cluster with this revision.
        first: ClusterId,
        /// The time of the revision in the cluster `first`, in microseconds since the epoch.
        first_time: i64,
        /// Another cluster with this revision.
        second: ClusterId,
        /// The time of the revision in the cluster `second`, in microseconds since the epoch.
        second_time: i64,
    },
}

fn texts(faults: &[ChainFault]) -> String {
    let texts = faults.iter().map(|fault| format!("; {fault}"));
    texts.collect()
}

/// Finds a point. All changes before `complete`, a time in microseconds since the epoch, are known to be in the store.
/// With `None`, only the stored chains prove which changes exist. `prefix` is empty or ends with a slash.
///
/// With `requires_encryption`, the point must be in an encrypted chain, because another writer could have added a chain
/// without encryption. Bases without encryption are then ignored if they are older than the oldest encrypted base: the
/// recorder has taken them before its encryption was turned on.
///
/// The snapshots of all bases must be under `prefix`. The search does not read most segments, because the copy of the
/// chain and the replay verify all of them later.
///
/// # Errors
/// Fails if the store fails, or if the stored chains do not prove the state at this point.
pub async fn find_point(
    store: &dyn Store,
    prefix: &str,
    point: Point,
    complete: Option<i64>,
    requires_encryption: bool,
) -> Result<FoundPoint, PointError> {
    let search = Search {
        store,
        prefix,
        requires_encryption,
        bases: known_bases(store, prefix, MAX_BASES, requires_encryption).await?,
    };
    match point {
        Point::Time(time) => search.time(time, complete).await,
        Point::Revision(revision) => search.revision(revision).await,
        Point::Latest => search.latest().await,
    }
}

struct Search<'a> {
    store: &'a dyn Store,
    prefix: &'a str,
    requires_encryption: bool,
    /// All bases, in the order of their times.
    bases: Vec<KnownBase>,
}

/// The properties of a base that a search compares.
///
/// A tenant can store many bases with long texts (invariant 15). A search therefore keeps only 32 bytes of each base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KnownBase {
    /// The name, which contains the revision.
    name: BaseName,
    cluster_id: ClusterId,
    created: i64,
}

/// Reads all bases, in the order of their times. Fails if the store has more than `limit` bases. With
/// `requires_encryption`, ignores the bases without encryption that are older than all encrypted bases.
async fn known_bases(
    store: &dyn Store,
    prefix: &str,
    limit: usize,
    requires_encryption: bool,
) -> Result<Vec<KnownBase>, PointError> {
    let names = bases(store, prefix).await?;
    if names.len() > limit {
        return Err(PointError::TooManyBases { limit });
    }
    let mut known = Vec::with_capacity(names.len());
    let mut oldest_encrypted: Option<i64> = None;
    for chunk in names.chunks(CONCURRENT) {
        let reads: Vec<_> = chunk
            .iter()
            .map(|name| read_own_base(store, prefix, *name))
            .collect();
        for base in join_all(reads).await {
            let StoredBase { base, name, .. } = base?;
            let created = base.created;
            if base.encryption.is_some() {
                let oldest = oldest_encrypted.unwrap_or(created);
                oldest_encrypted = Some(oldest.min(created));
            }
            known.push(KnownBase {
                name,
                cluster_id: base.cluster_id,
                created,
            });
        }
    }
    if requires_encryption && let Some(oldest) = oldest_encrypted {
        known.retain(|base| base.created >= oldest);
    }
    known.sort_by_key(|base| (base.created, base.name.revision));
    Ok(known)
}

fn start(base: &KnownBase) -> Moment {
    Moment {
        revision: base.name.revision,
        time: base.created,
    }
}

fn is_same_cluster(one: &KnownBase, other: &KnownBase) -> bool {
    one.cluster_id == other.cluster_id
}

impl Search<'_> {
    async fn found(
        &self,
        base: &KnownBase,
        listed: &SizedChain,
        at: Moment,
    ) -> Result<FoundPoint, PointError> {
        let needed = listed.needed(at.revision);
        let found = read_own_base(self.store, self.prefix, base.name).await?;
        match &found.base.encryption {
            None if self.requires_encryption => return Err(PointError::NotEncrypted(start(base))),
            Some(encryption) if !self.requires_encryption => {
                return Err(PointError::Encrypted(encryption.key.clone()));
            }
            _ => {}
        }
        Ok(FoundPoint {
            base: found,
            at,
            segments: needed.len() as u64,
            bytes: listed.bytes(&needed),
        })
    }

    async fn list(&self, base: &KnownBase) -> Result<SizedChain, ReadError> {
        SizedChain::list(self.store, self.prefix, base.name).await
    }

    /// The time of a revision in the chain of a base.
    async fn moment(
        &self,
        base: &KnownBase,
        listed: &SizedChain,
        revision: i64,
    ) -> Result<Moment, ReadError> {
        let contains = |name: &&SegmentName| (name.first..=name.last).contains(&revision);
        let Some(name) = listed.chain.segments.iter().find(contains) else {
            return Ok(start(base));
        };
        let times = read_times(self.store, self.prefix, base.name, *name).await?;
        let at = times.transactions.iter().find(|at| at.revision == revision);
        Ok(at.copied().unwrap_or(Moment {
            revision,
            time: base.created,
        }))
    }

    async fn end(&self, base: &KnownBase, listed: &SizedChain) -> Result<Moment, ReadError> {
        self.moment(base, listed, listed.chain.last).await
    }

    /// The base that precedes the base `index` in time, if both belong to the same cluster. The chain of the preceding
    /// base continues until the recorder has taken the next base, so this chain can contain later revisions than the
    /// chain of the next base.
    fn previous(&self, index: usize) -> Option<&KnownBase> {
        let base = self.bases.get(index)?;
        let previous = self.bases.get(index.checked_sub(1)?)?;
        is_same_cluster(base, previous).then_some(previous)
    }

    /// True if the data of etcd was restored after this chain, so that later chains have another history.
    async fn ends_with_reset(
        &self,
        base: &KnownBase,
        listed: &SizedChain,
    ) -> Result<bool, ReadError> {
        let Some(name) = listed.chain.segments.last() else {
            return Ok(false);
        };
        let times = read_times(self.store, self.prefix, base.name, *name).await?;
        let reset = |gap: Gap| gap.reason == GapReason::RevisionReset;
        Ok(times.gap.is_some_and(reset))
    }

    async fn latest(&self) -> Result<FoundPoint, PointError> {
        let base = self.bases.last().ok_or(PointError::NoBase)?;
        let listed = self.list(base).await?;
        let (mut chosen, mut faults) = ((base, listed), Vec::new());
        if let Some(previous) = self.previous(self.bases.len() - 1) {
            let older = self.list(previous).await?;
            let last = chosen.1.chain.last;
            if older.chain.last > last && !self.ends_with_reset(previous, &older).await? {
                faults.extend(chosen.1.chain.faults);
                chosen = (previous, older);
            } else {
                // The newer chain ends at the revision `last`. A missing segment of the older chain is a fault only if
                // the first revision after this segment (`next`) is greater than `last`.
                let is_later = |fault: &ChainFault| matches!(fault, ChainFault::Missing { next, .. } if *next > last);
                faults.extend(older.chain.faults.into_iter().filter(is_later));
            }
        }
        let (base, listed) = chosen;
        faults.extend(listed.chain.faults.iter().copied());
        let last = self.end(base, &listed).await?;
        if faults.is_empty() {
            self.found(base, &listed, last).await
        } else {
            Err(PointError::Broken { last, faults })
        }
    }

    async fn revision(&self, revision: i64) -> Result<FoundPoint, PointError> {
        let mut by_revision: Vec<&KnownBase> = self.bases.iter().collect();
        by_revision.sort_by_key(|base| (base.name.revision, base.created));
        let oldest = by_revision.first().ok_or(PointError::NoBase)?;
        if revision < oldest.name.revision {
            return Err(PointError::BeforeOldest(start(oldest)));
        }
        let count = by_revision.partition_point(|base| base.name.revision <= revision);
        let (before, after) = by_revision.split_at(count);
        let mut chosen: Option<(&KnownBase, FoundPoint)> = None;
        let mut nearest: Option<(&KnownBase, SizedChain)> = None;
        for base in before.iter().rev().copied() {
            if chosen
                .as_ref()
                .is_some_and(|(it, _)| is_same_cluster(it, base))
            {
                continue;
            }
            let listed = self.list(base).await?;
            if listed.chain.check(base.name, revision).is_ok() {
                let at = self.moment(base, &listed, revision).await?;
                if let Some((first, point)) = &chosen {
                    return Err(PointError::Ambiguous {
                        first: first.cluster_id,
                        first_time: point.at.time,
                        second: base.cluster_id,
                        second_time: at.time,
                    });
                }
                chosen = Some((base, self.found(base, &listed, at).await?));
            } else if nearest
                .as_ref()
                .is_none_or(|(_, it)| it.chain.last < listed.chain.last)
            {
                nearest = Some((base, listed));
            }
        }
        if let Some((_, point)) = chosen {
            return Ok(point);
        }
        let (base, listed) = nearest.ok_or(PointError::NoBase)?;
        let last = self.end(base, &listed).await?;
        let faults = listed.chain.faults;
        Err(match after.first() {
            _ if !faults.is_empty() => PointError::Broken { last, faults },
            Some(after) => PointError::InGap {
                before: last,
                after: start(after),
            },
            None => PointError::AfterNewest(last),
        })
    }

    async fn time(&self, time: i64, complete: Option<i64>) -> Result<FoundPoint, PointError> {
        let oldest = self.bases.first().ok_or(PointError::NoBase)?;
        let count = self.bases.partition_point(|base| base.created <= time);
        let index = count.checked_sub(1);
        let Some((index, base)) = index.and_then(|at| Some((at, self.bases.get(at)?))) else {
            return Err(PointError::BeforeOldest(start(oldest)));
        };
        let listed = self.list(base).await?;
        let segments = &listed.chain.segments;
        let begin = (base.name, start(base));
        let located = in_chain(self.store, self.prefix, begin, segments, time).await?;
        let mut at = Moment {
            revision: located.revision,
            time: located.observed,
        };
        let (mut is_last, mut has_gap) = (located.is_last, located.gap.is_some());
        let mut chosen = (base, listed);
        if let Some(previous) = self.previous(index) {
            let older = self.list(previous).await?;
            if older.chain.last > at.revision && !self.ends_with_reset(previous, &older).await? {
                let (begin, segments) = ((previous.name, start(previous)), &older.chain.segments);
                let found = in_chain(self.store, self.prefix, begin, segments, time).await?;
                if found.revision >= at.revision {
                    is_last &= found.is_last;
                }
                if found.revision > at.revision {
                    at = Moment {
                        revision: found.revision,
                        time: found.observed,
                    };
                    has_gap |= found.gap.is_some();
                    // If both chains contain the revision, the newer base is used, because its replay is shorter.
                    if chosen.1.chain.last < at.revision {
                        chosen = (previous, older);
                    }
                }
            }
        }
        let (base, listed) = chosen;
        let next = self.bases.get(count);
        let is_equal =
            |next: &KnownBase| is_same_cluster(base, next) && next.name.revision == at.revision;
        let is_complete = !has_gap && complete.is_some_and(|complete| time <= complete);
        match next {
            _ if !is_last => self.found(base, &listed, at).await,
            _ if !listed.chain.faults.is_empty() => Err(PointError::Broken {
                last: at,
                faults: listed.chain.faults,
            }),
            Some(next) if is_equal(next) => self.found(base, &listed, at).await,
            Some(next) => Err(PointError::InGap {
                before: at,
                after: start(next),
            }),
            None if is_complete => self.found(base, &listed, at).await,
            None => Err(PointError::AfterNewest(at)),
        }
    }
}

#[cfg(test)]
mod tests;
