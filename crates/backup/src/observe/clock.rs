//! Compares the API server's clock with the operator's clock before a removal of backups.

use jiff::SignedDuration;
use kube::Client;

use crate::reason::{Reason, Trouble};

/// The API server's time minus the operator's time. Fails if the API server returns no time. The operator then removes
/// no backup (invariant 1).
pub(super) async fn difference(client: &Client) -> Result<SignedDuration, Trouble> {
    let unknown = |why: String| {
        Trouble::new(
            Reason::StepFailed,
            format!("the operator cannot read the API server's clock and removes no backup: {why}"),
        )
    };
    let difference = runtime::clock::difference(client).await;
    let difference = difference.map_err(|error| unknown(error.to_string()))?;
    difference.ok_or_else(|| {
        unknown("the response of the API server has no valid Date header: check the proxies between the operator and the API server".to_owned())
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use jiff::Timestamp;
    use kube::client::Body;
    use tower::service_fn;

    use super::*;

    fn server(date: Option<String>) -> Client {
        let answer = move |request: Request<Body>| {
            assert_eq!(request.uri().path(), "/version");
            let mut answer = Response::builder();
            if let Some(date) = &date {
                answer = answer.header("date", date);
            }
            std::future::ready(Ok::<_, Infallible>(answer.body(Body::empty()).unwrap()))
        };
        Client::new(service_fn(answer), "prod")
    }

    /// Invariants 1 and 9: `difference` fails without the API server's time, so that the operator removes no backup.
    #[tokio::test]
    async fn removal_of_backups_requires_api_server_time() {
        let behind = Timestamp::now() - SignedDuration::from_hours(48);
        let date = behind.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string();
        let read = difference(&server(Some(date))).await.unwrap();
        assert_eq!(read.as_hours(), -48);
        for date in [None, Some("yesterday".to_owned())] {
            let trouble = difference(&server(date)).await.unwrap_err();
            assert!(trouble.message.contains("Date header"), "{trouble:?}");
        }
        let closed_port = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let trouble = difference(&Client::try_from(closed_port).unwrap()).await;
        assert_eq!(trouble.unwrap_err().reason, Reason::StepFailed);
    }
}
