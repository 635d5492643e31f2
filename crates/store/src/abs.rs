//! Azure Blob Storage: one container, accessed with one identity.
//!
//! Each object is a block blob. The service checks each block against its MD5, and a commit joins the blocks to a blob.
//! Uncommitted blocks are invisible. Azure deletes them after a week and has no request to delete them earlier
//! (<https://learn.microsoft.com/rest/api/storageservices/put-block>).

use std::num::NonZeroU32;
use std::ops::Range;

use api::problem::Chain;
use api::storage::ObjectLock;
use async_trait::async_trait;
use azure_core::Context;
use azure_core::CustomHeaders;
use azure_core::headers::{CONTENT_MD5, Headers};
use azure_core::request_options::IfMatchCondition;
use azure_storage_blobs::blob::{Blob, BlobBlockType, BlockList};
use azure_storage_blobs::prelude::{BlobClient, BlockId, ContainerClient};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::{Stream, StreamExt, TryStreamExt};
use md5::{Digest as _, Md5};

use crate::failure::Place;
use crate::limits::{Listing, MAX_PAGE, too_long, within};
use crate::lock::{self, Retention};
use crate::parts::{PART, Parts, Sink, Written};
use crate::port::{Committed, Error, Object, ObjectStream, Store, Unfinished, Upload};
use crate::resume::{Body, Version, read};

mod access;
mod identity;
mod markup;
mod transport;

pub(crate) use access::account_at;
pub use access::{AbsAccess, AbsCloud, AbsConfig};

/// Number of blobs requested for each page of a listing. The number is small, because a page with Azure's default of
/// 5,000 blobs can have 10 MiB.
const BLOBS_PER_PAGE: u32 = 1_000;

/// A [`Store`] in one container of Azure Blob Storage.
#[derive(Clone)]
pub struct AbsStore {
    /// The client for requests that send no content.
    container: ContainerClient,
    /// The client that sends blocks. Its timeout is long enough for slow connections.
    bulk: ContainerClient,
    place: Place,
    part: usize,
    /// The lock of new blobs against deletion.
    lock: Option<ObjectLock>,
}

impl AbsStore {
    /// Creates the client of a container. Sends no request.
    ///
    /// # Errors
    /// Fails if the endpoint is missing or invalid.
    pub fn new(config: &AbsConfig) -> Result<Self, Error> {
        let place = Place {
            bucket: config.container.clone(),
            endpoint: config.display_endpoint(),
        };
        let (container, bulk) = access::clients(config)?;
        Ok(Self {
            container,
            bulk,
            place,
            part: PART,
            lock: None,
        })
    }

    /// Locks new blobs against deletion.
    #[must_use]
    pub fn with_lock(self, lock: Option<ObjectLock>) -> Self {
        Self { lock, ..self }
    }

    fn retention(&self) -> Result<Option<Retention>, Error> {
        self.lock.as_ref().map(Retention::azure).transpose()
    }

    async fn all_objects(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        let mut request = self.container.list_blobs().prefix(prefix.to_owned());
        if let Some(most) = NonZeroU32::new(BLOBS_PER_PAGE) {
            request = request.max_results(most);
        }
        let mut pages = Box::pin(request.into_stream());
        let mut listing = Listing::new(&self.place, prefix);
        while let Some(page) = pages.next().await {
            let page = page.map_err(|error| self.place.about_bucket(self.explain("", &error)))?;
            for blob in page.blobs.blobs() {
                let text = blob.name.len() + blob.properties.etag.to_string().len();
                listing.push(described(blob), text)?;
            }
            if let Some(next) = &page.next_marker {
                listing.advance(next.as_str())?;
            }
        }
        Ok(listing.finish())
    }

    fn blob(&self, key: &str) -> BlobClient {
        self.container.blob_client(key)
    }

    async fn properties(&self, key: &str) -> Result<Blob, Error> {
        let answer = self.blob(key).get_properties().await;
        answer
            .map(|answer| answer.blob)
            .map_err(|error| self.explain(key, &error))
    }

    async fn put_whole(
        &self,
        key: &str,
        content: Bytes,
        retention: Option<&Retention>,
    ) -> Result<(), Error> {
        let mut headers = md5_of(&content);
        add_lock(&mut headers, retention);
        self.bulk
            .blob_client(key)
            .put_block_blob(content)
            .context(with(headers))
            .await
            .map(|_| ())
            .map_err(|error| self.place.about_bucket(self.explain(key, &error)))
    }

    /// Reads the properties of a new blob. If the service does not confirm the requested lock, this function deletes
    /// the blob and fails.
    async fn locked_properties(
        &self,
        key: &str,
        retention: Option<&Retention>,
    ) -> Result<Blob, Error> {
        let mut request = self.blob(key).get_properties();
        if let Some(retention) = retention {
            let mut headers = Headers::new();
            headers.insert(transport::EXPECTED_MODE, retention.mode.clone());
            headers.insert(transport::EXPECTED_UNTIL, retention.until.to_string());
            request = request.context(with(headers));
        }
        let answer = request.await.map_err(|error| self.explain(key, &error));
        let is_unlocked =
            matches!(&answer, Err(Error::Invalid { field, .. }) if field == lock::FIELD);
        if is_unlocked && let Err(error) = self.delete(key).await {
            tracing::warn!(%error, key, "a blob without a lock could not be deleted");
        }
        answer.map(|answer| answer.blob)
    }

