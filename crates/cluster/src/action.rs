//! Actions: the requests that a plan consists of. [`crate::execute`] sends each request unchanged.
//!
//! No plan contains keys or passwords (invariant 14): the executor adds them to a Secret when it sends the Secret.

use etcd::{Alarm, MemberId, Members};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt;
use member::issued::IssuedWrite;
use serde_json::Value;

use crate::certificates::CertificateWrite;
use crate::reason::Reason;

/// One request, and the texts that describe it in logs and Events.
#[derive(Clone, Debug, PartialEq)]
pub struct Action {
    /// Name of the failpoint that runs before the request, as in `FAILPOINTS=before-create-pod=panic`.
    pub point: &'static str,
    /// Imperative phrase for Events and logs, such as `remove db-a from etcd`.
    pub text: String,
    /// Reason and verb of the Event; `None` for an action that sends no Event.
    pub event: Option<(Reason, &'static str)>,
    /// The role of this action in the start of a member; `None` if the action belongs to no start.
    pub start: Option<StartPart>,
    /// The request to the API server or to etcd.
    pub request: Request,
}

impl Action {
    /// The member whose pod the action creates; `None` for any other action.
    pub fn creates_pod(&self) -> Option<String> {
        match &self.request {
            Request::Create(Object::Pod(pod)) => Some(pod.name_any()),
            _ => None,
        }
    }

    /// The name of the object that the action deletes; `None` unless the action deletes an object of this kind.
    pub fn deletes(&self, kind: Kind) -> Option<&str> {
        match &self.request {
            Request::Delete(deleted) if deleted.kind == kind => Some(&deleted.name),
            _ => None,
        }
    }

    /// True if the action changes the image of a running pod, so that the kubelet restarts the container.
    pub fn changes_image(&self) -> bool {
        matches!(&self.request, Request::Patch(patch) if patch.form == PatchForm::Strategic)
    }

    /// True if the action adds a member to etcd.
    pub fn adds_member(&self) -> bool {
        matches!(self.request, Request::Etcd(EtcdCall::AddMember { .. }))
    }

    /// The member that the action removes from etcd; `None` for any other action.
    pub fn removes_member(&self) -> Option<&str> {
        match &self.request {
            Request::Etcd(EtcdCall::Remove { member, .. }) => Some(member),
            _ => None,
        }
    }
}

/// A sequence of actions. If an action fails, the executor does not send the later actions, and the next reconcile
/// plans them again.
pub type Chain = Vec<Action>;

/// A change of etcd's members or of its leader. The executor sends the change only if etcd's current member list
/// equals `planned_from` (invariant 11).
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The requests of the change, in order. A change has several requests only if it adds learners, or if it first
    /// records the removal of a member on the member's PVC.
    pub chain: Chain,
    /// Names of the members to which the executor sends the etcd calls of `chain`.
    pub via: Vec<String>,
    /// The member list from which the change was planned.
    pub planned_from: Members,
}

/// One step: independent chains, and at most one change of the members.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// Chains of actions that depend neither on each other nor on `change`. The executor sends these chains
    /// concurrently.
    pub chains: Vec<Chain>,
    /// At most one change of the members per step (invariant 2).
    pub change: Option<Change>,
}

impl Step {
    /// True if the step sends no request.
    pub fn is_empty(&self) -> bool {
        self.chains.is_empty() && self.change.is_none()
    }
}

/// The role of an action in the start of a member. A start first sets the annotation `started` on the member's Service,
/// which records that a pod of the member may exist (invariants 6 and 11).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartPart {
    /// Sets the annotation `started` on the Service of this member. If a later action of the start fails, this operator
    /// process may remove the annotation.
    Mark(String),
    /// Renews the annotation `started`, which another operator process has set on the Service of this member. This
    /// process never removes a renewed annotation.
    MarkAgain(String),
    /// Creates the certificates, the PVC or the pod of the member. The [`Undo`] value decides whether a failure of this
    /// action removes the annotation `started`.
    Follow(Undo),
    /// Creates the pod of this member again, on the volume with the member's data.
    Return(String),
}

/// Condition under which the failure of an action removes the annotation `started` from the member's Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undo {
    /// Any failure removes the annotation, because no PVC and no pod of the member exists yet.
    Always,
    /// A failure removes the annotation only if the request certainly had no effect.
    IfNotDone,
}

