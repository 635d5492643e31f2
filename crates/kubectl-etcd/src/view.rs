//! The view of a cluster that `status` shows, from the status, the pods, and the responses of the members. Performs no
//! I/O.

mod build;
mod show;

use jiff::Timestamp;
use serde::Serialize;

pub use build::{Inputs, LiveAnswer, view};
pub use show::{details, list};

/// Everything that `status` shows about a cluster.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterView {
    /// Namespace of the EtcdCluster.
    pub namespace: String,
    /// Name of the EtcdCluster.
    pub name: String,
    /// The state of the cluster in one word, such as `Ready`.
    pub state: String,
    /// Whether the cluster matches its spec.
    pub ready: bool,
    /// Whether a quorum answers and the client Service has an endpoint.
    pub available: bool,
    /// Whether the status describes the current spec.
    pub up_to_date: bool,
    /// Cluster ID, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// Number of members in the spec.
    pub desired_members: i32,
    /// Number of healthy members.
    pub healthy_members: usize,
    /// Name of the leader.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
    /// Version that the members run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Version in the spec.
    pub desired_version: String,
    /// The source of the values in `members`.
    pub source: Source,
    /// Why the query of the members failed, or etcdctl's error about a member that did not respond. `None` if all
    /// members responded, or if the plugin did not query them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_problem: Option<String>,
    /// The members.
    pub members: Vec<MemberView>,
    /// Size of the database at which etcd rejects writes, in bytes.
    pub quota_bytes: u64,
    /// Alarms, as `TYPE on MEMBER`.
    pub alarms: Vec<String>,
    /// The certificate that expires first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate: Option<CertificateView>,
    /// The newest backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_backup: Option<BackupView>,
    /// The EtcdBackups of this cluster.
    pub backups: Vec<ScheduleView>,
    /// The operator's next step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_step: Option<String>,
    /// What the operator waits for before its next step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting_for: Option<String>,
    /// Conditions that report a problem or advice.
    pub problems: Vec<Problem>,
}

/// The source of the members' values: the members themselves, or the status of the EtcdCluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Source {
    /// The members have responded to the plugin.
    Members,
    /// The values come from the status that the operator has written.
    Status,
}

/// A member.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberView {
    /// Name of the member.
    pub name: String,
    /// Member ID, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `Leader`, `Voter` or `Learner`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// Whether the member serves requests. A queried member without a leader counts as unhealthy.
    pub healthy: bool,
    /// Version of etcd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Raft term.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub term: Option<u64>,
    /// Newest revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<u64>,
    /// Number of revisions by which the member is behind the member with the newest revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lag: Option<u64>,
    /// Index of the last entry in the Raft log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub raft_index: Option<u64>,
    /// Size of the database file in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub db_size: Option<u64>,
    /// Bytes of the database file that contain data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub db_size_in_use: Option<u64>,
    /// `Running`, `NotReady`, `Terminating`, or why the etcd container does not run.
    pub pod: String,
    /// Number of restarts of the etcd container.
    pub restarts: i32,
    /// Node of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Errors that the member reports.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
}

/// The certificate that expires first.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CertificateView {
    /// Name of the Secret.
    pub secret: String,
    /// Key in the Secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Time at which the certificate expires.
    pub not_after: Timestamp,
    /// The time until the certificate expires, if the operator warns that it expires soon. `None` without such a
    /// warning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_within: Option<String>,
}

/// A backup.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupView {
    /// Name of the EtcdBackup.
    pub name: String,
    /// Time at which the backup completed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<Timestamp>,
    /// Revision of the backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<i64>,
    /// Number of revisions that the cluster has made since the backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub behind: Option<i64>,
    /// Location of the backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
}

/// An EtcdBackup of this cluster, and its backups.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ScheduleView {
    /// Name of the EtcdBackup.
    pub name: String,
    /// Whether the EtcdBackup makes backups periodically.
    pub periodic: bool,
    /// Reason of the condition `Complete`.
    pub state: String,
    /// Whether the backup operator has compared the checksum of the stored backup with the checksum from etcd.
    pub verified: bool,
    /// Time of the newest backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_success: Option<Timestamp>,
    /// The backup operator's message about the next backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A condition that reports a problem or advice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// Type of the condition.
    pub condition: String,
    /// Reason of the condition.
    pub reason: String,
    /// Message of the condition, with the remedy.
    pub message: String,
    /// Whether the condition is only advice.
    pub advice: bool,
}
