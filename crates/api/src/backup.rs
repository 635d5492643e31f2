//! `EtcdBackup`: one backup, or scheduled backups, of a cluster.

mod check;
mod columns;
mod continuous;
mod copy;
mod encryption;
pub mod name;
mod stored;
mod verification;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(crate) use check::unreadable_store;
pub use check::{not_in_effect, unsafe_to_ignore, validate};
pub use continuous::{Continuous, ContinuousBase, ContinuousGap, ContinuousStatus};
pub(crate) use copy::copy_problems;
pub use copy::{BackupCopy, CopyStatus, copied_block, name_suffix};
pub use encryption::{Encryption, EncryptionKey};
pub use stored::{Progress, StoredBackup};
pub use verification::{
    DEFAULT_TIMEOUT_SECONDS, Scratch, Verification, VerificationStatus, VerificationWindow,
    VerifiedBackup,
};

use crate::duration::DurationText;
use crate::schema::{
    given, is_false, null_as_empty, object_name, optional_object_name, readable_items,
};
use crate::storage::{
    AbsSource, Blocks, GcsSource, LocalSource, OssSource, PvcSource, S3Source, StorageType,
};
use crate::text::text_enum;

text_enum! {
    /// Compression of a stored backup.
    Compression {
        /// No compression.
        None = "none",
        /// Zstandard.
        Zstd = "zstd",
    }
}

text_enum! {
    /// What happens to the stored backups after the deletion of their EtcdBackup.
    DeletionPolicy {
        /// The operator keeps the stored backups.
        Retain = "Retain",
        /// The operator deletes the stored backups.
        Delete = "Delete",
    }
}

