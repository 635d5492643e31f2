//! `EtcdRestore`: restore of a cluster from a backup.

mod check;
mod continuous;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use check::{not_in_effect, unreachable, unsafe_to_ignore, validate};
pub use continuous::{ChosenPoint, RestoreContinuous, RestorePoint};

use crate::backup::{EncryptionKey, Progress};
use crate::cluster::EtcdClusterSpec;
use crate::duration::DurationText;
use crate::schema::{
    is_false, object_name, open_object, readable_items, text_map, without_descriptions_of_fields,
};
use crate::storage::{
    AbsSource, Blocks, GcsSource, LocalSource, OssSource, PvcSource, S3Source, StorageBlock,
    StorageSource, StorageType,
};
use crate::text::text_enum;

text_enum! {
    /// Phase of a restore, from its conditions. For display only.
    RestorePhase {
        /// The restore has not started.
        Pending = "Pending",
        /// The seed downloads and verifies the data.
        Preparing = "Preparing",
        /// The seed serves, and the restore operator hands the cluster over to the cluster operator.
        Starting = "Starting",
        /// The restored cluster serves clients.
        Complete = "Complete",
        /// The restore has failed, and the operator does not retry it.
        Failed = "Failed",
    }
}

/// Desired state of an EtcdRestore.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "etcd.database.coreos.com",
    version = "v1beta2",
    kind = "EtcdRestore",
    plural = "etcdrestores",
    shortname = "etcdr",
    category = "etcds",
    namespaced,
    doc = "EtcdRestore restores an etcd cluster from a backup.",
    status = "EtcdRestoreStatus",
    derive = "PartialEq",
    printcolumn(
        name = "Cluster",
        type_ = "string",
        json_path = ".spec.etcdCluster.name"
    ),
    printcolumn(
        name = "Source",
        type_ = "string",
        json_path = ".status.source",
        description = "EtcdBackup, or location in a store"
    ),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(
        name = "Progress",
        type_ = "string",
        json_path = ".status.progress.text",
        description = "Progress of the download or the replay"
    ),
    printcolumn(name = "Succeeded", type_ = "boolean", json_path = ".status.succeeded"),
    printcolumn(
        name = "State",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        description = "Reason of the condition Ready: the progress or the problem"
    ),
    printcolumn(
        name = "Revision",
        type_ = "integer",
        json_path = ".status.restoredRevision",
        description = "Revision that was restored",
        priority = 1
    ),
    printcolumn(
        name = "Location",
        type_ = "string",
        json_path = ".status.backup.location",
        priority = 1
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
    "spec must name the backup to restore: set either spec.backup.name or spec.backupStorageType with its block"
))]
#[x_kube(validation = (
    "has(self.s3) == (has(self.backupStorageType) && self.backupStorageType == 'S3')",
    "the block s3 must be set if and only if backupStorageType is S3: make spec.s3 and spec.backupStorageType agree"
))]
#[x_kube(validation = (
    "has(self.abs) == (has(self.backupStorageType) && self.backupStorageType == 'ABS')",
    "the block abs must be set if and only if backupStorageType is ABS: make spec.abs and spec.backupStorageType agree"
))]
#[x_kube(validation = (
    "has(self.gcs) == (has(self.backupStorageType) && self.backupStorageType == 'GCS')",
    "the block gcs must be set if and only if backupStorageType is GCS: make spec.gcs and spec.backupStorageType agree"
))]
#[x_kube(validation = (
    "has(self.oss) == (has(self.backupStorageType) && self.backupStorageType == 'OSS')",
    "the block oss must be set if and only if backupStorageType is OSS: make spec.oss and spec.backupStorageType agree"
))]
#[x_kube(validation = (
    "has(self.pvc) == (has(self.backupStorageType) && self.backupStorageType == 'PVC')",
    "the block pvc must be set if and only if backupStorageType is PVC: make spec.pvc and spec.backupStorageType agree"
))]
#[x_kube(validation = (
    "has(self.local) == (has(self.backupStorageType) && self.backupStorageType == 'Local')",
    "the block local must be set if and only if backupStorageType is Local: make spec.local and spec.backupStorageType agree"
))]
#[x_kube(validation = (
    "(has(self.bumpRevision) && self.bumpRevision > 0) == (has(self.markCompacted) && self.markCompacted)",
    "spec.bumpRevision and spec.markCompacted go together, because otherwise watchers do not notice the skipped revisions: set both or neither"
))]
#[x_kube(validation = (
    "!has(self.continuous) || !has(self.backup) || !has(self.backup.before)",
    "spec.backup.before is not possible with spec.continuous: remove it, and set the point in spec.continuous.at"
))]
#[x_kube(validation = (
    "!has(self.continuous) || !has(self.bumpRevision) || self.bumpRevision == 0",
    "spec.bumpRevision is not possible with spec.continuous, which restores exact revisions: remove one of them"
))]
#[x_kube(validation = (
    "!has(self.continuous) || !has(self.backupStorageType) || self.backupStorageType != 'Local'",
    "spec.continuous needs a bucket or a PVC: copy the recorded objects to a bucket, and name the bucket"
))]
pub struct EtcdRestoreSpec {
    /// The EtcdCluster to restore.
    pub etcd_cluster: RestoreTarget,
    /// The EtcdBackup whose backup is restored. Replaces `backupStorageType` and the location.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<BackupReference>,
    /// Type of the store with the backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_storage_type: Option<StorageType>,
    /// Location in S3, with `backupStorageType: S3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3Source>,
    /// Location in Azure Blob Storage, with `backupStorageType: ABS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abs: Option<AbsSource>,
    /// Location in Google Cloud Storage, with `backupStorageType: GCS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gcs: Option<GcsSource>,
    /// Location in Alibaba Cloud OSS, with `backupStorageType: OSS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oss: Option<OssSource>,
    /// Location on a volume, with `backupStorageType: PVC`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pvc: Option<PvcSource>,
    /// Location in the operator's directory, with `backupStorageType: Local`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<LocalSource>,
    /// Restore of an exact point from recorded changes, instead of a backup. The source is the EtcdBackup in
    /// `backup.name`, which has recorded the changes, or the directory of the recorded changes in the storage block.
    /// This directory is `status.continuous.location` of the EtcdBackup without the last slash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub continuous: Option<RestoreContinuous>,
    /// Secret with the keys of an encrypted backup. If set, the operator rejects a backup without encryption. With
    /// `backup`, the default is the Secret of the EtcdBackup, unless its status records a backup without encryption.
    /// With `continuous`, recorded changes without encryption are rejected too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<RestoreEncryption>,
    /// If true, the restore may replace an existing cluster with data. If false, the operator rejects such a restore.
    #[serde(default, skip_serializing_if = "is_false")]
    pub overwrite: bool,
    /// Minimum time for which the volumes of the replaced cluster are kept, with `overwrite`. If not set, they are
    /// deleted when the new cluster is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_old_data: Option<DurationText>,
    /// Number of revisions to skip, so that no revision has two different contents. Required if clients cache keys,
    /// like Kubernetes. Set it together with `markCompacted`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub bump_revision: Option<i64>,
    /// If true, the skipped revisions are marked as compacted, so that watchers start again. Set it together with
    /// `bumpRevision`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub mark_compacted: bool,
    /// Seconds after which a completed or failed EtcdRestore is deleted. If not set, the EtcdRestore is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub ttl_seconds_after_finished: Option<i32>,
}

