//! How the operators talk to the API server.

use kube::{Client, Config};

/// A client that leaves it to others to ask again.
pub(crate) fn sending_once(mut config: Config) -> Result<Client, kube::Error> {
    config.default_retry = false;
    Client::try_from(config)
}
