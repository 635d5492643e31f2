//! Deletes a finished EtcdRestore after `ttlSecondsAfterFinished`. The restored cluster stays, because the EtcdRestore
//! no longer owns it.

use std::time::Duration;

use api::EtcdRestore;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::{Action, Plan, PlanState};

/// Adds the expiry to the plan of a restore that has ended.
#[must_use]
pub fn expire(plan: Plan, restore: &EtcdRestore, now: Timestamp) -> Plan {
    let ended = matches!(plan.state, PlanState::Complete | PlanState::Halted(_));
    if plan.action != Action::Nothing || !ended || super::in_place::is_deleted(restore) {
        return plan;
    }
    let status = restore.status.as_ref();
    let (Some(seconds), Some(ended)) = (
        restore.spec.ttl_seconds_after_finished,
        // `completionTime` is missing until the status reports the end of the restore.
        status.and_then(|status| status.completion_time.as_ref()),
    ) else {
        return plan;
    };
    let due = ended
        .0
        .checked_add(SignedDuration::from_secs(seconds.into()));
    let remaining = due.map_or(SignedDuration::MAX, |due| due.duration_since(now));
    if remaining.is_positive() {
        let requeue = Some(Duration::try_from(remaining).unwrap_or(Duration::MAX));
        return Plan { requeue, ..plan };
    }
    Plan {
        action: Action::Expire,
        requeue: None,
        ..plan
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    fn ended(ttl: Option<i32>, succeeded: bool) -> EtcdRestore {
        let spec =
            r#"{"etcdCluster":{"name":"main"},"backupStorageType":"S3","s3":{"path":"b/k"}}"#;
        let mut restore = EtcdRestore::new("again", serde_json::from_str(spec).unwrap());
        restore.spec.ttl_seconds_after_finished = ttl;
        let status = restore.status.get_or_insert_default();
        status.succeeded = succeeded;
        status.completion_time = Some(Time(at(1000)));
        restore
    }

    fn planned(restore: &EtcdRestore, now: i64) -> (Action, Option<Duration>) {
        let plan = expire(Plan::complete(), restore, at(now));
        (plan.action, plan.requeue)
    }

    #[test]
    fn finished_restore_is_deleted_after_ttl() {
        let restore = ended(Some(60), true);
        let in_time = (Action::Nothing, Some(Duration::from_secs(20)));
        assert_eq!(planned(&restore, 1040), in_time);
        assert_eq!(planned(&restore, 1060), (Action::Expire, None));
        assert_eq!(planned(&ended(None, true), 9999), (Action::Nothing, None));
        assert_eq!(planned(&ended(Some(0), true), 1000), (Action::Expire, None));
    }

    #[test]
    fn unfinished_or_deleted_restore_does_not_expire() {
        let mut restore = ended(Some(0), false);
        let waiting = Plan::wait_for("something");
        assert_eq!(expire(waiting.clone(), &restore, at(9999)), waiting);
        restore.metadata.deletion_timestamp = Some(Time(at(1)));
        assert_eq!(planned(&restore, 9999), (Action::Nothing, None));
        let mut unrecorded = ended(Some(0), true);
        unrecorded.status.get_or_insert_default().completion_time = None;
        assert_eq!(planned(&unrecorded, 9999), (Action::Nothing, None));
    }
}
