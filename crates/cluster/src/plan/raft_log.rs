//! Invariant 29: prepares the members' Raft logs for etcd 3.7.
//!
//! Members before etcd 3.6 write requests of the API v2 to the log, for example at each start. etcd 3.7 crashes if its
//! log contains such an entry after the last snapshot (`Apply` in `server/etcdserver/apply/apply.go`).
//!
//! etcd 3.6 saves a snapshot after `--snapshot-count` entries. When all members run 3.6, the operator records the index
//! of the newest entry, because no later entry is a request of the API v2. It then appends entries without effect until
//! each member must have saved a snapshot after this index.

use api::version::EtcdVersion;

use crate::plan::versions::{self, Course};
use crate::plan::view::{MemberState, View};
use crate::plan::{Draft, SHORTLY, actions};
use crate::reason::Reason;
use crate::snapshot::Observed;
use crate::upkeep::raft_log_record;

/// The first minor release that cannot read requests of the API v2 in the log.
const WITHOUT_V2: (u64, u64) = (3, 7);
/// The default of `--snapshot-count` in etcd 3.6 (`DefaultSnapshotCount` in `server/etcdserver/server.go`).
const DEFAULT_SNAPSHOT_COUNT: u64 = 10_000;

/// The index of the entry that a member must have applied. The member has then certainly saved a snapshot after the
/// recorded entry.
fn target(member: &MemberState, recorded: u64) -> u64 {
    let count = member.pod.and_then(|pod| pod.snapshot_count);
    let count = count.filter(|count| *count > 0);
    recorded + count.unwrap_or(DEFAULT_SNAPSHOT_COUNT) + 1
}

/// The recorded index, if it belongs to the log of this cluster and its checksum is correct.
fn recorded(observed: &Observed) -> Option<u64> {
    let record = observed.upkeep.raft_log.as_ref()?;
    let cluster_id = observed.cluster_id?.to_string();
    let is_own = *record == raft_log_record(cluster_id, record.index);
    is_own.then(|| record.index.try_into().ok())?
}

/// True if the Raft log of each of these members is ready for the member's next version. Otherwise, plans the next step
/// of the preparation.
pub(super) fn is_prepared<'a>(
    changes: impl Iterator<Item = (&'a MemberState<'a>, &'a EtcdVersion)>,
    draft: &mut Draft,
) -> bool {
    let observed = draft.build.observed;
    let affected = changes.filter_map(|(member, to)| {
        let status = observed.answer(&member.name)?;
        let runs = EtcdVersion::parse(&status.version).ok()?;
        let affected = to.minor() >= WITHOUT_V2 && runs.minor() < WITHOUT_V2;
        affected.then_some((member, status.raft_applied_index))
    });
    let affected: Vec<(&MemberState, u64)> = affected.collect();
    if affected.is_empty() {
        return true;
    }
    let Some(recorded) = recorded(observed) else {
        let newest = observed.answers().map(|(_, status)| status.raft_index);
        draft.add(draft.build.record_raft_log(newest.max()));
        return false;
    };
    let missing = |(member, applied): &(&MemberState, u64)| {
        let until = target(member, recorded);
        until.saturating_sub(*applied)
    };
    let behind = affected.iter().filter(|one| missing(one) > 0);
    let Some((member, _)) = behind.max_by_key(|one| missing(one)) else {
        return true;
    };
    let text = "the operator changes the next member when the members have saved snapshots of their Raft logs";
    draft.wait(Reason::RollWaits, text, SHORTLY);
    draft.add(actions::append_entries(
        &member.name,
        target(member, recorded),
    ));
    false
}

/// Removes the record `status.raftLog` when no member needs it. It would be wrong after a downgrade to 3.5 or earlier.
pub(super) fn forget(course: &Course, view: &View, draft: &mut Draft) {
    let upgrades = course
        .target
        .as_ref()
        .is_none_or(|target| target.minor() >= WITHOUT_V2);
    let is_new = |member: &MemberState| {
        let made = member.pod.and_then(versions::made_for);
        made.is_some_and(|made| made.minor() >= WITHOUT_V2)
    };
    let done = view.members.iter().all(is_new);
    if draft.build.observed.upkeep.raft_log.is_some() && (!upgrades || done) {
        draft.add(draft.build.record_raft_log(None));
    }
}
