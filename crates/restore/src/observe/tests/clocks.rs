//! Tests of the time limits for storage and for the result of a search. The limits depend on the clocks of the operator
//! and of the API server.

use http::{Request, Response};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::client::Body;
use serde_json::json;
use tower::service_fn;

use super::*;
use crate::snapshot::PodFacts;

/// An API server whose responses have this time. `None` means that it does not respond.
fn server(at: Option<Timestamp>) -> Client {
    let answer = move |_: Request<Body>| {
        let answer = at.map(|at| {
            let date = at.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string();
            let answer = Response::builder().header("date", date);
            answer.body(Body::empty()).unwrap()
        });
        std::future::ready(answer.ok_or_else(|| std::io::Error::other("no server")))
    };
    Client::new(service_fn(answer), "prod")
}

/// Invariant 1: a wrong report of missing storage would abandon a restore in place.
#[tokio::test]
async fn missing_storage_is_reported_only_with_time_of_api_server() {
    let now = Timestamp::now();
    let created = now - SignedDuration::from_mins(5);
    let pvc = json!({
        "metadata": { "name": "main-aaaaaaaaaa", "creationTimestamp": created.to_string() },
        "spec": { "storageClassName": "nowhere" }, "status": { "phase": "Pending" },
    });
    let says =
        "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found";
    let pod = json!({ "status": { "conditions": [
        { "type": "PodScheduled", "status": "False", "message": says },
    ] } });
    let children = SeedObjects {
        pod: serde_json::from_value(pod).unwrap(),
        pvc: serde_json::from_value(pvc).unwrap(),
        service: None,
    };
    let earlier = created + SignedDuration::from_secs(10);
    let later = now + SignedDuration::from_mins(5);
    for (theirs, missing) in [
        (Some(now), true),
        (Some(later), true),
        (Some(earlier), false),
        (None, false),
    ] {
        let mut seed = crate::snapshot::Seed::not_read();
        seed.pod = Pod::Present(PodFacts::default());
        members::check_storage(&server(theirs), &mut seed, &children).await;
        let Pod::Present(facts) = seed.pod else {
            panic!("{seed:?}")
        };
        let reason = facts.trouble.map(|trouble| trouble.reason);
        assert_eq!(
            reason,
            missing.then_some(Reason::StorageMissing),
            "{theirs:?}"
        );
    }
}

#[tokio::test]
async fn search_result_expires_by_earlier_of_operator_and_api_server_clock() {
    let (now, lifetime) = (Timestamp::now(), SignedDuration::from_mins(2));
    let ended = now - SignedDuration::from_mins(3);
    for (theirs, expired) in [
        (Some(ended + SignedDuration::from_secs(10)), false),
        (Some(now), true),
        (None, true),
    ] {
        let found = search::has_expired(&server(theirs), ended, lifetime).await;
        assert_eq!(found, expired, "{theirs:?}");
    }
    let recent = now - SignedDuration::from_mins(1);
    assert!(!search::has_expired(&server(Some(now)), recent, lifetime).await);
}
