//! The API server's clock beside our own: a second witness for what must not be done at a wrong time.

use http::Request;
use http::header::{DATE, HeaderMap};
use jiff::{SignedDuration, Timestamp};
use kube::Client;
use kube::client::Body;

/// Whoever is let in may read it, and it costs the API server nothing.
const PATH: &str = "/version";

/// The API server's clock less our own, to about a second; `None` when it tells no time. A refusal tells it as well.
pub async fn difference(client: &Client) -> Option<SignedDuration> {
    let request = Request::get(PATH).body(Body::empty()).ok()?;
    let response = client.send(request).await.ok()?;
    let theirs = told(response.headers())?;
    Some(theirs.duration_since(Timestamp::now()))
}

fn told(headers: &HeaderMap) -> Option<Timestamp> {
    let date = headers.get(DATE)?.to_str().ok()?;
    let date = jiff::fmt::rfc2822::parse(date).ok()?;
    Some(date.timestamp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_read_as_servers_write_it() {
        let mut headers = HeaderMap::new();
        assert_eq!(told(&headers), None);
        headers.insert(DATE, "Sat, 21 Nov 2026 22:40:17 GMT".parse().unwrap());
        assert_eq!(
            told(&headers),
            Some("2026-11-21T22:40:17Z".parse().unwrap())
        );
        headers.insert(DATE, "yesterday".parse().unwrap());
        assert_eq!(told(&headers), None);
    }
}
