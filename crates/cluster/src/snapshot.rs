//! The input of the planner: one value made of Kubernetes objects, etcd's answers and the recorded status.
//!
//! Plain data. A value that could not be read is [`Seen::Unknown`], never empty (invariant 1).

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

/// The recorded bootstrap, written before the first object is created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Intent {
    /// `--initial-cluster-token` of the first members. Every pod and PVC carries it.
    pub token: String,
    /// The first members, which start together.
    pub members: BTreeSet<String>,
}

/// A member's pod.
#[allow(clippy::struct_excessive_bools)] // Each is a fact of its own; none excludes another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// UID of the pod, the precondition of deletes.
    pub uid: String,
    /// `false` if the pod has no owner because its owner was deleted without its children, or if its labels were
    /// removed.
    pub owned: bool,
    /// The cluster token in the pod's annotations.
    pub token: Option<String>,
    /// The cluster ID in the pod's annotations.
    pub cluster_id: Option<ClusterId>,
    /// The etcd version in the pod's annotations.
    pub version: Option<String>,
    /// The image of the etcd container in the pod's spec.
    pub image: String,
    /// Set after the image was changed in place, until the member is healthy again.
    pub changed: Option<Changed>,
    /// The flags of etcd and the names of its environment variables, without values.
    pub flags: BTreeSet<String>,
    /// The readiness probe calls `/readyz`, which not every etcd release serves.
    pub readyz: bool,
    /// The hash of the spec from which the pod was made.
    pub spec_hash: Option<String>,
    /// Differences between the pod and the current spec, except the image.
    pub difference: Difference,
    /// The names in its `--initial-cluster`.
    pub initial: BTreeSet<String>,
    /// The pod was made for a joining member (`--initial-cluster-state=existing`). At its first start, etcd compares
    /// `initial` with the member list. A first member's etcd does not.
    pub joins: bool,
    /// The data is on a PVC and outlives the pod.
    pub durable: bool,
    /// The pod is being deleted. Data that is not durable is lost.
    pub terminating: bool,
    /// The pod ended permanently (evicted, node lost) and does not run again.
    pub failed: bool,
    /// The operator asked the kubelet to sync the pod again.
    pub nudged: bool,
    /// The pod has an IP address. Its etcd may answer before the kubelet reports the container as running, because the
    /// kubelet checks once a second.
    pub addressed: bool,
    /// The etcd container runs.
    pub running: bool,
    /// Time at which the etcd container started.
    pub running_since: Option<Timestamp>,
    /// The readiness probe passes.
    pub ready: bool,
    /// Number of restarts of the etcd container.
    pub restarts: i32,
    /// The role in the pod's labels.
    pub role: Option<Role>,
    /// Why the pod does not run, as Kubernetes reports it.
    pub trouble: Option<Trouble>,
    /// Time since which the pod has not been ready, by the clock of the API server.
    pub unready_since: Option<Timestamp>,
    /// Time since which the pod's node, or the only node that reaches its volume, has been unavailable, as far as the
    /// pod shows.
    pub lost_since: Option<Timestamp>,
    /// The last exit of the etcd container.
    pub ending: Option<Ending>,
    /// The node on which the pod runs.
    pub node: Option<String>,
    /// Creation time of the pod.
    pub created: Timestamp,
}

/// Suffix of the annotation about an image change, set if the previous version could not read the data.
const UNREADABLE: &str = "unreadable";

/// A change of a pod's image in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The previous version.
    pub from: String,
    /// The number of restarts of the container at that time.
    pub restarts: i32,
    /// The previous version could not read the data either.
    pub unreadable: bool,
}

impl Changed {
    /// Parses the annotation of a pod.
    pub fn read(note: &str) -> Option<Self> {
        let mut words = note.split('/');
        Some(Self {
            from: words.next()?.to_owned(),
            restarts: words.next()?.parse().ok()?,
            unreadable: words.any(|word| word == UNREADABLE),
        })
    }

