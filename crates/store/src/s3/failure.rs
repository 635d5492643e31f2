//! Converts errors of the S3 client into [`Error`] with a remedy. Performs no I/O.

use std::error::Error as StdError;

use api::problem::Chain;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};

use super::limit::Exceeded;
use crate::failure::Place;
use crate::port::Error;

/// Converts the error of a request for the object `key`.
pub(super) fn explain<E>(place: &Place, key: &str, error: &SdkError<E, HttpResponse>) -> Error
where
    E: StdError + ProvideErrorMetadata + Send + Sync + 'static,
{
    explain_by(Place::answered, place, key, error)
}

/// Converts the error of a HEAD request for the object `key`. The response to a HEAD request has no body.
pub(super) fn explain_head<E>(place: &Place, key: &str, error: &SdkError<E, HttpResponse>) -> Error
where
    E: StdError + ProvideErrorMetadata + Send + Sync + 'static,
{
    explain_by(Place::answered_to_head, place, key, error)
}

fn explain_by<E>(
    answered: impl Fn(&Place, &str, Option<&str>, &str, Option<u16>) -> Error,
    place: &Place,
    key: &str,
    error: &SdkError<E, HttpResponse>,
) -> Error
where
    E: StdError + ProvideErrorMetadata + Send + Sync + 'static,
{
    if let Some(exceeded) = Exceeded::of(error) {
        return exceeded.explain(place);
    }
    let status = error.raw_response().map(|raw| raw.status().as_u16());
    match error {
        SdkError::ServiceError(answer) => answered(
            place,
            key,
            answer.err().code(),
            answer.err().message().unwrap_or_default(),
            status,
        ),
        SdkError::TimeoutError(_) => Error::Timeout(place.endpoint.clone()),
        SdkError::DispatchFailure(failure) if failure.is_timeout() => {
            place.unreachable("no response in time")
        }
        _ => match status {
            Some(status) => answered(place, key, None, "", Some(status)),
            None => place.unreachable(&Chain(error).to_string()),
        },
    }
}

/// Converts the error of a request that succeeds without an existing object. If the store reports a missing object, the
/// bucket is missing.
pub(super) fn explain_bucket<E>(place: &Place, error: &SdkError<E, HttpResponse>) -> Error
where
    E: StdError + ProvideErrorMetadata + Send + Sync + 'static,
{
    place.about_bucket(explain(place, "", error))
}
