//! Retries requests that fail temporarily, because the API server of a busy machine can answer too late.
//!
//! Retries only idempotent requests, because most of these errors do not show whether the request was carried out.

use std::time::{Duration, Instant};

use anyhow::{Error, Result};
use http::{Method, Request, Response, StatusCode};
use kube::client::Body;
use tokio::time::{Sleep, sleep};
use tower::BoxError;
use tower::retry::Policy;

/// Time limit for all attempts of one request.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Messages of `kubectl` and Helm if the API server, or the connection to it, is temporarily unavailable.
const TRANSIENT: [&str; 20] = [
    "unable to return a response in the time allotted",
    "Handler timeout",
    "etcdserver: request timed out",
    "etcdserver: leader changed",
    "TooManyRequests",
    "too many requests",
    "ServerTimeout",
    "currently unable to handle the request",
    "Unable to connect to the server",
    "The connection to the server",
    "connection refused",
    "connection reset by peer",
    "TLS handshake timeout",
    "client connection lost",
    "server sent GOAWAY",
    "unexpected EOF",
    ": EOF",
    "i/o timeout",
    "Client.Timeout exceeded",
    "the object has been modified",
];
/// The API server returns this message if it cannot connect to a server behind it, such as a pod.
const PROXY_ERROR: &str = "error trying to reach service";

/// True if the text reports a temporary failure of the API server.
pub(crate) fn is_transient(text: &str) -> bool {
    !text.contains(PROXY_ERROR) && TRANSIENT.iter().any(|words| text.contains(words))
}

/// Repeats `attempt` while its error is transient. The argument is false for the first attempt, and true for a retry.
pub(crate) async fn retry_transient<T>(
    is_transient: impl Fn(&Error) -> bool,
    mut attempt: impl AsyncFnMut(bool) -> Result<T>,
) -> Result<T> {
    let begun = Instant::now();
    let mut is_retry = false;
    loop {
        match attempt(is_retry).await {
            Err(error) if begun.elapsed() < RETRY_TIMEOUT && is_transient(&error) => {
                sleep(RETRY_INTERVAL).await;
            }
            outcome => return outcome,
        }
        is_retry = true;
    }
}

/// The retry policy for idempotent requests. The kube client itself retries after status 429, 503 and 504. This policy
/// adds retries after status 500 and after a broken connection.
#[derive(Clone, Default)]
pub(crate) struct RetryPolicy {
    begun: Option<Instant>,
}

impl<T> Policy<Request<Body>, Response<T>, BoxError> for RetryPolicy {
    type Future = Sleep;

    fn retry(
        &mut self,
        _: &mut Request<Body>,
        answer: &mut Result<Response<T>, BoxError>,
    ) -> Option<Sleep> {
        let begun = *self.begun.get_or_insert_with(Instant::now);
        let failed = match answer {
            Ok(answer) => answer.status() == StatusCode::INTERNAL_SERVER_ERROR,
            Err(_) => true,
        };
        (failed && begun.elapsed() < RETRY_TIMEOUT).then(|| sleep(RETRY_INTERVAL))
    }

    fn clone_request(&mut self, request: &Request<Body>) -> Option<Request<Body>> {
        // DELETE and POST are not retried: a retry of DELETE could delete a new object with the same name, and a retry
        // of POST could create a second object.
        if [Method::POST, Method::DELETE].contains(request.method()) {
            return None;
        }
        let mut copy = Request::new(request.body().try_clone()?);
        *copy.method_mut() = request.method().clone();
        *copy.uri_mut() = request.uri().clone();
        *copy.version_mut() = request.version();
        copy.headers_mut().clone_from(request.headers());
        copy.extensions_mut().clone_from(request.extensions());
        Some(copy)
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn transient_errors_are_distinguished_from_rejections() {
        for text in [
            "Error from server (Timeout): the server was unable to return a response in the time allotted, but may still be processing the request",
            "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?",
            "Error from server: etcdserver: request timed out",
        ] {
            assert!(is_transient(text), "{text}");
        }
        for text in [
            "Error from server (Forbidden): pods is forbidden",
            "Error from server (NotFound): pods \"c\" not found",
            "error: timed out waiting for the condition",
            "Error from server (ServiceUnavailable): error trying to reach service: dial tcp: connect: connection refused",
        ] {
            assert!(!is_transient(text), "{text}");
        }
    }

    #[tokio::test]
    async fn only_transient_errors_are_retried() {
        let mut tries = 0;
        let outcome = retry_transient(
            |error| error.to_string() == "busy",
            async |is_retry| {
                assert_eq!(is_retry, tries > 0);
                tries += 1;
                anyhow::ensure!(tries == 3, "busy");
                Ok(tries)
            },
        );
        assert_eq!(outcome.await.unwrap(), 3);
        let mut tries = 0;
        let outcome: Result<()> = retry_transient(
            |error| error.to_string() == "busy",
            async |_| {
                tries += 1;
                bail!("refused")
            },
        )
        .await;
        assert!(outcome.is_err());
        assert_eq!(tries, 1);
    }
}
