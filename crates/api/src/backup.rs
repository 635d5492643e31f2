//! `EtcdBackup`: a backup of a cluster, once or again and again.

mod check;
pub mod name;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(crate) use check::store_problem;
pub use check::{not_in_effect, unsafe_to_ignore, validate};

use crate::duration::DurationText;
use crate::schema::{
    given, is_false, null_as_empty, object_name, optional_object_name, readable_items,
};
use crate::storage::{
    AbsSource, Blocks, GcsSource, LocalSource, OssSource, PvcSource, S3Source, StorageType,
};
use crate::text::text_enum;

text_enum! {
    /// How a stored backup is compressed.
    Compression {
        /// Not at all.
        None = "none",
        /// With Zstandard.
        Zstd = "zstd",
    }
}

text_enum! {
    /// What becomes of stored backups when their EtcdBackup is deleted.
    DeletionPolicy {
        /// They stay.
        Retain = "Retain",
        /// They are deleted.
        Delete = "Delete",
    }
}

/// What is backed up, when, and to where.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "etcd.database.coreos.com",
    version = "v1beta2",
    kind = "EtcdBackup",
    plural = "etcdbackups",
    namespaced,
    doc = "EtcdBackup is a backup of an etcd cluster, once or again and again.",
    status = "EtcdBackupStatus",
    derive = "PartialEq",
    printcolumn(name = "Storage", type_ = "string", json_path = ".spec.storageType"),
    printcolumn(name = "Succeeded", type_ = "boolean", json_path = ".status.succeeded"),
    printcolumn(
        name = "State",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Complete\")].reason",
        description = "How far it is, or what is wrong: the reason of the condition Complete"
    ),
    printcolumn(
        name = "Revision",
        type_ = "integer",
        json_path = ".status.etcdRevision",
        description = "Revision the newest backup holds"
    ),
    printcolumn(
        name = "Last success",
        type_ = "date",
        json_path = ".status.lastSuccessDate"
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
    "spec must say which cluster: give either spec.etcdEndpoints with at least one URL or spec.etcdCluster.name"
))]
#[x_kube(validation = (
    "has(self.s3) == (self.storageType == 'S3')",
    "the block s3 is given when storageType is S3, and only then: make spec.s3 and spec.storageType agree"
))]
#[x_kube(validation = (
    "has(self.abs) == (self.storageType == 'ABS')",
    "the block abs is given when storageType is ABS, and only then: make spec.abs and spec.storageType agree"
))]
#[x_kube(validation = (
    "has(self.gcs) == (self.storageType == 'GCS')",
    "the block gcs is given when storageType is GCS, and only then: make spec.gcs and spec.storageType agree"
))]
#[x_kube(validation = (
    "has(self.oss) == (self.storageType == 'OSS')",
    "the block oss is given when storageType is OSS, and only then: make spec.oss and spec.storageType agree"
))]
#[x_kube(validation = (
    "has(self.pvc) == (self.storageType == 'PVC')",
    "the block pvc is given when storageType is PVC, and only then: make spec.pvc and spec.storageType agree"
))]
#[x_kube(validation = (
    "has(self.local) == (self.storageType == 'Local')",
    "the block local is given when storageType is Local, and only then: make spec.local and spec.storageType agree"
))]
pub struct EtcdBackupSpec {
    /// Client URLs of the cluster to back up. One that answers is enough.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(length(max = 32), inner(length(max = 2048)))]
    #[x_kube(validation = (
        "self.all(endpoint, endpoint.size() > 0)",
        "spec.etcdEndpoints may not hold an empty text: give URLs such as http://example-client:2379"
    ))]
    pub etcd_endpoints: Vec<String>,
    /// The EtcdCluster to back up; endpoints, TLS and version come from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd_cluster: Option<ClusterReference>,
    /// Name of the Secret with the client certificate for `etcdEndpoints`: `etcd-client.crt`,
    /// `etcd-client.key` and `etcd-client-ca.crt`.
    #[serde(
        default,
        rename = "clientTLSSecret",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(schema_with = "optional_object_name")]
    pub client_tls_secret: Option<String>,
    /// Name of the Secret with `username` and `password` for `etcdEndpoints`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name")]
    pub auth_secret: Option<String>,
    /// When, how long, and how much is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_policy: Option<BackupPolicy>,
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
    /// How the stored backup is compressed; `none` where it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compression>,
    /// Seconds after which a finished EtcdBackup is deleted. Without it the object stays. One that is made again and
    /// again never finishes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub ttl_seconds_after_finished: Option<i32>,
    /// What becomes of the backups this EtcdBackup has stored when it is deleted; `Retain` where it is not given.
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

