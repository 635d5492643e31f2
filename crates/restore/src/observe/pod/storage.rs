//! Detects missing storage for the seed from its PersistentVolumeClaim (PVC) and its pod. Pure; the time is an
//! argument.
//!
//! The operator has no permission to read StorageClasses and Events. Kubernetes writes the provisioner to the PVC as
//! soon as it is known. The message of the scheduler shows whether only the volume keeps the pod from a node. Other
//! scheduling problems are not reported here, because nodes are added and removed.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;

use crate::reason::{Reason, Trouble};

/// Time limit for a provisioner on the PVC. The controller of Kubernetes names it at once, except after its own
/// restart, or if the StorageClass is created a moment after the PVC.
const UNNAMED: SignedDuration = SignedDuration::from_mins(1);
/// Time limit for the volume. The scheduler has the same limit (`bindTimeoutSeconds`).
const SLOW: SignedDuration = SignedDuration::from_mins(10);

/// The annotation with the provisioner (`AnnStorageProvisioner` of component-helpers), and its name before Kubernetes
/// 1.23.
const PROVISIONER: [&str; 2] = [
    "volume.kubernetes.io/storage-provisioner",
    "volume.beta.kubernetes.io/storage-provisioner",
];
/// The annotation with the node for which the volume is created.
const SELECTED: &str = "volume.kubernetes.io/selected-node";
/// Texts of the scheduler (`volumebinding` in kubernetes/pkg/scheduler).
const UNBOUND: &str = "pod has unbound immediate PersistentVolumeClaims";
const FAILED: [&str; 2] = ["provisioning failed for PVC", "binding volumes: "];
const NO_VOLUME: [&str; 2] = [
    "didn't find available persistent volumes to bind",
    "did not have enough free storage",
];
/// Reasons that exclude a node permanently, independent of its free resources.
const NOT_FOR_IT: [&str; 2] = [
    "untolerated taint",
    "didn't match Pod's node affinity/selector",
];
/// Prefix of temporary taints, such as that of a node that is not ready.
const PASSING: &str = "node.kubernetes.io/";

const REMEDY: &str = "put that right, or name another one in spec.pod.persistentVolumeClaimSpec.storageClassName of the \
                      EtcdCluster (for a new one: in spec.etcdCluster.template, in a new EtcdRestore)";

/// The problem of a PVC that is not bound within its time limit.
pub(in crate::observe) fn no_storage(
    pod: &Pod,
    claim: &PersistentVolumeClaim,
    now: Timestamp,
) -> Option<Trouble> {
    let phase = claim.status.as_ref()?.phase.as_deref()?;
    if phase != "Pending" {
        return None;
    }
    let (why, since, patience) = lack(pod, claim, unscheduled(pod)?)?;
    if now.duration_since(since?) < patience {
        return None;
    }
    let message = format!(
        "no storage for the seed: its volume claim {} is not bound: {why}; {REMEDY}",
        claim.name_any()
    );
    Some(Trouble::new(Reason::StorageMissing, message))
}

/// The cause, its start, and its time limit.
fn lack(
    pod: &Pod,
    claim: &PersistentVolumeClaim,
    scheduler: &str,
) -> Option<(String, Option<Timestamp>, SignedDuration)> {
    let made = claim.creation_timestamp().map(|made| made.0);
    let changed = changed(claim).or(made);
    let maker = PROVISIONER
        .iter()
        .find_map(|key| claim.annotations().get(*key));
    let class = class(claim);
    let selected = claim.annotations().contains_key(SELECTED);
    if scheduler.contains(UNBOUND) && maker.is_none() {
        // The scheduler does not name the unbound PVC.
        let others = others(pod, &claim.name_any());
        return Some(if others.is_empty() {
            (nobody(claim), changed, UNNAMED)
        } else {
            let others = others.join(", ");
            let why = format!(
                "it is of {class}; or the claim {others} of the seed's pod is not ({scheduler})"
            );
            (why, changed, SLOW)
        });
    }
    // Each attempt changes the PVC, so the time counts from its creation.
    if FAILED.iter().any(|said| scheduler.contains(said)) {
        let why = format!("no volume of {class} is made for it ({scheduler})");
        return Some((why, made, SLOW));
    }
    if let Some(maker) = maker.filter(|_| scheduler.contains(UNBOUND) || selected) {
        let why = format!("{maker}, which makes the volumes of {class}, has made none for 10 min");
        return Some((why, changed, SLOW));
    }
    if of_volumes_alone(scheduler) {
        let why = format!("no node has a volume of {class} for it ({scheduler})");
        return Some((why, changed, SLOW));
    }
    None
}

