//! The pod of a verification, which proves that a backup can be restored. Performs no I/O.
//!
//! The pod fetches and restores the backup with the programs of a seed. Then etcd serves the data on localhost, and the
//! container `verify` compares the data with the manifest and reports the result. etcd runs until the operator deletes
//! the pod.

use std::collections::BTreeMap;

use api::backup::{Scratch, Verification};
use api::names;
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{
    Container, EmptyDirVolumeSource, EphemeralVolumeSource, PersistentVolumeClaimTemplate, Pod,
    PodSpec, ResourceRequirements, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::seed::{PROGRAM, fetching, tool, tools};
use super::{
    DataDirectorySettings, OperatorImage, Source, container_security, data_mount, pod_security,
};

/// Name of the container that runs etcd.
pub const ETCD: &str = "etcd";
/// Name of the container that compares the restored data with the manifest.
pub const VERIFY: &str = "verify";
/// Address of etcd's peer listener in the pod.
pub const PEER: &str = "127.0.0.1:2380";
/// Address of etcd's listener for health and metrics in the pod.
pub const METRICS: &str = "127.0.0.1:2381";
/// Labels of the pod. No Service or NetworkPolicy of a cluster selects a pod with these labels.
pub const LABELS: [(&str, &str); 2] = [
    ("app.kubernetes.io/name", "etcd-backup-verification"),
    ("app.kubernetes.io/managed-by", names::MANAGER_BACKUP),
];

const NAME: &str = "verification";
const CLIENT: &str = "127.0.0.1:2379";

/// The settings of a verification pod.
#[derive(Clone, Debug)]
pub struct VerificationPod<'a> {
    /// Name of the pod.
    pub name: String,
    /// Namespace of the EtcdBackup.
    pub namespace: String,
    /// The EtcdBackup that owns the pod.
    pub owner: OwnerReference,
    /// Version of the etcd that made the snapshot.
    pub version: &'a EtcdVersion,
    /// The etcd image, which contains this version.
    pub image: String,
    /// The source of the backup.
    pub source: Source,
    /// `spec.verification` of the EtcdBackup.
    pub settings: &'a Verification,
    /// The image of the operators.
    pub operator: &'a OperatorImage,
}

/// Builds the pod of a verification.
pub fn verification_pod(pod: VerificationPod<'_>) -> Pod {
    let fetch = Container {
        resources: pod.settings.resources.clone(),
        security_context: Some(container_security()),
        ..fetching(&pod.source, None, pod.operator)
    };
    let labels = LABELS.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let volumes = [
        scratch(pod.settings.scratch.as_ref()),
        Volume {
            name: names::VOLUME_TOOLS.to_owned(),
            empty_dir: Some(EmptyDirVolumeSource::default()),
            ..Volume::default()
        },
    ];
    let account = pod.settings.service_account_name.clone();
    Pod {
        metadata: ObjectMeta {
            labels: Some(labels.into()),
            // The EtcdBackup owns the pod, so that Kubernetes deletes the pod together with the EtcdBackup.
            owner_references: Some(vec![pod.owner.clone()]),
            name: Some(pod.name.clone()),
            namespace: Some(pod.namespace.clone()),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec {
            restart_policy: Some("Never".to_owned()),
            active_deadline_seconds: Some(pod.settings.timeout_seconds().into()),
            automount_service_account_token: Some(false),
            service_account_name: account,
            enable_service_links: Some(false),
            termination_grace_period_seconds: Some(5),
            security_context: Some(pod_security()),
            init_containers: Some(vec![fetch]),
            containers: vec![etcd(&pod), verify(&pod)],
            volumes: Some(volumes.into_iter().chain(pod.source.volumes).collect()),
            ..PodSpec::default()
        }),
        status: None,
    }
}

