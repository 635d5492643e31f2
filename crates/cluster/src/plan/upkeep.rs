//! The members' databases: alarms that are raised, and defragmentation.
//!
//! Invariant 19: a member answers nobody while it is defragmented. So it is one at a time, when every voter is
//! healthy and nothing else is being changed, the leader last and only after it has handed over. Which one it is
//! stands in the status before it is told (invariant 10): a process that dies midway is followed by one that tells
//! the same member again. An alarm is taken back when its cause is gone, never to look better.

mod schedule;

use api::cluster::{DefragmentationCause as Cause, DefragmentationStatus, MemberDefragmentation};
use etcd::{Alarm, AlarmKind, MemberId, Status};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::plan::change::decide_leader;
use crate::plan::quorum::quorum_of;
use crate::plan::view::{Health, MemberState, View};
use crate::plan::{BLIND, Draft, SHORTLY, drain};
use crate::quantity::in_words;
use crate::reason::Reason;
use crate::snapshot::{Desired, Observed, Pod, Seen};
use crate::upkeep::Call;
use crate::write::Write;

/// What has to be free for a defragmentation by schedule to be worth it.
const SENSIBLE: i64 = 1 << 20;
/// Without effect a run for a full database is not repeated for so long.
const AFTER_NOTHING: SignedDuration = SignedDuration::from_mins(10);
/// With effect it may be, after so long: somebody fills the database again.
const AFTER_SOMETHING: SignedDuration = SignedDuration::from_secs(30);
/// Without effect but with new history to compact it rests so many times as long as it took: where keys go one by one
/// each of them is history, and no member is to be defragmented for nothing most of the time.
const REST: i32 = 3;
/// How long a member's status is given to show what a compaction has freed. It need not ever show it: a member counts
/// pages as free one commit after the one that freed them, which may be the compaction's last one, and a full database
/// takes no writes that would bring another (`begin` in etcd's `backend.go`, `scheduleCompaction` in its
/// `kvstore_compaction.go`). So after that one is told blindly, and the others when that has made room.
const SETTLES: SignedDuration = SignedDuration::from_secs(10);
/// How long a member that was told may say nothing, as long as a call for it may take.
const SILENCE: SignedDuration = SignedDuration::from_mins(10);
/// How long the share of free bytes starts no other run.
const BETWEEN: SignedDuration = SignedDuration::from_hours(1);

type Situation<'a> = (&'a Desired, &'a Observed, Timestamp);

/// The members to replace because etcd found their data to differ. Only if it is clear which data is right: fewer than a
/// quorum are named, and three or more vote. In a smaller cluster the replacement might copy the wrong data.
pub(super) fn corrupt_members(members: &[MemberState], observed: &Observed) -> Vec<MemberId> {
    let voters = members.iter().filter(|member| member.votes()).count();
    let named: Vec<MemberId> = corrupt(observed).collect();
    let counted = members
        .iter()
        .filter(|member| member.votes() && named.contains(&member.id()))
        .count();
    if voters < 3 || voters - counted < quorum_of(voters) {
        return Vec::new();
    }
    named
}

fn alarms(observed: &Observed) -> &[Alarm] {
    observed.upkeep.alarms.known().map_or(&[], Vec::as_slice)
}

fn of_kind(observed: &Observed, kind: AlarmKind) -> impl Iterator<Item = MemberId> {
    let raised = alarms(observed).iter();
    raised
        .filter(move |alarm| alarm.kind == kind)
        .map(|alarm| alarm.member)
}

fn corrupt(observed: &Observed) -> impl Iterator<Item = MemberId> {
    of_kind(observed, AlarmKind::Corrupt)
}

/// What the members' databases need: whatever it is, after everything else.
pub(super) fn keep_up(situation: Situation, view: &View, draft: &mut Draft) {
    let (_, observed, _) = situation;
    told_of_corruption(observed, view, draft);
    let run = Run { situation, view };
    match observed.upkeep.open_run() {
        Some(record) => run.go_on(record, draft),
        None => run.begin(draft),
    }
    run.told_of_no_space(draft);
}

