//! The writes that the phases of the plan request, in the terms of etcd and Kubernetes.
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

/// How a member's etcd starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// `--initial-cluster-state=new`: only inside the recorded bootstrap (invariant 6).
    New,
    /// `--initial-cluster-state=existing`, with all members of the list to which it was added.
    Join,
    /// The member ran before. Its disk contains its state; without the disk the member must not start.
    OnDisk,
    /// The member starts a new cluster with the data of the survivor that `status.recovery` names. The data is fetched
    /// before etcd starts; without it the member must not start.
    FromSurvivor,
}

/// A member to start: the content of its PVC and its pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// The member, which is the name of its pod, PVC and Service.
    pub member: String,
    /// How etcd starts if its disk is empty.
    pub state: State,
    /// The members in `--initial-cluster`, including itself.
    pub initial: BTreeSet<String>,
    /// The role label.
    pub role: Role,
    /// The data is on a PVC.
    pub durable: bool,
    /// The etcd version it runs.
    pub version: String,
    /// The cluster token.
    pub token: String,
    /// The cluster ID once known.
    pub cluster_id: Option<ClusterId>,
}

/// Labels and annotations of a pod or PVC that follow the answers of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// The member whose pod and PVC are labeled.
    pub member: String,
    /// UID precondition: another object of the same name is not changed.
    pub uid: String,
    /// The role label; `None` leaves the label unchanged.
    pub role: Option<Role>,
    /// The cluster token.
    pub token: String,
    /// The cluster ID once known.
    pub cluster_id: Option<ClusterId>,
}

