//! The input of the planner: one value that combines Kubernetes objects, etcd's answers and the recorded status.
//!
//! Plain data. A value that could not be read is [`Seen::Unknown`], never empty (invariant 1).

mod pod;
mod volume;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use api::EtcdCluster;
use api::cluster::{BeforeChangeStatus, LastBackup, RecoveryPhase, RecoveryStatus, ReplacedStatus};
use etcd::{ClusterId, KeyHash, MemberId, Members, Pulse, Status};
use jiff::Timestamp;
use member::{OperatorImage, Operators};
use runtime::endpoints::EndpointRule;

use crate::access::{Access, AccessRule};
use crate::clock::ApiServerClock;
pub use crate::seen::{Kept, Seen};
use crate::switch::TlsRollout;
use crate::tls::Tls;
use crate::upkeep::{Upkeep, UpkeepRule};

pub use member::Changed;
pub use pod::{Cause, Ending, Pod, Role, Trouble};
pub use volume::{Claim, Disk, Removal, RetentionNotes};

/// The bootstrap in the status (`status.bootstrap`). The operator records it before it creates the first object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Intent {
    /// `--initial-cluster-token` of the first members. Every pod and every PVC has this token as an annotation.
    pub token: String,
    /// Names of the first members, which start together.
    pub members: BTreeSet<String>,
}

/// A member's own Service.
#[allow(clippy::struct_excessive_bools)] // Each flag is a separate fact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// UID of the Service, the precondition for deleting it.
    pub uid: String,
    /// The resourceVersion of the Service, the precondition for setting the annotation `started`.
    pub resource_version: String,
    /// True if the EtcdCluster owns the Service.
    pub owned: bool,
    /// True if the Service has the annotation `started`: a pod of the member may exist. The operator sets the
    /// annotation before it creates the pod.
    pub started: bool,
    /// True if a second operator process has renewed the annotation `started` to continue the start. No process removes
    /// a renewed annotation.
    pub renewed: bool,
    /// True if the Service differs from the object that the operator would build.
    pub drifted: bool,
    /// True if the Service has no endpoints on purpose, as for a first member at its start.
    pub closed: bool,
    /// Creation time. When the cluster shrinks, the newest members are removed first.
    pub created: Timestamp,
}

/// The objects that belong to the whole cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    /// The headless Service.
    pub headless: Kept<()>,
    /// The client Service. The value is true if the Service has endpoints for clients.
    pub client: Kept<bool>,
    /// The PodDisruptionBudget. The value is its `minAvailable`.
    pub budget: Kept<usize>,
    /// The UID of the PodDisruptionBudget, if the cluster owns one.
    pub budget_uid: Option<String>,
}

/// The records and answers for the recovery from a lost quorum.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// `status.recovery`. `None` if no recovery was recorded.
    pub record: Option<RecoveryStatus>,
    /// The value of the annotation by which a person approves a recovery.
    pub approval: Option<String>,
    /// `status.staleApproval`.
    pub stale_approval: Option<String>,
    /// Time since which the condition Available has been false; `None` while it is true or the cluster hibernates.
    pub unavailable_since: Option<Timestamp>,
    /// Location and revision of the last backup in the status, as text.
    pub last_backup: Option<String>,
    /// The member lists that the members have on their disks. They are read only while no quorum answers.
    pub local: Vec<Members>,
    /// `status.replaced`. `None` if no restore in place has replaced the cluster.
    pub replaced: Option<ReplacedStatus>,
    /// Names of the members in a status that coreos/etcd-operator wrote. If there are any, a cluster existed.
    pub named_before: BTreeSet<String>,
    /// The answer of the seed during a recovery. The seed is the first member of the new cluster.
    pub seed: Option<Seen<SeedAnswer>>,
}

impl Recovery {
    /// The completed recovery that created this cluster; `None` if this cluster was not recovered.
    pub fn former(&self) -> Option<&RecoveryStatus> {
        let record = self.record.as_ref();
        record.filter(|record| record.phase == RecoveryPhase::Complete)
    }

