//! Writes small objects with Google's own client, `google-cloud-storage`.
//!
//! The client reads responses of any size into memory, so this crate uses it only at Google's own endpoint (ADR 20).

use std::time::Duration;

use api::problem::Chain;
use bytes::Bytes;
use google_cloud_auth::credentials::Credentials;
use google_cloud_gax::exponential_backoff::ExponentialBackoffBuilder;
use google_cloud_gax::retry_policy::RetryPolicyExt;
use google_cloud_storage::client::Storage;
use google_cloud_storage::retry_policy::RetryableErrors;

use super::json::ATTEMPTS;
use crate::failure::Place;
use crate::port::Error;

#[derive(Clone)]
pub(super) struct Package {
    storage: Storage,
    place: Place,
}

impl Package {
    pub(super) async fn new(credentials: Credentials, place: Place) -> Result<Self, Error> {
        let backoff = ExponentialBackoffBuilder::new()
            .with_initial_delay(Duration::from_millis(200))
            .with_maximum_delay(Duration::from_secs(5))
            .clamp();
        let storage = Storage::builder()
            .with_endpoint(place.endpoint.clone())
            .with_credentials(credentials)
            .with_retry_policy(RetryableErrors.with_attempt_limit(ATTEMPTS))
            .with_backoff_policy(backoff)
            .with_resumable_upload_threshold(usize::MAX)
            .build()
            .await
            .map_err(|error| {
                Error::Other(format!("the client cannot be created: {}", Chain(&error)))
            })?;
        Ok(Self { storage, place })
    }

    pub(super) async fn put(&self, key: &str, content: Bytes) -> Result<(), Error> {
        let bucket = format!("projects/_/buckets/{}", self.place.bucket);
        let write = self
            .storage
            .write_object(bucket, key, content)
            // The client may retry the write, because each attempt writes the same content to the same key.
            .with_idempotency(true);
        Box::pin(write.send_buffered())
            .await
            .map(|_| ())
            .map_err(|error| self.place.about_bucket(explain(&self.place, key, &error)))
    }
}

/// Converts the error of a failed write.
fn explain(place: &Place, key: &str, error: &google_cloud_storage::Error) -> Error {
    let status = error.http_status_code();
    let text = Chain(error).to_string();
    if status.is_some() || error.status().is_some() {
        let message = error
            .status()
            .map_or(text.as_str(), |status| &status.message);
        // If the error has no HTTP status, the status is derived from the gRPC code.
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
