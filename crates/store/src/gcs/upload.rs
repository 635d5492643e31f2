//! An object written to Google as one resumable upload, in fixed memory: chunks that follow each other, each repeated
//! alone from the byte the store has, one on its way while the next is filled.
//!
//! Not by Google's client: its 1.21 drops a chunk whose connection breaks and goes on with the next
//! (docs/adr/0012-resumable-uploads-to-google.md).

use std::time::Duration;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};
use reqwest::{Method, StatusCode, Url};
use tokio::task::JoinHandle;

use super::GcsStore;
use super::json::{ATTEMPTS, Answer, Resource, pause, read};
use crate::port::{Committed, Error, Upload};

/// Bytes of a chunk; a multiple of 256 KiB, as the protocol wants. Two of them are the memory budget.
const CHUNK: usize = 8 << 20;

/// How long the chunk under way is awaited before its upload is aborted.
const ABORT_PATIENCE: Duration = Duration::from_secs(20);

/// Answers about one chunk that do not end it: a store that takes it in small bites, or goes on in circles.
const ROUNDS: u32 = 100;

/// The protocol's status for "go on".
const RESUME: StatusCode = StatusCode::PERMANENT_REDIRECT;

/// An upload the store has begun.
#[derive(Clone)]
struct Session {
    store: GcsStore,
    key: String,
    url: Url,
}

/// A chunk on its way.
struct Chunk {
    /// Where it lies in the object.
    from: u64,
    content: Bytes,
    /// The end of the object and the CRC32C of the whole, if this is the last chunk.
    end: Option<(u64, String)>,
}

impl Session {
    async fn begin(store: &GcsStore, key: &str) -> Result<Self, Error> {
        let mut url = store.json.url(&["upload", "storage", "v1", "b"], None)?;
        url.query_pairs_mut()
            .append_pair("uploadType", "resumable")
            .append_pair("name", key);
        let begun = store
            .json
            .call(key, |client| {
                client
                    .request(Method::POST, url.clone())
                    .header("content-type", "application/json")
                    .body("{}")
            })
            .await
            .map_err(|error| store.place.about_bucket(error))?;
        let place = begun.header("location").and_then(|text| text.parse().ok());
        let place: Url =
            place.ok_or_else(|| Error::Other("an upload without an address".to_owned()))?;
        if url.scheme() == "https" && place.scheme() != "https" {
            return Err(Error::Other("an upload without encryption".to_owned()));
        }
        Ok(Self {
            store: store.clone(),
            key: key.to_owned(),
            url: place,
        })
    }

    /// Sends a chunk, as often as it takes; the last one makes the object.
    async fn send(&self, chunk: &Chunk) -> Result<Option<Resource>, Error> {
        let until = chunk.from + chunk.content.len() as u64;
        let mut held = chunk.from;
        let mut failures = 0;
        // Whether `held` is what the store has; after a failure it may have more, perhaps all.
        let mut known = true;
        let mut rounds = 0;
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
                    tokio::time::sleep(pause(failures)).await;
                    continue;
                }
            };
            known = true;
            if answer.status != RESUME {
                return read(&answer.body).map(Some);
            }
            let now = held_until(&answer);
            if now < chunk.from || now > until {
                return Err(Error::Other(format!(
                    "{now} bytes are held where {} to {until} were sent",
                    chunk.from
                )));
            }
            if now == until && chunk.end.is_none() {
                return Ok(None);
            }
            if now > held {
                (held, failures) = (now, 0);
            }
            rounds += 1;
            if rounds > ROUNDS {
                return Err(Error::Other("the upload does not go on".to_owned()));
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

    /// Tells the store that nothing will come of it. What is not said is true after a week all the same.
    async fn cancel(&self) {
        let json = &self.store.json;
        let request = json
            .client
            .delete(self.url.clone())
            .header("content-length", "0");
        // Success has the status 499 here.
        if let Err((error, _)) = json.once(&self.key, request).await {
            tracing::debug!(%error, key = self.key, "a resumable upload was cancelled");
        }
    }
}

/// How many bytes the store holds; without a range none.
fn held_until(answer: &Answer) -> u64 {
    let range = answer.header("range").unwrap_or_default();
    let last = range
        .rsplit_once('-')
        .and_then(|(_, last)| last.parse().ok());
    last.map_or(0, |last: u64| last + 1)
}

/// See [`Upload`]. Small objects are sent in one request.
pub(super) struct GcsUpload {
    store: GcsStore,
    key: String,
    session: Option<Session>,
    filling: BytesMut,
    under_way: Option<JoinHandle<Result<(), Error>>>,
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
            under_way: None,
            sent: 0,
            crc32c: 0,
        }
    }

    /// Sends what is filled, once the chunk before has arrived.
    async fn send(&mut self) -> Result<(), Error> {
        self.arrived().await?;
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
        self.under_way = Some(tokio::spawn(async move {
            match session.send(&chunk).await? {
                None => Ok(()),
                Some(_) => Err(Error::Other("an object that was not ended".to_owned())),
            }
        }));
        Ok(())
    }

    async fn arrived(&mut self) -> Result<(), Error> {
        match self.under_way.take() {
            None => Ok(()),
            Some(chunk) => chunk.await.unwrap_or_else(|_| {
                Err(Error::Other(
                    "the upload of a chunk was interrupted".to_owned(),
                ))
            }),
        }
    }

    /// Invariant 12: the store is asked what it holds, and that must be what was sent.
    async fn verify(&self, written: u64) -> Result<Committed, Error> {
        let held = self.store.json.object(&self.key).await?;
        let size = held.size()?;
        if size != written {
            return Err(Error::Other(format!(
                "{size} bytes are stored of {written} that were sent"
            )));
        }
        if held
            .crc32c
            .as_ref()
            .is_some_and(|stored| *stored != encoded(self.crc32c))
        {
            return Err(Error::Other(
                "the stored object's checksum is not that of what was sent".to_owned(),
            ));
        }
        let tag = held.tag();
        Ok(Committed { size, tag })
    }
}

/// A CRC32C as Google writes it.
fn encoded(crc32c: u32) -> String {
    STANDARD.encode(crc32c.to_be_bytes())
}

async fn cancel(session: Session, under_way: Option<JoinHandle<Result<(), Error>>>) {
    if let Some(mut chunk) = under_way
        && tokio::time::timeout(ABORT_PATIENCE, &mut chunk)
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
            // A full chunk is only sent when more follows: the last one has to say that it is.
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
        self.arrived().await?;
        let content = std::mem::take(&mut self.filling).freeze();
        let written = self.sent + content.len() as u64;
        let Some(session) = self.session.clone() else {
            self.store.put_whole(&self.key, content).await?;
            return self.verify(written).await;
        };
        let last = Chunk {
            from: self.sent,
            content,
            end: Some((written, encoded(self.crc32c))),
        };
        if session.send(&last).await?.is_none() {
            return Err(Error::Other("the upload does not end".to_owned()));
        }
        self.session = None;
        self.verify(written).await
    }

    async fn abort(mut self: Box<Self>) -> Result<(), Error> {
        if let Some(session) = self.session.take() {
            cancel(session, self.under_way.take()).await;
        }
        Ok(())
    }
}

impl Drop for GcsUpload {
    fn drop(&mut self) {
        if let Some(session) = self.session.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(cancel(session, self.under_way.take()));
        }
    }
}
