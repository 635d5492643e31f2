//! Invariant 32: a change that `spec.backup.beforeChanges` names starts only after a recent backup of this cluster, or
//! after a user has waived the backup.
//!
//! Before an upgrade and before a removal of members, the operator records a request for a backup in the status
//! (invariant 10). The backup operator reads the request there, makes the backup, and reports the backup in
//! `status.backupForChanges`. The operator then records this backup, and the change starts. The operator checks the age
//! of the backup only then: a change that has started continues with the recorded backup.
//!
//! Invariant 41: the deletion of an EtcdCluster with `deletionPolicy: BackupThenDelete` waits in the same way. During
//! this wait, no other change starts, because the record of that change would replace the record of the deletion. The
//! backup must be newer than the deletion, and must contain the revision that etcd had when the operator recorded the
//! request.
//!
//! Before a recovery, the operator requests no backup, because the request would replace the record of a started
//! upgrade, which continues if the quorum returns. A user can back up a member that still runs.

use std::time::Duration;

use api::cluster::{
    BeforeChangeStatus, ClusterChange, backup_waiver, earliest_backup, how_to_waive_backup,
};
use api::command;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;

use crate::plan::{BLIND, Draft, STEADY};
use crate::reason::Reason;
use crate::snapshot::{Desired, Observed, Seen};

/// The record of an unfinished change of this kind. Ignores the record of a cluster that was replaced.
fn current<'a>(observed: &'a Observed, change: &ClusterChange) -> Option<&'a BeforeChangeStatus> {
    let record = observed.before_change.record.as_ref()?;
    let is_own = observed.cluster_id?.to_string() == record.cluster_id;
    (is_own && record.change == *change && record.completion_time.is_none()).then_some(record)
}

/// True if a change of this kind needs no backup, or if its backup is recorded.
pub(super) fn has_passed(desired: &Desired, observed: &Observed, change: &ClusterChange) -> bool {
    max_age(desired, change).is_none()
        || current(observed, change).is_some_and(BeforeChangeStatus::has_passed)
}

fn max_age(desired: &Desired, change: &ClusterChange) -> Option<Duration> {
    desired.object.spec.max_backup_age_before(change)
}

