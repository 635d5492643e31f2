//! Finds the chain of a base by the names of its segments. Performs no I/O.
//!
//! The name of a segment contains the beginning of its own SHA-256 and of its predecessor's SHA-256. When the objects
//! are read, [`Verifier`](crate::Verifier) compares the whole SHA-256.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use crate::digest::ShortDigest;
use crate::name::{BaseName, SegmentName};

/// A problem with the objects of a base.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainFault {
    /// At least one segment is missing.
    #[error("the segments between the revisions {after} and {next} are missing")]
    Missing {
        /// The last revision before the missing segments.
        after: i64,
        /// The first revision after the missing segments.
        next: i64,
    },
    /// A segment repeats revisions of the object before it.
    #[error("segment {name} overlaps the object before it, which ends at revision {last}")]
    Overlapping {
        /// The segment.
        name: SegmentName,
        /// The last revision of the object before the segment.
        last: i64,
    },
    /// The object that the segment names as its predecessor is missing, but no revision before the segment is missing.
    #[error("segment {0} does not belong to the chain of this base")]
    Unlinked(SegmentName),
    /// Two names have the same SHA-256, or a name appears twice.
    #[error("segment {0} exists twice")]
    Duplicate(SegmentName),
}

/// The chain of a base, with the problems of the base's segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The segments of the chain in their order.
    pub segments: Vec<SegmentName>,
    /// Segments of concurrent recorders that are not in `segments`. The chain contains the revisions of these segments.
    pub branches: Vec<SegmentName>,
    /// The problems of the segments. The chain is usable up to its last revision.
    pub faults: Vec<ChainFault>,
    /// The last revision of the chain.
    pub last: i64,
}

/// Why the chain does not contain a requested revision.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// The revision is before the base.
    #[error("revision {requested} is before the base, which has revision {base}")]
    BeforeBase {
        /// The requested revision.
        requested: i64,
        /// The revision of the base.
        base: i64,
    },
    /// The chain ends before the revision.
    #[error("revision {requested} is not in the chain, which ends at revision {last}{}", cause(.faults))]
    AfterEnd {
        /// The requested revision.
        requested: i64,
        /// The last revision of the chain.
        last: i64,
        /// The problems of the objects.
        faults: Vec<ChainFault>,
    },
}

fn cause(faults: &[ChainFault]) -> String {
    let texts = faults.iter().map(|fault| format!("; {fault}"));
    texts.collect()
}

impl Chain {
    /// Finds the chain of a base. Concurrent recorders can write several branches. The chain is the branch with the
    /// highest revision. If branches have the same revision, the chain is the branch with the most segments, and then
    /// the branch with the smallest name of its last segment.
    pub fn find(base: BaseName, names: &[SegmentName]) -> Self {
        let mut faults = Vec::new();
        let names = without_duplicates(names, &mut faults);
        let walked = Walk::from_base(base, &names, &mut faults);
        let best = walked.best(&names);
        let last = best.map_or(base.revision, |best| {
            names.get(best).map_or(0, |it| it.last)
        });
        let mut on_path: Vec<usize> = Vec::new();
        let mut next = best;
        while let Some(index) = next {
            on_path.push(index);
            next = walked.parent(index);
        }
        on_path.reverse();
        let pick = |indices: &mut dyn Iterator<Item = usize>| -> Vec<SegmentName> {
            indices
                .filter_map(|index| names.get(index).copied())
                .collect()
        };
        let path: HashSet<usize> = on_path.iter().copied().collect();
        let reached = |index: &usize| walked.reached.contains_key(index);
        let mut branches = (0..names.len()).filter(|it| reached(it) && !path.contains(it));
        let branches = pick(&mut branches);
        faults.extend(walked.unlinked(base, &names, last));
        Self {
            segments: pick(&mut on_path.iter().copied()),
            branches,
            faults,
            last,
        }
    }

    /// Checks that the chain of this base contains the revision.
    ///
    /// # Errors
    /// Fails if the revision is before the base or after the end of the chain.
    pub fn check(&self, base: BaseName, requested: i64) -> Result<(), RangeError> {
        if requested < base.revision {
            return Err(RangeError::BeforeBase {
                requested,
                base: base.revision,
            });
        }
        if requested > self.last {
            return Err(RangeError::AfterEnd {
                requested,
                last: self.last,
                faults: self.faults.clone(),
            });
        }
        Ok(())
    }
}

