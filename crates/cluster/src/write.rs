//! The primitive writes: what one request to the API server or to etcd can do.
//!
//! A step is made of these and of nothing else. [`crate::execute`] sends them; the model of the tests applies them
//! to its own world, so both go through the same halves of the same steps.

mod words;

use std::collections::BTreeSet;
use std::fmt;

use api::cluster::{DefragmentationStatus, RecoveryPhase, RecoveryStatus, TlsStatus};
use etcd::{Alarm, ClusterId, MemberId, Members};
use jiff::Timestamp;
use member::{MetadataPatch, ResourcesPatch};

use crate::access::AccessWrite;
use crate::certificates::CertificateWrite;
use crate::snapshot::{Changed, Intent, Removal, Role};
use crate::switch::Way;
use words::{alarm_of, record_of, recorded, removal_of};

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
    /// Whose Service it marks: from now on a pod may have been made.
    pub fn marks(&self) -> Option<&str> {
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
            } => Some(member),
            _ => None,
        }
    }

    /// Whose start it announces on the Service, by a mark or by another one.
    pub fn starts(&self) -> Option<&str> {
        match self {
            Self::RenewMark { member, .. } => Some(member),
            _ => self.marks(),
        }
    }

    /// What takes the mark back that the same chain has set, when this write failed and there surely is nothing of the
    /// member yet: that is no reason to give it up. `not_done`: it surely was not carried out, because it was refused or
    /// never sent. `marked` tells the version of the member's Service with that mark.
    pub fn taken_back(
        &self,
        not_done: bool,
        marked: impl FnOnce(&str) -> Option<String>,
    ) -> Option<Write> {
        let member = match self {
            // The certificates of a member come before its pod and its claim, whatever became of them; those of one that
            // runs are written by themselves.
            Self::Certificate(CertificateWrite::Issue { owner, .. }) => owner,
            // A pod on a claim is tried again on that claim, which exists by now.
            Self::CreatePod(start) if start.durable => return None,
            Self::CreatePod(start) | Self::CreateDisk(start) if not_done => &start.member,
            _ => return None,
        };
        let over = marked(member)?;
        Some(Self::MarkService {
            member: member.clone(),
            started: false,
            over: Some(over),
        })
    }
}

/// Writes that are sent in this order. The first failure ends the chain, and the rest is planned again.
pub type Chain = Vec<Write>;

/// A change of etcd's members, checked against the list it was planned from before it is made (invariant 11).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// One after the other; more than one only when learners are added, or a removal is noted before it is made.
    pub writes: Vec<Write>,
    /// The members to ask, by name.
    pub via: Vec<String>,
    /// The list it was planned from.
    pub planned_from: Members,
}

/// One step: independent chains of writes, and at most one change of the members.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Independent of each other and of the change.
    pub chains: Vec<Chain>,
    /// At most one (invariant 2).
    pub change: Option<Change>,
}

impl Step {
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
        next.is_some_and(|next| known.is_none_or(|known| known.member != next.member))
    }
}

impl Write {
    /// Where a test can interrupt a step: the boundary before this write.
    pub fn point(&self) -> &'static str {
        match self {
            Self::RecordIntent { .. } => "before-record-intent",
            Self::RecordClusterId { .. } => "before-record-cluster-id",
            Self::RecordRecovery(_) => "before-record-recovery",
            Self::RecordTls { .. } => "before-record-tls",
            Self::ApplyHeadless => "before-apply-headless",
            Self::ApplyClient { .. } => "before-apply-client",
            Self::ApplyBudget { .. } => "before-apply-budget",
            Self::DeleteBudget => "before-delete-budget",
            Self::Access(write) => write.point(),
            Self::CreateService { .. } => "before-create-service",
            Self::OpenService { .. } => "before-open-service",
            Self::RepairService { .. } => "before-repair-service",
            Self::MarkService { .. } | Self::RenewMark { .. } => "before-mark-service",
            Self::DeleteService { .. } => "before-delete-service",
            Self::CreateDisk(_) => "before-create-disk",
            Self::GrowDisk { .. } => "before-grow-disk",
            Self::NoteRemoval { .. } => "before-note-removal",
            Self::DeleteDisk { .. } => "before-delete-disk",
            Self::CreatePod(_) => "before-create-pod",
            Self::DeletePod { .. } => "before-delete-pod",
            Self::PatchImage { .. } => "before-patch-image",
            Self::SettleImage { .. } => "before-settle-image",
            Self::NoteVersion { .. } => "before-note-version",
            Self::Downgrade { .. } => "before-downgrade",
            Self::Certificate(write) => write.point(),
            Self::PatchMetadata { .. } => "before-patch-metadata",
            Self::ResizePod { .. } => "before-resize-pod",
            Self::LabelPod(_) => "before-label-pod",
            Self::LabelDisk(_) => "before-label-disk",
            Self::AddMember { .. } => "before-add-member",
            Self::UpdatePeerUrls { .. } => "before-update-peer-urls",
            Self::Promote { .. } => "before-promote-member",
            Self::Remove { .. } => "before-remove-member",
            Self::RecordDefragmentation { .. } => "before-record-defragmentation",
            Self::Defragment { .. } => "before-defragment",
            Self::Compact { .. } => "before-compact",
            Self::Disarm { .. } => "before-disarm",
            Self::MoveLeader { .. } => "before-move-leader",
        }
    }
}

