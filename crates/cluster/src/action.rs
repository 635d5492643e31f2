//! Actions: the requests that a plan consists of. [`crate::execute`] sends them as they are.
//!
//! Requests to the API server are generic: an object, a patch or a reference, with its precondition inside. Only calls to
//! etcd, records in the status, and Secrets with keys have forms of their own. Keys and passwords are in no plan
//! (invariant 14), so the Secrets that hold them are completed when they are sent.

use etcd::{Alarm, MemberId, Members};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt;
use serde_json::Value;

use crate::certificates::CertificateWrite;
use crate::reason::Reason;

/// One request, and how it is reported.
#[derive(Clone, Debug, PartialEq)]
pub struct Action {
    /// The failpoint before the request: `FAILPOINTS=before-create-pod=panic`.
    pub point: &'static str,
    /// The action in words.
    pub text: String,
    /// Reason and verb of the Event; `None` for an action that does not concern users.
    pub event: Option<(Reason, &'static str)>,
    /// Its part in the start of a member.
    pub start: Option<StartPart>,
    /// The request.
    pub request: Request,
}

impl Action {
    /// The member whose pod the action creates.
    pub fn creates_pod(&self) -> Option<String> {
        match &self.request {
            Request::Create(Object::Pod(pod)) => Some(pod.name_any()),
            _ => None,
        }
    }

    /// The name of the object of this kind that the action deletes.
    pub fn deletes(&self, kind: Kind) -> Option<&str> {
        match &self.request {
            Request::Delete(deleted) if deleted.kind == kind => Some(&deleted.name),
            _ => None,
        }
    }

    /// Whether the action changes the image of a running pod. The kubelet restarts the container.
    pub fn changes_image(&self) -> bool {
        matches!(&self.request, Request::Patch(patch) if patch.form == PatchForm::Strategic)
    }

    /// Whether the action adds a member to etcd.
    pub fn adds_member(&self) -> bool {
        matches!(self.request, Request::Etcd(EtcdCall::AddMember { .. }))
    }

    /// The member that the action removes from etcd.
    pub fn removes_member(&self) -> Option<&str> {
        match &self.request {
            Request::Etcd(EtcdCall::Remove { member, .. }) => Some(member),
            _ => None,
        }
    }
}

/// Actions that are sent in this order. The first failure ends the chain, and the rest is planned again.
pub type Chain = Vec<Action>;

/// A change of etcd's members or of its leader. It is sent only if the member list equals the list from which it was
/// planned (invariant 11).
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// More than one only if learners are added, or if a removal is recorded on the PVC before it is sent.
    pub chain: Chain,
    /// The members to call, by name.
    pub via: Vec<String>,
    /// The member list from which the change was planned.
    pub planned_from: Members,
}

/// One step: independent chains, and at most one change of the members.
#[derive(Clone, Debug, Default, PartialEq)]
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

/// The part of an action in the start of a member. A start begins with a mark on the member's Service, which announces
/// that a pod may exist (invariants 6 and 11).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartPart {
    /// Sets the mark on the Service of this member.
    Mark(String),
    /// Sets the mark again that another process has set. It is never removed by this process.
    MarkAgain(String),
    /// Follows the mark. If the action fails, the mark is removed.
    Follow(Undo),
    /// Starts the member again, on the volume that contains its state.
    Return(String),
}

/// When a failed action leads to the removal of the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undo {
    /// In any case: nothing of the member exists before the actions that follow.
    Always,
    /// Only if the request was certainly not carried out.
    IfNotDone,
}

impl StartPart {
    /// The member whose start the action announces.
    pub fn announces(&self) -> Option<&str> {
        match self {
            Self::Mark(member) | Self::MarkAgain(member) => Some(member),
            Self::Follow(_) | Self::Return(_) => None,
        }
    }

    /// The member whose Service the action marks; the same process may remove the mark.
    pub fn marks(&self) -> Option<&str> {
        match self {
            Self::Mark(member) => Some(member),
            Self::MarkAgain(_) | Self::Follow(_) | Self::Return(_) => None,
        }
    }

    /// Whether the mark is removed after this action failed. `not_done`: the request was certainly not carried out.
    pub fn is_undone(&self, not_done: bool) -> bool {
        match self {
            Self::Follow(Undo::Always) => true,
            Self::Follow(Undo::IfNotDone) => not_done,
            Self::Mark(_) | Self::MarkAgain(_) | Self::Return(_) => false,
        }
    }
}

/// What is sent.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// Creates the object. An object of the same name is an error.
    Create(Object),
    /// Applies the object. With a UID, an object that was replaced is left alone.
    Apply(Object),
    /// Patches an object.
    Patch(Patch),
    /// Changes CPU and memory of a running pod, and records the answer on the pod.
    Resize(Box<Resize>),
    /// Deletes an object.
    Delete(Reference),
    /// Writes a record into the status of the EtcdCluster.
    Record(StatusRecord),
    /// Calls etcd.
    Etcd(EtcdCall),
    /// Writes a Secret of generated certificates.
    Certificate(CertificateWrite),
    /// Writes the operator's record of passwords.
    Passwords(Passwords),
}