impl StartPart {
    /// The member on whose Service this action sets or renews the annotation `started`; `None` for other actions.
    pub fn announces(&self) -> Option<&str> {
        match self {
            Self::Mark(member) | Self::MarkAgain(member) => Some(member),
            Self::Follow(_) | Self::Return(_) => None,
        }
    }

    /// The member on whose Service this action sets the annotation `started`; `None` for other actions.
    pub fn marks(&self) -> Option<&str> {
        match self {
            Self::Mark(member) => Some(member),
            Self::MarkAgain(_) | Self::Follow(_) | Self::Return(_) => None,
        }
    }

    /// True if a failure of this action removes the annotation `started`. `not_done`: the request certainly had no
    /// effect.
    pub fn is_undone(&self, not_done: bool) -> bool {
        match self {
            Self::Follow(Undo::Always) => true,
            Self::Follow(Undo::IfNotDone) => not_done,
            Self::Mark(_) | Self::MarkAgain(_) | Self::Return(_) => false,
        }
    }
}

/// One request to the API server or to etcd.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// Creates the object. The request fails if an object of the same name exists.
    Create(Object),
    /// Applies the object (server-side apply). If the object contains a UID, the request never changes a later object
    /// of the same name.
    Apply(Object),
    /// Patches a Kubernetes object.
    Patch(Patch),
    /// Changes CPU and memory of a running pod, and records the API server's response on the pod.
    Resize(Box<Resize>),
    /// Deletes a Kubernetes object, with its UID as precondition.
    Delete(Reference),
    /// Writes a record to the status of the EtcdCluster.
    Record(StatusRecord),
    /// Sets or removes the finalizer [`api::names::FINALIZER_BACKUP`] of the EtcdCluster, with the UID and the
    /// resourceVersion as preconditions.
    Finalizer(bool),
    /// A call to etcd's members.
    Etcd(EtcdCall),
    /// Writes a Secret of generated certificates.
    Certificate(CertificateWrite),
    /// Writes or deletes a Certificate of cert-manager, or publishes an issued certificate.
    Issued(IssuedWrite),
    /// Writes the Secret with the operator's record of passwords.
    Passwords(Passwords),
}

/// A Kubernetes object that an action creates or applies.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    /// A Service of the cluster or of a member.
    Service(Box<Service>),
    /// The PVC of a member.
    VolumeClaim(Box<PersistentVolumeClaim>),
    /// The pod of a member.
    Pod(Box<Pod>),
    /// The PodDisruptionBudget of the cluster.
    DisruptionBudget(Box<PodDisruptionBudget>),
    /// The NetworkPolicy of the cluster.
    NetworkPolicy(Box<NetworkPolicy>),
}

/// The kind of a Kubernetes object that an action patches or deletes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A Service of the cluster or of a member.
    Service,
    /// The PVC of a member.
    VolumeClaim,
    /// The pod of a member.
    Pod,
    /// The PodDisruptionBudget of the cluster.
    DisruptionBudget,
    /// The NetworkPolicy of the cluster.
    NetworkPolicy,
    /// A Secret of generated certificates or passwords.
    Secret,
}

/// An observed object. The UID distinguishes the object from a later object of the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The kind of the object that the action patches or deletes.
    pub kind: Kind,
    /// The name of the object, which is in the namespace of the EtcdCluster.
    pub name: String,
    /// UID of the object, the precondition of the request.
    pub uid: String,
}

/// A patch of an observed object. The body contains the UID or the resourceVersion as the precondition.
#[derive(Clone, Debug, PartialEq)]
pub struct Patch {
    /// The kind of the patched object.
    pub kind: Kind,
    /// The name of the patched object, in the namespace of the EtcdCluster.
    pub name: String,
    /// The patch, with its precondition.
    pub body: Value,
    /// How the API server merges lists of the body into the object.
    pub form: PatchForm,
    /// The report if the API server rejects the patch with status 403 or 422; `None` reports an ordinary error.
    pub rejection: Option<Rejection>,
}

/// How the API server applies a patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchForm {
    /// JSON merge patch: a list in the patch replaces the whole list of the object.
    Merge,
    /// Strategic merge patch: containers are merged by name. [`Request::Patch`] uses this form only for changes of a
    /// pod's image.
    Strategic,
}

