//! Writes an object to S3 in parts. Parts are sent concurrently, each with its own retries. The object becomes visible
//! when the upload is committed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::SdkError;
use aws_sdk_s3::operation::create_multipart_upload::{
    CreateMultipartUploadError, CreateMultipartUploadOutput,
};
use aws_sdk_s3::operation::upload_part::UploadPartOutput;
use aws_sdk_s3::primitives::{ByteStream, DateTime};
use aws_sdk_s3::types::{ChecksumAlgorithm, ChecksumMode, CompletedMultipartUpload, CompletedPart};
use bytes::Bytes;
use tokio::sync::OnceCell;
use tracing::Instrument;

use super::checksum::{self, Part, Whole};
use super::failure::{explain, explain_bucket, explain_head};
use super::{S3Store, base64, md5_of};
use crate::parts::{Parts, Sink, Written};
use crate::port::{Committed, Error, Upload};

/// A multipart upload that the store has started.
struct StartedUpload {
    id: String,
    /// Whether the store calculates a CRC32C of each part.
    with_crc32c: bool,
}

/// The requests of one multipart upload.
#[derive(Clone)]
struct S3Sink {
    store: S3Store,
    key: String,
    started: Arc<OnceCell<StartedUpload>>,
    /// True if the store has accepted a part without reporting the part's checksum.
    no_part_checksums: Arc<AtomicBool>,
}

impl S3Sink {
    async fn create(
        &self,
        algorithm: Option<ChecksumAlgorithm>,
        lock: Option<DateTime>,
    ) -> Result<CreateMultipartUploadOutput, SdkError<CreateMultipartUploadError, HttpResponse>>
    {
        let store = &self.store;
        store
            .client
            .create_multipart_upload()
            .bucket(&store.place.bucket)
            .key(&self.key)
            .set_checksum_algorithm(algorithm)
            .set_server_side_encryption(store.protection.encryption())
            .set_ssekms_key_id(store.protection.kms_key_id())
            .set_object_lock_mode(store.protection.lock_mode())
            .set_object_lock_retain_until_date(lock)
            .send()
            .await
    }

    /// Starts an upload with CRC32C checksums of its parts, which the store must confirm in its response. Returns
    /// `None` if the store does not support CRC32C: it rejects the request with status 400 or 501, or ignores the
    /// checksum header. If the store ignores the header, this function discards the upload that the store has started.
    async fn begin_with_crc32c(
        &self,
        lock: Option<DateTime>,
    ) -> Result<Option<CreateMultipartUploadOutput>, Error> {
        let created = match self.create(Some(ChecksumAlgorithm::Crc32C), lock).await {
            Ok(created) => created,
            Err(error) if is_rejected(&error) => return Ok(None),
            Err(error) => return Err(explain_bucket(&self.store.place, &error)),
        };
        let known = created
            .checksum_algorithm()
            .is_some_and(|known| known.as_str().eq_ignore_ascii_case("CRC32C"));
        if known {
            return Ok(Some(created));
        }
        let id = created.upload_id().unwrap_or_default();
        if !id.is_empty()
            && let Err(error) = discard(&self.store, &self.key, id).await
        {
            // The upload could not be discarded, so its ID is recorded, and a later abort discards the upload.
            let (id, with_crc32c) = (id.to_owned(), false);
            let _ = self.started.set(StartedUpload { id, with_crc32c });
            return Err(error);
        }
        Ok(None)
    }

    fn id(&self) -> Option<String> {
        self.started.get().map(|started| started.id.clone())
    }

    async fn send_part(
        &self,
        number: i32,
        content: Bytes,
        crc32c: Option<u32>,
        md5: Option<[u8; 16]>,
    ) -> Result<UploadPartOutput, Error> {
        let sent = self
            .store
            .bulk
            .upload_part()
            .bucket(&self.store.place.bucket)
            .key(&self.key)
            .set_upload_id(self.id())
            .part_number(number)
            .set_checksum_crc32_c(crc32c.map(checksum::header_value))
            .set_content_md5(md5.map(|md5| base64(&md5)))
            .body(ByteStream::from(content))
            .send()
            .await;
        sent.map_err(|error| explain(&self.store.place, &self.key, &error))
    }
}

/// Whether the store rejects the form of a request, so that a request without the checksum header may succeed.
fn is_rejected<E>(error: &SdkError<E, HttpResponse>) -> bool {
    error
        .raw_response()
        .is_some_and(|raw| matches!(raw.status().as_u16(), 400 | 501))
}

#[async_trait]
impl Sink for S3Sink {
    type Part = Part;

    async fn begin(&self) -> Result<(), Error> {
        let store = &self.store;
        let lock = store.protection.lock_until()?;
        let with_crc32c = if store.no_checksums.load(Ordering::Relaxed) {
            None
        } else {
            self.begin_with_crc32c(lock).await?
        };
        let (created, with_crc32c) = if let Some(created) = with_crc32c {
            (created, true)
        } else {
            let created = self.create(None, lock).await;
            let created = created.map_err(|error| explain_bucket(&store.place, &error))?;
            // The store rejected or ignored the request for checksums, but accepted this upload without checksums. With
            // `no_checksums`, later uploads request no checksums.
            store.no_checksums.store(true, Ordering::Relaxed);
            (created, false)
        };
        let id = created.upload_id().unwrap_or_default().to_owned();
        if id.is_empty() {
            return Err(Error::Other("the upload has no ID".to_owned()));
        }
        // The upload now exists in the store, so its ID is recorded, and a failure can abort it.
        let _ = self.started.set(StartedUpload { id, with_crc32c });
        store
            .protection
            .check_encryption(created.server_side_encryption())
    }

