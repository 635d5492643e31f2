//! The input of the planner: one value made of Kubernetes objects, etcd's answers and the recorded status.
//!
//! Plain data. A value that could not be read is [`Seen::Unknown`], never empty (invariant 1).

mod pod;
mod volume;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use api::EtcdCluster;
use api::cluster::{RecoveryPhase, RecoveryStatus, ReplacedStatus};
use etcd::{ClusterId, KeyHash, MemberId, Members, Pulse, Status};
use jiff::Timestamp;
use member::{OperatorImage, Operators};

use crate::access::{Access, AccessRule};
use crate::clock::ApiServerClock;
pub use crate::seen::{Kept, Seen};
use crate::switch::TlsRollout;
use crate::tls::Tls;
use crate::upkeep::{Upkeep, UpkeepRule};

pub use pod::{Cause, Changed, Ending, Pod, Role, Trouble};
pub use volume::{Claim, Disk, Removal};

/// The recorded bootstrap, written before the first object is created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Intent {
    /// `--initial-cluster-token` of the first members. Every pod and PVC carries it.
    pub token: String,
    /// The first members, which start together.
    pub members: BTreeSet<String>,
}

/// A member's own Service.
#[allow(clippy::struct_excessive_bools)] // Each is read separately; all combinations occur.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// UID of the Service, the precondition of deletes.
    pub uid: String,
    /// Resource version of the Service, the precondition for setting the mark.
    pub resource_version: String,
    /// `false` if the Service has no owner.
    pub owned: bool,
    /// The mark that a pod may have been created: set before the pod is created.
    pub started: bool,
    /// Another process set the mark again when it continued the start. No process removes this mark.
    pub renewed: bool,
    /// The Service differs from the object that the builder makes.
    pub drifted: bool,
    /// The Service has no endpoints yet. The Service of a first member starts in this state.
    pub closed: bool,
    /// Creation time, from which the age of the member is computed.
    pub created: Timestamp,
}

/// The state of the objects that belong to the whole cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    /// The headless Service.
    pub headless: Kept<()>,
    /// The client Service; `true` if it has endpoints for clients.
    pub client: Kept<bool>,
    /// The PodDisruptionBudget with its `minAvailable`.
    pub budget: Kept<usize>,
    /// The UID of the PodDisruptionBudget.
    pub budget_uid: Option<String>,
}

/// State of the recovery from a lost quorum.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// `status.recovery`.
    pub record: Option<RecoveryStatus>,
    /// The annotation by which a person approves a recovery.
    pub approval: Option<String>,
    /// `status.staleApproval`.
    pub stale_approval: Option<String>,
    /// Time since which the condition Available has been false.
    pub unavailable_since: Option<Timestamp>,
    /// The last backup in the status, as text.
    pub last_backup: Option<String>,
    /// The local member lists of the members. Read only while no quorum answers.
    pub local: Vec<Members>,
    /// `status.replaced`.
    pub replaced: Option<ReplacedStatus>,
    /// The members in the status of an operator that recorded no bootstrap. If any are named, a cluster existed.
    pub named_before: BTreeSet<String>,
    /// The answer of the first member of the new cluster during a recovery.
    pub seed: Option<Seen<SeedAnswer>>,
}

impl Recovery {
    /// The record of the recovery that created this cluster, if that recovery is complete.
    pub fn former(&self) -> Option<&RecoveryStatus> {
        let record = self.record.as_ref();
        record.filter(|record| record.phase == RecoveryPhase::Complete)
    }
}

/// The answer of the first member of a recovered cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeedAnswer {
    /// The linearizable member list.
    pub list: Members,
    /// The member's own status.
    pub status: Status,
}

