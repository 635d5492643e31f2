//! Tests of the status and the Events of the agent.

use jiff::SignedDuration;

use super::*;

const START: i64 = 1_764_000_000;

fn after(seconds: i64) -> Time {
    Time(Timestamp::from_second(START).unwrap() + SignedDuration::from_secs(seconds))
}

/// A report from the second `now`. All changes up to `complete` are in the store.
fn report(now: i64, complete: Option<i64>, problem: Option<&str>) -> RecordingVerdict {
    let micros = |seconds: i64| (START + seconds) * MICROS;
    let report = AgentReport {
        now: micros(now),
        progress: Progress {
            revision: Some(40),
            revision_time: Some(micros(now)),
            complete_time: complete.map(micros),
            etcd_revision: Some(42),
            base: Some(BaseProgress {
                cluster_id: "aa".to_owned(),
                revision: 30,
                created: micros(0),
                segments: 5,
                bytes: 100,
            }),
            problem: problem.map(str::to_owned),
            ..Progress::default()
        },
    };
    RecordingVerdict::Reported {
        location: Some("s3://b/k.continuous/uid/".to_owned()),
        report: Box::new(report),
        obstacle: None,
    }
}

fn waiting(reason: Reason) -> RecordingVerdict {
    RecordingVerdict::Waiting(Trouble::new(reason, "why"))
}

/// The status after these verdicts, one each minute.
fn after_verdicts(verdicts: &[RecordingVerdict]) -> EtcdBackupStatus {
    let mut status = EtcdBackupStatus::default();
    for (minute, verdict) in (0..).zip(verdicts) {
        record(&mut status, verdict, Some(1), &after(60 * minute));
    }
    status
}

fn condition(status: &EtcdBackupStatus) -> Option<(&str, &str)> {
    let found = api::conditions::find(&status.conditions, &ConditionType::Recording);
    found.map(|found| (found.status.as_str(), found.reason.as_str()))
}

#[test]
fn report_of_agent_is_written_to_status_and_condition() {
    let status = after_verdicts(&[report(10, Some(9), None)]);
    assert_eq!(condition(&status), Some(("True", "Recording")));
    let continuous = status.continuous.unwrap();
    assert_eq!(continuous.revision, Some(40));
    assert_eq!(continuous.complete_time, Some(after(9)));
    assert_eq!(continuous.lag_seconds, Some(1));
    assert_eq!(continuous.lag_revisions, Some(2));
    assert_eq!(continuous.check_time, Some(after(0)));
    let base = continuous.base.unwrap();
    assert_eq!(
        (base.revision, base.segments, base.bytes),
        (30, Some(5), Some(100))
    );
}

#[test]
fn long_lag_or_problem_without_known_lag_is_reported_as_delayed() {
    let late = after_verdicts(&[report(100, Some(39), Some("store full"))]);
    assert_eq!(condition(&late), Some(("False", "RecordingDelayed")));
    let first = after_verdicts(&[report(1, None, None)]);
    assert_eq!(condition(&first), Some(("Unknown", "Pending")));
    let failing = after_verdicts(&[report(1, None, Some("etcd does not answer"))]);
    assert_eq!(condition(&failing), Some(("False", "RecordingDelayed")));
    let found = api::conditions::find(&failing.conditions, &ConditionType::Recording);
    assert!(found.unwrap().message.contains("etcd does not answer"));
}

#[test]
fn recording_condition_reports_retention_problem() {
    let mut verdict = report(10, Some(9), None);
    if let RecordingVerdict::Reported { report, .. } = &mut verdict {
        let problem = "old bases cannot be deleted: access denied";
        report.progress.retention_problem = Some(problem.to_owned());
    }
    let status = after_verdicts(&[verdict]);
    assert_eq!(condition(&status), Some(("True", "Recording")));
    let found = api::conditions::find(&status.conditions, &ConditionType::Recording);
    let message = &found.unwrap().message;
    assert!(
        message.ends_with("; old bases cannot be deleted: access denied"),
        "{message}"
    );
}

