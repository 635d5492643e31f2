//! Tests of `status.lastErrors`.

use super::{Time, at, object};
use crate::plan::tests::scene::Scene;
use crate::status::Report;
use api::EtcdClusterSpec;
use api::cluster::EtcdClusterStatus;

fn report(
    scene: &Scene,
    before: EtcdClusterStatus,
    failure: Option<&str>,
    now: &Time,
) -> EtcdClusterStatus {
    let cluster = object(EtcdClusterSpec::default(), Some(before));
    let plan = scene.built();
    let report = Report {
        cluster: &cluster,
        desired: &scene.desired,
        observed: &scene.observed,
        plan: &plan,
        failure: failure.map(str::to_owned),
    };
    report.status(now)
}

fn listed(status: &EtcdClusterStatus) -> Vec<(&str, i32, i64)> {
    let errors = status.last_errors.iter();
    errors
        .map(|error| (error.reason.as_str(), error.count, error.time.0.as_second()))
        .collect()
}

#[test]
fn status_counts_each_problem_when_it_begins() {
    let healthy = Scene::formed(&["a", "b", "c"]);
    let lost = healthy.clone().without_pod("a").without_pod("b").silent();
    let first = report(&healthy, EtcdClusterStatus::default(), None, &at(1));
    assert_eq!(listed(&first), []);
    let failed = report(&healthy, first, Some("exceeded quota"), &at(2));
    assert_eq!(listed(&failed), [("StepFailed", 1, 2)]);
    assert_eq!(failed.last_errors[0].message, "exceeded quota");
    let persists = report(&healthy, failed, Some("exceeded quota"), &at(3));
    assert_eq!(listed(&persists), [("StepFailed", 1, 2)]);
    let lost = report(&lost, persists, None, &at(4));
    assert_eq!(listed(&lost), [("QuorumLost", 1, 4), ("StepFailed", 1, 2)]);
    let back = report(&healthy, lost, None, &at(5));
    assert_eq!(listed(&back).len(), 2);
    let again = report(&healthy, back, Some("exceeded quota"), &at(6));
    assert_eq!(listed(&again), [("StepFailed", 2, 6), ("QuorumLost", 1, 4)]);
}

/// A planned restart makes a member unhealthy for some seconds.
#[test]
fn member_that_is_down_is_not_counted_as_problem() {
    let scene = Scene::formed(&["a", "b", "c"]).without_pod("b");
    let status = report(&scene, EtcdClusterStatus::default(), None, &at(1));
    assert_eq!(listed(&status), []);
}
