//! Executes steps against a minimal API server. The tests check which requests the operator sends, and when it removes
//! the annotation `started` from a Service.

use std::convert::Infallible;
use std::sync::Mutex;

use api::names;
use etcd::fake::FakeEtcd;
use http::{Request, Response};
use jiff::Timestamp;
use kube::client::Body;
use member::Operators;
use serde_json::{Value, json};
use tower::service_fn;

use super::*;
use crate::desired::desired;
use crate::observe::{self, tests::snapshot};
use crate::plan::actions::{Builder, mark_service};
use crate::plan::{Start, State};
use crate::snapshot::{Role, Service};

const MEMBER: &str = "db-aaaaaaaaaa";

/// How the fake API server answers requests for objects of one kind.
#[derive(Clone, Copy)]
enum Does {
    Takes(Duration),
    Answers(u16, &'static str),
    /// The requests get these status codes in order, whatever the kind of their objects.
    InTurn(&'static [u16]),
}

/// Answers requests for objects of `kind` as `does` says, and accepts all other requests at once. `asked` contains the
/// kind of each request, and for a Service the annotation `started` and the resourceVersion precondition.
struct Server {
    kind: &'static str,
    does: Does,
    asked: Mutex<Vec<String>>,
}

impl Server {
    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let kind = request.uri().path().split('/').nth(5).unwrap().to_owned();
        let body = request.into_body().collect_bytes().await.unwrap();
        // `object` is null for a GET request, because the body of the request is empty.
        let mut object: Value = serde_json::from_slice(&body).unwrap_or_default();
        let mark = object["metadata"]["annotations"]
            .get(names::ANNOTATION_STARTED)
            .map_or_else(String::new, |mark| {
                format!(" {mark} over {}", object["metadata"]["resourceVersion"])
            });
        let version = {
            let mut asked = self.asked.lock().unwrap();
            asked.push(format!("{kind}{mark}"));
            asked.len()
        };
        let matches = kind == self.kind;
        let (code, reason) = match self.does {
            Does::Takes(time) if matches => {
                tokio::time::sleep(time).await;
                (200, "")
            }
            Does::Answers(refusal, reason) if matches => (refusal, reason),
            Does::InTurn(codes) => (codes[version - 1], "InTurn"),
            Does::Takes(_) | Does::Answers(..) => (200, ""),
        };
        if code != 200 {
            object = json!({ "kind": "Status", "status": "Failure", "code": code, "reason": reason,
                "message": reason });
        }
        let version = version.to_string();
        object["metadata"] = json!({ "resourceVersion": version });
        let body = Body::from(serde_json::to_vec(&object).unwrap());
        Response::builder().status(code).body(body).unwrap()
    }
}

#[derive(Clone, Copy)]
enum Mark {
    First,
    Again,
}

/// Starts a member from an observation that is fresh for the time `left`. Returns the requests and the outcome.
async fn started(
    what: (&'static str, Does),
    (durable, left): (bool, Duration),
) -> (Vec<String>, Acted) {
    started_with(what, (State::New, Mark::First), (durable, left)).await
}

async fn started_with(
    what: (&'static str, Does),
    start: (State, Mark),
    durably: (bool, Duration),
) -> (Vec<String>, Acted) {
    let (asked, mut acted) = Box::pin(started_again(what, start, durably, 1)).await;
    (asked, acted.remove(0))
}

/// Executes the same step, which starts the member, `snapshots` times.
async fn started_again(
    (kind, does): (&'static str, Does),
    (state, mark): (State, Mark),
    (durable, left): (bool, Duration),
    snapshots: usize,
) -> (Vec<String>, Vec<Acted>) {
    let server = Arc::new(Server {
        kind,
        does,
        asked: Mutex::default(),
    });
    let client = Client::new(
        service_fn({
            let server = Arc::clone(&server);
            move |request| {
                let server = Arc::clone(&server);
                async move { Ok::<_, Infallible>(server.answer(request).await) }
            }
        }),
        "prod",
    );
    let snapshot = snapshot();
    let observed = observe::unanswered(&snapshot);
    let etcd: Arc<dyn Etcd> = Arc::new(FakeEtcd::formed(1, &[], |_| String::new()));
    // Four rejections make the next back-off longer than any pause of a slow test machine.
    let (refusals, before) = (Refusals::default(), Instant::now().checked_sub(FRESH));
    for _ in 0..4 {
        let refusal = Error::Missing("before".to_owned());
        refusals.refused(&snapshot.cluster, MEMBER, &refusal, before.unwrap());
    }
    let context = ExecuteContext {
        client: &client,
        etcd: &etcd,
        refusals: &refusals,
        calls: &Calls::default(),
        auth: &snapshot.auth,
        cluster: &snapshot.cluster,
        observed: &observed,
        urls: &snapshot.urls,
        since: (Instant::now() + left).checked_sub(FRESH).unwrap(),
    };
    let start = Start {
        member: MEMBER.to_owned(),
        state,
        initial: [MEMBER.to_owned()].into(),
        role: Role::Voter,
        durable,
        version: "3.6.16".to_owned(),
        token: "token".to_owned(),
        cluster_id: None,
    };
    let service = Service {
        uid: "service".to_owned(),
        resource_version: "7".to_owned(),
        owned: true,
        started: false,
        renewed: false,
        drifted: false,
        closed: false,
        created: Timestamp::UNIX_EPOCH,
    };
    let desired = desired(&snapshot.effective, &Operators::default());
    let builder = Builder {
        desired: &desired,
        observed: &observed,
        now: Timestamp::now(),
    };
    let mark = match mark {
        Mark::First => mark_service(MEMBER, &service),
        Mark::Again => builder.mark_service_again(MEMBER, &service),
    };
    let rest = builder.create_volume_and_pod(&start).unwrap();
    let step = Step {
        chains: vec![[mark].into_iter().chain(rest).collect()],
        change: None,
    };
    let mut acted = Vec::new();
    for _ in 0..snapshots {
        acted.push(Box::pin(context.execute(&step)).await);
    }
    let asked = server.asked.lock().unwrap().clone();
    (asked, acted)
}

const MARKED: &str = "services \"true\" over \"7\"";
const TAKEN_BACK: &str = "services null over \"1\"";
const CLAIMS: &str = "persistentvolumeclaims";
const LONG: Duration = Duration::from_mins(1);

#[tokio::test]
async fn invariant_11_started_annotation_is_removed_if_observation_expires_before_pvc_exists() {
    let (little, more) = (Duration::from_millis(500), Duration::from_millis(600));
    let (asked, acted) = started(("services", Does::Takes(more)), (true, little)).await;
    assert_eq!(asked, [MARKED, TAKEN_BACK]);
    assert!(
        matches!(acted.failed[..], [Error::TooOld]),
        "{:?}",
        acted.failed
    );
    // For a member without a PVC, the next request would create the pod. The observation is too old by then, so the
    // operator sends no request for the pod and removes the annotation.
    let (asked, _) = started(("services", Does::Takes(more)), (false, little)).await;
    assert_eq!(asked, [MARKED, TAKEN_BACK]);
    // In the next call, the server accepts the PVC after the observation has become too old. The annotation `started`
    // stays, because the PVC exists: the next reconcile or another operator process creates the pod.
    let (asked, acted) = started((CLAIMS, Does::Takes(more)), (true, little)).await;
    assert_eq!(asked, [MARKED, CLAIMS]);
    assert!(
        matches!(acted.failed[..], [Error::TooOld]),
        "{:?}",
        acted.failed
    );
    // The observation is already too old at the start of this call, so the operator sends no request.
    let (asked, _) = started((CLAIMS, Does::Takes(more)), (true, Duration::ZERO)).await;
    assert!(asked.is_empty(), "{asked:?}");
}

#[tokio::test]
async fn invariant_6_started_annotation_is_removed_only_if_nothing_was_created() {
    let refusals = [
        (403, "Forbidden"),
        (409, "Conflict"),
        (422, "Invalid"),
        (
            500,
            "Internal error occurred: failed calling webhook \"a\": context deadline exceeded",
        ),
    ];
    let doubts = [(409, "AlreadyExists"), (500, "InternalError")];
    for (code, reason) in refusals {
        let (asked, _) = started((CLAIMS, Does::Answers(code, reason)), (true, LONG)).await;
        assert_eq!(asked, [MARKED, CLAIMS, TAKEN_BACK], "{code} {reason}");
        let (asked, _) = started(("pods", Does::Answers(code, reason)), (false, LONG)).await;
        assert_eq!(asked, [MARKED, "pods", TAKEN_BACK], "{code} {reason}");
        let (asked, _) = started(("pods", Does::Answers(code, reason)), (true, LONG)).await;
        assert_eq!(asked, [MARKED, CLAIMS, "pods"], "{code} {reason}");
    }
    for (code, reason) in doubts {
        let (asked, acted) = started((CLAIMS, Does::Answers(code, reason)), (true, LONG)).await;
        assert_eq!(asked, [MARKED, CLAIMS], "{code} {reason}");
        assert_eq!(acted.failed.len(), 1, "{:?}", acted.failed);
    }
}

/// Invariants 6 and 11: after the operator has set the annotation `started`, it retries the creation of the next
/// object, but only while its observation is fresh.
#[tokio::test]
async fn failed_pvc_creation_is_retried_until_observation_expires() {
    for (code, reason) in [
        (429, "TooManyRequests"),
        (503, "ServiceUnavailable"),
        (504, "Timeout"),
    ] {
        let does = Does::Answers(code, reason);
        let (mut asked, acted) = started((CLAIMS, does), (true, Duration::from_secs(1))).await;
        // Status 429 proves that the request had no effect, so the operator removes the annotation. After 503 and 504,
        // the effect is unknown, and the annotation stays.
        assert_eq!(
            code == 429,
            asked.pop_if(|one| *one == TAKEN_BACK).is_some()
        );
        // The operator requests the PVC after 0, 0.1, 0.3 and 0.7 s. On a slow machine, fewer requests fit into the
        // second for which the observation is fresh.
        assert_eq!(asked[0], MARKED);
        assert!((2..=4).contains(&asked[1..].len()), "{code}: {asked:?}");
        assert!(
            asked[1..].iter().all(|one| one == CLAIMS),
            "{code}: {asked:?}"
        );
        assert_eq!(acted.failed.len(), 1, "{:?}", acted.failed);
        // If the write of the annotation `started` fails, the operator does not retry this write in this reconcile,
        // because the next reconcile can repeat it without harm.
        let (asked, _) = started(("services", does), (true, LONG)).await;
        assert_eq!(asked.len(), 1, "{code}: {asked:?}");
    }
}

/// Invariant 6: no other process removes the annotation `started`. If it remained, the operator would never use the
/// member's name again.
#[tokio::test]
async fn failed_removal_of_started_annotation_is_retried() {
    for codes in [&[200, 403, 429, 200], &[200, 403, 503, 200]] {
        let (asked, acted) = started(("", Does::InTurn(codes)), (true, LONG)).await;
        assert_eq!(asked, [MARKED, CLAIMS, TAKEN_BACK, TAKEN_BACK]);
        assert_eq!(acted.failed.len(), 1, "{:?}", acted.failed);
    }
    // Status 409 means that another process has changed the Service since the operator set the annotation. The operator
    // then does not retry the removal, and records two errors: the rejected PVC and the changed Service.
    let does = Does::InTurn(&[200, 403, 503, 409]);
    let (asked, acted) = started(("", does), (true, LONG)).await;
    assert_eq!(asked, [MARKED, CLAIMS, TAKEN_BACK, TAKEN_BACK]);
    assert_eq!(acted.failed.len(), 2, "{:?}", acted.failed);
}

/// Setting and removing the annotation `started` changes a Service, and each change triggers a reconcile at once. Only
/// the back-off limits how often the operator retries the start.
#[tokio::test]
async fn rejected_member_start_is_retried_with_backoff() {
    let refused = Does::Answers(403, "Forbidden");
    for (kind, mark, requests) in [
        (CLAIMS, Mark::First, 3),
        (CLAIMS, Mark::Again, 2),
        ("services", Mark::First, 1),
    ] {
        let start = (State::Join, mark);
        let again = started_again((kind, refused), start, (true, LONG), 4);
        let (asked, acted) = Box::pin(again).await;
        assert_eq!(asked.len(), requests, "{asked:?}");
        for again in &acted[1..] {
            assert_eq!(
                again.in_words(),
                acted[0].in_words(),
                "the text of the rejection must stay the same"
            );
            let left = again.failure().and_then(Error::held);
            assert!(left.is_some_and(|left| left <= Duration::from_secs(16)));
        }
    }
    // `AlreadyExists` means that another operator process was faster. The operator does not back off, because this is
    // no rejection.
    let race = Does::Answers(409, "AlreadyExists");
    let again = started_again((CLAIMS, race), (State::Join, Mark::First), (true, LONG), 2);
    let (asked, _) = Box::pin(again).await;
    assert_eq!(asked, [MARKED, CLAIMS, MARKED, CLAIMS]);
}

/// Invariants 6 and 11: a renewed annotation `started` must have a new value. With the same value, the resourceVersion
/// would not change, and the process that set the first value could remove the renewed annotation.
#[tokio::test]
async fn renewed_started_annotation_is_never_removed() {
    let mut marks = Vec::new();
    let takes = Does::Takes(Duration::from_millis(600));
    for (what, left) in [
        ((CLAIMS, Does::Answers(403, "Forbidden")), LONG),
        (("services", takes), Duration::from_millis(500)),
    ] {
        let (asked, acted) = started_with(what, (State::Join, Mark::Again), (true, left)).await;
        assert_eq!(acted.failed.len(), 1, "{:?}", acted.failed);
        marks.extend(asked.into_iter().filter(|one| one.starts_with("services")));
    }
    let [one, other] = &marks[..] else {
        panic!("{marks:?}");
    };
    assert!(one.ends_with("over \"7\"") && other.ends_with("over \"7\""));
    assert!(
        one != other && !marks.contains(&MARKED.to_owned()),
        "{marks:?}"
    );
}
