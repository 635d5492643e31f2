//! Members that are drained from the client Service before they stop or become busy.

use api::cluster::{DefragmentationCause, DefragmentationStatus, MemberDefragmentation};
use etcd::KeyHash;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::scene::{Scene, at};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::{Changed, Role, Seen};

fn roles(scene: &Scene) -> Vec<(String, Role)> {
    let writes = scene.writes().into_iter();
    let labels = writes.filter_map(|write| match write {
        Write::LabelPod(label) => Some((label.member, label.role?)),
        _ => None,
    });
    labels.collect()
}

fn ends(scene: &Scene) -> bool {
    let ends = |write: &Write| {
        matches!(
            write,
            Write::PatchImage { .. } | Write::DeletePod { .. } | Write::Defragment { .. }
        )
    };
    scene.writes().iter().any(ends)
}

fn since(seconds: i64) -> Role {
    Role::Busy { since: at(seconds) }
}

fn one(member: &str, role: Role) -> Vec<(String, Role)> {
    vec![(member.to_owned(), role)]
}

impl Scene {
    pub(super) fn role(mut self, member: &str, role: Role) -> Self {
        self.observed.pods.get_mut(member).unwrap().role = Some(role);
        self
    }

    /// Makes the spec request another patch release, and makes all members report the same data.
    fn upgraded(mut self) -> Self {
        self.desired.version = "3.6.17".into();
        self.desired.image = "etcd:v3.6.17".into();
        for member in self.observed.pods.keys() {
            let hash = KeyHash {
                hash: 7,
                compacted: 0,
            };
            let hash = Seen::Known(Some(hash));
            self.observed.hashes.insert(member.clone(), hash);
        }
        self
    }

    /// Records in the status that the defragmentation of this member has started.
    pub(super) fn defragmented(mut self, member: &str) -> Self {
        self.observed.upkeep.record = Some(DefragmentationStatus {
            cause: DefragmentationCause::Threshold,
            start_time: Time(at(900)),
            completion_time: None,
            compacted_revision: None,
            members: vec![MemberDefragmentation {
                name: member.to_owned(),
                start_time: Time(at(900)),
                completion_time: None,
                size_before: 100,
                size_after: None,
                error: None,
            }],
        });
        self
    }
}

fn upgraded() -> Scene {
    Scene::formed(&["a", "b", "c"]).upgraded()
}

#[test]
fn member_is_drained_for_one_second_before_restart() {
    let scene = upgraded();
    assert_eq!(roles(&scene), one("b", since(1000)));
    assert!(!ends(&scene));
    assert!(scene.waits().contains(&Reason::LeadingClientsAway));
    let soon = upgraded().role("b", since(1000));
    assert_eq!((roles(&soon), ends(&soon)), (vec![], false));
    let then = upgraded().role("b", since(999));
    assert_eq!((roles(&then), ends(&then)), (vec![], true));
}

#[test]
fn outdated_comparison_of_data_is_repeated_before_restart() {
    let mut scene = upgraded();
    scene.observed.hashes.clear();
    assert!(scene.plan().asks.is_some());
    assert_eq!(
        roles(&scene),
        [],
        "no member may be drained before the comparison of the data"
    );
    let recent = scene.clone().role("b", since(998));
    assert!(recent.plan().asks.is_none() && ends(&recent));
    let old = scene.role("b", since(100));
    assert!(old.plan().asks.is_some() && !ends(&old));
}

/// The operator writes the labels of one plan concurrently. If one plan added an endpoint and drained the only other
/// endpoint, the Service could have no endpoint for a moment.
#[test]
fn invariant_22_member_is_drained_only_after_another_became_endpoint() {
    let promoted = Scene::formed(&["a", "b"])
        .upgraded()
        .role("a", Role::Learner);
    assert_eq!(roles(&promoted), one("a", Role::Voter));
    assert!(!ends(&promoted));
    let then = promoted.role("a", Role::Voter);
    assert_eq!(roles(&then), one("b", since(1000)));
}