/// The other PVCs of the pod, such as that of the backup.
fn others<'a>(pod: &'a Pod, own: &str) -> Vec<&'a str> {
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
    let volumes = volumes.into_iter().flatten();
    volumes
        .filter_map(|volume| Some(volume.persistent_volume_claim.as_ref()?.claim_name.as_str()))
        .filter(|name| *name != own)
        .collect()
}

fn class(claim: &PersistentVolumeClaim) -> String {
    match named(claim) {
        Some(name) if !name.is_empty() => format!("the StorageClass {name}"),
        _ => "no StorageClass".to_owned(),
    }
}

fn named(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.spec.as_ref()?.storage_class_name.as_deref()
}

fn nobody(claim: &PersistentVolumeClaim) -> String {
    match named(claim) {
        None => "it names no StorageClass, and there is no default one".to_owned(),
        Some("") => "its storageClassName is empty, which asks for a volume that was made by hand, and none fits".to_owned(),
        Some(name) => format!(
            "the StorageClass {name} does not exist, or makes no volumes, and none that was made by hand fits"
        ),
    }
}

/// The time of the last change, if the PVC records one.
fn changed(claim: &PersistentVolumeClaim) -> Option<Timestamp> {
    let managers = claim.metadata.managed_fields.iter().flatten();
    managers
        .filter_map(|one| one.time.as_ref().map(|time| time.0))
        .max()
}