fn scratch(settings: Option<&Scratch>) -> Volume {
    let claim = settings.and_then(|scratch| scratch.volume_claim.clone());
    let empty = claim.is_none().then(|| EmptyDirVolumeSource {
        size_limit: settings.and_then(|scratch| scratch.size_limit.clone()),
        ..EmptyDirVolumeSource::default()
    });
    Volume {
        name: names::VOLUME_DATA.to_owned(),
        empty_dir: empty,
        ephemeral: claim.map(|spec| EphemeralVolumeSource {
            volume_claim_template: Some(PersistentVolumeClaimTemplate {
                metadata: None,
                spec,
            }),
        }),
        ..Volume::default()
    }
}

fn etcd(pod: &VerificationPod<'_>) -> Container {
    let peer = format!("http://{PEER}");
    let client = format!("http://{CLIENT}");
    let settings = DataDirectorySettings {
        tool: tool(pod.version),
        name: NAME.to_owned(),
        peer_url: peer.clone(),
        token: NAME.to_owned(),
        bump_revision: None,
        replay: None,
    };
    let args = [
        "seed".to_owned(),
        "start".to_owned(),
        serde_json::to_string(&settings).unwrap_or_default(),
        "/usr/local/bin/etcd".to_owned(),
        format!("--name={NAME}"),
        format!("--data-dir={}", names::DATA_DIR),
        // etcd listens on 127.0.0.1, so that only the containers of this pod can connect.
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster={NAME}={peer}"),
        format!("--listen-metrics-urls=http://{METRICS}"),
    ];
    Container {
        name: ETCD.to_owned(),
        image: Some(pod.image.clone()),
        command: Some(vec![PROGRAM.to_owned()]),
        args: Some(args.into()),
        volume_mounts: Some(vec![data_mount(), tools(true)]),
        resources: pod.settings.resources.clone(),
        security_context: Some(container_security()),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        ..Container::default()
    }
}

fn verify(pod: &VerificationPod<'_>) -> Container {
    Container {
        name: VERIFY.to_owned(),
        image: Some(pod.operator.image.clone()),
        image_pull_policy: pod.operator.pull_policy.clone(),
        command: Some(vec!["/usr/local/bin/etcd-backup-operator".to_owned()]),
        args: Some(vec!["verify".to_owned()]),
        volume_mounts: Some(vec![VolumeMount {
            read_only: Some(true),
            ..data_mount()
        }]),
        resources: pod.settings.resources.as_ref().map(small),
        security_context: Some(container_security()),
        termination_message_policy: Some("File".to_owned()),
        ..Container::default()
    }
}

