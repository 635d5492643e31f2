//! Conflicts between the phases of a plan. They are settled here and nowhere else.
//!
//! 1. **Priority** is the order in which the phases are called. A phase adds writes. It neither removes nor changes the
//!    writes of another phase.
//!    At most one phase changes the members (invariant 2): the first that asks for it.
//! 2. **Disturbances.** A phase that takes a member out of service for a reason that can wait asks the draft first whether
//!    a phase before it does so already: [`Draft::is_idle`], [`Draft::disturbs_members`], [`Draft::touches_pods`].
//! 3. **Certificates forbid** (invariant 20). [`settle`] removes what they do not allow, once, after all other phases: whole
//!    chains, because the mark on a Service announces the pod of the same chain, and the change of the members.
//! 4. **Certificates come first.** [`settle`] puts the certificates of a member before its pod and before the mark on its
//!    Service, and deletes them before the Service by which they are found.
//! 5. The certificates themselves are the last phase. Nothing is removed from it.

use std::collections::BTreeSet;

use crate::certificates::CertificateWrite;
use crate::plan::certificates::{Keeper, Settled};
use crate::plan::view::is_known;
use crate::plan::{BLIND, Draft, STEADY};
use crate::reason::Reason;
use crate::snapshot::Observed;
use crate::write::Write;

impl Draft<'_> {
    /// No phase so far changes anything.
    pub(super) fn is_idle(&self) -> bool {
        self.chains.is_empty() && self.change.is_none()
    }

    /// A phase before takes a member out of service, or changes the members.
    pub(super) fn disturbs_members(&self) -> bool {
        let ends =
            |write: &Write| matches!(write, Write::DeletePod { .. } | Write::PatchImage { .. });
        self.change.is_some() || self.chains.iter().flatten().any(ends)
    }

    /// A phase before creates or deletes a pod.
    pub(super) fn touches_pods(&self) -> bool {
        let touches =
            |write: &Write| matches!(write, Write::DeletePod { .. } | Write::CreatePod(_));
        let change = self.change.iter().flat_map(|change| &change.chain);
        self.chains.iter().flatten().chain(change).any(touches)
    }

    /// Removes the change of the members if one of its writes is forbidden. The result is the removed change.
    fn forbid_change(&mut self, forbidden: impl Fn(&Write) -> bool) -> Option<Vec<Write>> {
        let change = self
            .change
            .take_if(|change| change.chain.iter().any(forbidden));
        change.map(|change| change.chain)
    }
}

/// Applies what certificates forbid and demand to the writes of all other phases.
pub(super) fn settle(observed: &Observed, keeper: Option<&Keeper>, draft: &mut Draft) -> Settled {
    let held = hold_back_for_faults(observed, draft);
    let Some(keeper) = keeper else {
        return Settled::default();
    };
    if keeper.cuts_off() {
        // An operator that is not let in does not decide that no member answers, and members that do not let each other in
        // have lost nothing.
        drop_recovery(observed, draft);
    }
    let adds = hold_back_for_authorities(observed, keeper, draft);
    let started = certificates_before_pods(keeper, draft);
    certificates_before_services(keeper, draft);
    Settled {
        started,
        adds,
        held,
    }
}

/// No member is started with invalid certificates, and no serving member is stopped because a Secret became invalid. The
/// result is whether certificates are in the way.
fn hold_back_for_faults(observed: &Observed, draft: &mut Draft) -> bool {
    if !observed.tls.faults.is_empty() {
        drop_recovery(observed, draft);
    }
    let formed = observed.cluster_id.is_some();
    if observed.tls.in_the_way(formed).next().is_none() {
        return false;
    }
    let before = draft.chains.len();
    draft.chains.retain(|chain| {
        let mut writes = chain.iter();
        !writes.any(|write| starts(write, observed) || names_new_members(write, observed))
    });
    let change = draft.forbid_change(|write| starts(write, observed));
    if change.is_some() || draft.chains.len() < before {
        draft.next.clear();
        let text = "no member is started or restarted until the certificates hold";
        draft.wait(Reason::TLSNotReady, text, STEADY);
    }
    true
}