/// Who has lost the trust of the others, and what is done about it.
fn told_of_corruption(observed: &Observed, view: &View, draft: &mut Draft) {
    let mut named = Vec::new();
    for id in corrupt(observed) {
        let seat = view.seats.iter().find(|seat| seat.id() == id);
        match seat {
            Some(seat) => named.push(seat),
            // Invariant 19: whoever it was is no member any more, and its data with it.
            None if id != MemberId(0) => disarm(view, AlarmKind::Corrupt, id, draft),
            None => {
                let text = "etcd has found the members' data to differ and cannot tell which is right (alarm \
                     CORRUPT): nothing is written until a person decides; restore a backup, or remove the members \
                     that are wrong by deleting their volume claims and take the alarm back with: etcdctl alarm disarm";
                draft.problem(Reason::Corrupt, text);
            }
        }
    }
    for seat in named {
        let then = if seat.leaves() {
            "it is replaced"
        } else {
            "it is not replaced, because what is left would be no quorum to compare with: restore a backup"
        };
        let text = format!(
            "etcd has found the data of {} to differ from the others' (alarm CORRUPT): {then}",
            seat.name
        );
        draft.problem(Reason::Corrupt, text);
    }
}

fn disarm(view: &View, kind: AlarmKind, member: MemberId, draft: &mut Draft) {
    let alarm = Alarm { member, kind };
    draft.say(format!("take the alarm of {member} back"));
    let via = view.via(None);
    draft.write(Write::Disarm { alarm, via });
}

struct Run<'a> {
    situation: Situation<'a>,
    view: &'a View<'a>,
}

