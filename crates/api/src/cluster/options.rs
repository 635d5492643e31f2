//! The smaller parts of `EtcdCluster.spec`.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::TYPED_FLAGS;
use crate::backup::{BackupPolicy, Compression};
use crate::duration::DurationText;
use crate::schema::{TextMap, is_false, text_map};
use crate::storage::{
    AbsSource, Blocks, GcsSource, LocalSource, OssSource, PvcSource, S3Source, StorageType,
};
use crate::text::text_enum;

text_enum! {
    /// How the first members are started.
    BootstrapMode {
        /// All first members together.
        Parallel = "Parallel",
        /// One seed member, then one by one.
        Seed = "Seed",
    }
}

#[allow(clippy::derivable_impls, reason = "the macro makes the enum")]
impl Default for BootstrapMode {
    fn default() -> Self {
        Self::Parallel
    }
}

text_enum! {
    /// How a member is reached by its peers and by clients.
    MemberAddress {
        /// Through a Service of its own: `<member>.<namespace>.svc`.
        Service = "Service",
        /// By its pod's name under the headless Service: `<member>.<cluster>.<namespace>.svc`.
        Pod = "Pod",
    }
}

text_enum! {
    /// Type of the client Service.
    ClientServiceType {
        /// Reached inside the Kubernetes cluster only.
        ClusterIp = "ClusterIP",
        /// Reached on a port of every node.
        NodePort = "NodePort",
        /// Reached through a load balancer.
        LoadBalancer = "LoadBalancer",
    }
}

text_enum! {
    /// What the operator may do when quorum is lost for good.
    RecoveryPolicy {
        /// Report, and wait for a person.
        Manual = "Manual",
        /// Go on from the most advanced survivor, and write down what was lost.
        Automatic = "Automatic",
    }
}

text_enum! {
    /// What etcd's automatic compaction goes by.
    AutoCompactionMode {
        /// By age.
        Periodic = "periodic",
        /// By number of revisions.
        Revision = "revision",
    }
}

/// The Services of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServicesPolicy {
    /// The Service clients use, `<cluster>-client`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<ClientServicePolicy>,
}

/// The Service clients use.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!has(self.nodePort) || (has(self.type) && self.type in ['NodePort', 'LoadBalancer'])",
    "spec.services.client.nodePort needs type NodePort or LoadBalancer: set the type or remove nodePort"
))]
#[x_kube(validation = (
    "!has(self.loadBalancerClass) || (has(self.type) && self.type == 'LoadBalancer')",
    "spec.services.client.loadBalancerClass needs type LoadBalancer: set the type or remove loadBalancerClass"
))]
pub struct ClientServicePolicy {
    /// Type of the Service; `ClusterIP` where it is not given.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<ClientServiceType>,
    /// Annotations of the Service.
    #[serde(default, skip_serializing_if = "TextMap::is_empty")]
    #[schemars(schema_with = "text_map")]
    pub annotations: TextMap,
    /// Class of the load balancer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub load_balancer_class: Option<String>,
    /// Addresses a load balancer lets in, as CIDRs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub load_balancer_source_ranges: Vec<String>,
    /// Port on the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub node_port: Option<i32>,
}

/// The PodDisruptionBudget of the voters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DisruptionBudgetPolicy {
    /// Whether there is one. It keeps a quorum of the voters.
    #[serde(default = "enabled")]
    pub enabled: bool,
}

fn enabled() -> bool {
    true
}

/// When a member that is down is replaced.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemberReplacement {
    /// How long a member may be down on a lost node, such as `60s` (the default) or `5m`, before it is replaced
    /// although its disk exists. So long, too, may a member fail to start for no known reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<DurationText>,
    /// How long the volume of a member is kept that someone else removed from etcd, such as `1h` (the default) or
    /// `24h`. It is kept longer until the cluster is at its size, healthy and compared. When a majority of the members
    /// was removed, the operator never deletes their volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_volumes: Option<DurationText>,
}

/// What happens when quorum is lost for good.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Recovery {
    /// Who decides: a person, by an annotation (`Manual`, where it is not given), or the operator (`Automatic`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<RecoveryPolicy>,
    /// How long quorum must have been lost, such as `60s` (the default) or `5m`, before `Automatic` acts, and
    /// before a recovery goes on without a survivor that does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<DurationText>,
}