    /// The recovery that has begun and is neither complete nor canceled.
    pub fn in_progress(&self) -> Option<&RecoveryStatus> {
        let record = self.record.as_ref();
        record.filter(|record| record.phase == RecoveryPhase::InProgress)
    }
}

/// The answer of a recovery's seed about its new cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeedAnswer {
    /// The linearizable member list of the new cluster.
    pub list: Members,
    /// The status of the seed.
    pub status: Status,
}

/// The records about backups before changes (`spec.backup.beforeChanges`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BeforeChange {
    /// `status.beforeChange`.
    pub record: Option<BeforeChangeStatus>,
    /// `status.backupForChanges`, which the backup operator reports.
    pub backup: Option<LastBackup>,
    /// `status.backupRequest`, which the backup operator reports.
    pub request: Option<api::cluster::BackupRequestStatus>,
    /// The value of the annotation with which a user waives the backup.
    pub waiver: Option<String>,
}

/// The complete observation of one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// Name of the EtcdCluster.
    pub cluster: String,
    /// The resourceVersion of the EtcdCluster, the precondition for writing records to its status.
    pub resource_version: String,
    /// True if `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// The UID of the EtcdRestore that holds the restore lock of the EtcdCluster; `None` without a restore lock.
    pub claimed_by: Option<String>,
    /// `status.bootstrap`.
    pub intent: Option<Intent>,
    /// `status.clusterID`.
    pub cluster_id: Option<ClusterId>,
    /// Names of the voters in the last reported status. The operator uses them only while it has no member list.
    pub reported_voters: BTreeSet<String>,
    /// `status.currentVersion`.
    pub reported_version: Option<String>,
    /// Pods by the name of the member.
    pub pods: BTreeMap<String, Pod>,
    /// PVCs by the name of the member.
    pub disks: BTreeMap<String, Disk>,
    /// Services of the members, by the name of the member.
    pub services: BTreeMap<String, Service>,
    /// Pods and PVCs with the labels of this cluster that have another owner, or neither an owner nor a cluster token.
    pub strangers: Vec<String>,
    /// The objects of the whole cluster.
    pub shared: Shared,
    /// The linearizable member list. It is read after the Kubernetes objects, so if it lacks the member of an observed
    /// pod, that member was removed.
    pub members: Seen<Members>,
    /// Client URLs of the cluster that this EtcdCluster joins, from the annotation `join`.
    pub join: Vec<String>,
    /// The URLs of external members that the operator may call.
    pub join_rule: EndpointRule,
    /// The client URLs of the external members that the operator may call, by the name of the member.
    pub elsewhere: BTreeMap<String, String>,
    /// The status of each running member, by the name of the member.
    pub statuses: BTreeMap<String, Seen<Status>>,
    /// The answers of health listeners, by the name of the member, from the same observation. Only for members that do
    /// not serve clients yet.
    pub pulses: BTreeMap<String, Pulse>,
    /// The members' data hashes at the revision that the plan requested. Empty if no plan has requested them.
    pub hashes: BTreeMap<String, Seen<Option<KeyHash>>>,
    /// The records and answers for the recovery from a lost quorum.
    pub recovery: Recovery,
    /// The records about backups before changes.
    pub before_change: BeforeChange,
    /// The state of the members' databases.
    pub upkeep: Upkeep,
    /// The source of the cluster's certificates, and their problems.
    pub tls: Tls,
    /// The progress of a TLS change.
    pub tls_rollout: Option<TlsRollout>,
    /// The generated certificates, and the expiry of the certificates that users provide.
    pub certificates: crate::certificates::Certificates,
    /// The state of authentication and of the NetworkPolicy.
    pub access: Access,
    /// The API server's clock, compared with the operator's clock.
    pub clock: ApiServerClock,
    /// The image of the operator, with which the seed of a recovery prepares its data. It is read only during a
    /// recovery.
    pub operator_image: Seen<OperatorImage>,
}

impl Observed {
    /// The status that a member reports about itself.
    pub fn answer(&self, member: &str) -> Option<&Status> {
        self.statuses.get(member).and_then(Seen::known)
    }

