//! HTTP without a check of the server's certificate, for `insecureSkipVerify`, and to another address than the host's,
//! for tests: the S3 client itself has no setting for either.

use aws_sdk_s3::config::SharedHttpClient;
use aws_smithy_runtime_api::client::http::{
    HttpConnector, HttpConnectorFuture, SharedHttpConnector, http_client_fn,
};
use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse};
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_types::body::SdkBody;

use crate::http;
use crate::port::Error;

#[derive(Debug)]
struct Unchecked(reqwest::Client);

/// The client.
pub(super) fn http_client() -> Result<SharedHttpClient, Error> {
    let client = http::client(|builder| builder.tls_danger_accept_invalid_certs(true))?;
    Ok(over(client))
}

/// A client that looks for one host at another address, for tests: the requests, their `Host` and their signature are
/// those the host would get.
#[cfg(any(test, feature = "testing"))]
pub(super) fn elsewhere(host: &str, at: std::net::SocketAddr) -> Result<SharedHttpClient, Error> {
    http::client(|builder| builder.resolve(host, at)).map(over)
}

fn over(client: reqwest::Client) -> SharedHttpClient {
    let connector = SharedHttpConnector::new(Unchecked(client));
    http_client_fn(move |_, _| connector.clone())
}

impl HttpConnector for Unchecked {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let client = self.0.clone();
        HttpConnectorFuture::new(async move {
            let request = request
                .try_into_http1x()
                .map_err(|error| ConnectorError::user(error.into()))?;
            let request = reqwest::Request::try_from(request.map(reqwest::Body::wrap))
                .map_err(|error| ConnectorError::user(error.into()))?;
            let answer = client.execute(request).await.map_err(|error| {
                if error.is_timeout() {
                    ConnectorError::timeout(error.into())
                } else {
                    ConnectorError::io(error.into())
                }
            })?;
            let answer: ::http::Response<reqwest::Body> = answer.into();
            HttpResponse::try_from(answer.map(SdkBody::from_body_1_x))
                .map_err(|error| ConnectorError::other(error.into(), None))
        })
    }
}