/// An object that is created or applied.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    /// A Service.
    Service(Box<Service>),
    /// A PersistentVolumeClaim.
    VolumeClaim(Box<PersistentVolumeClaim>),
    /// A pod.
    Pod(Box<Pod>),
    /// A PodDisruptionBudget.
    DisruptionBudget(Box<PodDisruptionBudget>),
    /// A NetworkPolicy.
    NetworkPolicy(Box<NetworkPolicy>),
}

/// The kind of an object that is patched or deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A Service.
    Service,
    /// A PersistentVolumeClaim.
    VolumeClaim,
    /// A pod.
    Pod,
    /// A PodDisruptionBudget.
    DisruptionBudget,
    /// A NetworkPolicy.
    NetworkPolicy,
    /// A Secret.
    Secret,
}

/// An object that was seen. Another object of the same name has another UID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Its kind.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// The precondition.
    pub uid: String,
}

/// A patch of an object that was seen. The body contains the UID or the resourceVersion as the precondition.
#[derive(Clone, Debug, PartialEq)]
pub struct Patch {
    /// The kind of the object.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// The patch.
    pub body: Value,
    /// How lists in the body are merged.
    pub form: PatchForm,
    /// How a rejection is reported, if it needs the user.
    pub rejection: Option<Rejection>,
}

/// The form of a patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchForm {
    /// A JSON merge patch: a list replaces a list.
    Merge,
    /// A strategic merge patch: containers are merged by name. Only the image of a pod is changed in this form.
    Strategic,
}

/// Report of a request that the API server rejects because of the configuration of the Kubernetes cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// The failed action, as text.
    pub what: String,
    /// The advice for the user.
    pub remedy: &'static str,
    /// The reason that is reported.
    pub reason: Reason,
}

/// A resize of a pod in place. The subresource exists from Kubernetes 1.33 on.
#[derive(Clone, Debug, PartialEq)]
pub struct Resize {
    /// The patch of the subresource `resize`.
    pub patch: Patch,
    /// Sent after the API server accepted the resize.
    pub accepted: Patch,
    /// Sent after the API server answered that there is no such subresource, or that the pod cannot change so.
    pub rejected: Patch,
}

/// A record in the status. Each manager writes all its fields: a field that it omits is removed.
#[derive(Clone, Debug, PartialEq)]
pub struct StatusRecord {
    /// The field manager. Reports have another one, so no report removes a record.
    pub manager: &'static str,
    /// The fields of the status.
    pub status: Value,
    /// The resourceVersion of the EtcdCluster that was read.
    pub over: String,
    /// The work that begins with this record, if certificates may forbid it.
    pub begins: Option<Begins>,
}

/// Work that begins with a record in the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begins {
    /// A bootstrap with members of which no object exists.
    Bootstrap,
    /// A recovery from a lost quorum.
    Recovery,
}

/// A call to etcd. Members are named; the executor looks up where they answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EtcdCall {
    /// Adds a member.
    AddMember {
        /// Its peer URL.
        url: String,
        /// Without a vote.
        learner: bool,
    },
    /// Sets the peer URLs of a member.
    UpdatePeerUrls {
        /// Its ID.
        id: MemberId,
        /// The URLs.
        urls: Vec<String>,
    },
    /// Gives a learner its vote.
    Promote {
        /// Its ID.
        id: MemberId,
    },
    /// Removes a member.
    Remove {
        /// Its name, for rules and messages.
        member: String,
        /// Its ID.
        id: MemberId,
    },
    /// Hands leadership to another member.
    MoveLeader {
        /// The name of the leader, which is called.
        from: String,
        /// The ID of the next leader.
        id: MemberId,
    },
    /// Allows a downgrade, or cancels it.
    Downgrade {
        /// Major and minor number of the target release.
        to: Option<String>,
    },
    /// Defragments one member, in a task of its own.
    Defragment {
        /// Its name.
        member: String,
        /// When the call was recorded.
        recorded: Timestamp,
    },
    /// Compacts the history.
    Compact {
        /// Older revisions are removed.
        revision: i64,
        /// The members that are called.
        via: Vec<String>,
    },
    /// Disarms an alarm.
    Disarm {
        /// The alarm.
        alarm: Alarm,
        /// The members that are called.
        via: Vec<String>,
    },
    /// Changes etcd's authentication.
    Auth {
        /// How.
        change: AuthChange,
        /// The members that are called.
        via: Vec<String>,
    },
}

/// A change of etcd's authentication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthChange {
    /// Creates root and enables authentication.
    Enable,
    /// Disables authentication.
    Disable,
    /// Sets the desired password.
    ChangePassword,
}

/// A change of the Secret with the operator's record of passwords.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passwords {
    /// Records the desired password.
    Record {
        /// Keeps the passwords that etcd may still have.
        others: bool,
    },
    /// Deletes the record.
    Forget,
}
