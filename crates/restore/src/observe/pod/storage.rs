//! Detects that Kubernetes provides no storage for the PersistentVolumeClaim (PVC) of the seed. Performs no I/O.
//!
//! The operator may not read StorageClasses and Events. It uses the annotation of the PVC that names the provisioner,
//! and the scheduler's message in the status of the pod. Scheduling problems other than a missing volume are not
//! reported here, because more nodes or free resources resolve them.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;

use crate::reason::{Reason, Trouble};

/// Time limit until the PVC has the annotation with the provisioner. Normally, the PersistentVolume controller sets
/// this annotation within seconds.
const PROVISIONER_TIMEOUT: SignedDuration = SignedDuration::from_mins(1);
/// Time limit until the PVC has a volume. It equals the scheduler's default of `bindTimeoutSeconds`.
const VOLUME_TIMEOUT: SignedDuration = SignedDuration::from_mins(10);

/// The annotation that names the provisioner, with its current name and its name before Kubernetes 1.23.
const PROVISIONER: [&str; 2] = [
    "volume.kubernetes.io/storage-provisioner",
    "volume.beta.kubernetes.io/storage-provisioner",
];
/// The annotation that names the node for the volume.
const SELECTED: &str = "volume.kubernetes.io/selected-node";
/// Texts in messages of the scheduler plugin `volumebinding`.
const UNBOUND: &str = "pod has unbound immediate PersistentVolumeClaims";
const FAILED: [&str; 2] = ["provisioning failed for PVC", "binding volumes: "];
const NO_VOLUME: [&str; 2] = [
    "didn't find available persistent volumes to bind",
    "did not have enough free storage",
];
/// Texts in messages of the scheduler about nodes that can never run the pod, even with free resources.
const EXCLUDED: [&str; 2] = [
    "untolerated taint",
    "didn't match Pod's node affinity/selector",
];
/// Prefix of taints that Kubernetes removes later, such as the taint of a node that is not ready.
const TEMPORARY_TAINT: &str = "node.kubernetes.io/";

const REMEDY: &str = "correct the cause, or set another StorageClass in spec.pod.persistentVolumeClaimSpec.storageClassName of \
                      the EtcdCluster (for a new cluster: in spec.etcdCluster.template of a new EtcdRestore)";

/// Returns a problem if the PVC has no volume, and the time limit for the cause has passed.
pub(in crate::observe) fn no_storage(
    pod: &Pod,
    pvc: &PersistentVolumeClaim,
    now: Timestamp,
) -> Option<Trouble> {
    let phase = pvc.status.as_ref()?.phase.as_deref()?;
    if phase != "Pending" {
        return None;
    }
    let (why, since, limit) = cause(pod, pvc, unscheduled(pod)?)?;
    if now.duration_since(since?) < limit {
        return None;
    }
    let message = format!(
        "no storage for the seed: its PersistentVolumeClaim {} is not bound: {why}; {REMEDY}",
        pvc.name_any()
    );
    Some(Trouble::new(Reason::StorageMissing, message))
}

