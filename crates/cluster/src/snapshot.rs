//! What the planner gets to see: one value made of Kubernetes objects, etcd's answers and the recorded status.
//!
//! Plain data. What could not be read is [`Seen::Unknown`], never empty (invariant 1).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use api::EtcdCluster;
use api::cluster::{RecoveryPhase, RecoveryStatus, ReplacedStatus};
use etcd::{ClusterId, KeyHash, MemberId, Members, Pulse, Status};
use jiff::Timestamp;
use member::{Difference, OperatorImage, Operators};

use crate::access::{Access, AccessRule};
use crate::clock::ApiServerClock;
pub use crate::seen::{Kept, Seen};
use crate::switch::TlsRollout;
use crate::tls::Tls;
use crate::upkeep::{Upkeep, UpkeepRule};

/// The recorded bootstrap: what is written before the first object is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Intent {
    /// `--initial-cluster-token` of the first members; stands on every pod and volume claim.
    pub token: String,
    /// The first members, started together.
    pub members: BTreeSet<String>,
}

/// A member's pod.
#[allow(clippy::struct_excessive_bools)] // Each is a fact of its own; none excludes another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Of the pod object; deletes name it.
    pub uid: String,
    /// `false` when nobody owns it, because the object it belonged to was deleted and its children left; or when
    /// somebody has taken its labels away.
    pub owned: bool,
    /// The cluster token in its annotations.
    pub token: Option<String>,
    /// The cluster ID in its annotations.
    pub cluster_id: Option<ClusterId>,
    /// The etcd version in its annotations.
    pub version: Option<String>,
    /// The image of its etcd container, as it was asked for.
    pub image: String,
    /// That its image was changed in place, until it has come back from that.
    pub changed: Option<Changed>,
    /// The flags of its etcd and the variables of its environment, without their values.
    pub flags: BTreeSet<String>,
    /// Its readiness probe asks `/readyz`, which not every release serves.
    pub readyz: bool,
    /// The hash of the spec it was made for.
    pub spec_hash: Option<String>,
    /// What of it is not as the spec asks for today, its image apart.
    pub difference: Difference,
    /// The names in its `--initial-cluster`.
    pub initial: BTreeSet<String>,
    /// It was made for a member that joins (`--initial-cluster-state=existing`): at its first start its etcd compares
    /// those names with the list. A first member's does not.
    pub joins: bool,
    /// Its data lies on a volume claim and outlives it.
    pub durable: bool,
    /// A deletion was asked for; what is not durable in it is lost.
    pub terminating: bool,
    /// It ended for good (evicted, node lost); it will not run again.
    pub failed: bool,
    /// Its kubelet was asked to look at it again.
    pub nudged: bool,
    /// It has an address: its etcd may answer, also before the kubelet reports that its container runs, which
    /// it finds out once a second.
    pub addressed: bool,
    /// Its etcd container runs.
    pub running: bool,
    /// Since when its etcd container has been running.
    pub running_since: Option<Timestamp>,
    /// Its readiness probe passes.
    pub ready: bool,
    /// How often its etcd container was started again.
    pub restarts: i32,
    /// The role in its labels.
    pub role: Option<Role>,
    /// Why it does not run, as Kubernetes tells it.
    pub trouble: Option<Trouble>,
    /// Since when it has not been ready, by the clock of the API server.
    pub unready_since: Option<Timestamp>,
    /// Since when its node, or the only node that reaches its disk, has been away, as far as the pod tells.
    pub lost_since: Option<Timestamp>,
    /// How its etcd container ended last.
    pub ending: Option<Ending>,
    /// Where it runs.
    pub node: Option<String>,
    /// When it was made.
    pub created: Timestamp,
}

/// What a pod's note about a change of its image ends with, where the version before could not read the data.
const UNREADABLE: &str = "unreadable";

/// A change of a pod's image in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The version that ran before.
    pub from: String,
    /// How often its container had been started again by then.
    pub restarts: i32,
    /// That version could not read its data, either.
    pub unreadable: bool,
}

