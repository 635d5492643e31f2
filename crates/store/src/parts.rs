//! An object cut into parts that are sent a few at a time, in fixed memory. Knows nothing of any store.

use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use tokio::task::JoinSet;

use crate::port::Error;

/// Bytes of the first parts of an upload.
pub(crate) const PART: usize = 6 << 20;

/// Parts under way at a time. With the one being filled they are the memory budget: 4 x 6 MiB, more only for
/// objects beyond 6 GiB.
const IN_FLIGHT: usize = 3;

/// How long parts under way are awaited before their upload is aborted.
const ABORT_PATIENCE: Duration = Duration::from_secs(20);

/// S3 takes 10,000 parts of one object, Azure 50,000. Doubling the size after each thousand reaches beyond the 5 TiB
/// an object of S3 may have.
const SAME_SIZE: usize = 1000;

/// Where parts go.
#[async_trait]
pub(crate) trait Sink: Clone + Send + Sync + 'static {
    /// What the completion of the upload has to say about a part.
    type Part: Send + 'static;
    /// Called once, before the first part is sent.
    async fn begin(&self) -> Result<(), Error>;
    /// Sends one part, numbered from 1, as often as it takes.
    async fn send(&self, number: usize, content: Bytes) -> Result<Self::Part, Error>;
}

/// What was written, when all of it is known.
pub(crate) enum Written<P> {
    /// Not enough for parts: to be sent in one request.
    Whole(Bytes),
    /// Sent; in order.
    Parts(Vec<P>),
}

/// The writing half of an upload.
pub(crate) struct Parts<S: Sink> {
    sink: S,
    first: usize,
    filling: BytesMut,
    begun: usize,
    under_way: JoinSet<Result<(usize, S::Part), Error>>,
    done: Vec<(usize, S::Part)>,
    written: u64,
}

impl<S: Sink> Parts<S> {
    /// Parts of `first` bytes, to begin with.
    pub(crate) fn new(sink: S, first: usize) -> Self {
        Self {
            sink,
            first,
            filling: BytesMut::new(),
            begun: 0,
            under_way: JoinSet::new(),
            done: Vec::new(),
            written: 0,
        }
    }

    /// Bytes taken so far.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Takes the next bytes; waits while the budget is in use.
    pub(crate) async fn write(&mut self, mut chunk: Bytes) -> Result<(), Error> {
        self.written += chunk.len() as u64;
        while !chunk.is_empty() {
            let size = part_size(self.first, self.begun);
            // A full part is only sent when more follows: an object of one part needs no parts.
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
        // Later parts are sent as soon as they are full.
        if self.begun > 0 && self.filling.len() == part_size(self.first, self.begun) {
            let content = std::mem::take(&mut self.filling).freeze();
            self.send(content).await?;
        }
        Ok(())
    }

    /// Sends the rest and waits for all parts.
    pub(crate) async fn finish(&mut self) -> Result<Written<S::Part>, Error> {
        let rest = std::mem::take(&mut self.filling).freeze();
        if self.begun == 0 {
            return Ok(Written::Whole(rest));
        }
        if !rest.is_empty() {
            self.send(rest).await?;
        }
        while !self.under_way.is_empty() {
            self.reap().await?;
        }
        let mut done = std::mem::take(&mut self.done);
        done.sort_by_key(|(number, _)| *number);
        Ok(Written::Parts(
            done.into_iter().map(|(_, part)| part).collect(),
        ))
    }

    /// The parts under way, for one who gives the upload up.
    pub(crate) fn give_up(&mut self) -> UnderWay<S::Part> {
        UnderWay(std::mem::take(&mut self.under_way))
    }

    /// Sends what is in `content` as the next part, once there is room for it.
    async fn send(&mut self, content: Bytes) -> Result<(), Error> {
        while self.under_way.len() >= IN_FLIGHT {
            self.reap().await?;
        }
        if self.begun == 0 {
            self.sink.begin().await?;
        }
        self.begun += 1;
        let (sink, number) = (self.sink.clone(), self.begun);
        self.under_way.spawn(async move {
            let part = sink.send(number, content).await?;
            Ok((number, part))
        });
        Ok(())
    }

    async fn reap(&mut self) -> Result<(), Error> {
        match self.under_way.join_next().await {
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

/// Parts that were being sent when their upload was given up.
pub(crate) struct UnderWay<P>(JoinSet<Result<(usize, P), Error>>);

impl<P: Send + 'static> UnderWay<P> {
    /// A part the store is still taking when the upload is aborted can stay for ever, and a request that is dropped
    /// on this side may be complete on the other. So what is under way is awaited, for a while.
    pub(crate) async fn settled(mut self) {
        let all = async { while self.0.join_next().await.is_some() {} };
        if tokio::time::timeout(ABORT_PATIENCE, all).await.is_err() {
            self.0.shutdown().await;
        }
    }
}

fn part_size(first: usize, begun: usize) -> usize {
    first << (begun / SAME_SIZE).min(16)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn ten_thousand_parts_reach_beyond_the_largest_object() {
        let total: u128 = (0..10_000).map(|part| part_size(PART, part) as u128).sum();
        assert!(total > 5 << 40);
        // And no part is larger than S3 takes.
        assert!(part_size(PART, 9_999) <= 5 << 30);
        // Backups up to 8 GiB stay within the fixed budget.
        assert_eq!(part_size(PART, 999), PART);
    }

    /// Counts what is held at a time.
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
            // Later parts overtake earlier ones.
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
    async fn parts_are_in_order_and_few_at_a_time() {
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
            assert!(counts.1 <= IN_FLIGHT, "{counts:?}");
            assert_eq!(counts.2, usize::from(size > 10));
        }
    }
}
