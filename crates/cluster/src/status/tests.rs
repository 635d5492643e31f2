//! Tests of the content of the status. The same state always gives the same status.

use api::EtcdCluster;
use api::cluster::{ClusterPhase, EtcdClusterSpec, EtcdClusterStatus, MemberRole};
use api::conditions::{ConditionType, find};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::action::Step;
use crate::plan::Explanation;
use crate::plan::tests::scene::Scene;
use crate::reason::Reason;
use crate::snapshot::{Kept, Observed, Role};
use crate::status::Report;

mod advice;
mod history;

fn at(seconds: i64) -> Time {
    Time(jiff::Timestamp::from_second(seconds).unwrap())
}

fn object(spec: EtcdClusterSpec, status: Option<EtcdClusterStatus>) -> EtcdCluster {
    let mut cluster = EtcdCluster::new("db", spec);
    cluster.metadata.generation = Some(4);
    cluster.status = status;
    cluster
}

fn report(
    scene: &Scene,
    before: Option<EtcdClusterStatus>,
    failure: Option<&str>,
) -> EtcdClusterStatus {
    let cluster = object(EtcdClusterSpec::default(), before);
    let plan = scene.built();
    let failure = failure.map(str::to_owned);
    let report = Report {
        cluster: &cluster,
        desired: &scene.desired,
        observed: &scene.observed,
        plan: &plan,
        failure,
    };
    report.status(&at(100))
}

fn condition(status: &EtcdClusterStatus, kind: &ConditionType) -> (String, String, String) {
    let condition = find(&status.conditions, kind).unwrap();
    (
        condition.status.clone(),
        condition.reason.clone(),
        condition.message.clone(),
    )
}

fn is(status: &EtcdClusterStatus, kind: &ConditionType) -> (String, String) {
    let (status, reason, _) = condition(status, kind);
    (status, reason)
}

fn pair(status: &str, reason: &str) -> (String, String) {
    (status.to_owned(), reason.to_owned())
}

#[test]
fn healthy_cluster_is_available_and_as_desired() {
    let status = report(&Scene::formed(&["a", "b", "c"]), None, None);
    assert_eq!(status.phase, Some(ClusterPhase::Running));
    assert_eq!(
        (status.size, status.replicas, status.leader.as_deref()),
        (Some(3), Some(3), Some("a"))
    );
    assert_eq!(status.observed_generation, Some(4));
    assert_eq!(status.selector.as_deref(), Some("app=etcd,etcd_cluster=db"));
    assert_eq!(
        (status.next_step.clone(), status.waiting_for.clone()),
        (None, None)
    );
    assert_eq!(
        is(&status, &ConditionType::Available),
        pair("True", "QuorumHealthy")
    );
    for kind in [
        ConditionType::Progressing,
        ConditionType::Degraded,
        ConditionType::Scaling,
        ConditionType::Recovering,
    ] {
        assert_eq!(is(&status, &kind), pair("False", "AsDesired"), "{kind}");
    }
    assert_eq!(status.member_details[0].role, Some(MemberRole::Leader));
    assert!(status.member_details.iter().all(|member| member.healthy));
}

#[test]
fn invariant_24_new_voter_is_not_reported_as_down() {
    let since = |seconds: i64| {
        let role = Role::Busy {
            since: at(seconds).0,
        };
        let mut scene = Scene::formed(&["a", "b", "c"]).follows("b");
        scene.observed.pods.get_mut("b").unwrap().role = Some(role);
        report(&scene, None, None)
    };
    let (new, late) = (since(90), since(60));
    for status in [&new, &late] {
        let healthy = status.member_details.iter().map(|member| member.healthy);
        assert_eq!(healthy.collect::<Vec<_>>(), [true, false, true]);
        let (_, _, text) = condition(status, &ConditionType::Available);
        assert!(text.starts_with("2 of 3 voters"), "{text}");
    }
    for (status, told) in [
        (new, pair("False", "AsDesired")),
        (late, pair("True", "MemberDown")),
    ] {
        assert_eq!(is(&status, &ConditionType::Degraded), told);
        assert_eq!(is(&status, &ConditionType::Recovering), told);
    }
}