/// The reason why the PVC is not bound, the start of this problem, and its time limit.
fn cause(
    pod: &Pod,
    pvc: &PersistentVolumeClaim,
    scheduler: &str,
) -> Option<(String, Option<Timestamp>, SignedDuration)> {
    let created = pvc.creation_timestamp().map(|created| created.0);
    let changed = changed(pvc).or(created);
    let provisioner = PROVISIONER
        .iter()
        .find_map(|key| pvc.annotations().get(*key));
    let class = class(pvc);
    let selected = pvc.annotations().contains_key(SELECTED);
    if scheduler.contains(UNBOUND) && provisioner.is_none() {
        // The message of the scheduler does not name the PVC, so it may be about another PVC of the pod.
        let others = others(pod, &pvc.name_any());
        return Some(if others.is_empty() {
            (no_provisioner(pvc), changed, PROVISIONER_TIMEOUT)
        } else {
            let others = others.join(", ");
            let why = format!(
                "no volume is provisioned for this PersistentVolumeClaim ({class}), or the pod waits for its \
                 PersistentVolumeClaim {others} ({scheduler})"
            );
            (why, changed, VOLUME_TIMEOUT)
        });
    }
    // Each failed attempt to provision a volume changes the PVC. A time limit since the last change might never pass,
    // so this limit starts with the creation of the PVC.
    if FAILED.iter().any(|text| scheduler.contains(text)) {
        let why = format!(
            "a volume for the PersistentVolumeClaim ({class}) could not be provisioned or bound ({scheduler})"
        );
        return Some((why, created, VOLUME_TIMEOUT));
    }
    if let Some(provisioner) = provisioner.filter(|_| scheduler.contains(UNBOUND) || selected) {
        let why =
            format!("the provisioner {provisioner} ({class}) has created no volume for 10 minutes");
        return Some((why, changed, VOLUME_TIMEOUT));
    }
    if only_volume_missing(scheduler) {
        let why = format!(
            "no node can provide a volume for the PersistentVolumeClaim ({class}): {scheduler}"
        );
        return Some((why, changed, VOLUME_TIMEOUT));
    }
    None
}

/// The names of the other PVCs of the pod, such as the PVC with the backup.
fn others<'a>(pod: &'a Pod, own: &str) -> Vec<&'a str> {
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
    let volumes = volumes.into_iter().flatten();
    volumes
        .filter_map(|volume| Some(volume.persistent_volume_claim.as_ref()?.claim_name.as_str()))
        .filter(|name| *name != own)
        .collect()
}

fn class(pvc: &PersistentVolumeClaim) -> String {
    match named(pvc) {
        Some(name) if !name.is_empty() => format!("StorageClass {name}"),
        _ => "no StorageClass".to_owned(),
    }
}

fn named(pvc: &PersistentVolumeClaim) -> Option<&str> {
    pvc.spec.as_ref()?.storage_class_name.as_deref()
}

fn no_provisioner(pvc: &PersistentVolumeClaim) -> String {
    match named(pvc) {
        None => "the PersistentVolumeClaim names no StorageClass, and there is no default StorageClass".to_owned(),
        Some("") => "the storageClassName of the PersistentVolumeClaim is empty, which requires an existing volume, and no volume matches".to_owned(),
        Some(name) => format!(
            "the StorageClass {name} does not exist or has no provisioner, and no existing volume matches"
        ),
    }
}

/// The time of the last change of the PVC, from its managed fields.
fn changed(pvc: &PersistentVolumeClaim) -> Option<Timestamp> {
    let managers = pvc.metadata.managed_fields.iter().flatten();
    managers
        .filter_map(|one| one.time.as_ref().map(|time| time.0))
        .max()
}

