//! Conflicts between the phases of a plan. Only this module resolves them.
//!
//! 1. **Priority** is the order in which the phases are called. A phase adds writes. It neither removes nor changes
//!    the writes of another phase.
//!    At most one phase changes the members (invariant 2): the first that requests it.
//! 2. **Disturbances.** A phase that takes a member out of service for a deferrable reason first asks the draft
//!    whether an earlier phase already does so: [`Draft::is_idle`], [`Draft::disturbs_members`],
//!    [`Draft::touches_pods`].
//! 3. **Certificates forbid** (invariant 20). [`settle`] removes forbidden writes once, after all other phases. It
//!    removes whole chains, because the mark on a Service announces the pod of the same chain, and it removes the
//!    membership change.
//! 4. **Certificates come first.** [`settle`] puts the certificates of a member before its pod and before the mark on
//!    its Service, and deletes them before the Service that is needed to find them.
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
    /// Whether no earlier phase changes anything.
    pub(super) fn is_idle(&self) -> bool {
        self.chains.is_empty() && self.change.is_none()
    }

    /// Whether an earlier phase takes a member out of service or changes the members.
    pub(super) fn disturbs_members(&self) -> bool {
        let ends =
            |write: &Write| matches!(write, Write::DeletePod { .. } | Write::PatchImage { .. });
        self.change.is_some() || self.chains.iter().flatten().any(ends)
    }

    /// Whether an earlier phase creates or deletes a pod.
    pub(super) fn touches_pods(&self) -> bool {
        let touches =
            |write: &Write| matches!(write, Write::DeletePod { .. } | Write::CreatePod(_));
        let change = self.change.iter().flat_map(|change| &change.chain);
        self.chains.iter().flatten().chain(change).any(touches)
    }

    /// Removes the membership change if one of its writes is forbidden, and returns it.
    fn forbid_change(&mut self, forbidden: impl Fn(&Write) -> bool) -> Option<Vec<Write>> {
        let change = self
            .change
            .take_if(|change| change.chain.iter().any(forbidden));
        change.map(|change| change.chain)
    }
}

/// Applies the restrictions of the certificates to the writes of all other phases.
pub(super) fn settle(observed: &Observed, keeper: Option<&Keeper>, draft: &mut Draft) -> Settled {
    let held = hold_back_for_faults(observed, draft);
    let Some(keeper) = keeper else {
        return Settled::default();
    };
    if keeper.cuts_off() {
        // If members reject the operator's certificate, their silence proves no lost quorum. Members that reject each
        // other's certificates have lost no data.
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

/// Starts no member with invalid certificates, and stops no serving member because a Secret became invalid. Returns
/// whether certificates block starts.
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

/// Stops no serving member that could not be restarted, and adds no member that the others would reject. Returns
/// whether an addition was removed.
fn hold_back_for_authorities(observed: &Observed, keeper: &Keeper, draft: &mut Draft) -> bool {
    let ready = keeper.is_ready();
    let joins = keeper.accepts_new_members();
    let adds = |write: &Write| matches!(write, Write::AddMember { .. });
    let held = |write: &Write| !ready && starts(write, observed) || !joins && adds(write);
    let before = draft.chains.len();
    draft.chains.retain(|chain| {
        // A start waits for its certificates, and is removed together with them.
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

/// Creates the certificates of a member before its pod. Returns the members that are started.
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
        // The certificates precede the mark that a pod may exist: a rejected certificate leaves no mark. A new
        // Service precedes them, because the operator finds the Secrets by it.
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

/// Deletes the certificates of a member before its Service, which is needed to find them.
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

/// Starts no recovery if certificates may be the only reason for the silence of members. A recovery in progress
/// continues.
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

/// Whether a write uses names of members without objects: a new bootstrap, or the Service of a future member. The
/// record of a rediscovered cluster names existing members.
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
