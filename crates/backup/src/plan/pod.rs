//! Builds the pod that mounts the PersistentVolumeClaim of an EtcdBackup and transfers or removes backups. Performs no
//! I/O.

use api::EtcdBackup;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    Container, PersistentVolumeClaimVolumeSource, Pod, PodSpec, ResourceRequirements,
    SecretVolumeSource, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::ObjectMeta;
use kube::{Resource, ResourceExt};
use member::{BACKUP_POD_LABELS, OperatorImage, container_security, pod_security};
use sha2::{Digest, Sha256};

use crate::pvc::{AUTH, ENCRYPTION, Order, ROOT, TLS, Task};

const VOLUME: &str = "backups";
const PROGRAM: &str = "/usr/local/bin/etcd-backup-operator";
/// Number of hexadecimal digits of the digest in the name of a pod.
const NAME_DIGITS: usize = 20;
/// Memory request and memory limit. A transfer streams the snapshot, so it needs little memory.
const MEMORY: (&str, &str) = ("64Mi", "256Mi");

/// The name of the pod for this order. The name depends only on the order, so a second operator process finds the pod
/// of the first process (invariant 11).
fn name(order: &Order) -> String {
    name_of(&order.uid, &order.work_id())
}

/// The name of the pod for the backup with this start time.
pub(super) fn store_name(backup: &EtcdBackup, begun: Timestamp) -> String {
    name_of(&backup.uid().unwrap_or_default(), &Order::store_id(begun))
}

fn name_of(uid: &str, work_id: &str) -> String {
    let digest = Sha256::digest(format!("{uid}\n{work_id}"));
    let digest = hex::encode(digest);
    format!("etcd-backup-{}", &digest[..NAME_DIGITS])
}

/// File mode of mounted Secrets. The user and the group of the pod can read the files.
const SECRET_MODE: i32 = 0o440;

/// The Secrets that the pod mounts. A removal needs no Secret (invariant 14).
fn secrets(order: &Order) -> Vec<(&'static str, &'static str, &str)> {
    let Task::Store(snapshot) = &order.task else {
        return Vec::new();
    };
    let encryption = snapshot.encryption.as_ref();
    let named = [
        ("tls", TLS, snapshot.reach.tls.as_deref()),
        ("auth", AUTH, snapshot.reach.auth.as_deref()),
        (
            "encryption",
            ENCRYPTION,
            encryption.map(|encryption| encryption.secret.as_str()),
        ),
    ];
    let named = named.into_iter();
    named
        .filter_map(|(volume, path, secret)| Some((volume, path, secret?)))
        .collect()
}

pub(super) fn build(backup: &EtcdBackup, order: &Order, image: &OperatorImage) -> Pod {
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
    let labels = BACKUP_POD_LABELS.map(|(key, value)| (key.to_owned(), value.to_owned()));
    Pod {
        metadata: ObjectMeta {
            name: Some(name(order)),
            namespace: backup.namespace(),
            labels: Some(labels.into()),
            // The EtcdBackup owns the pod, so the garbage collector deletes the pod when the EtcdBackup is deleted.
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

#[cfg(test)]
mod tests {
    use api::backup::Encryption;
    use serde_json::json;

    use super::*;
    use crate::pvc::{Reach, SnapshotTask};

    fn built() -> Pod {
        let spec =
            json!({ "storageType": "PVC", "pvc": { "claimName": "backups", "path": "etcd/main" } });
        let mut backup = EtcdBackup::new("nightly", serde_json::from_value(spec).unwrap());
        backup.metadata.namespace = Some("prod".to_owned());
        let image = OperatorImage {
            image: "operator:1".to_owned(),
            pull_policy: None,
        };
        build(&backup, &Order::example(), &image)
    }

    #[test]
    fn backup_pod_is_restricted_and_has_no_service_account_token() {
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

    #[test]
    fn invariant_14_backup_pod_mounts_secrets_only_to_take_snapshot() {
        let order = Order {
            task: Task::Store(Box::new(SnapshotTask {
                endpoints: Vec::new(),
                begun: jiff::Timestamp::UNIX_EPOCH,
                numbered: false,
                compress: false,
                encryption: Some(Encryption {
                    secret: "keys".to_owned(),
                    key: None,
                }),
                cluster: None,
                reach: Reach {
                    tls: Some("client-tls".to_owned()),
                    operators: true,
                    auth: Some("root".to_owned()),
                },
            })),
            ..Order::example()
        };
        let named: Vec<_> = secrets(&order).iter().map(|(.., secret)| *secret).collect();
        assert_eq!(named, ["client-tls", "root", "keys"]);
        assert!(secrets(&Order::example()).is_empty());
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
}