/// Options of etcd itself. What is not given is left to etcd.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!has(self.autoCompactionMode) || has(self.autoCompactionRetention)",
    "spec.etcd.autoCompactionMode does nothing without a retention: set spec.etcd.autoCompactionRetention"
))]
#[x_kube(validation = (
    "!has(self.autoCompactionRetention) || (has(self.autoCompactionMode) && self.autoCompactionMode == 'revision' ? self.autoCompactionRetention.matches('^[0-9]+$') : self.autoCompactionRetention.matches('^([0-9]+|([0-9]+(ms|s|m|h))+)$'))",
    "spec.etcd.autoCompactionRetention must be a number of revisions in mode revision, and a duration such as 30m or a number of hours in mode periodic: change it or the mode"
))]
#[x_kube(validation = (
    "!has(self.electionTimeout) || [duration(has(self.heartbeatInterval) ? self.heartbeatInterval : '100ms')].all(beat, duration(self.electionTimeout) >= beat + beat + beat + beat + beat)",
    "spec.etcd.electionTimeout must be at least five times spec.etcd.heartbeatInterval (100ms where not given): raise the one or lower the other"
))]
pub struct EtcdOptions {
    /// Size of the database at which etcd raises the alarm NOSPACE, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1_048_576))]
    pub quota_backend_bytes: Option<i64>,
    /// What automatic compaction goes by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_compaction_mode: Option<AutoCompactionMode>,
    /// How much automatic compaction keeps: a duration such as `30m`, or a number of revisions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 32))]
    pub auto_compaction_retention: Option<String>,
    /// Time between heartbeats of the leader, such as `100ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heartbeat_interval: Option<DurationText>,
    /// Time without a heartbeat after which a member stands for election, such as `1s`; at most `50s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("duration(self) <= duration('50s')", "spec.etcd.electionTimeout must be at most 50s, which is etcd's own limit: lower it"))]
    pub election_timeout: Option<DurationText>,
    /// Committed transactions after which etcd writes a raft snapshot to disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub snapshot_count: Option<i64>,
    /// Largest request a client may send, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_request_bytes: Option<i64>,
}

impl EtcdOptions {
    /// The flags that the given options set, without dashes, each with its field. In the order of [`TYPED_FLAGS`].
    pub(super) fn given(&self) -> Vec<(&'static str, &'static str)> {
        let Self {
            quota_backend_bytes,
            auto_compaction_mode,
            auto_compaction_retention,
            heartbeat_interval,
            election_timeout,
            snapshot_count,
            max_request_bytes,
        } = self;
        let given = [
            (quota_backend_bytes.is_some(), "quotaBackendBytes"),
            (auto_compaction_mode.is_some(), "autoCompactionMode"),
            (
                auto_compaction_retention.is_some(),
                "autoCompactionRetention",
            ),
            (heartbeat_interval.is_some(), "heartbeatInterval"),
            (election_timeout.is_some(), "electionTimeout"),
            (snapshot_count.is_some(), "snapshotCount"),
            (max_request_bytes.is_some(), "maxRequestBytes"),
        ];
        let flags = TYPED_FLAGS.iter().copied().zip(given);
        flags
            .filter_map(|(flag, (given, field))| given.then_some((flag, field)))
            .collect()
    }
}

/// Where and how often a cluster is backed up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "has(self.s3) == (self.storageType == 'S3')",
    "the block s3 is given when storageType is S3, and only then: make spec.backup.s3 and spec.backup.storageType agree"
))]
#[x_kube(validation = (
    "has(self.abs) == (self.storageType == 'ABS')",
    "the block abs is given when storageType is ABS, and only then: make spec.backup.abs and spec.backup.storageType agree"
))]
#[x_kube(validation = (
    "has(self.gcs) == (self.storageType == 'GCS')",
    "the block gcs is given when storageType is GCS, and only then: make spec.backup.gcs and spec.backup.storageType agree"
))]
#[x_kube(validation = (
    "has(self.oss) == (self.storageType == 'OSS')",
    "the block oss is given when storageType is OSS, and only then: make spec.backup.oss and spec.backup.storageType agree"
))]
#[x_kube(validation = (
    "has(self.pvc) == (self.storageType == 'PVC')",
    "the block pvc is given when storageType is PVC, and only then: make spec.backup.pvc and spec.backup.storageType agree"
))]
#[x_kube(validation = (
    "has(self.local) == (self.storageType == 'Local')",
    "the block local is given when storageType is Local, and only then: make spec.backup.local and spec.backup.storageType agree"
))]
#[x_kube(validation = (
    "has(self.backupPolicy.schedule) || (has(self.backupPolicy.backupIntervalInSecond) && self.backupPolicy.backupIntervalInSecond > 0)",
    "spec.backup.backupPolicy must say when: set schedule or backupIntervalInSecond"
))]
pub struct ClusterBackup {
    /// When, and how much is kept.
    pub backup_policy: BackupPolicy,
    /// Kind of store.
    pub storage_type: StorageType,
    /// Place in S3, with `storageType: S3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3Source>,
    /// Place in Azure Blob Storage, with `storageType: ABS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abs: Option<AbsSource>,
    /// Place in Google Cloud Storage, with `storageType: GCS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gcs: Option<GcsSource>,
    /// Place in Alibaba Cloud OSS, with `storageType: OSS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oss: Option<OssSource>,
    /// Place on a volume, with `storageType: PVC`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pvc: Option<PvcSource>,
    /// Place in the operator's directory, with `storageType: Local`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<LocalSource>,
    /// How stored backups are compressed; `none` where it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compression>,
    /// Make no backups until it is false again.
    #[serde(default, skip_serializing_if = "is_false")]
    pub suspend: bool,
}

impl ClusterBackup {
    /// The storage blocks.
    pub fn blocks(&self) -> Blocks<'_> {
        Blocks {
            s3: self.s3.as_ref(),
            abs: self.abs.as_ref(),
            gcs: self.gcs.as_ref(),
            oss: self.oss.as_ref(),
            pvc: self.pvc.as_ref(),
            local: self.local.as_ref(),
        }
    }
}