impl Changed {
    /// From the note on a pod.
    pub fn read(note: &str) -> Option<Self> {
        let mut words = note.split('/');
        Some(Self {
            from: words.next()?.to_owned(),
            restarts: words.next()?.parse().ok()?,
            unreadable: words.any(|word| word == UNREADABLE),
        })
    }

    /// The note on a pod.
    pub(crate) fn note(&self) -> String {
        let Self { from, restarts, .. } = self;
        let unreadable = if self.unreadable { UNREADABLE } else { "" };
        let note = format!("{from}/{restarts}/{unreadable}");
        note.trim_end_matches('/').to_owned()
    }
}

impl Pod {
    /// The pod keeps its data as long as it stays: it is not on its way out.
    pub fn stays(&self) -> bool {
        !self.terminating && !self.failed
    }
}

/// A member's part in the quorum, as its pod's label says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// It votes.
    Voter,
    /// It votes, and the client Service passes it by: it is about to stop, or is defragmented.
    Busy {
        /// From when on; long ago where nobody knows.
        since: Timestamp,
    },
    /// It does not vote yet.
    Learner,
}

/// Why a pod does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// No node takes it.
    Unschedulable(String),
    /// Its image cannot be had.
    Image(String),
    /// Its container ends again and again, or cannot be made.
    Failing(String),
}

impl Trouble {
    /// The sentence Kubernetes gave.
    pub fn message(&self) -> &str {
        match self {
            Self::Unschedulable(text) | Self::Image(text) | Self::Failing(text) => text,
        }
    }
}

/// How a member's etcd container ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// When.
    pub at: Timestamp,
    /// Why, as far as it can be told.
    pub cause: Cause,
}

/// Why a member's etcd container ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// What lies on its disk is damaged or missing, in etcd's own words.
    Data(String),
    /// It took more memory than it may.
    Memory,
    /// What surrounds it is not as it needs it: a full disk, rights, an address, a flag.
    Surroundings(String),
    /// It failed, and nobody knows whether its data is the reason.
    Failed(String),
    /// It was ended, or ended in order.
    Ended,
}

/// A member's volume claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Of the claim; deletes name it.
    pub uid: String,
    /// Its version; a removal is only noted on the version that was read.
    pub resource_version: String,
    /// Who removed its member from etcd, as noted on the claim.
    pub removal: Option<Removal>,
    /// `false` when nobody owns it, or when somebody has taken its labels away.
    pub owned: bool,
    /// The cluster token in its annotations.
    pub token: Option<String>,
    /// The cluster ID in its annotations.
    pub cluster_id: Option<ClusterId>,
    /// The etcd version it was made for.
    pub version: Option<String>,
    /// The first members, on a first member's claim.
    pub initial: BTreeSet<String>,
    /// A deletion was asked for; it is gone when its pod is.
    pub terminating: bool,
    /// Its volume is gone, as Kubernetes says: a pod that has it open may go on, and no other one gets it.
    pub lost: bool,
    /// What it asks for and has.
    pub claim: Claim,
}

impl Disk {
    /// The data on it outlives its pod: it is not on its way out, and its volume is there.
    pub fn stays(&self) -> bool {
        !self.terminating && !self.lost
    }

    /// Invariant 25: someone else removed its member from etcd. Nothing is started on it.
    pub(crate) fn is_evidence(&self) -> bool {
        matches!(self.removal, Some(Removal::ByOthers { .. }))
    }
}

/// Who removed a claim's member from etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// This operator; noted before etcd is asked.
    ByOperator,
    /// Someone else.
    ByOthers {
        /// When the operator noticed.
        since: Timestamp,
        /// A majority of the voters was missing from the list.
        majority: bool,
    },
}

const BY_OPERATOR: &str = "operator";
const MAJORITY: &str = "majority";