/// A serving member is not stopped while it could not be started again, and no member is added that the others would not
/// accept. The result is whether one was to be added.
fn hold_back_for_authorities(observed: &Observed, keeper: &Keeper, draft: &mut Draft) -> bool {
    let ready = keeper.is_ready();
    let joins = keeper.accepts_new_members();
    let adds = |write: &Write| matches!(write, Write::AddMember { .. });
    let held = |write: &Write| !ready && starts(write, observed) || !joins && adds(write);
    let before = draft.chains.len();
    draft.chains.retain(|chain| {
        // A start waits for its certificates, and is taken out with them.
        let begins = |write: &Write| matches!(write, Write::CreatePod(_));
        chain.iter().any(begins) || !chain.iter().any(held)
    });
    let change = draft.forbid_change(held);
    if change.is_some() || draft.chains.len() < before {
        let text = "no member is added or restarted until the certificate authorities allow it";
        draft.wait(Reason::AuthorityRotating, text, BLIND);
    }
    !joins && change.is_some_and(|change| change.iter().any(adds))
}

/// The certificates of a member exist before its pod is created. The result is the members that are started.
fn certificates_before_pods(keeper: &Keeper, draft: &mut Draft) -> BTreeSet<String> {
    let mut started = BTreeSet::new();
    let ready = keeper.is_ready();
    let before = draft.chains.len();
    draft.chains.retain_mut(|chain| {
        let pods = chain.iter().enumerate();
        let mut pods = pods.filter_map(|(at, write)| match write {
            Write::CreatePod(start) => Some((at, start.member.clone())),
            _ => None,
        });
        let Some((at, member)) = pods.next() else {
            return true;
        };
        if !ready {
            return false;
        }
        // Before the mark that a pod may exist: what is rejected here leaves none. A Service that is yet to be created
        // comes first, because the Secrets are found by it.
        let prepares = |write: &Write| {
            matches!(
                write,
                Write::MarkService { .. } | Write::RenewMark { .. } | Write::CreateDisk(_)
            )
        };
        let first = chain.iter().position(prepares).unwrap_or(at);
        let issued = keeper.of_member(&member).into_iter();
        chain.splice(first..first, issued.map(Write::Certificate));
        started.insert(member);
        true
    });
    if draft.chains.len() < before {
        draft.wait(
            Reason::AuthorityMissing,
            "members are started when there are authorities",
            BLIND,
        );
    }
    started
}

/// The certificates of a deleted member are deleted before its Service, by which they are found.
fn certificates_before_services(keeper: &Keeper, draft: &mut Draft) {
    for chain in &mut draft.chains {
        let writes = chain.iter().enumerate();
        let mut deleted = writes.filter_map(|(at, write)| match write {
            Write::DeleteService { member, .. } => Some((at, member.clone())),
            _ => None,
        });
        let Some((at, member)) = deleted.next() else {
            continue;
        };
        let discards = keeper.held_of(&member).map(|(secret, held)| {
            Write::Certificate(CertificateWrite::Discard {
                secret: secret.clone(),
                uid: held.uid.clone(),
            })
        });
        let discards: Vec<Write> = discards.collect();
        chain.splice(at..at, discards);
    }
}

/// No recovery begins if the members may only be silent because of certificates. A recovery in progress continues.
fn drop_recovery(observed: &Observed, draft: &mut Draft) {
    let known = observed.recovery.record.as_ref();
    let begins = |write: &Write| match write {
        Write::RecordRecovery(record) => record.begins(known),
        _ => false,
    };
    draft.chains.retain(|chain| !chain.iter().any(begins));
}

/// Whether a write starts a member, or leads to the start of one.
fn starts(write: &Write, observed: &Observed) -> bool {
    let serves = |member: &String| {
        let pod = observed.pods.get(member);
        pod.is_some_and(|pod| pod.ready && pod.stays())
    };
    match write {
        Write::CreatePod(_)
        | Write::AddMember { .. }
        | Write::PatchImage { .. }
        | Write::ResizePod { .. } => true,
        // A serving member is not stopped for a replacement that could not start.
        Write::DeletePod { member, .. } | Write::Remove { member, .. } => serves(member),
        _ => false,
    }
}

/// Whether a write uses names of members that have no objects yet: a new bootstrap, or the Service of a member that is
/// added later. The record of a cluster that was found again names existing members.
fn names_new_members(write: &Write, observed: &Observed) -> bool {
    match write {
        Write::RecordIntent {
            intent,
            cluster_id: None,
            ..
        } => !intent.members.iter().any(|name| is_known(observed, name)),
        Write::CreateService { started, .. } => !started,
        _ => false,
    }
}
