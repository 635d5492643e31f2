//! The status of each member. Sizes and lags in the status change only after a large difference, because each status
//! write triggers a reconcile.

use api::cluster::{AlarmStatus, EtcdClusterStatus, MemberRole, MemberStatus};
use etcd::{AlarmKind, Status};

use crate::plan::{MemberState, View};
use crate::snapshot::Observed;

/// A reported size changes only if the difference is at least this number of bytes.
const SIZE_STEP: i64 = 1 << 20;
/// A smaller lag, in revisions, is reported as zero, because some entries are always in transit.
const LAG_STEP: i64 = 1000;

pub(super) fn leader(view: &View) -> Option<String> {
    let leader = view.leader?;
    view.members
        .iter()
        .find(|member| member.id() == leader)
        .map(|member| member.name.clone())
}

/// The active alarms, each with the name of its member.
pub(super) fn alarms(
    view: Option<&View>,
    observed: &Observed,
    before: &EtcdClusterStatus,
) -> Vec<AlarmStatus> {
    let (Some(view), Some(alarms)) = (view, observed.upkeep.alarms.known()) else {
        return before.alarms.clone();
    };
    let alarms = alarms.iter().map(|alarm| {
        let member = view
            .members
            .iter()
            .find(|member| member.id() == alarm.member);
        let kind = match alarm.kind {
            AlarmKind::NoSpace => "NoSpace",
            AlarmKind::Corrupt => "Corrupt",
        };
        AlarmStatus {
            kind: kind.to_owned(),
            member: member.map_or_else(|| alarm.member.to_string(), |member| member.name.clone()),
        }
    });
    alarms.collect()
}

pub(super) fn count(view: Option<&View>, before: &EtcdClusterStatus) -> Option<i32> {
    match view {
        Some(view) => i32::try_from(view.members.len()).ok(),
        None => before.size.or(Some(0)),
    }
}

pub(super) fn details(
    view: Option<&View>,
    observed: &Observed,
    before: &EtcdClusterStatus,
) -> Vec<MemberStatus> {
    let Some(view) = view else {
        return without_list(observed, before);
    };
    let newest = observed.answers().map(|(_, status)| status.revision).max();
    let mut members: Vec<MemberStatus> = view
        .members
        .iter()
        .map(|member| {
            let old = before
                .member_details
                .iter()
                .find(|old| old.name == member.name);
            let answer = observed.answer(&member.name);
            detail(
                member,
                view.leader == Some(member.id()),
                answer,
                newest.unwrap_or_default(),
                old,
            )
        })
        .collect();
    members.sort_by(|a, b| a.name.cmp(&b.name));
    members
}

/// The members in the status while the member list is unknown: the members of the last status, all unhealthy, or the
/// first members if the cluster has not formed.
fn without_list(observed: &Observed, before: &EtcdClusterStatus) -> Vec<MemberStatus> {
    let node = |name: &str| observed.pods.get(name).and_then(|pod| pod.node.clone());
    if observed.cluster_id.is_none() {
        let first = observed.intent.iter().flat_map(|intent| &intent.members);
        return first
            .map(|name| MemberStatus {
                name: name.clone(),
                node: node(name),
                ..MemberStatus::default()
            })
            .collect();
    }
    let last = before.member_details.iter().cloned();
    last.map(|old| MemberStatus {
        healthy: false,
        node: node(&old.name),
        role: match old.role {
            // The current leader is unknown, so the status reports the last known leader as a voter.
            Some(MemberRole::Leader) => Some(MemberRole::Voter),
            role => role,
        },
        ..old
    })
    .collect()
}

fn detail(
    member: &MemberState,
    leads: bool,
    answer: Option<&Status>,
    newest: i64,
    old: Option<&MemberStatus>,
) -> MemberStatus {
    let role = match (member.votes(), leads) {
        (true, true) => MemberRole::Leader,
        (true, false) => MemberRole::Voter,
        (false, _) => MemberRole::Learner,
    };
    let size = |now: Option<i64>, old: Option<i64>| steady(now, old, SIZE_STEP);
    MemberStatus {
        name: member.name.clone(),
        id: Some(member.id().to_string()),
        role: Some(role),
        healthy: !member.is_down() && !member.is_joining(),
        version: answer
            .map(|status| status.version.clone())
            .or(old.and_then(|old| old.version.clone())),
        db_size: size(
            answer.map(|status| status.db_size),
            old.and_then(|old| old.db_size),
        ),
        db_size_in_use: size(
            answer.map(|status| status.db_size_in_use),
            old.and_then(|old| old.db_size_in_use),
        ),
        revision_lag: answer.map(|status| lag(newest - status.revision)),
        node: member.pod.and_then(|pod| pod.node.clone()),
    }
}

/// Returns the old value if the new value differs from it by less than `step`, or by less than a tenth of the old
/// value. Otherwise returns the new value.
fn steady(now: Option<i64>, old: Option<i64>, step: i64) -> Option<i64> {
    match (now, old) {
        (Some(now), Some(old)) if (now - old).abs() < step.max(old / 10) => Some(old),
        (Some(now), _) => Some(now),
        (None, old) => old,
    }
}

/// The lag, rounded down to [`LAG_STEP`] times a power of two, so that the reported lag changes rarely while a member
/// catches up.
fn lag(behind: i64) -> i64 {
    let mut shown = LAG_STEP;
    while shown <= behind / 2 {
        shown *= 2;
    }
    if behind < LAG_STEP { 0 } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reported_database_size_ignores_small_changes() {
        assert_eq!(steady(Some(20_480), None, SIZE_STEP), Some(20_480));
        assert_eq!(steady(Some(900_000), Some(20_480), SIZE_STEP), Some(20_480));
        assert_eq!(
            steady(Some(2_000_000), Some(20_480), SIZE_STEP),
            Some(2_000_000)
        );
        assert_eq!(
            steady(Some(1_000_000_000), Some(1_050_000_000), SIZE_STEP),
            Some(1_050_000_000)
        );
        assert_eq!(steady(None, Some(5), SIZE_STEP), Some(5));
    }

    #[test]
    fn reported_revision_lag_is_rounded_down() {
        let cases = [
            (-3, 0),
            (0, 0),
            (999, 0),
            (1000, 1000),
            (1999, 1000),
            (2000, 2000),
            (9000, 8000),
        ];
        for (behind, shown) in cases {
            assert_eq!(lag(behind), shown, "{behind}");
        }
    }
}
