//! Member pods with sidecars: containers from the user's spec, or containers that a webhook added.
//!
//! A pod with an unready sidecar is not ready, even if its etcd has served for days. If etcd then exits, the operator
//! must not count the exit as a failed start.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

use super::ending::last_exit;
use crate::clock::age;

/// If an etcd container ran for longer than this before its exit, its start on the data was successful.
const LONG: Duration = Duration::from_mins(10);

/// Returns the time since which etcd has not been ready. `since` is the time since which the pod has not been ready.
///
/// Without sidecars, returns `since`. With sidecars, returns the later of two times: `since`, and the start of the etcd
/// container's previous run. If that run was longer than [`LONG`], the end of the run replaces its start.
pub(super) fn unready_since(
    pod: &Pod,
    etcd: Option<&ContainerStatus>,
    since: Timestamp,
) -> Timestamp {
    if !has_sidecars(pod) {
        return since;
    }
    let bound = etcd.and_then(last_life).map(|(began, ended)| {
        let lasted = age(began, ended);
        if lasted > LONG { ended } else { began }
    });
    bound.map_or(since, |bound| since.max(bound))
}

/// True if the readiness of the pod depends on other containers than etcd. Ignores init containers that exit.
fn has_sidecars(pod: &Pod) -> bool {
    pod.spec.as_ref().is_some_and(|spec| {
        let mut init = spec.init_containers.iter().flatten();
        spec.containers.len() > 1 || init.any(|one| one.restart_policy.as_deref() == Some("Always"))
    })
}

fn last_life(status: &ContainerStatus) -> Option<(Timestamp, Timestamp)> {
    let life = last_exit(status)?;
    Some((life.started_at.as_ref()?.0, life.finished_at.as_ref()?.0))
}

#[cfg(test)]
mod tests {
    use api::cluster::EtcdClusterSpec;
    use serde_json::{Value, json};

    use crate::observe::pods;
    use crate::snapshot::Pod;

    /// A member's pod with a sidecar that is not ready. `etcd`: the state of the etcd container.
    fn seen(sidecars: &Value, etcd: &Value) -> Pod {
        let object = json!({
            "metadata": { "name": "db-aaaaaaaaaa" },
            "spec": sidecars,
            "status": {
                "phase": "Running",
                "podIP": "10.0.0.7",
                "containerStatuses": [etcd, { "name": "proxy", "image": "", "imageID": "", "ready": false,
                    "restartCount": 0, "state": { "running": { "startedAt": "2026-11-21T00:00:00Z" } } }],
                "conditions": [
                    { "type": "Ready", "status": "False", "reason": "ContainersNotReady",
                        "lastTransitionTime": "2026-11-21T00:00:00Z" },
                    { "type": "ContainersReady", "status": "False", "reason": "ContainersNotReady",
                        "lastTransitionTime": "2026-11-21T00:00:00Z" },
                ],
            },
        });
        pods::pod(
            &serde_json::from_value(object).unwrap(),
            &EtcdClusterSpec::default(),
            true,
        )
    }

    fn sidecar() -> Value {
        json!({ "containers": [{ "name": "etcd" }, { "name": "proxy" }] })
    }

    fn restarted(began: &str, ended: &str) -> Value {
        json!({ "name": "etcd", "image": "", "imageID": "", "ready": false, "restartCount": 5,
            "state": { "waiting": { "reason": "CrashLoopBackOff" } },
            "lastState": { "terminated": { "exitCode": 1, "startedAt": began, "finishedAt": ended } } })
    }

    #[test]
    fn unready_sidecar_is_not_reported_as_failed_start() {
        let etcd = json!({ "name": "etcd", "image": "", "imageID": "", "ready": true, "restartCount": 0,
            "state": { "running": { "startedAt": "2026-11-21T00:00:00Z" } } });
        let pod = seen(&sidecar(), &etcd);
        assert!(pod.stays() && pod.addressed && pod.running && !pod.ready);
        assert_eq!(
            (pod.lost_since, pod.ending, pod.trouble),
            (None, None, None)
        );
    }

    #[test]
    fn exit_of_etcd_after_long_run_is_no_failed_start() {
        let long = restarted("2026-11-21T01:00:00Z", "2026-11-21T09:00:00Z");
        let short = restarted("2026-11-21T08:59:50Z", "2026-11-21T09:00:00Z");
        let native = json!({ "containers": [{ "name": "etcd" }],
            "initContainers": [{ "name": "proxy", "restartPolicy": "Always" }] });
        for sidecars in [sidecar(), native] {
            let pod = seen(&sidecars, &long);
            assert_eq!(pod.unready_since, pod.ending.map(|ending| ending.at));
            let since = seen(&sidecars, &short).unready_since.unwrap();
            assert_eq!(since.to_string(), "2026-11-21T08:59:50Z");
        }
        let alone =
            json!({ "containers": [{ "name": "etcd" }], "initContainers": [{ "name": "wait" }] });
        let since = seen(&alone, &long).unready_since.unwrap();
        assert_eq!(since.to_string(), "2026-11-21T00:00:00Z");
    }
}
