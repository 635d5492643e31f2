//! `EtcdCluster.status`: the report, and the little that neither etcd nor the pods can say.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::peers::PeerStage;
use super::tls::{TlsPolicy, peers_of};
use super::upkeep::{AlarmStatus, DefragmentationStatus};
use crate::schema::{is_false, null_as_empty, readable_items};
use crate::text::text_enum;

text_enum! {
    /// Phase of a cluster, derived from its conditions; for people and for what reads v1beta2.
    ClusterPhase {
        /// The first members are being started.
        Creating = "Creating",
        /// The cluster has formed.
        Running = "Running",
        /// The members are being stopped, because `spec.hibernate` is set.
        Hibernating = "Hibernating",
        /// No member runs, because `spec.hibernate` is set; the volumes stay.
        Hibernated = "Hibernated",
        /// The spec is refused; v1beta2's end of the road, here a state like any other.
        Failed = "Failed",
    }
}

text_enum! {
    /// A member's part in the quorum.
    MemberRole {
        /// Votes, and leads.
        Leader = "Leader",
        /// Votes.
        Voter = "Voter",
        /// Does not vote yet.
        Learner = "Learner",
    }
}

text_enum! {
    /// How far a recovery from the loss of the quorum is.
    RecoveryPhase {
        /// The new cluster's first member is being made from the survivor.
        InProgress = "InProgress",
        /// The new cluster was verified and recorded.
        Complete = "Complete",
        /// It was given up: a quorum came back, or the survivor was lost.
        Cancelled = "Cancelled",
    }
}

text_enum! {
    /// Who decided that a lost quorum is recovered.
    RecoveryApproval {
        /// A person, by the annotation.
        Annotation = "Annotation",
        /// `spec.recovery.policy: Automatic`.
        Policy = "Policy",
    }
}

/// What is known about an EtcdCluster. Except for `bootstrap`, `clusterID`, `recovery`, `staleApproval`, `replaced`,
/// `defragmentation` and `TLS` all of it is a report that can be rebuilt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdClusterStatus {
    /// Generation of the spec this status was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Creating`, `Running`, `Hibernating`, `Hibernated` or `Failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub phase: Option<ClusterPhase>,
    /// Why the phase is `Failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether the operator leaves the cluster alone, because `spec.paused` is set.
    #[serde(default, skip_serializing_if = "is_false")]
    pub control_paused: bool,
    /// Number of members in etcd's own list.
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
    /// What is known about each member.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub member_details: Vec<MemberStatus>,
    /// Cluster ID as etcd gives it, in hexadecimal without leading zeros. A cluster that has one is never bootstrapped again.
    #[serde(default, rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// Name of the leader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
    /// The recorded intent of the first start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap: Option<BootstrapStatus>,
    /// The last recovery from the loss of the quorum: what was decided before it began, and how it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery: Option<RecoveryStatus>,
    /// An approval of a recovery (the annotation `etcd.database.coreos.com/recover`) that was there while a quorum
    /// answered. It approves nothing until it was removed and set again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stale_approval: Option<String>,
    /// The last restore over this cluster: what was there before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced: Option<ReplacedStatus>,
    /// The last defragmentation of members, recorded before each is told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defragmentation: Option<DefragmentationStatus>,
    /// The TLS that members are started with. While `spec.TLS` is another, what is on the way to it.
    #[serde(default, rename = "TLS", skip_serializing_if = "Option::is_none")]
    // Two operators record it: whoever does replaces it whole.
    #[x_kube(merge_strategy = MapMerge::Atomic)]
    pub tls: Option<TlsStatus>,
    /// Alarms that etcd has raised.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub alarms: Vec<AlarmStatus>,
    /// The certificate that ends first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificates: Option<CertificatesStatus>,
    /// Version the members run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_version: Option<String>,
    /// Version the members are brought to, while that goes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_version: Option<String>,
    /// Name of the Service clients use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_name: Option<String>,
    /// Port of the Service clients use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_port: Option<i32>,
    /// What the operator does next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_step: Option<String>,
    /// What the next step waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_for: Option<String>,
    /// The newest backup of this cluster that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_backup: Option<LastBackup>,
    /// Conditions, one of each type.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// The TLS that members are started with: recorded before the first is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TlsStatus {
    /// Token of the cluster it is about.
    pub token: String,
    /// How members talk to each other: `Plain`, `PlainAndTls`, `TlsTwice` or `Tls`.
    pub peers: String,
    /// The `spec.TLS` they are started with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<TlsPolicy>,
}

