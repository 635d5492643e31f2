//! Takes a member out of the client Service before it stops or becomes busy: new connections reach another member,
//! and clients that it disconnects do not return to it.
//!
//! The drain has no memory. Each plan computes from the observed state which members must be out ([`is_drained`],
//! [`keep`]), and puts all others back ([`settle`]), whichever process took them out.
//!
//! Existing connections stay: neither Kubernetes nor etcd moves them. A member that stops closes its connections. A
//! member that is defragmented does not: its clients depend on their own deadlines.

use std::collections::BTreeSet;
use std::time::Duration;

use etcd::ClusterId;
use jiff::Timestamp;

use crate::plan::actions::Builder;
use crate::plan::age::age;
use crate::plan::view::{MemberState, View};
use crate::plan::{Draft, Label, joining};
use crate::reason::Reason;
use crate::snapshot::{Intent, Role};

/// Time until new connections certainly reach other members: kube-proxy updates its rules at most once a second.
const MOVES: Duration = Duration::from_secs(1);

/// Whether new clients already reach other members. If not, the plan drains the member and waits.
pub(super) fn is_drained(view: &View, member: &MemberState, draft: &mut Draft) -> bool {
    if member.pod.is_none() {
        // The member is run by other software, which also routes clients to it.
        return true;
    }
    let others = view.voters().filter(|other| other.id() != member.id());
    if !{ others }.any(|other| is_endpoint(other) && !is_out(other)) {
        // No other member would accept its clients.
        return true;
    }
    draft.drained.insert(member.name.clone());
    let out = match member.pod.and_then(|pod| pod.role) {
        Some(Role::Busy { since }) => age(since, draft.build.now),
        _ => Duration::ZERO,
    };
    let left = MOVES.saturating_sub(out);
    if left.is_zero() {
        return true;
    }
    let text = format!("{} is removed from the client endpoints first", member.name);
    draft.wait(Reason::LeadingClientsAway, text, left);
    false
}

/// Keeps a drained member out, because its change is not finished.
pub(super) fn keep(member: &MemberState, draft: &mut Draft) {
    if is_out(member) {
        draft.drained.insert(member.name.clone());
    }
}

/// Takes out the members that must be out, and puts all others back. `drained`: the members that other phases need out.
pub(super) fn settle<'a>(
    build: Builder<'a>,
    view: &View,
    (intent, cluster_id): (&Intent, ClusterId),
    drained: BTreeSet<String>,
) -> Draft<'a> {
    let now = build.now;
    let mut draft = Draft {
        drained,
        ..Draft::new(build)
    };
    // Invariant 24: a voter that has not served yet stays out, and so does a drained voter that went down.
    for member in view
        .voters()
        .filter(|member| joining::is_yet_to_serve(member))
    {
        keep(member, &mut draft);
    }
    // Invariant 22: clients always find a serving member. A member that this plan puts back does not count yet: the
    // labels of one plan are written concurrently.
    let stays = |member: &MemberState| {
        is_endpoint(member) && is_in(member) && !draft.drained.contains(&member.name)
    };
    let mut out = if view.voters().any(stays) {
        std::mem::take(&mut draft.drained)
    } else {
        [].into()
    };
    // The member reports that it does not serve yet.
    let joining = view.voters().filter(|member| member.is_joining());
    out.extend(joining.map(|member| member.name.clone()));
    for member in view.voters() {
        let Some(pod) = member.pod.filter(|pod| pod.stays() && pod.owned) else {
            continue;
        };
        let role = match (pod.role, out.contains(&member.name)) {
            (Some(Role::Voter), true) => Role::Busy { since: now },
            // The timestamp was written by a clock that is ahead.
            (Some(Role::Busy { since }), true) if since > now => Role::Busy { since: now },
            (Some(Role::Busy { .. }), false) => Role::Voter,
            _ => continue,
        };
        draft.say(match role {
            Role::Busy { .. } => format!("remove {} from the client endpoints", member.name),
            _ => format!("add {} to the client endpoints again", member.name),
        });
        let label = Label {
            member: member.name.clone(),
            uid: pod.uid.clone(),
            role: Some(role),
            token: intent.token.clone(),
            cluster_id: Some(cluster_id),
        };
        draft.add(build.label_pod(&label));
    }
    draft
}

/// Whether the member is out, and has been for at most this long.
pub(super) fn is_out_since(now: Timestamp, member: &MemberState, most: Duration) -> bool {
    match member.pod.and_then(|pod| pod.role) {
        Some(Role::Busy { since }) => age(since, now) <= most,
        _ => false,
    }
}

fn is_out(member: &MemberState) -> bool {
    member
        .pod
        .is_some_and(|pod| matches!(pod.role, Some(Role::Busy { .. })))
}

fn is_in(member: &MemberState) -> bool {
    member.pod.is_some_and(|pod| pod.role == Some(Role::Voter))
}

/// Whether the Service would route to the member and the member would answer.
fn is_endpoint(member: &MemberState) -> bool {
    member.is_healthy() && member.pod.is_some_and(|pod| pod.stays() && pod.ready)
}
