//! `EtcdRestore`: a cluster brought back from a backup.

mod check;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use check::{not_in_effect, unreachable, unsafe_to_ignore, validate};

use crate::backup::Progress;
use crate::cluster::EtcdClusterSpec;
use crate::duration::DurationText;
use crate::schema::{is_false, object_name, open_object, readable_items, text_map};
use crate::storage::{
    AbsSource, Blocks, GcsSource, LocalSource, OssSource, PvcSource, S3Source, StorageBlock,
    StorageType,
};
use crate::text::text_enum;

text_enum! {
    /// Phase of a restore, derived from its conditions; for people.
    RestorePhase {
        /// Not begun.
        Pending = "Pending",
        /// The seed member's data is being fetched and verified.
        Preparing = "Preparing",
        /// The seed serves, and the cluster is handed over.
        Starting = "Starting",
        /// The cluster serves.
        Complete = "Complete",
        /// The restore has failed for good.
        Failed = "Failed",
    }
}

/// What is restored, from where, and into what.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "etcd.database.coreos.com",
    version = "v1beta2",
    kind = "EtcdRestore",
    plural = "etcdrestores",
    namespaced,
    doc = "EtcdRestore brings an etcd cluster back from a backup.",
    status = "EtcdRestoreStatus",
    derive = "PartialEq",
    printcolumn(
        name = "Cluster",
        type_ = "string",
        json_path = ".spec.etcdCluster.name"
    ),
    printcolumn(name = "Succeeded", type_ = "boolean", json_path = ".status.succeeded"),
    printcolumn(
        name = "State",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Complete\")].reason",
        description = "How far it is, or what is wrong: the reason of the condition Complete"
    ),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(
        name = "Revision",
        type_ = "integer",
        json_path = ".status.restoredRevision",
        description = "Revision the cluster was brought back to"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.reason",
        priority = 1
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "has(self.backup) != has(self.backupStorageType)",
    "spec must say which backup: give either spec.backup.name or spec.backupStorageType with its block"
))]
#[x_kube(validation = (
    "has(self.s3) == (has(self.backupStorageType) && self.backupStorageType == 'S3')",
    "the block s3 is given when backupStorageType is S3, and only then: make spec.s3 and spec.backupStorageType agree"
))]
#[x_kube(validation = (
    "has(self.abs) == (has(self.backupStorageType) && self.backupStorageType == 'ABS')",
    "the block abs is given when backupStorageType is ABS, and only then: make spec.abs and spec.backupStorageType agree"
))]
#[x_kube(validation = (
    "has(self.gcs) == (has(self.backupStorageType) && self.backupStorageType == 'GCS')",
    "the block gcs is given when backupStorageType is GCS, and only then: make spec.gcs and spec.backupStorageType agree"
))]
#[x_kube(validation = (
    "has(self.oss) == (has(self.backupStorageType) && self.backupStorageType == 'OSS')",
    "the block oss is given when backupStorageType is OSS, and only then: make spec.oss and spec.backupStorageType agree"
))]
#[x_kube(validation = (
    "has(self.pvc) == (has(self.backupStorageType) && self.backupStorageType == 'PVC')",
    "the block pvc is given when backupStorageType is PVC, and only then: make spec.pvc and spec.backupStorageType agree"
))]
#[x_kube(validation = (
    "has(self.local) == (has(self.backupStorageType) && self.backupStorageType == 'Local')",
    "the block local is given when backupStorageType is Local, and only then: make spec.local and spec.backupStorageType agree"
))]
#[x_kube(validation = (
    "(has(self.bumpRevision) && self.bumpRevision > 0) == (has(self.markCompacted) && self.markCompacted)",
    "spec.bumpRevision and spec.markCompacted go together, else watchers would miss that revisions were skipped: give both or neither"
))]
pub struct EtcdRestoreSpec {
    /// The EtcdCluster to bring back.
    pub etcd_cluster: RestoreTarget,
    /// The EtcdBackup to restore from, in place of `backupStorageType` and its block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<BackupReference>,
    /// Kind of store the backup lies in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_storage_type: Option<StorageType>,
    /// Place in S3, with `backupStorageType: S3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3Source>,
    /// Place in Azure Blob Storage, with `backupStorageType: ABS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abs: Option<AbsSource>,
    /// Place in Google Cloud Storage, with `backupStorageType: GCS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gcs: Option<GcsSource>,
    /// Place in Alibaba Cloud OSS, with `backupStorageType: OSS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oss: Option<OssSource>,
    /// Place on a volume, with `backupStorageType: PVC`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pvc: Option<PvcSource>,
    /// Place in the operator's directory, with `backupStorageType: Local`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<LocalSource>,
    /// Allow to replace a cluster that exists and has data. Without it such a restore is refused.
    #[serde(default, skip_serializing_if = "is_false")]
    pub overwrite: bool,
    /// With `overwrite`: how long the volumes of the cluster that was replaced are kept at least. Without it they go
    /// when the new cluster is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_old_data: Option<DurationText>,
    /// Revisions to skip, so that no client sees a revision twice. Needed where clients cache, such as
    /// Kubernetes. Goes with `markCompacted`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub bump_revision: Option<i64>,
    /// Mark what was skipped as compacted, so that watchers start afresh. Goes with `bumpRevision`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub mark_compacted: bool,
    /// Seconds after which a finished EtcdRestore is deleted. Without it the object stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub ttl_seconds_after_finished: Option<i32>,
}

