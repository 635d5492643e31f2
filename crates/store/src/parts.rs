//! Splits an object into parts, and sends several parts concurrently in constant memory. Stores implement the trait
//! [`Sink`].

use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use tokio::task::JoinSet;

use crate::port::Error;

/// Size in bytes of each of the first parts of an upload. Later parts are larger (`SMALL_PARTS`).
pub(crate) const PART: usize = 6 << 20;

/// Maximum number of parts in flight. With the part that is being filled, an upload has four parts in memory: 24 MiB,
/// or 48 MiB after the part size has doubled.
const MAX_IN_FLIGHT: usize = 3;

/// An abort waits at most this long for the parts in flight, and then removes the upload.
const ABORT_TIMEOUT: Duration = Duration::from_secs(20);

/// Number of parts after which the part size doubles. The size doubles only once, so that an endless snapshot stream
/// needs a limited amount of memory.
const SMALL_PARTS: usize = 1000;

/// Maximum number of parts. S3 accepts 10,000 parts per object, and Azure 50,000.
const MAX_PARTS: usize = 10_000;

/// The requests with which a store receives the parts of an upload.
#[async_trait]
pub(crate) trait Sink: Clone + Send + Sync + 'static {
    /// The result of a sent part, which the commit of the upload needs.
    type Part: Send + 'static;
    /// Starts the upload, before the first part is sent.
    async fn begin(&self) -> Result<(), Error>;
    /// Sends one part with retries. The first part has the number 1.
    async fn send(&self, number: usize, content: Bytes) -> Result<Self::Part, Error>;
}

/// The result of [`Parts::finish`].
pub(crate) enum Written<P> {
    /// The content was not sent, because it fits into one part. The caller sends it in one request.
    Whole(Bytes),
    /// The content was sent in parts. Contains the results of the parts in order.
    Parts(Vec<P>),
}

/// Splits the content of an upload into parts.
pub(crate) struct Parts<S: Sink> {
    sink: S,
    first: usize,
    filling: BytesMut,
    begun: usize,
    in_flight: JoinSet<Result<(usize, S::Part), Error>>,
    done: Vec<(usize, S::Part)>,
    written: u64,
}

impl<S: Sink> Parts<S> {
    /// Creates a writer. Each of its first parts has `first` bytes.
    pub(crate) fn new(sink: S, first: usize) -> Self {
        Self {
            sink,
            first,
            filling: BytesMut::new(),
            begun: 0,
            in_flight: JoinSet::new(),
            done: Vec::new(),
            written: 0,
        }
    }

    /// Number of bytes written so far.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Writes the next bytes. Waits while the maximum number of parts is in flight.
    pub(crate) async fn write(&mut self, mut chunk: Bytes) -> Result<(), Error> {
        self.written += chunk.len() as u64;
        while !chunk.is_empty() {
            let size = part_size(self.first, self.begun);
            // An object that consists of one part is sent without a multipart upload. A full first part is therefore
            // sent only when more bytes follow.
            if self.filling.len() == size {
                let content = std::mem::take(&mut self.filling).freeze();
                self.send(content).await?;
                continue;
            }
            if self.filling.capacity() == 0 {
                self.filling.reserve(size);
            }
            let room = size - self.filling.len();
            let now = chunk.split_to(room.min(chunk.len()));
            self.filling.extend_from_slice(&now);
        }
        // Every part after the first is sent as soon as it is full.
        if self.begun > 0 && self.filling.len() == part_size(self.first, self.begun) {
            let content = std::mem::take(&mut self.filling).freeze();
            self.send(content).await?;
        }
        Ok(())
    }

    /// Sends the remaining bytes as the last part, and waits for all parts. If no part was sent before, returns the
    /// remaining bytes instead.
    pub(crate) async fn finish(&mut self) -> Result<Written<S::Part>, Error> {
        let rest = std::mem::take(&mut self.filling).freeze();
        if self.begun == 0 {
            return Ok(Written::Whole(rest));
        }
        if !rest.is_empty() {
            self.send(rest).await?;
        }
        while !self.in_flight.is_empty() {
            self.reap().await?;
        }
        let mut done = std::mem::take(&mut self.done);
        done.sort_by_key(|(number, _)| *number);
        Ok(Written::Parts(
            done.into_iter().map(|(_, part)| part).collect(),
        ))
    }

    /// Takes the parts in flight, so that an abort can wait for them.
    pub(crate) fn take_in_flight(&mut self) -> InFlight<S::Part> {
        InFlight(std::mem::take(&mut self.in_flight))
    }

