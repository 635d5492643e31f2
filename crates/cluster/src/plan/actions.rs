//! Builds actions: complete requests to Kubernetes or etcd, each with its precondition, failpoint, text and Event.
//! Performs no I/O.

mod calls;
mod patches;
mod records;
mod services;
mod start;

use api::cluster::{CertManagerTls, IssuedCertificate};
use api::names;
use jiff::Timestamp;
use member::Members;
use member::issued::{Issuance, IssuedWrite};
use member::tls::Authorities;

use crate::action::{Action, Kind, Object, Passwords, Reference, Request, StartPart, Undo};
use crate::certificates::CertificateWrite as Certificate;
use crate::reason::Reason;
use crate::snapshot::{Desired, Observed};

pub(crate) use calls::{
    append_entries, compact, defragment, disarm, downgrade, move_leader, promote, remove,
    update_peer_urls,
};
pub use patches::Label;
pub(crate) use patches::{
    change_metadata, clear_image_change, grow_volume, note_removal, note_version, notify_pod,
    resize_pod,
};
pub(crate) use services::{mark_service, unmark};
pub use start::{Start, State};

/// Reason and verb of an Event. `None` if another action reports the change, or if the action does not concern users.
type Event = Option<(Reason, &'static str)>;

/// The input of the phases: the spec in effect, the observed state and the time. It also builds the objects for
/// actions.
#[derive(Clone, Copy)]
pub(crate) struct Builder<'a> {
    pub desired: &'a Desired,
    pub observed: &'a Observed,
    pub now: Timestamp,
}

impl<'a> Builder<'a> {
    pub(crate) fn inputs(self) -> (&'a Desired, &'a Observed, Timestamp) {
        (self.desired, self.observed, self.now)
    }
}

impl Builder<'_> {
    /// The properties that the objects of all members share. They include no cluster ID.
    fn members(&self) -> Members<'_> {
        let intent = self.observed.intent.as_ref();
        self.members_of(intent.map_or("", |intent| intent.token.as_str()), None)
    }

    /// The properties that the objects of all members share, for a cluster with this token and ID.
    fn members_of<'b>(&'b self, token: &'b str, cluster_id: Option<&'b str>) -> Members<'b> {
        let object = &self.desired.object;
        // Every EtcdCluster has a namespace, so the default value is never used.
        let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
        Members::of(object, namespace, token, cluster_id)
    }

    /// The Event for an object of the whole cluster. `None` until the cluster has formed: `BootstrapBegun` reports the
    /// creation of the first objects.
    fn of_formed(&self, reason: Reason) -> Event {
        self.observed.cluster_id.map(|_| (reason, "Apply"))
    }

    pub(crate) fn apply_budget(&self, quorum: usize) -> Action {
        let budget = member::disruption_budget(&self.members(), quorum);
        action(
            "before-apply-budget",
            self.of_formed(Reason::DisruptionBudgetApplied),
            format!("apply the PodDisruptionBudget for a quorum of {quorum}"),
            Request::Apply(Object::DisruptionBudget(Box::new(budget))),
        )
    }

    pub(crate) fn delete_budget(&self) -> Action {
        let name = names::disruption_budget(&self.observed.cluster);
        let uid = self.observed.shared.budget_uid.as_deref();
        action(
            "before-delete-budget",
            Some((Reason::DisruptionBudgetDeleted, "Delete")),
            "delete the PodDisruptionBudget",
            deletion(Kind::DisruptionBudget, &name, uid.unwrap_or_default()),
        )
    }

    pub(crate) fn apply_network_policy(&self) -> Action {
        let policy = self.desired.object.spec.network_policy.clone();
        let policy = policy.unwrap_or_default();
        let operators = &self.desired.operators;
        let policy = member::network_policy(&self.members(), &policy, operators);
        action(
            "before-apply-network-policy",
            Some((Reason::NetworkPolicyApplied, "Apply")),
            "apply the NetworkPolicy",
            Request::Apply(Object::NetworkPolicy(Box::new(policy))),
        )
    }

    /// Writes a Certificate of cert-manager.
    pub(crate) fn apply_certificate(&self, tls: &CertManagerTls, of: &IssuedCertificate) -> Action {
        let made = member::issued::certificate(&self.members(), tls, of);
        issued(IssuedWrite::Apply(Box::new(made)))
    }

    /// Publishes the certificates that cert-manager has issued. `started` contains the CAs with which each running
    /// member was started, or `None` if they are unknown.
    pub(crate) fn publish(
        &self,
        issuance: &Issuance,
        started: &[Option<&Authorities>],
    ) -> Vec<Action> {
        let all = issuance.publications(&self.members(), started, self.now);
        let all = all.into_iter().map(Box::new);
        all.map(|one| issued(IssuedWrite::Publish(one))).collect()
    }

    pub(crate) fn delete_network_policy(&self) -> Action {
        let name = names::network_policy(&self.observed.cluster);
        let uid = self.observed.access.network_uid.as_deref();
        action(
            "before-delete-network-policy",
            Some((Reason::NetworkPolicyDeleted, "Delete")),
            "delete the NetworkPolicy",
            deletion(Kind::NetworkPolicy, &name, uid.unwrap_or_default()),
        )
    }
}

