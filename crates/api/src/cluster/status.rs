//! `EtcdCluster.status`: the observed state, and the few records that the operator cannot rebuild from etcd or the
//! pods.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::before_changes::{BeforeChangeStatus, LastBackup};
use super::peers::PeerStage;
use super::tls::{TlsPolicy, peers_of};
use super::upkeep::{AlarmStatus, DefragmentationStatus};
use crate::schema::{is_false, null_as_empty, readable_items};
use crate::text::text_enum;

text_enum! {
    /// Phase of a cluster, derived from its conditions. For display and for readers of v1beta2.
    ClusterPhase {
        /// The operator is starting the first members.
        Creating = "Creating",
        /// The first members have formed the cluster.
        Running = "Running",
        /// The operator is stopping the members, because `spec.hibernate` is set.
        Hibernating = "Hibernating",
        /// No member runs, because `spec.hibernate` is set. The operator keeps the volumes.
        Hibernated = "Hibernated",
        /// The spec is invalid. In coreos/etcd-operator, this phase was final. In this project, the phase ends when the
        /// spec is valid.
        Failed = "Failed",
    }
}

text_enum! {
    /// Role of a member.
    MemberRole {
        /// A voter that is the leader.
        Leader = "Leader",
        /// A voter that is not the leader.
        Voter = "Voter",
        /// A member without a vote.
        Learner = "Learner",
    }
}

text_enum! {
    /// Phase of a recovery from quorum loss.
    RecoveryPhase {
        /// The operator creates the first member of the new cluster from the survivor.
        InProgress = "InProgress",
        /// The new cluster is verified and recorded.
        Complete = "Complete",
        /// The recovery was abandoned: a quorum returned, or the survivor was lost.
        Cancelled = "Cancelled",
    }
}

text_enum! {
    /// How a recovery was approved.
    RecoveryApproval {
        /// A user set the annotation `etcd.database.coreos.com/recover`.
        Annotation = "Annotation",
        /// The spec contains `recovery.policy: Automatic`.
        Policy = "Policy",
    }
}

/// Observed state of an EtcdCluster. All fields can be rebuilt, except `bootstrap`, `clusterID`, `recovery`,
/// `staleApproval`, `replaced`, `defragmentation`, `raftLog`, `beforeChange` and `TLS`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdClusterStatus {
    /// Generation of the spec that this status is based on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// What the cluster is doing, in one word: `Ready`, or the reason why the condition `Ready` is false. During a
    /// version change, the word is followed by both versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// `Creating`, `Running`, `Hibernating`, `Hibernated` or `Failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub phase: Option<ClusterPhase>,
    /// Why the phase is `Failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether the operator changes nothing because `spec.paused` is set.
    #[serde(default, skip_serializing_if = "is_false")]
    pub control_paused: bool,
    /// Number of members in etcd's member list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<i32>,
    /// Number of the cluster's pods, for the scale subresource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Label selector of the pods, for the scale subresource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Names of the members by readiness.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub members: Option<MembersStatus>,
    /// Number of healthy members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub healthy_members: Option<i32>,
    /// Observed state of each member.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub member_details: Vec<MemberStatus>,
    /// Cluster ID as etcd reports it, in hexadecimal without leading zeros. The operator never bootstraps a
    /// cluster again that has a cluster ID.
    #[serde(default, rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// Name of the leader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
    /// The first members and the cluster token. The operator records them before it creates anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap: Option<BootstrapStatus>,
    /// The last recovery from quorum loss: the decision, recorded before the recovery began, and the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery: Option<RecoveryStatus>,
    /// Value of the annotation `etcd.database.coreos.com/recover` that was set while a quorum answered. This
    /// value approves nothing until the annotation is removed and set again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stale_approval: Option<String>,
    /// The cluster that the last restore with `overwrite` replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced: Option<ReplacedStatus>,
    /// The last defragmentation of members, recorded before each call to a member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defragmentation: Option<DefragmentationStatus>,
    /// The Raft log before an upgrade to etcd 3.7, recorded before the operator appends entries to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub raft_log: Option<RaftLogStatus>,
    /// The last upgrade or removal of members that had to wait for a backup, recorded before the change starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before_change: Option<BeforeChangeStatus>,
    /// The TLS that members are started with. During a switch, this is an intermediate state on the way to
    /// `spec.TLS`.
    #[serde(default, rename = "TLS", skip_serializing_if = "Option::is_none")]
    // Two operators write `status.TLS`. Each write must replace the whole record, so that no fields of both records are
    // merged.
    #[x_kube(merge_strategy = MapMerge::Atomic)]
    pub tls: Option<TlsStatus>,
    /// Alarms that etcd has raised.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub alarms: Vec<AlarmStatus>,
    /// The certificate that expires first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificates: Option<CertificatesStatus>,
    /// Running version of the members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_version: Option<String>,
    /// Target version of a version change in progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_version: Option<String>,
    /// Name of the client Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_name: Option<String>,
    /// Port of the client Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_port: Option<i32>,
    /// Next step of the operator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_step: Option<String>,
    /// Condition that the next step waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_for: Option<String>,
    /// The last ten kinds of problems, newest first. An entry stays after its problem has ended.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub last_errors: Vec<LastError>,
    /// The newest known backup of this cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_backup: Option<LastBackup>,
    /// The newest backup that counts for `spec.backup.beforeChanges`: a complete backup of this cluster ID that an
    /// EtcdBackup reports. With `spec.backup.verification`, a backup that is proven to restore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_for_changes: Option<LastBackup>,
    /// Conditions, one of each type.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// A problem in the history of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastError {
    /// Time at which the problem began. If it has occurred several times, the last of these times.
    pub time: Time,
    /// The reason of the condition `Degraded` at that time.
    pub reason: String,
    /// The message of the condition `Degraded` at that time.
    pub message: String,
    /// What the operator was about to do (`status.nextStep`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// How often the problem has begun.
    pub count: i32,
}

