//! Decodes and checks a segment.

use bytes::{Buf, Bytes, BytesMut};
use store::compression::{BEGINNING, Decompressor, is_zstd};

use super::{FRAME, MAX_BODY, MAX_MESSAGE, MAX_RECORDS, Segment};
use crate::digest::Digest;
use crate::error::SegmentError;
use crate::header::{HEADER, Header};
use crate::message;
use crate::record::Record;

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
    // The buffer is not allocated with `length`, because a damaged header can contain any length. It grows with the
    // decompressed data.
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
    const OTHER_NUMBER: SegmentError =
        SegmentError::BodyDamaged("its number of records does not match");
    if header.records > MAX_RECORDS {
        return Err(SegmentError::BodyDamaged("it has too many records"));
    }
    let mut records: Vec<Record> = Vec::new();
    let mut next = header.first;
    while body.has_remaining() {
        let index = records.len() as u64;
        if index == header.records {
            return Err(OTHER_NUMBER);
        }
        let damaged = |problem| SegmentError::RecordDamaged { index, problem };
        if matches!(records.last(), Some(Record::Gap(_))) {
            return Err(damaged("it follows the record of a gap"));
        }
        let record = record(&mut body).map_err(|error| match error {
            FrameError::TooLarge => SegmentError::TooLarge { limit: MAX_MESSAGE },
            FrameError::Damaged(problem) => damaged(problem),
        })?;
        match &record {
            Record::Transaction(transaction) => {
                if transaction.revision != next {
                    return Err(SegmentError::WrongRevision {
                        expected: next,
                        found: transaction.revision,
                    });
                }
                next = next.saturating_add(1);
            }
            Record::Gap(gap) if gap.after != next - 1 => {
                return Err(damaged("its gap begins at another revision"));
            }
            _ => {}
        }
        records.push(record);
    }
    if next - 1 != header.last {
        return Err(SegmentError::WrongRevision {
            expected: next - 1,
            found: header.last,
        });
    }
    if records.len() as u64 != header.records {
        return Err(OTHER_NUMBER);
    }
    Ok(records)
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
