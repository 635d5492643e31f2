//! Requests to etcd that change the members or the leader. A plan contains at most one such change.

use crate::action::{Action, Change};
use crate::plan::view::{MemberState, View};
use crate::plan::{Draft, actions};
use crate::snapshot::Removal;

pub(super) fn decide(
    view: &View,
    chain: Vec<Action>,
    without: Option<&MemberState>,
    said: String,
    draft: &mut Draft,
) -> bool {
    let via = view.via(without.map(MemberState::id));
    let change = Change {
        chain,
        via,
        planned_from: view.list.clone(),
    };
    draft.request_change(change, said)
}

pub(super) fn remove(view: &View, member: &MemberState, why: &str, draft: &mut Draft) -> bool {
    let removal = actions::remove(&member.name, member.id());
    // Invariant 25: the operator records the removal on the PVC before it requests the removal from etcd.
    let by_operator = Some(Removal::ByOperator);
    let disk = member.disk.filter(|disk| !disk.terminating);
    let noted = disk
        .filter(|disk| disk.removal != by_operator)
        .map(|disk| actions::note_removal(&member.name, disk, by_operator));
    decide(
        view,
        noted.into_iter().chain([removal]).collect(),
        Some(member),
        format!("remove {} ({why})", member.name),
        draft,
    )
}

/// Removes a voter. If the voter is the leader and another healthy voter exists, this plan only transfers the
/// leadership, so that clients do not wait for an election. A later plan removes the voter.
pub(super) fn remove_voter(
    view: &View,
    member: &MemberState,
    why: &str,
    draft: &mut Draft,
) -> bool {
    let leads = view.leader == Some(member.id());
    (leads && decide_leader(view, member, draft)) || remove(view, member, why, draft)
}

/// Transfers the leadership of a member to another healthy voter. Returns false if no other healthy voter exists.
pub(super) fn decide_leader(view: &View, from: &MemberState, draft: &mut Draft) -> bool {
    let able = |next: &&MemberState| next.is_healthy() && next.id() != from.id();
    let next = view.voters().filter(able).min_by_key(|next| next.leaves());
    next.is_some_and(|next| move_leader(view, from, next, draft))
}

pub(super) fn move_leader(
    view: &View,
    from: &MemberState,
    to: &MemberState,
    draft: &mut Draft,
) -> bool {
    let said = format!("move leadership from {} to {}", from.name, to.name);
    let action = actions::move_leader(&from.name, &to.name, to.id());
    decide(view, vec![action], None, said, draft)
}
