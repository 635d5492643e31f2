//! Plans the pod that searches the recorded changes on a PersistentVolumeClaim (PVC) for the point of the restore.
//! Performs no I/O.

use api::EtcdRestore;
use api::names::ANNOTATION_RESTORE;
use api::storage::StorageSource;
use k8s_openapi::api::core::v1::{
    Container, PersistentVolumeClaimVolumeSource, Pod, PodSpec, ResourceRequirements,
    SecretVolumeSource, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::ObjectMeta;
use kube::{Resource, ResourceExt};
use member::{OperatorImage, container_security, pod_security};
use sha2::{Digest, Sha256};

use super::action::{Action, Plan};
use crate::naming;
use crate::search::{KEYS, ROOT, SearchOrder};
use crate::snapshot::SearchStep;

const PROGRAM: &str = "/usr/local/bin/etcd-restore-operator";
const CONTAINER: &str = "search";
const CLAIM_VOLUME: &str = "changes";
const KEYS_VOLUME: &str = "encryption";
/// Number of hexadecimal digits of the digest in the name of a pod.
const NAME_DIGITS: usize = 20;
/// Memory request and memory limit. The search needs about 50 MiB for a segment, and a list of all segments.
const MEMORY: (&str, &str) = ("64Mi", "256Mi");
/// Time limit of a search, in seconds. If the server of the volume does not answer, the search would block forever
/// without this limit.
const DEADLINE: i64 = 1800;
/// File mode of mounted Secrets. The user and the group of the pod can read the files.
const SECRET_MODE: i32 = 0o440;

/// Plans the next step of the pod.
pub(super) fn plan(step: &SearchStep) -> Plan {
    match step {
        SearchStep::Start(pod) => Plan::act(
            Action::StartSearch(pod.clone()),
            "starting the pod that searches the recorded changes",
        ),
        SearchStep::End(pod) => Plan::act(
            Action::EndSearch(pod.clone()),
            "repeating the search of the recorded changes",
        ),
    }
}

/// The name of the pod. It depends only on the EtcdRestore and the point, so a second operator process finds the pod of
/// the first process (invariant 11).
fn name(restore: &EtcdRestore, order: &SearchOrder) -> String {
    // The agent of the EtcdBackup advances the time `complete` while it records changes. This must not change the name
    // of the pod.
    let fixed = SearchOrder {
        complete: None,
        ..order.clone()
    };
    let text = serde_json::to_string(&fixed).unwrap_or_default();
    let (uid, generation) = (naming::uid(restore), restore.metadata.generation);
    let digest = Sha256::digest(format!("{uid}\n{}\n{text}", generation.unwrap_or_default()));
    format!("etcd-search-{}", &hex::encode(digest)[..NAME_DIGITS])
}

/// Builds the pod. The EtcdRestore owns the pod, so Kubernetes deletes both together.
pub(crate) fn pod(restore: &EtcdRestore, order: &SearchOrder, image: &OperatorImage) -> Pod {
    let uid = naming::uid(restore);
    let keys = order.encryption.as_ref().map(|secret| Volume {
        name: KEYS_VOLUME.to_owned(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(secret.clone()),
            default_mode: Some(SECRET_MODE),
            ..SecretVolumeSource::default()
        }),
        ..Volume::default()
    });
    let source = order.directory.source();
    let claim = match source {
        StorageSource::Pvc(pvc) => Some(Volume {
            name: CLAIM_VOLUME.to_owned(),
            persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                claim_name: pvc.claim_name.clone(),
                ..PersistentVolumeClaimVolumeSource::default()
            }),
            ..Volume::default()
        }),
        _ => None,
    };
    Pod {
        metadata: ObjectMeta {
            name: Some(name(restore, order)),
            namespace: restore.namespace(),
            // Because of this label, a change of the pod triggers a reconcile of the EtcdRestore.
            labels: Some([(ANNOTATION_RESTORE.to_owned(), uid.to_owned())].into()),
            owner_references: Some(vec![OwnerReference {
                api_version: EtcdRestore::api_version(&()).into_owned(),
                kind: EtcdRestore::kind(&()).into_owned(),
                name: restore.name_any(),
                uid: uid.to_owned(),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec {
            restart_policy: Some("Never".to_owned()),
            automount_service_account_token: Some(false),
            enable_service_links: Some(false),
            termination_grace_period_seconds: Some(5),
            active_deadline_seconds: Some(DEADLINE),
            security_context: Some(pod_security()),
            containers: vec![container(order, image)],
            volumes: Some(claim.into_iter().chain(keys).collect()),
            ..PodSpec::default()
        }),
        status: None,
    }
}

fn container(order: &SearchOrder, image: &OperatorImage) -> Container {
    let mount = |name: &str, path: &str| VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        read_only: Some(true),
        ..VolumeMount::default()
    };
    let claim = mount(CLAIM_VOLUME, ROOT);
    let keys = order.encryption.as_ref().map(|_| mount(KEYS_VOLUME, KEYS));
    let (request, limit) = MEMORY;
    let memory =
        |quantity: &str| Some([("memory".to_owned(), Quantity(quantity.to_owned()))].into());
    Container {
        name: CONTAINER.to_owned(),
        image: Some(image.image.clone()),
        image_pull_policy: image.pull_policy.clone(),
        command: Some(vec![PROGRAM.to_owned()]),
        args: Some(vec![
            "search".to_owned(),
            format!(
                "--order={}",
                serde_json::to_string(order).unwrap_or_default()
            ),
        ]),
        volume_mounts: Some([claim].into_iter().chain(keys).collect()),
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
    use serde_json::{Value, json};

    use super::*;
    use crate::plan::plan as plan_all;
    use crate::snapshot::{Snapshot, Source};

    fn restore(dry_run: bool) -> EtcdRestore {
        let spec = json!({
            "etcdCluster": { "name": "main" }, "backup": { "name": "b" },
            "continuous": { "at": { "revision": 7 }, "dryRun": dry_run },
        });
        let mut restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
        restore.metadata.namespace = Some("prod".into());
        restore.metadata.uid = Some("restore-uid".into());
        restore.metadata.generation = Some(1);
        restore
    }

    fn order(more: &Value) -> SearchOrder {
        let mut order = json!({
            "directory": { "pvc": { "claimName": "backups", "path": "etcd/b.continuous/uid" } },
            "at": { "revision": 7 },
        });
        for (field, value) in more.as_object().unwrap() {
            order[field] = value.clone();
        }
        serde_json::from_value(order).unwrap()
    }

    fn built(restore: &EtcdRestore, order: &SearchOrder) -> Pod {
        let image = OperatorImage {
            image: "operator:1".to_owned(),
            pull_policy: None,
        };
        pod(restore, order, &image)
    }

    /// Invariant 11: a second operator process finds the pod of the first process.
    #[test]
    fn name_of_search_pod_depends_only_on_restore_and_point() {
        let restore = restore(false);
        let name = |order: &Value| name(&restore, &self::order(order));
        let first = name(&json!({}));
        assert_eq!(
            name(&json!({ "complete": 1 })),
            name(&json!({ "complete": 2 }))
        );
        assert_eq!(name(&json!({ "complete": 1 })), first);
        assert_ne!(name(&json!({ "at": { "revision": 8 } })), first);
        let mut changed = restore.clone();
        changed.metadata.generation = Some(2);
        assert_ne!(super::name(&changed, &order(&json!({}))), first);
    }

    /// Invariant 14: the pod mounts only the PVC and the keys, and has no service account token.
    #[test]
    fn invariant_14_search_pod_mounts_only_pvc_and_keys() {
        for (more, volumes) in [
            (json!({}), vec![CLAIM_VOLUME]),
            (
                json!({ "encryption": "keys" }),
                vec![CLAIM_VOLUME, KEYS_VOLUME],
            ),
        ] {
            let order = order(&more);
            let pod = built(&restore(false), &order);
            assert_eq!(pod.owner_references()[0].uid, "restore-uid");
            let spec = pod.spec.unwrap();
            assert_eq!(spec.automount_service_account_token, Some(false));
            assert_eq!(spec.security_context.unwrap().run_as_non_root, Some(true));
            let found = spec.volumes.unwrap();
            let found: Vec<&str> = found.iter().map(|volume| volume.name.as_str()).collect();
            assert_eq!(found, volumes);
            let container = &spec.containers[0];
            let mounts = container.volume_mounts.as_ref().unwrap();
            assert_eq!(mounts.len(), volumes.len());
            assert!(mounts.iter().all(|mount| mount.read_only == Some(true)));
            assert_eq!(container.env, None);
            let arguments = container.args.as_ref().unwrap();
            let carried = arguments[1].strip_prefix("--order=").unwrap();
            assert_eq!(serde_json::from_str::<SearchOrder>(carried).unwrap(), order);
        }
    }

    #[test]
    fn search_pod_is_started_and_deleted_before_point_is_recorded() {
        let pod = Box::new(built(&restore(false), &order(&json!({}))));
        for dry_run in [false, true] {
            let mut restore = restore(dry_run);
            let seed = naming::seed(&restore);
            restore.status.get_or_insert_default().seed = Some(seed);
            let with = |step| Snapshot {
                source: Source::Search(step),
                ..Snapshot::not_read()
            };
            let starts = plan_all(&restore, &with(SearchStep::Start(pod.clone())));
            assert_eq!(starts.action, Action::StartSearch(pod.clone()));
            let ends = plan_all(&restore, &with(SearchStep::End(pod.clone())));
            assert_eq!(ends.action, Action::EndSearch(pod.clone()));
        }
    }
}
