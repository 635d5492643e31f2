//! Maintains the members' databases: reacts to alarms and defragments. A *run* is one defragmentation of all members
//! that need it, and is recorded in `status.defragmentation`.
//!
//! Invariant 19: a member answers no requests while it is being defragmented. The operator therefore defragments one
//! member at a time, and only while every voter is healthy and no other change is in progress. The leader is last,
//! after it has transferred its leadership. Before the call, the status records the member (invariant 10).

mod alarms;
mod schedule;

use api::cluster::{DefragmentationCause as Cause, DefragmentationStatus, MemberDefragmentation};
use etcd::{AlarmKind, Status};
use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::plan::actions::{self, Builder};
use crate::plan::change::decide_leader;
use crate::plan::conflicts::Earlier;
use crate::plan::view::{Health, MemberState, View};
use crate::plan::{BLIND, Draft, SHORTLY, drain};
use crate::reason::Reason;
use crate::snapshot::Pod;
use crate::upkeep::Call;

pub(super) use alarms::corrupt_members;
use alarms::{disarm, of_kind, report_corrupt_members};

/// A scheduled defragmentation includes only members with at least this number of free bytes.
const SENSIBLE: i64 = 1 << 20;
/// Maximum delay of the next defragmentation, if the last defragmentation freed no space in a full database.
const AFTER_NOTHING: SignedDuration = SignedDuration::from_mins(10);
/// Delay of the next defragmentation, if the last one freed space in a full database. Clients may fill the space again.
const AFTER_SOMETHING: SignedDuration = SignedDuration::from_secs(30);
/// If a defragmentation freed no space, but the history can be compacted further, the next defragmentation waits for
/// this multiple of its duration. Without the delay, clients that delete keys one by one would cause ineffective
/// defragmentations all the time.
const REST: i32 = 3;
/// Within this time, a member's status normally shows the space that a compaction has freed. Afterwards the operator
/// defragments one member as a test, because the status can stay wrong: etcd counts freed pages only at the next
/// commit, and a full database accepts no write. See `begin` in etcd's `backend.go` and `scheduleCompaction` in
/// `kvstore_compaction.go`.
const SETTLES: SignedDuration = SignedDuration::from_secs(10);
/// Maximum duration of a defragmentation call. The member may give no answer during this time.
const SILENCE: SignedDuration = SignedDuration::from_mins(10);
/// Minimum interval between two defragmentations that the setting `freePercent` triggers.
const BETWEEN: SignedDuration = SignedDuration::from_hours(1);

/// Plans the maintenance of the databases. Called after all other phases.
pub(super) fn keep_up<'a>(build: Builder<'a>, view: &View, earlier: &Earlier) -> Draft<'a> {
    let mut draft = Draft::new(build);
    let disarms = report_corrupt_members(view, &mut draft);
    let is_idle = earlier.is_idle && !disarms;
    let run = Run {
        build,
        view,
        is_idle,
    };
    match build.observed.upkeep.open_run() {
        Some(record) => run.go_on(record, &mut draft),
        None => run.begin(&mut draft),
    }
    run.report_full_database(&mut draft);
    draft
}

struct Run<'a> {
    build: Builder<'a>,
    view: &'a View<'a>,
    /// True if no other phase sends an action.
    is_idle: bool,
}

