//! Google Cloud Storage: one bucket, one identity.
//!
//! Google's own client reads content and writes it in one request; it resumes and checks the CRC32C. The JSON
//! API is used for lookups, listings and deletions, which the client supports only over gRPC, and for chunked
//! uploads, which the client does not handle correctly.
//!
//! A resumable upload has no parts that can be sent concurrently. An unfinished upload is invisible and free
//! of charge, and Google removes it after a week (<https://cloud.google.com/storage/docs/resumable-uploads>).

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, StreamExt};
use google_cloud_gax::exponential_backoff::ExponentialBackoffBuilder;
use google_cloud_gax::retry_policy::RetryPolicyExt;
use google_cloud_storage::client::Storage;
use google_cloud_storage::retry_policy::RetryableErrors;

use crate::failure::{Place, chain};
use crate::port::{Error, Object, ObjectStream, Store, Unfinished, Upload};

mod access;
mod json;
mod upload;

pub use access::{GcsAccess, GcsConfig};
use json::Json;

/// Maximum time without data on a connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum number of attempts of one request.
const ATTEMPTS: u32 = json::ATTEMPTS;

/// A bucket of Google Cloud Storage.
#[derive(Clone)]
pub struct GcsStore {
    content: Storage,
    json: Json,
    place: Place,
}

impl GcsStore {
    /// Creates a client of a bucket, without a request.
    ///
    /// # Errors
    /// The endpoint or the credentials are invalid.
    pub async fn new(config: GcsConfig) -> Result<Self, Error> {
        let endpoint = config.endpoint()?;
        let place = Place {
            bucket: config.bucket.clone(),
            endpoint: endpoint.as_str().trim_end_matches('/').to_owned(),
        };
        let credentials = config.access.credentials()?;
        let backoff = ExponentialBackoffBuilder::new()
            .with_initial_delay(Duration::from_millis(200))
            .with_maximum_delay(Duration::from_secs(5))
            .clamp();
        let content = Storage::builder()
            .with_endpoint(place.endpoint.clone())
            .with_credentials(credentials.clone())
            .with_retry_policy(RetryableErrors.with_attempt_limit(ATTEMPTS))
            .with_backoff_policy(backoff)
            .with_resumable_upload_threshold(usize::MAX)
            .build()
            .await
            .map_err(|error| {
                Error::Other(format!("the client cannot be created: {}", chain(&error)))
            })?;
        Ok(Self {
            content,
            json: Json::new(endpoint, credentials, place.clone())?,
            place,
        })
    }

    /// The bucket name in the form of Google's client.
    fn bucket(&self) -> String {
        format!("projects/_/buckets/{}", self.place.bucket)
    }

    async fn put_whole(&self, key: &str, content: Bytes) -> Result<(), Error> {
        let write = self
            .content
            .write_object(self.bucket(), key, content)
            // Idempotent: the same content is written to the same key.
            .with_idempotency(true);
        Box::pin(write.send_buffered())
            .await
            .map(|_| ())
            .map_err(|error| self.place.about_bucket(self.explain(key, &error)))
    }

    fn explain(&self, key: &str, error: &google_cloud_storage::Error) -> Error {
        explain(&self.place, key, error)
    }
}

/// Explains a failed transfer of content.
fn explain(place: &Place, key: &str, error: &google_cloud_storage::Error) -> Error {
    let status = error.http_status_code();
    let text = chain(error);
    if status.is_some() || error.status().is_some() {
        let message = error
            .status()
            .map_or(text.as_str(), |status| &status.message);
        // Without an HTTP status, Google's own code is used.
        let status = status.or_else(|| {
            use google_cloud_gax::error::rpc::Code;
            match error.status()?.code {
                Code::NotFound => Some(404),
                Code::PermissionDenied => Some(403),
                Code::Unauthenticated => Some(401),
                _ => None,
            }
        });
        return place.answered(key, None, message, status);
    }
    if error.is_authentication() {
        return Error::AccessDenied(text);
    }
    if error.is_timeout() {
        return Error::Timeout(place.endpoint.clone());
    }
    place.unreachable(&text)
}

#[async_trait]
impl Store for GcsStore {
    fn location(&self) -> String {
        format!("gs://{}", self.place.bucket)
    }

    async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error> {
        Ok(Box::new(upload::GcsUpload::new(self.clone(), key)))
    }

    async fn put(&self, key: &str, content: Bytes) -> Result<(), Error> {
        self.put_whole(key, content).await
    }

    async fn get(&self, key: &str) -> Result<ObjectStream, Error> {
        let reading = self
            .content
            .read_object(self.bucket(), key)
            .send()
            .await
            .map_err(|error| self.explain(key, &error))?;
        let size = u64::try_from(reading.object().size)
            .map_err(|_| Error::Other("the object has no size".to_owned()))?;
        let (store, key) = (self.clone(), key.to_owned());
        let chunks = stream::try_unfold((reading, 0), move |(mut reading, read)| {
            let (store, key) = (store.clone(), key.clone());
            async move {
                let next = tokio::time::timeout(IDLE_TIMEOUT, reading.next())
                    .await
                    .map_err(|_| Error::Timeout(store.place.endpoint.clone()))?;
                match next {
                    Some(Ok(chunk)) => {
                        let read = read + chunk.len() as u64;
                        Ok(Some((chunk, (reading, read))))
                    }
                    Some(Err(error)) => Err(store.explain(&key, &error)),
                    None if read == size => Ok(None),
                    None => Err(Error::Unreachable {
                        endpoint: store.place.endpoint.clone(),
                        detail: format!("the object ends after {read} of {size} bytes"),
                    }),
                }
            }
        });
        Ok(ObjectStream {
            size,
            chunks: chunks.boxed(),
        })
    }

    async fn head(&self, key: &str) -> Result<Option<Object>, Error> {
        match self.json.object(key).await {
            Ok(object) => Ok(Some(object.described()?)),
            Err(Error::NoSuchObject { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        self.json.list(prefix).await
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