impl fmt::Display for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RecordIntent {
                cluster_id: Some(cluster_id),
                ..
            } => write!(f, "record cluster {cluster_id}, which is there"),
            Self::RecordIntent { intent, .. } => {
                let names: Vec<&str> = intent.members.iter().map(String::as_str).collect();
                write!(f, "record the first members {}", names.join(", "))
            }
            Self::RecordClusterId { cluster_id, .. } => write!(f, "record cluster ID {cluster_id}"),
            Self::RecordRecovery(record) => recorded(record, f),
            Self::RecordTls { record, .. } => {
                let words = Way::of(record.policy().as_ref()).words();
                write!(f, "record that members {words}")
            }
            Self::ApplyHeadless => f.write_str("apply the headless Service"),
            Self::ApplyClient { open: true } => {
                f.write_str("let clients in through the client Service")
            }
            Self::ApplyClient { open: false } => f.write_str("apply the client Service, closed"),
            Self::ApplyBudget { quorum } => {
                write!(f, "apply the disruption budget for a quorum of {quorum}")
            }
            Self::Access(write) => write!(f, "{write}"),
            Self::DeleteBudget => f.write_str("delete the disruption budget"),
            Self::CreateService { member, .. } => write!(f, "create the Service of {member}"),
            Self::OpenService { member, .. } => write!(f, "open the Service of {member}"),
            Self::RepairService { member, .. } => write!(f, "repair the Service of {member}"),
            Self::MarkService { member, .. } => write!(f, "mark the Service of {member}"),
            Self::RenewMark { member, .. } => write!(f, "mark the Service of {member} again"),
            Self::DeleteService { member, .. } => write!(f, "delete the Service of {member}"),
            Self::CreateDisk(start) => write!(f, "create the volume claim of {}", start.member),
            Self::GrowDisk { member, size, .. } => {
                write!(f, "ask for {size} for the volume of {member}")
            }
            Self::NoteRemoval {
                member, removal, ..
            } => removal_of(member, *removal, f),
            Self::DeleteDisk { member, .. } => write!(f, "delete the volume claim of {member}"),
            Self::CreatePod(start) => write!(f, "create the pod of {}", start.member),
            Self::DeletePod { member, .. } => write!(f, "delete the pod of {member}"),
            Self::PatchImage {
                member,
                version,
                changed,
                ..
            } => write!(f, "change {member} from etcd {} to {version}", changed.from),
            Self::SettleImage { member, .. } => write!(f, "note that {member} is back"),
            Self::NoteVersion {
                member, version, ..
            } => write!(f, "note etcd {version} on the volume claim of {member}"),
            Self::Downgrade { to: Some(to) } => write!(f, "let etcd go back to {to}"),
            Self::Downgrade { to: None } => f.write_str("take the downgrade back"),
            Self::Certificate(write) => write.fmt(f),
            Self::PatchMetadata { member, .. } => {
                write!(f, "change labels and annotations of the pod of {member}")
            }
            Self::ResizePod { member, .. } => {
                write!(f, "change CPU and memory of the pod of {member}")
            }
            Self::LabelPod(label) => write!(f, "label the pod of {}", label.member),
            Self::LabelDisk(label) => write!(f, "label the volume claim of {}", label.member),
            Self::AddMember {
                member,
                learner: true,
            } => write!(f, "add {member} as a learner"),
            Self::AddMember {
                member,
                learner: false,
            } => write!(f, "add {member} as a voter"),
            Self::UpdatePeerUrls { member, urls, .. } => {
                write!(f, "have {member} dialled at {}", urls.join(", "))
            }
            Self::Promote { member, .. } => write!(f, "make {member} a voter"),
            Self::Remove { member, .. } => write!(f, "remove {member} from the cluster"),
            Self::RecordDefragmentation { record, .. } => record_of(record, f),
            Self::Defragment { member, .. } => write!(f, "defragment {member}"),
            Self::Compact { revision, .. } => {
                write!(f, "compact what is before revision {revision}")
            }
            Self::Disarm { alarm, .. } => write!(f, "take back {}", alarm_of(*alarm)),
            Self::MoveLeader { from, to, .. } => write!(f, "hand leadership from {from} to {to}"),
        }
    }
}