impl Removal {
    /// From the annotation of a claim. An annotation that cannot be read keeps the volume for a person to decide.
    pub fn read(note: &str) -> Self {
        if note == BY_OPERATOR {
            return Self::ByOperator;
        }
        let (since, rest) = note.split_once('/').unwrap_or((note, ""));
        match since.parse() {
            Ok(since) => Self::ByOthers {
                since,
                majority: !rest.is_empty(),
            },
            Err(_) => Self::ByOthers {
                since: Timestamp::UNIX_EPOCH,
                majority: true,
            },
        }
    }

    /// The annotation of a claim.
    pub(crate) fn note(self) -> String {
        match self {
            Self::ByOperator => BY_OPERATOR.to_owned(),
            Self::ByOthers {
                since,
                majority: false,
            } => since.to_string(),
            Self::ByOthers { since, .. } => format!("{since}/{MAJORITY}"),
        }
    }
}

/// What a volume claim asks for and has, or should ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Its storage class.
    pub class: Option<String>,
    /// The bytes it asks for.
    pub requested: Option<u64>,
    /// The same as it is written.
    pub text: String,
    /// The bytes it has.
    pub capacity: Option<u64>,
    /// How far its growth is, as Kubernetes tells it.
    pub resizing: Option<String>,
}

/// A member's own Service.
#[allow(clippy::struct_excessive_bools)] // Each is seen by itself; all combinations happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Of the Service; deletes name it.
    pub uid: String,
    /// Its version; a mark is only put on the version that was read.
    pub resource_version: String,
    /// `false` when nobody owns it.
    pub owned: bool,
    /// The mark that a pod may have been made: set before the pod is created.
    pub started: bool,
    /// It was marked once more by whoever went on with another's start: nobody takes that mark back.
    pub renewed: bool,
    /// It is not what the builder makes.
    pub drifted: bool,
    /// It has no endpoints yet: how a first member's Service begins.
    pub closed: bool,
    /// When it was made: the age of the member.
    pub created: Timestamp,
}

/// What is there of the objects of the whole cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    /// The headless Service.
    pub headless: Kept<()>,
    /// The client Service; `true` when it lets clients in.
    pub client: Kept<bool>,
    /// The disruption budget: its `minAvailable`.
    pub budget: Kept<usize>,
    /// The UID of the disruption budget.
    pub budget_uid: Option<String>,
}

/// What concerns the recovery from a lost quorum.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// `status.recovery`.
    pub record: Option<RecoveryStatus>,
    /// The annotation by which a person approves one.
    pub approval: Option<String>,
    /// `status.staleApproval`.
    pub stale_approval: Option<String>,
    /// Since when the condition Available has been false.
    pub unavailable_since: Option<Timestamp>,
    /// The last backup in the status, in words.
    pub last_backup: Option<String>,
    /// The lists of members that members have locally. Asked for when no quorum answers.
    pub local: Vec<Members>,
    /// `status.replaced`.
    pub replaced: Option<ReplacedStatus>,
    /// The members in the status of an operator that recorded no bootstrap: there was a cluster.
    pub named_before: BTreeSet<String>,
    /// What the first member of the new cluster answers, while a recovery is under way.
    pub seed: Option<Seen<SeedAnswer>>,
}

impl Recovery {
    /// The record of the recovery this cluster came from, if it is complete.
    pub fn former(&self) -> Option<&RecoveryStatus> {
        let record = self.record.as_ref();
        record.filter(|record| record.phase == RecoveryPhase::Complete)
    }
}

/// What the first member of a recovered cluster answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeedAnswer {
    /// The linearizable list.
    pub list: Members,
    /// What it says of itself.
    pub status: Status,
}

