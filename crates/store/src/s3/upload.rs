//! An object written to S3 in parts: a few at a time, each repeated alone, all of them or nothing.

use std::sync::Arc;

use async_trait::async_trait;
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use bytes::Bytes;
use md5::{Digest as _, Md5};
use tokio::sync::OnceCell;

use super::failure::{explain, explain_bucket};
use super::{S3Store, base64, md5_of};
use crate::hexadecimal;
use crate::parts::{Parts, Sink, Written};
use crate::port::{Committed, Error, Upload};

/// A part as the completion names it.
pub(super) struct Part {
    number: i32,
    md5: [u8; 16],
    tag: String,
}

/// Where the parts of one upload go.
#[derive(Clone)]
struct S3Sink {
    store: S3Store,
    key: String,
    /// Set when the upload has begun.
    id: Arc<OnceCell<String>>,
}

#[async_trait]
impl Sink for S3Sink {
    type Part = Part;

    async fn begin(&self) -> Result<(), Error> {
        let store = &self.store;
        let lock = store.protection.lock_until()?;
        let created = store
            .client
            .create_multipart_upload()
            .bucket(&store.place.bucket)
            .key(&self.key)
            .set_server_side_encryption(store.protection.encryption())
            .set_ssekms_key_id(store.protection.kms_key_id())
            .set_object_lock_mode(store.protection.lock_mode())
            .set_object_lock_retain_until_date(lock)
            .send()
            .await
            .map_err(|error| explain_bucket(&store.place, &error))?;
        let id = created.upload_id().unwrap_or_default().to_owned();
        if id.is_empty() {
            return Err(Error::Other("an upload without an ID".to_owned()));
        }
        // From here on there is something to abort.
        let _ = self.id.set(id);
        store.protection.encrypted(created.server_side_encryption())
    }

    async fn send(&self, number: usize, content: Bytes) -> Result<Part, Error> {
        let number = i32::try_from(number)
            .map_err(|_| Error::Other("more parts than can be counted".to_owned()))?;
        let md5 = md5_of(&content);
        let sent = self
            .store
            .bulk
            .upload_part()
            .bucket(&self.store.place.bucket)
            .key(&self.key)
            .set_upload_id(self.id.get().cloned())
            .part_number(number)
            .content_md5(base64(&md5))
            .body(ByteStream::from(content))
            .send()
            .await
            .map_err(|error| explain(&self.store.place, &self.key, &error))?;
        let tag = sent.e_tag().unwrap_or_default().to_owned();
        Ok(Part { number, md5, tag })
    }
}

/// See [`Upload`]. Small objects are sent in one request.
pub(super) struct S3Upload {
    sink: S3Sink,
    parts: Parts<S3Sink>,
    /// Committed or aborted: nothing is left to remove.
    ended: bool,
}

impl S3Upload {
    pub(super) fn new(store: S3Store, key: &str) -> Self {
        let first = store.part;
        let sink = S3Sink {
            store,
            key: key.to_owned(),
            id: Arc::default(),
        };
        Self {
            parts: Parts::new(sink.clone(), first),
            sink,
            ended: false,
        }
    }

    async fn complete(&self, parts: &[Part]) -> Result<Committed, Error> {
        let S3Sink { store, key, id } = &self.sink;
        let completed = parts
            .iter()
            .map(|part| {
                CompletedPart::builder()
                    .part_number(part.number)
                    .e_tag(&part.tag)
                    .build()
            })
            .collect();
        let completed = store
            .bulk
            .complete_multipart_upload()
            .bucket(&store.place.bucket)
            .key(key)
            .set_upload_id(id.get().cloned())
            .multipart_upload(
                CompletedMultipartUpload::builder()
                    .set_parts(Some(completed))
                    .build(),
            )
            .send()
            .await;
        let failure = completed
            .err()
            .map(|error| explain(&store.place, key, &error));
        // An answer can be lost and its repetition refused: what counts is what the store holds.
        match (self.verify(expected_tag(parts)).await, failure) {
            (Ok(committed), _) => Ok(committed),
            (Err(_), Some(failure)) => Err(failure),
            (Err(mismatch), None) => Err(mismatch),
        }
    }

