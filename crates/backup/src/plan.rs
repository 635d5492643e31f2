//! What to do next for one EtcdBackup. Pure: no client, clock, randomness or logging, and an answer to everything.
//!
//! The intent, when the backup began, is in the status before anything is read from etcd or written to the store
//! (invariant 10). Everything after it can be repeated: a transfer whose operator died is begun again, and one
//! that was complete is found in the store and adopted. Whether the next of a periodic backup is due follows from
//! when the last began, and whether old ones are still to be removed from what the status says is kept.

use std::time::Duration;

use api::backup::{Compression, DeletionPolicy};
use api::conditions::{ConditionType, Reason, find};
use api::names::FINALIZER_STORED;
use api::problem::{Problem, summary};
use api::{EtcdBackup, EtcdBackupStatus};
use jiff::{SignedDuration, Timestamp};

use crate::observed::{Kept, Moved, Observed, Place, Stored, Trouble, Work};
use crate::retention::Rules;
use crate::schedule::{self, Next, Schedule};

mod attempts;
mod deadline;

use attempts::{cut_off, with_ours, without_ours};
use deadline::{deadline, overdue, too_late};

/// How often a running transfer is looked at and its progress written.
const PROGRESS: Duration = Duration::from_secs(3);

/// How often missing input (a Secret, a cluster) is looked for at first.
const MISSING: Duration = Duration::from_secs(3);

/// How often it is looked for in the end. Nothing that is watched tells when it comes.
const LONG_MISSING: Duration = Duration::from_secs(30);

/// The longest time without a look: a clock that is set changes what is due.
const AT_LEAST: Duration = Duration::from_mins(10);

/// How long a deletion waits for a Secret that is gone, as it is when a namespace is deleted.
const GIVE_UP: SignedDuration = SignedDuration::from_mins(5);

/// A run that is further in the future than this was begun by a clock that was wrong, and does not count.
const AHEAD: SignedDuration = SignedDuration::from_hours(1);

/// How long a backup that is due waits for the removal after the last one.
const TIDY_FIRST: SignedDuration = SignedDuration::from_mins(1);

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing is to be done but to say so.
    Nothing,
    /// The status says when this backup began; nothing else happens in the same round.
    RecordIntent,
    /// A transfer is started, or waits for its turn.
    Begin,
    /// The status says that so many attempts have begun and not ended. The transfer whose turn it is runs after that.
    RecordAttempts(i32),
    /// The transfer that runs is given up.
    Abandon,
    /// What the policy does not keep is removed.
    Tidy,
    /// The finalizer is set, or taken away.
    Guard(bool),
    /// Everything this EtcdBackup has stored is removed.
    Purge,
    /// The EtcdBackup itself, which has finished, is deleted.
    Expire,
}

/// What is to be said about the backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All was said before.
    Settled,
    /// The spec is refused.
    Refused(Trouble),
    /// It has begun or is about to.
    Begun,
    /// As many others are being transferred as may.
    Queued,
    /// Bytes are moving.
    Running(Moved),
    /// Something is missing or failed; it is tried again.
    Waiting(Trouble),
    /// It is complete.
    Succeeded(Stored),
    /// It has failed for good.
    Failed(Trouble),
    /// The next one comes then, or never.
    Scheduled(Option<Timestamp>),
    /// No new ones are made.
    Suspended,
    /// What the policy does not keep is gone.
    Tidied(Kept),
    /// It could not be removed.
    Untidy(Trouble),
    /// The stored backups cannot be removed yet.
    Ending(Trouble),
}

/// What happens in this round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The one step.
    pub step: Step,
    /// What the status will say.
    pub verdict: Verdict,
    /// When to look again; `None` waits for a change of the object.
    pub requeue: Option<Duration>,
}

impl Plan {
    fn new(step: Step, verdict: Verdict, requeue: Option<Duration>) -> Self {
        Self {
            step,
            verdict,
            requeue,
        }
    }
}

/// Whether the status says that this generation of the spec is done with, and how. A periodic backup never is.
fn settled(backup: &EtcdBackup) -> bool {
    let Some(status) = backup
        .status
        .as_ref()
        .filter(|_| !backup.spec.is_periodic())
    else {
        return false;
    };
    // What is complete stays complete: it lies in the store, whatever became of the spec.
    status.succeeded
        || failed_of(backup).is_some_and(|failed| *failed == backup.metadata.generation)
}

/// The generation of the spec that failed for good, if the last one did.
fn failed_of(backup: &EtcdBackup) -> Option<&Option<i64>> {
    let failed = find(&backup.status.as_ref()?.conditions, &ConditionType::Failed)?;
    (failed.status == "True" && !is_refusal(&failed.reason)).then_some(&failed.observed_generation)
}

