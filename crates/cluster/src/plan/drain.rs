//! A member whose turn it is to stop, or to be busy, is taken out of the client Service first: whoever connects anew
//! reaches another one, and whoever is led away by its end does not meet it again.
//!
//! Nothing remembers that it is out. Each plan says from the world alone who has to be ([`is_drained`], [`keep`]), and
//! everybody else is put back ([`settle`]), whoever took them out and whatever became of him.
//!
//! Connections that are there stay where they are: neither Kubernetes nor etcd moves them. A member that stops lets
//! its clients go by itself; one that is defragmented does not, and its clients' deadlines have to do it.

use std::time::Duration;

use etcd::ClusterId;
use jiff::Timestamp;

use crate::plan::age::age;
use crate::plan::view::{MemberState, View};
use crate::plan::{Draft, joining};
use crate::reason::Reason;
use crate::snapshot::{Intent, Role};
use crate::write::{Label, Write};

/// How long until new connections surely go elsewhere: kube-proxy writes its rules at most once a second.
const MOVES: Duration = Duration::from_secs(1);

/// Whether new clients go elsewhere by now. Otherwise it is seen to, and waited for.
pub(super) fn is_drained(
    now: Timestamp,
    view: &View,
    seat: &MemberState,
    draft: &mut Draft,
) -> bool {
    if seat.pod.is_none() {
        // Somebody else runs it, and leads clients to it.
        return true;
    }
    let others = view.voters().filter(|other| other.id() != seat.id());
    if !{ others }.any(|other| is_endpoint(other) && !is_out(other)) {
        // Nobody else would take them.
        return true;
    }
    draft.drained.insert(seat.name.clone());
    let out = match seat.pod.and_then(|pod| pod.role) {
        Some(Role::Busy { since }) => age(since, now),
        _ => Duration::ZERO,
    };
    let left = MOVES.saturating_sub(out);
    if left.is_zero() {
        return true;
    }
    let text = format!("new clients are led past {} first", seat.name);
    draft.wait(Reason::LeadingClientsAway, text, left);
    false
}

/// It is not over yet: a member that is out stays so.
pub(super) fn keep(seat: &MemberState, draft: &mut Draft) {
    if is_out(seat) {
        draft.drained.insert(seat.name.clone());
    }
}

/// Takes out who has to be, and puts back everybody else.
pub(super) fn settle(
    (view, intent, cluster_id): (&View, &Intent, ClusterId),
    now: Timestamp,
    draft: &mut Draft,
) {
    // Invariant 24: one that has not served yet, and whoever went on his own.
    for seat in view.voters().filter(|seat| joining::is_yet_to_serve(seat)) {
        keep(seat, draft);
    }
    // Invariant 22: clients always find a member that serves. Who is let in by this very plan does not count yet: the
    // labels of one plan are written beside each other.
    let stays = |seat: &MemberState| {
        is_endpoint(seat) && is_in(seat) && !draft.drained.contains(&seat.name)
    };
    let mut out = if view.voters().any(stays) {
        std::mem::take(&mut draft.drained)
    } else {
        [].into()
    };
    // It says itself that it serves nobody yet.
    let joining = view.voters().filter(|seat| seat.is_joining());
    out.extend(joining.map(|seat| seat.name.clone()));
    for seat in view.voters() {
        let Some(pod) = seat.pod.filter(|pod| pod.stays() && pod.owned) else {
            continue;
        };
        let role = match (pod.role, out.contains(&seat.name)) {
            (Some(Role::Voter), true) => Role::Busy { since: now },
            // By a clock that is ahead.
            (Some(Role::Busy { since }), true) if since > now => Role::Busy { since: now },
            (Some(Role::Busy { .. }), false) => Role::Voter,
            _ => continue,
        };
        draft.say(match role {
            Role::Busy { .. } => format!("lead new clients past {}", seat.name),
            _ => format!("let clients in to {} again", seat.name),
        });
        draft.write(Write::LabelPod(Label {
            member: seat.name.clone(),
            uid: pod.uid.clone(),
            role: Some(role),
            token: intent.token.clone(),
            cluster_id: Some(cluster_id),
        }));
    }
}

/// It has been out, and for no longer than this.
pub(super) fn is_out_since(now: Timestamp, seat: &MemberState, most: Duration) -> bool {
    match seat.pod.and_then(|pod| pod.role) {
        Some(Role::Busy { since }) => age(since, now) <= most,
        _ => false,
    }
}

fn is_out(seat: &MemberState) -> bool {
    seat.pod
        .is_some_and(|pod| matches!(pod.role, Some(Role::Busy { .. })))
}

fn is_in(seat: &MemberState) -> bool {
    seat.pod.is_some_and(|pod| pod.role == Some(Role::Voter))
}

/// The Service would lead to it, and it would answer.
fn is_endpoint(seat: &MemberState) -> bool {
    seat.is_healthy() && seat.pod.is_some_and(|pod| pod.stays() && pod.ready)
}
