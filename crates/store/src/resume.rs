//! An object read from its beginning; a connection that breaks is made again where it broke. A large one is read in
//! parts, a few of them side by side: stores give a connection what one disk of theirs has, and no more (85 to 90 MB/s
//! on S3: <https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-guidelines.html>). Knows nothing
//! of any store.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};

use crate::port::{Error, ObjectStream};

/// Attempts in a row that bring not one byte.
const ATTEMPTS: u32 = 5;

/// The longest silence of a connection.
const SILENCE: Duration = Duration::from_secs(30);

/// Bytes of a part.
pub(crate) const PART: u64 = 8 << 20;

/// Parts under way or waiting for those before them: the memory budget of a read, with the one that is taken.
const SIDE_BY_SIDE: usize = 6;

/// The content of some part of an object.
pub(crate) type Body = BoxStream<'static, Result<Bytes, Error>>;

/// One version of an object: what replaces it while it is read is not read.
#[async_trait]
pub(crate) trait Version: Send + Sync + 'static {
    /// The content of these bytes, which are some.
    async fn body(&self, part: Range<u64>) -> Result<Body, Error>;
    /// Where it comes from, for messages.
    fn endpoint(&self) -> String;
}

/// What was asked for already: an object's first bytes.
pub(crate) struct First {
    /// How many.
    pub(crate) size: u64,
    /// Their content.
    pub(crate) body: Body,
}

/// Reads all `size` bytes of a version. One part, or all that is left, is one request.
pub(crate) fn read<V: Version>(version: V, size: u64, first: Option<First>) -> ObjectStream {
    let version = Arc::new(version);
    let begun = first.as_ref().map_or(PART, |first| first.size);
    let chunks = if begun >= size {
        resumed(version, 0..size, first.map(|first| first.body))
    } else {
        let first = stream::iter([(0..begun, first.map(|first| first.body))]);
        let parts = first.chain(stream::iter(parts(begun, size).map(|part| (part, None))));
        parts
            .map(move |(part, body)| {
                resumed(Arc::clone(&version), part, body).try_collect::<Vec<_>>()
            })
            .buffered(SIDE_BY_SIDE)
            .map_ok(|chunks| stream::iter(chunks.into_iter().map(Ok)))
            .try_flatten()
            .boxed()
    };
    ObjectStream { size, chunks }
}

/// The parts from a byte on, to the end of an object.
fn parts(from: u64, size: u64) -> impl Iterator<Item = Range<u64>> + Send {
    let next = move |part: &Range<u64>| {
        (part.end < size).then(|| part.end..part.end.saturating_add(PART).min(size))
    };
    std::iter::successors(next(&(0..from)), next)
}

struct Reading<V> {
    version: Arc<V>,
    body: Option<Body>,
    part: Range<u64>,
    failures: u32,
}

/// Reads a part; `body` is its content, if it was asked for already.
fn resumed<V: Version>(version: Arc<V>, part: Range<u64>, body: Option<Body>) -> Body {
    let reading = Reading {
        version,
        body,
        part,
        failures: 0,
    };
    let chunks = stream::try_unfold(reading, |mut reading| async move {
        loop {
            if reading.part.is_empty() {
                return Ok(None);
            }
            match reading.next().await {
                Ok(chunk) => return Ok(Some((chunk, reading))),
                Err(error) => {
                    reading.body = None;
                    reading.failures += 1;
                    if reading.failures >= ATTEMPTS {
                        return Err(error);
                    }
                    tokio::time::sleep(
                        Duration::from_millis(100) * 4_u32.pow(reading.failures - 1),
                    )
                    .await;
                }
            }
        }
    });
    chunks.boxed()
}

