//! The pod beside a claim: built from values, read from values. Pure.

use api::EtcdBackup;
use api::conditions::Reason;
use k8s_openapi::api::core::v1::{
    Container, ContainerState, PersistentVolumeClaimVolumeSource, Pod, PodSpec,
    ResourceRequirements, SecretVolumeSource, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::ObjectMeta;
use kube::{Resource, ResourceExt};
use runtime::member::{BESIDE_A_CLAIM, OperatorImage, container_security, pod_security};
use sha2::{Digest, Sha256};

use super::order::{Order, Report, Task};
use crate::observed::Trouble;

/// Where the claim is mounted.
pub(crate) const ROOT: &str = "/backups";
const VOLUME: &str = "backups";
const PROGRAM: &str = "/usr/local/bin/etcd-backup-operator";
/// Of the digest that tells one piece of work from another.
const DIGITS: usize = 20;
/// A transfer is never held whole in memory.
const MEMORY: (&str, &str) = ("64Mi", "256Mi");

/// The name of the pod that does this work. It is fixed: whoever comes second finds the first (invariant 11).
pub(crate) fn name(order: &Order) -> String {
    let digest = Sha256::digest(format!("{}\n{}", order.uid, order.occasion()));
    let digest = hex::encode(digest);
    format!("etcd-backup-{}", &digest[..DIGITS])
}

/// Where the Secret with the client certificate is mounted.
pub(crate) const TLS: &str = "/run/backup/tls";
/// Where the Secret with user and password is mounted.
pub(crate) const AUTH: &str = "/run/backup/auth";
/// Read-only for the pod's group.
const SECRET_MODE: i32 = 0o440;

/// The Secrets the work needs: none for a removal (invariant 14).
fn secrets(order: &Order) -> Vec<(&'static str, &'static str, &str)> {
    let Task::Store(snapshot) = &order.task else {
        return Vec::new();
    };
    let named = [
        ("tls", TLS, &snapshot.reach.tls),
        ("auth", AUTH, &snapshot.reach.auth),
    ];
    let named = named.into_iter();
    named
        .filter_map(|(volume, path, secret)| Some((volume, path, secret.as_deref()?)))
        .collect()
}

/// The pod that does the work of an EtcdBackup.
pub(crate) fn build(backup: &EtcdBackup, order: &Order, image: &OperatorImage) -> Pod {
    let secrets = secrets(order).into_iter().map(|(name, _, secret)| Volume {
        name: name.to_owned(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(secret.to_owned()),
            default_mode: Some(SECRET_MODE),
            ..SecretVolumeSource::default()
        }),
        ..Volume::default()
    });
    let claim = Volume {
        name: VOLUME.to_owned(),
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: order.claim.clone(),
            ..PersistentVolumeClaimVolumeSource::default()
        }),
        ..Volume::default()
    };
    let labels = BESIDE_A_CLAIM.map(|(key, value)| (key.to_owned(), value.to_owned()));
    Pod {
        metadata: ObjectMeta {
            name: Some(name(order)),
            namespace: backup.namespace(),
            labels: Some(labels.into()),
            // It goes with its EtcdBackup.
            owner_references: Some(vec![OwnerReference {
                api_version: EtcdBackup::api_version(&()).into_owned(),
                kind: EtcdBackup::kind(&()).into_owned(),
                name: backup.name_any(),
                uid: order.uid.clone(),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec {
            restart_policy: Some("Never".to_owned()),
            automount_service_account_token: Some(false),
            enable_service_links: Some(false),
            termination_grace_period_seconds: Some(5),
            security_context: Some(pod_security()),
            containers: vec![container(order, image)],
            volumes: Some([claim].into_iter().chain(secrets).collect()),
            ..PodSpec::default()
        }),
        status: None,
    }
}

fn container(order: &Order, image: &OperatorImage) -> Container {
    let claim = VolumeMount {
        name: VOLUME.to_owned(),
        mount_path: ROOT.to_owned(),
        ..VolumeMount::default()
    };
    let secrets = secrets(order)
        .into_iter()
        .map(|(name, path, _)| VolumeMount {
            name: name.to_owned(),
            mount_path: path.to_owned(),
            read_only: Some(true),
            ..VolumeMount::default()
        });
    let (request, limit) = MEMORY;
    let memory =
        |quantity: &str| Some([("memory".to_owned(), Quantity(quantity.to_owned()))].into());
    Container {
        name: VOLUME.to_owned(),
        image: Some(image.image.clone()),
        image_pull_policy: image.pull_policy.clone(),
        command: Some(vec![PROGRAM.to_owned()]),
        args: Some(vec![
            "volume".to_owned(),
            format!(
                "--order={}",
                serde_json::to_string(order).unwrap_or_default()
            ),
        ]),
        volume_mounts: Some([claim].into_iter().chain(secrets).collect()),
        resources: Some(ResourceRequirements {
            requests: memory(request),
            limits: memory(limit),
            ..ResourceRequirements::default()
        }),
        security_context: Some(container_security()),
        ..Container::default()
    }
}

/// How a pod stands.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Standing {
    /// An earlier one of the name, on its way out.
    Ending,
    /// Somebody else's.
    Foreign,
    /// It runs or is about to.
    Working,
    /// It has not started, and this is why.
    Stuck(Trouble),
    /// It has ended.
    Ended(Box<Report>),
}

/// How a pod of the work's name stands.
pub(crate) fn standing(pod: &Pod, order: &Order) -> Standing {
    if !pod
        .owner_references()
        .iter()
        .any(|owner| owner.uid == order.uid)
    {
        return Standing::Foreign;
    }
    let status = pod.status.clone().unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    let state = containers
        .first()
        .and_then(|container| container.state.clone());
    let gone = pod.metadata.deletion_timestamp.is_some();
    match state.as_ref().and_then(ended) {
        // An attempt that failed was reported, and another one is wanted. What was done counts.
        Some(report) if !gone || !matches!(report, Report::Failed { .. }) => {
            return Standing::Ended(Box::new(report));
        }
        _ if gone => return Standing::Ending,
        _ => {}
    }
    if matches!(status.phase.as_deref(), Some("Failed" | "Succeeded")) {
        let why = status.message.or(status.reason).unwrap_or_default();
        let trouble = Trouble::new(
            Reason::PodNotStarting,
            format!("the pod beside the claim has ended before its time: {why}"),
        );
        return Standing::Ended(Box::new(Report::failed(trouble)));
    }
    let waiting = state.and_then(|state| state.waiting).map(|waiting| {
        let (reason, message) = (
            waiting.reason.unwrap_or_default(),
            waiting.message.unwrap_or_default(),
        );
        (reason, message)
    });
    let unscheduled = status
        .conditions
        .unwrap_or_default()
        .into_iter()
        .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
    match (waiting, unscheduled) {
        (Some((reason, message)), _)
            if reason.starts_with("ErrImage") || reason.starts_with("ImagePull") =>
        {
            Standing::Stuck(Trouble::new(
                Reason::ImageNotFound,
                format!("the operator's image cannot be had beside the claim: {message}"),
            ))
        }
        (Some((reason, message)), _) if reason.starts_with("Create") => {
            Standing::Stuck(Trouble::new(
                Reason::PodNotStarting,
                format!("the pod beside the claim cannot start: {message}"),
            ))
        }
        (_, Some(condition)) => Standing::Stuck(Trouble::new(
            Reason::PodNotStarting,
            format!(
                "spec.pvc.claimName: no node can run a pod with the claim {}: {}",
                order.claim,
                condition.message.unwrap_or_default()
            ),
        )),
        _ => Standing::Working,
    }
}

fn ended(state: &ContainerState) -> Option<Report> {
    let ended = state.terminated.as_ref()?;
    let report = ended
        .message
        .as_deref()
        .and_then(|text| serde_json::from_str(text).ok());
    Some(report.unwrap_or_else(|| {
        Report::failed(Trouble::new(
            Reason::StepFailed,
            format!(
                "the pod beside the claim ended with {} ({}) and said nothing",
                ended.exit_code,
                ended.reason.as_deref().unwrap_or_default()
            ),
        ))
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::claim::order::{Reach, Snapshot};

    fn order() -> Order {
        Order {
            claim: "backups".to_owned(),
            path: "etcd/main".to_owned(),
            uid: "backup-uid".to_owned(),
            task: Task::Everything,
        }
    }

    fn built() -> Pod {
        let spec =
            json!({ "storageType": "PVC", "pvc": { "claimName": "backups", "path": "etcd/main" } });
        let mut backup = EtcdBackup::new("nightly", serde_json::from_value(spec).unwrap());
        backup.metadata.namespace = Some("prod".to_owned());
        let image = OperatorImage {
            image: "operator:1".to_owned(),
            pull_policy: None,
        };
        build(&backup, &order(), &image)
    }

    /// What the restricted profile asks for, and less than it allows.
    #[test]
    fn the_pod_beside_a_claim_is_restricted_and_has_no_token() {
        let pod = built();
        let spec = pod.spec.as_ref().unwrap();
        assert_eq!(spec.automount_service_account_token, Some(false));
        let security = spec.security_context.as_ref().unwrap();
        assert_eq!(security.run_as_non_root, Some(true));
        assert_eq!(
            security.seccomp_profile.as_ref().unwrap().type_,
            "RuntimeDefault"
        );
        let container = &spec.containers[0];
        let security = container.security_context.as_ref().unwrap();
        assert_eq!(security.allow_privilege_escalation, Some(false));
        assert_eq!(security.read_only_root_filesystem, Some(true));
        assert_eq!(
            security.capabilities.as_ref().unwrap().drop,
            Some(vec!["ALL".to_owned()])
        );
        assert_eq!(container.env, None);
        let volumes = spec.volumes.as_ref().unwrap();
        assert_eq!(volumes.len(), 1);
        assert_eq!(
            volumes[0]
                .persistent_volume_claim
                .as_ref()
                .unwrap()
                .claim_name,
            "backups"
        );
        assert_eq!(pod.owner_references()[0].uid, "backup-uid");
    }

    /// Invariant 14.
    #[test]
    fn secrets_are_mounted_only_where_etcd_is_asked() {
        let order = Order {
            task: Task::Store(Box::new(Snapshot {
                endpoints: Vec::new(),
                begun: jiff::Timestamp::UNIX_EPOCH,
                numbered: false,
                compress: false,
                cluster: None,
                reach: Reach {
                    tls: Some("client-tls".to_owned()),
                    operators: true,
                    auth: Some("root".to_owned()),
                },
            })),
            ..order()
        };
        let named: Vec<_> = secrets(&order).iter().map(|(.., secret)| *secret).collect();
        assert_eq!(named, ["client-tls", "root"]);
        let mounts = container(
            &order,
            &OperatorImage {
                image: String::new(),
                pull_policy: None,
            },
        )
        .volume_mounts;
        assert!(
            mounts.unwrap()[1..]
                .iter()
                .all(|mount| mount.read_only == Some(true))
        );
    }

    fn standing_of(status: serde_json::Value, deleted: bool) -> Standing {
        let mut pod = built();
        pod.status = Some(serde_json::from_value(status).unwrap());
        if deleted {
            pod.metadata.deletion_timestamp =
                Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
        }
        standing(&pod, &order())
    }

    fn with_state(state: &serde_json::Value) -> serde_json::Value {
        json!({ "containerStatuses": [{ "name": "backups", "image": "", "imageID": "", "ready": false,
                "restartCount": 0, "state": state }] })
    }

    #[test]
    fn what_a_pod_reports_counts_also_when_it_goes() {
        let done = json!({ "terminated": { "exitCode": 0, "message": r#"{"result":"removed","deleted":2,"kept":[]}"# } });
        let report = Report::Removed {
            deleted: 2,
            kept: Vec::new(),
        };
        for deleted in [false, true] {
            assert_eq!(
                standing_of(with_state(&done), deleted),
                Standing::Ended(Box::new(report.clone()))
            );
        }
        assert_eq!(
            standing_of(json!({ "phase": "Running" }), true),
            Standing::Ending
        );
        assert_eq!(
            standing_of(json!({ "phase": "Running" }), false),
            Standing::Working
        );
        let killed = json!({ "terminated": { "exitCode": 137, "reason": "OOMKilled" } });
        let Standing::Ended(report) = standing_of(with_state(&killed), false) else {
            panic!("not ended")
        };
        assert!(format!("{report:?}").contains("OOMKilled"));
        let Standing::Ended(_) =
            standing_of(json!({ "phase": "Failed", "reason": "Evicted" }), false)
        else {
            panic!("not ended")
        };
    }

    #[test]
    fn what_keeps_a_pod_from_starting_is_said() {
        let missing = json!({ "phase": "Pending", "conditions": [{ "type": "PodScheduled", "status": "False",
            "message": "persistentvolumeclaim \"backups\" not found" }] });
        let Standing::Stuck(trouble) = standing_of(missing, false) else {
            panic!("not stuck")
        };
        assert!(
            trouble.message.contains("spec.pvc.claimName") && trouble.message.contains("not found")
        );
        let pull =
            with_state(&json!({ "waiting": { "reason": "ImagePullBackOff", "message": "m" } }));
        let Standing::Stuck(trouble) = standing_of(pull, false) else {
            panic!("not stuck")
        };
        assert_eq!(trouble.reason, Reason::ImageNotFound);
    }

    #[test]
    fn a_pod_of_the_name_that_is_somebody_elses_is_left_alone() {
        let mut pod = built();
        pod.metadata.owner_references = None;
        assert_eq!(standing(&pod, &order()), Standing::Foreign);
    }
}