/// The EtcdCluster to bring back, in the namespace of the restore.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RestoreTarget {
    /// Name of the EtcdCluster. The name of the EtcdRestore is free.
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = (
        "self.size() <= 52 && self.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "spec.etcdCluster.name must be a DNS-1035 label of at most 52 characters: use lower-case letters, digits and dashes, and begin with a letter"
    ))]
    pub name: String,
    /// The EtcdCluster to make where none exists. Without it the spec recorded beside the backup is used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<ClusterTemplate>,
}

/// An EtcdCluster to make.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClusterTemplate {
    /// Labels and annotations of the EtcdCluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<TemplateMetadata>,
    /// Spec of the EtcdCluster.
    pub spec: EtcdClusterSpec,
}

/// Labels and annotations of an EtcdCluster to make.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateMetadata {
    /// Labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "text_map")]
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "text_map")]
    pub annotations: BTreeMap<String, String>,
}

/// An EtcdBackup in the namespace of the restore.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BackupReference {
    /// Name of the EtcdBackup.
    #[schemars(schema_with = "object_name")]
    pub name: String,
    /// Take the newest of its backups that was complete by this time, of those its status lists. Without it the
    /// newest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<Time>,
}

/// What is known about an EtcdRestore.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdRestoreStatus {
    /// Generation of the spec this status was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Whether the cluster serves, at the backup's revision at least.
    #[serde(default)]
    pub succeeded: bool,
    /// Why the cluster does not serve, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// `Pending`, `Preparing`, `Starting`, `Complete` or `Failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub phase: Option<RestorePhase>,
    /// Revision the cluster was brought back to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored_revision: Option<i64>,
    /// Cluster ID of the restored cluster, in hexadecimal without leading zeros.
    #[serde(default, rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// The recorded intent of the restore: the seed member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<SeedStatus>,
    /// The backup it is made of, as it was found: written before anything is made of it, and not looked up again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<ChosenBackup>,
    /// The cluster that was there and is replaced, as it was when the restore began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces: Option<ReplacesStatus>,
    /// Why the restore over a cluster that was there was given up: before anything of that cluster was changed, or where
    /// the seed was lost with all it held after the old members had stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abandoned: Option<AbandonedStatus>,
    /// When the operator began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When the restore was done or had failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// How far the fetch is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// Conditions, one of each type.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// The seed member of a restore, written before anything is created.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SeedStatus {
    /// Name of the member.
    pub member: String,
    /// The new cluster token.
    pub token: String,
}

/// The backup a restore is made of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ChosenBackup {
    /// Where it lies, such as `s3://bucket/key`.
    pub location: String,
    /// The EtcdBackup it is of, with `spec.backup.name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd_backup: Option<String>,
    /// Revision it holds, as the manifest beside it says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd_revision: Option<i64>,
    /// Size of the stored object in bytes, where the operator can see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_size: Option<i64>,
    /// SHA-256 of the snapshot, in hexadecimal: as the manifest beside it says, or else as it was fetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// By how much its revisions are raised, with what is below marked as compacted; 0 if they are not raised.
    #[serde(default)]
    pub bump_revision: i64,
    /// Generation of the spec that chose it. Before anything is made of it, a changed spec chooses again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<i64>,
    /// The block of its storage type, under its name: with its own path, and with names of Secrets only.
    #[schemars(schema_with = "open_object")]
    pub source: StorageBlock,
}

/// The cluster a restore replaces.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplacesStatus {
    /// UID of the EtcdCluster, which it keeps.
    pub uid: String,
    /// Cluster ID, if the cluster was ever formed.
    #[serde(default, rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
}

/// Why a restore was given up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AbandonedStatus {
    /// The reason of the condition.
    pub reason: String,
    /// The same in words.
    pub message: String,
}

impl EtcdRestoreSpec {
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

impl EtcdRestore {
    /// The conditions of the status, or none.
    pub fn conditions(&self) -> &[Condition] {
        self.status
            .as_ref()
            .map_or(&[], |status| status.conditions.as_slice())
    }
}
