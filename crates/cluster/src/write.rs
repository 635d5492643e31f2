//! The writes that the phases of the plan ask for, in the words of etcd and Kubernetes.
//!
//! The phases, and the rules between them, need to know what a request means: which member is started or stopped. They
//! do not need its object. `plan::actions` turns each write into the [`crate::action::Action`] that is sent, and
//! `words` has the failpoint, the text and the Event of each.

mod words;

use std::collections::BTreeSet;

use api::cluster::{DefragmentationStatus, RecoveryPhase, RecoveryStatus, TlsStatus};
use etcd::{Alarm, ClusterId, MemberId, Members};
use jiff::Timestamp;
use member::{MetadataPatch, ResourcesPatch};

use crate::access::AccessWrite;
use crate::action::{StartPart, Undo};
use crate::certificates::CertificateWrite;
use crate::snapshot::{Changed, Intent, Removal, Role};

/// How a member's etcd begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// `--initial-cluster-state=new`: only inside the recorded bootstrap (invariant 6).
    New,
    /// `--initial-cluster-state=existing`, with all members of the list it was added to.
    Join,
    /// It ran before: its disk knows everything, and without its disk it must not start.
    OnDisk,
    /// It begins a cluster with the data of the survivor that `status.recovery` names, which is fetched before its
    /// etcd starts. Without that data it must not start.
    FromSurvivor,
}

/// A member to start: what goes into its volume claim and its pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// The member: its pod's, its claim's and its Service's name.
    pub member: String,
    /// How its etcd begins when its disk is empty.
    pub state: State,
    /// The members in `--initial-cluster`, itself included.
    pub initial: BTreeSet<String>,
    /// The role label.
    pub role: Role,
    /// Its data lies on a volume claim.
    pub durable: bool,
    /// The etcd version it runs.
    pub version: String,
    /// The cluster token.
    pub token: String,
    /// The cluster ID once known.
    pub cluster_id: Option<ClusterId>,
}

/// What stands on a pod or a claim and follows what etcd says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// Whose pod and claim.
    pub member: String,
    /// Of the object that was seen; another one of the same name is left alone.
    pub uid: String,
    /// The role label; `None` leaves it.
    pub role: Option<Role>,
    /// The cluster token.
    pub token: String,
    /// The cluster ID once known.
    pub cluster_id: Option<ClusterId>,
}

