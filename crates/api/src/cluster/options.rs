//! The smaller types of `EtcdCluster.spec`.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::TYPED_FLAGS;
use super::before_changes::{ClusterChange, change_list};
use crate::backup::{BackupCopy, BackupPolicy, Compression, Encryption, Verification};
use crate::duration::DurationText;
use crate::schema::{TextMap, is_false, text_map};
use crate::storage::{
    AbsSource, Blocks, GcsSource, LocalSource, OssSource, PvcSource, S3Source, StorageType,
};
use crate::text::text_enum;

text_enum! {
    /// How the first members start.
    BootstrapMode {
        /// All first members start at the same time.
        Parallel = "Parallel",
        /// One member starts first, and the other first members join one by one.
        Seed = "Seed",
    }
}

#[allow(clippy::derivable_impls, reason = "the macro declares the enum")]
impl Default for BootstrapMode {
    fn default() -> Self {
        Self::Parallel
    }
}

text_enum! {
    /// The host name of a member, for other members and clients.
    MemberAddress {
        /// The Service of the member: `<member>.<namespace>.svc`.
        Service = "Service",
        /// The name of the pod under the headless Service: `<member>.<cluster>.<namespace>.svc`.
        Pod = "Pod",
    }
}

text_enum! {
    /// Type of the client Service.
    ClientServiceType {
        /// Clients in the Kubernetes cluster can connect.
        ClusterIp = "ClusterIP",
        /// Clients can connect to a port of every node.
        NodePort = "NodePort",
        /// Clients can connect through a load balancer.
        LoadBalancer = "LoadBalancer",
    }
}

text_enum! {
    /// What happens to the data of the members when their EtcdCluster is deleted.
    ClusterDeletionPolicy {
        /// Kubernetes deletes the volumes.
        Delete = "Delete",
        /// The volumes stay. A new EtcdCluster of the same name continues the cluster.
        RetainVolumes = "RetainVolumes",
        /// Kubernetes deletes the volumes after a backup with the settings of `spec.backup`.
        BackupThenDelete = "BackupThenDelete",
    }
}

text_enum! {
    /// How a cluster is recovered after a permanent loss of the quorum.
    RecoveryPolicy {
        /// The operator reports the loss and waits for an approval.
        Manual = "Manual",
        /// The operator recovers the cluster from the survivor with the newest data, and records the lost members.
        Automatic = "Automatic",
    }
}

text_enum! {
    /// The criterion of etcd's automatic compaction.
    AutoCompactionMode {
        /// etcd compacts revisions that are older than the retention.
        Periodic = "periodic",
        /// etcd keeps the newest revisions, and compacts all older revisions. The retention is the number of revisions
        /// that etcd keeps.
        Revision = "revision",
    }
}

/// The Services of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServicesPolicy {
    /// The client Service, which is named `<cluster>-client`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<ClientServicePolicy>,
}

/// The client Service.
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
    /// Type of the Service. The default is `ClusterIP`.
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
    /// Address ranges (CIDRs) from which the load balancer accepts clients.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub load_balancer_source_ranges: Vec<String>,
    /// Port of the Service on the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub node_port: Option<i32>,
}

/// The PodDisruptionBudget of the voters, which protects their quorum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DisruptionBudgetPolicy {
    /// If false, the operator creates no PodDisruptionBudget.
    #[serde(default = "enabled")]
    pub enabled: bool,
}

fn enabled() -> bool {
    true
}

/// Settings for the replacement of members that are down.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemberReplacement {
    /// Time after which the operator replaces a member on a lost node, or a member that does not start for an unknown
    /// reason. The default is `60s`. The operator then replaces the member although its volume exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<DurationText>,
    /// Minimum time for which the operator keeps the volume of a member that a user or other software has removed from
    /// etcd. The default is `1h`. The operator keeps the volume longer while the cluster has too few members, is not
    /// healthy, or has not passed the data comparison. If a majority of members was removed, the operator never
    /// deletes their volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_volumes: Option<DurationText>,
}

/// Settings for the recovery after a permanent loss of the quorum.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Recovery {
    /// `Manual`: a user approves the recovery with an annotation. `Automatic`: the operator starts the recovery. The
    /// default is `Manual`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<RecoveryPolicy>,
    /// Time for which the quorum must be lost before `Automatic` starts a recovery. The default is `60s`. After an
    /// approval, the operator waits this time for members that have data but do not respond.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<DurationText>,
    /// Minimum time for which the operator keeps the volumes of the old members after a recovery. The default is `1h`.
    /// The operator keeps them longer while the new cluster has too few members or is not healthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_volumes: Option<DurationText>,
}

