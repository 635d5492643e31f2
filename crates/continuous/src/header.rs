//! The header of a segment. Performs no I/O.

use crate::digest::Digest;
use crate::error::SegmentError;

/// Length of a header in bytes.
pub const HEADER: usize = 140;

const MAGIC: [u8; 8] = *b"\x89ETCDSEG";
const VERSION: u32 = 1;
const NO_FLAGS: u32 = 0;

/// The properties of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The ID of the etcd cluster.
    pub cluster_id: u64,
    /// The revision of the chain's base.
    pub base_revision: i64,
    /// The first revision.
    pub first: i64,
    /// The last revision, or `first - 1` if the segment has no transaction.
    pub last: i64,
    /// The SHA-256 of the preceding object in the chain.
    pub previous: Digest,
    /// Number of records.
    pub records: u64,
    /// Length in bytes of the decompressed body.
    pub body: u64,
    /// Length in bytes of the compressed body.
    pub stored: u64,
    /// The SHA-256 of the compressed body.
    pub sha256: Digest,
}

impl Header {
    /// Encodes the header.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_be_bytes());
        bytes.extend(NO_FLAGS.to_be_bytes());
        bytes.extend(self.cluster_id.to_be_bytes());
        for revision in [self.base_revision, self.first, self.last] {
            bytes.extend(revision.to_be_bytes());
        }
        bytes.extend(self.previous.0);
        for number in [self.records, self.body, self.stored] {
            bytes.extend(number.to_be_bytes());
        }
        bytes.extend(self.sha256.0);
        let checksum = crc32c::crc32c(&bytes);
        bytes.extend(checksum.to_be_bytes());
        bytes
    }

    /// Decodes the header at the beginning of an object.
    ///
    /// # Errors
    /// Fails if the object is not a segment, or if its header is truncated, damaged or of an unknown version.
    pub fn decode(object: &[u8]) -> Result<Self, SegmentError> {
        let magic = object.get(..MAGIC.len()).unwrap_or(object);
        if !MAGIC.starts_with(magic) {
            return Err(SegmentError::NotASegment);
        }
        let header = object.get(..HEADER).ok_or(SegmentError::Truncated {
            expected: HEADER as u64,
            found: object.len() as u64,
        })?;
        let mut fields = Fields(header.get(MAGIC.len()..).unwrap_or_default());
        let (version, flags) = (fields.u32(), fields.u32());
        if version != VERSION || flags != NO_FLAGS {
            return Err(SegmentError::UnknownVersion { version, flags });
        }
        let decoded = Self {
            cluster_id: fields.u64(),
            base_revision: fields.i64(),
            first: fields.i64(),
            last: fields.i64(),
            previous: Digest(fields.take()),
            records: fields.u64(),
            body: fields.u64(),
            stored: fields.u64(),
            sha256: Digest(fields.take()),
        };
        let content = header.get(..HEADER - 4).unwrap_or_default();
        if crc32c::crc32c(content) != fields.u32() {
            return Err(SegmentError::HeaderDamaged);
        }
        let in_order = decoded.base_revision >= 0
            && decoded.first > decoded.base_revision
            && decoded.last < i64::MAX
            && decoded.last >= decoded.first - 1;
        if in_order {
            Ok(decoded)
        } else {
            Err(SegmentError::HeaderDamaged)
        }
    }
}

/// Reads fields of fixed lengths in order.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    /// Returns the next field. [`Header::decode`] has checked the length of the header, so the field is complete.
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut field = [0; N];
        let (now, later) = self.0.split_at(N.min(self.0.len()));
        for (to, from) in field.iter_mut().zip(now) {
            *to = *from;
        }
        self.0 = later;
        field
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take())
    }

    fn i64(&mut self) -> i64 {
        i64::from_be_bytes(self.take())
    }
}
