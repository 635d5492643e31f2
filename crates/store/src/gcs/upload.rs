//! Writes an object to Google as one resumable upload, in constant memory. Chunks are sent in order. While one chunk is
//! sent, the next chunk is filled. A retry continues after the last byte that the store has received.
//!
//! This module does not use Google's client, because its version 1.21 omits a chunk after a broken connection
//! (docs/adr/0012-resumable-uploads-to-google.md).

use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use reqwest::{Method, StatusCode, Url};
use tokio::task::JoinHandle;
use tracing::Instrument;

use super::json::{ATTEMPTS, Answer, Resource, backoff, metadata, read};
use super::{GcsStore, check, encoded};
use crate::lock::Retention;
use crate::port::{Committed, Error, Upload};

/// Size of a chunk in bytes. The protocol requires a multiple of 256 KiB. An upload uses the memory of two chunks.
const CHUNK: usize = 8 << 20;

/// An abort waits at most this long for the chunk in flight, and then cancels the upload.
const ABORT_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum number of "continue" responses for one chunk. Without a limit, a store that accepts few or no bytes could
/// keep the upload running forever.
const MAX_CONTINUES: u32 = 100;

/// The HTTP status with which the protocol says "continue".
const CONTINUE: StatusCode = StatusCode::PERMANENT_REDIRECT;

/// A resumable upload that the store has started.
#[derive(Clone)]
struct Session {
    store: GcsStore,
    key: String,
    url: Url,
    /// The requested lock of the object.
    retention: Option<Retention>,
}

struct Chunk {
    /// Offset of the chunk in the object, in bytes.
    from: u64,
    content: Bytes,
    /// The object's size in bytes and the CRC32C of its content. `None` except for the last chunk.
    end: Option<(u64, String)>,
}

impl Session {
    async fn begin(store: &GcsStore, key: &str) -> Result<Self, Error> {
        let mut url = store.json.url(&["upload", "storage", "v1", "b"], None)?;
        url.query_pairs_mut()
            .append_pair("uploadType", "resumable")
            .append_pair("name", key);
        let retention = store.retention()?;
        let body = metadata(None, retention.as_ref());
        let begun = store
            .json
            .call(key, |client| {
                client
                    .request(Method::POST, url.clone())
                    .header("content-type", "application/json")
                    .body(body.clone())
            })
            .await
            .map_err(|error| store.place.about_bucket(error))?;
        let place = begun.header("location").and_then(|text| text.parse().ok());
        let place: Url = place.ok_or_else(|| Error::Other("the upload has no URL".to_owned()))?;
        if url.scheme() == "https" && place.scheme() != "https" {
            return Err(Error::Other("the upload URL does not use HTTPS".to_owned()));
        }
        Ok(Self {
            store: store.clone(),
            key: key.to_owned(),
            url: place,
            retention,
        })
    }

    /// Sends a chunk with retries. The last chunk completes the object, so its response contains the metadata of the
    /// object.
    async fn send(&self, chunk: &Chunk) -> Result<Option<Resource>, Error> {
        let until = chunk.from + chunk.content.len() as u64;
        let mut held = chunk.from;
        let mut failures = 0;
        // `known` is true if `held` is the number of bytes that the store has received. After a failed request, the
        // store may have received a part of the chunk, so the next request asks the store for this number.
        let mut known = true;
        let mut continues = 0;
        loop {
            let attempt = if known {
                self.put(chunk, held).await
            } else {
                self.progress().await
            };
            let answer = match attempt {
                Ok(answer) => answer,
                Err((error, lasting)) => {
                    failures += 1;
                    if lasting || failures >= ATTEMPTS {
                        return Err(error);
                    }
                    known = false;
                    tokio::time::sleep(backoff(failures)).await;
                    continue;
                }
            };
            known = true;
            if answer.status != CONTINUE {
                return read(&answer.body).map(Some);
            }
            let now = stored_bytes(&answer);
            if now < chunk.from || now > until {
                return Err(Error::Other(format!(
                    "the store reports {now} received bytes, but the bytes {} to {until} were sent",
                    chunk.from
                )));
            }
            if now == until && chunk.end.is_none() {
                return Ok(None);
            }
            if now > held {
                (held, failures) = (now, 0);
            }
            continues += 1;
            if continues > MAX_CONTINUES {
                return Err(Error::Other("the upload makes no progress".to_owned()));
            }
        }
    }

    async fn put(&self, chunk: &Chunk, held: u64) -> Result<Answer, (Error, bool)> {
        let skip = usize::try_from(held - chunk.from).unwrap_or(usize::MAX);
        let rest = chunk.content.slice(skip.min(chunk.content.len())..);
        let total = match &chunk.end {
            Some((total, _)) => total.to_string(),
            None => "*".to_owned(),
        };
        let range = if rest.is_empty() {
            format!("bytes */{total}")
        } else {
            format!("bytes {held}-{}/{total}", held + rest.len() as u64 - 1)
        };
        let mut request = self
            .store
            .json
            .bulk
            .put(self.url.clone())
            .header("content-range", range);
        if let Some((_, crc32c)) = &chunk.end {
            request = request.header("x-goog-hash", format!("crc32c={crc32c}"));
        }
        self.store.json.once(&self.key, request.body(rest)).await
    }

