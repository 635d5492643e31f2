//! The HTTP transport of the Azure client. The transport of the Azure crates would need a second TLS library
//! (docs/adr/0004-azure-crate.md).

use async_trait::async_trait;
use azure_core::error::{ErrorKind, ResultExt};
use azure_core::headers::{HeaderName, HeaderValue, Headers};
use azure_core::{Body, HttpClient, Method, Request, Response, StatusCode};
use bytes::Bytes;
use futures::{TryStreamExt, stream};
use jiff::fmt::rfc2822::DateTimeParser;

use super::markup;
use crate::http::{self, Unread};
use crate::limits::{MAX_ANSWER, MAX_PAGE};
use crate::lock::Retention;

/// Parses dates in HTTP headers.
const HTTP_DATES: DateTimeParser = DateTimeParser::new();

/// Sends the requests of the Azure client, and checks the responses before the client parses them.
#[derive(Debug)]
pub(super) struct Transport(pub(super) reqwest::Client);

fn method(method: Method) -> azure_core::Result<reqwest::Method> {
    reqwest::Method::from_bytes(method.as_ref().as_bytes()).map_kind(ErrorKind::DataConversion)
}

#[async_trait]
impl HttpClient for Transport {
    async fn execute_request(&self, request: &Request) -> azure_core::Result<Response> {
        let mut sent = self
            .0
            .request(method(*request.method())?, request.url().clone());
        for (name, value) in request.headers().iter() {
            if *name != EXPECTED_MODE && *name != EXPECTED_UNTIL {
                sent = sent.header(name.as_str(), value.as_str());
            }
        }
        sent = match request.body() {
            Body::Bytes(bytes) => sent.body(bytes.clone()),
            // This crate sends every request body as `Body::Bytes`, so this branch is never reached.
            Body::SeekableStream(_) => {
                return Err(azure_core::Error::message(
                    ErrorKind::Other,
                    "the Azure transport does not support streams: send the content in blocks",
                ));
            }
        };
        let answer = sent
            .send()
            .await
            .context(ErrorKind::Io, "the request has no response")?;
        let status = StatusCode::try_from(answer.status().as_u16())
            .map_err(|_| azure_core::Error::message(ErrorKind::DataConversion, "unknown status"))?;
        if status.is_success() && !has_expected_lock(request, &answer) {
            let fault = azure_core::Error::message(ErrorKind::DataConversion, NOT_LOCKED);
            return Err(fault);
        }
        let mut headers = Headers::new();
        for (name, value) in answer.headers() {
            // The header `retry-after` is removed, because the Azure client would wait as long as the store demands,
            // without a limit.
            if name.as_str().contains("retry-after") {
                continue;
            }
            if let Ok(value) = value.to_str() {
                headers.insert(
                    HeaderName::from(name.as_str().to_owned()),
                    HeaderValue::from(value.to_owned()),
                );
            }
        }
        let lists = is_read_as_xml(request, status);
        let body = if lists {
            self.list(answer).await?
        } else if !status.is_success() {
            self.error(answer).await
        } else if *request.method() == Method::Get {
            let body = answer.bytes_stream().map_err(ended_early);
            return Ok(Response::new(status, headers, Box::pin(body)));
        } else {
            // This request is not a GET. The Azure client needs only the headers of the response, so the body is not
            // read.
            Bytes::new()
        };
        let body = stream::iter([Ok(body)]);
        Ok(Response::new(status, headers, Box::pin(body)))
    }
}

fn ended_early(error: reqwest::Error) -> azure_core::Error {
    azure_core::Error::full(
        ErrorKind::Io,
        error,
        "the connection broke before the end of the response",
    )
}

/// The header with the mode of a blob's lock, in a request that creates the blob and in a response with its properties.
pub(super) const LOCK_MODE: HeaderName = HeaderName::from_static("x-ms-immutability-policy-mode");

/// The header with the end of a blob's lock, in the same requests and responses as [`LOCK_MODE`].
pub(super) const LOCK_UNTIL: HeaderName =
    HeaderName::from_static("x-ms-immutability-policy-until-date");

/// With this header and [`EXPECTED_UNTIL`], a request succeeds only if the response reports a lock with this mode.
/// [`Transport`] compares the locks, because the Azure client does not return the lock of a response. Neither header is
/// sent.
pub(super) const EXPECTED_MODE: HeaderName = HeaderName::from_static("expected-lock-mode");

/// The header with the end of the expected lock. See [`EXPECTED_MODE`].
pub(super) const EXPECTED_UNTIL: HeaderName = HeaderName::from_static("expected-lock-until");

/// The error for a response that does not report the expected lock.
pub(super) const NOT_LOCKED: &str = "the response does not report the lock of the blob";

/// Whether the response reports the lock that the request expects. True if the request expects no lock.
fn has_expected_lock(request: &Request, answer: &reqwest::Response) -> bool {
    let Some(mode) = request.headers().get_optional_str(&EXPECTED_MODE) else {
        return true;
    };
    let until = request.headers().get_optional_str(&EXPECTED_UNTIL);
    let Some(until) = until.and_then(|until| until.parse().ok()) else {
        return false;
    };
    let expected = Retention {
        mode: mode.to_owned(),
        until,
    };
    let found = text_of(answer, &LOCK_UNTIL);
    let found = found.and_then(|text| HTTP_DATES.parse_timestamp(text).ok());
    expected.is_confirmed_by(text_of(answer, &LOCK_MODE).unwrap_or_default(), found)
}

/// The value of a header.
fn text_of<'a>(answer: &'a reqwest::Response, name: &HeaderName) -> Option<&'a str> {
    let value = answer.headers().get(name.as_str())?;
    value.to_str().ok()
}

/// The error for a response longer than [`MAX_PAGE`] starts with this text.
pub(super) const TOO_LONG: &str = "an XML response is too long";

impl Transport {
    async fn list(&self, answer: reqwest::Response) -> azure_core::Result<Bytes> {
        let fault = |why| azure_core::Error::message(ErrorKind::DataConversion, why);
        let whole = http::whole(answer, MAX_PAGE)
            .await
            .map_err(|error| match error {
                Unread::TooLong => fault(TOO_LONG),
                Unread::Broken(error) => ended_early(error),
            })?;
        markup::check(&whole).map_err(fault)?;
        Ok(whole.into())
    }

    /// The body of an error response. Empty if the body must not be parsed, for example a web page of a proxy. From an
    /// empty body, the client builds its error with the status and the headers.
    async fn error(&self, answer: reqwest::Response) -> Bytes {
        match http::whole(answer, MAX_ANSWER).await {
            Ok(whole) if markup::check(&whole).is_ok() => whole.into(),
            _ => Bytes::new(),
        }
    }
}

/// Whether the response is a listing, which the client parses as XML.
fn is_read_as_xml(request: &Request, status: StatusCode) -> bool {
    let mut words = request.url().query_pairs();
    let lists = *request.method() == Method::Get && words.any(|(key, _)| key == "comp");
    lists && status.is_success()
}