/// The EtcdCluster to restore, in the namespace of the EtcdRestore.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RestoreTarget {
    /// Name of the EtcdCluster, which may differ from the name of the EtcdRestore.
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = (
        "self.size() <= 52 && self.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "spec.etcdCluster.name must be a DNS-1035 label of at most 52 characters: use lowercase letters, digits and dashes, and begin with a letter"
    ))]
    pub name: String,
    /// The EtcdCluster that is created if it does not exist. If not set, the operator uses the spec in the manifest of
    /// the backup, but rejects a spec that runs other programs or accesses the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<ClusterTemplate>,
}

/// An EtcdCluster that a restore creates.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClusterTemplate {
    /// Labels and annotations of the EtcdCluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<TemplateMetadata>,
    /// Spec of the EtcdCluster. `kubectl explain etcdcluster.spec` describes the fields.
    #[schemars(transform = without_descriptions_of_fields)]
    pub spec: EtcdClusterSpec,
}

/// Labels and annotations of the EtcdCluster.
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

/// An EtcdBackup in the namespace of the EtcdRestore.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BackupReference {
    /// Name of the EtcdBackup.
    #[schemars(schema_with = "object_name")]
    pub name: String,
    /// The operator restores the newest backup that completed at this time or earlier. It considers only the backups
    /// in the status of the EtcdBackup. If not set, the operator restores the newest backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<Time>,
}

/// Secret with the keys of an encrypted backup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RestoreEncryption {
    /// Name of the Secret with the keys, in the namespace of the EtcdRestore. The operator selects the key by its ID.
    #[schemars(schema_with = "object_name")]
    pub secret: String,
}