/// What is recorded of a recovery, whole: what is not in it is taken out of the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveryRecord {
    /// `status.recovery`.
    pub recovery: Option<RecoveryStatus>,
    /// `status.staleApproval`.
    pub stale_approval: Option<String>,
    /// The cluster that takes the place of the one recorded.
    pub formed: Option<(Intent, ClusterId)>,
    /// The version of the object it is written over.
    pub over: String,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Writes a generated certificate, or tells of one.
    Certificate(CertificateWrite),
    /// Writes `status.bootstrap` (and the cluster ID, when it was found on pods or claims).
    RecordIntent {
        /// What to record.
        intent: Intent,
        /// A cluster ID found with it.
        cluster_id: Option<ClusterId>,
        /// The version of the object it is written over.
        over: String,
    },
    /// Writes `status.clusterID`.
    RecordClusterId {
        /// What etcd answered.
        cluster_id: ClusterId,
        /// The version of the object it is written over.
        over: String,
    },
    /// Writes `status.recovery` and `status.staleApproval`, and the cluster that was recovered.
    RecordRecovery(Box<RecoveryRecord>),
    /// Writes `status.TLS`: what members are started with from now on.
    RecordTls {
        /// What to record.
        record: Box<TlsStatus>,
        /// The version of the object it is written over.
        over: String,
    },
    /// Applies the headless Service.
    ApplyHeadless,
    /// Applies the client Service.
    ApplyClient {
        /// Whether clients are let in.
        open: bool,
    },
    /// Applies the disruption budget.
    ApplyBudget {
        /// `minAvailable`.
        quorum: usize,
    },
    /// Deletes the disruption budget.
    DeleteBudget,
    /// Who gets in: etcd's authentication and the NetworkPolicy.
    Access(AccessWrite),
    /// Creates a member's Service; one that exists is an error.
    CreateService {
        /// Whose Service.
        member: String,
        /// Whether it carries the mark that a pod may have been made.
        started: bool,
        /// Whether it has no endpoints until it is opened.
        closed: bool,
    },
    /// Gives a member's Service its endpoints.
    OpenService {
        /// Whose Service.
        member: String,
        /// The Service that was seen.
        uid: String,
    },
    /// Applies a member's Service that is there and not as it should be.
    RepairService {
        /// Whose Service.
        member: String,
        /// The Service that was seen.
        uid: String,
    },
    /// Sets or clears the mark that a pod may have been made.
    MarkService {
        /// Whose Service.
        member: String,
        /// The mark.
        started: bool,
        /// The version of the Service that was seen; `None` over any.
        over: Option<String>,
    },
    /// Marks a Service once more that is marked, for a start that somebody else has begun: who has set that mark, and
    /// slept since, does not take it back any more.
    RenewMark {
        /// Whose Service.
        member: String,
        /// The version of the Service that was seen.
        over: String,
    },
    /// Deletes a member's Service.
    DeleteService {
        /// Whose Service.
        member: String,
        /// The Service that was seen.
        uid: String,
    },
    /// Creates a member's volume claim; one that exists is an error.
    CreateDisk(Start),
    /// Asks for a larger volume.
    GrowDisk {
        /// Whose claim.
        member: String,
        /// The claim that was seen.
        uid: String,
        /// What it asks for from now on.
        size: String,
    },
    /// Notes on a volume claim who removed its member from etcd; `None` takes the note off.
    NoteRemoval {
        /// Whose claim.
        member: String,
        /// The version of the claim that was seen.
        over: String,
        /// Who.
        removal: Option<Removal>,
    },
    /// Deletes a member's volume claim.
    DeleteDisk {
        /// Whose claim.
        member: String,
        /// The claim that was seen.
        uid: String,
    },
    /// Creates a member's pod; one that exists is an error.
    CreatePod(Start),
    /// Deletes a member's pod.
    DeletePod {
        /// Whose pod.
        member: String,
        /// The pod that was seen.
        uid: String,
    },
    /// Puts the image of another version into a running pod; the kubelet starts its container again in place.
    PatchImage {
        /// Whose pod.
        member: String,
        /// The pod that was seen.
        uid: String,
        /// The version to run.
        version: String,
        /// What ran until now.
        changed: Changed,
    },
    /// Notes on a pod that its member is back from a change of its image.
    SettleImage {
        /// Whose pod.
        member: String,
        /// The pod that was seen.
        uid: String,
    },
    /// Notes on a volume claim the version its member is to be started with.
    NoteVersion {
        /// Whose claim.
        member: String,
        /// The claim that was seen.
        uid: String,
        /// The version.
        version: String,
    },
    /// Lets etcd go back to the minor release before, or takes that back.
    Downgrade {
        /// Major and minor number of the release to go back to.
        to: Option<String>,
    },
    /// Changes labels and annotations of a pod to what the spec says.
    PatchMetadata {
        /// Whose pod.
        member: String,
        /// The pod that was seen.
        uid: String,
        /// What to set and to take away.
        patch: MetadataPatch,
    },
    /// Changes CPU and memory of a running pod.
    ResizePod {
        /// Whose pod.
        member: String,
        /// The pod that was seen.
        uid: String,
        /// What to ask for, and what to note about the answer.
        patch: ResourcesPatch,
    },
    /// Sets owner, role and cluster ID of a pod.
    LabelPod(Label),
    /// Sets owner and cluster ID of a volume claim.
    LabelDisk(Label),
    /// Adds a member to etcd.
    AddMember {
        /// The name its peer URL is made of.
        member: String,
        /// Without a vote.
        learner: bool,
    },
    /// Gives a member other peer URLs: the others dial it there from then on.
    UpdatePeerUrls {
        /// Its name, for people.
        member: String,
        /// What etcd is told.
        id: MemberId,
        /// The URLs.
        urls: Vec<String>,
    },
    /// Makes a learner a voter.
    Promote {
        /// Its name, for people.
        member: String,
        /// What etcd is told.
        id: MemberId,
    },
    /// Removes a member from etcd.
    Remove {
        /// Its name, for people.
        member: String,
        /// What etcd is told.
        id: MemberId,
    },
    /// Writes `status.defragmentation`.
    RecordDefragmentation {
        /// What to record.
        record: Box<DefragmentationStatus>,
        /// The version of the object it is written over.
        over: String,
    },
    /// Has one member write its database anew.
    Defragment {
        /// Which.
        member: String,
        /// When it was recorded that it is told.
        recorded: Timestamp,
    },
    /// Forgets old revisions.
    Compact {
        /// What is before it is forgotten.
        revision: i64,
        /// The members to ask, by name.
        via: Vec<String>,
    },
    /// Takes an alarm back.
    Disarm {
        /// Which.
        alarm: Alarm,
        /// The members to ask, by name.
        via: Vec<String>,
    },
    /// Hands the leadership over.
    MoveLeader {
        /// The leader's name.
        from: String,
        /// The new leader's name.
        to: String,
        /// What etcd is told.
        id: MemberId,
    },
}

