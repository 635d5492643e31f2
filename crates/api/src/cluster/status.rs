//! `EtcdCluster.status`: the observed state, and data that the operator cannot read from etcd or from pods.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::before_changes::{BackupRequestStatus, BeforeChangeStatus, LastBackup};
use super::peers::PeerStage;
use super::tls::{TlsPolicy, peers_of};
use super::upkeep::{AlarmStatus, DefragmentationStatus};
use crate::schema::{is_false, null_as_empty, readable_items};
use crate::text::text_enum;

text_enum! {
    /// Phase of a cluster, from its conditions. For display, and for programs that read v1beta2.
    ClusterPhase {
        /// The operator is starting the first members.
        Creating = "Creating",
        /// The first members have formed the cluster.
        Running = "Running",
        /// `spec.hibernate` is true, and the operator is stopping the members.
        Hibernating = "Hibernating",
        /// `spec.hibernate` is true, and no member runs. The volumes are kept.
        Hibernated = "Hibernated",
        /// The spec is invalid. The phase ends when the spec is valid. In coreos/etcd-operator, it never ended.
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
    /// Phase of a recovery from a lost quorum.
    RecoveryPhase {
        /// The operator creates the first member of the new cluster with the survivor's data.
        InProgress = "InProgress",
        /// The operator has verified and recorded the new cluster.
        Complete = "Complete",
        /// The operator has canceled the recovery, because a quorum returned or the survivor was lost.
        Cancelled = "Cancelled",
    }
}

text_enum! {
    /// How a recovery was approved.
    RecoveryApproval {
        /// A user has set the annotation `etcd.database.coreos.com/recover`.
        Annotation = "Annotation",
        /// The spec has `recovery.policy: Automatic`.
        Policy = "Policy",
    }
}

/// Observed state of an EtcdCluster. The operator can rebuild all fields except `bootstrap`, `clusterID`, `recovery`,
/// `staleApproval`, `replaced`, `defragmentation`, `raftLog`, `beforeChange` and `TLS`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdClusterStatus {
    /// Generation of the spec that the operator has processed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`, or the reason why the condition `Ready` is False. During a change of the etcd version, also both
    /// versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// Phase of the cluster: `Creating`, `Running`, `Hibernating`, `Hibernated` or `Failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub phase: Option<ClusterPhase>,
    /// Reason why the phase is `Failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// True if `spec.paused` is set, so that the operator does not change the cluster.
    #[serde(default, skip_serializing_if = "is_false")]
    pub control_paused: bool,
    /// Number of members in etcd's member list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<i32>,
    /// Number of pods of the members, for the scale subresource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Label selector of the pods, for the scale subresource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Names of the members with and without a ready pod.
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
    /// Cluster ID of etcd, in hexadecimal without leading zeros. The operator never bootstraps a cluster that has a
    /// cluster ID.
    #[serde(default, rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// Name of the leader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
    /// The first members and the cluster token. The operator records them before it creates other objects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap: Option<BootstrapStatus>,
    /// The last recovery from a lost quorum. The operator records it before it starts the recovery.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery: Option<RecoveryStatus>,
    /// Value of the annotation `etcd.database.coreos.com/recover` that was set while the cluster had a quorum. This
    /// value approves no recovery until a user removes the annotation and sets it again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stale_approval: Option<String>,
    /// The cluster that the last restore with `overwrite` has replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced: Option<ReplacedStatus>,
    /// The last defragmentation of members. The operator updates it before each request to a member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defragmentation: Option<DefragmentationStatus>,
    /// The Raft log before an upgrade to etcd 3.7. The operator records it before it appends entries to the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub raft_log: Option<RaftLogStatus>,
    /// The last upgrade, removal of members or deletion that waited for a backup. The operator records it before the
    /// change starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before_change: Option<BeforeChangeStatus>,
    /// The TLS settings of the members. During a switch of TLS, they differ from `spec.TLS`.
    #[serde(default, rename = "TLS", skip_serializing_if = "Option::is_none")]
    // The cluster operator and the restore operator write `status.TLS`. Because the field is atomic, a write replaces
    // the whole value, so the value never contains fields of both operators.
    #[x_kube(merge_strategy = MapMerge::Atomic)]
    pub tls: Option<TlsStatus>,
    /// Active alarms of etcd.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub alarms: Vec<AlarmStatus>,
    /// The certificate that expires first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificates: Option<CertificatesStatus>,
    /// Version of etcd that the members run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_version: Option<String>,
    /// Target of a change of the etcd version. Not set if no change is in progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_version: Option<String>,
    /// Name of the client Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_name: Option<String>,
    /// Port of the client Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_port: Option<i32>,
    /// What the operator does next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_step: Option<String>,
    /// What the next step waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_for: Option<String>,
    /// The last ten kinds of problems, the newest first. An entry stays after its problem has ended.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub last_errors: Vec<LastError>,
    /// The newest known backup of this cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_backup: Option<LastBackup>,
    /// The newest backup that counts for `spec.backup.beforeChanges` and for `spec.deletionPolicy: BackupThenDelete`:
    /// complete, of this cluster ID, and in the status of an EtcdBackup. With `spec.backup.verification`, it must also
    /// be verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_for_changes: Option<LastBackup>,
    /// The state of the backup that `beforeChange` requests, as the backup operator reports it. Not set if no change
    /// waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_request: Option<BackupRequestStatus>,
    /// Conditions, one of each type.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// A kind of problem that the cluster has or had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastError {
    /// Time at which the problem last began.
    pub time: Time,
    /// Reason of the condition `Degraded` at that time.
    pub reason: String,
    /// Message of the condition `Degraded` at that time.
    pub message: String,
    /// Value of `status.nextStep` at that time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// Number of times that the problem has begun.
    pub count: i32,
}

