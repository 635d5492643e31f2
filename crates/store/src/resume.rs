//! Reads an object of a store. If a connection breaks, the read continues at the last offset.
//!
//! Several parts of a large object are read concurrently, because a store limits the throughput of one connection (85
//! to 90 MB/s on S3: <https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-guidelines.html>).

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};

use crate::port::{Error, ObjectStream};

/// A read fails after this number of consecutive attempts without data.
const ATTEMPTS: u32 = 5;

/// An attempt fails if its connection delivers no data for this time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Size in bytes of the parts in which an object is read.
pub(crate) const PART: u64 = 8 << 20;

/// Number of parts that are requested or buffered at the same time. A read uses the memory of these parts, and of the
/// part that the caller consumes.
const CONCURRENT_PARTS: usize = 6;

/// Minimum size of a chunk in bytes, except at the end of a part. Smaller chunks are joined.
const MIN_CHUNK: usize = 16 << 10;

/// The content of a part of an object.
pub(crate) type Body = BoxStream<'static, Result<Bytes, Error>>;

/// One version of an object. If the object is replaced, the read fails and returns no bytes of the new version.
#[async_trait]
pub(crate) trait Version: Send + Sync + 'static {
    /// Reads the range `part` of the version. The range must not be empty.
    async fn body(&self, part: Range<u64>) -> Result<Body, Error>;
    /// The endpoint, as messages show it.
    fn endpoint(&self) -> String;
}

/// The first bytes of an object, from a response that has already begun.
pub(crate) struct First {
    /// Number of bytes in `body`.
    pub(crate) size: u64,
    /// The first bytes of the object.
    pub(crate) body: Body,
}

/// Reads all `size` bytes of a version. `first` is the response with the first part, if the caller has requested that
/// part. If `first` contains the whole object, this function sends no request.
pub(crate) fn read<V: Version>(version: V, size: u64, first: Option<First>) -> ObjectStream {
    let version = Arc::new(version);
    let first_size = first.as_ref().map_or(PART, |first| first.size);
    let chunks = if first_size >= size {
        resumed(version, 0..size, first.map(|first| first.body))
    } else {
        let first = stream::iter([(0..first_size, first.map(|first| first.body))]);
        let parts = first.chain(stream::iter(
            parts(first_size, size).map(|part| (part, None)),
        ));
        parts
            .map(move |(part, body)| joined(resumed(Arc::clone(&version), part, body)))
            .buffered(CONCURRENT_PARTS)
            .map_ok(|chunks| stream::iter(chunks.into_iter().map(Ok)))
            .try_flatten()
            .boxed()
    };
    ObjectStream { size, chunks }
}

/// Fails if a response does not start at the requested offset, because some stores and proxies ignore ranges.
/// `content_range` is a header such as `bytes 8-99/1234`. Without this header, the response is accepted if the offset
/// is 0, or if the body has the length of the range.
pub(crate) fn check_range(
    content_range: Option<&str>,
    length: Option<u64>,
    part: &Range<u64>,
) -> Result<(), Error> {
    let start_in = |range: &str| {
        let (start, _) = range.split_once('-')?;
        start.rsplit(' ').next()?.parse::<u64>().ok()
    };
    let begins = match content_range {
        Some(range) => start_in(range) == Some(part.start),
        None => part.start == 0 || length == Some(part.end.saturating_sub(part.start)),
    };
    if begins {
        return Ok(());
    }
    let range = content_range.unwrap_or("the whole object");
    Err(Error::Other(format!(
        "the response contains {range}, but the bytes from {} on were requested",
        part.start
    )))
}

/// The ranges of the parts from the offset `from` to the end of an object.
fn parts(from: u64, size: u64) -> impl Iterator<Item = Range<u64>> + Send {
    let next = move |part: &Range<u64>| {
        (part.end < size).then(|| part.end..part.end.saturating_add(PART).min(size))
    };
    std::iter::successors(next(&(0..from)), next)
}

/// Reads a part and joins small chunks. A store can send each byte in its own chunk, and each chunk takes 32 bytes of
/// memory in addition to its content.
async fn joined(mut part: Body) -> Result<Vec<Bytes>, Error> {
    let (mut chunks, mut small) = (Vec::new(), BytesMut::new());
    while let Some(chunk) = part.try_next().await? {
        if small.is_empty() && chunk.len() >= MIN_CHUNK {
            chunks.push(chunk);
            continue;
        }
        small.extend_from_slice(&chunk);
        if small.len() >= MIN_CHUNK {
            chunks.push(small.split().freeze());
        }
    }
    if !small.is_empty() {
        chunks.push(small.freeze());
    }
    Ok(chunks)
}

struct Reading<V> {
    version: Arc<V>,
    body: Option<Body>,
    part: Range<u64>,
    failures: u32,
}

