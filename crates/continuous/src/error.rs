//! The problems of a segment. Performs no I/O.

/// Why an object is not a valid segment.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// The object does not begin with the magic number.
    #[error("the object is not a segment")]
    NotASegment,
    /// The segment has a later version of the format, or unknown flags.
    #[error("the segment has version {version} and flags {flags}: use a later release to read it")]
    UnknownVersion {
        /// The version in the header.
        version: u32,
        /// The flags in the header.
        flags: u32,
    },
    /// The object is shorter than a header, or shorter than its header states.
    #[error("the segment is truncated: it has {found} of {expected} bytes")]
    Truncated {
        /// Number of bytes that the object must have.
        expected: u64,
        /// Number of bytes that the object has.
        found: u64,
    },
    /// The object is longer than its header states.
    #[error("the segment has {found} bytes, but its header records {expected}")]
    TooLong {
        /// Number of bytes that the object must have.
        expected: u64,
        /// Number of bytes that the object has.
        found: u64,
    },
    /// The header's checksum does not match, or its revisions contradict each other.
    #[error("the header of the segment is damaged")]
    HeaderDamaged,
    /// The body's SHA-256 does not match, or the body cannot be decompressed.
    #[error("the body of the segment is damaged: {0}")]
    BodyDamaged(&'static str),
    /// A record is damaged, or breaks a rule of the format.
    #[error("record {index} of the segment is damaged: {problem}")]
    RecordDamaged {
        /// Index of the record in the segment. The first record has the index 0.
        index: u64,
        /// The problem.
        problem: &'static str,
    },
    /// A length exceeds a limit of the format.
    #[error("the segment exceeds the limit of {limit} bytes")]
    TooLarge {
        /// The limit in bytes.
        limit: usize,
    },
    /// A transaction does not have the next revision.
    #[error("the segment has revision {found} where revision {expected} must follow")]
    WrongRevision {
        /// The revision that must follow.
        expected: i64,
        /// The revision of the transaction, or the last revision in the header.
        found: i64,
    },
}
