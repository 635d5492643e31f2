//! Decodes and checks a segment.

use bytes::{Buf, Bytes, BytesMut};
use store::compression::{BEGINNING, Decompressor, is_zstd};

use super::{FRAME, MAX_BODY, MAX_MESSAGE, MAX_RECORDS, Segment};
use crate::digest::Digest;
use crate::error::SegmentError;
use crate::header::{HEADER, Header};
use crate::message;
use crate::record::{Outline, Record};

impl Segment {
    /// Decodes an object, and checks its checksums, lengths and revisions.
    ///
    /// # Errors
    /// Fails if the object is not a complete and valid segment.
    pub fn decode(object: &[u8]) -> Result<Self, SegmentError> {
        let header = Header::decode(object)?;
        let found = object.len() as u64;
        let expected = (HEADER as u64).saturating_add(header.stored);
        if found < expected {
            return Err(SegmentError::Truncated { expected, found });
        }
        if found > expected {
            return Err(SegmentError::TooLong { expected, found });
        }
        let stored = object.get(HEADER..).unwrap_or_default();
        if Digest::of(stored) != header.sha256 {
            return Err(SegmentError::BodyDamaged("its SHA-256 does not match"));
        }
        let body = decompressed(stored, header.body)?;
        let records = records(body, &header)?;
        Ok(Self {
            header,
            digest: Digest::of(object),
            records,
        })
    }
}

/// Decompresses a body of `length` bytes.
fn decompressed(stored: &[u8], length: u64) -> Result<Bytes, SegmentError> {
    const NO_ZSTD: SegmentError = SegmentError::BodyDamaged("it cannot be decompressed");
    const OTHER_LENGTH: SegmentError = SegmentError::BodyDamaged("its length does not match");
    let length = usize::try_from(length)
        .ok()
        .filter(|length| *length <= MAX_BODY)
        .ok_or(SegmentError::TooLarge { limit: MAX_BODY })?;
    if !is_zstd(stored.get(..BEGINNING).unwrap_or_default()) {
        return Err(NO_ZSTD);
    }
    // The buffer grows with the decompressed data. It is not allocated with `length`, because a damaged header can
    // contain any length.
    let mut body = BytesMut::new();
    let mut decompressor = Decompressor::new().map_err(|_| NO_ZSTD)?;
    let mut rest = stored;
    while let Some(piece) = decompressor.next(&mut rest).map_err(|_| NO_ZSTD)? {
        if body.len() + piece.len() > length {
            return Err(OTHER_LENGTH);
        }
        body.extend_from_slice(piece);
    }
    decompressor.finish().map_err(|_| NO_ZSTD)?;
    if body.len() == length {
        Ok(body.freeze())
    } else {
        Err(OTHER_LENGTH)
    }
}

/// Splits the body into records, and checks the rules for their order.
fn records(mut body: Bytes, header: &Header) -> Result<Vec<Record>, SegmentError> {
    let mut order = Order::new(header)?;
    let mut records: Vec<Record> = Vec::new();
    while body.has_remaining() {
        order.begin()?;
        let record = record(&mut body).map_err(|error| match error {
            FrameError::TooLarge => SegmentError::TooLarge { limit: MAX_MESSAGE },
            FrameError::Damaged(problem) => order.damaged(problem),
        })?;
        order.add((&record).into())?;
        records.push(record);
    }
    order.finish()?;
    Ok(records)
}

/// Checks the number and the order of the records of a segment.
pub(super) struct Order {
    header: Header,
    /// Number of records so far.
    count: u64,
    /// The revision that the next transaction must have.
    next: i64,
    has_ended: bool,
}

impl Order {
    const OTHER_NUMBER: SegmentError =
        SegmentError::BodyDamaged("its number of records does not match");

    pub(super) fn new(header: &Header) -> Result<Self, SegmentError> {
        if header.records > MAX_RECORDS {
            return Err(SegmentError::BodyDamaged("it has too many records"));
        }
        Ok(Self {
            header: *header,
            count: 0,
            next: header.first,
            has_ended: false,
        })
    }

    /// Fails if no further record may follow.
    pub(super) fn begin(&self) -> Result<(), SegmentError> {
        if self.count == self.header.records {
            return Err(Self::OTHER_NUMBER);
        }
        if self.has_ended {
            return Err(self.damaged("it follows the record of a gap"));
        }
        Ok(())
    }

    /// The error for a problem of the current record.
    pub(super) fn damaged(&self, problem: &'static str) -> SegmentError {
        SegmentError::RecordDamaged {
            index: self.count,
            problem,
        }
    }

    pub(super) fn add(&mut self, record: Outline) -> Result<(), SegmentError> {
        match record {
            Outline::Transaction(at) => {
                if at.revision != self.next {
                    return Err(SegmentError::WrongRevision {
                        expected: self.next,
                        found: at.revision,
                    });
                }
                self.next = self.next.saturating_add(1);
            }
            Outline::Gap(gap) => {
                if gap.after != self.next - 1 {
                    return Err(self.damaged("its gap begins at another revision"));
                }
                self.has_ended = true;
            }
            Outline::Other => {}
        }
        self.count += 1;
        Ok(())
    }

    pub(super) fn finish(&self) -> Result<(), SegmentError> {
        if self.next - 1 != self.header.last {
            return Err(SegmentError::WrongRevision {
                expected: self.next - 1,
                found: self.header.last,
            });
        }
        if self.count != self.header.records {
            return Err(Self::OTHER_NUMBER);
        }
        Ok(())
    }
}

enum FrameError {
    TooLarge,
    Damaged(&'static str),
}

/// Takes the next record from the body.
fn record(body: &mut Bytes) -> Result<Record, FrameError> {
    if body.len() < FRAME {
        return Err(FrameError::Damaged("it is truncated"));
    }
    let (length, checksum) = (body.get_u32(), body.get_u32());
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    if length > MAX_MESSAGE {
        return Err(FrameError::TooLarge);
    }
    if length > body.len() {
        return Err(FrameError::Damaged("it is truncated"));
    }
    let message = body.split_to(length);
    if crc32c::crc32c(&message) != checksum {
        return Err(FrameError::Damaged("its checksum does not match"));
    }
    message::decode(message).ok_or(FrameError::Damaged("it cannot be decoded"))
}