    /// Invariant 12: the store is asked what it holds, and that must be what was sent.
    async fn verify(&self, expected: Option<String>) -> Result<Committed, Error> {
        let S3Sink { store, key, .. } = &self.sink;
        let held = store
            .client
            .head_object()
            .bucket(&store.place.bucket)
            .key(key)
            .send()
            .await
            .map_err(|error| explain(&store.place, key, &error))?;
        let size = held
            .content_length()
            .and_then(|size| u64::try_from(size).ok())
            .unwrap_or_default();
        if size != self.parts.written() {
            return Err(Error::Other(format!(
                "{size} bytes are stored of {} that were sent",
                self.parts.written()
            )));
        }
        if let (Some(expected), Some(tag)) = (expected, held.e_tag())
            && tag.trim_matches('"') != expected
        {
            return Err(Error::Other(
                "the stored object's checksum is not that of what was sent".to_owned(),
            ));
        }
        Ok(Committed { size })
    }

    async fn discard(&mut self) -> Result<(), Error> {
        let under_way = self.parts.give_up();
        under_way.settled().await;
        let result = match self.sink.id.get() {
            Some(id) => discard(&self.sink.store, &self.sink.key, id).await,
            None => Ok(()),
        };
        self.ended = true;
        result
    }
}

/// The entity tag of the whole if the store makes tags of MD5s, as its parts then show.
fn expected_tag(parts: &[Part]) -> Option<String> {
    let mut whole = Md5::new();
    for part in parts {
        if part.tag.trim_matches('"') != hexadecimal(&part.md5) {
            return None;
        }
        whole.update(part.md5);
    }
    let digest: [u8; 16] = whole.finalize().into();
    Some(format!("{}-{}", hexadecimal(&digest), parts.len()))
}

/// Aborts one upload; one that is gone is no failure.
pub(super) async fn discard(store: &S3Store, key: &str, id: &str) -> Result<(), Error> {
    let answer = store
        .client
        .abort_multipart_upload()
        .bucket(&store.place.bucket)
        .key(key)
        .upload_id(id)
        .send()
        .await;
    match answer {
        Ok(_) => Ok(()),
        Err(error)
            if error
                .raw_response()
                .is_some_and(|raw| raw.status().as_u16() == 404) =>
        {
            Ok(())
        }
        Err(error) => Err(explain(&store.place, key, &error)),
    }
}

#[async_trait]
impl Upload for S3Upload {
    async fn write(&mut self, chunk: Bytes) -> Result<(), Error> {
        self.parts.write(chunk).await
    }

    async fn commit(mut self: Box<Self>) -> Result<Committed, Error> {
        let committed = match self.parts.finish().await? {
            // Whether it encrypts and locks, a store says when an upload begins; else only when the object is there.
            Written::Whole(content) if self.sink.store.protection.is_asked_for() => {
                self.sink.begin().await?;
                let part = self.sink.send(1, content).await?;
                self.complete(&[part]).await?
            }
            Written::Whole(content) => {
                let md5 = hexadecimal(&md5_of(&content));
                let store = &self.sink.store;
                let tag = store.put_whole(&self.sink.key, content).await?;
                self.verify((tag.trim_matches('"') == md5).then_some(md5))
                    .await?
            }
            Written::Parts(parts) => self.complete(&parts).await?,
        };
        self.ended = true;
        Ok(committed)
    }

    async fn abort(mut self: Box<Self>) -> Result<(), Error> {
        self.discard().await
    }
}

impl Drop for S3Upload {
    /// A task that ends midway leaves no parts behind that the bucket's owner pays for.
    fn drop(&mut self) {
        if !self.ended
            && self.sink.id.initialized()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let (sink, under_way) = (self.sink.clone(), self.parts.give_up());
            runtime.spawn(async move {
                under_way.settled().await;
                let id = sink.id.get().cloned().unwrap_or_default();
                if let Err(error) = discard(&sink.store, &sink.key, &id).await {
                    tracing::warn!(%error, key = sink.key, "an unfinished upload could not be removed");
                }
            });
        }
    }
}
