//! Creates the Kubernetes clients.

use kube::client::ClientBuilder;
use kube::{Client, Config};

use crate::api_requests::ApiRequests;

/// Creates a client that sends each request once.
pub(crate) fn sending_once(config: Config) -> Result<Client, kube::Error> {
    Client::try_from(without_retry(config))
}

/// The configuration of a client that sends each request once. By default, kube's client retries requests that the API
/// server rejects with 429, 503 or 504.
pub(crate) fn without_retry(mut config: Config) -> Config {
    config.default_retry = false;
    config
}

/// Creates a client whose requests are measured. The client of the lease is not measured, so a standby's requests are
/// not in the metrics.
pub(crate) fn measured(config: Config, requests: &ApiRequests) -> Result<Client, kube::Error> {
    let builder = ClientBuilder::try_from(config)?;
    Ok(builder.with_layer(requests).build())
}