    /// Invariant 12: the size that the service reports must match the sent data.
    async fn verify(
        &self,
        key: &str,
        written: u64,
        retention: Option<&Retention>,
    ) -> Result<Committed, Error> {
        let held = self.locked_properties(key, retention).await?.properties;
        let size = held.content_length;
        if size == written {
            let tag = Some(held.etag.to_string());
            Ok(Committed { size, tag })
        } else {
            Err(Error::Other(format!(
                "the object in the store has {size} bytes, but {written} bytes were sent"
            )))
        }
    }

    fn explain(&self, key: &str, error: &azure_core::Error) -> Error {
        let http = error.as_http_error();
        let (status, code) = match (error.kind(), http) {
            (azure_core::error::ErrorKind::HttpResponse { status, error_code }, _) => {
                (Some(*status), error_code.as_deref())
            }
            (_, Some(http)) => (Some(http.status()), http.error_code()),
            _ => (None, None),
        };
        let message = http
            .and_then(|http| http.error_message())
            .unwrap_or_default();
        if let Some(status) = status {
            return self
                .place
                .answered(key, code, message, Some(u16::from(status)));
        }
        let text = Chain(error).to_string();
        if text.contains(transport::TOO_LONG) {
            too_long(&self.place, MAX_PAGE)
        } else if text.contains(transport::NOT_LOCKED) {
            lock::not_confirmed()
        } else if text.contains(markup::FAULT) {
            self.place.excessive(format!(
                "sends a list that the operator rejects: check that the endpoint is an object store ({text})"
            ))
        } else if text.contains("timed out") {
            Error::Timeout(self.place.endpoint.clone())
        } else if text.contains(identity::NO_TOKEN) {
            Error::NoIdentity(text)
        } else {
            self.place.unreachable(&text)
        }
    }
}

/// A header with the MD5 of the content. The service rejects the request if the received content has another MD5.
fn md5_of(content: &[u8]) -> Headers {
    let mut headers = Headers::new();
    headers.insert(CONTENT_MD5, STANDARD.encode(Md5::digest(content)));
    headers
}

/// Adds the lock to the headers of a request that creates a blob
/// (<https://learn.microsoft.com/rest/api/storageservices/put-blob>).
fn add_lock(headers: &mut Headers, retention: Option<&Retention>) {
    if let Some(retention) = retention {
        headers.insert(transport::LOCK_MODE, retention.mode.clone());
        headers.insert(transport::LOCK_UNTIL, retention.http_date());
    }
}

/// A request context with additional headers.
fn with(headers: Headers) -> Context {
    let mut with = Context::new();
    with.insert(CustomHeaders::from(headers));
    with
}

fn described(blob: &Blob) -> Object {
    Object {
        key: blob.name.clone(),
        size: blob.properties.content_length,
        modified_unix_seconds: Some(blob.properties.last_modified.unix_timestamp()),
        tag: Some(blob.properties.etag.to_string()),
    }
}

#[derive(Clone)]
struct AbsSink {
    store: AbsStore,
    key: String,
    /// A random number in the block IDs of this upload. It distinguishes these blocks from the blocks of other uploads
    /// of the same key.
    upload: u64,
}

#[async_trait]
impl Sink for AbsSink {
    type Part = BlockId;

    async fn begin(&self) -> Result<(), Error> {
        Ok(())
    }

    async fn send(&self, number: usize, content: Bytes) -> Result<BlockId, Error> {
        // The Azure API requires that all block IDs of a blob have the same length, so the ID consists of numbers of
        // fixed width.
        let id = BlockId::new(format!("{:016x}-{number:08}", self.upload));
        let headers = md5_of(&content);
        let store = &self.store;
        let sent = store
            .bulk
            .blob_client(&self.key)
            .put_block(id.clone(), content)
            .context(with(headers))
            .await;
        match sent.map_err(|error| store.explain(&self.key, &error)) {
            Ok(_) => Ok(id),
            Err(error) => Err(store.place.about_bucket(error)),
        }
    }
}

struct AbsUpload {
    sink: AbsSink,
    parts: Parts<AbsSink>,
}

#[async_trait]
impl Upload for AbsUpload {
    async fn write(&mut self, chunk: Bytes) -> Result<(), Error> {
        self.parts.write(chunk).await
    }

