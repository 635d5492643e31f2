//! Steps against an API server of a few lines: what is sent, and what is taken back.

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
use crate::observe::{self, tests::look};
use crate::plan::actions::Builder;
use crate::snapshot::Role;
use crate::write::{Start, State, Write};

const MEMBER: &str = "db-aaaaaaaaaa";

/// What it does with a request about objects of this kind.
#[derive(Clone, Copy)]
enum Does {
    Takes(Duration),
    Answers(u16, &'static str),
    /// Whatever it is asked about: one code after the other.
    InTurn(&'static [u16]),
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
        // Who only reads sends nothing.
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

/// Starts a member with `left` of the time that a look is good for; returns what was asked and what became of it.
async fn started(
    what: (&'static str, Does),
    (durable, left): (bool, Duration),
) -> (Vec<String>, Acted) {
    let mark = Write::MarkService {
        member: MEMBER.to_owned(),
        started: true,
        over: Some("7".to_owned()),
    };
    started_with(what, (State::New, mark), (durable, left)).await
}

async fn started_with(
    what: (&'static str, Does),
    start: (State, Write),
    durably: (bool, Duration),
) -> (Vec<String>, Acted) {
    let (asked, mut acted) = Box::pin(started_again(what, start, durably, 1)).await;
    (asked, acted.remove(0))
}

/// With so many looks, each of which leads to the same step.
async fn started_again(
    (kind, does): (&'static str, Does),
    (state, mark): (State, Write),
    (durable, left): (bool, Duration),
    looks: usize,
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
    let look = look();
    let observed = observe::unanswered(&look);
    let etcd: Arc<dyn Etcd> = Arc::new(FakeEtcd::formed(1, &[], |_| String::new()));
    // So often before that the next one counts for longer than a slow machine stands still.
    let (refusals, before) = (Refusals::default(), Instant::now().checked_sub(LONGEST));
    for _ in 0..4 {
        let refusal = Error::Missing("before".to_owned());
        refusals.refused(&look.cluster, MEMBER, &refusal, before.unwrap());
    }
    let context = ExecuteContext {
        client: &client,
        etcd: &etcd,
        refusals: &refusals,
        calls: &Calls::default(),
        auth: &look.auth,
        cluster: &look.cluster,
        observed: &observed,
        urls: &look.urls,
        since: (Instant::now() + left).checked_sub(LONGEST).unwrap(),
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
    let mut writes = vec![mark];
    writes.extend(durable.then(|| Write::CreateDisk(start.clone())));
    writes.push(Write::CreatePod(start));
    let desired = desired(&look.effective, &Operators::default());
    let builder = Builder {
        desired: &desired,
        observed: &observed,
        now: Timestamp::now(),
    };
    let step = Step {
        chains: vec![builder.chain(&writes).unwrap()],
        change: None,
    };
    let mut acted = Vec::new();
    for _ in 0..looks {
        acted.push(Box::pin(context.execute(&step)).await);
    }
    let asked = server.asked.lock().unwrap().clone();
    (asked, acted)
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

/// Invariants 6 and 11.
#[tokio::test]
async fn what_cannot_be_taken_after_a_mark_is_sent_again_while_the_look_is_good() {
    for (code, reason) in [
        (429, "TooManyRequests"),
        (503, "ServiceUnavailable"),
        (504, "Timeout"),
    ] {
        let does = Does::Answers(code, reason);
        let (mut asked, acted) = started((CLAIMS, does), (true, Duration::from_secs(1))).await;
        // Who refuses for now has surely not done it.
        assert_eq!(
            code == 429,
            asked.pop_if(|one| *one == TAKEN_BACK).is_some()
        );
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

/// Invariant 6: nobody else takes it back, and without that the member is given up.
#[tokio::test]
async fn a_mark_that_cannot_be_taken_back_for_now_is_taken_back_a_little_later() {
    for codes in [&[200, 403, 429, 200], &[200, 403, 503, 200]] {
        let (asked, acted) = started(("", Does::InTurn(codes)), (true, LONG)).await;
        assert_eq!(asked, [MARKED, CLAIMS, TAKEN_BACK, TAKEN_BACK]);
        assert_eq!(acted.failed.len(), 1, "{:?}", acted.failed);
    }
    // Somebody else has changed it since: that is his.
    let does = Does::InTurn(&[200, 403, 503, 409]);
    let (asked, acted) = started(("", does), (true, LONG)).await;
    assert_eq!(asked, [MARKED, CLAIMS, TAKEN_BACK, TAKEN_BACK]);
    assert_eq!(acted.failed.len(), 2, "{:?}", acted.failed);
}

/// The mark, and that it is taken back, are events of the cluster's own objects: the next look follows at once.
#[tokio::test]
async fn a_start_that_is_refused_is_not_tried_again_at_the_next_look() {
    let mark = || Write::MarkService {
        member: MEMBER.to_owned(),
        started: true,
        over: Some("7".to_owned()),
    };
    let renew = || Write::RenewMark {
        member: MEMBER.to_owned(),
        over: "7".to_owned(),
    };
    let refused = Does::Answers(403, "Forbidden");
    for (kind, mark, requests) in [
        (CLAIMS, mark(), 3),
        (CLAIMS, renew(), 2),
        ("services", mark(), 1),
    ] {
        let start = (State::Join, mark);
        let again = started_again((kind, refused), start, (true, LONG), 4);
        let (asked, acted) = Box::pin(again).await;
        assert_eq!(asked.len(), requests, "{asked:?}");
        for again in &acted[1..] {
            assert_eq!(again.in_words(), acted[0].in_words(), "told as before");
            let left = again.failure().and_then(Error::held);
            assert!(left.is_some_and(|left| left <= Duration::from_secs(16)));
        }
    }
    // A race that was lost is no refusal.
    let race = Does::Answers(409, "AlreadyExists");
    let again = started_again((CLAIMS, race), (State::Join, mark()), (true, LONG), 2);
    let (asked, _) = Box::pin(again).await;
    assert_eq!(asked, [MARKED, CLAIMS, MARKED, CLAIMS]);
}

/// Invariants 6 and 11: an object that is not changed keeps its version, and whoever has marked it before would take that
/// back.
#[tokio::test]
async fn a_mark_that_is_set_again_is_another_one_and_is_never_taken_back() {
    let again = || Write::RenewMark {
        member: MEMBER.to_owned(),
        over: "7".to_owned(),
    };
    let mut marks = Vec::new();
    let takes = Does::Takes(Duration::from_millis(600));
    for (what, left) in [
        ((CLAIMS, Does::Answers(403, "Forbidden")), LONG),
        (("services", takes), Duration::from_millis(500)),
    ] {
        let (asked, acted) = started_with(what, (State::Join, again()), (true, left)).await;
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