/// The operator's report must equal the status that it reads back from the object. If the operator did not recognize
/// one of its conditions, it would drop the condition and write it again in each reconcile.
#[test]
fn status_report_contains_only_conditions_of_operator() {
    let mut status = report(&Scene::formed(&["a", "b", "c"]), None, None);
    assert!(status.conditions.iter().all(super::conditions::is_ours));
    let count = status.conditions.len();
    let mut managed = status.conditions[0].clone();
    managed.type_ = "Managed".to_owned();
    status.conditions.push(managed);
    let after = report(&Scene::formed(&["a", "b", "c"]), Some(status), None);
    assert_eq!(after.conditions.len(), count);
}

#[test]
fn unchanged_cluster_keeps_its_status() {
    for scene in [
        Scene::formed(&["a", "b", "c"]),
        Scene::formed(&["a", "b", "c"]).without_pod("b"),
        Scene::nothing(3),
    ] {
        let first = report(&scene, None, None);
        let cluster = object(EtcdClusterSpec::default(), Some(first.clone()));
        let plan = scene.built();
        let again = Report {
            cluster: &cluster,
            desired: &scene.desired,
            observed: &scene.observed,
            plan: &plan,
            failure: None,
        };
        assert_eq!(again.status(&at(500)), first);
    }
}

#[test]
fn unformed_cluster_is_not_available() {
    let status = report(&Scene::starting(&["a", "b", "c"]), None, None);
    assert_eq!(status.phase, Some(ClusterPhase::Creating));
    assert_eq!(
        is(&status, &ConditionType::Available),
        pair("False", "Bootstrapping")
    );
    assert_eq!(
        is(&status, &ConditionType::Progressing),
        pair("True", "Bootstrapping")
    );
    assert!(
        status
            .waiting_for
            .unwrap()
            .contains("2 of its 3 first members run")
    );
    assert_eq!(status.member_details.len(), 3);
}

/// Clients wait for the condition Available before they connect to the client Service.
#[test]
fn condition_available_requires_ready_client_endpoint() {
    let available = |change: &dyn Fn(&mut Observed)| {
        let mut scene = Scene::formed(&["a", "b", "c"]);
        change(&mut scene.observed);
        is(&report(&scene, None, None), &ConditionType::Available)
    };
    let shut = pair("False", "NoEndpoint");
    assert_eq!(available(&|seen| seen.shared.client = Kept::Missing), shut);
    let closed = |seen: &mut Observed| seen.shared.client = Kept::AsMade(false);
    assert_eq!(available(&closed), shut);
    let unready = |seen: &mut Observed| seen.pods.values_mut().for_each(|pod| pod.ready = false);
    assert_eq!(available(&unready), shut);
    // A pod with the token of a former cluster is not an endpoint of this cluster.
    let foreign = |seen: &mut Observed| {
        for pod in seen.pods.values_mut() {
            pod.token = Some("another".to_owned());
        }
    };
    assert_eq!(available(&foreign), shut);
    let one = |seen: &mut Observed| {
        unready(seen);
        seen.pods.get_mut("b").unwrap().ready = true;
        seen.shared.client = Kept::Drifted;
    };
    assert_eq!(available(&one), pair("True", "QuorumHealthy"));
}

/// Regression (coreos/etcd-operator #2044): the status reported Available=True for members that did not exist.
#[test]
fn cluster_with_lost_quorum_is_unavailable_and_lists_members() {
    let before = report(&Scene::formed(&["a", "b", "c"]), None, None);
    let scene = Scene::formed(&["a", "b", "c"])
        .without_pod("a")
        .without_pod("b")
        .silent();
    let status = report(&scene, Some(before), None);
    let (available, reason, message) = condition(&status, &ConditionType::Available);
    assert_eq!(
        (available.as_str(), reason.as_str()),
        ("False", "QuorumLost")
    );
    assert!(
        message.contains("1 of 3") && message.contains("EtcdRestore"),
        "{message}"
    );
    assert_eq!(
        is(&status, &ConditionType::Degraded),
        pair("True", "QuorumLost")
    );
    // The status still names the three members, but reports no leader and no healthy member.
    assert_eq!(status.member_details.len(), 3);
    assert!(
        status
            .member_details
            .iter()
            .all(|member| !member.healthy && member.role == Some(MemberRole::Voter))
    );
    assert_eq!(status.leader, None);
}