/// Desired state of an EtcdBackup.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "etcd.database.coreos.com",
    version = "v1beta2",
    kind = "EtcdBackup",
    plural = "etcdbackups",
    shortname = "etcdb",
    category = "etcds",
    namespaced,
    doc = "EtcdBackup describes one backup or periodic backups of an etcd cluster.",
    status = "EtcdBackupStatus",
    derive = "PartialEq",
    printcolumn(
        name = "Cluster",
        type_ = "string",
        json_path = ".status.cluster",
        description = "Name of the EtcdCluster, or host of the first endpoint"
    ),
    printcolumn(name = "Schedule", type_ = "string", json_path = ".status.schedule"),
    printcolumn(name = "Succeeded", type_ = "boolean", json_path = ".status.succeeded"),
    printcolumn(
        name = "State",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        description = "Reason of the condition Ready: the progress or the problem"
    ),
    printcolumn(
        name = "Last success",
        type_ = "date",
        json_path = ".status.lastSuccessDate"
    ),
    printcolumn(
        name = "Next",
        type_ = "string",
        json_path = ".status.nextBackupTime",
        description = "Time of the next backup"
    ),
    printcolumn(
        name = "Size",
        type_ = "string",
        json_path = ".status.sizeText",
        description = "Size of the newest snapshot"
    ),
    printcolumn(
        name = "Duration",
        type_ = "string",
        json_path = ".status.duration",
        description = "Duration of the newest backup"
    ),
    printcolumn(
        name = "Progress",
        type_ = "string",
        json_path = ".status.progress.text",
        description = "Progress of the running or the last backup",
        priority = 1
    ),
    printcolumn(
        name = "Revision",
        type_ = "integer",
        json_path = ".status.etcdRevision",
        description = "Revision of the newest backup",
        priority = 1
    ),
    printcolumn(
        name = "Storage",
        type_ = "string",
        json_path = ".spec.storageType",
        priority = 1
    ),
    printcolumn(
        name = "Location",
        type_ = "string",
        json_path = ".status.location",
        priority = 1
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.Reason",
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
    "(has(self.etcdEndpoints) && self.etcdEndpoints.size() > 0) != has(self.etcdCluster)",
    "spec must name the cluster to back up: set either spec.etcdEndpoints with at least one URL or spec.etcdCluster.name"
))]
#[x_kube(validation = (
    "has(self.s3) == (self.storageType == 'S3')",
    "the block s3 must be set if and only if storageType is S3: make spec.s3 and spec.storageType agree"
))]
#[x_kube(validation = (
    "has(self.abs) == (self.storageType == 'ABS')",
    "the block abs must be set if and only if storageType is ABS: make spec.abs and spec.storageType agree"
))]
#[x_kube(validation = (
    "has(self.gcs) == (self.storageType == 'GCS')",
    "the block gcs must be set if and only if storageType is GCS: make spec.gcs and spec.storageType agree"
))]
#[x_kube(validation = (
    "has(self.oss) == (self.storageType == 'OSS')",
    "the block oss must be set if and only if storageType is OSS: make spec.oss and spec.storageType agree"
))]
#[x_kube(validation = (
    "has(self.pvc) == (self.storageType == 'PVC')",
    "the block pvc must be set if and only if storageType is PVC: make spec.pvc and spec.storageType agree"
))]
#[x_kube(validation = (
    "has(self.local) == (self.storageType == 'Local')",
    "the block local must be set if and only if storageType is Local: make spec.local and spec.storageType agree"
))]
#[x_kube(validation = (
    "!has(self.verification) || self.storageType != 'Local'",
    "spec.verification is not possible for storageType Local, because no pod can mount the operator's directory: remove spec.verification, or use a bucket or a PVC"
))]
#[x_kube(validation = (
    "!has(self.copyTo) || self.copyTo.size() == 0 || self.storageType != 'PVC'",
    "spec.copyTo is not possible for storageType PVC, because the operator cannot read the volume: remove spec.copyTo, or use a bucket"
))]
#[x_kube(validation = (
    "!has(self.continuous) || self.storageType != 'Local'",
    "spec.continuous is not possible for storageType Local, because no pod can mount the operator's directory: remove spec.continuous, or use a bucket or a PVC"
))]
#[x_kube(validation = (
    "!has(self.continuous) || !has(self.ttlSecondsAfterFinished)",
    "spec.ttlSecondsAfterFinished would end the recording of spec.continuous: remove one of them"
))]
pub struct EtcdBackupSpec {
    /// Client URLs of the cluster to back up. One endpoint that responds is enough. An EtcdBackup outside of the
    /// operator's namespace may name endpoints of an EtcdCluster in its own namespace. An administrator must grant all
    /// other endpoints.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(length(max = 32), inner(length(max = 2048)))]
    #[x_kube(validation = (
        "self.all(endpoint, endpoint.size() > 0)",
        "spec.etcdEndpoints must not contain an empty URL: use URLs such as http://example-client:2379"
    ))]
    pub etcd_endpoints: Vec<String>,
    /// The EtcdCluster to back up. The EtcdCluster determines the endpoints, the TLS settings and the version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd_cluster: Option<ClusterReference>,
    /// Name of the Secret with the client certificate for `etcdEndpoints`. Its keys are `etcd-client.crt`,
    /// `etcd-client.key` and `etcd-client-ca.crt`.
    #[serde(
        default,
        rename = "clientTLSSecret",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(schema_with = "optional_object_name")]
    pub client_tls_secret: Option<String>,
    /// Name of the Secret with the keys `username` and `password` for `etcdEndpoints`. With this Secret, endpoints in
    /// other namespaces must be https URLs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name")]
    pub auth_secret: Option<String>,
    /// Schedule, time limit and retention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_policy: Option<BackupPolicy>,
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
    /// Compression of the stored backup. The default is `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compression>,
    /// Encryption of the stored backup, and of the bases and segments of `continuous`. Without this field, they are not
    /// encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<Encryption>,
    /// Settings of the verification. The operator restores the newest backup in a separate pod to prove that it can be
    /// restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verification: Option<Box<Verification>>,
    /// Continuous backup: an agent in a pod records all changes of the cluster. With `spec.continuous` of an
    /// EtcdRestore, each recorded revision can be restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub continuous: Option<Box<Continuous>>,
    /// Further stores to which each complete backup is copied, at most three. The blocks of a store have the same
    /// fields as those of the first store.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 3))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub copy_to: Vec<BackupCopy>,
    /// Seconds after which a completed or failed EtcdBackup is deleted. If not set, the EtcdBackup is kept. An
    /// EtcdBackup with a schedule or an interval never completes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub ttl_seconds_after_finished: Option<i32>,
    /// What happens to the stored backups after the deletion of this EtcdBackup. The default is `Retain`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deletion_policy: Option<DeletionPolicy>,
}

/// An EtcdCluster in the namespace of the object.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClusterReference {
    /// Name of the EtcdCluster.
    #[schemars(schema_with = "object_name")]
    pub name: String,
}

