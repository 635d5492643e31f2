//! The API server's clock beside our own: a second witness for what must not be done at a wrong time.

use http::Request;
use http::header::{DATE, HeaderMap};
use jiff::{SignedDuration, Timestamp};
use kube::Client;
use kube::client::Body;

/// Whoever is let in may read it, and it costs the API server nothing.
const PATH: &str = "/version";

/// The API server's clock less our own, to about a second; `None` when it tells no time. A refusal tells it as well. That
/// it does not answer is an error: nothing is known then.
pub async fn difference(client: &Client) -> Result<Option<SignedDuration>, kube::Error> {
    let request = Request::get(PATH).body(Body::empty());
    let response = client
        .send(request.map_err(kube::Error::HttpError)?)
        .await?;
    let theirs = told(response.headers());
    Ok(theirs.map(|theirs| theirs.duration_since(Timestamp::now())))
}

fn told(headers: &HeaderMap) -> Option<Timestamp> {
    let date = headers.get(DATE)?.to_str().ok()?;
    let date = jiff::fmt::rfc2822::parse(date).ok()?;
    Some(date.timestamp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn no_answer_is_not_taken_for_no_time() {
        let nobody = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let client = Client::try_from(nobody).unwrap();
        assert!(difference(&client).await.is_err());
    }

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
