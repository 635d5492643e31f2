//! An object written to Google as one resumable upload, in fixed memory: what is written goes through a short queue
//! to Google's client, which asks for it chunk by chunk and repeats a chunk that fails.

use std::time::Duration;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use google_cloud_storage::streaming_source::StreamingSource;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::GcsStore;
use crate::port::{Committed, Error, Upload};

/// Bytes of a chunk; the client holds one, and what of the next has come with it.
const CHUNK: usize = 16 << 20;

/// Bytes of a piece in the queue, and how many may wait: with the chunk they are the memory budget, 20 MiB.
const PIECE: usize = 1 << 20;
const QUEUE: usize = 3;

/// How long the store may take none of what is written.
const PATIENCE: Duration = Duration::from_mins(5);

/// What goes through the queue.
enum Piece {
    Content(Bytes),
    /// All was written and checked: the object may be made.
    End,
}

/// The end of the queue that the client reads from.
struct Source(mpsc::Receiver<Piece>);

/// The upload was given up: the client must not finalise it.
#[derive(Debug, thiserror::Error)]
#[error("the upload was given up")]
struct GivenUp;

impl StreamingSource for Source {
    type Error = GivenUp;

    async fn next(&mut self) -> Option<Result<Bytes, GivenUp>> {
        match self.0.recv().await {
            Some(Piece::Content(content)) => Some(Ok(content)),
            Some(Piece::End) => None,
            // Invariant 12: only an explicit end is one.
            None => Some(Err(GivenUp)),
        }
    }
}

/// See [`Upload`].
pub(super) struct GcsUpload {
    store: GcsStore,
    key: String,
    queue: mpsc::Sender<Piece>,
    sending: JoinHandle<Result<(), Error>>,
    written: u64,
    crc32c: u32,
}

impl GcsUpload {
    pub(super) fn begin(store: GcsStore, key: &str) -> Self {
        let (queue, source) = mpsc::channel(QUEUE);
        let write = store
            .content
            .write_object(store.bucket(), key, Source(source))
            .with_resumable_upload_threshold(0_usize)
            .with_resumable_upload_buffer_size(CHUNK);
        let (asked, about) = (store.clone(), key.to_owned());
        let sending = tokio::spawn(async move {
            let written = Box::pin(write.send_buffered()).await;
            written.map(|_| ()).map_err(|error| {
                let error = asked.explain(&about, &error);
                asked.place.about_bucket(error)
            })
        });
        Self {
            store,
            key: key.to_owned(),
            queue,
            sending,
            written: 0,
            crc32c: 0,
        }
    }

    async fn hand_over(&mut self, piece: Piece) -> Result<(), Error> {
        match tokio::time::timeout(PATIENCE, self.queue.send(piece)).await {
            Ok(Ok(())) => Ok(()),
            // Nobody reads: the client has ended, and says why.
            Ok(Err(_)) => Err(self.end().await.err().unwrap_or_else(interrupted)),
            Err(_) => Err(Error::Timeout(self.store.place.endpoint.clone())),
        }
    }

    async fn end(&mut self) -> Result<(), Error> {
        match tokio::time::timeout(PATIENCE, &mut self.sending).await {
            Ok(ended) => ended.unwrap_or_else(|_| Err(interrupted())),
            Err(_) => Err(Error::Timeout(self.store.place.endpoint.clone())),
        }
    }
}

fn interrupted() -> Error {
    Error::Other("the upload was interrupted".to_owned())
}

#[async_trait]
impl Upload for GcsUpload {
    async fn write(&mut self, chunk: Bytes) -> Result<(), Error> {
        let mut chunk = chunk;
        while !chunk.is_empty() {
            let piece = chunk.split_to(PIECE.min(chunk.len()));
            self.written += piece.len() as u64;
            self.crc32c = crc32c::crc32c_append(self.crc32c, &piece);
            self.hand_over(Piece::Content(piece)).await?;
        }
        Ok(())
    }

    /// Invariant 12: the store is asked what it holds, and that must be what was sent.
    async fn commit(mut self: Box<Self>) -> Result<Committed, Error> {
        self.hand_over(Piece::End).await?;
        self.end().await?;
        let held = self.store.json.object(&self.key).await?;
        let size = held.size()?;
        if size != self.written {
            return Err(Error::Other(format!(
                "{size} bytes are stored of {} that were sent",
                self.written
            )));
        }
        let sent = STANDARD.encode(self.crc32c.to_be_bytes());
        if held.crc32c.is_some_and(|stored| stored != sent) {
            return Err(Error::Other(
                "the stored object's checksum is not that of what was sent".to_owned(),
            ));
        }
        Ok(Committed { size })
    }

    async fn abort(mut self: Box<Self>) -> Result<(), Error> {
        self.sending.abort();
        let _ = (&mut self.sending).await;
        Ok(())
    }
}

impl Drop for GcsUpload {
    fn drop(&mut self) {
        self.sending.abort();
    }
}