/// A refusal is judged anew each time: an operator of a later release may take what this one refuses.
fn is_refusal(reason: &str) -> bool {
    [Reason::InvalidSpec, Reason::NotSupported]
        .iter()
        .any(|refusal| refusal.as_str() == reason)
}

/// When this generation of the spec began to be worked on, if the status says so and it has not ended.
pub fn intent(backup: &EtcdBackup) -> Option<Timestamp> {
    let status = backup.status.as_ref()?;
    let current = status.observed_generation == backup.metadata.generation;
    (current && is_open(status)).then(|| status.start_time.as_ref().map(|time| time.0))?
}

fn is_open(status: &EtcdBackupStatus) -> bool {
    status.start_time.is_some() && status.completion_time.is_none()
}

/// Why the spec is not worked on, if it is not.
pub fn refusal(backup: &EtcdBackup) -> Option<Trouble> {
    let mut problems = api::backup::validate(backup);
    if let Some(Err(problem)) = backup.spec.backup_policy.as_ref().map(Schedule::of) {
        problems.push(in_policy(&problem));
    }
    let endpoints = &backup.spec.etcd_endpoints;
    let mut urls = endpoints.iter();
    // Invariant 20: without an authority nobody could say whether it is the cluster that answers.
    if urls.any(|url| url.starts_with("https://")) && backup.spec.client_tls_secret().is_none() {
        problems.push(Problem::new(
            "spec.etcdEndpoints",
            "names an https URL, and nothing says which authority its certificate must be of",
            "name a Secret in spec.clientTLSSecret",
        ));
    }
    if !problems.is_empty() {
        return Some(Trouble::new(Reason::InvalidSpec, summary(&problems)));
    }
    let problems = api::backup::unsafe_to_ignore(&backup.spec);
    (!problems.is_empty()).then(|| Trouble::new(Reason::NotSupported, summary(&problems)))
}

fn in_policy(problem: &schedule::Problem) -> Problem {
    match problem {
        schedule::Problem::Schedule { text, why } => Problem::new(
            "spec.backupPolicy.schedule",
            format!("is {text:?}, which cannot be read ({why})"),
            "write five cron fields such as 0 3 * * *, or @daily",
        ),
        schedule::Problem::TimeZone { name } => Problem::new(
            "spec.backupPolicy.timeZone",
            format!("is {name:?}, which is not known"),
            "use a name such as Europe/Berlin",
        ),
    }
}

/// What has to be asked of the store before a plan can be made. Reading is spared while it would change nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing.
    Nothing,
    /// What lies at the place, and the means to write there.
    Place,
    /// The means to remove what is not kept.
    Tidy,
    /// The means to remove all that was stored.
    Purge,
}

/// See [`Need`].
pub fn need(backup: &EtcdBackup, observed: &Observed, now: Timestamp) -> Need {
    if backup.metadata.deletion_timestamp.is_some() {
        let idle = !observed.transfer.work.is_active() && !purged(observed);
        let wanted = idle && is_guarded(backup) && wants_guard(backup);
        return need_if(Need::Purge, wanted && observed.removal.may_begin(now));
    }
    if settled(backup) || refusal(backup).is_some() {
        return Need::Nothing;
    }
    if intent(backup).is_some() {
        let pace = &observed.transfer;
        let fresh = !matches!(pace.work, Work::Ended(Ok(_))) && pace.may_begin(now);
        return need_if(Need::Place, fresh && !overdue(backup, observed, now));
    }
    let wanted =
        to_tidy(backup) && tidied(backup, observed).is_none() && observed.removal.may_begin(now);
    let turn = !is_due(backup, now) || tidies_first(backup, observed, now).is_some();
    need_if(Need::Tidy, wanted && turn)
}

fn need_if(need: Need, wanted: bool) -> Need {
    if wanted { need } else { Need::Nothing }
}

