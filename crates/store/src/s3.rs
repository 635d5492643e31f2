//! S3 and the stores that speak its protocol: one bucket, one identity.
//!
//! Works with stores that know nothing of checksum trailers: parts are checked by `Content-MD5` and the signed
//! SHA-256 of the body, which every store understands, and the whole by the size and the entity tag afterwards.

use async_trait::async_trait;
use aws_sdk_s3::Client;
use aws_sdk_s3::primitives::{ByteStream, DateTime};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use md5::{Digest as _, Md5};

use crate::port::{Error, Object, ObjectStream, Store, Upload};

mod access;
mod download;
mod failure;
mod upload;

pub use access::{S3Access, S3Config, S3Keys};
use failure::Place;

/// Bytes of the first parts of an upload.
const PART: usize = 8 << 20;

/// A bucket of S3 or of a store that speaks its protocol.
#[derive(Clone)]
pub struct S3Store {
    /// For everything that is answered at once.
    client: Client,
    /// For parts: as patient as a slow line needs.
    bulk: Client,
    place: Place,
    part: usize,
}

impl S3Store {
    /// Prepares to reach a bucket; nothing is sent before the first call.
    pub async fn new(config: S3Config) -> Result<Self, Error> {
        let place = Place {
            bucket: config.bucket.clone(),
            endpoint: config.shown_endpoint(),
        };
        let (client, bulk) = access::clients(config).await?;
        Ok(Self {
            client,
            bulk,
            place,
            part: PART,
        })
    }

    /// The same store with smaller parts, for tests: real stores refuse parts below 5 MiB.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn with_parts_of(mut self, bytes: usize) -> Self {
        self.part = bytes;
        self
    }
}

fn md5_of(content: &[u8]) -> [u8; 16] {
    Md5::digest(content).into()
}

fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

fn object(key: &str, size: Option<i64>, modified: Option<&DateTime>) -> Object {
    Object {
        key: key.to_owned(),
        size: size
            .and_then(|size| u64::try_from(size).ok())
            .unwrap_or_default(),
        modified_unix_seconds: modified.map(DateTime::secs),
    }
}

#[async_trait]
impl Store for S3Store {
    fn location(&self) -> String {
        format!("s3://{}", self.place.bucket)
    }

    async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error> {
        Ok(Box::new(upload::S3Upload::new(self.clone(), key)))
    }

    async fn put(&self, key: &str, content: Bytes) -> Result<(), Error> {
        let md5 = base64(&md5_of(&content));
        self.bulk
            .put_object()
            .bucket(&self.place.bucket)
            .key(key)
            .content_md5(md5)
            .body(ByteStream::from(content))
            .send()
            .await
            .map(|_| ())
            .map_err(|error| self.place.explain_bucket(&error))
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
            ))),
            Err(error) => match self.place.explain(key, &error) {
                Error::NoSuchObject { .. } => Ok(None),
                error => Err(error),
            },
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        let mut pages = self
            .client
            .list_objects_v2()
            .bucket(&self.place.bucket)
            .prefix(prefix)
            .into_paginator()
            .send();
        let mut objects = Vec::new();
        while let Some(page) = pages.next().await {
            let page = page.map_err(|error| self.place.explain_bucket(&error))?;
            objects.extend(page.contents().iter().map(|found| {
                object(
                    found.key().unwrap_or_default(),
                    found.size(),
                    found.last_modified(),
                )
            }));
        }
        Ok(objects)
    }

    async fn delete(&self, key: &str) -> Result<(), Error> {
        let answer = self
            .client
            .delete_object()
            .bucket(&self.place.bucket)
            .key(key)
            .send()
            .await;
        match answer.map_err(|error| self.place.explain(key, &error)) {
            Ok(_) | Err(Error::NoSuchObject { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn discard_unfinished(&self, key: &str, begun_before: i64) -> Result<(), Error> {
        let mut after: (Option<String>, Option<String>) = (None, None);
        loop {
            let page = self
                .client
                .list_multipart_uploads()
                .bucket(&self.place.bucket)
                .prefix(key)
                .set_key_marker(after.0.take())
                .set_upload_id_marker(after.1.take())
                .send()
                .await
                .map_err(|error| self.place.explain_bucket(&error))?;
            for found in page.uploads() {
                // Invariant 13: the prefix also finds other objects' uploads.
                let ours = found.key() == Some(key);
                let old = found
                    .initiated()
                    .is_some_and(|time| time.secs() < begun_before);
                if let (true, true, Some(id)) = (ours, old, found.upload_id()) {
                    upload::discard(self, key, id).await?;
                }
            }
            after = (
                page.next_key_marker().map(str::to_owned),
                page.next_upload_id_marker().map(str::to_owned),
            );
            if page.is_truncated() != Some(true) || after == (None, None) {
                return Ok(());
            }
        }
    }
}
