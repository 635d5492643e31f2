//! Compares the local clock with the clock of the API server. Operators do this before steps that depend on the time,
//! because the local clock may be wrong.

use http::Request;
use http::header::{DATE, HeaderMap};
use jiff::{SignedDuration, Timestamp};
use kube::Client;
use kube::client::Body;

/// The path of the request whose response contains the API server's time in the header `Date`. Every authenticated
/// client may read this path, and the response is small.
const PATH: &str = "/version";

/// The time of the API server minus the local time, accurate to about a second. `None` if the response has no valid
/// `Date` header. The response to a rejected request has this header too.
///
/// # Errors
/// Fails if the API server does not respond.
pub async fn difference(client: &Client) -> Result<Option<SignedDuration>, kube::Error> {
    let request = Request::get(PATH).body(Body::empty());
    let response = client
        .send(request.map_err(kube::Error::HttpError)?)
        .await?;
    let theirs = server_time(response.headers());
    Ok(theirs.map(|theirs| theirs.duration_since(Timestamp::now())))
}

/// Returns the earlier of the operator's time `now` and the API server's time. `difference` is the API server's time
/// minus the operator's time. Returns `now` if `difference` is `None`.
pub fn earlier(now: Timestamp, difference: Option<SignedDuration>) -> Timestamp {
    let behind = difference.filter(SignedDuration::is_negative);
    let theirs = behind.and_then(|difference| now.checked_add(difference).ok());
    theirs.unwrap_or(now)
}

fn server_time(headers: &HeaderMap) -> Option<Timestamp> {
    let date = headers.get(DATE)?.to_str().ok()?;
    let date = jiff::fmt::rfc2822::parse(date).ok()?;
    Some(date.timestamp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn clock_difference_is_an_error_if_api_server_does_not_respond() {
        let closed_port = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let client = Client::try_from(closed_port).unwrap();
        assert!(difference(&client).await.is_err());
    }

    #[test]
    fn earlier_time_of_two_clocks_is_used() {
        let now: Timestamp = "2026-11-21T22:40:17Z".parse().unwrap();
        let hour = SignedDuration::from_hours(1);
        assert_eq!(earlier(now, None), now);
        assert_eq!(earlier(now, Some(hour)), now);
        assert_eq!(earlier(now, Some(-hour)), now - hour);
        assert_eq!(earlier(now, Some(SignedDuration::MIN)), now);
    }

    #[test]
    fn server_time_is_read_from_date_header() {
        let mut headers = HeaderMap::new();
        assert_eq!(server_time(&headers), None);
        headers.insert(DATE, "Sat, 21 Nov 2026 22:40:17 GMT".parse().unwrap());
        assert_eq!(
            server_time(&headers),
            Some("2026-11-21T22:40:17Z".parse().unwrap())
        );
        headers.insert(DATE, "yesterday".parse().unwrap());
        assert_eq!(server_time(&headers), None);
    }
}