impl Run<'_> {
    /// What each voter says of itself; `None` as long as one of them says nothing.
    fn databases(&self) -> Option<Vec<(&MemberState<'_>, &Status)>> {
        let (_, observed, _) = self.situation;
        let voters = self.view.voters();
        voters
            .map(|seat| {
                let status = observed.statuses.get(&seat.name).and_then(Seen::known)?;
                Some((seat, status))
            })
            .collect()
    }

    fn is_full(&self) -> bool {
        let (_, observed, _) = self.situation;
        of_kind(observed, AlarmKind::NoSpace).next().is_some()
    }

    /// A tenth of the quota: less is no room.
    fn room(&self) -> i64 {
        (self.situation.0.upkeep.quota / 10).max(1)
    }

    fn roomy(&self, size: i64) -> bool {
        size <= self.situation.0.upkeep.quota - self.room()
    }

    /// No run is under way: whether one begins, or an alarm is taken back.
    fn begin(&self, draft: &mut Draft) {
        let (desired, observed, now) = self.situation;
        let Some(databases) = self.databases() else {
            return;
        };
        if self.is_full() {
            // Invariant 19: only when there is room again, in every database.
            if databases
                .iter()
                .all(|(_, status)| self.roomy(status.db_size))
            {
                for member in of_kind(observed, AlarmKind::NoSpace) {
                    disarm(self.view, AlarmKind::NoSpace, member, draft);
                }
            } else if !desired.upkeep.only_reports {
                self.begin_cure(&databases, draft);
            }
            return;
        }
        let Some(rule) = &desired.upkeep.defragmentation else {
            return;
        };
        let last = observed.upkeep.record.as_ref();
        let at_rest = |pause: SignedDuration| {
            let over = last.and_then(|last| last.completion_time.as_ref());
            over.is_none_or(|over| now.duration_since(over.0) >= pause)
        };
        let wants = |cause: &Cause| {
            databases
                .iter()
                .any(|(_, status)| self.is_worth_it(cause, status))
        };
        if wants(&Cause::Threshold) && at_rest(BETWEEN) {
            self.record_run(Cause::Threshold, None, draft);
            return;
        }
        match schedule::due(rule, now) {
            Ok(Some(time)) if last.is_none_or(|last| last.start_time.0 < time) => {
                if wants(&Cause::Schedule) {
                    self.record_run(Cause::Schedule, None, draft);
                }
            }
            Ok(_) => {}
            Err(problem) => draft.problem(Reason::InvalidSchedule, problem),
        }
    }

    /// The floor: a run begins when it would make room, or when there is history to compact that the last one did
    /// not; and after one without effect not soon again.
    fn begin_cure(&self, databases: &[(&MemberState<'_>, &Status)], draft: &mut Draft) {
        let (desired, observed, now) = self.situation;
        let last = observed.upkeep.record.as_ref();
        let compacted = last.and_then(|last| last.compacted_revision);
        let last = last.filter(|last| last.cause == Cause::NoSpace);
        let would_help = databases
            .iter()
            .all(|(_, status)| self.roomy(status.db_size_in_use))
            && databases
                .iter()
                .any(|(_, status)| self.is_worth_it(&Cause::NoSpace, status));
        let newest = databases.iter().map(|(_, status)| status.revision).max();
        let compact_to = desired
            .upkeep
            .keep_revisions
            .and_then(|kept| Some(newest? - kept))
            .filter(|to| *to > compacted.unwrap_or_default());
        if !would_help && compact_to.is_none() {
            return;
        }
        // There is more to free by now than the last run could.
        let has_more = |last: &DefragmentationStatus| {
            let sizes = last.members.iter().filter_map(|one| one.size_after);
            sizes.max().is_some_and(|size| {
                let mut used = databases.iter().map(|(_, status)| status.db_size_in_use);
                used.all(|used| used + self.room() <= size)
            })
        };
        if let Some((last, over)) =
            last.and_then(|last| Some((last, last.completion_time.as_ref()?)))
        {
            let pause = if made_room(last, self.room()) || last.members.is_empty() || has_more(last)
            {
                AFTER_SOMETHING
            } else if compact_to.is_some() {
                let took = over.0.duration_since(last.start_time.0);
                took.saturating_mul(REST)
                    .clamp(AFTER_SOMETHING, AFTER_NOTHING)
            } else {
                AFTER_NOTHING
            };
            if now.duration_since(over.0) < pause {
                let text = "the last defragmentation has just ended: the next one waits a while";
                draft.wait(Reason::DefragmentationWaits, text, BLIND);
                return;
            }
        }
        self.record_run(Cause::NoSpace, compact_to, draft);
    }

    /// Nothing else is being changed, and everybody is well. Says what is waited for.
    fn is_quiet(&self, draft: &mut Draft) -> bool {
        let (_, observed, _) = self.situation;
        let waits = |draft: &mut Draft, text: String| {
            draft.wait(Reason::DefragmentationWaits, text, BLIND);
            false
        };
        if let Some(seat) = self.view.seats.iter().find(|seat| !seat.is_healthy()) {
            let text = format!("members are defragmented when {} is healthy", seat.name);
            return waits(draft, text);
        }
        let settled = self.view.learners().next().is_none();
        if !settled || !draft.is_idle() {
            let text = "members are defragmented when nothing else is being changed";
            return waits(draft, text.to_owned());
        }
        if observed.upkeep.slow {
            let text = "etcd takes more than half a second to confirm a read: the next member is defragmented when \
                 it is quick again";
            return waits(draft, text.to_owned());
        }
        true
    }

    fn record_run(&self, cause: Cause, compact_to: Option<i64>, draft: &mut Draft) {
        if !self.is_quiet(draft) {
            return;
        }
        let (_, observed, now) = self.situation;
        let last = observed.upkeep.record.as_ref();
        let compacted = last.and_then(|last| last.compacted_revision);
        let mut writes = Vec::new();
        if let Some(revision) = compact_to {
            draft.say(format!("compact what is before revision {revision}"));
            let via = self.view.via(None);
            writes.push(Write::Compact { revision, via });
        }
        draft.say("begin to defragment");
        let record = DefragmentationStatus {
            cause,
            start_time: Time(now),
            completion_time: None,
            compacted_revision: compact_to.or(compacted),
            members: Vec::new(),
        };
        writes.push(recorded(observed, record));
        draft.chain(writes);
    }

    /// Whether a member's file is worth writing anew.
    fn is_worth_it(&self, cause: &Cause, status: &Status) -> bool {
        let (desired, _, _) = self.situation;
        let free = status.db_size - status.db_size_in_use;
        match cause {
            Cause::NoSpace => free >= self.room() / 2,
            Cause::Threshold => {
                let rule = desired.upkeep.defragmentation.as_ref();
                let share = rule.and_then(|rule| Some((rule.free_percent?, rule)));
                share.is_some_and(|(percent, rule)| {
                    let least = rule
                        .min_free_bytes
                        .unwrap_or(api::cluster::DEFAULT_MIN_FREE_BYTES);
                    free >= least && free >= status.db_size / 100 * percent
                })
            }
            _ => free >= SENSIBLE,
        }
    }

    /// A run is under way: the member that was told, or the next.
    fn go_on(&self, record: &DefragmentationStatus, draft: &mut Draft) {
        match record.members.last() {
            Some(last) if last.completion_time.is_none() => self.attend(record, last, draft),
            // One that fails ends the run: what it met the next one might meet.
            Some(last) if last.error.is_some() => self.finish(record, draft),
            _ => self.tell_next(record, draft),
        }
    }

    /// The member that was told.
    fn attend(
        &self,
        record: &DefragmentationStatus,
        last: &MemberDefragmentation,
        draft: &mut Draft,
    ) {
        let (_, observed, now) = self.situation;
        let seat = self.view.seats.iter().find(|seat| seat.name == last.name);
        let status = observed.statuses.get(&last.name).and_then(Seen::known);
        let error = match (&observed.upkeep.call, seat) {
            (_, None) => Some("it is no member any more".to_owned()),
            (Some(Call::Failed(why)), _) => Some(why.clone()),
            // Silent: it writes on for a process that is gone, or was asked a moment before it had done.
            (_, Some(seat)) if seat.health != Health::Busy => {
                let may_be_done = seat.pod.is_some_and(Pod::stays)
                    && now.duration_since(last.start_time.0) < SILENCE;
                if may_be_done {
                    drain::keep(seat, draft);
                    let text = format!("{} does not answer yet", last.name);
                    draft.wait(Reason::Defragmenting, text, SHORTLY);
                    return;
                }
                Some("it stopped answering".to_owned())
            }
            (Some(Call::Done), _) => None,
            (Some(Call::Running), Some(seat)) => {
                drain::keep(seat, draft);
                let text = format!("{} is being defragmented", last.name);
                draft.wait(Reason::Defragmenting, text, SHORTLY);
                return;
            }
            // Invariant 19: what was so when its turn was recorded may be no longer so when it comes to telling it.
            (None, Some(seat)) if !self.may_be_told(seat) => {
                let mut record = record.clone();
                record.members.pop();
                draft.say(format!("put the defragmentation of {} off", last.name));
                draft.write(recorded(observed, record));
                return;
            }
            (None, Some(seat)) if !drain::is_drained(now, self.view, seat, draft) => return,
            // Told by a process that is gone, or not told yet.
            (None, Some(_)) => {
                draft.say(format!("defragment {}", last.name));
                draft.write(Write::Defragment {
                    member: last.name.clone(),
                    recorded: last.start_time.0,
                });
                return;
            }
        };
        let mut record = record.clone();
        if let Some(last) = record.members.last_mut() {
            last.completion_time = Some(Time(now));
            last.size_after = status.map(|status| status.db_size);
            last.error = error;
        }
        draft.say(format!("record the defragmentation of {}", last.name));
        draft.write(recorded(observed, record));
    }

    /// Every other voter serves, and none of them waits for this one to lead it.
    fn may_be_told(&self, seat: &MemberState) -> bool {
        let mut others = self.view.voters().filter(|other| other.id() != seat.id());
        let leads = self.view.leader == Some(seat.id()) && self.view.voters().count() > 1;
        !leads && others.all(MemberState::is_healthy)
    }

    fn tell_next(&self, record: &DefragmentationStatus, draft: &mut Draft) {
        let (_, observed, now) = self.situation;
        let Some(databases) = self.databases() else {
            // Says which.
            self.is_quiet(draft);
            return;
        };
        let was_told = |seat: &MemberState| record.members.iter().any(|one| one.name == seat.name);
        let leads = |seat: &MemberState| self.view.leader == Some(seat.id());
        let compacted = record.cause == Cause::NoSpace && record.compacted_revision.is_some();
        let young = now.duration_since(record.start_time.0) < SETTLES;
        // By what they say now: what was recorded may be of the moment before.
        let shrank = databases.iter().any(|(seat, status)| {
            let mut told = record.members.iter().filter(|one| one.name == seat.name);
            told.any(|one| one.size_before - status.db_size >= self.room() / 2)
        });
        let blindly = compacted && !young && (record.members.is_empty() || shrank);
        let next = databases
            .iter()
            .filter(|(seat, status)| {
                let blindly = blindly && !self.roomy(status.db_size);
                !was_told(seat) && (blindly || self.is_worth_it(&record.cause, status))
            })
            .min_by_key(|(seat, _)| (leads(seat), seat.name.clone()));
        let Some((seat, status)) = next else {
            if young && compacted {
                let text = "the members free what was compacted";
                draft.wait(Reason::Compacting, text, SHORTLY);
                return;
            }
            self.finish(record, draft);
            return;
        };
        // Invariant 19.
        if !self.is_quiet(draft) {
            return;
        }
        if leads(seat) && self.view.voters().count() > 1 {
            decide_leader(self.view, seat, draft);
            return;
        }
        let mut record = record.clone();
        record.members.push(MemberDefragmentation {
            name: seat.name.clone(),
            start_time: Time(now),
            completion_time: None,
            size_before: status.db_size,
            size_after: None,
            error: None,
        });
        draft.say(format!("record that {} is defragmented", seat.name));
        draft.write(recorded(observed, record));
    }

    fn finish(&self, record: &DefragmentationStatus, draft: &mut Draft) {
        let (_, observed, now) = self.situation;
        let mut record = record.clone();
        record.completion_time = Some(Time(now));
        draft.say("record that the defragmentation is over");
        draft.write(recorded(observed, record));
    }

    /// A full database is a problem as long as the alarm is raised, whatever is being done about it.
    fn told_of_no_space(&self, draft: &mut Draft) {
        let (desired, observed, _) = self.situation;
        if !self.is_full() {
            return;
        }
        let quota = u64::try_from(desired.upkeep.quota).unwrap_or_default();
        let busy = observed.upkeep.open_run().is_some() || !draft.chains.is_empty();
        let waits = draft
            .waiting_for
            .iter()
            .any(|reason| reason.reason == Reason::DefragmentationWaits);
        let then = if desired.upkeep.only_reports {
            "spec.upkeep.noSpace.policy is Report: compact, defragment and disarm it by hand, or set Cure"
        } else if busy || waits {
            "it is being put right"
        } else {
            "there is nothing in it to free: delete keys, raise spec.etcd.quotaBackendBytes, or let old revisions \
             be compacted (spec.etcd.autoCompactionRetention, spec.upkeep.noSpace.keepRevisions)"
        };
        let text = format!(
            "the database has reached its quota of {} bytes and etcd refuses writes (alarm NOSPACE): {then}",
            in_words(quota)
        );
        draft.problem(Reason::NoSpace, text);
    }
}

/// Whether a member's file has become smaller by so many bytes.
fn made_room(run: &DefragmentationStatus, bytes: i64) -> bool {
    let freed = |one: &MemberDefragmentation| Some(one.size_before - one.size_after?);
    let mut freed = run.members.iter().filter_map(freed);
    freed.any(|freed| freed >= bytes)
}

fn recorded(observed: &Observed, record: DefragmentationStatus) -> Write {
    Write::RecordDefragmentation {
        record: Box::new(record),
        over: observed.resource_version.clone(),
    }
}
