//! HTTP transport of the Azure client. Its own transport would add a second TLS library
//! (docs/adr/0004-azure-crate.md).

use async_trait::async_trait;
use azure_core::error::{ErrorKind, ResultExt};
use azure_core::headers::{HeaderName, HeaderValue, Headers};
use azure_core::{Body, HttpClient, Method, Request, Response, StatusCode};
use bytes::Bytes;
use futures::{TryStreamExt, stream};

use super::markup;

/// Sends requests unchanged.
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
            // This crate sends no streams.
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
            .context(ErrorKind::Io, "the request has no response")?;
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
        let ended_early =
            |error| azure_core::Error::full(ErrorKind::Io, error, "the response ended early");
        let mut body = answer.bytes_stream().map_err(ended_early);
        let lists = is_read_as_xml(request, status);
        if !lists && status.is_success() {
            return Ok(Response::new(status, headers, Box::pin(body)));
        }
        let mut whole = Vec::new();
        let mut fault = None;
        while let Some(piece) = body.try_next().await? {
            whole.extend_from_slice(&piece);
            if whole.len() > markup::MAX_RESPONSE {
                fault = Some("an XML response is too long");
                break;
            }
        }
        fault = fault.or_else(|| markup::check(&whole).err());
        match fault {
            Some(why) if lists => {
                return Err(azure_core::Error::message(ErrorKind::DataConversion, why));
            }
            // The status and the headers are sufficient. The body may be a page of a proxy.
            Some(_) => whole.clear(),
            None => {}
        }
        let whole = stream::iter([Ok(Bytes::from(whole))]);
        Ok(Response::new(status, headers, Box::pin(whole)))
    }
}

/// Whether the client parses the response as XML, as it does for lists. The client also tries to parse error
/// responses; blobs are streamed.
fn is_read_as_xml(request: &Request, status: StatusCode) -> bool {
    let mut words = request.url().query_pairs();
    let lists = *request.method() == Method::Get && words.any(|(key, _)| key == "comp");
    lists && status.is_success()
}
