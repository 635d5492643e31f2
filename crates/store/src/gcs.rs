//! Google Cloud Storage: one bucket, accessed with one identity over Google's JSON API.
//!
//! Google's own client reads responses of any size into memory. It lists and looks up objects only over gRPC, and its
//! chunked uploads have errors. This module therefore uses this client only to write small objects at Google's own
//! endpoint, and the JSON API for all other requests.
//!
//! Google receives the chunks of an upload one after another. An unfinished upload is invisible and costs nothing.
//! Google removes it after a week (<https://cloud.google.com/storage/docs/resumable-uploads>).

use std::ops::Range;

use api::storage::ObjectLock;
use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};

use crate::failure::Place;
use crate::limits::within;
use crate::lock::{self, Retention};
use crate::port::{Error, Object, ObjectStream, Store, Unfinished, Upload};
use crate::resume::{Body, Version, read};

mod access;
mod json;
mod package;
mod upload;

pub use access::{GcsAccess, GcsConfig};
use json::{Json, Resource};
use package::Package;

/// A [`Store`] in one bucket of Google Cloud Storage.
#[derive(Clone)]
pub struct GcsStore {
    /// Google's own client. `None` if the user has set the endpoint.
    package: Option<Package>,
    json: Json,
    place: Place,
    /// The lock of new objects against deletion.
    lock: Option<ObjectLock>,
}

impl GcsStore {
    /// Creates the client of a bucket. Sends no request.
    ///
    /// # Errors
    /// Fails if the endpoint or the credentials are invalid.
    pub async fn new(config: GcsConfig) -> Result<Self, Error> {
        let is_googles = !config.has_own_endpoint();
        Self::with_package(config, is_googles).await
    }

    /// Like [`GcsStore::new`], but uses Google's own client for small objects even if the user has set an endpoint. For
    /// tests.
    ///
    /// # Errors
    /// Fails if the endpoint or the credentials are invalid.
    #[cfg(any(test, feature = "testing"))]
    pub async fn with_trusted_endpoint(config: GcsConfig) -> Result<Self, Error> {
        Self::with_package(config, true).await
    }

    async fn with_package(config: GcsConfig, trusted: bool) -> Result<Self, Error> {
        let endpoint = config.endpoint()?;
        let place = Place {
            bucket: config.bucket.clone(),
            endpoint: endpoint.as_str().trim_end_matches('/').to_owned(),
        };
        let credentials = config.access.credentials()?;
        let package = if trusted {
            Some(Package::new(credentials.clone(), place.clone()).await?)
        } else {
            None
        };
        Ok(Self {
            package,
            json: Json::new(endpoint, credentials, place.clone())?,
            place,
            lock: None,
        })
    }

    /// Locks new objects against deletion.
    #[must_use]
    pub fn with_lock(self, lock: Option<ObjectLock>) -> Self {
        Self { lock, ..self }
    }

    fn retention(&self) -> Result<Option<Retention>, Error> {
        self.lock.as_ref().map(Retention::google).transpose()
    }

    /// Fails if the store does not confirm the requested lock of the object `stored`. Before it fails, this function
    /// deletes the object.
    async fn check_lock(
        &self,
        key: &str,
        stored: &Resource,
        retention: Option<&Retention>,
    ) -> Result<(), Error> {
        if retention.is_none_or(|retention| stored.has_lock(retention)) {
            return Ok(());
        }
        if let Err(error) = self.json.delete(key).await {
            tracing::warn!(%error, key, "an object without a lock could not be deleted");
        }
        Err(lock::not_confirmed())
    }

