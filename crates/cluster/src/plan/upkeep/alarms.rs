//! Handles the alarms of etcd: a full database, and members whose data differs.

use etcd::{Alarm, AlarmKind, MemberId};

use super::Run;
use crate::plan::quorum::quorum_of;
use crate::plan::view::{MemberState, View};
use crate::plan::{Draft, actions};
use crate::quantity::in_words;
use crate::reason::Reason;
use crate::snapshot::Observed;

/// The members to replace because etcd reports that their data differs. Empty with fewer than three voters, or if the
/// voters without an alarm form no quorum, because the replacement might copy the wrong data.
pub(in crate::plan) fn corrupt_members(
    members: &[MemberState],
    observed: &Observed,
) -> Vec<MemberId> {
    let voters = members.iter().filter(|member| member.votes()).count();
    let named: Vec<MemberId> = of_kind(observed, AlarmKind::Corrupt).collect();
    let counted = members
        .iter()
        .filter(|member| member.votes() && named.contains(&member.id()))
        .count();
    if voters < 3 || voters - counted < quorum_of(voters) {
        return Vec::new();
    }
    named
}

pub(super) fn of_kind(observed: &Observed, kind: AlarmKind) -> impl Iterator<Item = MemberId> {
    let alarms = observed.upkeep.alarms.known().into_iter().flatten();
    let raised = alarms.filter(move |alarm| alarm.kind == kind);
    raised.map(|alarm| alarm.member)
}

/// Reports members with the alarm CORRUPT, and says what the operator does. Returns true if this plan disarms an alarm.
pub(super) fn report_corrupt_members(view: &View, draft: &mut Draft) -> bool {
    let observed = draft.build.observed;
    let mut named = Vec::new();
    let mut disarms = false;
    for id in of_kind(observed, AlarmKind::Corrupt) {
        let member = view.members.iter().find(|member| member.id() == id);
        match member {
            Some(member) => named.push(member),
            // Invariant 19: the alarm is disarmed, because the corrupt data was removed with its member.
            None if id != MemberId(0) => {
                disarm(view, AlarmKind::Corrupt, id, draft);
                disarms = true;
            }
            None => {
                let text = "etcd reports that the data of members differs, but not which data is correct (alarm \
                 CORRUPT), and rejects writes: restore a backup. Or delete the PersistentVolumeClaims of the members \
                 with wrong data, and then run: etcdctl alarm disarm";
                draft.problem(Reason::Corrupt, text);
            }
        }
    }
    for member in named {
        let then = if member.leaves() {
            "the operator replaces this member"
        } else {
            "the operator does not replace this member, because the remaining members would form no quorum: restore a backup"
        };
        let text = format!(
            "etcd reports that the data of {} differs from the data of the other members (alarm CORRUPT): {then}",
            member.name
        );
        draft.problem(Reason::Corrupt, text);
    }
    disarms
}

pub(super) fn disarm(view: &View, kind: AlarmKind, member: MemberId, draft: &mut Draft) {
    let alarm = Alarm { member, kind };
    draft.say(format!("disarm the alarm of member {member}"));
    let via = view.via(None);
    draft.add(actions::disarm(alarm, via));
}

impl Run<'_> {
    /// Reports a full database while the alarm NOSPACE is active.
    pub(super) fn report_full_database(&self, draft: &mut Draft) {
        let (desired, observed, _) = self.build.inputs();
        if !self.is_full() {
            return;
        }
        let quota = u64::try_from(desired.upkeep.quota).unwrap_or_default();
        let busy =
            observed.upkeep.open_run().is_some() || !self.is_idle || !draft.chains.is_empty();
        let waits = draft
            .waiting_for
            .iter()
            .any(|reason| reason.reason == Reason::DefragmentationWaits);
        let then = if desired.upkeep.only_reports {
            "spec.upkeep.noSpace.policy is Report: compact and defragment the members and disarm the alarm by hand, or set spec.upkeep.noSpace.policy to Cure"
        } else if busy || waits {
            "the operator frees space"
        } else {
            "the database contains no free space: delete keys, increase spec.etcd.quotaBackendBytes, or let etcd or the operator compact old revisions (spec.etcd.autoCompactionRetention, spec.upkeep.noSpace.keepRevisions)"
        };
        let text = format!(
            "the database has reached its quota of {} bytes and etcd rejects writes (alarm NOSPACE): {then}",
            in_words(quota)
        );
        draft.problem(Reason::NoSpace, text);
    }
}
