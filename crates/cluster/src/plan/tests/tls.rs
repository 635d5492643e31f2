//! Invalid certificates: the operator starts no member with them, and does not change running members because of them.

use member::tls::{Fault, FaultKind, Purpose};

use super::scene::{self, Scene};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::Seen;

fn with_fault(mut scene: Scene, purpose: Purpose) -> Scene {
    scene.observed.tls.from = Some("Secrets".into());
    scene.observed.tls.faults = vec![Fault {
        purpose,
        code: FaultKind::CertificateExpired,
        message: "Secret server: server.crt expired".into(),
    }];
    scene
}

fn starts(writes: &[Write]) -> bool {
    let start = |write: &Write| {
        matches!(
            write,
            Write::CreatePod(_) | Write::CreateService { .. } | Write::AddMember { .. }
        )
    };
    writes.iter().any(start)
}

#[test]
fn invariant_20_no_member_starts_with_invalid_certificates() {
    for purpose in [Purpose::Peer, Purpose::Server, Purpose::Operator] {
        let plan = with_fault(Scene::nothing(3), purpose).plan();
        assert!(plan.step.is_empty(), "{purpose:?}: {plan:?}");
        assert_eq!(plan.problems[0].reason, Reason::CertificateExpired);
        let begun = with_fault(Scene::begun(&["a", "b", "c"]), purpose);
        assert!(!starts(&begun.writes()), "{purpose:?}");
    }
    for scene in [
        Scene::formed(&["a", "b", "c"]).size(5),
        Scene::formed(&["a", "b", "c"]).durable().without_pod("b"),
    ] {
        assert!(starts(&[scene.writes(), scene.changes()].concat()));
        let held = with_fault(scene, Purpose::Server);
        assert!(!starts(&[held.writes(), held.changes()].concat()));
        assert!(
            held.waits().contains(&Reason::TLSNotReady),
            "{:?}",
            held.waits()
        );
    }
}

#[test]
fn invariant_20_serving_members_are_kept_while_secret_is_invalid() {
    let scene = with_fault(Scene::formed(&["a", "b", "c"]), Purpose::Peer);
    assert!(scene.plan().step.is_empty());
    assert_eq!(scene.plan().problems[0].reason, Reason::CertificateExpired);
    // While certificates are invalid, no serving member is removed, because the remaining members could not restart.
    let fewer = with_fault(Scene::formed(&["a", "b", "c"]).size(2), Purpose::Peer);
    assert_eq!(fewer.changes(), []);
    // The operator removes a dead member despite invalid certificates, because the removal affects no client.
    let dead = Scene::formed(&["a", "b", "c"]).without_pod("b");
    assert_eq!(
        with_fault(dead, Purpose::Peer).changes(),
        [scene::remove("b")]
    );
}

/// Invariant 20: the running members do not trust the new authorities. The first restarted member could not connect to
/// the other members, so the operator starts no rolling update.
#[test]
fn invariant_20_authorities_replaced_in_one_step_restart_no_member() {
    let mut scene = Scene::formed(&["a", "b", "c"]).durable().compared();
    for pod in scene.observed.pods.values_mut() {
        pod.difference.pod = Some("etcd was started with other certificate authorities".into());
    }
    let ends = |scene: &Scene| {
        let mut writes = scene.drained().writes().into_iter();
        writes.any(|write| matches!(write, Write::DeletePod { .. }))
    };
    assert!(ends(&scene));
    assert!(!ends(&with_fault(scene, Purpose::Peer)));
}

/// Invariant 16: without valid certificates, the operator cannot know whether a member answers.
#[test]
fn recovery_requires_valid_certificates() {
    let lost = || {
        let mut scene = Scene::formed(&["a", "b", "c"]);
        for member in ["b", "c"] {
            scene = scene.without_pod(member);
        }
        for seen in scene.observed.statuses.values_mut() {
            if let Seen::Known(status) = seen {
                status.leader = None;
            }
        }
        scene.observed.members = Seen::Unknown("no quorum".into());
        scene.observed.recovery.approval = Some(scene::CLUSTER.to_string());
        scene
    };
    assert!(scene::begins_recovery(&lost()));
    assert!(!scene::begins_recovery(&with_fault(
        lost(),
        Purpose::Operator
    )));
}

#[test]
fn members_start_despite_invalid_operator_certificate() {
    let scene = Scene::formed(&["a", "b", "c"]).durable().without_pod("b");
    let plan = with_fault(scene, Purpose::Operator);
    assert!(starts(&plan.writes()));
    assert_eq!(plan.plan().problems[0].reason, Reason::CertificateExpired);
}