/// The report to the user if the API server rejects a request because of the configuration of the Kubernetes cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// The failed action, as text.
    pub what: String,
    /// What the user must do about the rejection.
    pub remedy: &'static str,
    /// The reason of the reported problem.
    pub reason: Reason,
}

/// A resize of a pod in place. The subresource `resize` exists in Kubernetes 1.33 and later.
#[derive(Clone, Debug, PartialEq)]
pub struct Resize {
    /// The patch that is sent to the pod's subresource `resize`.
    pub patch: Patch,
    /// The patch that is sent after the API server has accepted the resize.
    pub accepted: Patch,
    /// The patch that is sent if the API server does not have the subresource, or rejects the resize of this pod.
    pub rejected: Patch,
}

/// A record in the status. Each field manager writes all its fields in one request, because server-side apply removes a
/// field that the request omits.
#[derive(Clone, Debug, PartialEq)]
pub struct StatusRecord {
    /// The field manager. The status report has a different field manager, so a report never removes a record.
    pub manager: &'static str,
    /// The fields of the EtcdCluster's status that the action writes.
    pub status: Value,
    /// The resourceVersion of the observed EtcdCluster, the precondition of the write.
    pub over: String,
    /// The work that this record starts; `None` if the record starts no work.
    pub begins: Option<Begins>,
}

/// Work that a record in the status starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begins {
    /// A bootstrap, before any object of its members exists.
    Bootstrap,
    /// A recovery from a lost quorum.
    Recovery,
}

/// A call to etcd. The call contains member names; the executor finds the client URLs of these members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EtcdCall {
    /// Adds a member to etcd's member list.
    AddMember {
        /// Peer URL of the new member.
        url: String,
        /// True if the member joins without a vote.
        learner: bool,
    },
    /// Sets the peer URLs of a member.
    UpdatePeerUrls {
        /// The ID by which etcd knows the member.
        id: MemberId,
        /// All peer URLs of the member.
        urls: Vec<String>,
    },
    /// Promotes a learner to voter.
    Promote {
        /// The ID by which etcd knows the learner.
        id: MemberId,
    },
    /// Removes a member from etcd's member list.
    Remove {
        /// Name of the member.
        member: String,
        /// The ID by which etcd knows the member.
        id: MemberId,
    },
    /// Transfers leadership to another member.
    MoveLeader {
        /// Name of the current leader, to which the call is sent.
        from: String,
        /// ID of the next leader.
        id: MemberId,
    },
    /// Enables a downgrade of etcd to the previous minor release, or cancels it.
    Downgrade {
        /// Target release of the downgrade, such as `3.5`; `None` cancels the downgrade.
        to: Option<String>,
    },
    /// Defragments one member. The call runs outside the reconcile, because it can take minutes.
    Defragment {
        /// The member to defragment.
        member: String,
        /// Time at which the defragmentation of this member was recorded in the status.
        recorded: Timestamp,
    },
    /// Compacts etcd's history.
    Compact {
        /// The first revision that etcd keeps: etcd deletes the history before it.
        revision: i64,
        /// Names of the members to which the call is sent.
        via: Vec<String>,
    },
    /// Appends entries without effect to the Raft log of a member (invariant 29).
    AppendEntries {
        /// Name of the member, to which the call is sent.
        member: String,
        /// Index of the entry that the member must have applied.
        until: u64,
    },
    /// Disarms an alarm after its cause is resolved.
    Disarm {
        /// The alarm and its member.
        alarm: Alarm,
        /// Names of the members to which the call is sent.
        via: Vec<String>,
    },
    /// Changes etcd's authentication.
    Auth {
        /// What to change: enable, disable, or set the password.
        change: AuthChange,
        /// Names of the members to which the call is sent.
        via: Vec<String>,
    },
}

/// A change of etcd's authentication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthChange {
    /// Creates the user root and enables authentication.
    Enable,
    /// Disables authentication.
    Disable,
    /// Sets the desired password of root.
    ChangePassword,
}

/// A change of the Secret with the operator's record of passwords (invariant 21).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passwords {
    /// Writes the desired password of root to the Secret.
    Record {
        /// True if the record also keeps the earlier passwords, because the user root may still have an earlier
        /// password in etcd.
        others: bool,
    },
    /// Deletes the Secret with the record.
    Forget,
}
