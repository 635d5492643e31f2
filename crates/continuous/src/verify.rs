//! Verifies the segments of a chain in order. Performs no I/O.

use crate::base::StoredBase;
use crate::digest::Digest;
use crate::error::SegmentError;
use crate::name::SegmentName;
use crate::record::Record;
use crate::segment::Segment;

/// Why an object does not continue a chain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    /// The object is no valid segment.
    #[error("segment {name} is not valid")]
    Invalid {
        /// The segment.
        name: SegmentName,
        /// The problem.
        #[source]
        error: SegmentError,
    },
    /// The object is a valid segment, but its name belongs to another segment.
    #[error("the object with the name {name} contains another segment")]
    Misnamed {
        /// The name of the object.
        name: SegmentName,
    },
    /// The segment belongs to another etcd cluster.
    #[error(
        "segment {name} belongs to cluster {found:x}, and the base belongs to cluster {expected:x}"
    )]
    ForeignCluster {
        /// The segment.
        name: SegmentName,
        /// The cluster ID of the base.
        expected: u64,
        /// The cluster ID of the segment.
        found: u64,
    },
    /// The segment belongs to another base of the same cluster.
    #[error("segment {name} belongs to a base with revision {found}, and not {expected}")]
    OtherBase {
        /// The segment.
        name: SegmentName,
        /// The revision of the base.
        expected: i64,
        /// The revision of the segment's base.
        found: i64,
    },
    /// Revisions between two segments are missing.
    #[error("the segments between revision {last} and segment {name} are missing")]
    Missing {
        /// The segment.
        name: SegmentName,
        /// The last revision before the missing segments.
        last: i64,
    },
    /// The same segment was already read.
    #[error("segment {name} was already read")]
    Duplicate {
        /// The segment.
        name: SegmentName,
    },
    /// The segment contains revisions that were already read.
    #[error("segment {name} overlaps the preceding segment, which ends at revision {last}")]
    Overlapping {
        /// The segment.
        name: SegmentName,
        /// The last revision before the segment.
        last: i64,
    },
    /// The segment names another object as its predecessor.
    #[error("segment {name} continues the object {found}, and not {expected}")]
    NotLinked {
        /// The segment.
        name: SegmentName,
        /// The SHA-256 of the preceding object.
        expected: Digest,
        /// The SHA-256 that the segment's header contains.
        found: Digest,
    },
    /// The segment follows a gap.
    #[error("segment {name} follows a gap, which ends the chain")]
    AfterGap {
        /// The segment.
        name: SegmentName,
    },
}

/// Verifies the segments of one chain in order.
#[derive(Clone, Debug)]
pub struct Verifier {
    cluster_id: u64,
    base_revision: i64,
    last: i64,
    digest: Digest,
    has_ended: bool,
}

impl Verifier {
    /// Begins with the first segment after the base.
    pub fn new(base: &StoredBase) -> Self {
        Self {
            cluster_id: base.base.cluster_id.0,
            base_revision: base.base.revision,
            last: base.base.revision,
            digest: base.digest,
            has_ended: false,
        }
    }

    /// The last verified revision.
    pub fn last(&self) -> i64 {
        self.last
    }

    /// Verifies the next segment and returns its content.
    ///
    /// # Errors
    /// Fails if the object does not continue the chain. The verifier then stays unchanged.
    pub fn check(&mut self, name: SegmentName, object: &[u8]) -> Result<Segment, VerifyError> {
        let segment =
            Segment::decode(object).map_err(|error| VerifyError::Invalid { name, error })?;
        let header = &segment.header;
        if header.cluster_id != self.cluster_id {
            return Err(VerifyError::ForeignCluster {
                name,
                expected: self.cluster_id,
                found: header.cluster_id,
            });
        }
        if header.base_revision != self.base_revision {
            return Err(VerifyError::OtherBase {
                name,
                expected: self.base_revision,
                found: header.base_revision,
            });
        }
        let content = SegmentName {
            first: header.first,
            last: header.last,
            previous: header.previous.short(),
            digest: segment.digest.short(),
        };
        if content != name {
            return Err(VerifyError::Misnamed { name });
        }
        let last = self.last;
        if header.first > last + 1 {
            return Err(VerifyError::Missing { name, last });
        }
        if segment.digest == self.digest {
            return Err(VerifyError::Duplicate { name });
        }
        if header.first <= last {
            return Err(VerifyError::Overlapping { name, last });
        }
        if header.previous != self.digest {
            return Err(VerifyError::NotLinked {
                name,
                expected: self.digest,
                found: header.previous,
            });
        }
        if self.has_ended {
            return Err(VerifyError::AfterGap { name });
        }
        self.last = header.last;
        self.digest = segment.digest;
        self.has_ended = matches!(segment.records.last(), Some(Record::Gap(_)));
        Ok(segment)
    }
}

#[cfg(test)]
mod tests;