#[test]
fn problems_that_need_manual_action_are_all_listed_in_waiting_for() {
    let mut plan = Scene::formed(&["a", "b", "c"]).built();
    (plan.step, plan.waiting_for) = (Step::default(), Vec::new());
    plan.problems = vec![
        Explanation::new(Reason::QuorumLost, "the recovery is approved"),
        Explanation::new(Reason::NoRecentBackup, "the recovery needs a backup"),
    ];
    let text = "manual action required: QuorumLost: the recovery is approved; NoRecentBackup: the recovery needs a \
                backup";
    assert_eq!(super::waits(&plan).as_deref(), Some(text));
}

#[test]
fn lost_member_sets_condition_recovering_not_scaling() {
    let lost = report(
        &Scene::formed(&["a", "b", "c"]).without_pod("b"),
        None,
        None,
    );
    assert_eq!(
        is(&lost, &ConditionType::Recovering),
        pair("True", "ReplacingMember")
    );
    assert_eq!(
        is(&lost, &ConditionType::Degraded),
        pair("True", "MemberDown")
    );
    let removed = report(
        &Scene::formed(&["a", "c"]).size(3).reserved("d"),
        Some(lost),
        None,
    );
    assert_eq!(
        is(&removed, &ConditionType::Recovering),
        pair("True", "ReplacingMember")
    );
    assert_eq!(
        is(&removed, &ConditionType::Scaling),
        pair("False", "AsDesired")
    );
    let back = report(&Scene::formed(&["a", "c", "d"]), Some(removed), None);
    assert_eq!(
        is(&back, &ConditionType::Recovering),
        pair("False", "AsDesired")
    );
}

#[test]
fn new_size_sets_condition_scaling_not_recovering() {
    let grows = report(&Scene::formed(&["a", "b", "c"]).size(5), None, None);
    assert_eq!(
        is(&grows, &ConditionType::Scaling),
        pair("True", "AddingMembers")
    );
    assert_eq!(
        is(&grows, &ConditionType::Recovering),
        pair("False", "AsDesired")
    );
    let shrinks = report(&Scene::formed(&["a", "b", "c"]).size(1), None, None);
    assert_eq!(
        is(&shrinks, &ConditionType::Scaling),
        pair("True", "RemovingMembers")
    );
}

#[test]
fn paused_cluster_sets_condition_progressing_to_false() {
    let mut scene = Scene::formed(&["a", "b", "c"]).without_pod("b");
    scene.desired.paused = true;
    let status = report(&scene, None, None);
    assert!(status.control_paused);
    assert_eq!(
        is(&status, &ConditionType::Progressing),
        pair("False", "Paused")
    );
    assert_eq!(
        is(&status, &ConditionType::Available),
        pair("True", "QuorumHealthy")
    );
}