pub(crate) fn delete_pod(member: &str, uid: &str) -> Action {
    action(
        "before-delete-pod",
        Some((Reason::PodDeleted, "Delete")),
        format!("delete the pod of {member}"),
        deletion(Kind::Pod, member, uid),
    )
}

pub(crate) fn delete_volume(member: &str, uid: &str) -> Action {
    action(
        "before-delete-disk",
        Some((Reason::VolumeClaimDeleted, "Delete")),
        format!("delete the PersistentVolumeClaim of {member}"),
        deletion(Kind::VolumeClaim, member, uid),
    )
}

pub(crate) fn delete_service(member: &str, uid: &str) -> Action {
    action(
        "before-delete-service",
        Some((Reason::MemberServiceDeleted, "Delete")),
        format!("delete the Service of {member}"),
        deletion(Kind::Service, member, uid),
    )
}

/// Records the desired password in the operator's own Secret. `others`: the record keeps the earlier passwords too,
/// because root may have an earlier password in etcd.
pub(crate) fn record_passwords(others: bool) -> Action {
    action(
        "before-record-passwords",
        None,
        "record the password from spec.auth.secret in the operator's own Secret",
        Request::Passwords(Passwords::Record { others }),
    )
}

pub(crate) fn forget_passwords() -> Action {
    action(
        "before-forget-passwords",
        None,
        "delete the operator's own Secret with the recorded passwords",
        Request::Passwords(Passwords::Forget),
    )
}

/// Sets or removes the finalizer that holds the deletion of the EtcdCluster (invariant 41).
pub(crate) fn set_finalizer(set: bool, text: &str, event: Event) -> Action {
    action("before-set-finalizer", event, text, Request::Finalizer(set))
}

/// Changes one Secret of generated certificates.
pub(crate) fn certificate(write: Certificate) -> Action {
    use Certificate as C;
    let (point, event) = match &write {
        C::Authority { .. } => ("before-make-authority", Some(Reason::AuthorityCreated)),
        C::Rejoin { .. } => ("before-rejoin-authority", Some(Reason::AuthorityRejoined)),
        C::Prepare { .. } => ("before-prepare-authority", Some(Reason::AuthorityPrepared)),
        C::Switch { .. } => ("before-switch-authority", Some(Reason::AuthoritySwitched)),
        C::Retire { .. } => ("before-retire-authority", Some(Reason::AuthorityRetired)),
        C::Issue { over, .. } => {
            let renews = over.is_some();
            let reason = if renews {
                Reason::CertificateRenewed
            } else {
                Reason::CertificateIssued
            };
            ("before-issue-certificate", Some(reason))
        }
        C::Trust { .. } => ("before-write-trust-bundle", None),
        C::Mark { .. } => ("before-mark-secret", None),
    };
    let event = event.map(|reason| match reason {
        Reason::AuthorityCreated | Reason::CertificateIssued => (reason, "Create"),
        Reason::CertificateRenewed => (reason, "Renew"),
        _ => (reason, "Rotate"),
    });
    // If the certificate of a member cannot be issued, the annotation `started` of its Service is always removed: no
    // pod exists, because the operator issues certificates before it creates the PVC and the pod.
    let start = matches!(write, C::Issue { .. }).then_some(StartPart::Follow(Undo::Always));
    let text = write.to_string();
    let request = Request::Certificate(write);
    Action {
        start,
        ..action(point, event, text, request)
    }
}

/// Writes or deletes a Certificate of cert-manager, or publishes an issued certificate.
pub(crate) fn issued(write: IssuedWrite) -> Action {
    let (point, event) = match &write {
        IssuedWrite::Apply(_) => ("before-apply-certificate", None),
        IssuedWrite::Discard { .. } => ("before-delete-certificate", None),
        IssuedWrite::Publish(one) if !one.renews => ("before-publish-certificate", None),
        IssuedWrite::Publish(one) => {
            let event = match &one.over {
                Some(_) => (Reason::CertificateRenewed, "Renew"),
                None => (Reason::CertificateIssued, "Create"),
            };
            ("before-publish-certificate", Some(event))
        }
    };
    let text = write.to_string();
    action(point, event, text, Request::Issued(write))
}

/// Deletes the Secret of a removed member's certificate.
pub(crate) fn discard_certificate(secret: &str, uid: &str) -> Action {
    let text = format!("delete Secret {secret}");
    let request = deletion(Kind::Secret, secret, uid);
    action("before-discard-certificate", None, text, request)
}

fn action(point: &'static str, event: Event, text: impl Into<String>, request: Request) -> Action {
    Action {
        point,
        text: text.into(),
        event,
        start: None,
        request,
    }
}

fn deletion(kind: Kind, name: &str, uid: &str) -> Request {
    Request::Delete(Reference {
        kind,
        name: name.to_owned(),
        uid: uid.to_owned(),
    })
}