    async fn commit(mut self: Box<Self>) -> Result<Committed, Error> {
        let AbsSink { store, key, .. } = &self.sink;
        let retention = store.retention()?;
        let retention = retention.as_ref();
        match self.parts.finish().await? {
            Written::Whole(content) => store.put_whole(key, content, retention).await?,
            Written::Parts(blocks) => {
                let mut list = BlockList::default();
                list.blocks
                    .extend(blocks.into_iter().map(BlobBlockType::Uncommitted));
                let mut headers = Headers::new();
                add_lock(&mut headers, retention);
                let commit = store.bulk.blob_client(key).put_block_list(list);
                let committed = commit.context(with(headers)).await;
                if let Err(error) = committed {
                    let failure = store.explain(key, &error);
                    // The client retries `put_block_list`. If the store has processed the first request but its
                    // response was lost, the store rejects the retry. The upload has succeeded if the blob consists of
                    // the blocks of this upload.
                    return if self.has_own_blocks().await {
                        store.verify(key, self.parts.written(), retention).await
                    } else {
                        Err(failure)
                    };
                }
            }
        }
        store.verify(key, self.parts.written(), retention).await
    }

    async fn abort(mut self: Box<Self>) -> Result<(), Error> {
        self.parts.take_in_flight().wait().await;
        Ok(())
    }
}

impl AbsUpload {
    /// Whether the committed blob consists of the blocks of this upload. False if the block list cannot be read.
    async fn has_own_blocks(&self) -> bool {
        let blob = self.sink.store.blob(&self.sink.key);
        let Ok(answer) = blob.get_block_list().await else {
            return false;
        };
        let prefix = format!("{:016x}-", self.sink.upload);
        let blocks = answer.block_with_size_list.blocks;
        !blocks.is_empty()
            && blocks.iter().all(|block| match &block.block_list_type {
                BlobBlockType::Committed(id) => id.bytes().starts_with(prefix.as_bytes()),
                _ => false,
            })
    }
}

struct AbsVersion {
    store: AbsStore,
    key: String,
    tag: String,
}

#[async_trait]
impl Version for AbsVersion {
    async fn body(&self, part: Range<u64>) -> Result<Body, Error> {
        // The client splits a read into requests of `chunk_size` bytes. With a `chunk_size` of at least `wanted`, the
        // client sends only one request. With a `chunk_size` below 4 MiB, the client would request a checksum that few
        // Azure-compatible servers calculate.
        let wanted = part.end.saturating_sub(part.start);
        let pages = self
            .store
            .blob(&self.key)
            .get()
            .range(part.start..)
            .chunk_size(wanted.max(4 << 20))
            .if_match(IfMatchCondition::Match(self.tag.clone()))
            .into_stream();
        let page = Box::pin(pages).next().await;
        let page = page
            .ok_or_else(|| self.store.place.unreachable("no response"))?
            .map_err(|error| self.store.explain(&self.key, &error))?;
        let store = self.store.clone();
        let key = self.key.clone();
        let body = page.data.map_err(move |error| store.explain(&key, &error));
        Ok(up_to(wanted, body).boxed())
    }

    fn endpoint(&self) -> String {
        self.store.place.endpoint.clone()
    }
}

/// Ends a body after `wanted` bytes.
fn up_to(
    wanted: u64,
    body: impl Stream<Item = Result<Bytes, Error>> + Send,
) -> impl Stream<Item = Result<Bytes, Error>> + Send {
    body.scan(wanted, |left, chunk| {
        let chunk = chunk.map(|mut chunk| {
            chunk.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
            *left -= chunk.len() as u64;
            chunk
        });
        futures::future::ready(Some(chunk))
    })
}

#[async_trait]
impl Store for AbsStore {
    fn location(&self) -> String {
        format!("abs://{}", self.place.bucket)
    }

    fn endpoint(&self) -> String {
        self.place.endpoint.clone()
    }

    async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error> {
        let sink = AbsSink {
            store: self.clone(),
            key: key.to_owned(),
            upload: rand::random(),
        };
        Ok(Box::new(AbsUpload {
            parts: Parts::new(sink.clone(), self.part),
            sink,
        }))
    }

    async fn put(&self, key: &str, content: Bytes) -> Result<(), Error> {
        let retention = self.retention()?;
        let retention = retention.as_ref();
        self.put_whole(key, content, retention).await?;
        if retention.is_some() {
            self.locked_properties(key, retention).await?;
        }
        Ok(())
    }

    async fn get(&self, key: &str) -> Result<ObjectStream, Error> {
        let blob = self.properties(key).await?;
        let size = blob.properties.content_length;
        let version = AbsVersion {
            store: self.clone(),
            key: key.to_owned(),
            tag: blob.properties.etag.to_string(),
        };
        Ok(read(version, size, None))
    }

    async fn head(&self, key: &str) -> Result<Option<Object>, Error> {
        match self.properties(key).await {
            Ok(blob) => Ok(Some(Object {
                key: key.to_owned(),
                ..described(&blob)
            })),
            Err(Error::NoSuchObject { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        let listing = self.all_objects(prefix);
        within(&self.place, prefix, listing).await
    }

    async fn delete(&self, key: &str) -> Result<(), Error> {
        let answer = self.blob(key).delete().await;
        match answer.map_err(|error| self.explain(key, &error)) {
            Ok(_) | Err(Error::NoSuchObject { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn unfinished(&self, _prefix: &str) -> Result<Vec<Unfinished>, Error> {
        Ok(Vec::new())
    }

    async fn discard(&self, _unfinished: &Unfinished) -> Result<(), Error> {
        Ok(())
    }
}