impl TlsStatus {
    /// The record of a cluster whose members are started with this.
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

    /// Whether its fields agree with each other. If one was changed by hand, none of them counts.
    pub fn is_consistent(&self) -> bool {
        *self == Self::new(&self.token, self.policy().as_ref())
    }

    /// What members are started with, complete.
    pub fn policy(&self) -> Option<TlsPolicy> {
        let mut policy = self.policy.clone()?;
        let stages = PeerStage::ALL.into_iter();
        let stage = { stages }.find(|stage| stage.word() == self.peers);
        let between = [PeerStage::PlainAndTls, PeerStage::TlsTwice];
        policy.peer_stage = stage.filter(|stage| between.contains(stage));
        Some(policy)
    }
}

/// The certificate of a cluster that ends first, an authority's among them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CertificatesStatus {
    /// Its Secret.
    pub secret: String,
    /// The key of the Secret it stands under.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Until when it is valid.
    pub not_after: Time,
    /// How little is left, where that is little: `30d`, `7d`, `1d` or `Expired`. Of a generated certificate it is said
    /// when its renewal is overdue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_within: Option<String>,
}

/// A recovery from the loss of the quorum: a new cluster begins with what the most advanced survivor has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RecoveryStatus {
    /// `InProgress`, `Complete` or `Cancelled`.
    #[schemars(with = "String")]
    pub phase: RecoveryPhase,
    /// `Annotation` or `Policy`: who decided.
    #[schemars(with = "String")]
    pub approved_by: RecoveryApproval,
    /// Cluster ID of the cluster that lost its quorum.
    #[serde(rename = "fromClusterID")]
    pub from_cluster_id: String,
    /// Token of that cluster; stands on its pods and volume claims.
    pub from_token: String,
    /// The member whose data the new cluster begins with.
    pub survivor: String,
    /// The survivor's revision. Writes acknowledged after it may be missing in the new cluster.
    pub revision: i64,
    /// Members whose data is gone.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub lost_members: Vec<String>,
    /// Members that have data and were not waited for any longer, since they did not answer.
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
    /// Cluster ID of the new cluster, once it is recorded.
    #[serde(
        default,
        rename = "toClusterID",
        skip_serializing_if = "Option::is_none"
    )]
    pub to_cluster_id: Option<String>,
    /// When it was decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When the new cluster was recorded, or the recovery was given up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// What was lost, or why the recovery was given up, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The cluster that a restore replaced by this one, recorded in one write with the new cluster's ID and token.
/// Whatever carries another token than the recorded one is of a cluster before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplacedStatus {
    /// Name of the EtcdRestore.
    pub restore: String,
    /// Cluster ID of the cluster before, if it was ever formed.
    #[serde(
        default,
        rename = "fromClusterID",
        skip_serializing_if = "Option::is_none"
    )]
    pub from_cluster_id: Option<String>,
    /// Its members.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub members: Vec<String>,
    /// When it was replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
    /// Until when its volumes are kept at least; else they go when the new cluster is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_data_until: Option<Time>,
}

/// Names of the members by readiness of their pods.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MembersStatus {
    /// Members whose pod is ready.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub ready: Vec<String>,
    /// Members whose pod is not ready.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub unready: Vec<String>,
}

/// What is known about one member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemberStatus {
    /// Name of the member.
    pub name: String,
    /// Member ID as etcd gives it, in hexadecimal without leading zeros.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `Leader`, `Voter` or `Learner`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub role: Option<MemberRole>,
    /// Whether the member answered when it was last asked.
    #[serde(default)]
    pub healthy: bool,
    /// Version the member runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Size of its database file in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub db_size: Option<i64>,
    /// Bytes of the file that hold data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub db_size_in_use: Option<i64>,
    /// Revisions the member is behind the most advanced one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision_lag: Option<i64>,
    /// Node its pod runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// The recorded intent of the first start, written before anything is created.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BootstrapStatus {
    /// The cluster token.
    pub token: String,
    /// Names of the first members.
    #[serde(default, deserialize_with = "null_as_empty")]
    pub members: Vec<String>,
}

/// A backup of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastBackup {
    /// Name of the EtcdBackup.
    pub name: String,
    /// When it was complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
    /// Revision it holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<i64>,
    /// Where it lies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
}
