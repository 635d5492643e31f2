//! Compresses and decompresses Zstandard streams in constant memory, because each output piece has a limited size.

use std::io;

use zstd::stream::raw::{Decoder, Encoder, InBuffer, Operation, OutBuffer};

/// The name of this compression in the manifest of a backup.
pub const ZSTD: &str = "zstd";

/// First bytes of a Zstandard stream. An etcd database starts with zeros.
const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Number of bytes that are needed to recognize a Zstandard stream.
pub const BEGINNING: usize = MAGIC.len();

/// The default level of zstd, which compresses about as fast as a network transfers data. Text shrinks to a fifth or a
/// third.
const LEVEL: i32 = 3;

/// Size of an output piece in bytes.
const PIECE: usize = 128 << 10;

/// Whether an object is a Zstandard stream. `beginning` contains its first [`BEGINNING`] bytes.
pub fn is_zstd(beginning: &[u8]) -> bool {
    beginning.starts_with(&MAGIC)
}

/// Compresses a stream, and passes each output piece to a callback.
pub struct Compressor {
    encoder: Encoder<'static>,
    piece: Vec<u8>,
}

impl Compressor {
    /// Starts a compressed stream, which ends with a checksum.
    ///
    /// # Errors
    /// Fails if zstd cannot allocate the stream.
    pub fn new() -> io::Result<Self> {
        let mut encoder = Encoder::new(LEVEL)?;
        encoder.set_parameter(zstd::stream::raw::CParameter::ChecksumFlag(true))?;
        Ok(Self {
            encoder,
            piece: vec![0; PIECE],
        })
    }

    /// Compresses the next bytes.
    ///
    /// # Errors
    /// Fails if zstd fails.
    pub fn push(&mut self, chunk: &[u8], mut out: impl FnMut(&[u8])) -> io::Result<()> {
        let mut input = InBuffer::around(chunk);
        while input.pos() < chunk.len() {
            let mut output = OutBuffer::around(self.piece.as_mut_slice());
            self.encoder.run(&mut input, &mut output)?;
            out(output.as_slice());
        }
        Ok(())
    }

    /// Ends the stream and passes the remaining output to the callback.
    ///
    /// # Errors
    /// Fails if zstd fails.
    pub fn finish(mut self, mut out: impl FnMut(&[u8])) -> io::Result<()> {
        loop {
            let mut output = OutBuffer::around(self.piece.as_mut_slice());
            let left = self.encoder.finish(&mut output, true)?;
            out(output.as_slice());
            if left == 0 {
                return Ok(());
            }
        }
    }
}

/// Decompresses a Zstandard stream.
pub struct Decompressor {
    decoder: Decoder<'static>,
    piece: Vec<u8>,
    /// True if the input so far is a complete stream.
    complete: bool,
    /// Whether zstd may have more output without more input.
    full: bool,
}

impl Decompressor {
    /// Starts the decompression of a stream.
    ///
    /// # Errors
    /// Fails if zstd cannot allocate the stream.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            decoder: Decoder::new()?,
            piece: vec![0; PIECE],
            complete: false,
            full: false,
        })
    }

    /// Starts the decompression of a stream whose window may have at most 2 to the power of `log` bytes. Without this
    /// limit, zstd accepts a window of 128 MiB.
    ///
    /// # Errors
    /// Fails if zstd cannot allocate the stream.
    pub fn with_window(log: u32) -> io::Result<Self> {
        let mut started = Self::new()?;
        let limit = zstd::stream::raw::DParameter::WindowLogMax(log);
        started.decoder.set_parameter(limit)?;
        Ok(started)
    }

    /// Decompresses bytes from the beginning of `rest`, and removes these bytes from `rest`. Returns the next piece of
    /// output, or `None` if zstd needs more input.
    ///
    /// # Errors
    /// Fails if the stream is damaged.
    pub fn next(&mut self, rest: &mut &[u8]) -> io::Result<Option<&[u8]>> {
        while self.full || !rest.is_empty() {
            if self.complete {
                self.decoder.reinit()?;
            }
            let mut input = InBuffer::around(rest);
            let mut output = OutBuffer::around(self.piece.as_mut_slice());
            let hint = self.decoder.run(&mut input, &mut output)?;
            let (read, filled) = (input.pos(), output.pos());
            *rest = rest.get(read..).unwrap_or_default();
            self.complete = hint == 0;
            self.full = filled == PIECE && !self.complete;
            if filled > 0 {
                return Ok(self.piece.get(..filled));
            }
        }
        Ok(None)
    }

    /// Ends the decompression.
    ///
    /// # Errors
    /// Fails if the stream is truncated.
    pub fn finish(self) -> io::Result<()> {
        if self.complete {
            Ok(())
        } else {
            Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the compressed stream is truncated",
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::testing::content;

    fn compressed(content: &[u8], chunk: usize) -> Vec<u8> {
        let mut compressor = Compressor::new().unwrap();
        let mut out = Vec::new();
        for chunk in content.chunks(chunk) {
            compressor
                .push(chunk, |piece| out.extend_from_slice(piece))
                .unwrap();
        }
        compressor
            .finish(|piece| out.extend_from_slice(piece))
            .unwrap();
        out
    }

    fn expanded(stored: &[u8], chunk: usize) -> io::Result<Vec<u8>> {
        let mut decompressor = Decompressor::new()?;
        let mut out = Vec::new();
        for mut chunk in stored.chunks(chunk) {
            while let Some(piece) = decompressor.next(&mut chunk)? {
                assert!(piece.len() <= PIECE);
                out.extend_from_slice(piece);
            }
        }
        decompressor.finish()?;
        Ok(out)
    }

    #[test]
    fn compression_round_trips_with_any_chunk_size() {
        let zeros = Bytes::from(vec![0; 10 << 20]);
        for original in [Bytes::new(), content(1), content(3_000_001), zeros] {
            for chunk in [7_777, 1 << 20] {
                let stored = compressed(&original, chunk);
                assert!(is_zstd(&stored));
                for chunk in [1_001, 4 << 20] {
                    assert!(expanded(&stored, chunk).unwrap() == original);
                }
            }
        }
        assert!(compressed(&vec![0; 10 << 20], 1 << 20).len() < 10_000);
    }

    #[test]
    fn decompression_detects_truncation_and_damage() {
        let stored = compressed(&content(1 << 20), 1 << 16);
        for cut in [0, 3, 100, stored.len() - 5, stored.len() - 1] {
            assert!(expanded(&stored[..cut], 1 << 16).is_err(), "{cut}");
        }
        let mut damaged = stored.clone();
        let middle = damaged.len() / 2;
        damaged[middle] ^= 1;
        assert!(expanded(&damaged, 1 << 16).is_err());
        assert!(!is_zstd(&[0; 16]));
    }
}
