//! The settings and the results of verifications.

use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolumeClaimSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::duration::DurationText;
use crate::problem::Problem;
use crate::schema::{embedded, is_false, object_name};
use crate::storage::StorageType;

/// The default of `verification.timeoutSeconds`.
pub const DEFAULT_TIMEOUT_SECONDS: i32 = 1800;

/// The minimum of `verification.window.duration`. A shorter window could pass without a verification while the
/// operator is restarted.
const MIN_WINDOW: Duration = Duration::from_mins(5);

/// Settings of the verification, in which the operator restores the newest backup in a separate pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!has(self.timeZone) || has(self.schedule)",
    "verification.timeZone requires a schedule: add verification.schedule or remove timeZone"
))]
pub struct Verification {
    /// Schedule of the verifications: five cron fields, or one of `@hourly`, `@daily`, `@weekly`, `@monthly`,
    /// `@yearly`. Without a schedule, the operator verifies each new backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    #[x_kube(validation = (
        "self.matches('^(@(hourly|daily|weekly|monthly|yearly)|[^ =]+( [^ =]+){4})$')",
        "verification.schedule must have five cron fields such as 0 * * * *, or be @hourly, @daily, @weekly, @monthly \
         or @yearly: correct it, and set a time zone only in verification.timeZone"
    ))]
    pub schedule: Option<String>,
    /// Time zone of the schedule, such as `Europe/Berlin`. The default is `Etc/UTC`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub time_zone: Option<String>,
    /// Time window in which verifications may start. If not set, they may start at any time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<VerificationWindow>,
    /// If true, the verification does not wait for verifications of other EtcdBackups. If false, only one verification
    /// runs in the namespace at a time.
    #[serde(default, skip_serializing_if = "is_false")]
    pub allow_concurrent: bool,
    /// Time limit of one verification in seconds. The default is 1800.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 60, max = 172_800))]
    pub timeout_seconds: Option<i32>,
    /// Resources of the containers that restore the backup and run etcd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "embedded::<ResourceRequirements>")]
    pub resources: Option<ResourceRequirements>,
    /// Volume for the restored data. If not set, the pod uses an `emptyDir` without a size limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch: Option<Scratch>,
    /// Repository of the etcd image, without a tag. The default is `spec.image` of the EtcdCluster if it contains the
    /// version of the backup, else the repository of the EtcdCluster, or `quay.io/coreos/etcd` without an EtcdCluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    pub repository: Option<String>,
    /// Service account of the pod. Required for a store without a Secret, because the pod then reads the backup with
    /// its own cloud identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name")]
    pub service_account_name: Option<String>,
}

/// The time window in which verifications may start. A running verification continues after the end of the window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct VerificationWindow {
    /// Schedule of the start of the window: five cron fields, or one of `@hourly`, `@daily`, `@weekly`, `@monthly`,
    /// `@yearly`.
    #[schemars(length(max = 128))]
    #[x_kube(validation = (
        "self.matches('^(@(hourly|daily|weekly|monthly|yearly)|[^ =]+( [^ =]+){4})$')",
        "verification.window.schedule must have five cron fields such as 0 22 * * *, or be @hourly, @daily, @weekly, \
         @monthly or @yearly: correct it, and set a time zone only in verification.window.timeZone"
    ))]
    pub schedule: String,
    /// Time zone of this schedule, such as `Europe/Berlin`. The default is `Etc/UTC`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub time_zone: Option<String>,
    /// Length of the window, such as `6h`. The minimum is `5m`.
    #[x_kube(validation = (
        "duration(self) >= duration('5m')",
        "verification.window.duration must be at least 5m: raise it"
    ))]
    pub duration: DurationText,
}