#[test]
fn recording_condition_and_event_report_missing_new_encryption_key() {
    let mut verdict = report(10, Some(9), None);
    if let RecordingVerdict::Reported { obstacle, .. } = &mut verdict {
        let problem = "spec.encryption.key: the Secret has no entry 2027";
        *obstacle = Some(Trouble::new(Reason::SecretMissing, problem));
    }
    let status = after_verdicts(std::slice::from_ref(&verdict));
    assert_eq!(condition(&status), Some(("True", "Recording")));
    let found = api::conditions::find(&status.conditions, &ConditionType::Recording);
    let message = &found.unwrap().message;
    for part in [RECORDS, "previous settings", "no entry 2027"] {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(reasons(status, &verdict), ["SecretMissing"]);
}

#[test]
fn lag_grows_without_a_report() {
    let verdicts = [report(0, Some(0), None), waiting(Reason::PodNotStarting)];
    let status = after_verdicts(&verdicts);
    assert_eq!(condition(&status), Some(("False", "PodNotStarting")));
    assert_eq!(status.continuous.unwrap().lag_seconds, Some(60));
    // The second report is from a restarted agent without a `complete_time`, so the lag is computed from the first
    // report.
    let verdicts = [report(0, Some(0), None), report(90, None, None)];
    let status = after_verdicts(&verdicts);
    assert_eq!(status.continuous.unwrap().lag_seconds, Some(90));
}

#[test]
fn report_with_extreme_numbers_is_written_to_status() {
    for (now, stored, newest) in [
        (i64::MAX, i64::MIN, i64::MAX),
        (i64::MIN, i64::MAX, i64::MIN),
    ] {
        let progress = Progress {
            revision: Some(stored),
            complete_time: Some(stored),
            etcd_revision: Some(newest),
            ..Progress::default()
        };
        let verdict = RecordingVerdict::Reported {
            location: None,
            report: Box::new(AgentReport { now, progress }),
            obstacle: None,
        };
        let continuous = after_verdicts(&[verdict]).continuous.unwrap();
        let expected = if now > 0 {
            (i64::MAX / MICROS, i64::MAX)
        } else {
            (0, 0)
        };
        let found = continuous.lag_seconds.zip(continuous.lag_revisions);
        assert_eq!(found, Some(expected));
    }
}

#[test]
fn hibernated_cluster_has_no_lag() {
    let verdicts = [report(0, Some(0), None), waiting(Reason::Hibernated)];
    let continuous = after_verdicts(&verdicts).continuous.unwrap();
    assert_eq!(
        (continuous.lag_seconds, continuous.complete_time),
        (None, None)
    );
}

#[test]
fn removal_of_continuous_block_removes_report_and_condition() {
    let verdicts = [report(0, Some(0), None), RecordingVerdict::Off];
    let status = after_verdicts(&verdicts);
    assert_eq!(condition(&status), None);
    assert_eq!(status.continuous, None);
}

fn backup(status: EtcdBackupStatus) -> EtcdBackup {
    let spec = serde_json::json!({ "storageType": "S3", "continuous": {} });
    let mut backup = EtcdBackup::new("b", serde_json::from_value(spec).unwrap());
    backup.status = Some(status);
    backup
}

fn reasons(before: EtcdBackupStatus, verdict: &RecordingVerdict) -> Vec<&'static str> {
    let mut after_it = before.clone();
    record(&mut after_it, verdict, Some(1), &after(0));
    let notices = notices(&backup(before), verdict, &after_it);
    notices.iter().map(|notice| notice.reason).collect()
}

#[test]
fn each_gap_and_the_start_of_the_recording_have_one_event() {
    let mut verdict = report(10, Some(9), None);
    if let RecordingVerdict::Reported { report, .. } = &mut verdict {
        report.progress.held = Some(Held {
            bases: 2,
            gap_count: 1,
            gaps: vec![Missing {
                after: 20,
                until: 30,
                until_time: START * MICROS,
                cluster_changed: true,
            }],
            ..Held::default()
        });
    }
    let first = reasons(EtcdBackupStatus::default(), &verdict);
    assert_eq!(first, ["Recording", "ChangesMissing"]);
    let known = after_verdicts(&[verdict.clone()]);
    assert_eq!(reasons(known, &verdict), [] as [&str; 0]);
    let delayed = reasons(EtcdBackupStatus::default(), &report(100, Some(1), None));
    assert_eq!(delayed, ["RecordingDelayed"]);
    let starting = reasons(EtcdBackupStatus::default(), &waiting(Reason::Pending));
    assert_eq!(starting, [] as [&str; 0]);
    let missing = reasons(EtcdBackupStatus::default(), &waiting(Reason::SecretMissing));
    assert_eq!(missing, ["SecretMissing"]);
}