/// When the next backup is due, of one that is not under way.
fn agenda(backup: &EtcdBackup, now: Timestamp) -> Next {
    let policy = backup.spec.backup_policy.as_ref();
    let Some(Ok(Some(schedule))) = policy.map(Schedule::of) else {
        return Next::Due;
    };
    let status = backup.status.as_ref();
    // A backup that was under way when its spec was changed, and one that failed with another spec, have waited.
    let waited = status.is_some_and(is_open)
        || failed_of(backup).is_some_and(|failed| *failed != backup.metadata.generation);
    if waited {
        return Next::Due;
    }
    // v1beta2's operator recorded successes alone.
    let last = status.and_then(|status| {
        let times = [
            status.start_time.as_ref(),
            status.last_success_date.as_ref(),
        ];
        let times = times.into_iter().flatten().map(|time| time.0);
        times.filter(|time| time.duration_since(now) <= AHEAD).max()
    });
    let created = backup.metadata.creation_timestamp.as_ref();
    let created = created.map_or(Timestamp::UNIX_EPOCH, |time| time.0);
    let seed = backup.metadata.uid.as_deref().unwrap_or_default();
    schedule.next(last, created, seed, now)
}

fn is_due(backup: &EtcdBackup, now: Timestamp) -> bool {
    !is_suspended(backup) && agenda(backup, now) == Next::Due
}

fn is_suspended(backup: &EtcdBackup) -> bool {
    let policy = backup.spec.backup_policy.as_ref();
    policy.is_some_and(|policy| policy.suspend)
}

/// What is kept of a periodic backup, if anything is ever removed.
pub fn rules(backup: &EtcdBackup) -> Option<Rules> {
    let policy = backup
        .spec
        .backup_policy
        .as_ref()
        .filter(|policy| policy.is_periodic())?;
    Some(Rules::of(policy)).filter(Rules::delete)
}

/// Whether stored backups are compressed.
pub fn compresses(backup: &EtcdBackup) -> bool {
    backup.spec.compression == Some(Compression::Zstd)
}

/// Whether old backups are still to be removed after the newest: the list of the kept ones begins with another.
fn to_tidy(backup: &EtcdBackup) -> bool {
    let Some(status) = backup.status.as_ref().filter(|status| status.succeeded) else {
        return false;
    };
    let listed = status
        .backups
        .first()
        .map(|newest| newest.location.as_str());
    rules(backup).is_some() && status.location.is_some() && listed != status.location.as_deref()
}

/// What the removal after the newest backup came to. One that ran while that backup was made says nothing of it.
fn tidied<'a>(backup: &EtcdBackup, observed: &'a Observed) -> Option<&'a Kept> {
    let Work::Ended(Ok(kept)) = &observed.removal.work else {
        return None;
    };
    let newest = backup.status.as_ref()?.location.as_ref()?;
    let knows = kept.backups.iter().any(|one| &one.location == newest);
    // Where the newest lies elsewhere since the spec was changed, nothing was looked at.
    (kept.backups.is_empty() || knows).then_some(kept)
}

/// Until when a backup that is due waits for the removal after the last one, if it does. Where a backup takes longer
/// than the pause between two, the next is always due, and nothing would ever be removed: so the removal begins first.
/// A store that removes slowly or not at all holds up no backup for longer than [`TIDY_FIRST`]; what it has begun to
/// remove it goes on removing.
fn tidies_first(backup: &EtcdBackup, observed: &Observed, now: Timestamp) -> Option<Timestamp> {
    let status = backup.status.as_ref().filter(|_| to_tidy(backup))?;
    let ended = status.completion_time.as_ref()?.0;
    // A clock that was set back makes no long wait.
    let soon = now.duration_since(ended).abs() < TIDY_FIRST;
    let begins = observed.removal.may_begin(now) && observed.obstacle.is_none();
    let waits = match &observed.removal.work {
        Work::Queued | Work::Called | Work::Running(_) => soon,
        Work::Ended(Err(_)) => begins && soon,
        Work::Idle | Work::Ended(Ok(_)) => begins,
    };
    let by = ended.checked_add(TIDY_FIRST).unwrap_or(now).max(now);
    waits.then_some(by)
}

/// Whether the stored backups go with the object.
fn wants_guard(backup: &EtcdBackup) -> bool {
    backup.spec.deletion_policy == Some(DeletionPolicy::Delete)
}

fn is_guarded(backup: &EtcdBackup) -> bool {
    let finalizers = backup.metadata.finalizers.as_deref().unwrap_or_default();
    finalizers
        .iter()
        .any(|finalizer| finalizer == FINALIZER_STORED)
}

/// Whether all that was stored is gone. A removal of what a policy does not keep says nothing of that.
fn purged(observed: &Observed) -> bool {
    matches!(&observed.removal.work, Work::Ended(Ok(kept)) if kept.everything)
}

/// When a finished object goes, if it does.
fn expiry(backup: &EtcdBackup) -> Option<Timestamp> {
    let seconds = backup.spec.ttl_seconds_after_finished?;
    let status = backup.status.as_ref().filter(|_| settled(backup))?;
    let finished = status
        .completion_time
        .as_ref()
        .or(status.last_success_date.as_ref())?;
    finished
        .0
        .checked_add(SignedDuration::from_secs(i64::from(seconds)))
        .ok()
}

