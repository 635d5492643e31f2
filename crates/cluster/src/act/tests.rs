//! Steps against an API server of a few lines: what is sent, and what is taken back.

use std::convert::Infallible;
use std::sync::Mutex;

use etcd::fake::FakeEtcd;
use http::{Request, Response};
use kube::client::Body;
use prometheus_client::registry::Registry;
use runtime::Operator;
use runtime::controller::Scope;
use runtime::outcome::{Metrics, Report};
use runtime::process::{Figures, Objects};
use serde_json::{Value, json};
use tower::service_fn;

use super::*;
use crate::observe::{self, tests::look};
use crate::observed::Role;
use crate::write::{Order, Start, State};

const MEMBER: &str = "db-aaaaaaaaaa";

/// What it does with a request about objects of this kind.
#[derive(Clone, Copy)]
enum Does {
    Takes(Duration),
    Answers(u16, &'static str),
}

/// Everything else it carries out at once. What was asked is kept: the kind, and of a Service the mark, and over which
/// version it is set.
struct Server {
    kind: &'static str,
    does: Does,
    asked: Mutex<Vec<String>>,
}

impl Server {
    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let kind = request.uri().path().split('/').nth(5).unwrap().to_owned();
        let body = request.into_body().collect_bytes().await.unwrap();
        let mut object: Value = serde_json::from_slice(&body).unwrap();
        let mark = object["metadata"]["annotations"]
            .get(names::ANNOTATION_STARTED)
            .map_or_else(String::new, |mark| {
                format!(" {mark} over {}", object["metadata"]["resourceVersion"])
            });
        let version = {
            let mut asked = self.asked.lock().unwrap();
            asked.push(format!("{kind}{mark}"));
            asked.len().to_string()
        };
        let (mut code, matches) = (200, kind == self.kind);
        match self.does {
            Does::Takes(time) if matches => tokio::time::sleep(time).await,
            Does::Answers(refusal, reason) if matches => {
                code = refusal;
                object = json!({ "kind": "Status", "status": "Failure", "code": code, "reason": reason,
                    "message": "no" });
            }
            _ => {}
        }
        object["metadata"] = json!({ "resourceVersion": version });
        let body = Body::from(serde_json::to_vec(&object).unwrap());
        Response::builder().status(code).body(body).unwrap()
    }
}

/// Starts a member with `left` of the time that a look is good for; returns what was asked and what became of it.
async fn started(
    (kind, does): (&'static str, Does),
    (durable, left): (bool, Duration),
) -> (Vec<String>, Acted) {
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
    let look = look();
    let image = OwnImage::new(&operator(&client), Some("operator".to_owned()));
    let etcd: Arc<dyn Etcd> = Arc::new(FakeEtcd::formed(1, &[], |_| String::new()));
    let actor = Actor {
        client: &client,
        etcd: &etcd,
        calls: &Calls::default(),
        auth: &look.auth,
        operators: &Operators::default(),
        cluster: &look.cluster,
        observed: &observe::unanswered(&look),
        urls: &look.urls,
        image: &image,
        since: (Instant::now() + left).checked_sub(LONGEST).unwrap(),
    };
    let start = Start {
        member: MEMBER.to_owned(),
        state: State::New,
        initial: [MEMBER.to_owned()].into(),
        role: Role::Voter,
        durable,
        version: "3.6.16".to_owned(),
        token: "token".to_owned(),
        cluster_id: None,
    };
    let mut writes = vec![Write::MarkService {
        member: MEMBER.to_owned(),
        started: true,
        over: Some("7".to_owned()),
    }];
    writes.extend(durable.then(|| Write::CreateDisk(start.clone())));
    writes.push(Write::CreatePod(start));
    let step = Step {
        orders: vec![Order::Writes(writes)],
        change: None,
    };
    let acted = Box::pin(actor.act(&step)).await;
    let asked = server.asked.lock().unwrap().clone();
    (asked, acted)
}

#[expect(
    clippy::default_trait_access,
    reason = "the type is of a crate that nothing else here needs"
)]
fn operator(client: &Client) -> Operator {
    let metrics = Metrics::register(&mut Registry::default(), "cluster");
    Operator {
        name: "etcd-operator",
        client: client.clone(),
        once: client.clone(),
        scope: Scope::Cluster,
        namespace: "prod".into(),
        identity: "pod".into(),
        report: Arc::new(Report::new(client.clone(), "etcd-operator", "pod", metrics)),
        shutdown: Default::default(),
        objects: Objects::default(),
        figures: Figures::default(),
    }
}

const MARKED: &str = "services \"true\" over \"7\"";
const TAKEN_BACK: &str = "services null over \"1\"";
const CLAIMS: &str = "persistentvolumeclaims";
const LONG: Duration = Duration::from_mins(1);

/// Invariant 11.
#[tokio::test]
async fn a_mark_is_taken_back_when_the_look_grows_too_old_before_there_is_anything_of_the_member() {
    let (little, more) = (Duration::from_millis(500), Duration::from_millis(600));
    let (asked, acted) = started(("services", Does::Takes(more)), (true, little)).await;
    assert_eq!(asked, [MARKED, TAKEN_BACK]);
    assert!(
        matches!(acted.failed[..], [Error::TooOld]),
        "{:?}",
        acted.failed
    );
    // Without a volume what is left is the pod.
    let (asked, _) = started(("services", Does::Takes(more)), (false, little)).await;
    assert_eq!(asked, [MARKED, TAKEN_BACK]);
    // Its claim is there: the next look makes its pod, and another process may have done so by now.
    let (asked, acted) = started((CLAIMS, Does::Takes(more)), (true, little)).await;
    assert_eq!(asked, [MARKED, CLAIMS]);
    assert!(
        matches!(acted.failed[..], [Error::TooOld]),
        "{:?}",
        acted.failed
    );
    // One that is too old from the beginning sends nothing.
    let (asked, _) = started((CLAIMS, Does::Takes(more)), (true, Duration::ZERO)).await;
    assert!(asked.is_empty(), "{asked:?}");
}

/// Invariant 6.
#[tokio::test]
async fn a_mark_is_taken_back_only_when_what_follows_it_surely_was_not_carried_out() {
    let refusals = [
        (403, "Forbidden"),
        (409, "Conflict"),
        (422, "Invalid"),
        (429, "TooManyRequests"),
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

/// Invariants 6 and 11.
#[tokio::test]
async fn what_cannot_be_taken_after_a_mark_is_sent_again_while_the_look_is_good_and_stays_in_doubt()
{
    for (code, reason) in [(503, "ServiceUnavailable"), (504, "Timeout")] {
        let does = Does::Answers(code, reason);
        let begun = Instant::now();
        let (asked, acted) = started((CLAIMS, does), (true, Duration::from_secs(1))).await;
        assert!(begun.elapsed() < Duration::from_secs(1), "{code}");
        // At once, and after 0.1, 0.3 and 0.7 s, unless the machine stands still.
        assert_eq!(asked[0], MARKED);
        assert!((2..=4).contains(&asked[1..].len()), "{code}: {asked:?}");
        assert!(
            asked[1..].iter().all(|one| one == CLAIMS),
            "{code}: {asked:?}"
        );
        assert_eq!(acted.failed.len(), 1, "{:?}", acted.failed);
        // Before anything is marked nothing is lost by looking again.
        let (asked, _) = started(("services", does), (true, LONG)).await;
        assert_eq!(asked.len(), 1, "{code}: {asked:?}");
    }
}
