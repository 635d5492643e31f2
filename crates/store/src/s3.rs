//! S3 and S3-compatible stores: one bucket, accessed with one identity.
//!
//! Stores with and without CRC32C are supported:
//! - A store with CRC32C confirms this checksum when an upload starts, and returns the CRC32C of each part.
//! - A store without CRC32C compares the `Content-MD5` of each part.
//!
//! With and without CRC32C, the store checks the signed SHA-256 of each request body. At the end, this module compares
//! the size of the complete object, and its checksum or entity tag, with the sent data.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use async_trait::async_trait;
use aws_sdk_s3::Client;
use aws_sdk_s3::primitives::{ByteStream, DateTime};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use md5::{Digest as _, Md5};

use crate::port::{Error, Object, ObjectStream, Store, Unfinished, Upload};

mod access;
mod checksum;
mod download;
mod failure;
mod insecure;
mod limit;
mod protection;
mod upload;

pub use access::{S3Access, S3Config, S3Keys};
use checksum::Whole;
use failure::{explain, explain_bucket, explain_head};
pub use protection::S3Protection;

use crate::failure::Place;
use crate::limits::{Listing, within};
use crate::parts::PART;

/// A [`Store`] in one bucket of S3 or of an S3-compatible store.
#[derive(Clone)]
pub struct S3Store {
    /// The client for requests without content.
    client: Client,
    /// The client for requests that send content or complete an upload. Its timeout is long enough for slow
    /// connections.
    bulk: Client,
    place: Place,
    protection: S3Protection,
    part: usize,
    /// True if the store has rejected or ignored a request to calculate checksums of parts.
    no_checksums: Arc<AtomicBool>,
}

impl S3Store {
    /// Creates the client of a bucket. Sends no request.
    ///
    /// # Errors
    /// Fails if the configuration is invalid.
    pub async fn new(config: S3Config) -> Result<Self, Error> {
        let place = Place {
            bucket: config.bucket.clone(),
            endpoint: config.display_endpoint(),
        };
        let protection = config.protection.clone();
        let (client, bulk) = access::clients(config).await?;
        Ok(Self {
            client,
            bulk,
            place,
            protection,
            part: PART,
            no_checksums: Arc::default(),
        })
    }

    /// Writes an object in one request, and returns the checksums that the stored object must have. The request
    /// contains an MD5, because the store may support no other checksum.
    async fn put_whole(&self, key: &str, content: Bytes) -> Result<Whole, Error> {
        let md5 = md5_of(&content);
        let written = self
            .bulk
            .put_object()
            .bucket(&self.place.bucket)
            .key(key)
            .content_md5(base64(&md5))
            .set_server_side_encryption(self.protection.encryption())
            .set_ssekms_key_id(self.protection.kms_key_id())
            .set_object_lock_mode(self.protection.lock_mode())
            .set_object_lock_retain_until_date(self.protection.lock_until()?)
            .body(ByteStream::from(content))
            .send()
            .await
            .map_err(|error| explain_bucket(&self.place, &error))?;
        self.protection
            .check_encryption(written.server_side_encryption())?;
        Ok(Whole::of_single_request(
            md5,
            written.e_tag().unwrap_or_default(),
        ))
    }

    /// Like [`S3Store::new`], but connects to the address `at` for `host`. For tests.
    ///
    /// # Errors
    /// Fails if the configuration is invalid.
    #[cfg(any(test, feature = "testing"))]
    pub async fn with_host_address(
        config: S3Config,
        host: &str,
        at: std::net::SocketAddr,
    ) -> Result<Self, Error> {
        let mut store = Self::new(config.clone()).await?;
        let http = insecure::with_host_address(host, at)?;
        (store.client, store.bulk) = access::clients_over(config, http).await?;
        Ok(store)
    }