/// The complete observation of one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// Name of the `EtcdCluster`.
    pub cluster: String,
    /// Resource version of the `EtcdCluster`, the precondition for writing records into its status.
    pub resource_version: String,
    /// `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// The restore that owns the object.
    pub claimed_by: Option<String>,
    /// `status.bootstrap`.
    pub intent: Option<Intent>,
    /// `status.clusterID`.
    pub cluster_id: Option<ClusterId>,
    /// The voters in the last reported status. Used for messages only.
    pub reported_voters: BTreeSet<String>,
    /// `status.currentVersion`.
    pub reported_version: Option<String>,
    /// Pods by member.
    pub pods: BTreeMap<String, Pod>,
    /// PVCs by member.
    pub disks: BTreeMap<String, Disk>,
    /// Services of members, by member.
    pub services: BTreeMap<String, Service>,
    /// Pods and PVCs with this cluster's labels that belong to another object or have an unknown owner.
    pub strangers: Vec<String>,
    /// Objects of the whole cluster.
    pub shared: Shared,
    /// The linearizable member list. It is read after the Kubernetes objects: if a pod was read and its member is not
    /// listed, the member was removed.
    pub members: Seen<Members>,
    /// Client URLs of the cluster that this cluster joins and replaces.
    pub join: Vec<String>,
    /// The client URLs of the members of that cluster, by name.
    pub elsewhere: BTreeMap<String, String>,
    /// The status of each running member, by name.
    pub statuses: BTreeMap<String, Seen<Status>>,
    /// The answers of the members' health listeners, requested in the same observation. These members do not serve
    /// clients yet, so their answers differ from a status.
    pub pulses: BTreeMap<String, Pulse>,
    /// The members' data hashes at the revision that the plan requested; empty if no plan requested one.
    pub hashes: BTreeMap<String, Seen<Option<KeyHash>>>,
    /// State of the recovery from a lost quorum.
    pub recovery: Recovery,
    /// State of the members' databases.
    pub upkeep: Upkeep,
    /// Source of the cluster's certificates and their problems.
    pub tls: Tls,
    /// Progress of a change of TLS settings.
    pub tls_rollout: Option<TlsRollout>,
    /// The generated certificates.
    pub certificates: crate::certificates::Certificates,
    /// State of authentication and of the NetworkPolicy.
    pub access: Access,
    /// The API server's clock.
    pub clock: ApiServerClock,
    /// The image of the operator, with which the seed of a recovery prepares its data. Read only during a recovery.
    pub operator_image: Seen<OperatorImage>,
}

impl Observed {
    /// The answer of a member for itself.
    pub fn answer(&self, member: &str) -> Option<&Status> {
        self.statuses.get(member).and_then(Seen::known)
    }

    /// The answers of all members, by name.
    pub fn answers(&self) -> impl Iterator<Item = (&String, &Status)> {
        let statuses = self.statuses.iter();
        statuses.filter_map(|(name, seen)| Some((name, seen.known()?)))
    }

    /// The leader according to a majority of the answers.
    pub fn leader(&self) -> Option<MemberId> {
        self.answers()
            .filter_map(|(_, status)| status.leader.map(|leader| (status.raft_term, leader)))
            .max_by_key(|(term, _)| *term)
            .map(|(_, leader)| leader)
    }
}

/// `spec.recovery`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecoveryRule {
    /// Recover a lost quorum without approval by a person.
    pub automatic: bool,
    /// How long quorum must have been lost before an automatic recovery. Also how long a recovery waits for a survivor
    /// that does not answer.
    pub after: Duration,
}

/// The part of the spec that the planner uses.
#[allow(clippy::struct_excessive_bools)] // Each is a wish of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// `spec.size`.
    pub size: usize,
    /// Number of members that are bootstrapped together: all, or one with `bootstrap: Seed`.
    pub first: usize,
    /// Members keep their data on PVCs.
    pub durable: bool,
    /// The properties that these PVCs request.
    pub claim: Option<Claim>,
    /// `spec.hibernate`.
    pub hibernate: bool,
    /// `spec.upkeep`.
    pub upkeep: UpkeepRule,
    /// `spec.version`.
    pub version: String,
    /// The image of `spec.repository` and `spec.version`.
    pub image: String,
    /// `spec.repository`.
    pub repository: String,
    /// The hash of the fields from which pods are made.
    pub spec_hash: String,
    /// `spec.memberReplacement.after`: how long a member may be down on a lost node before it is replaced.
    pub replace_after: Duration,
    /// `spec.memberReplacement.keepVolumes`: how long the volume of a member is kept after another party removed the
    /// member.
    pub keep_volumes: Duration,
    /// `spec.recovery`.
    pub recovery: RecoveryRule,
    /// `spec.paused`.
    pub paused: bool,
    /// The cluster has a PodDisruptionBudget.
    pub budget: bool,
    /// The desired authentication and NetworkPolicy.
    pub access: AccessRule,
    /// Why the spec is invalid: field, problem and remedy.
    pub invalid: Option<String>,
    /// Why no member may be started under this spec: fields that are not in effect and must not be ignored.
    pub refused: Option<String>,
    /// The object with the spec in effect, from which objects are built.
    pub object: EtcdCluster,
    /// Where the operators run: NetworkPolicies let them in.
    pub operators: Operators,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removal_note_round_trips_and_unreadable_note_keeps_volume() {
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

    #[test]
    fn reads_note_about_image_change_as_written() {
        for (note, from, restarts, unreadable) in [
            ("3.6.16/2", "3.6.16", 2, false),
            ("3.6.16/-1/unreadable", "3.6.16", -1, true),
            ("/0", "", 0, false),
        ] {
            let changed = Changed {
                from: from.to_owned(),
                restarts,
                unreadable,
            };
            assert_eq!(changed.note(), note);
            assert_eq!(Changed::read(note), Some(changed));
        }
        assert_eq!(Changed::read("3.6.16"), None);
        assert_eq!(Changed::read("3.6.16/often"), None);
    }
}
