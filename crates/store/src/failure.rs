//! Converts the errors of all stores into [`Error`] with a remedy. Performs no I/O.

use std::error::Error as StdError;

use api::problem::Chain;

use crate::port::Error;

/// Maximum number of characters of a store's text in a message.
const MAX_MESSAGE: usize = 1_000;

/// The bucket and the endpoint, as error messages show them.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) bucket: String,
    pub(crate) endpoint: String,
}

impl Place {
    /// The error for a response body that the client could not read completely.
    pub(crate) fn broken(&self, error: &dyn StdError) -> Error {
        self.unreachable(&Chain(error).to_string())
    }

    /// The error for a store that exceeds a limit. `problem` is a clause such as "has more than 100000 objects".
    pub(crate) fn excessive(&self, problem: String) -> Error {
        Error::Excessive {
            endpoint: self.endpoint.clone(),
            problem,
        }
    }

    /// Converts [`Error::NoSuchObject`] into [`Error::NoSuchBucket`], for requests that need no object. If such a
    /// request returns status 404, the bucket is missing.
    pub(crate) fn about_bucket(&self, error: Error) -> Error {
        match error {
            Error::NoSuchObject { .. } => Error::NoSuchBucket {
                bucket: self.bucket.clone(),
            },
            error => error,
        }
    }

    /// The error for a request without a response.
    pub(crate) fn unreachable(&self, text: &str) -> Error {
        // rustls reports `InvalidContentType` if a server responds without TLS.
        if text.contains("InvalidContentType") {
            return Error::Unreachable {
                endpoint: self.endpoint.clone(),
                detail: format!(
                    "the endpoint does not use TLS ({text}): enable TLS on the store, or use a URL with http://"
                ),
            };
        }
        if text.contains("certificate") || text.contains("handshake") {
            return Error::Certificate(text.to_owned());
        }
        if text.contains("no providers in chain") || text.contains("credentials provider") {
            return Error::NoIdentity("no credentials were found".to_owned());
        }
        Error::Unreachable {
            endpoint: self.endpoint.clone(),
            detail: text.to_owned(),
        }
    }

    /// The error for an error response without an error code. The server is not an object store, or the port is not the
    /// port of the store's API.
    pub(crate) fn foreign(&self, answer: &str) -> Error {
        Error::Other(format!(
            "{answer}: {} does not respond like an object store: correct the endpoint, and check whether it starts with \
             http:// or https://",
            self.endpoint
        ))
    }

    /// The error for an error response to a HEAD request. Such a response has no body, so a status 4xx has no reason
    /// even if it comes from an object store. With a redirection or status 405 ("method not allowed"), the server is
    /// not an object store.
    pub(crate) fn answered_to_head(
        &self,
        key: &str,
        code: Option<&str>,
        message: &str,
        status: Option<u16>,
    ) -> Error {
        let message = match status {
            Some(400..=404 | 406..500) if message.is_empty() => {
                "(a HEAD response contains no reason)"
            }
            _ => message,
        };
        self.answered(key, code, message, status)
    }

    /// The error for an error response. `code` and `message` come from the body, and `status` is the HTTP status.
    pub(crate) fn answered(
        &self,
        key: &str,
        code: Option<&str>,
        message: &str,
        status: Option<u16>,
    ) -> Error {
        // `short` limits the texts of the response, so that a store cannot fill conditions, Events and the log.
        let short = |text: &str| text.chars().take(MAX_MESSAGE).collect::<String>();
        let text = || {
            let message = short(message);
            let code = short(code.unwrap_or_default());
            let status = status.map_or_else(String::new, |status| format!("{status} "));
            format!("{status}{code} {message}").trim().to_owned()
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
            ("RequestTimeTooSkewed" | "RequestExpired", _) => Error::ClockSkew(text()),
            // Azure reports clock skew with the general code `AuthenticationFailed`, so only the message identifies
            // clock skew (https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key).
            ("AuthenticationFailed", _) if message.contains("date header") => {
                Error::ClockSkew(text())
            }
            ("InvalidBucketName" | "InvalidResourceName", _) => Error::Invalid {
                field: "path".to_owned(),
                problem: format!(
                    "{:?} is not a valid bucket name: correct the path",
                    self.bucket
                ),
            },
            (
                "PermanentRedirect"
                | "AuthorizationHeaderMalformed"
                | "IllegalLocationConstraintException",
                _,
            ) => Error::Invalid {
                field: "region".to_owned(),
                problem: format!(
                    "the bucket is in another region: set its region ({})",
                    text()
                ),
            },
            (
                // versitygw reports an unknown access key as `XAdminUserNotFound` with status 404.
                "AccessDenied"
                | "InvalidAccessKeyId"
                | "SignatureDoesNotMatch"
                | "InvalidToken"
                | "ExpiredToken"
                | "AllAccessDisabled"
                | "XAdminUserNotFound",
                _,
            )
            | (_, Some(401 | 403)) => Error::AccessDenied(text()),
            ("NoSuchUpload" | "InvalidBlockList", _) => Error::Other(text()),
            // Google responds with status 404 both for a missing bucket and for a missing object, so only the message
            // distinguishes them.
            (_, Some(404)) if message.contains("bucket does not exist") => Error::NoSuchBucket {
                bucket: self.bucket.clone(),
            },
            (_, Some(404)) => Error::NoSuchObject {
                key: key.to_owned(),
            },
            ("RequestTimeout" | "OperationTimedOut", _) | (_, Some(408)) => {
                Error::Timeout(self.endpoint.clone())
            }
            ("", Some(300..500)) if message.is_empty() => self.foreign(&text()),
            _ => Error::Other(text()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_store_long_message_is_shortened() {
        let place = Place {
            bucket: "b".into(),
            endpoint: "http://s3".into(),
        };
        let long = "ü".repeat(1 << 20);
        for status in [400, 401, 500] {
            let error = place.answered("k", Some(&long), &long, Some(status));
            assert!(error.to_string().len() < 5_000, "{status}");
        }
    }

    #[test]
    fn common_store_errors_contain_remedy() {
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
                "correct the access key",
            ),
            (
                Some("SignatureDoesNotMatch"),
                Some(403),
                "",
                "correct the secret key",
            ),
            (None, Some(403), "", "bucket's policy"),
            (
                Some("RequestTimeTooSkewed"),
                Some(403),
                "",
                "correct the clock of the node",
            ),
            (
                Some("AuthenticationFailed"),
                Some(403),
                "Request date header too old",
                "correct the clock of the node",
            ),
            (
                Some("AuthenticationFailed"),
                Some(403),
                "Server failed to authenticate the request",
                "check the credentials",
            ),
            (
                Some("AuthorizationHeaderMalformed"),
                Some(400),
                "",
                "region: the bucket is in another region",
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
        let no_identity = place.unreachable("no providers in chain provided credentials");
        let text = no_identity.to_string();
        assert!(text.contains("name a Secret in the spec"), "{text}");
        assert!(!text.contains("check the credentials"), "{text}");
        // An object store reports a failed GET with an error code in the body, so a response without this code comes
        // from another kind of server. A response to HEAD has no body. After a failed HEAD, only a status such as 301
        // or 405 counts as the response of another kind of server.
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