#[test]
fn leader_is_drained_before_leadership_transfer() {
    let scene = upgraded();
    let mut scene = scene;
    for member in ["b", "c"] {
        let pod = scene.observed.pods.get_mut(member).unwrap();
        pod.version = Some("3.6.17".into());
        pod.image = "etcd:v3.6.17".into();
        if let Some(Seen::Known(status)) = scene.observed.statuses.get_mut(member) {
            status.version = "3.6.17".into();
        }
    }
    assert_eq!(roles(&scene), one("a", since(1000)));
    assert_eq!(scene.changes(), []);
    let out = scene.role("a", since(998));
    assert!(matches!(&out.changes()[..], [Write::MoveLeader { from, .. }] if from == "a"));
}

#[test]
fn updated_member_stays_drained_until_update_is_complete() {
    let mut scene = Scene::formed(&["a", "b", "c"]).role("b", since(100));
    let pod = scene.observed.pods.get_mut("b").unwrap();
    pod.changed = Some(Changed {
        from: "3.6.15".into(),
        restarts: 0,
        unreadable: false,
        image: None,
    });
    assert_eq!(roles(&scene), []);
    scene.observed.pods.get_mut("b").unwrap().changed = None;
    assert_eq!(roles(&scene), one("b", Role::Voter));
}

#[test]
fn member_is_drained_before_and_during_defragmentation() {
    let defragmenting = Scene::formed(&["a", "b", "c"]).defragmented("b");
    assert_eq!(
        (roles(&defragmenting), ends(&defragmenting)),
        (one("b", since(1000)), false)
    );
    let out = defragmenting.role("b", since(998));
    assert_eq!((roles(&out), ends(&out)), (vec![], true));
    let mut running = out.clone();
    running.observed.upkeep.call = Some(crate::upkeep::Call::Running);
    assert_eq!(roles(&running), []);
    let mut done = out;
    done.observed.upkeep.call = Some(crate::upkeep::Call::Done);
    assert_eq!(roles(&done), one("b", Role::Voter));
}

#[test]
fn invariant_22_drained_member_without_pending_change_becomes_endpoint() {
    let scene = Scene::formed(&["a", "b", "c"]);
    let left = scene.role("b", since(100)).role("c", since(999));
    let back: Vec<_> = ["b", "c"].map(|one| (one.to_owned(), Role::Voter)).into();
    assert_eq!(roles(&left), back);
    // Member `c` is down, so the operator defers the change of `b`. The drained member `b` becomes an endpoint again.
    let down = upgraded().role("b", since(999)).down("c");
    assert_eq!((roles(&down), ends(&down)), (one("b", Role::Voter), false));
}

#[test]
fn invariant_22_last_endpoint_is_never_drained() {
    let alone = Scene::formed(&["a"]).upgraded();
    assert_eq!((roles(&alone), ends(&alone)), (vec![], true));
    let alone = Scene::formed(&["a"]).defragmented("a");
    assert_eq!((roles(&alone), ends(&alone)), (vec![], true));
    // Member `a` serves, but its pod is not ready. Only `b` is an endpoint, so `b` is not drained.
    let mut pair = Scene::formed(&["a", "b"]).defragmented("b");
    pair.observed.pods.get_mut("a").unwrap().ready = false;
    assert_eq!(roles(&pair), []);
    let mut out = pair.role("b", since(999));
    assert_eq!(roles(&out), one("b", Role::Voter));
    out.observed.pods.get_mut("a").unwrap().ready = true;
    assert_eq!(roles(&out), []);
}

#[test]
fn drain_timestamp_in_the_future_is_rewritten() {
    let scene = upgraded().role("b", since(2000));
    assert_eq!(roles(&scene), one("b", since(1000)));
    assert!(!ends(&scene));
}