/// The scheduler's message for a pod without a node. It is empty while the scheduler waits for the volume. `None` if
/// the pod has a node.
fn unscheduled(pod: &Pod) -> Option<&str> {
    let conditions = pod.status.as_ref().and_then(|it| it.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    match conditions.find(|condition| condition.type_ == "PodScheduled") {
        None => Some(""),
        Some(it) if it.status == "False" => Some(it.message.as_deref().unwrap_or_default()),
        Some(_) => None,
    }
}

/// True if no node has a volume, and every other reason excludes a node for good. Example: `0/3 nodes are available: 1
/// node(s) had untolerated taint {..}, 2 node(s) didn't find available persistent volumes to bind. preemption: ..`.
fn only_volume_missing(scheduler: &str) -> bool {
    let Some((_, reasons)) = scheduler.split_once("nodes are available: ") else {
        return false;
    };
    let reasons = reasons.split_once(". ").map_or(reasons, |it| it.0);
    let is = |reason: &str, known: &[&str]| known.iter().any(|one| reason.contains(one));
    let is_temporary = |reason: &str| reason.contains(TEMPORARY_TAINT);
    reasons.split(", ").any(|one| is(one, &NO_VOLUME))
        && reasons
            .split(", ")
            .all(|one| is(one, &NO_VOLUME) || (is(one, &EXCLUDED) && !is_temporary(one)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const OWN: &str = "main-aaaaaaaaaa";
    const CREATED: i64 = 1_000;
    const BY: &str = "volume.kubernetes.io/storage-provisioner";
    /// The scheduler's message for a pod that waits for a volume, as in Kubernetes 1.36.
    const WAITS: &str =
        "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found";

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn pvc(class: Option<&str>, annotations: &Value) -> PersistentVolumeClaim {
        serde_json::from_value(json!({
            "metadata": { "name": OWN, "creationTimestamp": at(CREATED).to_string(), "annotations": annotations },
            "spec": { "storageClassName": class },
            "status": { "phase": "Pending" },
        }))
        .unwrap()
    }

    fn pod(scheduled: &str, says: &str) -> Pod {
        serde_json::from_value(json!({
            "spec": { "containers": [], "volumes": [
                { "name": "etcd-data", "persistentVolumeClaim": { "claimName": OWN } },
            ] },
            "status": { "conditions": [{ "type": "PodScheduled", "status": scheduled, "message": says }] },
        }))
        .unwrap()
    }

    /// The first reported problem: the seconds since the creation of the PVC, and the message.
    fn reported(pod: &Pod, pvc: &PersistentVolumeClaim) -> Option<(i64, String)> {
        let problem = |after: i64| no_storage(pod, pvc, at(CREATED + after));
        let mut times = [0, 59, 60, 599, 600, 86_400].into_iter();
        let (after, trouble) = times.find_map(|it| Some((it, problem(it)?)))?;
        assert_eq!(trouble.reason, Reason::StorageMissing);
        let field = "spec.pod.persistentVolumeClaimSpec.storageClassName";
        assert!(trouble.message.contains(field), "{}", trouble.message);
        assert!(trouble.message.contains(OWN), "{}", trouble.message);
        Some((after, trouble.message))
    }

    #[test]
    fn missing_provisioner_is_reported_after_one_minute() {
        let waits = pod("False", WAITS);
        for (class, says) in [
            (Some("nowhere"), "the StorageClass nowhere does not exist"),
            (
                None,
                "names no StorageClass, and there is no default StorageClass",
            ),
            (
                Some(""),
                "the storageClassName of the PersistentVolumeClaim is empty",
            ),
        ] {
            let (after, message) = reported(&waits, &pvc(class, &json!({}))).unwrap();
            assert_eq!(after, 60, "{class:?}");
            assert!(message.contains(says), "{message}");
        }
    }

    #[test]
    fn missing_volume_is_reported_after_ten_minutes() {
        let (waits, unscheduled_pod) = (pod("False", WAITS), Pod::default());
        let by = |more: Value| {
            let mut annotations = json!({ BY: "csi.example.com" });
            if let (Some(all), Some(more)) = (annotations.as_object_mut(), more.as_object()) {
                all.extend(more.clone());
            }
            pvc(Some("slow"), &annotations)
        };
        let (after, message) = reported(&waits, &by(json!({}))).unwrap();
        assert_eq!(after, 600);
        assert!(
            message.contains("csi.example.com") && message.contains("slow"),
            "{message}"
        );
        // Before Kubernetes 1.23, the annotation that names the provisioner had another key.
        let old = pvc(Some("slow"), &json!({ PROVISIONER[1]: "csi.example.com" }));
        assert_eq!(reported(&waits, &old).unwrap().0, 600);
        // The scheduler has selected a node, and the provisioner creates the volume. During this time, the status of
        // the pod contains no message of the scheduler.
        let selected = by(json!({ SELECTED: "node-1" }));
        assert_eq!(reported(&unscheduled_pod, &selected).unwrap().0, 600);
        // The PVC has no selected node, and the pod has no message of the scheduler: the scheduler has not processed
        // the pod yet. Therefore no problem is reported.
        assert_eq!(
            reported(&unscheduled_pod, &pvc(Some("slow"), &json!({}))),
            None
        );
    }

    #[test]
    fn storage_time_limit_starts_at_pvc_change_unless_provisioning_failed() {
        let mut changed = pvc(Some("slow"), &json!({ BY: "csi", SELECTED: "node-1" }));
        let managed = json!([
            { "manager": "etcd-restore-operator", "time": at(CREATED).to_string() },
            { "manager": "kube-scheduler", "time": at(CREATED + 3_600).to_string() },
        ]);
        changed.metadata.managed_fields = serde_json::from_value(managed).unwrap();
        let reports = |after| no_storage(&Pod::default(), &changed, at(CREATED + after)).is_some();
        assert!(!reports(3_600 + 599) && reports(3_600 + 600));
        // Each failed attempt to provision a volume changes the PVC. A time limit since the last change might never
        // pass, so this limit starts with the creation of the PVC.
        let failed = pod(
            "False",
            &format!(
                "running PreBind plugin \"VolumeBinding\": binding volumes: provisioning failed for PVC \"{OWN}\""
            ),
        );
        let reports = |after| no_storage(&failed, &changed, at(CREATED + after)).is_some();
        assert!(!reports(599) && reports(600));
    }

    #[test]
    fn other_scheduling_problems_are_not_reported_as_missing_storage() {
        let waits = pvc(Some("local"), &json!({}));
        let none = "2 node(s) didn't find available persistent volumes to bind";
        let tail =
            "preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling.";
        let control = "1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }";
        for (message, is_reported) in [
            (
                format!("0/3 nodes are available: {control}, {none}. {tail}"),
                true,
            ),
            (format!("0/2 nodes are available: {none}."), true),
            (
                format!(
                    "0/2 nodes are available: 2 node(s) did not have enough free storage. {tail}"
                ),
                true,
            ),
            (
                format!("0/3 nodes are available: 1 Insufficient memory, {none}. {tail}"),
                false,
            ),
            (
                format!("0/3 nodes are available: 1 node(s) were unschedulable, {none}. {tail}"),
                false,
            ),
            (
                format!(
                    "0/3 nodes are available: 1 node(s) had untolerated taint {{node.kubernetes.io/not-ready: }}, {none}. {tail}"
                ),
                false,
            ),
            (
                format!("0/3 nodes are available: 3 Insufficient cpu. {tail}"),
                false,
            ),
            (format!("0/1 nodes are available: {control}. {tail}"), false),
            ("no nodes available to schedule pods".to_owned(), false),
        ] {
            let found = reported(&pod("False", &message), &waits);
            assert_eq!(
                found.map(|it| it.0),
                is_reported.then_some(600),
                "{message}"
            );
        }
    }

    #[test]
    fn bound_pvc_or_scheduled_pod_is_not_reported_as_missing_storage() {
        let waits = pvc(Some("nowhere"), &json!({}));
        assert_eq!(reported(&pod("True", ""), &waits), None);
        for phase in ["Bound", "Lost"] {
            let mut pvc = waits.clone();
            pvc.status.get_or_insert_default().phase = Some(phase.to_owned());
            assert_eq!(reported(&pod("False", WAITS), &pvc), None, "{phase}");
        }
    }

    /// The scheduler does not name the unbound PVC, which may be the PVC with the backup.
    #[test]
    fn other_unbound_pvc_of_pod_is_reported_after_ten_minutes() {
        let mut both = pod("False", WAITS);
        let volumes = both.spec.as_mut().and_then(|spec| spec.volumes.as_mut());
        let backup =
            json!({ "name": "restore-claim", "persistentVolumeClaim": { "claimName": "backups" } });
        volumes
            .unwrap()
            .push(serde_json::from_value(backup).unwrap());
        let (after, message) = reported(&both, &pvc(Some("nowhere"), &json!({}))).unwrap();
        assert_eq!(after, 600);
        assert!(
            message.contains("nowhere") && message.contains("backups"),
            "{message}"
        );
    }
}