/// True if the change may start or continue. Otherwise, plans the next record, or reports the wait. `what` is the
/// subject of the message, such as "the removal of surplus members".
pub(super) fn is_backed_up(change: &ClusterChange, what: &str, draft: &mut Draft) -> bool {
    let (desired, observed, now) = draft.build.inputs();
    let (Some(age), Some(id)) = (max_age(desired, change), observed.cluster_id) else {
        return true;
    };
    if has_passed(desired, observed, change) {
        return true;
    }
    let is_deletion = *change == ClusterChange::Deletion;
    if observed.deleting && !is_deletion {
        return false;
    }
    // The backup before a deletion needs a quorum: without one, a member can send a snapshot that lacks acknowledged
    // writes.
    let may_ask =
        !is_deletion || matches!(&observed.members, Seen::Known(list) if list.cluster_id == id);
    let id = id.to_string();
    // `now` is reduced to whole seconds, because Kubernetes stores times without fractions of a second.
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let known = current(observed, change);
    let is_asked = may_ask || known.is_some();
    let deleted = desired.object.metadata.deletion_timestamp.as_ref();
    let begin = deleted.filter(|_| is_deletion).map_or(now, |time| time.0);
    let revision = observed.answers().map(|(_, status)| status.revision).max();
    let new = || BeforeChangeStatus {
        revision: revision.filter(|_| is_deletion),
        ..BeforeChangeStatus::waiting(change.clone(), id.clone(), Time(begin))
    };
    let record = known.cloned().unwrap_or_else(new);
    let requested = record.start_time.0;
    // A backup made after `requested` counts even if it is older than `age`, because verification may take long.
    let since = earliest_backup(now, age).min(requested);
    let found = observed.before_change.backup.as_ref();
    let found = found.filter(|backup| backup.covers(&id, since, now));
    // Invariant 41: a backup that began before the request may lack the newest writes, so its revision is compared.
    let backup = found.filter(|backup| is_asked && backup.revision >= record.revision);
    let waiver = backup_waiver(change, requested);
    let is_waived =
        (known.is_some() || is_deletion) && observed.before_change.waiver.as_ref() == Some(&waiver);
    if backup.is_some() || is_waived {
        let passed = BeforeChangeStatus {
            backup: backup.cloned(),
            waived: backup.is_none(),
            ..record
        };
        draft.add(draft.build.record_before_change(Some(&passed)));
        return false;
    }
    // The next request must be later than `found`, which lacks writes but would satisfy an earlier request.
    let time = found.and_then(|found| found.time.as_ref());
    let lacks_writes = time.is_some_and(|time| time.0 < now);
    if may_ask && (known.is_none() || lacks_writes) {
        let start_time = Time(if known.is_some() { now } else { requested });
        let asked = BeforeChangeStatus {
            start_time,
            ..record
        };
        draft.add(draft.build.record_before_change(Some(&asked)));
    }
    let spec = &desired.object.spec;
    let needed = format!("{what} needs {}", spec.needed_backup(change, age));
    let waive = how_to_waive_backup("etcdcluster", &desired.object.metadata, &waiver);
    if let Some(obstacle) = spec.backup_obstacle() {
        let text = format!("{needed}, but {obstacle}. {waive}");
        draft.problem(Reason::NoRecentBackup, text);
        return false;
    }
    let name = desired.object.name_any();
    let asked = format!("one was requested at {requested} (EtcdBackup {name})");
    let report = observed.before_change.request.as_ref();
    let state = match report.filter(|report| report.start_time.0 == requested) {
        Some(report) => format!("{asked}. The backup operator reports: {}", report.message),
        None if is_asked => format!("{asked}. No report yet: check that the backup operator runs"),
        None => "none was requested, because no quorum of the members answers".to_owned(),
    };
    let text = format!("{needed}; {state}. {waive}");
    draft.wait(Reason::AwaitingBackup, text, STEADY);
    false
}

/// Called while no change of this kind is needed. Completes the record of the last change, or removes the record if
/// that change has not started.
pub(super) fn end(change: &ClusterChange, draft: &mut Draft) {
    let (_, observed, now) = draft.build.inputs();
    let Some(record) = current(observed, change) else {
        return;
    };
    let ended = record.has_passed().then(|| BeforeChangeStatus {
        completion_time: Some(Time(now)),
        ..record.clone()
    });
    draft.add(draft.build.record_before_change(ended.as_ref()));
}

/// True if a recovery may start. Without a quorum, etcd acknowledges no writes, so the age of the backup is measured at
/// the loss of the quorum. A later backup of a survivor is accepted too.
pub(super) fn may_recover(draft: &mut Draft) -> bool {
    let (desired, observed, now) = draft.build.inputs();
    let change = ClusterChange::Recovery;
    let (Some(age), Some(id)) = (max_age(desired, &change), observed.cluster_id) else {
        return true;
    };
    draft.requeue = draft.requeue.min(BLIND);
    // No recovery starts before the status records when the quorum was lost. This reconcile records that time.
    let Some(lost) = observed.recovery.unavailable_since else {
        return false;
    };
    let (since, waiver) = (earliest_backup(lost, age), backup_waiver(&change, lost));
    let backup = observed.before_change.backup.as_ref();
    if backup.is_some_and(|backup| backup.covers(&id.to_string(), since, now))
        || observed.before_change.waiver.as_ref() == Some(&waiver)
    {
        return true;
    }
    let object = &desired.object;
    let needed = object.spec.needed_backup(&change, age);
    let make = command::backup(&object.namespace().unwrap_or_default(), &object.name_any());
    let waive = how_to_waive_backup("etcdcluster", &object.metadata, &waiver);
    let text = format!(
        "the recovery needs {needed} at the time when the quorum was lost. A later backup of a \
         member that still runs counts too: run {make}. {waive}"
    );
    draft.problem(Reason::NoRecentBackup, text);
    false
}
