//! The Kubernetes client that sends each request only once.

use kube::{Client, Config};

/// Creates a client that sends each request once. The default client of kube retries requests that the API server
/// rejects with 429, 503 or 504.
pub(crate) fn sending_once(mut config: Config) -> Result<Client, kube::Error> {
    config.default_retry = false;
    Client::try_from(config)
}
