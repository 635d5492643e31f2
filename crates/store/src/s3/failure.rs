//! What a store that speaks S3 answers, turned into [`Error`] with its remedy. Pure.

use std::error::Error as StdError;

use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};

use crate::port::Error;

/// What errors have to name.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) bucket: String,
    pub(super) endpoint: String,
}

impl Place {
    /// Says why a call about `key` failed.
    pub(super) fn explain<E>(&self, key: &str, error: &SdkError<E, HttpResponse>) -> Error
    where
        E: StdError + ProvideErrorMetadata + Send + Sync + 'static,
    {
        let status = error.raw_response().map(|raw| raw.status().as_u16());
        match error {
            SdkError::ServiceError(answer) => self.answered(
                key,
                answer.err().code(),
                answer.err().message().unwrap_or_default(),
                status,
            ),
            SdkError::TimeoutError(_) => Error::Timeout(self.endpoint.clone()),
            SdkError::DispatchFailure(failure) if failure.is_timeout() => {
                self.unreachable("no answer in time")
            }
            _ => match status {
                Some(status) => self.answered(key, None, "", Some(status)),
                None => self.unreachable(&chain(error)),
            },
        }
    }

    /// Says why a call failed that needs no object to be there: what is missing then is the bucket.
    pub(super) fn explain_bucket<E>(&self, error: &SdkError<E, HttpResponse>) -> Error
    where
        E: StdError + ProvideErrorMetadata + Send + Sync + 'static,
    {
        match self.explain("", error) {
            Error::NoSuchObject { .. } => Error::NoSuchBucket {
                bucket: self.bucket.clone(),
            },
            error => error,
        }
    }

    /// Says why reading the body of `key` failed.
    pub(super) fn broken(&self, error: &dyn StdError) -> Error {
        self.unreachable(&chain(error))
    }

    fn unreachable(&self, text: &str) -> Error {
        if text.contains("certificate")
            || text.contains("handshake")
            || text.contains("InvalidContentType")
        {
            return Error::Certificate(text.to_owned());
        }
        if text.contains("no providers in chain") || text.contains("credentials provider") {
            return Error::AccessDenied(
                "no credentials were found for the pod's own identity".to_owned(),
            );
        }
        Error::Unreachable {
            endpoint: self.endpoint.clone(),
            detail: text.to_owned(),
        }
    }

    fn answered(&self, key: &str, code: Option<&str>, message: &str, status: Option<u16>) -> Error {
        let shown = || {
            let status = status.map_or_else(String::new, |status| format!("{status} "));
            format!("{status}{} {message}", code.unwrap_or_default())
                .trim()
                .to_owned()
        };
        match (code.unwrap_or_default(), status) {
            ("NoSuchBucket", _) => Error::NoSuchBucket {
                bucket: self.bucket.clone(),
            },
            ("NoSuchKey" | "NotFound", _) => Error::NoSuchObject {
                key: key.to_owned(),
            },
            ("RequestTimeTooSkewed" | "RequestExpired", _) => Error::ClockSkew(shown()),
            ("InvalidBucketName", _) => Error::Invalid {
                field: "path".to_owned(),
                problem: format!("{:?} is no name of a bucket", self.bucket),
            },
            (
                "PermanentRedirect"
                | "AuthorizationHeaderMalformed"
                | "IllegalLocationConstraintException",
                _,
            ) => Error::Invalid {
                field: "region".to_owned(),
                problem: format!("the bucket is in another one: set it ({})", shown()),
            },
            (
                // The last is versitygw's word for an unknown key, with status 404.
                "AccessDenied"
                | "InvalidAccessKeyId"
                | "SignatureDoesNotMatch"
                | "InvalidToken"
                | "ExpiredToken"
                | "AllAccessDisabled"
                | "XAdminUserNotFound",
                _,
            )
            | (_, Some(401 | 403)) => Error::AccessDenied(shown()),
            ("NoSuchUpload", _) => Error::Other(shown()),
            (_, Some(404)) => Error::NoSuchObject {
                key: key.to_owned(),
            },
            ("RequestTimeout", _) | (_, Some(408)) => Error::Timeout(self.endpoint.clone()),
            _ => Error::Other(shown()),
        }
    }
}

fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_common_refusal_has_its_remedy() {
        let place = Place {
            bucket: "b".into(),
            endpoint: "http://s3".into(),
        };
        let cases = [
            (
                Some("NoSuchBucket"),
                Some(404),
                "create it or correct the path",
            ),
            (
                Some("InvalidAccessKeyId"),
                Some(403),
                "check the credentials in the Secret",
            ),
            (
                Some("SignatureDoesNotMatch"),
                Some(403),
                "check the credentials in the Secret",
            ),
            (None, Some(403), "bucket's policy"),
            (
                Some("RequestTimeTooSkewed"),
                Some(403),
                "set this node's clock",
            ),
            (
                Some("AuthorizationHeaderMalformed"),
                Some(400),
                "region: the bucket is in another one",
            ),
            (Some("SlowDown"), Some(503), "503 SlowDown"),
        ];
        for (code, status, expected) in cases {
            let text = place.answered("k", code, "", status).to_string();
            assert!(text.contains(expected), "{text}");
        }
        assert!(matches!(
            place.answered("k", None, "", Some(404)),
            Error::NoSuchObject { .. }
        ));
    }
}