impl Write {
    /// The part of this write in the start of a member.
    pub fn start(&self) -> Option<StartPart> {
        match self {
            Self::CreateService {
                member,
                started: true,
                ..
            }
            | Self::MarkService {
                member,
                started: true,
                ..
            } => Some(StartPart::Mark(member.clone())),
            Self::RenewMark { member, .. } => Some(StartPart::MarkAgain(member.clone())),
            // The certificates of a member come before its pod and its PVC, whatever became of them.
            Self::Certificate(CertificateWrite::Issue { .. }) => {
                Some(StartPart::Follow(Undo::Always))
            }
            // A pod on a PVC is created by a later plan: the PVC exists by now.
            Self::CreatePod(start) if start.durable => None,
            Self::CreatePod(_) | Self::CreateDisk(_) => Some(StartPart::Follow(Undo::IfNotDone)),
            _ => None,
        }
    }
}

/// Writes, or actions, that are sent in this order. The first failure ends the chain, and the rest is planned again.
pub type Chain<T = Write> = Vec<T>;

/// A change of etcd's members. It is sent only if the member list equals the list from which it was planned
/// (invariant 11).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change<T = Write> {
    /// More than one only if learners are added, or if a removal is recorded on the PVC before it is sent.
    pub chain: Chain<T>,
    /// The members to ask, by name.
    pub via: Vec<String>,
    /// The list from which it was planned.
    pub planned_from: Members,
}

/// One step: independent chains, and at most one change of the members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step<T = Write> {
    /// Independent of each other and of the change.
    pub chains: Vec<Chain<T>>,
    /// At most one (invariant 2).
    pub change: Option<Change<T>>,
}

impl<T> Default for Step<T> {
    fn default() -> Self {
        Self {
            chains: Vec::new(),
            change: None,
        }
    }
}

impl<T> Step<T> {
    /// Nothing to do.
    pub fn is_empty(&self) -> bool {
        self.chains.is_empty() && self.change.is_none()
    }
}

impl RecoveryRecord {
    /// Whether the record begins a recovery. `known`: the recovery that the status records.
    pub fn begins(&self, known: Option<&RecoveryStatus>) -> bool {
        let next = self.recovery.as_ref();
        let next = next.filter(|next| next.phase == RecoveryPhase::InProgress);
        let known = known.filter(|known| known.phase == RecoveryPhase::InProgress);
        next.is_some_and(|next| known.is_none_or(|known| known.member != next.member))
    }
}
