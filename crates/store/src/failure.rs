//! What stores answer, turned into [`Error`] with its remedy: one table for all of them. Pure.

use std::error::Error as StdError;

use crate::port::Error;

/// What errors have to name.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) bucket: String,
    pub(crate) endpoint: String,
}

impl Place {
    /// Says why reading a body failed.
    pub(crate) fn broken(&self, error: &dyn StdError) -> Error {
        self.unreachable(&chain(error))
    }

    /// For a call that needs no object to be there: what is missing then is the bucket.
    pub(crate) fn about_bucket(&self, error: Error) -> Error {
        match error {
            Error::NoSuchObject { .. } => Error::NoSuchBucket {
                bucket: self.bucket.clone(),
            },
            error => error,
        }
    }

    /// Says why nothing was answered.
    pub(crate) fn unreachable(&self, text: &str) -> Error {
        // What rustls calls an answer that is not TLS.
        if text.contains("InvalidContentType") {
            return Error::Unreachable {
                endpoint: self.endpoint.clone(),
                detail: format!(
                    "it speaks no TLS there: begin with http:// if it has none; {text}"
                ),
            };
        }
        if text.contains("certificate") || text.contains("handshake") {
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

    /// Says that something else answers, or the store's other port: a store says what is wrong.
    pub(crate) fn foreign(&self, answer: &str) -> Error {
        Error::Other(format!(
            "{answer}; what {} answers is not what a store says: correct the endpoint, and whether it begins with \
             http:// or https://",
            self.endpoint
        ))
    }

    /// As [`Place::answered`], of an answer to HEAD: it never has a body, whoever answers. A redirection, and a
    /// method that is not allowed, are no store's all the same.
    pub(crate) fn answered_to_head(
        &self,
        key: &str,
        code: Option<&str>,
        message: &str,
        status: Option<u16>,
    ) -> Error {
        let message = match status {
            Some(400..=404 | 406..500) if message.is_empty() => "(a HEAD is told no reason)",
            _ => message,
        };
        self.answered(key, code, message, status)
    }

    /// Says what an answer means: the store's own word for the failure, its text, and the HTTP status.
    pub(crate) fn answered(
        &self,
        key: &str,
        code: Option<&str>,
        message: &str,
        status: Option<u16>,
    ) -> Error {
        let shown = || {
            let status = status.map_or_else(String::new, |status| format!("{status} "));
            format!("{status}{} {message}", code.unwrap_or_default())
                .trim()
                .to_owned()
        };
        match (code.unwrap_or_default(), status) {
            ("NoSuchBucket" | "ContainerNotFound" | "ContainerBeingDeleted", _) => {
                Error::NoSuchBucket {
                    bucket: self.bucket.clone(),
                }
            }
            ("NoSuchKey" | "NotFound" | "BlobNotFound", _) => Error::NoSuchObject {
                key: key.to_owned(),
            },
            ("RequestTimeTooSkewed" | "RequestExpired", _) => Error::ClockSkew(shown()),
            // Azure has no word of its own for it
            // (https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key).
            ("AuthenticationFailed", _) if message.contains("date header") => {
                Error::ClockSkew(shown())
            }
            ("InvalidBucketName" | "InvalidResourceName", _) => Error::Invalid {
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
            ("NoSuchUpload" | "InvalidBlockList", _) => Error::Other(shown()),
            // Google's words for it; the status alone would be about the object.
            (_, Some(404)) if message.contains("bucket does not exist") => Error::NoSuchBucket {
                bucket: self.bucket.clone(),
            },
            (_, Some(404)) => Error::NoSuchObject {
                key: key.to_owned(),
            },
            ("RequestTimeout" | "OperationTimedOut", _) | (_, Some(408)) => {
                Error::Timeout(self.endpoint.clone())
            }
            ("", Some(300..500)) if message.is_empty() => self.foreign(&shown()),
            _ => Error::Other(shown()),
        }
    }
}

/// An error with its causes, each said once.
pub(crate) fn chain(error: &dyn StdError) -> String {
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
                "",
                "create it or correct the path",
            ),
            (
                Some("ContainerNotFound"),
                Some(404),
                "",
                "create it or correct the path",
            ),
            (
                None,
                Some(404),
                "The specified bucket does not exist.",
                "create it or correct the path",
            ),
            (
                Some("InvalidAccessKeyId"),
                Some(403),
                "",
                "check the credentials in the Secret",
            ),
            (
                Some("SignatureDoesNotMatch"),
                Some(403),
                "",
                "check the credentials in the Secret",
            ),
            (None, Some(403), "", "bucket's policy"),
            (
                Some("RequestTimeTooSkewed"),
                Some(403),
                "",
                "set this node's clock",
            ),
            (
                Some("AuthenticationFailed"),
                Some(403),
                "Request date header too old",
                "set this node's clock",
            ),
            (
                Some("AuthenticationFailed"),
                Some(403),
                "Server failed to authenticate the request",
                "check the credentials in the Secret",
            ),
            (
                Some("AuthorizationHeaderMalformed"),
                Some(400),
                "",
                "region: the bucket is in another one",
            ),
            (Some("SlowDown"), Some(503), "", "503 SlowDown"),
        ];
        for (code, status, message, expected) in cases {
            let text = place.answered("k", code, message, status).to_string();
            assert!(text.contains(expected), "{text}");
        }
        assert!(matches!(
            place.answered("k", None, "", Some(404)),
            Error::NoSuchObject { .. }
        ));
        // What says nothing is no store, unless it was asked for nothing but headers.
        for (status, is_foreign) in [(400, false), (412, false), (301, true), (405, true)] {
            let of = |error: Error| error.to_string().contains("correct the endpoint");
            let status = Some(status);
            assert!(of(place.answered("k", None, "", status)), "{status:?}");
            let head = place.answered_to_head("k", None, "", status);
            assert_eq!(of(head), is_foreign, "{status:?}");
        }
        assert!(matches!(
            place.answered_to_head("k", None, "", Some(403)),
            Error::AccessDenied(_)
        ));
    }
}