/// The message of the scheduler for an unscheduled pod. It is empty while the scheduler waits for the volume.
fn unscheduled(pod: &Pod) -> Option<&str> {
    let conditions = pod.status.as_ref().and_then(|it| it.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    match conditions.find(|condition| condition.type_ == "PodScheduled") {
        None => Some(""),
        Some(it) if it.status == "False" => Some(it.message.as_deref().unwrap_or_default()),
        Some(_) => None,
    }
}

/// Whether a volume is the only thing that all suitable nodes lack, as in `0/3 nodes are available: 1 node(s) had
/// untolerated taint {..}, 2 node(s) didn't find available persistent volumes to bind. preemption: ..`.
fn of_volumes_alone(scheduler: &str) -> bool {
    let Some((_, reasons)) = scheduler.split_once("nodes are available: ") else {
        return false;
    };
    let reasons = reasons.split_once(". ").map_or(reasons, |it| it.0);
    let is = |reason: &str, known: &[&str]| known.iter().any(|one| reason.contains(one));
    let passes = |reason: &str| reason.contains(PASSING);
    reasons.split(", ").any(|one| is(one, &NO_VOLUME))
        && reasons
            .split(", ")
            .all(|one| is(one, &NO_VOLUME) || (is(one, &NOT_FOR_IT) && !passes(one)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const OWN: &str = "main-aaaaaaaaaa";
    const MADE: i64 = 1_000;
    const BY: &str = "volume.kubernetes.io/storage-provisioner";
    /// The message of the scheduler of Kubernetes 1.36.
    const WAITS: &str =
        "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found";

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn claim(class: Option<&str>, annotations: &Value) -> PersistentVolumeClaim {
        serde_json::from_value(json!({
            "metadata": { "name": OWN, "creationTimestamp": at(MADE).to_string(), "annotations": annotations },
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

    /// The first time in seconds at which the problem is reported, and its message.
    fn said(pod: &Pod, claim: &PersistentVolumeClaim) -> Option<(i64, String)> {
        let told = |after: i64| no_storage(pod, claim, at(MADE + after));
        let mut first = [0, 59, 60, 599, 600, 86_400].into_iter();
        let (after, trouble) = first.find_map(|it| Some((it, told(it)?)))?;
        assert_eq!(trouble.reason, Reason::StorageMissing);
        let field = "spec.pod.persistentVolumeClaimSpec.storageClassName";
        assert!(trouble.message.contains(field), "{}", trouble.message);
        assert!(trouble.message.contains(OWN), "{}", trouble.message);
        Some((after, trouble.message))
    }

    #[test]
    fn reports_missing_provisioner_after_one_minute() {
        let waits = pod("False", WAITS);
        for (class, says) in [
            (Some("nowhere"), "the StorageClass nowhere does not exist"),
            (None, "names no StorageClass, and there is no default one"),
            (Some(""), "its storageClassName is empty"),
        ] {
            let (after, message) = said(&waits, &claim(class, &json!({}))).unwrap();
            assert_eq!(after, 60, "{class:?}");
            assert!(message.contains(says), "{message}");
        }
    }

    #[test]
    fn provisioner_has_ten_minutes() {
        let (waits, silent) = (pod("False", WAITS), Pod::default());
        let by = |more: Value| {
            let mut annotations = json!({ BY: "csi.example.com" });
            if let (Some(all), Some(more)) = (annotations.as_object_mut(), more.as_object()) {
                all.extend(more.clone());
            }
            claim(Some("slow"), &annotations)
        };
        let (after, message) = said(&waits, &by(json!({}))).unwrap();
        assert_eq!(after, 600);
        assert!(
            message.contains("csi.example.com") && message.contains("slow"),
            "{message}"
        );
        // Before Kubernetes 1.23 the annotation had another name.
        let old = claim(Some("slow"), &json!({ PROVISIONER[1]: "csi.example.com" }));
        assert_eq!(said(&waits, &old).unwrap().0, 600);
        // After the scheduler has selected a node, it reports nothing while it waits for the volume.
        let selected = by(json!({ SELECTED: "node-1" }));
        assert_eq!(said(&silent, &selected).unwrap().0, 600);
        // The scheduler has not processed the pod yet.
        assert_eq!(said(&silent, &claim(Some("slow"), &json!({}))), None);
    }

    #[test]
    fn time_limit_counts_from_last_change_of_pvc() {
        let mut late = claim(Some("slow"), &json!({ BY: "csi", SELECTED: "node-1" }));
        let managed = json!([
            { "manager": "etcd-restore-operator", "time": at(MADE).to_string() },
            { "manager": "kube-scheduler", "time": at(MADE + 3_600).to_string() },
        ]);
        late.metadata.managed_fields = serde_json::from_value(managed).unwrap();
        let told = |after| no_storage(&Pod::default(), &late, at(MADE + after)).is_some();
        assert!(!told(3_600 + 599) && told(3_600 + 600));
        // Every failed attempt changes the PVC, so its creation time counts.
        let failed = pod(
            "False",
            &format!(
                "running PreBind plugin \"VolumeBinding\": binding volumes: provisioning failed for PVC \"{OWN}\""
            ),
        );
        let told = |after| no_storage(&failed, &late, at(MADE + after)).is_some();
        assert!(!told(599) && told(600));
    }

    #[test]
    fn reports_no_other_scheduling_problems() {
        let waits = claim(Some("local"), &json!({}));
        let none = "2 node(s) didn't find available persistent volumes to bind";
        let tail =
            "preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling.";
        let control = "1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }";
        for (says, told) in [
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
            let found = said(&pod("False", &says), &waits);
            assert_eq!(found.map(|it| it.0), told.then_some(600), "{says}");
        }
    }

    #[test]
    fn bound_pvc_or_scheduled_pod_has_storage() {
        let waits = claim(Some("nowhere"), &json!({}));
        assert_eq!(said(&pod("True", ""), &waits), None);
        for phase in ["Bound", "Lost"] {
            let mut claim = waits.clone();
            claim.status.get_or_insert_default().phase = Some(phase.to_owned());
            assert_eq!(said(&pod("False", WAITS), &claim), None, "{phase}");
        }
    }

    /// The scheduler does not name the unbound PVC, so another PVC such as that of the backup may be unbound.
    #[test]
    fn reports_other_pvc_of_pod_after_ten_minutes() {
        let mut both = pod("False", WAITS);
        let volumes = both.spec.as_mut().and_then(|spec| spec.volumes.as_mut());
        let backup =
            json!({ "name": "restore-claim", "persistentVolumeClaim": { "claimName": "backups" } });
        volumes
            .unwrap()
            .push(serde_json::from_value(backup).unwrap());
        let (after, message) = said(&both, &claim(Some("nowhere"), &json!({}))).unwrap();
        assert_eq!(after, 600);
        assert!(
            message.contains("nowhere") && message.contains("backups"),
            "{message}"
        );
    }
}