/// Options of etcd. If an option is not set, etcd uses its default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!has(self.autoCompactionMode) || has(self.autoCompactionRetention)",
    "spec.etcd.autoCompactionMode has no effect without a retention: set spec.etcd.autoCompactionRetention"
))]
#[x_kube(validation = (
    "!has(self.autoCompactionRetention) || (has(self.autoCompactionMode) && self.autoCompactionMode == 'revision' ? self.autoCompactionRetention.matches('^[0-9]+$') : self.autoCompactionRetention.matches('^([0-9]+|([0-9]+(ms|s|m|h))+)$'))",
    "spec.etcd.autoCompactionRetention does not match spec.etcd.autoCompactionMode: with the mode revision, set a \
     number of revisions; with the mode periodic (the default), set a duration such as 30m, or a number of hours"
))]
#[x_kube(validation = (
    "!has(self.electionTimeout) || [duration(has(self.heartbeatInterval) ? self.heartbeatInterval : '100ms')].all(beat, duration(self.electionTimeout) >= beat + beat + beat + beat + beat)",
    "spec.etcd.electionTimeout must be at least five times spec.etcd.heartbeatInterval (default 100ms): raise electionTimeout or lower heartbeatInterval"
))]
pub struct EtcdOptions {
    /// Maximum size of the database in bytes. When the database reaches it, etcd raises the alarm NOSPACE.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1_048_576))]
    pub quota_backend_bytes: Option<i64>,
    /// Criterion of the automatic compaction: age or number of revisions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_compaction_mode: Option<AutoCompactionMode>,
    /// Retention of the automatic compaction: a duration such as `30m`, or a number of revisions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 32))]
    pub auto_compaction_retention: Option<String>,
    /// Interval of the leader's heartbeats, such as `100ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heartbeat_interval: Option<DurationText>,
    /// Time without a heartbeat after which a member starts an election, such as `1s`. The maximum is `50s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("duration(self) <= duration('50s')", "spec.etcd.electionTimeout must be at most 50s, which is etcd's own limit: lower it"))]
    pub election_timeout: Option<DurationText>,
    /// Number of committed transactions after which etcd writes a Raft snapshot to disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub snapshot_count: Option<i64>,
    /// Maximum size of a client request, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_request_bytes: Option<i64>,
    /// Maximum number of operations in a transaction. The default is 128.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_txn_ops: Option<i64>,
}

/// An option of `spec.etcd` as a flag of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdFlag {
    /// The flag of etcd, without dashes.
    pub flag: &'static str,
    /// The name of the field in `spec.etcd`.
    pub field: &'static str,
    /// The value in etcd's unit.
    pub value: String,
}

impl EtcdOptions {
    /// The flags of all options in the spec, in the order of [`TYPED_FLAGS`]. Options with an invalid duration are
    /// omitted.
    pub fn flags(&self) -> Vec<EtcdFlag> {
        let Self {
            quota_backend_bytes,
            auto_compaction_mode,
            auto_compaction_retention,
            heartbeat_interval,
            election_timeout,
            snapshot_count,
            max_request_bytes,
            max_txn_ops,
        } = self;
        let number = |value: &Option<i64>| value.map(|value| value.to_string());
        let options = [
            ("quotaBackendBytes", number(quota_backend_bytes)),
            (
                "autoCompactionMode",
                auto_compaction_mode.as_ref().map(ToString::to_string),
            ),
            ("autoCompactionRetention", auto_compaction_retention.clone()),
            (
                "heartbeatInterval",
                heartbeat_interval.as_ref().and_then(milliseconds),
            ),
            (
                "electionTimeout",
                election_timeout.as_ref().and_then(milliseconds),
            ),
            ("snapshotCount", number(snapshot_count)),
            ("maxRequestBytes", number(max_request_bytes)),
            ("maxTxnOps", number(max_txn_ops)),
        ];
        let flags = TYPED_FLAGS.iter().zip(options);
        flags
            .filter_map(|(flag, (field, value))| value.map(|value| EtcdFlag { flag, field, value }))
            .collect()
    }
}

/// The duration in milliseconds, which is etcd's unit.
fn milliseconds(text: &DurationText) -> Option<String> {
    text.parse()
        .map(|duration| duration.as_millis().to_string())
}