fn until(time: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(time.duration_since(now))
        .unwrap_or(MISSING)
        .min(AT_LEAST)
}

/// How soon to look again for what is missing: after a tenth of the time it was waited for, so that who comes late has
/// waited little longer for it.
fn look(waits_since: Timestamp, now: Timestamp) -> Duration {
    let waited = Duration::try_from(now.duration_since(waits_since)).unwrap_or_default();
    (waited / 10).clamp(MISSING, LONG_MISSING)
}

/// Makes the plan.
pub fn plan(backup: &EtcdBackup, observed: &Observed, now: Timestamp) -> Plan {
    let active = observed.transfer.work.is_active();
    // Work that is no longer wanted is given up before anything else.
    let leave = |verdict| {
        let step = if active { Step::Abandon } else { Step::Nothing };
        Plan::new(step, verdict, None)
    };
    if backup.metadata.deletion_timestamp.is_some() {
        return if active {
            leave(Verdict::Settled)
        } else {
            ending(backup, observed, now)
        };
    }
    if wants_guard(backup) != is_guarded(backup) {
        // Before anything is stored that would have to be removed.
        return Plan::new(
            Step::Guard(wants_guard(backup)),
            Verdict::Settled,
            Some(Duration::ZERO),
        );
    }
    if settled(backup) {
        return match expiry(backup) {
            _ if active => leave(Verdict::Settled),
            Some(time) if time <= now => Plan::new(Step::Expire, Verdict::Settled, Some(MISSING)),
            expiry => Plan::new(
                Step::Nothing,
                Verdict::Settled,
                expiry.map(|time| until(time, now)),
            ),
        };
    }
    if let Some(trouble) = refusal(backup) {
        return leave(Verdict::Refused(trouble));
    }
    let Some(begun) = intent(backup) else {
        if active {
            // Invariant 10: what is running belongs to an earlier spec, and the new one is recorded first.
            return Plan::new(Step::Abandon, Verdict::Settled, Some(Duration::ZERO));
        }
        return between(backup, observed, now);
    };
    if let Work::Ended(Ok(stored)) = &observed.transfer.work {
        return leave(Verdict::Succeeded(stored.clone()));
    }
    // What is complete counts, also when it was found too late.
    if let Place::Written(stored) = &observed.place {
        return leave(Verdict::Succeeded(stored.clone()));
    }
    if overdue(backup, observed, now) {
        return leave(Verdict::Failed(too_late(backup, &observed.transfer)));
    }
    let next = attempt(backup, begun, observed, now);
    // Nothing that is waited for is waited for longer than the backup may take.
    let left = deadline(backup, observed, now).map(|deadline| until(deadline, now));
    let requeue = next.requeue.into_iter().chain(left).min();
    Plan { requeue, ..next }
}

/// No backup is under way: the next one, or what the last one left to do.
fn between(backup: &EtcdBackup, observed: &Observed, now: Timestamp) -> Plan {
    if let Some(kept) = tidied(backup, observed).filter(|_| to_tidy(backup)) {
        let verdict = Verdict::Tidied(kept.clone());
        return Plan::new(Step::Nothing, verdict, Some(Duration::ZERO));
    }
    let waits = tidies_first(backup, observed, now);
    let failed = match (&observed.obstacle, &observed.removal.work) {
        _ if !to_tidy(backup) => None,
        (Some(trouble), _) | (None, Work::Ended(Err(trouble))) => Some(trouble.clone()),
        (None, _) => None,
    };
    if is_due(backup, now) && waits.is_none() {
        return match failed {
            // Nobody would hear of it where the next one is always due.
            Some(trouble) if !is_shown(backup, &trouble) => Plan::new(
                Step::Nothing,
                Verdict::Untidy(trouble),
                Some(Duration::ZERO),
            ),
            _ => Plan::new(Step::RecordIntent, Verdict::Begun, Some(Duration::ZERO)),
        };
    }
    let (rest, requeue) = match (agenda(backup, now), waits) {
        _ if is_suspended(backup) => (Verdict::Suspended, None),
        (Next::At(time), _) | (Next::Due, Some(time)) => {
            (Verdict::Scheduled(Some(time)), Some(until(time, now)))
        }
        (Next::Due | Next::Never, _) => (Verdict::Scheduled(None), None),
    };
    if !to_tidy(backup) {
        return Plan::new(Step::Nothing, rest, requeue);
    }
    let soon = requeue.map_or(MISSING, |requeue| requeue.min(MISSING));
    // Invariant 9: this begins only after the status says that a newer one is complete.
    let begin = observed.removal.may_begin(now) && observed.obstacle.is_none();
    let step = if begin { Step::Tidy } else { Step::Nothing };
    Plan::new(step, failed.map_or(rest, Verdict::Untidy), Some(soon))
}