/// The resources of the container `verify`: small requests and limits for the same resources (CPU, memory) for which
/// the settings have requests and limits. A ResourceQuota rejects a pod if one of its containers has no limit.
fn small(settings: &ResourceRequirements) -> ResourceRequirements {
    let like = |given: Option<&BTreeMap<String, Quantity>>, cpu: &str, memory: &str| {
        let amounts = [("cpu", cpu), ("memory", memory)].into_iter();
        let amounts = amounts
            .filter(|(kind, _)| given.is_some_and(|given| given.contains_key(*kind)))
            .map(|(kind, amount)| (kind.to_owned(), Quantity(amount.to_owned())));
        Some(amounts.collect::<BTreeMap<_, _>>()).filter(|amounts| !amounts.is_empty())
    };
    ResourceRequirements {
        limits: like(settings.limits.as_ref(), "200m", "128Mi"),
        requests: like(settings.requests.as_ref(), "20m", "32Mi"),
        ..ResourceRequirements::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn built(settings: &Value) -> Value {
        let settings: Verification = serde_json::from_value(settings.clone()).unwrap();
        let block = json!({ "s3": { "path": "bucket/etcd/main", "awsSecret": "aws" } });
        let block = serde_json::from_value(block).unwrap();
        let version = EtcdVersion::parse("3.6.16").unwrap();
        let pod = verification_pod(VerificationPod {
            name: "etcd-verify-1".to_owned(),
            namespace: "prod".to_owned(),
            owner: OwnerReference::default(),
            version: &version,
            image: version.image("quay.io/coreos/etcd"),
            source: Source::store(&block, &version, Some("ab")),
            settings: &settings,
            operator: &OperatorImage {
                image: "operator:1".to_owned(),
                pull_policy: None,
            },
        });
        serde_json::to_value(pod).unwrap()
    }

    #[test]
    fn verification_pod_is_restricted_and_ends_at_time_limit() {
        let pod = built(&json!({ "timeoutSeconds": 90 }));
        let spec = &pod["spec"];
        assert_eq!(spec["activeDeadlineSeconds"], 90);
        assert_eq!(spec["restartPolicy"], "Never");
        assert_eq!(spec["automountServiceAccountToken"], false);
        assert_eq!(spec["securityContext"]["runAsNonRoot"], true);
        let containers = [
            &spec["initContainers"][0],
            &spec["containers"][0],
            &spec["containers"][1],
        ];
        for container in containers {
            let security = &container["securityContext"];
            assert_eq!(security["allowPrivilegeEscalation"], false, "{container}");
            assert_eq!(
                security["capabilities"]["drop"],
                json!(["ALL"]),
                "{container}"
            );
        }
    }

    #[test]
    fn restored_etcd_listens_on_localhost_only() {
        let pod = built(&json!({}));
        let args = pod["spec"]["containers"][0]["args"].as_array().unwrap();
        let listens: Vec<&str> = args
            .iter()
            .filter_map(Value::as_str)
            .filter(|argument| argument.starts_with("--listen-"))
            .collect();
        assert_eq!(listens.len(), 3);
        for argument in listens {
            assert!(argument.contains("=http://127.0.0.1:"), "{argument}");
        }
        assert_eq!(
            pod["spec"]["containers"][0]["image"],
            "quay.io/coreos/etcd:v3.6.16"
        );
    }

    #[test]
    fn invariant_14_only_fetch_container_mounts_secrets() {
        let pod = built(&json!({}));
        let mounts = |container: &Value| {
            let mounts = container["volumeMounts"].as_array().unwrap().clone();
            let names: Vec<String> = mounts
                .iter()
                .map(|mount| mount["name"].as_str().unwrap().to_owned())
                .collect();
            names
        };
        let secret = "restore-secret".to_owned();
        assert!(mounts(&pod["spec"]["initContainers"][0]).contains(&secret));
        for container in pod["spec"]["containers"].as_array().unwrap() {
            assert!(!mounts(container).contains(&secret), "{container}");
        }
    }

    /// A ResourceQuota for memory limits rejects a pod with a container that has no memory limit.
    #[test]
    fn verification_containers_have_limits_only_if_settings_have_limits() {
        let resources = |settings: Value| {
            let spec = built(&settings)["spec"].clone();
            let fetch = spec["initContainers"][0]["resources"].clone();
            let containers = spec["containers"].as_array().unwrap().clone();
            let rest = containers.iter().map(|it| it["resources"].clone());
            (fetch, rest.collect::<Vec<Value>>())
        };
        let given =
            json!({ "limits": { "memory": "2Gi" }, "requests": { "cpu": "1", "memory": "1Gi" } });
        let (fetch, rest) = resources(json!({ "resources": given }));
        assert_eq!((&fetch, &rest[0]), (&given, &given));
        let small = json!({ "limits": { "memory": "128Mi" }, "requests": { "cpu": "20m", "memory": "32Mi" } });
        assert_eq!(rest[1], small);
        let (fetch, rest) = resources(json!({}));
        assert!(
            fetch.is_null() && rest.iter().all(Value::is_null),
            "{rest:?}"
        );
    }

    #[test]
    fn scratch_volume_is_emptydir_unless_settings_have_pvc() {
        let volume = |settings: Value| built(&settings)["spec"]["volumes"][0].clone();
        assert_eq!(volume(json!({}))["emptyDir"], json!({}));
        let limited = volume(json!({ "scratch": { "sizeLimit": "8Gi" } }));
        assert_eq!(limited["emptyDir"], json!({ "sizeLimit": "8Gi" }));
        let claim = json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "8Gi" } } });
        let claimed = volume(json!({ "scratch": { "volumeClaim": claim } }));
        assert_eq!(claimed["ephemeral"]["volumeClaimTemplate"]["spec"], claim);
        assert_eq!(claimed.get("emptyDir"), None);
    }
}
