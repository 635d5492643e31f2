//! An object written in parts: a few at a time, each repeated alone, all of them or nothing.

use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use bytes::{Bytes, BytesMut};
use md5::{Digest as _, Md5};
use tokio::task::JoinSet;

use super::{S3Store, base64, md5_of};
use crate::hexadecimal;
use crate::port::{Committed, Error, Store, Upload};

/// Parts under way at a time. With the one being filled they are the memory budget: 4 x 8 MiB, more only for
/// objects beyond 8 GiB.
const IN_FLIGHT: usize = 3;

/// How long parts under way are awaited before their upload is aborted.
const ABORT_PATIENCE: Duration = Duration::from_secs(20);

/// S3 takes 10,000 parts of one object. Doubling the size after each thousand reaches beyond the 5 TiB an object
/// may have.
const SAME_SIZE: usize = 1000;

struct Part {
    number: i32,
    md5: [u8; 16],
    tag: String,
}

/// See [`Upload`]. Small objects are sent in one request.
pub(super) struct S3Upload {
    store: S3Store,
    key: String,
    upload: Option<String>,
    filling: BytesMut,
    begun: usize,
    under_way: JoinSet<Result<Part, Error>>,
    done: Vec<Part>,
    written: u64,
}

impl S3Upload {
    pub(super) fn new(store: S3Store, key: &str) -> Self {
        Self {
            store,
            key: key.to_owned(),
            upload: None,
            filling: BytesMut::new(),
            begun: 0,
            under_way: JoinSet::new(),
            done: Vec::new(),
            written: 0,
        }
    }

    fn part_size(&self) -> usize {
        part_size(self.store.part, self.begun)
    }

    async fn upload_id(&mut self) -> Result<String, Error> {
        if let Some(id) = &self.upload {
            return Ok(id.clone());
        }
        let place = &self.store.place;
        let created = self
            .store
            .client
            .create_multipart_upload()
            .bucket(&place.bucket)
            .key(&self.key)
            .send()
            .await
            .map_err(|error| place.explain_bucket(&error))?;
        let id = created.upload_id().unwrap_or_default().to_owned();
        if id.is_empty() {
            return Err(Error::Other("an upload without an ID".to_owned()));
        }
        self.upload = Some(id.clone());
        Ok(id)
    }

    /// Sends what is in `content` as the next part, once there is room for it.
    async fn send(&mut self, content: Bytes) -> Result<(), Error> {
        while self.under_way.len() >= IN_FLIGHT {
            self.reap().await?;
        }
        let id = self.upload_id().await?;
        self.begun += 1;
        let number = i32::try_from(self.begun)
            .map_err(|_| Error::Other("more parts than can be counted".to_owned()))?;
        let (store, key) = (self.store.clone(), self.key.clone());
        self.under_way.spawn(async move {
            let md5 = md5_of(&content);
            let sent = store
                .bulk
                .upload_part()
                .bucket(&store.place.bucket)
                .key(&key)
                .upload_id(id)
                .part_number(number)
                .content_md5(base64(&md5))
                .body(ByteStream::from(content))
                .send()
                .await
                .map_err(|error| store.place.explain(&key, &error))?;
            let tag = sent.e_tag().unwrap_or_default().to_owned();
            Ok(Part { number, md5, tag })
        });
        Ok(())
    }

    async fn reap(&mut self) -> Result<(), Error> {
        match self.under_way.join_next().await {
            None => Ok(()),
            Some(Ok(part)) => {
                self.done.push(part?);
                Ok(())
            }
            Some(Err(_)) => Err(Error::Other(
                "the upload of a part was interrupted".to_owned(),
            )),
        }
    }

    /// The entity tag of the whole if the store makes tags of MD5s, as its parts then show.
    fn expected_tag(&self) -> Option<String> {
        let mut whole = Md5::new();
        for part in &self.done {
            if part.tag.trim_matches('"') != hexadecimal(&part.md5) {
                return None;
            }
            whole.update(part.md5);
        }
        let digest: [u8; 16] = whole.finalize().into();
        Some(format!("{}-{}", hexadecimal(&digest), self.done.len()))
    }

    async fn complete(&mut self, id: &str) -> Result<Committed, Error> {
        while !self.under_way.is_empty() {
            self.reap().await?;
        }
        self.done.sort_by_key(|part| part.number);
        let parts = self
            .done
            .iter()
            .map(|part| {
                CompletedPart::builder()
                    .part_number(part.number)
                    .e_tag(&part.tag)
                    .build()
            })
            .collect();
        let completed = self
            .store
            .bulk
            .complete_multipart_upload()
            .bucket(&self.store.place.bucket)
            .key(&self.key)
            .upload_id(id)
            .multipart_upload(
                CompletedMultipartUpload::builder()
                    .set_parts(Some(parts))
                    .build(),
            )
            .send()
            .await;
        let failure = completed
            .err()
            .map(|error| self.store.place.explain(&self.key, &error));
        // An answer can be lost and its repetition refused: what counts is what the store holds.
        match (self.verify().await, failure) {
            (Ok(committed), _) => Ok(committed),
            (Err(_), Some(failure)) => Err(failure),
            (Err(mismatch), None) => Err(mismatch),
        }
    }

