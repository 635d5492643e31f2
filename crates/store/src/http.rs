//! The HTTP client of the stores whose libraries bring none, or not the one TLS stack.

use std::time::Duration;

use crate::failure::chain;
use crate::port::Error;

/// A client that trusts the certificates of the system (`SSL_CERT_FILE`) and follows no redirect: a signed request
/// is for one place.
pub(crate) fn client(
    change: impl FnOnce(reqwest::ClientBuilder) -> reqwest::ClientBuilder,
) -> Result<reqwest::Client, Error> {
    let builder = reqwest::Client::builder()
        .connect_timeout(Duration::from_secs(5))
        .read_timeout(Duration::from_mins(1))
        .redirect(reqwest::redirect::Policy::none());
    change(builder)
        .build()
        .map_err(|error| Error::Other(format!("no HTTP client: {}", chain(&error))))
}

/// Refuses what is no URL of a store.
pub(crate) fn endpoint(text: &str) -> Result<reqwest::Url, Error> {
    let wrong = || Error::Invalid {
        field: "endpoint".to_owned(),
        problem: format!("{text:?} is no URL: begin with http:// or https:// and a host"),
    };
    let url = reqwest::Url::parse(text.trim_end_matches('/')).map_err(|_| wrong())?;
    if matches!(url.scheme(), "http" | "https") && url.has_host() && url.query().is_none() {
        Ok(url)
    } else {
        Err(wrong())
    }
}