    /// The status that each member reports about itself, by name.
    pub fn answers(&self) -> impl Iterator<Item = (&String, &Status)> {
        let statuses = self.statuses.iter();
        statuses.filter_map(|(name, seen)| Some((name, seen.known()?)))
    }

    /// True for the first members of the cluster, which the bootstrap recorded.
    pub fn is_first_member(&self, name: &str) -> bool {
        let intent = self.intent.as_ref();
        intent.is_some_and(|intent| intent.members.contains(name))
    }

    /// The leader that a member reports for the highest Raft term; `None` if no member reports a leader.
    pub fn leader(&self) -> Option<MemberId> {
        self.answers()
            .filter_map(|(_, status)| status.leader.map(|leader| (status.raft_term, leader)))
            .max_by_key(|(term, _)| *term)
            .map(|(_, leader)| leader)
    }
}

/// The rules in `spec.recovery`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecoveryRule {
    /// True if the operator may recover a lost quorum without the approval of a person.
    pub automatic: bool,
    /// How long the quorum must have been lost before an automatic recovery starts. A recovery also waits at most this
    /// long for a survivor that does not answer.
    pub after: Duration,
    /// How long the operator keeps the old volumes after a recovery.
    pub keep_volumes: Duration,
}

/// The spec in effect, in the form that the planner uses.
#[allow(clippy::struct_excessive_bools)] // Each flag is a separate setting.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// `spec.size`: the number of voters.
    pub size: usize,
    /// Number of members that are bootstrapped together: `spec.size`, or 1 with `bootstrap: Seed`.
    pub first: usize,
    /// True if members keep their data on PVCs.
    pub durable: bool,
    /// The properties that the members' PVCs request; `None` without PVCs.
    pub claim: Option<Claim>,
    /// `spec.hibernate`: true if all pods must be deleted.
    pub hibernate: bool,
    /// The rules in `spec.upkeep`.
    pub upkeep: UpkeepRule,
    /// `spec.version`: the desired etcd version.
    pub version: String,
    /// `spec.image`, or the image of `spec.repository` and `spec.version`.
    pub image: String,
    /// The hash of the spec fields from which pods are built.
    pub spec_hash: String,
    /// `spec.memberReplacement.after`: how long a member may be down, for example on a lost node, before it is
    /// replaced.
    pub replace_after: Duration,
    /// `spec.memberReplacement.keepVolumes`: how long the operator keeps the volume of a member that other software
    /// removed from etcd.
    pub keep_volumes: Duration,
    /// The rules in `spec.recovery`.
    pub recovery: RecoveryRule,
    /// `spec.paused`: true if the operator must change nothing.
    pub paused: bool,
    /// True if the cluster has a PodDisruptionBudget.
    pub budget: bool,
    /// The desired authentication and NetworkPolicy.
    pub access: AccessRule,
    /// Why the spec is invalid, with the field, the problem and the remedy; `None` if it is valid.
    pub invalid: Option<String>,
    /// Why no member may be started with this spec: it sets fields that have no effect and are unsafe to ignore. `None`
    /// if members may be started.
    pub refused: Option<String>,
    /// The EtcdCluster with the spec in effect, from which the builders make all objects.
    pub object: EtcdCluster,
    /// The namespace and the labels of the operators' pods, which NetworkPolicies admit.
    pub operators: Operators,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removal_annotation_round_trips_and_invalid_value_keeps_volume() {
        let since: Timestamp = "2026-11-23T08:00:00Z".parse().unwrap();
        for (note, removal) in [
            ("operator", Removal::ByOperator),
            (
                "2026-11-23T08:00:00Z",
                Removal::ByOthers {
                    since,
                    majority: false,
                },
            ),
            (
                "2026-11-23T08:00:00Z/majority",
                Removal::ByOthers {
                    since,
                    majority: true,
                },
            ),
        ] {
            assert_eq!(removal.note(), note);
            assert_eq!(Removal::read(note), removal);
        }
        assert!(matches!(
            Removal::read("yesterday"),
            Removal::ByOthers { majority: true, .. }
        ));
    }
}