impl<V: Version> Reading<V> {
    async fn next(&mut self) -> Result<Bytes, Error> {
        let body = match &mut self.body {
            Some(body) => body,
            body @ None => body.insert(self.version.body(self.part.clone()).await?),
        };
        let chunk = tokio::time::timeout(SILENCE, body.next())
            .await
            .map_err(|_| Error::Timeout(self.version.endpoint()))?;
        let chunk = chunk.unwrap_or_else(|| {
            let Range { start, end } = self.part;
            Err(Error::Unreachable {
                endpoint: self.version.endpoint(),
                detail: format!("the answer ends after byte {start}, and not after byte {end}"),
            })
        })?;
        let read = self.part.start.saturating_add(chunk.len() as u64);
        if read > self.part.end {
            return Err(Error::Other(
                "the answer is longer than announced".to_owned(),
            ));
        }
        self.failures = 0;
        self.part.start = read;
        Ok(chunk)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use proptest::prelude::*;
    use tokio::sync::Barrier;

    use super::*;

    /// A store's object, by what it is asked for.
    struct Asked {
        content: Bytes,
        /// Bytes until the connection breaks, for so many requests.
        breaks: (AtomicUsize, usize),
        /// Who is asked for a part waits until so many are.
        together: Option<Barrier>,
        parts: Mutex<Vec<Range<u64>>>,
    }

    impl Asked {
        fn of(size: u64) -> Self {
            let size = usize::try_from(size).unwrap();
            let bytes = (0_u32..).map(|at| (at / 3 % 251).to_le_bytes()[0]);
            // Of a length that no part is a multiple of.
            let block: Vec<u8> = bytes.take(999_983).collect();
            let mut content = block.repeat(size / block.len() + 1);
            content.truncate(size);
            Self {
                content: content.into(),
                breaks: (AtomicUsize::new(0), 0),
                together: None,
                parts: Mutex::default(),
            }
        }

        fn slice(&self, part: &Range<u64>) -> Bytes {
            let at = |byte: u64| usize::try_from(byte).unwrap();
            self.content.slice(at(part.start)..at(part.end))
        }
    }

    #[async_trait]
    impl Version for Arc<Asked> {
        async fn body(&self, part: Range<u64>) -> Result<Body, Error> {
            assert!(!part.is_empty(), "{part:?}");
            self.parts.lock().unwrap().push(part.clone());
            if let Some(together) = &self.together {
                together.wait().await;
            }
            let mut chunks = Vec::new();
            let mut rest = self.slice(&part);
            let (left, until) = &self.breaks;
            let breaks = left
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                    left.checked_sub(1)
                })
                .is_ok();
            if breaks {
                rest.truncate(*until);
            }
            while !rest.is_empty() {
                chunks.push(Ok(rest.split_to(rest.len().min(1_000_003))));
            }
            Ok(stream::iter(chunks).boxed())
        }

        fn endpoint(&self) -> String {
            "here".to_owned()
        }
    }

    async fn whole(object: ObjectStream) -> Result<Bytes, Error> {
        let chunks: Vec<Bytes> = object.chunks.try_collect().await?;
        Ok(chunks.concat().into())
    }

    fn first(asked: &Asked, size: u64) -> First {
        let body = stream::iter([Ok(asked.slice(&(0..size)))]).boxed();
        First { size, body }
    }

    #[tokio::test]
    async fn parts_are_asked_for_side_by_side_and_come_in_order() {
        let size = 3 * SIDE_BY_SIDE as u64 * PART;
        let asked = Arc::new(Asked {
            // Never reached by one that asks for one after the other.
            together: Some(Barrier::new(SIDE_BY_SIDE)),
            ..Asked::of(size)
        });
        let object = read(Arc::clone(&asked), size, None);
        let read = tokio::time::timeout(SILENCE, whole(object)).await;
        assert!(read.unwrap().unwrap() == asked.content);
        let parts = asked.parts.lock().unwrap();
        assert_eq!(parts.len(), 3 * SIDE_BY_SIDE);
        assert!(parts.iter().all(|part| part.end - part.start == PART));
    }

    #[tokio::test]
    async fn what_fits_in_a_part_is_one_request() {
        for size in [0, 1, PART - 1, PART] {
            let asked = Arc::new(Asked::of(size));
            let object = read(Arc::clone(&asked), size, None);
            assert!(whole(object).await.unwrap() == asked.content, "{size}");
            assert_eq!(asked.parts.lock().unwrap().len(), usize::from(size > 0));
        }
    }

    #[tokio::test]
    async fn a_part_goes_on_where_it_broke() {
        let size = 2 * PART + 5;
        let asked = Arc::new(Asked {
            breaks: (AtomicUsize::new(3), 100),
            ..Asked::of(size)
        });
        let object = read(Arc::clone(&asked), size, Some(first(&asked, PART)));
        assert!(whole(object).await.unwrap() == asked.content);
        let mut parts = asked.parts.lock().unwrap().clone();
        parts.sort_by_key(|part| part.start);
        let ends = parts.iter().map(|part| part.end);
        assert!(ends.clone().all(|end| end == 2 * PART || end == size));
        assert!(
            parts.iter().any(|part| part.start == PART + 100),
            "{parts:?}"
        );
    }

    #[tokio::test]
    async fn an_answer_with_more_than_was_asked_for_is_asked_for_again() {
        let asked = Arc::new(Asked::of(2 * PART));
        let longer = First {
            size: PART,
            ..first(&asked, PART + 1)
        };
        let object = read(Arc::clone(&asked), 2 * PART, Some(longer));
        assert!(whole(object).await.unwrap() == asked.content);
        assert!(asked.parts.lock().unwrap().contains(&(0..PART)));
    }

    proptest! {
        #[test]
        fn parts_follow_each_other_to_the_end(from in 1..10 * PART, more in 0..100 * PART) {
            let size = from + more;
            let mut at = from;
            for part in parts(from, size) {
                prop_assert_eq!(part.start, at);
                prop_assert!(part.end > at && part.end - at <= PART && part.end <= size);
                at = part.end;
            }
            prop_assert_eq!(at, size);
        }
    }
}
