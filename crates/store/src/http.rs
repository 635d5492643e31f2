//! The HTTP client of the stores without an HTTP client of their own, or with a different TLS library.

use std::time::Duration;

use crate::failure::chain;
use crate::port::Error;

/// A client that trusts the system's CAs (`SSL_CERT_FILE`) and follows no redirects: the signature of a
/// request is valid for one host only.
pub(crate) fn client(
    change: impl FnOnce(reqwest::ClientBuilder) -> reqwest::ClientBuilder,
) -> Result<reqwest::Client, Error> {
    let builder = reqwest::Client::builder()
        .connect_timeout(Duration::from_secs(5))
        .read_timeout(Duration::from_mins(1))
        .redirect(reqwest::redirect::Policy::none());
    change(builder).build().map_err(|error| {
        Error::Other(format!(
            "the HTTP client cannot be created: {}",
            chain(&error)
        ))
    })
}

/// Parses the URL of a store.
pub(crate) fn endpoint(text: &str) -> Result<reqwest::Url, Error> {
    let wrong = || Error::Invalid {
        field: "endpoint".to_owned(),
        problem: format!("{text:?} is not a URL: begin with http:// or https:// and a host"),
    };
    let url = reqwest::Url::parse(text.trim_end_matches('/')).map_err(|_| wrong())?;
    if matches!(url.scheme(), "http" | "https") && url.has_host() && url.query().is_none() {
        Ok(url)
    } else {
        Err(wrong())
    }
}
