//! `EtcdCluster.spec.pod`: the pods of the members.

use k8s_openapi::api::core::v1::{
    Affinity, Container, EnvVar, LocalObjectReference, PersistentVolumeClaimSpec,
    PodSecurityContext, ResourceRequirements, SecurityContext, Toleration,
    TopologySpreadConstraint, Volume, VolumeMount,
};
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::schema::{
    TextMap, embedded, embedded_list, environment, null_as_empty, object_name, text_map,
};
use crate::text::text_enum;

text_enum! {
    /// When the kubelet pulls the image.
    ImagePullPolicy {
        /// At every start of the container.
        Always = "Always",
        /// Only if the node does not have the image.
        IfNotPresent = "IfNotPresent",
        /// Never, so the node must have the image.
        Never = "Never",
    }
}

/// Pods of the members.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodPolicy {
    /// Labels of the pods, in addition to the operator's labels.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "TextMap::is_empty"
    )]
    #[schemars(schema_with = "text_map")]
    #[x_kube(validation = (
        "self.all(key, key != 'app' && !key.startsWith('etcd_') && !key.startsWith('etcd.database.coreos.com/'))",
        "spec.pod.labels must not contain app, etcd_* or etcd.database.coreos.com/*, which the operator reserves: choose other keys"
    ))]
    pub labels: TextMap,
    /// Annotations of the pods, in addition to the operator's annotations.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "TextMap::is_empty"
    )]
    #[schemars(schema_with = "text_map")]
    #[x_kube(validation = (
        "self.all(key, key != 'etcd.version' && !key.startsWith('etcd.database.coreos.com/'))",
        "spec.pod.annotations must not contain etcd.version or etcd.database.coreos.com/*, which the operator reserves: choose other keys"
    ))]
    pub annotations: TextMap,
    /// Labels of the nodes on which the pods may run.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "TextMap::is_empty"
    )]
    #[schemars(schema_with = "text_map")]
    pub node_selector: TextMap,
    /// Affinity of the pods. If not set, the scheduler prefers nodes without another member of the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "embedded::<Affinity>")]
    pub affinity: Option<Affinity>,
    /// If true, each member runs on a different node. Deprecated by v1beta2: use `affinity`, which overrides this
    /// field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anti_affinity: Option<bool>,
    /// Topology spread constraints of the pods. If not set, the scheduler spreads the pods over the zones of the
    /// nodes.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(schema_with = "embedded_list::<TopologySpreadConstraint>")]
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    /// Tolerations of the pods.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(schema_with = "embedded_list::<Toleration>")]
    pub tolerations: Vec<Toleration>,
    /// Resources of the etcd container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "embedded::<ResourceRequirements>")]
    pub resources: Option<ResourceRequirements>,
    /// Environment variables of the etcd container. etcd reads the flag `--x-y` from `ETCD_X_Y`. The API server
    /// rejects variables of flags that the operator sets. The operator omits a variable whose flag is on etcd's
    /// command line.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(schema_with = "environment")]
    #[x_kube(validation = (
        "!self.exists(env, env.name.matches('^ETCD_(EXPERIMENTAL_)?(NAME|DATA_DIR|WAL_DIR|CONFIG_FILE|FORCE_NEW_CLUSTER|INITIAL_[A-Z0-9_]*|LISTEN_[A-Z0-9_]*|ADVERTISE_CLIENT_URLS|DISCOVERY[A-Z0-9_]*|(PEER_)?(CERT_FILE|KEY_FILE|TRUSTED_CA_FILE|CLIENT_CERT_AUTH|AUTO_TLS)|PEER_SKIP_CLIENT_SAN_VERIFICATION|MAX_LEARNERS|VERSION)$'))",
        "spec.pod.etcdEnv may not set names, addresses, directories, discovery, TLS or membership of etcd, which the operator manages: remove that variable"
    ))]
    pub etcd_env: Vec<EnvVar>,
    /// Flags of etcd, one in each item, such as `--log-level=debug`. The API server rejects flags that the operator
    /// sets.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(length(max = 64), inner(length(min = 3, max = 1024)))]
    #[x_kube(validation = (
        "self.all(arg, arg.matches('^--[a-z0-9-]+(=.*)?$'))",
        "each item of spec.pod.extraArgs must be one flag: write --flag=value"
    ))]
    #[x_kube(validation = (
        "!self.exists(arg, arg.matches('^--(experimental-)?(name|data-dir|wal-dir|config-file|force-new-cluster|initial-.*|listen-.*|advertise-client-urls|discovery.*|(peer-)?(cert-file|key-file|trusted-ca-file|client-cert-auth|auto-tls)|peer-skip-client-san-verification|max-learners|version)(=.*)?$'))",
        "spec.pod.extraArgs may not set names, addresses, directories, discovery, TLS or membership of etcd, which the operator manages: remove that flag"
    ))]
    #[x_kube(validation = (
        "!self.exists(arg, arg.matches('^--(experimental-)?(quota-backend-bytes|auto-compaction-mode|auto-compaction-retention|heartbeat-interval|election-timeout|snapshot-count|max-request-bytes|max-txn-ops)(=.*)?$'))",
        "spec.pod.extraArgs may not set a flag that has a field: use the field of spec.etcd"
    ))]
    pub extra_args: Vec<String>,
    /// Spec of the PersistentVolumeClaim of each member. If not set, members have no volumes and lose their data with
    /// their pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "embedded::<PersistentVolumeClaimSpec>")]
    #[x_kube(validation = (
        "has(self.resources) && has(self.resources.requests) && 'storage' in self.resources.requests",
        "spec.pod.persistentVolumeClaimSpec has no volume size: set resources.requests.storage"
    ))]
    pub persistent_volume_claim_spec: Option<PersistentVolumeClaimSpec>,
    /// Security context of the pods. If not set, pods run as user 65532, under the restricted Pod Security Standard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "embedded::<PodSecurityContext>")]
    pub security_context: Option<PodSecurityContext>,
    /// Security context of the etcd container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "embedded::<SecurityContext>")]
    pub container_security_context: Option<SecurityContext>,
    /// Secrets that the kubelet needs to pull images.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(schema_with = "embedded_list::<LocalObjectReference>")]
    pub image_pull_secrets: Vec<LocalObjectReference>,
    /// When the kubelet pulls the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<ImagePullPolicy>,
    /// Priority class of the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name")]
    pub priority_class_name: Option<String>,
    /// Service account of the pods. The operator mounts no token of it. To mount a token, use a projected volume in
    /// `volumes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name")]
    pub service_account_name: Option<String>,
    /// Scheduler of the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name")]
    pub scheduler_name: Option<String>,
    /// Runtime class of the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name")]
    pub runtime_class_name: Option<String>,
    /// Time limit in seconds for a pod to stop, after which Kubernetes kills its processes. The default is 2, or 30 if
    /// `sidecars` or `initContainers` are set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub termination_grace_period_seconds: Option<i64>,
    /// Additional volumes of the pods.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(schema_with = "embedded_list::<Volume>")]
    #[x_kube(validation = (
        "self.all(volume, !(volume.name in ['etcd-data', 'tools']))",
        "spec.pod.volumes may not be named etcd-data or tools, which the operator reserves: choose another name"
    ))]
    pub volumes: Vec<Volume>,
    /// Additional mounts of the etcd container.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(schema_with = "embedded_list::<VolumeMount>")]
    #[x_kube(validation = (
        "self.all(mount, !mount.mountPath.startsWith('/var/etcd'))",
        "spec.pod.volumeMounts may not be below /var/etcd, where etcd keeps its data: choose another mountPath"
    ))]
    pub volume_mounts: Vec<VolumeMount>,
    /// Containers that run before etcd.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(schema_with = "embedded_list::<Container>")]
    #[x_kube(validation = (
        "self.all(container, !(container.name in ['etcd', 'fetch', 'restore']))",
        "spec.pod.initContainers may not be named etcd, fetch or restore, which the operator reserves: choose another name"
    ))]
    pub init_containers: Vec<Container>,
    /// Containers that run next to etcd in the pod.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(schema_with = "embedded_list::<Container>")]
    #[x_kube(validation = (
        "self.all(container, !(container.name in ['etcd', 'fetch', 'restore']))",
        "spec.pod.sidecars may not be named etcd, fetch or restore, which the operator reserves: choose another name"
    ))]
    pub sidecars: Vec<Container>,
    /// Domain of the Kubernetes cluster, such as `.cluster.local`. The operator appends it to the host names of
    /// members, after `svc`.
    #[serde(
        default,
        rename = "ClusterDomain",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(length(max = 128))]
    #[x_kube(validation = (
        "self.matches('^(\\\\.?[a-z0-9]([-a-z0-9]*[a-z0-9])?)*\\\\.?$')",
        "spec.pod.ClusterDomain must be a domain such as .cluster.local: use lowercase letters, digits, dashes and dots"
    ))]
    pub cluster_domain: Option<String>,
    /// Has no effect, because no container waits for DNS. The field exists for manifests of coreos/etcd-operator.
    #[serde(
        default,
        rename = "DNSTimeoutInSecond",
        skip_serializing_if = "Option::is_none"
    )]
    pub dns_timeout_in_second: Option<i64>,
    /// Has no effect, because the operator uses no busybox image. The field exists for manifests of
    /// coreos/etcd-operator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub busybox_image: Option<String>,
}
