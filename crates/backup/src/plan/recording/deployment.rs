//! Builds the Deployment of the agent. Performs no I/O.

use std::collections::BTreeMap;

use api::EtcdBackup;
use api::backup::Continuous;
use api::names::LABEL_BACKUP;
use api::storage::StorageSource;
use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy};
use k8s_openapi::api::core::v1::{
    Container, EmptyDirVolumeSource, PersistentVolumeClaimVolumeSource, PodSpec, PodTemplateSpec,
    Probe, ResourceRequirements, SecretVolumeSource, TCPSocketAction, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::ObjectMeta;
use kube::{Resource, ResourceExt};
use member::{ANNOTATION_SPEC_HASH, BACKUP_POD_LABELS, container_security, pod_security};
use sha2::{Digest, Sha256};
use store::progress::PORT;

use super::agent_name;
use crate::plan::job::reach;
use crate::pvc::{AUTH, ENCRYPTION, ROOT, TLS};
use crate::recording::{AgentTarget, CA, RecordOrder, SPOOL, STORE};

const NAME: &str = "agent";
const PROGRAM: &str = "/usr/local/bin/etcd-backup-operator";
/// The argument with the directory of the encryption keys. Only an agent that encrypts has this argument.
const KEYS: &str = "--keys=";
/// File mode of mounted Secrets: the user and the group of the pod can read them.
const SECRET_MODE: i32 = 0o440;
/// Default memory request and memory limit. The agent needs about 150 MiB if the store is slow and transactions are
/// large. At its start, the agent needs additional memory for the names of all files with changes (segments) since a
/// snapshot (base).
const MEMORY: (&str, &str) = ("64Mi", "512Mi");
/// The spool volume is larger than the limit of waiting segments by this number of bytes, because the last segment may
/// exceed the limit.
const SPOOL_RESERVE: u64 = 128 << 20;

/// A volume of the pod with its mount.
type Mounted = (Volume, VolumeMount);

/// Builds the Deployment. An annotation of the Deployment contains a hash of its spec.
pub(super) fn deployment(
    backup: &EtcdBackup,
    settings: &Continuous,
    target: &AgentTarget,
) -> Deployment {
    let uid = backup.uid().unwrap_or_default();
    let own = BTreeMap::from([(LABEL_BACKUP.to_owned(), uid)]);
    // The agent gets the labels of backup pods, because the NetworkPolicies of EtcdClusters allow connections from pods
    // with these labels.
    let labels = BACKUP_POD_LABELS.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let mut labels = BTreeMap::from(labels);
    labels.extend(own.clone());
    let spec = DeploymentSpec {
        replicas: Some(1),
        revision_history_limit: Some(1),
        // The strategy `Recreate` stops the old agent first, because two agents at the same time would write every
        // change twice.
        strategy: Some(DeploymentStrategy {
            type_: Some("Recreate".to_owned()),
            rolling_update: None,
        }),
        selector: LabelSelector {
            match_labels: Some(own),
            ..LabelSelector::default()
        },
        template: PodTemplateSpec {
            metadata: Some(ObjectMeta {
                labels: Some(labels.clone()),
                ..ObjectMeta::default()
            }),
            spec: Some(pod(backup, settings, target)),
        },
        ..DeploymentSpec::default()
    };
    let text = serde_json::to_string(&spec).unwrap_or_default();
    let hash = hex::encode(Sha256::digest(text));
    Deployment {
        metadata: ObjectMeta {
            name: Some(agent_name(backup)),
            namespace: backup.namespace(),
            labels: Some(labels),
            annotations: Some([(ANNOTATION_SPEC_HASH.to_owned(), hash)].into()),
            // The EtcdBackup owns the Deployment, so the garbage collector deletes the Deployment when the EtcdBackup
            // is deleted.
            owner_references: backup.owner_ref(&()).map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    }
}

fn pod(backup: &EtcdBackup, settings: &Continuous, target: &AgentTarget) -> PodSpec {
    let (volumes, mounts): (Vec<Volume>, Vec<VolumeMount>) =
        mounted(backup, settings, target).into_iter().unzip();
    PodSpec {
        service_account_name: settings.service_account_name.clone(),
        // The agent sends no requests to the API server. Cloud identities use separate tokens, which this field does
        // not affect.
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        // In the 30 seconds after SIGTERM, the agent stores all changes that it has received, and then ends.
        termination_grace_period_seconds: Some(30),
        security_context: Some(pod_security()),
        containers: vec![container(backup, settings, target, mounts)],
        volumes: Some(volumes),
        ..PodSpec::default()
    }
}

/// Whether the agent of this Deployment encrypts its objects.
pub(super) fn encrypts(deployment: &Deployment) -> bool {
    let spec = deployment.spec.as_ref();
    let pod = spec.and_then(|spec| spec.template.spec.as_ref());
    let containers = pod.into_iter().flat_map(|pod| &pod.containers);
    let mut args = containers.flat_map(|container| container.args.iter().flatten());
    args.any(|arg| arg.starts_with(KEYS))
}

fn container(
    backup: &EtcdBackup,
    settings: &Continuous,
    target: &AgentTarget,
    mounts: Vec<VolumeMount>,
) -> Container {
    let order = serde_json::to_string(&order(backup, settings, target)).unwrap_or_default();
    let mut args = vec!["record".to_owned(), format!("--order={order}")];
    if backup.spec.encryption.is_some() {
        // An agent of an older release would ignore the field `encryption` of the order, and would record without
        // encryption. It does not know this argument, so it ends with an error.
        args.push(format!("{KEYS}{ENCRYPTION}"));
    }
    let (request, limit) = MEMORY;
    let memory =
        |quantity: &str| Some([("memory".to_owned(), Quantity(quantity.to_owned()))].into());
    let resources = settings
        .resources
        .clone()
        .unwrap_or_else(|| ResourceRequirements {
            requests: memory(request),
            limits: memory(limit),
            ..ResourceRequirements::default()
        });
    Container {
        name: NAME.to_owned(),
        image: Some(target.image.image.clone()),
        image_pull_policy: target.image.pull_policy.clone(),
        command: Some(vec![PROGRAM.to_owned()]),
        args: Some(args),
        volume_mounts: Some(mounts),
        resources: Some(resources),
        security_context: Some(container_security()),
        readiness_probe: Some(Probe {
            tcp_socket: Some(TCPSocketAction {
                port: IntOrString::Int(PORT.into()),
                ..TCPSocketAction::default()
            }),
            ..Probe::default()
        }),
        // If the agent fails, the termination message of the container is the end of its log. The operator reports this
        // message in the status of the EtcdBackup.
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        ..Container::default()
    }
}

fn order(backup: &EtcdBackup, settings: &Continuous, target: &AgentTarget) -> RecordOrder {
    RecordOrder {
        storage: target.storage.clone(),
        uid: backup.uid().unwrap_or_default(),
        endpoints: target.endpoints.clone(),
        reach: reach(backup, target.cluster.as_deref()),
        encryption: backup.spec.encryption.clone(),
        flush_millis: millis(settings.flush_interval()),
        base_seconds: settings.max_base_age().as_secs(),
        base_bytes: settings.max_base_bytes(),
        window_seconds: settings.retention_window().as_secs(),
        spool_bytes: settings.spool_limit_bytes(),
        max_snapshot: target.max_snapshot,
    }
}

fn millis(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The volumes of the pod: the spool, the PersistentVolumeClaim, and the Secrets for etcd, for the store and for
/// encryption.
fn mounted(backup: &EtcdBackup, settings: &Continuous, target: &AgentTarget) -> Vec<Mounted> {
    let size = settings.spool_limit_bytes().saturating_add(SPOOL_RESERVE);
    let spool = Volume {
        name: "spool".to_owned(),
        empty_dir: Some(EmptyDirVolumeSource {
            size_limit: Some(Quantity(size.to_string())),
            ..EmptyDirVolumeSource::default()
        }),
        ..Volume::default()
    };
    let mut all = vec![mount(spool, SPOOL, false)];
    let source = target.storage.source();
    if let StorageSource::Pvc(pvc) = &source {
        let claim = Volume {
            name: "backups".to_owned(),
            persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                claim_name: pvc.claim_name.clone(),
                ..PersistentVolumeClaimVolumeSource::default()
            }),
            ..Volume::default()
        };
        all.push(mount(claim, ROOT, false));
    }
    let store = source.secrets();
    let etcd = reach(backup, target.cluster.as_deref());
    let keys = backup.spec.encryption.as_ref();
    let secrets = [
        ("store", STORE, store.credentials.map(|secret| secret.name)),
        ("ca", CA, store.ca.map(|secret| secret.name)),
        ("tls", TLS, etcd.tls.as_deref()),
        ("auth", AUTH, etcd.auth.as_deref()),
        // Invariant 14: the agent reads the keys from this volume. The arguments of the pod contain only the name of
        // the Secret.
        (
            "encryption",
            ENCRYPTION,
            keys.map(|keys| keys.secret.as_str()),
        ),
    ];
    for (volume, path, name) in secrets {
        let Some(name) = name else { continue };
        let secret = Volume {
            name: volume.to_owned(),
            secret: Some(SecretVolumeSource {
                secret_name: Some(name.to_owned()),
                default_mode: Some(SECRET_MODE),
                ..SecretVolumeSource::default()
            }),
            ..Volume::default()
        };
        all.push(mount(secret, path, true));
    }
    all
}

fn mount(volume: Volume, path: &str, read_only: bool) -> Mounted {
    let mount = VolumeMount {
        name: volume.name.clone(),
        mount_path: path.to_owned(),
        read_only: read_only.then_some(true),
        ..VolumeMount::default()
    };
    (volume, mount)
}