    /// Invariant 12: the store is asked what it holds, and that must be what was sent.
    async fn verify(&self) -> Result<Committed, Error> {
        let place = &self.store.place;
        let held = self
            .store
            .client
            .head_object()
            .bucket(&place.bucket)
            .key(&self.key)
            .send()
            .await
            .map_err(|error| place.explain(&self.key, &error))?;
        let size = held
            .content_length()
            .and_then(|size| u64::try_from(size).ok())
            .unwrap_or_default();
        if size != self.written {
            return Err(Error::Other(format!(
                "{size} bytes are stored of {} that were sent",
                self.written
            )));
        }
        if let (Some(expected), Some(tag)) = (self.expected_tag(), held.e_tag())
            && tag.trim_matches('"') != expected
        {
            return Err(Error::Other(
                "the stored object's checksum is not that of what was sent".to_owned(),
            ));
        }
        Ok(Committed { size })
    }

    async fn put_whole(&mut self) -> Result<Committed, Error> {
        let content = std::mem::take(&mut self.filling).freeze();
        self.store.put(&self.key, content).await?;
        let held = self.store.head(&self.key).await?;
        match held {
            Some(object) if object.size == self.written => Ok(Committed { size: object.size }),
            Some(object) => Err(Error::Other(format!(
                "{} bytes are stored of {} that were sent",
                object.size, self.written
            ))),
            None => Err(Error::NoSuchObject {
                key: self.key.clone(),
            }),
        }
    }

    async fn discard(&mut self) -> Result<(), Error> {
        let under_way = std::mem::take(&mut self.under_way);
        match self.upload.take() {
            Some(id) => discard_after(&self.store, &self.key, &id, under_way).await,
            None => Ok(()),
        }
    }
}

/// A part the store is still taking when the upload is aborted can stay for ever, and a request that is dropped on
/// this side may be complete on the other. So what is under way is awaited first, for a while.
async fn discard_after(
    store: &S3Store,
    key: &str,
    id: &str,
    mut under_way: JoinSet<Result<Part, Error>>,
) -> Result<(), Error> {
    let all = async { while under_way.join_next().await.is_some() {} };
    if tokio::time::timeout(ABORT_PATIENCE, all).await.is_err() {
        under_way.shutdown().await;
    }
    discard(store, key, id).await
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
        Err(error) => Err(store.place.explain(key, &error)),
    }
}

fn part_size(first: usize, begun: usize) -> usize {
    first << (begun / SAME_SIZE).min(16)
}

#[async_trait]
impl Upload for S3Upload {
    async fn write(&mut self, chunk: Bytes) -> Result<(), Error> {
        self.written += chunk.len() as u64;
        let mut chunk = chunk;
        while !chunk.is_empty() {
            let size = self.part_size();
            if self.filling.capacity() == 0 {
                self.filling.reserve(size);
            }
            let room = size - self.filling.len();
            let now = chunk.split_to(room.min(chunk.len()));
            self.filling.extend_from_slice(&now);
            // A full part is only sent when more follows: an object of one part needs no parts.
            if self.filling.len() == size && !(chunk.is_empty() && self.begun == 0) {
                let content = std::mem::take(&mut self.filling).freeze();
                self.send(content).await?;
            } else if self.filling.len() == size {
                return Ok(());
            }
        }
        Ok(())
    }

    async fn commit(mut self: Box<Self>) -> Result<Committed, Error> {
        if self.upload.is_none() && self.begun == 0 {
            return self.put_whole().await;
        }
        if !self.filling.is_empty() {
            let content = std::mem::take(&mut self.filling).freeze();
            self.send(content).await?;
        }
        let id = self.upload_id().await?;
        let committed = self.complete(&id).await?;
        self.upload = None;
        Ok(committed)
    }

    async fn abort(mut self: Box<Self>) -> Result<(), Error> {
        self.discard().await
    }
}

impl Drop for S3Upload {
    /// A task that ends midway leaves no parts behind that the bucket's owner pays for.
    fn drop(&mut self) {
        if let Some(id) = self.upload.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let (store, key) = (self.store.clone(), self.key.clone());
            let under_way = std::mem::take(&mut self.under_way);
            runtime.spawn(async move {
                if let Err(error) = discard_after(&store, &key, &id, under_way).await {
                    tracing::warn!(%error, key, "an unfinished upload could not be removed");
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::PART;
    use super::*;

    #[test]
    fn ten_thousand_parts_reach_beyond_the_largest_object() {
        let total: u128 = (0..10_000).map(|part| part_size(PART, part) as u128).sum();
        assert!(total > 5 << 40);
        // And no part is larger than S3 takes.
        assert!(part_size(PART, 9_999) <= 5 << 30);
        // Backups up to 8 GiB stay within the fixed budget.
        assert_eq!(part_size(PART, 999), PART);
    }
}
