//! Invariant 20: no member is started with invalid certificates, and no serving member is stopped because a Secret
//! became invalid.

use crate::plan::view::is_known;
use crate::plan::{Draft, STEADY};
use crate::reason::Reason;
use crate::snapshot::Observed;
use crate::write::Write;

/// Removes from a draft every chain that would start a member, or stop one that would have to be started again, and
/// reports the reason.
pub(super) fn hold_back(observed: &Observed, draft: &mut Draft) {
    for fault in &observed.tls.faults {
        draft.problem(fault.code.into(), fault.message.clone());
    }
    if !observed.tls.faults.is_empty() {
        drop_recovery(observed, draft);
    }
    let formed = observed.cluster_id.is_some();
    if observed.tls.in_the_way(formed).next().is_none() {
        return;
    }
    let held = draft.chains.len();
    // Whole chains: the mark on a Service announces the pod of the same chain.
    draft.chains.retain(|chain| {
        let mut writes = chain.iter();
        !writes.any(|write| starts(write, observed) || names_new_members(write, observed))
    });
    let change = draft.change.as_ref();
    let changes = change.is_some_and(|change| {
        let mut writes = change.chain.iter();
        writes.any(|write| starts(write, observed))
    });
    if changes {
        draft.change = None;
    }
    if changes || draft.chains.len() < held {
        draft.next.clear();
        let text = "no member is started or restarted until the certificates hold";
        draft.wait(Reason::TLSNotReady, text, STEADY);
    }
}

/// No recovery begins if the members may only be silent because of certificates. A recovery in progress continues.
pub(super) fn drop_recovery(observed: &Observed, draft: &mut Draft) {
    let known = observed.recovery.record.as_ref();
    let begins = |write: &Write| match write {
        Write::RecordRecovery(record) => record.begins(known),
        _ => false,
    };
    draft.chains.retain(|chain| !chain.iter().any(begins));
}

/// Whether a write starts a member, or leads to the start of one.
pub(super) fn starts(write: &Write, observed: &Observed) -> bool {
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