/// Schedule, time limit and retention of backups.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!(has(self.schedule) && has(self.backupIntervalInSecond) && self.backupIntervalInSecond > 0)",
    "backupPolicy may have schedule or backupIntervalInSecond, not both: remove one"
))]
#[x_kube(validation = (
    "!has(self.timeZone) || has(self.schedule)",
    "backupPolicy.timeZone requires a schedule: add backupPolicy.schedule or remove timeZone"
))]
pub struct BackupPolicy {
    /// Time limit of one backup in seconds. 0 means 48 hours, which is the maximum. If not set, the time limit depends
    /// on the size of the database.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self >= 0", "backupPolicy.timeoutInSecond may not be negative: use 0 for the maximum of 48 hours, or remove it"))]
    pub timeout_in_second: Option<i64>,
    /// Seconds between two backups. 0 means a single backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self >= 0", "backupPolicy.backupIntervalInSecond may not be negative: use 0 for one backup only"))]
    pub backup_interval_in_second: Option<i64>,
    /// Number of newest backups to keep. 0 means all backups. The field `retention` can keep more backups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self >= 0", "backupPolicy.maxBackups may not be negative: use 0 to keep all"))]
    pub max_backups: Option<i64>,
    /// Schedule of the backups: five cron fields, or one of `@hourly`, `@daily`, `@weekly`, `@monthly`,
    /// `@yearly`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    #[x_kube(validation = (
        "self.matches('^(@(hourly|daily|weekly|monthly|yearly)|[^ =]+( [^ =]+){4})$')",
        "backupPolicy.schedule must have five cron fields such as 0 * * * *, or be @hourly, @daily, @weekly, @monthly or @yearly: correct it, and set a time zone only in backupPolicy.timeZone"
    ))]
    pub schedule: Option<String>,
    /// Time zone of the schedule, such as `Europe/Berlin`. The default is `Etc/UTC`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub time_zone: Option<String>,
    /// Time limit in seconds to start a missed backup. After this time, the operator skips the backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub starting_deadline_seconds: Option<i64>,
    /// If true, the operator starts no new backups.
    #[serde(default, skip_serializing_if = "is_false")]
    pub suspend: bool,
    /// Maximum age of backups, such as `720h`. The operator deletes older backups even if another rule keeps them, but
    /// never the newest backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_age: Option<DurationText>,
    /// Numbers of hourly, daily, weekly and monthly backups to keep, in addition to the newest `maxBackups` backups.
    /// All times are in UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<Retention>,
}

/// Numbers of backups to keep. The operator keeps the newest backup of each hour, day, week and month, for the given
/// number of periods that have a backup.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Retention {
    /// Number of hours. The operator keeps the newest backup of each hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10000))]
    pub keep_hourly: Option<i32>,
    /// Number of days. The operator keeps the newest backup of each day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10000))]
    pub keep_daily: Option<i32>,
    /// Number of weeks. The operator keeps the newest backup of each week.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10000))]
    pub keep_weekly: Option<i32>,
    /// Number of months. The operator keeps the newest backup of each month.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10000))]
    pub keep_monthly: Option<i32>,
}

/// Observed state of an EtcdBackup.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdBackupStatus {
    /// Generation of the spec that the operator has processed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// True if the newest backup is complete.
    #[serde(default)]
    pub succeeded: bool,
    /// Reason why the newest backup is not complete.
    #[serde(default, rename = "Reason", skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Version of etcd that sent the newest backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd_version: Option<String>,
    /// Revision of the newest backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd_revision: Option<i64>,
    /// Number of keys in the newest backup. Not set if the operator does not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<i64>,
    /// Time at which the newest backup completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_success_date: Option<Time>,
    /// Location of the newest backup, such as `s3://bucket/key`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Size of the newest snapshot in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<i64>,
    /// Size of the newest snapshot as text, such as `1.2 GiB`. For display only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_text: Option<String>,
    /// Duration of the newest backup, such as `1m12s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration: Option<DurationText>,
    /// Name of the EtcdCluster in the spec, or the host of the first endpoint. For display only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// Schedule of the spec as text, such as `0 3 * * * Europe/Berlin` or `every 1h0m0s`. For display only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<String>,
    /// Time at which the next backup starts. Not set while a backup is due, waits or runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_backup_time: Option<Time>,
    /// SHA-256 of the newest snapshot, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// The key that encrypts the newest backup. Not set if the newest backup is not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption_key: Option<EncryptionKey>,
    /// Cluster ID of the newest backup, in hexadecimal without leading zeros.
    #[serde(default, rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// Time at which the operator started the newest backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// Time at which the newest backup completed or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Progress of the running or the last backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// Number of attempts at the current backup that have no result: the running attempt, and attempts that ended
    /// because the operator's process ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unfinished_attempts: Option<i32>,
    /// The last successful verification.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_verified: Option<VerifiedBackup>,
    /// The running verification, or the last failed verification, or a verification that waits for other
    /// verifications.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verification: Option<VerificationStatus>,
    /// The state of the continuous backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub continuous: Option<Box<ContinuousStatus>>,
    /// The copies, one for each entry of `spec.copyTo`.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub copies: Vec<CopyStatus>,
    /// The newest stored backups, at most ten, the newest first.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub backups: Vec<StoredBackup>,
    /// Conditions, one of each type.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

impl EtcdBackupSpec {
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

    /// The name of the Secret with the client certificate. `None` if the field is missing or empty.
    pub fn client_tls_secret(&self) -> Option<&str> {
        given(self.client_tls_secret.as_ref())
    }
}

impl EtcdBackup {
    /// The conditions in the status. Empty without a status.
    pub fn conditions(&self) -> &[Condition] {
        self.status
            .as_ref()
            .map_or(&[], |status| status.conditions.as_slice())
    }
}