/// Observed state of an EtcdRestore.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdRestoreStatus {
    /// Generation of the spec that the operator has processed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// True if the cluster serves clients and has at least the revision of the backup.
    #[serde(default)]
    pub succeeded: bool,
    /// Reason why the cluster does not serve clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Phase of the restore: `Pending`, `Preparing`, `Starting`, `Complete` or `Failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub phase: Option<RestorePhase>,
    /// Name of the EtcdBackup, or location in a store. For display only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Revision of the restored cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored_revision: Option<i64>,
    /// Cluster ID of the restored cluster, in hexadecimal without leading zeros.
    #[serde(default, rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// The member that restores the backup, called the seed. The operator records it before it creates the seed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<SeedStatus>,
    /// The backup that is restored. The operator records it before it creates other objects, and then always uses this
    /// backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<ChosenBackup>,
    /// The cluster that the restore replaces, recorded when the restore starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces: Option<ReplacesStatus>,
    /// Why a restore in place has failed: because of a problem before the operator changed the cluster, or because the
    /// seed was lost after the old members had stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abandoned: Option<AbandonedStatus>,
    /// Time at which the operator started the restore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// Time at which the restore completed or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Progress of the download, and then of the replay of recorded changes.
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

/// The member that restores the backup, called the seed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SeedStatus {
    /// Name of the seed.
    pub member: String,
    /// Cluster token of the new cluster.
    pub token: String,
}

/// The backup that is restored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ChosenBackup {
    /// Location, such as `s3://bucket/key`.
    pub location: String,
    /// Name of the EtcdBackup. Set only with `spec.backup`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd_backup: Option<String>,
    /// Revision in the manifest of the backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd_revision: Option<i64>,
    /// Size of the stored object in bytes. Not set if the operator cannot read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_size: Option<i64>,
    /// SHA-256 of the snapshot, in hexadecimal. It comes from the status of the EtcdBackup, or from the manifest, or
    /// from the download.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Secret with the keys of the backup. If set, the restore rejects a backup without encryption. Not set if the
    /// restore expects a backup without encryption.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<RestoreEncryption>,
    /// The key that encrypts the backup, from the status of the EtcdBackup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption_key: Option<EncryptionKey>,
    /// Set only with `spec.continuous`: the point that is restored. The backup in this status is then the base, which
    /// is the snapshot before the recorded changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub continuous: Option<ChosenPoint>,
    /// Number of revisions that are skipped and marked as compacted. 0 means none.
    #[serde(default)]
    pub bump_revision: i64,
    /// Generation of the spec that selected the backup. If the spec changes before the operator creates objects, the
    /// operator selects the backup again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<i64>,
    /// The copy that is restored, because the backup cannot be read in the first store of the EtcdBackup. Not set if
    /// the backup in the first store is restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<ChosenCopy>,
    /// The location of the backup, such as `s3` with its path. It names Secrets, but contains no credentials.
    #[schemars(schema_with = "open_object")]
    pub source: StorageBlock,
}

/// The copy of a backup that is restored.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ChosenCopy {
    /// Name of the copy in `spec.copyTo` of the EtcdBackup.
    pub name: String,
    /// Why the backup in the first store is not restored.
    pub reason: String,
}

/// The cluster that a restore replaces.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplacesStatus {
    /// UID of the EtcdCluster, which stays the same.
    pub uid: String,
    /// Cluster ID of the replaced cluster. Not set if the cluster never formed.
    #[serde(default, rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
}

/// Why a restore in place has failed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AbandonedStatus {
    /// Reason of the condition `Failed`.
    pub reason: String,
    /// Message of the condition `Failed`.
    pub message: String,
}

impl EtcdRestoreSpec {
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

    /// The EtcdBackup, or the type of the store with the path, for the column. `None` if the spec is invalid.
    pub fn source_text(&self) -> Option<String> {
        if let Some(backup) = &self.backup {
            return Some(format!("EtcdBackup {}", backup.name));
        }
        let kind = self.backup_storage_type.as_ref()?;
        let source = self
            .blocks()
            .select(kind, "spec", "backupStorageType")
            .ok()?;
        let path = source.path();
        Some(match source {
            StorageSource::Pvc(pvc) => format!("{kind} {}/{path}", pvc.claim_name),
            _ => format!("{kind} {path}"),
        })
    }
}

impl EtcdRestoreStatus {
    /// The status without the fields for display, which an API server with older CRDs does not store.
    #[must_use]
    pub fn without_display(&self) -> Self {
        Self {
            source: None,
            progress: self.progress.as_ref().map(Progress::without_text),
            ..self.clone()
        }
    }
}

impl EtcdRestore {
    /// The conditions in the status. Empty without a status.
    pub fn conditions(&self) -> &[Condition] {
        self.status
            .as_ref()
            .map_or(&[], |status| status.conditions.as_slice())
    }
}

#[cfg(test)]
mod tests;
