//! The HTTP transport of the Azure client. The transport of the Azure crates would need a second TLS library
//! (docs/adr/0004-azure-crate.md).

use async_trait::async_trait;
use azure_core::error::{ErrorKind, ResultExt};
use azure_core::headers::{HeaderName, HeaderValue, Headers};
use azure_core::{Body, HttpClient, Method, Request, Response, StatusCode};
use bytes::Bytes;
use futures::{TryStreamExt, stream};

use super::markup;
use crate::http::{self, Unread};
use crate::limits::{MAX_ANSWER, MAX_PAGE};

/// Sends the requests of the Azure client unchanged.
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
            sent = sent.header(name.as_str(), value.as_str());
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
            // The Azure client needs only the headers of other successful responses, so their bodies are not read.
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

    /// The body of an error response. Empty if the body must not be parsed, for example a web page of a proxy. The
    /// client then builds its error from the status and the headers.
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
