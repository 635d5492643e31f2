//! Writes a snapshot to a file while it arrives, and decrypts and decompresses it if needed. A second thread inspects
//! the data. The memory use is constant, because only a few chunks are queued.
//!
//! The file is not synced. After a crash of the node, the next start reads and verifies the whole file, and etcdutl
//! verifies it again.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self as std_mpsc, SyncSender};
use std::thread;

use bytes::Bytes;
use etcd::{Inspected, Inspector};
use store::progress::Meter;
use store::unpack::Unpacker;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::content::{EncryptionKeys, in_content};
use super::snapshot::unreadable;
use super::volume_trouble;

use crate::reason::{Reason, Trouble};

/// Length in chunks of the queue to the writer, and of the queue to the inspection.
const QUEUE_LENGTH: usize = 16;

/// Receives the chunks of a snapshot in their order.
pub(super) struct Intake {
    chunks: mpsc::Sender<Bytes>,
    written: JoinHandle<Result<Inspected, Trouble>>,
}

impl Intake {
    /// Creates the file and starts the writer. With `keys`, the data must be encrypted with one of these keys.
    pub(super) fn begin(path: &Path, meter: Arc<Meter>, keys: Option<EncryptionKeys>) -> Self {
        let (chunks, arriving) = mpsc::channel(QUEUE_LENGTH);
        let path = path.to_owned();
        let written = tokio::task::spawn_blocking(move || write(path, arriving, &meter, keys));
        Self { chunks, written }
    }

    /// Queues the next chunk. Returns false after a failure, whose error [`Self::finish`] returns.
    pub(super) async fn push(&self, chunk: Bytes) -> bool {
        self.chunks.send(chunk).await.is_ok()
    }

    /// Waits until all chunks are written and inspected.
    pub(super) async fn finish(self) -> Result<Inspected, Trouble> {
        drop(self.chunks);
        self.written.await.unwrap_or_else(|error| {
            let message = format!("the snapshot was not written: {error}");
            Err(Trouble::new(Reason::SeedFailed, message))
        })
    }
}

fn write(
    path: PathBuf,
    mut arriving: mpsc::Receiver<Bytes>,
    meter: &Meter,
    keys: Option<EncryptionKeys>,
) -> Result<Inspected, Trouble> {
    let mut download = Download::create(path)?;
    thread::scope(|scope| {
        // The inspection runs in another thread, because hashing takes about as long as writing.
        let (reader, pieces) = std_mpsc::sync_channel::<Bytes>(QUEUE_LENGTH);
        let reads = scope.spawn(move || {
            let mut inspector = Inspector::new();
            for piece in pieces {
                inspector.push(&piece);
            }
            inspector.finish()
        });
        let written = download.take_all(&mut arriving, &reader, meter, keys);
        drop(reader);
        let inspected = reads.join();
        written?;
        match inspected {
            Ok(inspected) => inspected.map_err(|error| unreadable(&error.to_string())),
            Err(_) => Err(Trouble::new(
                Reason::SeedFailed,
                "the inspection of the snapshot panicked, which is a defect: report it",
            )),
        }
    })
}

struct Download {
    path: PathBuf,
    file: File,
    written: u64,
}

impl Download {
    fn create(path: PathBuf) -> Result<Self, Trouble> {
        let file = File::create(&path).map_err(|error| volume_trouble("create", &path, &error))?;
        Ok(Self {
            path,
            file,
            written: 0,
        })
    }

    /// Writes the content of the chunks to the file, and passes it to the inspection.
    fn take_all(
        &mut self,
        arriving: &mut mpsc::Receiver<Bytes>,
        reader: &SyncSender<Bytes>,
        meter: &Meter,
        keys: Option<EncryptionKeys>,
    ) -> Result<(), Trouble> {
        let (secret, keys) = keys.map(|keys| (keys.secret, keys.keys)).unzip();
        let damaged = |error| in_content(&error, secret.as_deref());
        let mut unpacker = Unpacker::new(keys);
        loop {
            let chunk = arriving.blocking_recv();
            let is_end = chunk.is_none();
            let added = match chunk {
                Some(chunk) => unpacker.push(chunk),
                None => unpacker.end(),
            };
            added.map_err(damaged)?;
            while let Some(piece) = unpacker.piece().map_err(damaged)? {
                self.take(piece, reader)?;
            }
            meter.advance_to(self.written);
            if is_end {
                return unpacker.finish().map_err(damaged);
            }
        }
    }

    fn take(&mut self, piece: Bytes, reader: &SyncSender<Bytes>) -> Result<(), Trouble> {
        let written = self.file.write_all(&piece);
        written.map_err(|error| volume_trouble("write", &self.path, &error))?;
        self.written += piece.len() as u64;
        // `send` fails only if the inspection has panicked, which `write` reports.
        let _ = reader.send(piece);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use store::compression::Compressor;

    use super::*;

    /// A stream may be split at any position, even within the bytes that identify the compression.
    #[tokio::test]
    async fn compression_is_recognized_for_every_chunk_size() {
        let plain: Vec<u8> = (0..10_000_u32).flat_map(u32::to_le_bytes).collect();
        let mut stream = Vec::new();
        let mut compressor = Compressor::new().unwrap();
        compressor
            .push(&plain, |piece| stream.extend(piece))
            .unwrap();
        compressor.finish(|piece| stream.extend(piece)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("snapshot.db");
        for length in [1, 3, 4, stream.len()] {
            for arrives in [&stream, &plain] {
                let intake = Intake::begin(&path, Arc::default(), None);
                for chunk in arrives.chunks(length) {
                    assert!(intake.push(Bytes::copy_from_slice(chunk)).await);
                }
                // The content is not an etcd database, so `finish` returns an error although the file is complete.
                let trouble = intake.finish().await.unwrap_err();
                assert_eq!(trouble.reason, Reason::SnapshotUnreadable);
                assert!(std::fs::read(&path).unwrap() == plain, "chunks of {length}");
            }
        }
    }

    /// Writes to `/dev/full` fail as on a full volume.
    #[tokio::test]
    async fn full_volume_is_reported_with_remedy() {
        let intake = Intake::begin(Path::new("/dev/full"), Arc::default(), None);
        // `push` returns false after the first failed write.
        while intake.push(Bytes::from_static(&[0; 4096])).await {}
        let trouble = intake.finish().await.unwrap_err();
        assert_eq!(trouble.reason, Reason::SeedFailed);
        assert!(
            trouble.message.contains("larger volumes"),
            "{}",
            trouble.message
        );
    }
}