impl Run<'_> {
    /// The status of each voter; `None` if a voter does not answer.
    fn databases(&self) -> Option<Vec<(&MemberState<'_>, &Status)>> {
        let observed = self.build.observed;
        let voters = self.view.voters();
        voters
            .map(|member| Some((member, observed.answer(&member.name)?)))
            .collect()
    }

    fn is_full(&self) -> bool {
        let observed = self.build.observed;
        of_kind(observed, AlarmKind::NoSpace).next().is_some()
    }

    /// A tenth of the quota. A database whose size is below the quota by at least this amount is no longer full.
    fn room(&self) -> i64 {
        (self.build.desired.upkeep.quota / 10).max(1)
    }

    fn roomy(&self, size: i64) -> bool {
        size <= self.build.desired.upkeep.quota - self.room()
    }

    /// Starts a defragmentation of the members, or disarms an alarm. Called while no defragmentation is in progress.
    fn begin(&self, draft: &mut Draft) {
        let (desired, observed, now) = self.build.inputs();
        let Some(databases) = self.databases() else {
            return;
        };
        if self.is_full() {
            // Invariant 19: the operator disarms the alarm only when every database has free space again.
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

    /// Starts a defragmentation for a full database if it would free space, or if the history can be compacted further.
    /// [`AFTER_NOTHING`], [`AFTER_SOMETHING`] and [`REST`] limit how often this happens.
    fn begin_cure(&self, databases: &[(&MemberState<'_>, &Status)], draft: &mut Draft) {
        let (desired, observed, now) = self.build.inputs();
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
        // True if a defragmentation could now make every database at least `room` bytes smaller than the largest
        // database after the last run.
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
                let text = "the last defragmentation has just ended: the next one starts later";
                draft.wait(Reason::DefragmentationWaits, text, BLIND);
                return;
            }
        }
        self.record_run(Cause::NoSpace, compact_to, draft);
    }

    /// True if every member is healthy, no other change is in progress, and reads are fast. If false, reports why.
    fn is_quiet(&self, draft: &mut Draft) -> bool {
        let observed = self.build.observed;
        let waits = |draft: &mut Draft, text: String| {
            draft.wait(Reason::DefragmentationWaits, text, BLIND);
            false
        };
        if let Some(member) = self.view.members.iter().find(|member| !member.is_healthy()) {
            let text = format!(
                "the operator defragments members when {} is healthy",
                member.name
            );
            return waits(draft, text);
        }
        let settled = self.view.learners().next().is_none();
        if !settled || !self.is_idle {
            let text = "the operator defragments members when no other change is in progress";
            return waits(draft, text.to_owned());
        }
        if observed.upkeep.slow {
            let text = "etcd takes more than half a second to confirm a read: the operator defragments the next member when reads are faster";
            return waits(draft, text.to_owned());
        }
        true
    }

    fn record_run(&self, cause: Cause, compact_to: Option<i64>, draft: &mut Draft) {
        if !self.is_quiet(draft) {
            return;
        }
        let (_, observed, now) = self.build.inputs();
        let last = observed.upkeep.record.as_ref();
        let compacted = last.and_then(|last| last.compacted_revision);
        let compact = compact_to.map(|revision| {
            draft.say(format!("compact the history before revision {revision}"));
            actions::compact(revision, self.view.via(None))
        });
        draft.say("start the defragmentation");
        let record = DefragmentationStatus {
            cause,
            start_time: Time(now),
            completion_time: None,
            compacted_revision: compact_to.or(compacted),
            members: Vec::new(),
        };
        let record = draft.build.record_defragmentation(&record);
        draft.chain(compact.into_iter().chain([record]).collect());
    }

    /// True if the defragmentation of a member would free enough space.
    fn is_worth_it(&self, cause: &Cause, status: &Status) -> bool {
        let desired = self.build.desired;
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

    /// Continues a defragmentation with the current member or the next member.
    fn go_on(&self, record: &DefragmentationStatus, draft: &mut Draft) {
        match record.members.last() {
            Some(last) if last.completion_time.is_none() => self.attend(record, last, draft),
            // A failed defragmentation ends the run, because the next member might fail for the same reason.
            Some(last) if last.error.is_some() => self.finish(record, draft),
            _ => self.record_next(record, draft),
        }
    }

    /// Handles the member whose defragmentation is recorded as started.
    fn attend(
        &self,
        record: &DefragmentationStatus,
        last: &MemberDefragmentation,
        draft: &mut Draft,
    ) {
        let (_, observed, now) = self.build.inputs();
        let member = self
            .view
            .members
            .iter()
            .find(|member| member.name == last.name);
        let status = observed.answer(&last.name);
        let error = match (&observed.upkeep.call, member) {
            (_, None) => Some("the member was removed from the cluster".to_owned()),
            (Some(Call::Failed(why)), _) => Some(why.clone()),
            // If the member does not answer, the operator waits for some time: the defragmentation call of an earlier
            // operator process may still be running, or may have just ended.
            (_, Some(member)) if member.health != Health::Busy => {
                let may_be_done = member.pod.is_some_and(Pod::stays)
                    && now.duration_since(last.start_time.0) < SILENCE;
                if may_be_done {
                    drain::keep(member, draft);
                    let text = format!("{} does not answer yet", last.name);
                    draft.wait(Reason::Defragmenting, text, SHORTLY);
                    return;
                }
                Some("the member stopped answering".to_owned())
            }
            (Some(Call::Done), _) => None,
            (Some(Call::Running), Some(member)) => {
                drain::keep(member, draft);
                let text = format!("{} is being defragmented", last.name);
                draft.wait(Reason::Defragmenting, text, SHORTLY);
                return;
            }
            // Invariant 19: the operator checks again whether it may defragment the member, because the leader or the
            // health of the members may have changed since the member was recorded.
            (None, Some(member)) if !self.may_defragment(member) => {
                let mut record = record.clone();
                record.members.pop();
                draft.say(format!("defer the defragmentation of {}", last.name));
                draft.add(draft.build.record_defragmentation(&record));
                return;
            }
            (None, Some(member)) if !drain::is_drained(self.view, member, draft) => return,
            // This process has not sent the defragmentation call yet, so the operator sends it. If an earlier process
            // has sent it, a second call does no harm.
            (None, Some(_)) => {
                draft.say(format!("defragment {}", last.name));
                draft.add(actions::defragment(&last.name, last.start_time.0));
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
        draft.add(draft.build.record_defragmentation(&record));
    }

    /// True if every other voter serves, and the member is not the leader. A leader that is the only voter is allowed.
    fn may_defragment(&self, member: &MemberState) -> bool {
        let mut others = self.view.voters().filter(|other| other.id() != member.id());
        let leads = self.view.leader == Some(member.id()) && self.view.voters().count() > 1;
        !leads && others.all(MemberState::is_healthy)
    }

    fn record_next(&self, record: &DefragmentationStatus, draft: &mut Draft) {
        let now = self.build.now;
        let Some(databases) = self.databases() else {
            // If the sizes are unknown, `is_quiet` reports what the run waits for.
            self.is_quiet(draft);
            return;
        };
        let was_defragmented =
            |member: &MemberState| record.members.iter().any(|one| one.name == member.name);
        let leads = |member: &MemberState| self.view.leader == Some(member.id());
        let compacted = record.cause == Cause::NoSpace && record.compacted_revision.is_some();
        let young = now.duration_since(record.start_time.0) < SETTLES;
        // The current `db_size` is compared, because the recorded `size_after` may be outdated.
        let shrank = databases.iter().any(|(member, status)| {
            let mut told = record.members.iter().filter(|one| one.name == member.name);
            told.any(|one| one.size_before - status.db_size >= self.room() / 2)
        });
        let blindly = compacted && !young && (record.members.is_empty() || shrank);
        let next = databases
            .iter()
            .filter(|(member, status)| {
                let blindly = blindly && !self.roomy(status.db_size);
                !was_defragmented(member) && (blindly || self.is_worth_it(&record.cause, status))
            })
            .min_by_key(|(member, _)| (leads(member), member.name.clone()));
        let Some((member, status)) = next else {
            if young && compacted {
                let text = "the members are freeing the space of compacted revisions";
                draft.wait(Reason::Compacting, text, SHORTLY);
                return;
            }
            self.finish(record, draft);
            return;
        };
        // Invariant 19: `is_quiet` checks that all members are healthy, and that no other change is in progress.
        if !self.is_quiet(draft) {
            return;
        }
        if leads(member) && self.view.voters().count() > 1 {
            decide_leader(self.view, member, draft);
            return;
        }
        let mut record = record.clone();
        record.members.push(MemberDefragmentation {
            name: member.name.clone(),
            start_time: Time(now),
            completion_time: None,
            size_before: status.db_size,
            size_after: None,
            error: None,
        });
        draft.say(format!(
            "record that the operator defragments {} next",
            member.name
        ));
        draft.add(draft.build.record_defragmentation(&record));
    }

    fn finish(&self, record: &DefragmentationStatus, draft: &mut Draft) {
        let now = self.build.now;
        let mut record = record.clone();
        record.completion_time = Some(Time(now));
        draft.say("record the end of the defragmentation");
        draft.add(draft.build.record_defragmentation(&record));
    }
}

/// True if the database file of at least one member has shrunk by at least this number of bytes.
fn made_room(run: &DefragmentationStatus, bytes: i64) -> bool {
    let freed = |one: &MemberDefragmentation| Some(one.size_before - one.size_after?);
    let mut freed = run.members.iter().filter_map(freed);
    freed.any(|freed| freed >= bytes)
}