    /// The annotation of a pod.
    pub(crate) fn note(&self) -> String {
        let Self { from, restarts, .. } = self;
        let unreadable = if self.unreadable { UNREADABLE } else { "" };
        let note = format!("{from}/{restarts}/{unreadable}");
        note.trim_end_matches('/').to_owned()
    }
}

impl Pod {
    /// The pod is not being deleted, so data in it is kept.
    pub fn stays(&self) -> bool {
        !self.terminating && !self.failed
    }
}

/// A member's role in the quorum, from the label of its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// A voter with client endpoints.
    Voter,
    /// A voter that is drained from the client Service, because it is about to stop or is being defragmented.
    Busy {
        /// Start of the drain; a time long ago if unknown.
        since: Timestamp,
    },
    /// A learner.
    Learner,
}

/// Why a pod does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// No node accepts the pod.
    Unschedulable(String),
    /// The image cannot be pulled.
    Image(String),
    /// The container exits repeatedly, or cannot be created.
    Failing(String),
}

impl Trouble {
    /// The message from Kubernetes.
    pub fn message(&self) -> &str {
        match self {
            Self::Unschedulable(text) | Self::Image(text) | Self::Failing(text) => text,
        }
    }
}

/// An exit of a member's etcd container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Time of the exit.
    pub at: Timestamp,
    /// The cause, as far as it can be determined.
    pub cause: Cause,
}

/// Why a member's etcd container exited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Data on its disk is damaged or missing, in etcd's own words.
    Data(String),
    /// The container exceeded its memory limit.
    Memory,
    /// The environment does not fit: a full disk, permissions, an address, a flag.
    Surroundings(String),
    /// etcd failed, and it is unknown whether its data is the reason.
    Failed(String),
    /// The container was stopped, or exited normally.
    Ended,
}

/// A member's PVC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// UID of the PVC, the precondition of deletes.
    pub uid: String,
    /// Resource version of the PVC, the precondition for recording a removal.
    pub resource_version: String,
    /// Who removed the member from etcd, as recorded on the PVC.
    pub removal: Option<Removal>,
    /// `false` if the PVC has no owner, or if its labels were removed.
    pub owned: bool,
    /// The cluster token in the PVC's annotations.
    pub token: Option<String>,
    /// The cluster ID in the PVC's annotations.
    pub cluster_id: Option<ClusterId>,
    /// The etcd version for which the PVC was made.
    pub version: Option<String>,
    /// The first members, on the PVC of a first member.
    pub initial: BTreeSet<String>,
    /// The PVC is being deleted; it disappears with its pod.
    pub terminating: bool,
    /// Kubernetes reports the volume as lost. A pod that has mounted it may continue to run; no other pod can mount it.
    pub lost: bool,
    /// Requested and actual size and class.
    pub claim: Claim,
}

impl Disk {
    /// The data outlives the pod: the PVC is not being deleted, and its volume exists.
    pub fn stays(&self) -> bool {
        !self.terminating && !self.lost
    }

    /// Invariant 25: another party removed the member from etcd. No member is started on this PVC.
    pub(crate) fn is_evidence(&self) -> bool {
        matches!(self.removal, Some(Removal::ByOthers { .. }))
    }
}

/// Who removed the member of a PVC from etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// This operator. Recorded before the request to etcd.
    ByOperator,
    /// Another party.
    ByOthers {
        /// Time at which the operator noticed the removal.
        since: Timestamp,
        /// A majority of the voters was missing from the member list.
        majority: bool,
    },
}

const BY_OPERATOR: &str = "operator";
const MAJORITY: &str = "majority";

impl Removal {
    /// Parses the annotation of a PVC. An annotation that cannot be parsed keeps the volume until a person decides.
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

    /// The annotation of a PVC.
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

/// Requested and actual properties of a PVC, or those that it should have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// The storage class.
    pub class: Option<String>,
    /// The requested bytes.
    pub requested: Option<u64>,
    /// The requested size as written in the spec.
    pub text: String,
    /// The actual bytes.
    pub capacity: Option<u64>,
    /// Progress of the resize, as Kubernetes reports it.
    pub resizing: Option<String>,
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
    /// The leader according to a majority of the answers.
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