/// Whether the status says already why old backups are not removed.
fn is_shown(backup: &EtcdBackup, trouble: &Trouble) -> bool {
    let conditions = backup.status.as_ref().map(|status| &status.conditions);
    let applied = conditions.and_then(|all| find(all, &ConditionType::RetentionApplied));
    applied.is_some_and(|found| found.status == "False" && found.reason == trouble.reason.as_str())
}

/// The object is being deleted, and nothing is under way.
fn ending(backup: &EtcdBackup, observed: &Observed, now: Timestamp) -> Plan {
    if !is_guarded(backup) {
        return Plan::new(Step::Nothing, Verdict::Settled, None);
    }
    if !wants_guard(backup) || purged(observed) {
        return Plan::new(Step::Guard(false), Verdict::Settled, None);
    }
    let failed = match (&observed.obstacle, &observed.removal.work) {
        (Some(trouble), _) | (None, Work::Ended(Err(trouble))) => Some(trouble),
        _ => None,
    };
    let since = backup
        .metadata
        .deletion_timestamp
        .as_ref()
        .map_or(now, |time| time.0);
    match failed {
        // A bucket that is gone holds nothing.
        Some(trouble) if trouble.reason == Reason::BucketMissing => {
            return Plan::new(Step::Guard(false), Verdict::Settled, None);
        }
        // A Secret that is gone does not come back where a whole namespace goes.
        Some(trouble)
            if trouble.reason == Reason::SecretMissing && now.duration_since(since) > GIVE_UP =>
        {
            return Plan::new(Step::Guard(false), Verdict::Ending(trouble.clone()), None);
        }
        _ => {}
    }
    let begin = observed.removal.may_begin(now) && observed.obstacle.is_none();
    let verdict = failed.cloned().map_or(Verdict::Settled, Verdict::Ending);
    Plan::new(
        if begin { Step::Purge } else { Step::Nothing },
        verdict,
        Some(look(since, now)),
    )
}

/// The next attempt, within the time there is.
fn attempt(backup: &EtcdBackup, begun: Timestamp, observed: &Observed, now: Timestamp) -> Plan {
    let wait = |verdict, requeue| Plan::new(Step::Nothing, verdict, Some(requeue));
    let work = &observed.transfer.work;
    if *work == Work::Queued {
        return wait(Verdict::Queued, PROGRESS);
    }
    if *work == Work::Called {
        // Invariant 10: before its first byte, so that it is known also when it takes this process with it.
        let step = Step::RecordAttempts(with_ours(backup, &observed.transfer));
        return Plan::new(step, Verdict::Begun, Some(PROGRESS));
    }
    if let Work::Running(moved) = *work {
        return wait(Verdict::Running(moved), PROGRESS);
    }
    // One that is seen to have ended.
    let uncount = || match work {
        Work::Ended(Err(_)) => without_ours(&observed.transfer),
        _ => None,
    };
    let uncount = || uncount().map_or(Step::Nothing, Step::RecordAttempts);
    let early = observed.transfer.not_before.filter(|time| *time > now);
    if let (Work::Ended(Err(trouble)), Some(time)) = (work, early) {
        let step = uncount();
        let verdict = Verdict::Waiting(trouble.clone());
        return Plan::new(step, verdict, Some(until(time, now)));
    }
    match &observed.place {
        // Invariant 1: what the store holds is unknown, so nothing is written to it.
        Place::Unknown(trouble) => {
            let verdict = Verdict::Waiting(trouble.clone());
            Plan::new(uncount(), verdict, Some(look(begun, now)))
        }
        Place::NotAsked => wait(Verdict::Begun, Duration::ZERO),
        Place::Free | Place::Written(_) => {
            if let Some(trouble) = cut_off(backup, work) {
                return Plan::new(Step::Nothing, Verdict::Failed(trouble), None);
            }
            // A failure that is being tried again goes on being shown.
            let verdict = match work {
                Work::Ended(Err(trouble)) => Verdict::Waiting(trouble.clone()),
                _ => Verdict::Begun,
            };
            Plan::new(Step::Begin, verdict, Some(PROGRESS))
        }
    }
}

#[cfg(test)]
mod tests;
