//! Reads the times of a segment from the pieces of its object, and checks the object.
//!
//! A search reads segments in the process of an operator that serves several tenants. Each tenant can forge segments
//! (invariant 15). A scanner therefore never has the whole object, the whole body or decoded changes in memory. The
//! scanner needs about 50 MiB:
//!
//! - one message, up to [`MAX_MESSAGE`] (36 MiB)
//! - 16 bytes for each transaction, up to [`MAX_RECORDS`](super::MAX_RECORDS) transactions (4 MiB)
//! - the window of zstd, up to [`WINDOW`] (8 MiB)

use std::mem::take;

use bytes::Buf;
use sha2::{Digest as _, Sha256};
use store::compression::Decompressor;

use super::decode::Order;
use super::{FRAME, MAX_BODY, MAX_MESSAGE};
use crate::digest::Digest;
use crate::error::SegmentError;
use crate::header::{HEADER, Header};
use crate::message;
use crate::record::{Gap, Moment, Outline};

/// Maximum window of zstd, as a power of 2. RFC 8878 recommends that decoders support 8 MiB. The recorder uses 2 MiB.
const WINDOW: u32 = 23;

const NO_ZSTD: SegmentError = SegmentError::BodyDamaged("it cannot be decompressed");
const OTHER_LENGTH: SegmentError = SegmentError::BodyDamaged("its length does not match");

/// The content of a segment that a search needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Times {
    /// The last revision in the header.
    pub(crate) last: i64,
    /// The SHA-256 of the whole object.
    pub(crate) digest: Digest,
    /// The transactions, in order.
    pub(crate) transactions: Vec<Moment>,
    /// The end of the chain, if it is in this segment.
    pub(crate) gap: Option<Gap>,
}

/// Reads the times of one segment.
pub(crate) struct Scanner {
    /// The beginning of the object, at most [`HEADER`] bytes.
    head: Vec<u8>,
    object: Sha256,
    /// `None` until the header is complete.
    body: Option<Body>,
}

impl Scanner {
    pub(crate) fn new() -> Self {
        Self {
            head: Vec::with_capacity(HEADER),
            object: Sha256::new(),
            body: None,
        }
    }

    /// Adds the next bytes of the object.
    ///
    /// # Errors
    /// Fails if the bytes do not belong to a valid segment. The scanner must then not be used.
    pub(crate) fn push(&mut self, piece: &[u8]) -> Result<(), SegmentError> {
        self.object.update(piece);
        let missing = HEADER.saturating_sub(self.head.len());
        let (head, rest) = piece.split_at(missing.min(piece.len()));
        self.head.extend_from_slice(head);
        if self.body.is_none() && self.head.len() == HEADER {
            self.body = Some(Body::new(Header::decode(&self.head)?)?);
        }
        self.body.as_mut().map_or(Ok(()), |body| body.push(rest))
    }

    /// The memory for the bytes of the current record.
    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.body
            .as_ref()
            .map_or(0, |body| body.records.record.capacity())
    }

    /// Checks that the object is complete.
    ///
    /// # Errors
    /// Fails if the object is not a complete and valid segment.
    pub(crate) fn finish(self) -> Result<Times, SegmentError> {
        let header = Header::decode(&self.head)?;
        let body = self.body.map_or_else(|| Body::new(header), Ok)?;
        let records = body.finish()?;
        Ok(Times {
            last: header.last,
            digest: Digest(self.object.finalize().into()),
            transactions: records.transactions,
            gap: records.gap,
        })
    }
}

/// The part of the object after the header.
struct Body {
    header: Header,
    /// Number of compressed bytes so far. `length` is the number of decompressed bytes so far.
    stored: u64,
    length: u64,
    sha256: Sha256,
    decompressor: Decompressor,
    records: Records,
}

impl Body {
    fn new(header: Header) -> Result<Self, SegmentError> {
        if header.body > MAX_BODY as u64 {
            return Err(SegmentError::TooLarge { limit: MAX_BODY });
        }
        Ok(Self {
            header,
            stored: 0,
            length: 0,
            sha256: Sha256::new(),
            decompressor: Decompressor::with_window(WINDOW).map_err(|_| NO_ZSTD)?,
            records: Records {
                order: Order::new(&header)?,
                record: Vec::new(),
                transactions: Vec::new(),
                gap: None,
            },
        })
    }

