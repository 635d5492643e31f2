//! An object read from its beginning; a connection that breaks is made again where it broke.

use std::time::Duration;

use aws_sdk_s3::operation::get_object::GetObjectOutput;
use aws_sdk_s3::primitives::ByteStream;
use futures::stream::{self, StreamExt};

use super::S3Store;
use crate::port::{Error, ObjectStream};

/// Attempts in a row that bring not one byte.
const ATTEMPTS: u32 = 5;

/// The longest silence of a connection.
const SILENCE: Duration = Duration::from_secs(30);

struct Reading {
    store: S3Store,
    key: String,
    tag: Option<String>,
    body: Option<ByteStream>,
    read: u64,
    size: u64,
    failures: u32,
}

/// Opens the object.
pub(super) async fn open(store: S3Store, key: String) -> Result<ObjectStream, Error> {
    let answer = request(&store, &key, None, 0).await?;
    let size = answer
        .content_length()
        .and_then(|size| u64::try_from(size).ok())
        .ok_or_else(|| Error::Other("an object without a size".to_owned()))?;
    let reading = Reading {
        tag: answer.e_tag().map(str::to_owned),
        body: Some(answer.body),
        store,
        key,
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
    Ok(ObjectStream {
        size,
        chunks: chunks.boxed(),
    })
}

async fn request(
    store: &S3Store,
    key: &str,
    tag: Option<String>,
    from: u64,
) -> Result<GetObjectOutput, Error> {
    // Only the very object that was begun may be continued.
    let range = (from > 0).then(|| format!("bytes={from}-"));
    store
        .client
        .get_object()
        .bucket(&store.place.bucket)
        .key(key)
        .set_range(range)
        .set_if_match(tag)
        .send()
        .await
        .map_err(|error| store.place.explain(key, &error))
}

impl Reading {
    async fn next(&mut self) -> Result<bytes::Bytes, Error> {
        let body = match &mut self.body {
            Some(body) => body,
            body @ None => {
                let answer = request(&self.store, &self.key, self.tag.clone(), self.read).await?;
                body.insert(answer.body)
            }
        };
        let chunk = tokio::time::timeout(SILENCE, body.next())
            .await
            .map_err(|_| Error::Timeout(self.store.place.endpoint.clone()))?;
        let chunk = match chunk {
            Some(Ok(chunk)) => chunk,
            Some(Err(error)) => return Err(self.store.place.broken(&error)),
            None => {
                return Err(Error::Unreachable {
                    endpoint: self.store.place.endpoint.clone(),
                    detail: format!("the object ends after {} of {} bytes", self.read, self.size),
                });
            }
        };
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