/// The complete record of a recovery: fields that are missing here are removed from the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveryRecord {
    /// `status.recovery`.
    pub recovery: Option<RecoveryStatus>,
    /// `status.staleApproval`.
    pub stale_approval: Option<String>,
    /// The cluster that replaces the recorded one.
    pub formed: Option<(Intent, ClusterId)>,
    /// The resourceVersion precondition of the EtcdCluster.
    pub over: String,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Writes a generated certificate, or notifies a pod of one.
    Certificate(CertificateWrite),
    /// Writes `status.bootstrap`, and the cluster ID if PVCs or pods carry one.
    RecordIntent {
        /// The bootstrap.
        intent: Intent,
        /// The cluster ID on the same objects.
        cluster_id: Option<ClusterId>,
        /// The resourceVersion precondition of the EtcdCluster.
        over: String,
    },
    /// Writes `status.clusterID`.
    RecordClusterId {
        /// The ID from etcd's answer.
        cluster_id: ClusterId,
        /// The resourceVersion precondition of the EtcdCluster.
        over: String,
    },
    /// Writes `status.recovery`, `status.staleApproval` and the recovered cluster.
    RecordRecovery(Box<RecoveryRecord>),
    /// Writes `status.TLS`: the TLS settings with which members start from now on.
    RecordTls {
        /// The record.
        record: Box<TlsStatus>,
        /// The resourceVersion precondition of the EtcdCluster.
        over: String,
    },
    /// Applies the headless Service.
    ApplyHeadless,
    /// Applies the client Service.
    ApplyClient {
        /// Whether the Service has endpoints for clients.
        open: bool,
    },
    /// Applies the PodDisruptionBudget.
    ApplyBudget {
        /// `minAvailable`.
        quorum: usize,
    },
    /// Deletes the PodDisruptionBudget.
    DeleteBudget,
    /// A change of etcd's authentication or of the NetworkPolicy.
    Access(AccessWrite),
    /// Creates a member's Service. An existing object is an error.
    CreateService {
        /// The member.
        member: String,
        /// Whether the Service carries the mark that a pod may have been created.
        started: bool,
        /// Whether the Service has no endpoints until it is opened.
        closed: bool,
    },
    /// Gives a member's Service its endpoints.
    OpenService {
        /// The member.
        member: String,
        /// The UID precondition of the Service.
        uid: String,
    },
    /// Applies a member's Service that differs from the builder's object.
    RepairService {
        /// The member.
        member: String,
        /// The UID precondition of the Service.
        uid: String,
    },
    /// Sets or clears the mark that a pod may have been created.
    MarkService {
        /// The member.
        member: String,
        /// The mark.
        started: bool,
        /// The resourceVersion precondition of the Service; `None` for none.
        over: Option<String>,
    },
    /// Sets the mark again on a Service that another process marked, to continue that start. The changed
    /// resourceVersion keeps that process from removing the mark later.
    RenewMark {
        /// The member.
        member: String,
        /// The resourceVersion precondition of the Service.
        over: String,
    },
    /// Deletes a member's Service.
    DeleteService {
        /// The member.
        member: String,
        /// The UID precondition of the Service.
        uid: String,
    },
    /// Creates a member's PVC. An existing object is an error.
    CreateDisk(Start),
    /// Requests a larger volume.
    GrowDisk {
        /// The member.
        member: String,
        /// The UID precondition of the PVC.
        uid: String,
        /// The size to request.
        size: String,
    },
    /// Records on a PVC who removed its member from etcd; `None` removes the record.
    NoteRemoval {
        /// The member.
        member: String,
        /// The resourceVersion precondition of the PVC.
        over: String,
        /// Who removed the member.
        removal: Option<Removal>,
    },
    /// Deletes a member's PVC.
    DeleteDisk {
        /// The member.
        member: String,
        /// The UID precondition of the PVC.
        uid: String,
    },
    /// Creates a member's pod. An existing object is an error.
    CreatePod(Start),
    /// Deletes a member's pod.
    DeletePod {
        /// The member.
        member: String,
        /// The UID precondition of the pod.
        uid: String,
    },
    /// Patches the image of a running pod to another version; the kubelet restarts the container in place.
    PatchImage {
        /// The member.
        member: String,
        /// The UID precondition of the pod.
        uid: String,
        /// The version to run.
        version: String,
        /// The version that ran before.
        changed: Changed,
    },
    /// Clears the annotation about an image change once the member is healthy.
    SettleImage {
        /// The member.
        member: String,
        /// The UID precondition of the pod.
        uid: String,
    },
    /// Records on a PVC the version with which its member starts next.
    NoteVersion {
        /// The member.
        member: String,
        /// The UID precondition of the PVC.
        uid: String,
        /// The version.
        version: String,
    },
    /// Enables a downgrade of etcd to the previous minor release, or cancels it.
    Downgrade {
        /// Major and minor number of the target release.
        to: Option<String>,
    },
    /// Changes labels and annotations of a pod to those in the spec.
    PatchMetadata {
        /// The member.
        member: String,
        /// The UID precondition of the pod.
        uid: String,
        /// Keys to set and keys to remove.
        patch: MetadataPatch,
    },
    /// Changes CPU and memory of a running pod.
    ResizePod {
        /// The member.
        member: String,
        /// The UID precondition of the pod.
        uid: String,
        /// The resources to request, and the record about the answer.
        patch: ResourcesPatch,
    },
    /// Sets owner, role and cluster ID of a pod.
    LabelPod(Label),
    /// Sets owner and cluster ID of a PVC.
    LabelDisk(Label),
    /// Adds a member to etcd.
    AddMember {
        /// The name from which the peer URL is made.
        member: String,
        /// Without a vote.
        learner: bool,
    },
    /// Sets the peer URLs of a member. The other members dial these URLs from then on.
    UpdatePeerUrls {
        /// Its name, for messages.
        member: String,
        /// Its ID.
        id: MemberId,
        /// The URLs.
        urls: Vec<String>,
    },
    /// Promotes a learner to voter.
    Promote {
        /// Its name, for messages.
        member: String,
        /// Its ID.
        id: MemberId,
    },
    /// Removes a member from etcd.
    Remove {
        /// Its name, for messages.
        member: String,
        /// Its ID.
        id: MemberId,
    },
    /// Writes `status.defragmentation`.
    RecordDefragmentation {
        /// The record.
        record: Box<DefragmentationStatus>,
        /// The resourceVersion precondition of the EtcdCluster.
        over: String,
    },
    /// Defragments one member.
    Defragment {
        /// The member.
        member: String,
        /// The time of the record that precedes the call.
        recorded: Timestamp,
    },
    /// Compacts the history.
    Compact {
        /// Older revisions are removed.
        revision: i64,
        /// The members to call, by name.
        via: Vec<String>,
    },
    /// Disarms an alarm.
    Disarm {
        /// The alarm.
        alarm: Alarm,
        /// The members to call, by name.
        via: Vec<String>,
    },
    /// Moves leadership to another member.
    MoveLeader {
        /// The leader's name.
        from: String,
        /// The new leader's name.
        to: String,
        /// The new leader's ID.
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
            // A member's certificates are created before its pod and its PVC, even if an earlier attempt left some of
            // them.
            Self::Certificate(CertificateWrite::Issue { .. }) => {
                Some(StartPart::Follow(Undo::Always))
            }
            // A pod on a PVC is created by a later plan, after the PVC exists.
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
    /// The members to call, by name.
    pub via: Vec<String>,
    /// The member list from which the change was planned.
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
