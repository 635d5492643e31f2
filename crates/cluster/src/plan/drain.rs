//! Drains a member from the client Service before the member stops or is defragmented. Clients then connect to other
//! members.
//!
//! Each plan computes from the observed state which members must be drained ([`is_drained`], [`keep`]). All other
//! members become endpoints again ([`settle`]), no matter which process drained them.
//!
//! A drain closes no existing connection.

use std::collections::BTreeSet;
use std::time::Duration;

use etcd::ClusterId;
use jiff::Timestamp;

use crate::clock::age;
use crate::plan::actions::Builder;
use crate::plan::view::{MemberState, View};
use crate::plan::{Draft, Label, joining};
use crate::reason::Reason;
use crate::snapshot::{Intent, Role};

/// After this time, new connections certainly reach other members: kube-proxy updates its rules at most once a second.
const MOVES: Duration = Duration::from_secs(1);

/// True if the change of the member need not wait: new clients already reach other members, or no drain is possible.
/// Otherwise drains the member, and reports the wait.
pub(super) fn is_drained(view: &View, member: &MemberState, draft: &mut Draft) -> bool {
    if member.pod.is_none() {
        // The member is no endpoint of the client Service: its pod is missing, or other software runs the member.
        return true;
    }
    let others = view.voters().filter(|other| other.id() != member.id());
    if !{ others }.any(|other| is_endpoint(other) && !is_out(other)) {
        // The member is not drained, because its clients could not connect to any other endpoint.
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
    let text = format!("{} is being removed from the client endpoints", member.name);
    draft.wait(Reason::LeadingClientsAway, text, left);
    false
}

/// Keeps a drained member out of the endpoints, because the change of this member is not finished.
pub(super) fn keep(member: &MemberState, draft: &mut Draft) {
    if is_out(member) {
        draft.drained.insert(member.name.clone());
    }
}

/// Drains the members in `drained`, which other phases have requested, and makes all other members endpoints again.
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
    // Invariant 24: a voter that has not served yet stays out of the endpoints. A drained voter that has failed also
    // stays out.
    for member in view
        .voters()
        .filter(|member| joining::is_yet_to_serve(member))
    {
        keep(member, &mut draft);
    }
    // Invariant 22: members are drained only if another voter stays an endpoint (`stays`). A member that becomes an
    // endpoint in this plan does not count, because the labels of one plan are written in no fixed order.
    let stays = |member: &MemberState| {
        is_endpoint(member) && is_in(member) && !draft.drained.contains(&member.name)
    };
    let mut out = if view.voters().any(stays) {
        std::mem::take(&mut draft.drained)
    } else {
        [].into()
    };
    // A joining member is never an endpoint, because it does not serve clients yet.
    let joining = view.voters().filter(|member| member.is_joining());
    out.extend(joining.map(|member| member.name.clone()));
    for member in view.voters() {
        let Some(pod) = member.pod.filter(|pod| pod.stays() && pod.owned) else {
            continue;
        };
        let role = match (pod.role, out.contains(&member.name)) {
            (Some(Role::Voter), true) => Role::Busy { since: now },
            // If `since` is in the future, an operator process with a fast clock wrote this time. The operator then
            // writes the start of the drain again.
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
            retention: None,
        };
        draft.add(build.label_pod(&label));
    }
    draft
}

/// True if the member was drained at most the duration `most` ago.
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

/// True if the client Service would route to the member, and the member would answer.
fn is_endpoint(member: &MemberState) -> bool {
    member.is_healthy() && member.pod.is_some_and(|pod| pod.stays() && pod.ready)
}