/// Sorts the names. Of several names with the same digest, keeps only one.
fn without_duplicates(names: &[SegmentName], faults: &mut Vec<ChainFault>) -> Vec<SegmentName> {
    let mut sorted = names.to_vec();
    sorted.sort();
    let mut digests = HashSet::new();
    sorted.retain(|name| {
        let is_new = digests.insert(name.digest);
        if !is_new {
            faults.push(ChainFault::Duplicate(*name));
        }
        is_new
    });
    sorted
}

/// A segment that a walk from the base has reached.
struct Reached {
    parent: Option<usize>,
    depth: usize,
}

/// The segments that the base leads to, directly or through other segments.
struct Walk {
    reached: HashMap<usize, Reached>,
    /// Segments that name the base or a reached segment as their predecessor, but do not begin with the next revision.
    rejected: HashSet<usize>,
}

impl Walk {
    fn from_base(base: BaseName, names: &[SegmentName], faults: &mut Vec<ChainFault>) -> Self {
        let mut children: HashMap<ShortDigest, Vec<usize>> = HashMap::new();
        for (index, name) in names.iter().enumerate() {
            children.entry(name.previous).or_default().push(index);
        }
        let mut walk = Self {
            reached: HashMap::new(),
            rejected: HashSet::new(),
        };
        let mut waiting = vec![(base.digest, base.revision, None, 0)];
        while let Some((digest, last, parent, depth)) = waiting.pop() {
            for index in children.get(&digest).into_iter().flatten().copied() {
                let Some(name) = names.get(index) else {
                    continue;
                };
                if walk.reached.contains_key(&index) {
                    continue;
                }
                if name.first != last + 1 {
                    walk.rejected.insert(index);
                    faults.push(if name.first > last {
                        ChainFault::Missing {
                            after: last,
                            next: name.first,
                        }
                    } else {
                        ChainFault::Overlapping { name: *name, last }
                    });
                    continue;
                }
                let depth = depth + 1;
                walk.reached.insert(index, Reached { parent, depth });
                waiting.push((name.digest, name.last, Some(index), depth));
            }
        }
        walk
    }

    fn parent(&self, index: usize) -> Option<usize> {
        self.reached.get(&index)?.parent
    }

    /// The last segment of the branch that becomes the chain.
    fn best(&self, names: &[SegmentName]) -> Option<usize> {
        let rank = |(index, reached): &(&usize, &Reached)| {
            let name = names.get(**index);
            (name.map(|name| name.last), reached.depth, Reverse(name))
        };
        self.reached
            .iter()
            .max_by_key(rank)
            .map(|(index, _)| *index)
    }

    /// The problems of segments that the base does not lead to. `last` is the last revision of the chain.
    fn unlinked(&self, base: BaseName, names: &[SegmentName], last: i64) -> Vec<ChainFault> {
        let is_unreached =
            |index: &usize| !self.reached.contains_key(index) && !self.rejected.contains(index);
        let unreached: Vec<SegmentName> = (0..names.len())
            .filter(is_unreached)
            .filter_map(|index| names.get(index).copied())
            .collect();
        let known: HashSet<ShortDigest> = names.iter().map(|name| name.digest).collect();
        // `roots` contains only the first of several consecutive segments, because the other segments are unreached
        // for the same reason.
        let mut roots: Vec<SegmentName> = unreached
            .iter()
            .copied()
            .filter(|name| !known.contains(&name.previous) && name.previous != base.digest)
            .collect();
        if roots.is_empty() && self.rejected.is_empty() {
            roots.extend(unreached.first());
        }
        let missing = roots.iter().filter(|name| name.first > last + 1);
        let missing = missing.map(|name| name.first).min();
        let missing = missing.map(|next| ChainFault::Missing { after: last, next });
        let unlinked = roots.iter().filter(|name| name.first <= last + 1);
        let unlinked = unlinked.map(|name| ChainFault::Unlinked(*name));
        missing.into_iter().chain(unlinked).collect()
    }
}

#[cfg(test)]
mod tests;
