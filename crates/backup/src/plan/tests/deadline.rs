//! Tests of the deadline of a backup.

use member::OperatorImage;
use runtime::endpoints::EndpointRule;

use super::*;
use crate::plan::Job;
use crate::snapshot::{Endpoint, EndpointReach, Inputs, Site, Source};

fn limited() -> EtcdBackup {
    begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 60 }))
}

/// If many backups start at midnight, most of them wait in the queue. Their deadlines must not pass while they wait.
#[test]
fn queue_time_does_not_count_for_deadline() {
    let backup = limited();
    let queued = known(Work::Queued, Destination::NotRead);
    let waits = plan(&backup, &queued, at(5000));
    assert_eq!(
        (waits.action, &waits.verdict),
        (Action::Nothing, &Verdict::Queued)
    );
    let status = status(&backup, &waits, at(5000));
    let complete = find(&status.conditions, &ConditionType::Complete).unwrap();
    assert!(complete.message.contains("is queued"), "{complete:?}");
    let mut running = known(Work::Running(Moved::default()), Destination::NotRead);
    running.transfer.queue_time = Duration::from_secs(5000);
    assert_eq!(plan(&backup, &running, at(5059)).action, Action::Nothing);
    let overdue = plan(&backup, &running, at(5060));
    assert_eq!(overdue.action, Action::AbandonTransfer);
    assert!(matches!(overdue.verdict, Verdict::Waiting(_)));
    // For a retry, the queue time of the failed attempt does not count for the deadline.
    let mut failed = known(Work::Ended(Err(refused())), Destination::Free);
    failed.transfer.queue_time = Duration::from_secs(5000);
    assert_eq!(
        plan(&backup, &failed, at(5059)).action,
        Action::StartTransfer
    );
}

/// After an hour without a running operator, the operator reads the store before it reports a failure.
#[test]
fn operator_downtime_does_not_count_for_deadline() {
    let backup = limited();
    let restarted = |destination| Snapshot {
        since: Some(at(3600)),
        ..known(Work::Idle, destination)
    };
    let unread = restarted(Destination::NotRead);
    assert_eq!(need(&backup, &unread, at(3601)), Need::Destination);
    let complete = restarted(Destination::Complete(stored()));
    let found = plan(&backup, &complete, at(3601));
    assert_eq!(found.verdict, Verdict::Succeeded(stored()));
    assert_eq!(
        plan(&backup, &restarted(Destination::Free), at(3601)).action,
        Action::StartTransfer
    );
    // In the new process, the time limit of 60 seconds starts again at second 3600, so the deadline is second 3660.
    let overdue = plan(&backup, &restarted(Destination::NotRead), at(3660));
    assert!(matches!(overdue.verdict, Verdict::Failed(_)), "{overdue:?}");
    // If the process started before the backup, the start of the process does not change the deadline.
    let older = Snapshot {
        since: Some(at(-3600)),
        ..known(Work::Idle, Destination::NotRead)
    };
    assert!(matches!(
        plan(&backup, &older, at(61)).verdict,
        Verdict::Failed(_)
    ));
}

/// The start was recorded while the clock was ten days ahead. After the correction of the clock, the backup must have a
/// deadline.
#[test]
fn recorded_start_in_future_does_not_extend_deadline() {
    let ahead = 864_000;
    let backup = begun(|object| {
        object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 60 });
        object["metadata"]["creationTimestamp"] = json!(at(-ahead - 30).to_string());
    });
    let of = |since: i64| Snapshot {
        since: Some(at(since)),
        ..known(Work::Running(Moved::default()), Destination::NotRead)
    };
    let step = |since, now| plan(&backup, &of(since), at(now)).action;
    // The time limit starts with this process, or with the creation of the EtcdBackup if the creation was later.
    assert_eq!(step(-ahead, 59 - ahead), Action::Nothing);
    assert_eq!(step(-ahead, 60 - ahead), Action::AbandonTransfer);
    assert_eq!(step(-2 * ahead, 29 - ahead), Action::Nothing);
    assert_eq!(step(-2 * ahead, 30 - ahead), Action::AbandonTransfer);
    // If the process started while the clock was ahead, its start time is later than the corrected time, and is
    // ignored.
    assert_eq!(step(-1, 60 - ahead), Action::Nothing);
    // When the clock has reached the recorded start, the time limit starts with the recorded start.
    assert_eq!(step(-ahead, 59), Action::Nothing);
    assert_eq!(step(-ahead, 60), Action::AbandonTransfer);
}

/// The operator process ended while the pod was pending, for example because its volume was deleted. The next process
/// cannot read the inputs, but must delete the pod.
#[test]
fn failed_backup_deletes_pod_of_earlier_operator_process() {
    let in_pod = |object: &mut Value| {
        object["spec"]["storageType"] = json!("PVC");
        object["spec"]["s3"] = Value::Null;
        object["spec"]["pvc"] = json!({ "claimName": "backups", "path": "key" });
        object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 60 });
    };
    let backup = begun(in_pod);
    let started = Snapshot {
        inputs: Inputs::Transfer {
            site: Site::Volume {
                claim: "backups".to_owned(),
                path: "key".to_owned(),
                image: OperatorImage {
                    image: "operator:1".to_owned(),
                    pull_policy: None,
                },
            },
            leftover: None,
            source: Source::Endpoints(vec![Endpoint {
                url: "http://c:2379".to_owned(),
                reach: EndpointReach::Direct,
            }]),
            rule: EndpointRule::default(),
        },
        ..known(Work::Idle, Destination::Free)
    };
    let Some(Job::InPod { pod, .. }) = plan(&backup, &started, at(1)).job else {
        panic!("the plan contains no pod")
    };
    let left = Some(Job::LeftPod {
        name: pod.metadata.name.unwrap(),
    });
    let unknown = known(Work::Idle, Destination::Unknown(refused()));
    assert_eq!(plan(&backup, &unknown, at(59)).job, None);
    let failed = plan(&backup, &unknown, at(60));
    assert!(matches!(failed.verdict, Verdict::Failed(_)), "{failed:?}");
    assert_eq!(failed.job, left);
    // While a worker of this process runs, the worker deletes its own pod, so the plan contains no deletion.
    let running = known(Work::Running(Moved::default()), Destination::NotRead);
    assert_eq!(plan(&backup, &running, at(60)).job, None);
    // A changed or rejected spec ends the backup, so the plan deletes its pod.
    let mut changed = backup.clone();
    changed.metadata.generation = Some(2);
    let restarted = plan(&changed, &Snapshot::default(), at(1));
    assert_eq!(
        (restarted.action, &restarted.job),
        (Action::RecordIntent, &left)
    );
    changed.spec.etcd_endpoints.clear();
    let rejected = plan(&changed, &Snapshot::default(), at(1));
    assert!(matches!(rejected.verdict, Verdict::Refused(_)));
    assert_eq!(rejected.job, left);
    // The status of `ended` reports the end of the attempt. The operator writes this status only after it has deleted
    // the pod, so no pod is left.
    let ended = after(backup, &failed, at(60));
    assert_eq!(plan(&ended, &Snapshot::default(), at(61)).job, None);
    // A backup in a bucket has no pod.
    let in_bucket = plan(&limited(), &unknown, at(60));
    assert!(matches!(in_bucket.verdict, Verdict::Failed(_)));
    assert_eq!(in_bucket.job, None);
}