/// Scheduled backups of a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "has(self.s3) == (self.storageType == 'S3')",
    "the block s3 must be set if and only if storageType is S3: make spec.backup.s3 and spec.backup.storageType agree"
))]
#[x_kube(validation = (
    "has(self.abs) == (self.storageType == 'ABS')",
    "the block abs must be set if and only if storageType is ABS: make spec.backup.abs and spec.backup.storageType agree"
))]
#[x_kube(validation = (
    "has(self.gcs) == (self.storageType == 'GCS')",
    "the block gcs must be set if and only if storageType is GCS: make spec.backup.gcs and spec.backup.storageType agree"
))]
#[x_kube(validation = (
    "has(self.oss) == (self.storageType == 'OSS')",
    "the block oss must be set if and only if storageType is OSS: make spec.backup.oss and spec.backup.storageType agree"
))]
#[x_kube(validation = (
    "has(self.pvc) == (self.storageType == 'PVC')",
    "the block pvc must be set if and only if storageType is PVC: make spec.backup.pvc and spec.backup.storageType agree"
))]
#[x_kube(validation = (
    "has(self.local) == (self.storageType == 'Local')",
    "the block local must be set if and only if storageType is Local: make spec.backup.local and spec.backup.storageType agree"
))]
#[x_kube(validation = (
    "!has(self.verification) || self.storageType != 'Local'",
    "spec.backup.verification is not possible for storageType Local, because no pod can mount the operator's directory: remove spec.backup.verification, or use a bucket or a PVC"
))]
#[x_kube(validation = (
    "!has(self.copyTo) || self.copyTo.size() == 0 || self.storageType != 'PVC'",
    "spec.backup.copyTo is not possible for storageType PVC, because the operator cannot read the volume: remove \
     spec.backup.copyTo, or use a bucket"
))]
#[x_kube(validation = (
    "!has(self.beforeChangesMaxAge) || (has(self.beforeChanges) && self.beforeChanges.size() > 0)",
    "spec.backup.beforeChangesMaxAge has no effect without spec.backup.beforeChanges: set beforeChanges or remove \
     beforeChangesMaxAge"
))]
#[x_kube(validation = (
    "has(self.backupPolicy.schedule) || (has(self.backupPolicy.backupIntervalInSecond) && self.backupPolicy.backupIntervalInSecond > 0)",
    "spec.backup.backupPolicy has no schedule or interval: set schedule or backupIntervalInSecond"
))]
pub struct ClusterBackup {
    /// Schedule and retention.
    pub backup_policy: BackupPolicy,
    /// Type of the store.
    pub storage_type: StorageType,
    /// Location in S3, with `storageType: S3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3Source>,
    /// Location in Azure Blob Storage, with `storageType: ABS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abs: Option<AbsSource>,
    /// Location in Google Cloud Storage, with `storageType: GCS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gcs: Option<GcsSource>,
    /// Location in Alibaba Cloud OSS, with `storageType: OSS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oss: Option<OssSource>,
    /// Location on a volume, with `storageType: PVC`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pvc: Option<PvcSource>,
    /// Location in the operator's directory, with `storageType: Local`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<LocalSource>,
    /// Compression of the stored backups. The default is `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compression>,
    /// Encryption of the stored backups. Without this field, backups are not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<Encryption>,
    /// Settings of the verification. The backup operator restores the newest backup in a separate pod to prove that it
    /// can be restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verification: Option<Box<Verification>>,
    /// Further stores to which each complete backup is copied, at most three. The blocks of a store have the same
    /// fields as those of the first store.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 3))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub copy_to: Vec<BackupCopy>,
    /// Changes that wait for a recent backup: `Upgrade`, `Recovery`, `Restore` and `Shrink`. Without this field, no
    /// change waits. Before an upgrade or a removal of members, the operator requests a backup. A recovery and a
    /// restore in place need an existing backup.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "change_list")]
    pub before_changes: Vec<ClusterChange>,
    /// Maximum age of the backup before a change, such as `15m`. The default is `1h`. The age is the time from the
    /// completion of the backup to the change or, for a recovery, to the loss of the quorum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before_changes_max_age: Option<DurationText>,
    /// If true, the backup operator starts no new backups of this cluster.
    #[serde(default, skip_serializing_if = "is_false")]
    pub suspend: bool,
}

impl ClusterBackup {
    /// The storage locations of the spec.
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