    /// Changes the size of parts, for tests. Real stores reject parts smaller than 5 MiB.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn with_parts_of(mut self, bytes: usize) -> Self {
        self.part = bytes;
        self
    }

    async fn all_objects(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        let mut listing = Listing::new(&self.place, prefix);
        let mut token = None;
        loop {
            let page = self
                .client
                .list_objects_v2()
                .bucket(&self.place.bucket)
                .prefix(prefix)
                .set_continuation_token(token.take())
                .send()
                .await
                .map_err(|error| explain_bucket(&self.place, &error))?;
            for found in page.contents() {
                let key = found.key().unwrap_or_default();
                let tag = found.e_tag();
                let text = key.len() + tag.map_or(0, str::len);
                let object = object(key, found.size(), found.last_modified(), tag);
                listing.push(object, text)?;
            }
            let next = page.next_continuation_token();
            let Some(next) = next.filter(|token| !token.is_empty()) else {
                return Ok(listing.finish());
            };
            listing.advance(next)?;
            token = Some(next.to_owned());
        }
    }

    async fn all_unfinished(&self, prefix: &str) -> Result<Vec<Unfinished>, Error> {
        let mut listing = Listing::new(&self.place, prefix);
        let mut after: (Option<String>, Option<String>) = (None, None);
        loop {
            let page = self
                .client
                .list_multipart_uploads()
                .bucket(&self.place.bucket)
                .prefix(prefix)
                .set_key_marker(after.0.take())
                .set_upload_id_marker(after.1.take())
                .send()
                .await
                .map_err(|error| explain_bucket(&self.place, &error))?;
            for found in page.uploads() {
                let (Some(key), Some(id), Some(initiated)) =
                    (found.key(), found.upload_id(), found.initiated())
                else {
                    continue;
                };
                let unfinished = Unfinished {
                    key: key.to_owned(),
                    id: id.to_owned(),
                    begun_unix_seconds: initiated.secs(),
                };
                listing.push(unfinished, key.len() + id.len())?;
            }
            let next = page.next_key_marker().map(str::to_owned);
            let (true, Some(key)) = (page.is_truncated() == Some(true), next) else {
                return Ok(listing.finish());
            };
            let id = page.next_upload_id_marker().map(str::to_owned);
            listing.advance(&format!("{key}\0{}", id.as_deref().unwrap_or_default()))?;
            after = (Some(key), id);
        }
    }
}

fn md5_of(content: &[u8]) -> [u8; 16] {
    Md5::digest(content).into()
}

fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

fn object(key: &str, size: Option<i64>, modified: Option<&DateTime>, tag: Option<&str>) -> Object {
    Object {
        key: key.to_owned(),
        size: size
            .and_then(|size| u64::try_from(size).ok())
            .unwrap_or_default(),
        modified_unix_seconds: modified.map(DateTime::secs),
        tag: tag.map(str::to_owned),
    }
}

#[async_trait]
impl Store for S3Store {
    fn location(&self) -> String {
        format!("s3://{}", self.place.bucket)
    }

    fn endpoint(&self) -> String {
        self.place.endpoint.clone()
    }

    async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error> {
        Ok(Box::new(upload::S3Upload::new(self.clone(), key)))
    }

    async fn put(&self, key: &str, content: Bytes) -> Result<(), Error> {
        self.put_whole(key, content).await.map(|_| ())
    }

    async fn get(&self, key: &str) -> Result<ObjectStream, Error> {
        download::open(self.clone(), key.to_owned()).await
    }

    async fn head(&self, key: &str) -> Result<Option<Object>, Error> {
        let answer = self
            .client
            .head_object()
            .bucket(&self.place.bucket)
            .key(key)
            .send()
            .await;
        match answer {
            Ok(found) => Ok(Some(object(
                key,
                found.content_length(),
                found.last_modified(),
                found.e_tag(),
            ))),
            Err(error) => match explain_head(&self.place, key, &error) {
                Error::NoSuchObject { .. } => Ok(None),
                error => Err(error),
            },
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        let listing = self.all_objects(prefix);
        within(&self.place, prefix, listing).await
    }

    async fn delete(&self, key: &str) -> Result<(), Error> {
        let answer = self
            .client
            .delete_object()
            .bucket(&self.place.bucket)
            .key(key)
            .send()
            .await;
        match answer.map_err(|error| explain(&self.place, key, &error)) {
            Ok(_) | Err(Error::NoSuchObject { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn unfinished(&self, prefix: &str) -> Result<Vec<Unfinished>, Error> {
        let listing = self.all_unfinished(prefix);
        within(&self.place, prefix, listing).await
    }

    async fn discard(&self, unfinished: &Unfinished) -> Result<(), Error> {
        upload::discard(self, &unfinished.key, &unfinished.id).await
    }
}
