//! The HTTP client for the stores whose client library brings no HTTP client, or only one that needs a second TLS
//! library.

use std::time::Duration;

use api::problem::Chain;

use crate::limits::MIN_CHUNK;
use crate::port::Error;

/// Creates a client that trusts the system's CAs (`SSL_CERT_FILE`). It follows no redirects, because the signature of a
/// request is valid only for one host.
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
            Chain(&error)
        ))
    })
}

/// Why the body of a response was not read completely.
pub(crate) enum Unread {
    /// The announced or received length of the body exceeds the limit.
    TooLong,
    /// The connection failed.
    Broken(reqwest::Error),
}

/// Reads the body of a response, at most `limit` bytes. Counts the received bytes, because the announced length may be
/// wrong. Does not decompress the body.
pub(crate) async fn whole(
    mut response: reqwest::Response,
    limit: usize,
) -> Result<Vec<u8>, Unread> {
    let announced = response.content_length().unwrap_or_default();
    if usize::try_from(announced).is_ok_and(|announced| announced > limit) {
        return Err(Unread::TooLong);
    }
    let mut left = limit;
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(Unread::Broken)? {
        left = left
            .checked_sub(chunk.len().max(MIN_CHUNK))
            .ok_or(Unread::TooLong)?;
        body.extend_from_slice(&chunk);
    }
    Ok(body)
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
