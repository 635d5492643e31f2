//! Two HTTP clients that the AWS library cannot configure: the client for `insecureSkipVerify`, and the client for
//! tests, which resolves a host to another address.

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
struct Connector(reqwest::Client);

/// An HTTP client that does not verify the server's certificate.
pub(super) fn http_client() -> Result<SharedHttpClient, Error> {
    let client = http::client(|builder| builder.tls_danger_accept_invalid_certs(true))?;
    Ok(shared_client(client))
}

/// An HTTP client for tests that connects to the address `at` for `host`. The `Host` header and the signature contain
/// `host`, not `at`.
#[cfg(any(test, feature = "testing"))]
pub(super) fn with_host_address(
    host: &str,
    at: std::net::SocketAddr,
) -> Result<SharedHttpClient, Error> {
    http::client(|builder| builder.resolve(host, at)).map(shared_client)
}

fn shared_client(client: reqwest::Client) -> SharedHttpClient {
    let connector = SharedHttpConnector::new(Connector(client));
    http_client_fn(move |_, _| connector.clone())
}

impl HttpConnector for Connector {
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