/// Everything observed of one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// Name of the `EtcdCluster`.
    pub cluster: String,
    /// Version of the `EtcdCluster`; what is recorded in its status is only written over this version.
    pub resource_version: String,
    /// `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// The restore that claims the object.
    pub claimed_by: Option<String>,
    /// `status.bootstrap`.
    pub intent: Option<Intent>,
    /// `status.clusterID`.
    pub cluster_id: Option<ClusterId>,
    /// The voters the status named last: a report, used for messages only.
    pub reported_voters: BTreeSet<String>,
    /// `status.currentVersion`.
    pub reported_version: Option<String>,
    /// Pods by member.
    pub pods: BTreeMap<String, Pod>,
    /// Volume claims by member.
    pub disks: BTreeMap<String, Disk>,
    /// Services of members, by member.
    pub services: BTreeMap<String, Service>,
    /// Pods and claims with this cluster's labels that belong to another object or to nobody known.
    pub strangers: Vec<String>,
    /// Objects of the whole cluster.
    pub shared: Shared,
    /// The linearizable member list. Read after the Kubernetes objects: a pod that was seen and whose member
    /// is not in it belongs to a member that was removed.
    pub members: Seen<Members>,
    /// Client URLs of the cluster that this one is to join and take the place of.
    pub join: Vec<String>,
    /// The client URLs of members of that cluster, by name.
    pub elsewhere: BTreeMap<String, String>,
    /// What each member that runs says of itself, by name.
    pub statuses: BTreeMap<String, Seen<Status>>,
    /// What members tell on their listener for health, asked in the same look because they have not served clients yet
    /// and do not answer as those do.
    pub pulses: BTreeMap<String, Pulse>,
    /// The members' hashes of their data at the revision the plan asked for; empty unless it did.
    pub hashes: BTreeMap<String, Seen<Option<KeyHash>>>,
    /// What concerns the recovery from a lost quorum.
    pub recovery: Recovery,
    /// What concerns the members' databases.
    pub upkeep: Upkeep,
    /// What the cluster's certificates are worth.
    pub tls: Tls,
    /// How far a change of its TLS is.
    pub tls_rollout: Option<TlsRollout>,
    /// Its generated certificates.
    pub certificates: crate::certificates::Certificates,
    /// Who gets in.
    pub access: Access,
    /// The API server's clock.
    pub clock: ApiServerClock,
    /// The image of the operator, with which the seed of a recovery prepares its data. It is read while a recovery is in
    /// progress.
    pub operator_image: Seen<OperatorImage>,
}

impl Observed {
    /// The member a majority of the answers calls the leader.
    pub fn leader(&self) -> Option<MemberId> {
        let answers = self.statuses.values().filter_map(Seen::known);
        answers
            .filter_map(|status| status.leader.map(|leader| (status.raft_term, leader)))
            .max_by_key(|(term, _)| *term)
            .map(|(_, leader)| leader)
    }
}

/// `spec.recovery`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecoveryRule {
    /// A lost quorum is recovered without a person.
    pub automatic: bool,
    /// How long quorum must have been lost before that, and before a recovery goes on without a survivor that does
    /// not answer.
    pub after: Duration,
}

/// What the spec asks for, as far as the planner is concerned.
#[allow(clippy::struct_excessive_bools)] // Each is a wish of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// `spec.size`.
    pub size: usize,
    /// How many members are bootstrapped together: all, or one with `bootstrap: Seed`.
    pub first: usize,
    /// Members keep their data on volume claims.
    pub durable: bool,
    /// What those claims ask for.
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
    /// The hash of what pods are made from.
    pub spec_hash: String,
    /// `spec.memberReplacement.after`: how long a member may be down on a lost node.
    pub replace_after: Duration,
    /// `spec.memberReplacement.keepVolumes`: how long the volume of a member is kept that someone else removed.
    pub keep_volumes: Duration,
    /// `spec.recovery`.
    pub recovery: RecoveryRule,
    /// `spec.paused`.
    pub paused: bool,
    /// Whether there is a disruption budget.
    pub budget: bool,
    /// Who is to get in.
    pub access: AccessRule,
    /// Why the spec cannot be followed at all: field, problem and remedy.
    pub invalid: Option<String>,
    /// Why nothing may be started under this spec: fields that are not in effect and must not be ignored.
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
