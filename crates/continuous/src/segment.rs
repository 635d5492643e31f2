//! Encodes and decodes whole segments, as specified in docs/internals/continuous-format.md. Performs no I/O.

mod decode;
mod scan;

use std::io;

use bytes::Bytes;
use store::compression::Compressor;

use crate::digest::Digest;
use crate::header::{HEADER, Header};
use crate::message;
use crate::name::SegmentName;
use crate::record::Record;
pub(crate) use scan::{Scanner, Times};

/// Maximum length in bytes of the message of a record.
pub const MAX_MESSAGE: usize = 36 << 20;

/// Maximum length in bytes of a decompressed body.
pub const MAX_BODY: usize = 44 << 20;

/// Maximum number of records in a segment.
pub(crate) const MAX_RECORDS: u64 = 1 << 18;

/// Length in bytes of the two fields before a message: the length of the message and its checksum.
pub(crate) const FRAME: usize = 8;

/// A decoded segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The header.
    pub header: Header,
    /// The SHA-256 of the whole object.
    pub digest: Digest,
    /// The records, in order.
    pub records: Vec<Record>,
}

/// A complete segment, ready to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// The name of the object in the directory of the base.
    pub name: SegmentName,
    /// The SHA-256 of the object.
    pub digest: Digest,
    /// The object.
    pub object: Bytes,
}

/// The fields of a header that do not depend on the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) cluster_id: u64,
    pub(crate) base_revision: i64,
    pub(crate) first: i64,
    pub(crate) previous: Digest,
}

/// A segment that is being written. It compresses each record when the record is added.
pub(crate) struct SegmentBuilder {
    identity: Identity,
    last: i64,
    compressor: Compressor,
    stored: Vec<u8>,
    body: u64,
    records: u64,
}

impl SegmentBuilder {
    pub(crate) fn new(identity: Identity) -> io::Result<Self> {
        Ok(Self {
            identity,
            last: identity.first - 1,
            compressor: Compressor::new()?,
            stored: vec![0; HEADER],
            body: 0,
            records: 0,
        })
    }

    /// Whether a record fits into the segment. `length` is the length of the record with its frame, and `limit` the
    /// maximum length of the body. An empty segment accepts every record.
    pub(crate) fn has_room(&self, length: u64, limit: u64) -> bool {
        self.records == 0
            || (self.records < MAX_RECORDS && self.body.saturating_add(length) <= limit)
    }

    /// Adds an encoded record. `revision` is the revision of a transaction, or `None` if the record is not a
    /// transaction.
    pub(crate) fn push(&mut self, message: &[u8], revision: Option<i64>) -> io::Result<()> {
        let length = u32::try_from(message.len())
            .map_err(|_| io::Error::other("the record exceeds 4 GiB"))?;
        let mut frame = Vec::with_capacity(FRAME);
        frame.extend(length.to_be_bytes());
        frame.extend(crc32c::crc32c(message).to_be_bytes());
        for part in [frame.as_slice(), message] {
            let stored = &mut self.stored;
            self.compressor
                .push(part, |piece| stored.extend_from_slice(piece))?;
            self.body += part.len() as u64;
        }
        self.records += 1;
        self.last = revision.unwrap_or(self.last);
        Ok(())
    }

    pub(crate) fn seal(self) -> io::Result<Sealed> {
        let mut stored = self.stored;
        self.compressor
            .finish(|piece| stored.extend_from_slice(piece))?;
        let body = stored.get(HEADER..).unwrap_or_default();
        let header = Header {
            cluster_id: self.identity.cluster_id,
            base_revision: self.identity.base_revision,
            first: self.identity.first,
            last: self.last,
            previous: self.identity.previous,
            records: self.records,
            body: self.body,
            stored: body.len() as u64,
            sha256: Digest::of(body),
        };
        for (to, from) in stored.iter_mut().zip(header.encode()) {
            *to = from;
        }
        let digest = Digest::of(&stored);
        Ok(Sealed {
            name: SegmentName {
                first: header.first,
                last: header.last,
                previous: header.previous.short(),
                digest: digest.short(),
            },
            digest,
            object: stored.into(),
        })
    }
}

/// Encodes a record as the message of a segment.
pub(crate) fn encoded(record: &Record) -> Vec<u8> {
    message::encode(record)
}

#[cfg(test)]
mod tests;
