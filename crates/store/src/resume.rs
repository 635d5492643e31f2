//! An object read from its beginning; a connection that breaks is made again where it broke. Knows nothing of any
//! store.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt};

use crate::port::{Error, ObjectStream};

/// Attempts in a row that bring not one byte.
const ATTEMPTS: u32 = 5;

/// The longest silence of a connection.
const SILENCE: Duration = Duration::from_secs(30);

/// The content of an object from some byte on.
pub(crate) type Body = BoxStream<'static, Result<Bytes, Error>>;

/// One version of an object: what replaces it while it is read is not read.
#[async_trait]
pub(crate) trait Version: Send + Sync + 'static {
    /// The content from byte `from` on.
    async fn body(&self, from: u64) -> Result<Body, Error>;
    /// Where it comes from, for messages.
    fn endpoint(&self) -> String;
}

struct Reading<V> {
    version: V,
    body: Option<Body>,
    read: u64,
    size: u64,
    failures: u32,
}

/// Reads `size` bytes of a version; `body` is its content, if it was asked for already.
pub(crate) fn resumed<V: Version>(version: V, size: u64, body: Option<Body>) -> ObjectStream {
    let reading = Reading {
        version,
        body,
        read: 0,
        size,
        failures: 0,
    };
    let chunks = stream::try_unfold(reading, |mut reading| async move {
        loop {
            if reading.read == reading.size {
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
    ObjectStream {
        size,
        chunks: chunks.boxed(),
    }
}

impl<V: Version> Reading<V> {
    async fn next(&mut self) -> Result<Bytes, Error> {
        let body = match &mut self.body {
            Some(body) => body,
            body @ None => body.insert(self.version.body(self.read).await?),
        };
        let chunk = tokio::time::timeout(SILENCE, body.next())
            .await
            .map_err(|_| Error::Timeout(self.version.endpoint()))?;
        let chunk = chunk.unwrap_or_else(|| {
            Err(Error::Unreachable {
                endpoint: self.version.endpoint(),
                detail: format!("the object ends after {} of {} bytes", self.read, self.size),
            })
        })?;
        self.failures = 0;
        self.read += chunk.len() as u64;
        if self.read > self.size {
            return Err(Error::Other(
                "the object is longer than announced".to_owned(),
            ));
        }
        Ok(chunk)
    }
}