/// The Raft log before an upgrade to etcd 3.7. Each member first saves a snapshot of its log after this entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RaftLogStatus {
    /// ID of the cluster that this record belongs to.
    #[serde(rename = "clusterID")]
    pub cluster_id: String,
    /// Index of the last entry that an earlier release than etcd 3.6 may have written.
    pub index: i64,
    /// Checksum of the other two fields. The operator ignores an edited record, and records the newest entry again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<String>,
}

/// The TLS that members are started with, recorded before the first member starts with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TlsStatus {
    /// Token of the cluster that this record belongs to.
    pub token: String,
    /// Stage of encryption between peers: `Plain`, `PlainAndTls`, `TlsTwice` or `Tls`.
    pub peers: String,
    /// The `spec.TLS` that members are started with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<TlsPolicy>,
}

impl TlsStatus {
    /// The record for members that are started with `policy`.
    pub fn new(token: &str, policy: Option<&TlsPolicy>) -> Self {
        Self {
            token: token.to_owned(),
            peers: peers_of(policy).word().to_owned(),
            policy: policy.map(|policy| TlsPolicy {
                peer_stage: None,
                ..policy.clone()
            }),
        }
    }

    /// Whether the fields of the record are consistent. If a user has changed a single field, the whole record is
    /// invalid.
    pub fn is_consistent(&self) -> bool {
        *self == Self::new(&self.token, self.policy().as_ref())
    }

    /// The policy with which members are started, including the peer stage.
    pub fn policy(&self) -> Option<TlsPolicy> {
        let mut policy = self.policy.clone()?;
        let stages = PeerStage::ALL.into_iter();
        let stage = { stages }.find(|stage| stage.word() == self.peers);
        let between = [PeerStage::PlainAndTls, PeerStage::TlsTwice];
        policy.peer_stage = stage.filter(|stage| between.contains(stage));
        Some(policy)
    }
}

/// The certificate of a cluster that expires first. CA certificates are included.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CertificatesStatus {
    /// Name of the Secret with the certificate.
    pub secret: String,
    /// Key of the certificate in the Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// End of the validity of the certificate.
    pub not_after: Time,
    /// Remaining validity, if short: `30d`, `7d`, `1d` or `Expired`. For a generated certificate, only
    /// reported if its renewal is overdue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_within: Option<String>,
}

/// A recovery from quorum loss: a new cluster starts with the data of the most advanced survivor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RecoveryStatus {
    /// `InProgress`, `Complete` or `Cancelled`.
    #[schemars(with = "String")]
    pub phase: RecoveryPhase,
    /// `Annotation` or `Policy`: how the recovery was approved.
    #[schemars(with = "String")]
    pub approved_by: RecoveryApproval,
    /// Cluster ID of the cluster that lost its quorum.
    #[serde(rename = "fromClusterID")]
    pub from_cluster_id: String,
    /// Token of the cluster that lost its quorum, as in the annotations of its pods and PVCs.
    pub from_token: String,
    /// Member that provides the data of the new cluster.
    pub survivor: String,
    /// Revision of the survivor. Acknowledged writes after this revision may be missing in the new cluster.
    pub revision: i64,
    /// Members whose data is lost.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub lost_members: Vec<String>,
    /// Members that have data but did not answer in time. The recovery continued without them.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub silent_members: Vec<String>,
    /// First member of the new cluster.
    pub member: String,
    /// Token of the new cluster.
    pub token: String,
    /// Cluster ID of the new cluster. Set when the recovery is complete.
    #[serde(
        default,
        rename = "toClusterID",
        skip_serializing_if = "Option::is_none"
    )]
    pub to_cluster_id: Option<String>,
    /// Time at which the operator decided to start the recovery.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// Time at which the new cluster was recorded or the recovery was abandoned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// What was lost, or why the recovery was abandoned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The cluster that a restore replaced, recorded in one write with the ID and token of the new cluster.
/// Objects with any other token than the recorded one belong to an earlier cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplacedStatus {
    /// Name of the EtcdRestore.
    pub restore: String,
    /// Cluster ID of the replaced cluster, if it ever formed.
    #[serde(
        default,
        rename = "fromClusterID",
        skip_serializing_if = "Option::is_none"
    )]
    pub from_cluster_id: Option<String>,
    /// Members of the replaced cluster.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub members: Vec<String>,
    /// Time at which the restore replaced the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
    /// Earliest time at which the volumes of the replaced cluster are deleted. If not set, they are deleted when
    /// the new cluster is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_data_until: Option<Time>,
}

/// Names of the members by readiness of their pods.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MembersStatus {
    /// Members with a ready pod.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub ready: Vec<String>,
    /// Members without a ready pod.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub unready: Vec<String>,
}

/// Observed state of one member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemberStatus {
    /// Name of the member.
    pub name: String,
    /// Member ID as etcd reports it, in hexadecimal without leading zeros.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `Leader`, `Voter` or `Learner`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub role: Option<MemberRole>,
    /// Whether the member answered the last health check.
    #[serde(default)]
    pub healthy: bool,
    /// Running version of the member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Size of the database file in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub db_size: Option<i64>,
    /// Bytes of the database file in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub db_size_in_use: Option<i64>,
    /// Number of revisions that the member is behind the most advanced member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision_lag: Option<i64>,
    /// Node of the member's pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// Record of the bootstrap, written before anything is created.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BootstrapStatus {
    /// The cluster token.
    pub token: String,
    /// Names of the first members.
    #[serde(default, deserialize_with = "null_as_empty")]
    pub members: Vec<String>,
}