/// Checks the conditions of kstatus (`Ready`, `Reconciling`, `Stalled`) and `status.state`.
#[test]
fn condition_ready_is_true_only_if_cluster_matches_spec() {
    let three = || Scene::formed(&["a", "b", "c"]);
    let changed = |change: &dyn Fn(&mut Scene)| {
        let mut scene = three();
        change(&mut scene);
        scene
    };
    let paused = changed(&|scene| scene.desired.paused = true);
    let mut unformed_paused = Scene::nothing(3);
    unformed_paused.desired.paused = true;
    let invalid = changed(&|scene| scene.desired.invalid = Some("spec.size is 9".into()));
    let upgrading = changed(&|scene| scene.desired.version = "3.7.3".into());
    let refused = changed(&|scene| scene.desired.version = "3.4.23".into());
    let restored = changed(&|scene| scene.observed.claimed_by = Some("uid".into()));
    let unserved = changed(&|scene| scene.observed.shared.client = Kept::AsMade(false));
    let lost = three().without_pod("a").without_pod("b").silent();
    let (ready, works, stalls) = ("Ready", "Reconciling", "Stalled");
    let cases = [
        (three(), ready, "Ready", "Ready"),
        (Scene::nothing(3), works, "Bootstrapping", "Bootstrapping"),
        (
            Scene::starting(&["a", "b", "c"]),
            works,
            "Bootstrapping",
            "Bootstrapping",
        ),
        (three().without_pod("b"), works, "Recovering", "Recovering"),
        (three().size(5), works, "Scaling", "Scaling"),
        (three().size(1), works, "Scaling", "Scaling"),
        (upgrading, works, "Upgrading", "Upgrading 3.6.16→3.7.3"),
        (restored, works, "Restoring", "Restoring"),
        (unserved, works, "NoEndpoint", "NoEndpoint"),
        (paused, ready, "Paused", "Paused"),
        (unformed_paused, stalls, "Paused", "Paused"),
        (invalid, stalls, "InvalidSpec", "InvalidSpec"),
        (refused, stalls, "VersionRefused", "VersionRefused"),
        (lost, stalls, "QuorumLost", "QuorumLost"),
    ];
    for (scene, readiness, reason, state) in cases {
        let status = report(&scene, None, None);
        let found = |kind: &ConditionType| find(&status.conditions, kind).is_some();
        let ready = if readiness == "Ready" {
            "True"
        } else {
            "False"
        };
        assert_eq!(is(&status, &ConditionType::Ready), pair(ready, reason));
        assert_eq!(
            found(&ConditionType::Reconciling),
            readiness == works,
            "{state}"
        );
        assert_eq!(
            found(&ConditionType::Stalled),
            readiness == stalls,
            "{state}"
        );
        assert_eq!(status.state.as_deref(), Some(state));
    }
    let failed = report(&three(), None, Some("exceeded quota"));
    assert_eq!(
        is(&failed, &ConditionType::Ready),
        pair("False", "StepFailed")
    );
    assert_eq!(failed.healthy_members, Some(3));
}

#[test]
fn failed_step_sets_condition_degraded() {
    let status = report(
        &Scene::nothing(3),
        None,
        Some("cannot create Pod db-x: exceeded quota"),
    );
    let (degraded, reason, message) = condition(&status, &ConditionType::Degraded);
    assert_eq!((degraded.as_str(), reason.as_str()), ("True", "StepFailed"));
    assert!(message.contains("exceeded quota"));
}

#[test]
fn invalid_spec_is_reported_until_corrected() {
    let mut scene = Scene::nothing(3);
    scene.desired.invalid = Some("spec.size is 9: use 1 to 7".into());
    let status = report(&scene, None, None);
    assert_eq!(status.phase, Some(ClusterPhase::Failed));
    assert!(status.reason.unwrap().contains("spec.size"));
    assert_eq!(
        is(
            &report(&Scene::nothing(3), None, None),
            &ConditionType::Degraded
        ),
        pair("False", "AsDesired")
    );
}

#[test]
fn status_distinguishes_upgrade_in_progress_and_refused_version() {
    let mut scene = Scene::formed(&["a", "b", "c"]);
    scene.desired.version = "3.7.3".into();
    let status = report(&scene, None, None);
    assert_eq!(
        (
            status.current_version.as_deref(),
            status.target_version.as_deref()
        ),
        (Some("3.6.16"), Some("3.7.3"))
    );
    assert_eq!(
        is(&status, &ConditionType::Upgrading),
        pair("True", "InProgress")
    );
    scene.desired.version = "3.4.23".into();
    let status = report(&scene, None, None);
    assert_eq!(status.target_version, None);
    assert_eq!(
        is(&status, &ConditionType::Upgrading),
        pair("False", "VersionRefused")
    );
}

#[test]
fn wrong_version_of_pinned_image_is_reported() {
    let image = "etcd@sha256:01";
    let mut scene = Scene::formed(&["a", "b", "c"]);
    for pod in scene.observed.pods.values_mut() {
        image.clone_into(&mut pod.image);
    }
    image.clone_into(&mut scene.desired.image);
    scene.desired.version = "3.6.17".into();
    let spec = &mut scene.desired.object.spec;
    (spec.image, spec.version) = (Some(image.to_owned()), "3.6.17".to_owned());
    let status = report(&scene, None, None);
    for kind in [ConditionType::Upgrading, ConditionType::Degraded] {
        assert_eq!(is(&status, &kind), pair("True", "VersionMismatch"));
    }
}
