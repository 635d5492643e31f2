//! HTTP for the Azure client: its own would bring a second TLS stack (docs/adr/0004-azure-crate.md).

use async_trait::async_trait;
use azure_core::error::{ErrorKind, ResultExt};
use azure_core::headers::{HeaderName, HeaderValue, Headers};
use azure_core::{Body, HttpClient, Method, Request, Response, StatusCode};
use futures::TryStreamExt;

/// Sends requests as they are.
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
            // Nothing here sends one.
            Body::SeekableStream(_) => {
                return Err(azure_core::Error::message(
                    ErrorKind::Other,
                    "streams are sent as blocks",
                ));
            }
        };
        let answer = sent
            .send()
            .await
            .context(ErrorKind::Io, "the request was not answered")?;
        let status = StatusCode::try_from(answer.status().as_u16())
            .map_err(|_| azure_core::Error::message(ErrorKind::DataConversion, "unknown status"))?;
        let mut headers = Headers::new();
        for (name, value) in answer.headers() {
            if let Ok(value) = value.to_str() {
                headers.insert(
                    HeaderName::from(name.as_str().to_owned()),
                    HeaderValue::from(value.to_owned()),
                );
            }
        }
        let body = answer
            .bytes_stream()
            .map_err(|error| azure_core::Error::full(ErrorKind::Io, error, "the answer broke off"));
        Ok(Response::new(status, headers, Box::pin(body)))
    }
}