    fn push(&mut self, piece: &[u8]) -> Result<(), SegmentError> {
        self.stored = self.stored.saturating_add(piece.len() as u64);
        if self.stored > self.header.stored {
            let (expected, found) = self.sizes();
            return Err(SegmentError::TooLong { expected, found });
        }
        self.sha256.update(piece);
        let mut rest = piece;
        while let Some(output) = self.decompressor.next(&mut rest).map_err(|_| NO_ZSTD)? {
            self.length += output.len() as u64;
            if self.length > self.header.body {
                return Err(OTHER_LENGTH);
            }
            self.records.push(output)?;
        }
        Ok(())
    }

    fn finish(self) -> Result<Records, SegmentError> {
        if self.stored < self.header.stored {
            let (expected, found) = self.sizes();
            return Err(SegmentError::Truncated { expected, found });
        }
        if Digest(self.sha256.finalize().into()) != self.header.sha256 {
            return Err(SegmentError::BodyDamaged("its SHA-256 does not match"));
        }
        self.decompressor.finish().map_err(|_| NO_ZSTD)?;
        if self.length != self.header.body {
            return Err(OTHER_LENGTH);
        }
        self.records.finish()
    }

    /// The size of the object in bytes by its header, and its size so far.
    fn sizes(&self) -> (u64, u64) {
        let size = |body: u64| (HEADER as u64).saturating_add(body);
        (size(self.header.stored), size(self.stored))
    }
}

/// The records of a decompressed body.
struct Records {
    order: Order,
    /// The bytes of the incomplete record so far: its frame, and then its message.
    record: Vec<u8>,
    transactions: Vec<Moment>,
    gap: Option<Gap>,
}

impl Records {
    fn push(&mut self, mut output: &[u8]) -> Result<(), SegmentError> {
        while !output.is_empty() {
            if self.record.is_empty() {
                self.order.begin()?;
            }
            self.fill(&mut output, FRAME);
            let Some(length) = self.length()? else {
                break;
            };
            self.fill(&mut output, FRAME + length);
            if self.record.len() == FRAME + length {
                self.complete()?;
            }
        }
        Ok(())
    }

    /// Moves bytes to the record until the record has `length` bytes.
    fn fill(&mut self, output: &mut &[u8], length: usize) {
        let missing = length.saturating_sub(self.record.len());
        let (taken, rest) = output.split_at(missing.min(output.len()));
        // The vector gets no spare capacity, so that a large message takes no more memory than its length.
        self.record.reserve_exact(missing);
        self.record.extend_from_slice(taken);
        *output = rest;
    }

    /// The length of the message. `None` while the frame is incomplete.
    fn length(&self) -> Result<Option<usize>, SegmentError> {
        let Some(mut frame) = self.record.get(..FRAME) else {
            return Ok(None);
        };
        let length = usize::try_from(frame.get_u32()).unwrap_or(usize::MAX);
        if length > MAX_MESSAGE {
            return Err(SegmentError::TooLarge { limit: MAX_MESSAGE });
        }
        Ok(Some(length))
    }

    fn complete(&mut self) -> Result<(), SegmentError> {
        let record = take(&mut self.record);
        let mut message = record.as_slice();
        let (_, checksum) = (message.get_u32(), message.get_u32());
        if crc32c::crc32c(message) != checksum {
            return Err(self.order.damaged("its checksum does not match"));
        }
        let outline =
            message::outline(message).ok_or_else(|| self.order.damaged("it cannot be decoded"))?;
        self.order.add(outline)?;
        match outline {
            Outline::Transaction(at) => self.transactions.push(at),
            Outline::Gap(gap) => self.gap = Some(gap),
            Outline::Other => {}
        }
        Ok(())
    }

    fn finish(self) -> Result<Self, SegmentError> {
        if !self.record.is_empty() {
            return Err(self.order.damaged("it is truncated"));
        }
        self.order.finish()?;
        Ok(self)
    }
}
