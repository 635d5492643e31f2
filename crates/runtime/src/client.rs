//! The Kubernetes client without retries.

use kube::{Client, Config};

/// A client that sends each request once. The default client of kube repeats requests that the API server rejects
/// with 429, 503 or 504.
pub(crate) fn sending_once(mut config: Config) -> Result<Client, kube::Error> {
    config.default_retry = false;
    Client::try_from(config)
}