    /// Waits until fewer than [`MAX_IN_FLIGHT`] parts are in flight, and then starts to send `content` as the next
    /// part.
    async fn send(&mut self, content: Bytes) -> Result<(), Error> {
        while self.in_flight.len() >= MAX_IN_FLIGHT {
            self.reap().await?;
        }
        if self.begun >= MAX_PARTS {
            let size = self.written >> 30;
            return Err(Error::Other(format!(
                "the object has more than {size} GiB, the maximum for an upload: check the source of the snapshot"
            )));
        }
        if self.begun == 0 {
            self.sink.begin().await?;
        }
        self.begun += 1;
        let (sink, number) = (self.sink.clone(), self.begun);
        self.in_flight.spawn(async move {
            let part = sink.send(number, content).await?;
            Ok((number, part))
        });
        Ok(())
    }

    async fn reap(&mut self) -> Result<(), Error> {
        match self.in_flight.join_next().await {
            None => Ok(()),
            Some(Ok(part)) => {
                self.done.push(part?);
                Ok(())
            }
            Some(Err(_)) => Err(Error::Other(
                "the upload of a part was interrupted".to_owned(),
            )),
        }
    }
}

/// The parts in flight of an aborted upload.
pub(crate) struct InFlight<P>(JoinSet<Result<(usize, P), Error>>);

impl<P: Send + 'static> InFlight<P> {
    /// Waits until no part is in flight, at most [`ABORT_TIMEOUT`]. Without this wait, the store could receive a part
    /// after the abort and keep the part forever. After the timeout, this function cancels the requests, but the store
    /// may complete a request that it has received.
    pub(crate) async fn wait(mut self) {
        let all = async { while self.0.join_next().await.is_some() {} };
        if tokio::time::timeout(ABORT_TIMEOUT, all).await.is_err() {
            self.0.shutdown().await;
        }
    }
}

fn part_size(first: usize, begun: usize) -> usize {
    if begun < SMALL_PARTS {
        first
    } else {
        2 * first
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn largest_snapshot_fits_into_maximum_number_of_parts() {
        let sizes = || (0..MAX_PARTS).map(|part| part_size(PART, part));
        // 110 GiB is the largest value of --max-snapshot.
        assert!(sizes().map(|size| size as u64).sum::<u64>() > 110 << 30);
        assert_eq!(sizes().max(), Some(12 << 20));
        assert_eq!(sizes().take(1000).max(), Some(PART));
    }

    #[tokio::test]
    async fn hostile_etcd_endless_snapshot_ends_upload_with_error() {
        let mut parts = Parts::new(Discarding, 1);
        let chunk = Bytes::from(vec![0; 2 * MAX_PARTS + 10]);
        let error = parts.write(chunk).await.unwrap_err().to_string();
        assert!(error.contains("the maximum for an upload"), "{error}");
        assert_eq!(parts.begun, MAX_PARTS);
    }

    #[derive(Clone)]
    struct Discarding;

    #[async_trait]
    impl Sink for Discarding {
        type Part = ();

        async fn begin(&self) -> Result<(), Error> {
            Ok(())
        }

        async fn send(&self, _number: usize, _content: Bytes) -> Result<(), Error> {
            Ok(())
        }
    }

    /// A sink that counts the parts in flight, their maximum, and the calls of `begin`.
    #[derive(Clone, Default)]
    struct Counting(Arc<Mutex<(usize, usize, usize)>>);

    #[async_trait]
    impl Sink for Counting {
        type Part = Bytes;

        async fn begin(&self) -> Result<(), Error> {
            self.0.lock().unwrap().2 += 1;
            Ok(())
        }

        async fn send(&self, number: usize, content: Bytes) -> Result<Bytes, Error> {
            {
                let mut counts = self.0.lock().unwrap();
                counts.0 += 1;
                counts.1 = counts.1.max(counts.0);
            }
            // Parts with odd numbers take longer, so that some parts complete before earlier parts.
            tokio::time::sleep(Duration::from_millis(if number.is_multiple_of(2) {
                1
            } else {
                5
            }))
            .await;
            self.0.lock().unwrap().0 -= 1;
            Ok(content)
        }
    }

    #[tokio::test]
    async fn parts_stay_in_order_within_concurrency_limit() {
        for size in [10, 11, 99, 100, 101, 1234] {
            let sink = Counting::default();
            let mut parts = Parts::new(sink.clone(), 10);
            let content: Bytes = (0..size).map(|byte| (byte % 251) as u8).collect();
            for chunk in content.chunks(7) {
                parts.write(Bytes::copy_from_slice(chunk)).await.unwrap();
            }
            assert_eq!(parts.written(), size);
            let written = match parts.finish().await.unwrap() {
                Written::Whole(whole) => {
                    assert_eq!(size, 10);
                    whole
                }
                Written::Parts(parts) => {
                    assert!(parts[..parts.len() - 1].iter().all(|part| part.len() == 10));
                    parts.concat().into()
                }
            };
            assert_eq!(written, content);
            let counts = *sink.0.lock().unwrap();
            assert!(counts.1 <= MAX_IN_FLIGHT, "{counts:?}");
            assert_eq!(counts.2, usize::from(size > 10));
        }
    }
}
