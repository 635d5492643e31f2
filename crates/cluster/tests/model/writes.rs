//! The writes of a plan, as calls to etcd and Kubernetes. The module `sent` converts the actions of a plan to these
//! types.

use std::fmt;
use std::time::Duration;

use api::cluster::{
    BeforeChangeStatus, DefragmentationStatus, RaftLogStatus, RecoveryPhase, RecoveryStatus,
    TlsStatus,
};
use cluster::action::{StartPart, Undo};
use cluster::certificates::CertificateWrite;
use cluster::plan::{Explanation, Label, Start, State};
use cluster::snapshot::{Changed, Intent, Removal};
use etcd::{Alarm, ClusterId, MemberId, Members};
use jiff::Timestamp;
use member::{MetadataPatch, ResourcesPatch};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecoveryRecord {
    pub(crate) recovery: Option<RecoveryStatus>,
    pub(crate) stale_approval: Option<String>,
    pub(crate) formed: Option<(Intent, ClusterId)>,
    pub(crate) over: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Write {
    Certificate(CertificateWrite),
    /// Writes the annotations of a pod about its certificates. `None` leaves an annotation unchanged.
    NotifyPod {
        member: String,
        uid: String,
        trust: Option<String>,
        authorities: Option<String>,
        certificates: String,
    },
    DeleteSecret {
        secret: String,
        uid: String,
    },
    RecordIntent {
        intent: Intent,
        cluster_id: Option<ClusterId>,
        over: String,
    },
    RecordClusterId {
        cluster_id: ClusterId,
        over: String,
    },
    RecordRecovery(Box<RecoveryRecord>),
    RecordTls {
        record: Box<TlsStatus>,
        over: String,
    },
    ApplyHeadless,
    ApplyClient {
        open: bool,
    },
    ApplyBudget {
        quorum: usize,
    },
    DeleteBudget,
    Access(AccessWrite),
    CreateService {
        member: String,
        started: bool,
        closed: bool,
    },
    OpenService {
        member: String,
        uid: String,
    },
    RepairService {
        member: String,
        uid: String,
    },
    MarkService {
        member: String,
        started: bool,
        over: Option<String>,
    },
    RenewMark {
        member: String,
        over: String,
    },
    DeleteService {
        member: String,
        uid: String,
    },
    CreateDisk(Start),
    GrowDisk {
        member: String,
        uid: String,
        size: String,
    },
    NoteRemoval {
        member: String,
        over: String,
        removal: Option<Removal>,
    },
    DeleteDisk {
        member: String,
        uid: String,
    },
    CreatePod(Start),
    DeletePod {
        member: String,
        uid: String,
    },
    PatchImage {
        member: String,
        uid: String,
        version: String,
        changed: Changed,
    },
    SettleImage {
        member: String,
        uid: String,
    },
    NoteVersion {
        member: String,
        uid: String,
        version: String,
        served: Option<String>,
    },
    Downgrade {
        to: Option<String>,
    },
    PatchMetadata {
        member: String,
        uid: String,
        patch: MetadataPatch,
    },
    ResizePod {
        member: String,
        uid: String,
        patch: ResourcesPatch,
    },
    LabelPod(Label),
    LabelDisk(Label),
    AddMember {
        member: String,
        learner: bool,
    },
    UpdatePeerUrls {
        member: String,
        id: MemberId,
        urls: Vec<String>,
    },
    Promote {
        member: String,
        id: MemberId,
    },
    Remove {
        member: String,
        id: MemberId,
    },
    RecordDefragmentation {
        record: Box<DefragmentationStatus>,
        over: String,
    },
    /// Writes `status.raftLog`. `None` removes the field.
    RecordRaftLog {
        record: Option<RaftLogStatus>,
        over: String,
    },
    /// Writes `status.beforeChange`. `None` removes the field.
    RecordBeforeChange {
        record: Option<BeforeChangeStatus>,
        over: String,
    },
    /// Sets or removes the finalizer that holds the deletion of the EtcdCluster.
    SetFinalizer {
        set: bool,
        over: String,
    },
    Defragment {
        member: String,
        recorded: Timestamp,
    },
    Compact {
        revision: i64,
        via: Vec<String>,
    },
    AppendEntries {
        member: String,
        until: u64,
    },
    Disarm {
        alarm: Alarm,
        via: Vec<String>,
    },
    MoveLeader {
        from: String,
        to: String,
        id: MemberId,
    },
}

impl Write {
    /// The role of this write in the start of a member. The action of the plan must have the same role.
    pub(crate) fn start(&self) -> Option<StartPart> {
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
            Self::Certificate(CertificateWrite::Issue { .. }) => {
                Some(StartPart::Follow(Undo::Always))
            }
            Self::CreatePod(start) if start.durable => {
                let returns = start.state == State::OnDisk;
                returns.then(|| StartPart::Return(start.member.clone()))
            }
            Self::CreatePod(_) | Self::CreateDisk(_) => Some(StartPart::Follow(Undo::IfNotDone)),
            _ => None,
        }
    }
}

impl fmt::Display for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessWrite {
    Record { others: bool },
    Forget,
    Enable,
    Disable,
    ChangePassword,
    ApplyNetwork,
    DeleteNetwork,
}

impl RecoveryRecord {
    /// True if the record begins a recovery. `known`: the recovery in the status before the write.
    pub(crate) fn begins(&self, known: Option<&RecoveryStatus>) -> bool {
        let next = self.recovery.as_ref();
        let next = next.filter(|next| next.phase == RecoveryPhase::InProgress);
        let known = known.filter(|known| known.phase == RecoveryPhase::InProgress);
        next.is_some_and(|next| known.is_none_or(|known| known.member != next.member))
    }
}

pub(crate) type Chain = Vec<Write>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) chain: Chain,
    pub(crate) via: Vec<String>,
    pub(crate) planned_from: Members,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) chains: Vec<Chain>,
    pub(crate) change: Option<Change>,
}

impl Step {
    pub(crate) fn is_empty(&self) -> bool {
        self.chains.is_empty() && self.change.is_none()
    }
}

/// A plan whose actions are converted to writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) step: Step,
    pub(crate) asks: Option<i64>,
    pub(crate) next: Option<String>,
    pub(crate) waiting_for: Vec<Explanation>,
    pub(crate) problems: Vec<Explanation>,
    pub(crate) requeue: Duration,
}