    /// Writes an object in one request.
    async fn put_whole(
        &self,
        key: &str,
        content: Bytes,
        retention: Option<&Retention>,
    ) -> Result<(), Error> {
        // Google's own client (`package`) does not report the lock of the object that it has written, so it writes only
        // objects without a lock.
        if let Some(package) = self.package.as_ref().filter(|_| retention.is_none()) {
            return package.put(key, content).await;
        }
        let (size, crc32c) = (content.len() as u64, encoded(crc32c::crc32c(&content)));
        let metadata = json::metadata(Some((key, crc32c.as_str())), retention);
        let stored = self.json.put(key, &metadata, &content).await;
        let stored = stored.map_err(|error| self.place.about_bucket(error))?;
        check(&stored, size, &crc32c)?;
        self.check_lock(key, &stored, retention).await
    }
}

/// A CRC32C in Google's format: big endian, in base64.
fn encoded(crc32c: u32) -> String {
    STANDARD.encode(crc32c.to_be_bytes())
}

/// Invariant 12: the stored size and checksum that the store reports must match the sent data.
fn check(stored: &Resource, written: u64, crc32c: &str) -> Result<(), Error> {
    let size = stored.size()?;
    if size != written {
        return Err(Error::Other(format!(
            "the object in the store has {size} bytes, but {written} bytes were sent"
        )));
    }
    if stored
        .crc32c
        .as_ref()
        .is_some_and(|stored| stored != crc32c)
    {
        return Err(Error::Other(
            "the checksum of the stored object does not match the sent data".to_owned(),
        ));
    }
    Ok(())
}

struct GcsVersion {
    json: Json,
    key: String,
    generation: Option<String>,
    endpoint: String,
}

#[async_trait]
impl Version for GcsVersion {
    async fn body(&self, part: Range<u64>) -> Result<Body, Error> {
        let generation = self.generation.as_deref();
        self.json.content(&self.key, generation, part).await
    }

    fn endpoint(&self) -> String {
        self.endpoint.clone()
    }
}

/// Forwards the content of an object. Fails at the end if the CRC32C of the content is not `expected`.
fn verified(content: Body, expected: Option<String>) -> Body {
    let Some(expected) = expected else {
        return content;
    };
    stream::try_unfold(
        (content, 0, expected),
        |(mut content, crc32c, expected)| async move {
            match content.try_next().await? {
                Some(chunk) => {
                    let crc32c = crc32c::crc32c_append(crc32c, &chunk);
                    Ok(Some((chunk, (content, crc32c, expected))))
                }
                None if encoded(crc32c) == expected => Ok(None),
                None => Err(Error::Other(
                    "the checksum of the received data does not match the object".to_owned(),
                )),
            }
        },
    )
    .boxed()
}

#[async_trait]
impl Store for GcsStore {
    fn location(&self) -> String {
        format!("gs://{}", self.place.bucket)
    }

    fn endpoint(&self) -> String {
        self.place.endpoint.clone()
    }

    async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error> {
        Ok(Box::new(upload::GcsUpload::new(self.clone(), key)))
    }

    async fn put(&self, key: &str, content: Bytes) -> Result<(), Error> {
        let retention = self.retention()?;
        self.put_whole(key, content, retention.as_ref()).await
    }

    async fn get(&self, key: &str) -> Result<ObjectStream, Error> {
        let object = self.json.object(key).await?;
        let version = GcsVersion {
            json: self.json.clone(),
            key: key.to_owned(),
            generation: object.generation(),
            endpoint: self.place.endpoint.clone(),
        };
        let ObjectStream { size, chunks } = read(version, object.size()?, None);
        let chunks = verified(chunks, object.crc32c);
        Ok(ObjectStream { size, chunks })
    }

    async fn head(&self, key: &str) -> Result<Option<Object>, Error> {
        match self.json.object(key).await {
            Ok(object) => Ok(Some(object.described()?)),
            Err(Error::NoSuchObject { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        let listing = self.json.list(prefix);
        within(&self.place, prefix, listing).await
    }

    async fn delete(&self, key: &str) -> Result<(), Error> {
        match self.json.delete(key).await {
            Ok(()) | Err(Error::NoSuchObject { .. }) => Ok(()),
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
