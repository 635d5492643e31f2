//! Invariant 20: no member is started with TLS material that does not hold, and a cluster that runs is not touched
//! because a Secret went bad.

use crate::plan::{Draft, STEADY};
use crate::reason::Reason;
use crate::snapshot::Observed;
use crate::write::{Order, Write};

/// Takes out of a draft what would start a member, or end one that would have to be started again, and says why.
pub(super) fn hold_back(observed: &Observed, draft: &mut Draft) {
    for fault in &observed.tls.faults {
        draft.problem(fault.code.into(), fault.message.clone());
    }
    if !observed.tls.faults.is_empty() {
        // Who cannot ask does not decide that nobody answers.
        draft
            .orders
            .retain(|order| !matches!(order, Order::Recover(_)));
    }
    let formed = observed.cluster_id.is_some();
    if observed.tls.in_the_way(formed).next().is_none() {
        return;
    }
    let held = draft.orders.len();
    draft.orders.retain(|order| match order {
        Order::Begin { .. } | Order::Reserve { .. } => false,
        // Whole chains: a Service that says a pod may have been made stands for one.
        Order::Writes(writes) => !writes.iter().any(|write| starts(write, observed)),
        Order::Recover(_) => true,
    });
    let change = draft.change.as_ref();
    let changes = change.is_some_and(|change| {
        let mut writes = change.writes.iter();
        writes.any(|write| starts(write, observed))
    });
    if changes {
        draft.change = None;
    }
    if changes || draft.orders.len() < held {
        draft.next.clear();
        let text = "no member is started or restarted until the certificates hold";
        draft.wait(Reason::TLSNotReady, text, STEADY);
    }
}

/// Whether a write starts a member, or leads to one being started.
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
        // One that serves is not ended for another that could not.
        Write::DeletePod { member, .. } | Write::Remove { member, .. } => serves(member),
        _ => false,
    }
}