    /// Invariant 12: succeeds only if the store has reported the part's CRC32C or has compared the part's MD5.
    async fn send(&self, number: usize, content: Bytes) -> Result<Part, Error> {
        let number = i32::try_from(number)
            .map_err(|_| Error::Other("the upload has too many parts".to_owned()))?;
        let with_crc32c = self
            .started
            .get()
            .is_some_and(|started| started.with_crc32c);
        let crc32c = with_crc32c.then(|| crc32c::crc32c(&content));
        let part = |sent: UploadPartOutput, size, md5| Part {
            number,
            size,
            tag: sent.e_tag().unwrap_or_default().to_owned(),
            crc32c,
            md5,
        };
        let size = content.len();
        if let Some(crc32c) = crc32c
            && !self.no_part_checksums.load(Ordering::Relaxed)
        {
            let sent = self
                .send_part(number, content.clone(), Some(crc32c), None)
                .await?;
            match sent.checksum_crc32_c() {
                Some(reported) if reported == checksum::header_value(crc32c) => {
                    return Ok(part(sent, size, None));
                }
                Some(_) => {
                    return Err(Error::Other(format!(
                        "the stored checksum of part {number} does not match the sent data"
                    )));
                }
                // The store reported no checksum, so this part is sent again with its MD5. `no_part_checksums` makes
                // all later parts use an MD5.
                None => self.no_part_checksums.store(true, Ordering::Relaxed),
            }
        }
        let md5 = md5_of(&content);
        let sent = self.send_part(number, content, crc32c, Some(md5)).await?;
        Ok(part(sent, size, Some(md5)))
    }
}

/// An upload to S3. A small object is sent in one request, unless encryption or a lock is configured.
pub(super) struct S3Upload {
    sink: S3Sink,
    parts: Parts<S3Sink>,
    /// True if the upload was committed or aborted. The destructor sends a request only if this value is false.
    ended: bool,
}

impl S3Upload {
    pub(super) fn new(store: S3Store, key: &str) -> Self {
        let first = store.part;
        let sink = S3Sink {
            store,
            key: key.to_owned(),
            started: Arc::default(),
            no_part_checksums: Arc::default(),
        };
        Self {
            parts: Parts::new(sink.clone(), first),
            sink,
            ended: false,
        }
    }

    async fn complete(&self, parts: &[Part]) -> Result<Committed, Error> {
        let S3Sink { store, key, .. } = &self.sink;
        let completed = parts
            .iter()
            .map(|part| {
                CompletedPart::builder()
                    .part_number(part.number)
                    .e_tag(&part.tag)
                    .set_checksum_crc32_c(part.crc32c.map(checksum::header_value))
                    .build()
            })
            .collect();
        let completed = store
            .bulk
            .complete_multipart_upload()
            .bucket(&store.place.bucket)
            .key(key)
            .set_upload_id(self.sink.id())
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
        // The client retries the completion request. If the store has processed the first request but its response was
        // lost, the store rejects the retry. The upload has succeeded if `verify` finds the object with the sent data.
        match (self.verify(&Whole::of_parts(parts)).await, failure) {
            (Ok(committed), _) => Ok(committed),
            (Err(_), Some(failure)) => Err(failure),
            (Err(mismatch), None) => Err(mismatch),
        }
    }

    /// Invariant 12: the stored size and checksums that the store reports must match the sent data.
    async fn verify(&self, whole: &Whole) -> Result<Committed, Error> {
        let S3Sink { store, key, .. } = &self.sink;
        let held = store
            .client
            .head_object()
            .bucket(&store.place.bucket)
            .key(key)
            .set_checksum_mode(whole.has_checksum().then_some(ChecksumMode::Enabled))
            .send()
            .await
            .map_err(|error| explain_head(&store.place, key, &error))?;
        let size = held
            .content_length()
            .and_then(|size| u64::try_from(size).ok())
            .unwrap_or_default();
        if size != self.parts.written() {
            return Err(Error::Other(format!(
                "the object in the store has {size} bytes, but {} bytes were sent",
                self.parts.written()
            )));
        }
        whole.verify(held.checksum_crc32_c(), held.e_tag())?;
        let tag = held.e_tag().map(str::to_owned);
        Ok(Committed { size, tag })
    }

    async fn discard(&mut self) -> Result<(), Error> {
        let in_flight = self.parts.take_in_flight();
        in_flight.wait().await;
        let result = match self.sink.id() {
            Some(id) => discard(&self.sink.store, &self.sink.key, &id).await,
            None => Ok(()),
        };
        self.ended = true;
        result
    }
}

/// Aborts an upload. Succeeds if the upload no longer exists.
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
            // With encryption or a lock, even a small object is a multipart upload. At its start, before any data is
            // sent, the store confirms the encryption and the lock, so no unprotected object can exist.
            Written::Whole(content) if self.sink.store.protection.is_enabled() => {
                self.sink.begin().await?;
                let part = self.sink.send(1, content).await?;
                self.complete(&[part]).await?
            }
            Written::Whole(content) => {
                let store = &self.sink.store;
                let whole = store.put_whole(&self.sink.key, content).await?;
                self.verify(&whole).await?
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
    /// Discards the parts of an upload that was not committed, because the owner of the bucket pays for stored parts.
    fn drop(&mut self) {
        if !self.ended
            && let Some(id) = self.sink.id()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let (sink, in_flight) = (self.sink.clone(), self.parts.take_in_flight());
            let task = async move {
                in_flight.wait().await;
                if let Err(error) = discard(&sink.store, &sink.key, &id).await {
                    tracing::warn!(%error, key = sink.key, "cannot remove an unfinished upload");
                }
            };
            runtime.spawn(task.in_current_span());
        }
    }
}