/// The volume for the restored data, which is deleted with the pod. Its size should be twice the size of the database.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!(has(self.sizeLimit) && has(self.volumeClaim))",
    "verification.scratch may have sizeLimit or volumeClaim, not both: remove one"
))]
pub struct Scratch {
    /// Size limit of the `emptyDir`, such as `8Gi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "embedded::<Quantity>")]
    pub size_limit: Option<Quantity>,
    /// Spec of a generic ephemeral volume that replaces the `emptyDir`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "embedded::<PersistentVolumeClaimSpec>")]
    #[x_kube(validation = (
        "has(self.resources) && has(self.resources.requests) && 'storage' in self.resources.requests",
        "verification.scratch.volumeClaim has no volume size: set resources.requests.storage"
    ))]
    pub volume_claim: Option<PersistentVolumeClaimSpec>,
}

/// The last successful verification.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VerifiedBackup {
    /// Location of the backup, such as `s3://bucket/key`.
    pub location: String,
    /// Revision of the restored etcd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd_revision: Option<i64>,
    /// Number of keys in the restored etcd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<i64>,
    /// True if the number of keys equals the number in the manifest. False if the manifest has no number, or if leases
    /// expired before the comparison.
    #[serde(default)]
    pub keys_compared: bool,
    /// True if the hash of all keys (`HashKV`) equals the hash in the manifest. False if the manifest has no hash.
    #[serde(default)]
    pub hash_compared: bool,
    /// Time at which the backup completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_time: Option<Time>,
    /// Cluster ID of the backup, in hexadecimal without leading zeros.
    #[serde(default, rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// Time at which the verification completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
    /// Duration of the verification, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_seconds: Option<i64>,
}

/// The running verification, or the last failed verification, or a verification that waits for other verifications.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VerificationStatus {
    /// Location of the backup that is verified.
    pub location: String,
    /// Time at which the backup completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_time: Option<Time>,
    /// Cluster ID of the backup, in hexadecimal without leading zeros.
    #[serde(default, rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// Time since which a verification is due. It stays until a verification succeeds. A verification that waits for
    /// its window is not due.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub due_time: Option<Time>,
    /// Time at which the running attempt started. Not set between two attempts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// Number of failed attempts since the last successful verification.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failures: Option<i32>,
    /// Time at which the last failed attempt ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failure_time: Option<Time>,
}

impl Verification {
    /// The time limit of one verification, in seconds.
    pub fn timeout_seconds(&self) -> i32 {
        self.timeout_seconds
            .unwrap_or(DEFAULT_TIMEOUT_SECONDS)
            .clamp(60, 172_800)
    }

    /// The problems of the field. `prefix` is its path in the object.
    pub(crate) fn problems(&self, prefix: &str, storage_type: &StorageType) -> Vec<Problem> {
        let mut problems = Vec::new();
        if *storage_type == StorageType::Local {
            problems.push(Problem::new(
                prefix,
                "is set, but the storage type is Local, a directory of the backup operator, which no pod can mount",
                format!("remove {prefix}, or store the backups in a bucket or on a PVC"),
            ));
        }
        if self.time_zone.is_some() && self.schedule.is_none() {
            problems.push(Problem::new(
                format!("{prefix}.timeZone"),
                "is set without a schedule",
                format!("add {prefix}.schedule or remove timeZone"),
            ));
        }
        if let Some(window) = &self.window {
            problems.extend(window.problem(&format!("{prefix}.window.duration")));
        }
        let scratch = self.scratch.as_ref();
        if scratch
            .is_some_and(|scratch| scratch.size_limit.is_some() && scratch.volume_claim.is_some())
        {
            problems.push(Problem::new(
                format!("{prefix}.scratch.volumeClaim"),
                "is set together with sizeLimit",
                "remove one of the two fields",
            ));
        }
        problems
    }
}

impl VerificationWindow {
    /// The problem of the duration. `field` is its path in the object.
    fn problem(&self, field: &str) -> Option<Problem> {
        match self.duration.parse() {
            None => Problem::invalid_duration(field, Some(&self.duration)),
            Some(length) if length < MIN_WINDOW => Some(Problem::new(
                field,
                format!("is {:?}, which is shorter than 5m", self.duration.0),
                "use at least 5m",
            )),
            Some(_) => None,
        }
    }
}