/// When backups are made, how long one may take, and how many are kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!(has(self.schedule) && has(self.backupIntervalInSecond) && self.backupIntervalInSecond > 0)",
    "backupPolicy may have schedule or backupIntervalInSecond, not both: remove one"
))]
#[x_kube(validation = (
    "!has(self.timeZone) || has(self.schedule)",
    "backupPolicy.timeZone is for a schedule: add backupPolicy.schedule or remove timeZone"
))]
pub struct BackupPolicy {
    /// Seconds a whole backup may take; 0 means as long as it needs. Where it is not given the limit grows
    /// with the database.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self >= 0", "backupPolicy.timeoutInSecond may not be negative: use 0 for no limit, or remove it"))]
    pub timeout_in_second: Option<i64>,
    /// Seconds between backups; 0 means one backup only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self >= 0", "backupPolicy.backupIntervalInSecond may not be negative: use 0 for one backup only"))]
    pub backup_interval_in_second: Option<i64>,
    /// Number of backups kept, beside those `retention` keeps; 0 means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self >= 0", "backupPolicy.maxBackups may not be negative: use 0 to keep all"))]
    pub max_backups: Option<i64>,
    /// When backups are made, as five cron fields or one of `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    #[x_kube(validation = (
        "self.matches('^(@(hourly|daily|weekly|monthly|yearly)|[^ =]+( [^ =]+){4})$')",
        "backupPolicy.schedule must have five cron fields such as 0 * * * *, or be @hourly, @daily, @weekly, @monthly or @yearly: name a time zone in backupPolicy.timeZone"
    ))]
    pub schedule: Option<String>,
    /// Time zone of the schedule, such as `Europe/Berlin`; `Etc/UTC` where it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub time_zone: Option<String>,
    /// Seconds after which a missed backup is not made up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub starting_deadline_seconds: Option<i64>,
    /// Make no new backups until it is false again.
    #[serde(default, skip_serializing_if = "is_false")]
    pub suspend: bool,
    /// Age after which a backup is deleted, such as `720h`, whatever else keeps it. The newest always stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_age: Option<DurationText>,
    /// How many backups are kept of each hour, day, week and month, in UTC, beside the newest `maxBackups`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<Retention>,
}

/// How many backups are kept: the newest of each of the last hours, days, weeks and months that have one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Retention {
    /// Hours of which the newest backup is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10000))]
    pub keep_hourly: Option<i32>,
    /// Days of which the newest backup is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10000))]
    pub keep_daily: Option<i32>,
    /// Weeks of which the newest backup is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10000))]
    pub keep_weekly: Option<i32>,
    /// Months of which the newest backup is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10000))]
    pub keep_monthly: Option<i32>,
}

/// What is known about an EtcdBackup.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdBackupStatus {
    /// Generation of the spec this status was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Whether the newest backup is complete.
    #[serde(default)]
    pub succeeded: bool,
    /// Why the newest backup is not complete, in words.
    #[serde(default, rename = "Reason", skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Version of the etcd server the newest backup came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd_version: Option<String>,
    /// Revision the newest backup holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd_revision: Option<i64>,
    /// When the newest backup was complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_success_date: Option<Time>,
    /// Where the newest backup lies, such as `s3://bucket/key`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Size of the snapshot in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<i64>,
    /// SHA-256 of the snapshot, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Cluster ID of the cluster it was taken of, in hexadecimal without leading zeros.
    #[serde(default, rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// When the operator began the newest backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When the newest backup was done or had failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// How far a running backup is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// How many attempts at the backup that is under way have begun and were not seen to end: the one that runs, and
    /// those that ended with their operator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unfinished_attempts: Option<i32>,
    /// The newest backups that are kept, newest first; at most ten.
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

/// How far a transfer is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// Bytes done.
    pub bytes: i64,
    /// Bytes in all, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<i64>,
}

/// A backup that is kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StoredBackup {
    /// Where it lies.
    pub location: String,
    /// Revision it holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd_revision: Option<i64>,
    /// Size of the snapshot in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<i64>,
    /// SHA-256 of the snapshot, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// When it was complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
}

impl EtcdBackupSpec {
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

    /// The Secret with the client certificate, if one is named.
    pub fn client_tls_secret(&self) -> Option<&str> {
        given(self.client_tls_secret.as_ref())
    }

    /// Whether backups are made again and again.
    pub fn is_periodic(&self) -> bool {
        self.backup_policy
            .as_ref()
            .is_some_and(BackupPolicy::is_periodic)
    }
}

impl BackupPolicy {
    /// Whether backups are made again and again.
    pub fn is_periodic(&self) -> bool {
        self.schedule.is_some()
            || self
                .backup_interval_in_second
                .is_some_and(|seconds| seconds > 0)
    }
}

impl S3Source {
    /// The Secret with the credentials, if one is named.
    pub fn aws_secret(&self) -> Option<&str> {
        given(self.aws_secret.as_ref())
    }

    /// The endpoint, if it is not AWS.
    pub fn endpoint(&self) -> Option<&str> {
        given(self.endpoint.as_ref())
    }
}

impl EtcdBackup {
    /// The conditions of the status, or none.
    pub fn conditions(&self) -> &[Condition] {
        self.status
            .as_ref()
            .map_or(&[], |status| status.conditions.as_slice())
    }
}