/// The Raft log before an upgrade to etcd 3.7. Before the upgrade, each member must save a Raft snapshot that is newer
/// than `index`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RaftLogStatus {
    /// Cluster ID of the Raft log.
    #[serde(rename = "clusterID")]
    pub cluster_id: String,
    /// Index of the last entry that a release before etcd 3.6 may have written.
    pub index: i64,
    /// Checksum of `clusterID` and `index`. If a user has edited a field, the operator records the Raft log again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<String>,
}

/// The TLS settings of the members. The operator records them before it starts a member with them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TlsStatus {
    /// Cluster token of the members with these settings.
    pub token: String,
    /// Stage of TLS between members: `Plain`, `PlainAndTls`, `TlsTwice` or `Tls`.
    pub peers: String,
    /// Value of `spec.TLS` for these members. Not set without TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<TlsPolicy>,
}

impl TlsStatus {
    /// The status for members that start with `policy`.
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

    /// True if the fields are consistent. If a user has changed a single field, the operator ignores all of them.
    pub fn is_consistent(&self) -> bool {
        *self == Self::new(&self.token, self.policy().as_ref())
    }

    /// The policy of the members, including their stage of TLS.
    pub fn policy(&self) -> Option<TlsPolicy> {
        let mut policy = self.policy.clone()?;
        let stages = PeerStage::ALL.into_iter();
        let stage = { stages }.find(|stage| stage.word() == self.peers);
        let between = [PeerStage::PlainAndTls, PeerStage::TlsTwice];
        policy.peer_stage = stage.filter(|stage| between.contains(stage));
        Some(policy)
    }
}

/// The certificate or CA certificate of the cluster that expires first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CertificatesStatus {
    /// Name of the Secret with the certificate.
    pub secret: String,
    /// Key in the Secret that contains the certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Time at which the certificate expires.
    pub not_after: Time,
    /// Remaining validity if it is short: `30d`, `7d`, `1d` or `Expired`. Set for a generated certificate only if its
    /// renewal is overdue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_within: Option<String>,
}

/// A recovery from a lost quorum. A new cluster starts with the data of the survivor with the newest data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RecoveryStatus {
    /// Phase of the recovery: `InProgress`, `Complete` or `Cancelled`.
    #[schemars(with = "String")]
    pub phase: RecoveryPhase,
    /// How the recovery was approved: `Annotation` or `Policy`.
    #[schemars(with = "String")]
    pub approved_by: RecoveryApproval,
    /// Cluster ID of the cluster that has lost its quorum.
    #[serde(rename = "fromClusterID")]
    pub from_cluster_id: String,
    /// Cluster token of the cluster that has lost its quorum. The annotations of its pods and PVCs contain it.
    pub from_token: String,
    /// Member whose data the new cluster has.
    pub survivor: String,
    /// Revision of the survivor. Later acknowledged writes may be missing in the new cluster.
    pub revision: i64,
    /// Members whose data is lost.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub lost_members: Vec<String>,
    /// Members that have data but did not respond in time, so that the new cluster continues without them.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub silent_members: Vec<String>,
    /// First member of the new cluster.
    pub member: String,
    /// Cluster token of the new cluster.
    pub token: String,
    /// Cluster ID of the new cluster. Not set before the recovery is complete.
    #[serde(
        default,
        rename = "toClusterID",
        skip_serializing_if = "Option::is_none"
    )]
    pub to_cluster_id: Option<String>,
    /// Time at which the operator recorded the recovery.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// Time at which the recovery was completed or canceled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// The lost data, or the reason why the recovery was canceled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The cluster that a restore has replaced. The operator records it together with the ID and token of the new cluster.
/// Objects with another token than the new one belong to an old cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplacedStatus {
    /// Name of the EtcdRestore.
    pub restore: String,
    /// Cluster ID of the replaced cluster. Not set if the cluster never formed.
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
    /// Time until which the operator keeps the volumes of the replaced cluster. If not set, the operator deletes them
    /// when the new cluster is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_data_until: Option<Time>,
}

/// Names of the members with and without a ready pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MembersStatus {
    /// Members that have a ready pod.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub ready: Vec<String>,
    /// Members that have no ready pod.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub unready: Vec<String>,
}

/// Observed state of one member.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemberStatus {
    /// Name of the member.
    pub name: String,
    /// Member ID of etcd, in hexadecimal without leading zeros.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Role of the member: `Leader`, `Voter` or `Learner`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub role: Option<MemberRole>,
    /// True if the member answered the last health check.
    #[serde(default)]
    pub healthy: bool,
    /// Version of etcd that the member runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Size of the database file in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub db_size: Option<i64>,
    /// Used bytes of the database file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub db_size_in_use: Option<i64>,
    /// Number of revisions by which the member is behind the member with the newest data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision_lag: Option<i64>,
    /// Node on which the member's pod runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// The bootstrap of a cluster. The operator records it before it creates other objects.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BootstrapStatus {
    /// The cluster token.
    pub token: String,
    /// Names of the first members.
    #[serde(default, deserialize_with = "null_as_empty")]
    pub members: Vec<String>,
}