/// Reads a part with retries. `body` is the response with this part, if the caller has requested the part.
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
        let chunk = tokio::time::timeout(IDLE_TIMEOUT, body.next())
            .await
            .map_err(|_| Error::Timeout(self.version.endpoint()))?;
        let chunk = chunk.unwrap_or_else(|| {
            let Range { start, end } = self.part;
            Err(Error::Unreachable {
                endpoint: self.version.endpoint(),
                detail: format!("the response ended at byte {start} instead of byte {end}"),
            })
        })?;
        let read = self.part.start.saturating_add(chunk.len() as u64);
        if read > self.part.end {
            return Err(Error::Other(
                "the response is longer than requested".to_owned(),
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

    /// An object that records the requested ranges.
    struct TestObject {
        content: Bytes,
        /// Number of requests whose connection breaks, and number of bytes that each of these connections delivers
        /// before it breaks.
        breaks: (AtomicUsize, usize),
        /// If set, each request waits until this number of requests are in flight.
        concurrent: Option<Barrier>,
        parts: Mutex<Vec<Range<u64>>>,
    }

    impl TestObject {
        fn of(size: u64) -> Self {
            let size = usize::try_from(size).unwrap();
            let bytes = (0_u32..).map(|at| (at / 3 % 251).to_le_bytes()[0]);
            // The length of `block` does not divide the part size, so no two parts have the same content.
            let block: Vec<u8> = bytes.take(999_983).collect();
            let mut content = block.repeat(size / block.len() + 1);
            content.truncate(size);
            Self {
                content: content.into(),
                breaks: (AtomicUsize::new(0), 0),
                concurrent: None,
                parts: Mutex::default(),
            }
        }

        fn slice(&self, part: &Range<u64>) -> Bytes {
            let at = |byte: u64| usize::try_from(byte).unwrap();
            self.content.slice(at(part.start)..at(part.end))
        }
    }

    #[async_trait]
    impl Version for Arc<TestObject> {
        async fn body(&self, part: Range<u64>) -> Result<Body, Error> {
            assert!(!part.is_empty(), "{part:?}");
            self.parts.lock().unwrap().push(part.clone());
            if let Some(concurrent) = &self.concurrent {
                concurrent.wait().await;
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

    fn first(object: &TestObject, size: u64) -> First {
        let body = stream::iter([Ok(object.slice(&(0..size)))]).boxed();
        First { size, body }
    }

    #[tokio::test]
    async fn parts_are_read_concurrently_and_in_order() {
        let size = 3 * CONCURRENT_PARTS as u64 * PART;
        let source = Arc::new(TestObject {
            // If the reader requested one part after the other, the first request would wait at this barrier forever.
            concurrent: Some(Barrier::new(CONCURRENT_PARTS)),
            ..TestObject::of(size)
        });
        let object = read(Arc::clone(&source), size, None);
        let read = tokio::time::timeout(IDLE_TIMEOUT, whole(object)).await;
        assert!(read.unwrap().unwrap() == source.content);
        let parts = source.parts.lock().unwrap();
        assert_eq!(parts.len(), 3 * CONCURRENT_PARTS);
        assert!(parts.iter().all(|part| part.end - part.start == PART));
    }

    #[tokio::test]
    async fn object_of_up_to_one_part_is_read_with_at_most_one_request() {
        for size in [0, 1, PART - 1, PART] {
            let source = Arc::new(TestObject::of(size));
            let object = read(Arc::clone(&source), size, None);
            assert!(whole(object).await.unwrap() == source.content, "{size}");
            assert_eq!(source.parts.lock().unwrap().len(), usize::from(size > 0));
        }
    }

    #[tokio::test]
    async fn read_of_interrupted_part_resumes_at_last_received_byte() {
        let size = 2 * PART + 5;
        let source = Arc::new(TestObject {
            breaks: (AtomicUsize::new(3), 100),
            ..TestObject::of(size)
        });
        let object = read(Arc::clone(&source), size, Some(first(&source, PART)));
        assert!(whole(object).await.unwrap() == source.content);
        let mut parts = source.parts.lock().unwrap().clone();
        parts.sort_by_key(|part| part.start);
        let ends = parts.iter().map(|part| part.end);
        assert!(ends.clone().all(|end| end == 2 * PART || end == size));
        assert!(
            parts.iter().any(|part| part.start == PART + 100),
            "{parts:?}"
        );
    }

    #[tokio::test]
    async fn hostile_store_small_chunks_are_joined() {
        let content = TestObject::of(100_000).content;
        for size in [1, 1000, MIN_CHUNK - 1, MIN_CHUNK, 50_000] {
            let chunks: Vec<_> = content
                .chunks(size)
                .map(|chunk| Ok(content.slice_ref(chunk)))
                .collect();
            let joined = joined(stream::iter(chunks).boxed()).await.unwrap();
            assert!(joined.concat() == content, "{size}");
            let (_, full) = joined.split_last().unwrap();
            assert!(full.iter().all(|chunk| chunk.len() >= MIN_CHUNK), "{size}");
        }
    }

    #[tokio::test]
    async fn part_with_too_many_bytes_is_requested_again() {
        let source = Arc::new(TestObject::of(2 * PART));
        let longer = First {
            size: PART,
            ..first(&source, PART + 1)
        };
        let object = read(Arc::clone(&source), 2 * PART, Some(longer));
        assert!(whole(object).await.unwrap() == source.content);
        assert!(source.parts.lock().unwrap().contains(&(0..PART)));
    }

    proptest! {
        #[test]
        fn requested_parts_of_download_are_contiguous(from in 1..10 * PART, more in 0..100 * PART) {
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