    async fn progress(&self) -> Result<Answer, (Error, bool)> {
        let json = &self.store.json;
        let request = json
            .client
            .put(self.url.clone())
            .header("content-range", "bytes */*")
            .header("content-length", "0");
        json.once(&self.key, request).await
    }

    /// Cancels the upload. An upload that is not canceled expires after a week.
    async fn cancel(&self) {
        let json = &self.store.json;
        let request = json
            .client
            .delete(self.url.clone())
            .header("content-length", "0");
        // Google responds to a successful cancellation with status 499, so `once` returns an error, which is only
        // logged.
        if let Err((error, _)) = json.once(&self.key, request).await {
            tracing::debug!(%error, key = self.key, "the store responded to the cancellation of a resumable upload");
        }
    }
}

/// The number of bytes that the store has received: 0 if the response has no `Range` header.
fn stored_bytes(answer: &Answer) -> u64 {
    let range = answer.header("range").unwrap_or_default();
    let last = range
        .rsplit_once('-')
        .and_then(|(_, last)| last.parse().ok());
    last.map_or(0, |last: u64| last + 1)
}

/// An upload to Google. An object of one chunk is sent in one request.
pub(super) struct GcsUpload {
    store: GcsStore,
    key: String,
    session: Option<Session>,
    filling: BytesMut,
    in_flight: Option<JoinHandle<Result<(), Error>>>,
    sent: u64,
    crc32c: u32,
}

impl GcsUpload {
    pub(super) fn new(store: GcsStore, key: &str) -> Self {
        Self {
            store,
            key: key.to_owned(),
            session: None,
            filling: BytesMut::new(),
            in_flight: None,
            sent: 0,
            crc32c: 0,
        }
    }

    /// Waits until the store has received the previous chunk, and then starts to send the filled chunk.
    async fn send(&mut self) -> Result<(), Error> {
        self.wait_for_chunk().await?;
        if self.session.is_none() {
            self.session = Some(Session::begin(&self.store, &self.key).await?);
        }
        let Some(session) = self.session.clone() else {
            return Ok(());
        };
        let chunk = Chunk {
            from: self.sent,
            content: std::mem::take(&mut self.filling).freeze(),
            end: None,
        };
        self.sent += chunk.content.len() as u64;
        self.in_flight = Some(tokio::spawn(async move {
            match session.send(&chunk).await? {
                None => Ok(()),
                Some(_) => Err(Error::Other(
                    "the store completed the object before the last chunk".to_owned(),
                )),
            }
        }));
        Ok(())
    }

    async fn wait_for_chunk(&mut self) -> Result<(), Error> {
        match self.in_flight.take() {
            None => Ok(()),
            Some(chunk) => chunk.await.unwrap_or_else(|_| {
                Err(Error::Other(
                    "the upload of a chunk was interrupted".to_owned(),
                ))
            }),
        }
    }

    async fn verify(
        &self,
        written: u64,
        retention: Option<&Retention>,
    ) -> Result<Committed, Error> {
        let held = self.store.json.object(&self.key).await?;
        check(&held, written, &encoded(self.crc32c))?;
        self.store.check_lock(&self.key, &held, retention).await?;
        let tag = held.tag();
        Ok(Committed { size: written, tag })
    }
}

async fn cancel(session: Session, in_flight: Option<JoinHandle<Result<(), Error>>>) {
    if let Some(mut chunk) = in_flight
        && tokio::time::timeout(ABORT_TIMEOUT, &mut chunk)
            .await
            .is_err()
    {
        chunk.abort();
    }
    session.cancel().await;
}

#[async_trait]
impl Upload for GcsUpload {
    async fn write(&mut self, chunk: Bytes) -> Result<(), Error> {
        let mut chunk = chunk;
        self.crc32c = crc32c::crc32c_append(self.crc32c, &chunk);
        while !chunk.is_empty() {
            // The request with the last chunk completes the object. A full chunk is therefore sent only when more
            // bytes follow, because only then it is known not to be the last chunk.
            if self.filling.len() == CHUNK {
                self.send().await?;
            }
            if self.filling.capacity() == 0 {
                self.filling.reserve(CHUNK);
            }
            let room = CHUNK - self.filling.len();
            let now = chunk.split_to(room.min(chunk.len()));
            self.filling.extend_from_slice(&now);
        }
        Ok(())
    }

    async fn commit(mut self: Box<Self>) -> Result<Committed, Error> {
        self.wait_for_chunk().await?;
        let content = std::mem::take(&mut self.filling).freeze();
        let written = self.sent + content.len() as u64;
        let Some(session) = self.session.clone() else {
            let retention = self.store.retention()?;
            let retention = retention.as_ref();
            self.store.put_whole(&self.key, content, retention).await?;
            return self.verify(written, retention).await;
        };
        let last = Chunk {
            from: self.sent,
            content,
            end: Some((written, encoded(self.crc32c))),
        };
        if session.send(&last).await?.is_none() {
            return Err(Error::Other(
                "the store did not complete the upload".to_owned(),
            ));
        }
        self.session = None;
        self.verify(written, session.retention.as_ref()).await
    }

    async fn abort(mut self: Box<Self>) -> Result<(), Error> {
        if let Some(session) = self.session.take() {
            cancel(session, self.in_flight.take()).await;
        }
        Ok(())
    }
}

impl Drop for GcsUpload {
    fn drop(&mut self) {
        if let Some(session) = self.session.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(cancel(session, self.in_flight.take()).in_current_span());
        }
    }
}
