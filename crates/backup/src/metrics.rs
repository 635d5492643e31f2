//! The metrics of each EtcdBackup, with its namespace, cluster and name as labels.
//!
//! Each scrape computes the values from the cached objects. Deleted objects therefore have no metrics, and a restart
//! of the operator loses no values.

mod continuous;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use api::EtcdBackup;
use api::cluster::MAX_CLOCK_SKEW;
use api::conditions::{ConditionType, is_true};
use jiff::Timestamp;
use kube::ResourceExt;
use mirror::metrics::MirrorMetrics;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use runtime::controller::Cache;

use crate::plan::schedule::Schedule;
use crate::snapshot::Stored;
use crate::workers::Workers;

/// Name and help of a metric, and its value for each EtcdBackup.
type MetricFamily = (
    &'static str,
    &'static str,
    Family<Vec<(String, String)>, Gauge>,
);

type Values = Vec<(&'static str, &'static str, Option<i64>)>;

/// Collects the metrics of all EtcdBackups.
pub(crate) struct BackupMetrics {
    /// All EtcdBackups, from the watch.
    pub(crate) objects: Cache<EtcdBackup>,
    /// The transfers of this process, from which `failed_attempts` and `queued_seconds` are computed.
    pub(crate) transfers: Arc<Workers<Stored>>,
    /// The metrics of EtcdMirrors.
    pub(crate) mirrors: MirrorMetrics,
}

impl fmt::Debug for BackupMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BackupMetrics")
    }
}

impl Collector for BackupMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let objects = self.objects.state();
        let readable = objects.iter().filter_map(|object| object.0.as_ref().ok());
        let work = |backup: &EtcdBackup| {
            let uid = backup.uid().unwrap_or_default();
            Attempts {
                failures: self.transfers.failures(&uid),
                queued: self.transfers.queued_for(&uid),
            }
        };
        for (name, help, family) in families(readable.map(|backup| (backup, work(backup)))) {
            let name = format!("{PREFIX}{name}");
            family.encode(encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?)?;
        }
        self.mirrors.encode(&mut encoder)
    }
}

const PREFIX: &str = "etcd_operator_backup_";

fn families<'a>(backups: impl Iterator<Item = (&'a EtcdBackup, Attempts)>) -> Vec<MetricFamily> {
    let mut families: Vec<MetricFamily> = Vec::new();
    for (backup, attempts) in backups {
        for (index, (name, help, value)) in values(backup, attempts).into_iter().enumerate() {
            if families.len() == index {
                families.push((name, help, Family::default()));
            }
            let labels = [
                ("namespace", backup.namespace().unwrap_or_default()),
                ("cluster", backup.spec.cluster_text().unwrap_or_default()),
                ("name", backup.name_any()),
            ];
            let labels = labels
                .map(|(label, text)| (label.to_owned(), text))
                .to_vec();
            if let (Some(value), Some((_, _, family))) = (value, families.get(index)) {
                family.get_or_create(&labels).set(value);
            }
        }
    }
    families
}

/// The failed and queued attempts of one EtcdBackup in this process.
#[derive(Clone, Copy, Default)]
struct Attempts {
    /// Number of failed attempts since the last successful backup.
    failures: u32,
    /// Time that the current attempt has spent in the queue; `None` if it is not queued.
    queued: Option<Duration>,
}

/// The metrics of one EtcdBackup. Their number and order are the same for every EtcdBackup.
fn values(backup: &EtcdBackup, attempts: Attempts) -> Values {
    let status = backup.status.as_ref();
    let last = status.and_then(|status| status.last_success_date.as_ref());
    // Earlier releases wrote no `status.duration`. For a backup of such a release, the duration is the time between the
    // start and the end.
    let measured = status.filter(|status| status.succeeded).and_then(|status| {
        let (begun, ended) = (
            status.start_time.as_ref()?,
            status.completion_time.as_ref()?,
        );
        Some(ended.0.duration_since(begun.0).as_secs())
    });
    let recorded = status
        .and_then(|status| status.duration.as_ref()?.parse())
        .and_then(|duration| i64::try_from(duration.as_secs()).ok());
    let mut values = vec![
        (
            "last_success_timestamp_seconds",
            "Completion time of the newest backup",
            last.map(|time| time.0.as_second()),
        ),
        (
            "next_timestamp_seconds",
            "Time at which the next backup starts",
            status
                .and_then(|status| status.next_backup_time.as_ref())
                .map(|time| time.0.as_second()),
        ),
        (
            "due_timestamp_seconds",
            "Time of the first scheduled run after the newest backup",
            due(backup, Timestamp::now()),
        ),
        (
            "size_bytes",
            "Size of the newest snapshot in bytes",
            status.and_then(|status| status.size),
        ),
        (
            "duration_seconds",
            "Duration of the newest backup in seconds",
            recorded.or(measured),
        ),
        (
            "revision",
            "Revision of the newest backup",
            status.and_then(|status| status.etcd_revision),
        ),
        (
            "progress_bytes",
            "Bytes transferred by the running or the last backup",
            status
                .and_then(|status| status.progress.as_ref())
                .map(|progress| progress.bytes),
        ),
        (
            "failed_attempts",
            "Number of attempts that have failed since the last success",
            Some(i64::from(attempts.failures)),
        ),
        (
            "queued_seconds",
            "Seconds that the backup has been queued behind other transfers, 0 if it is not queued",
            i64::try_from(attempts.queued.unwrap_or_default().as_secs()).ok(),
        ),
        (
            "queued",
            "1 if the backup is queued behind other transfers",
            Some(attempts.queued.is_some().into()),
        ),
        (
            "periodic",
            "1 if the EtcdBackup is periodic and not suspended",
            Some(is_scheduled(backup).into()),
        ),
        (
            "failed",
            "1 if the last backup failed or the spec is rejected",
            Some(failed(backup).into()),
        ),
        (
            "created_timestamp_seconds",
            "Creation time of the EtcdBackup",
            backup
                .metadata
                .creation_timestamp
                .as_ref()
                .map(|time| time.0.as_second()),
        ),
    ];
    values.extend(verification_values(backup));
    values.extend(copy_values(backup));
    values.extend(continuous::values(backup, Timestamp::now()));
    values
}

/// The values about the copies of an EtcdBackup. Each value is `None` without `spec.copyTo`.
fn copy_values(backup: &EtcdBackup) -> Values {
    let status = backup.status.as_ref();
    let records = status.map_or(&[][..], |status| status.copies.as_slice());
    let copied = || {
        let copies = backup.spec.copy_to.iter().map(|copy| {
            let record = records.iter().find(|record| record.name == copy.name);
            record.and_then(|record| record.backup_time.as_ref())
        });
        let times: Option<Vec<_>> = copies.collect();
        times?.into_iter().map(|time| time.0.as_second()).min()
    };
    let failed = records.iter().filter(|record| record.error.is_some());
    let has_copies = !backup.spec.copy_to.is_empty();
    vec![
        (
            "copied_timestamp_seconds",
            "Completion time of the newest backup that every store of spec.copyTo contains",
            copied(),
        ),
        (
            "copies_failed",
            "Number of stores of spec.copyTo whose last attempt has failed",
            i64::try_from(failed.count()).ok().filter(|_| has_copies),
        ),
    ]
}

/// The values about the verification of an EtcdBackup.
fn verification_values(backup: &EtcdBackup) -> Values {
    let status = backup.status.as_ref();
    vec![
        (
            "verified_timestamp_seconds",
            "Time of the last successful verification",
            status
                .and_then(|status| status.last_verified.as_ref()?.time.as_ref())
                .map(|time| time.0.as_second()),
        ),
        (
            "verification_duration_seconds",
            "Duration of the last successful verification in seconds",
            status.and_then(|status| status.last_verified.as_ref()?.duration_seconds),
        ),
        (
            "verification_failures",
            "Number of failed verifications since the last success",
            Some(verification_failures(backup)),
        ),
        (
            "verification_deadline_timestamp_seconds",
            "Time at which a due verification should have succeeded",
            verification_deadline(backup),
        ),
        (
            "unrestorable",
            "1 if the last verification found that the backup cannot be restored",
            Some(unrestorable(backup).into()),
        ),
    ]
}

/// The time of the first scheduled run after the newest backup. `None` without a valid schedule.
///
/// A backup whose recorded time is more than an hour in the future does not count, because a wrong clock has recorded
/// this time. If the backup counted, the alert about missing backups would wait until the recorded time.
fn due(backup: &EtcdBackup, now: Timestamp) -> Option<i64> {
    let schedule = Schedule::of(backup.spec.backup_policy.as_ref()?).ok()??;
    let created = backup.metadata.creation_timestamp.as_ref()?.0;
    let status = backup.status.as_ref();
    let last = status.and_then(|status| Some(status.last_success_date.as_ref()?.0));
    let last = last.filter(|last| last.duration_since(now) <= MAX_CLOCK_SKEW);
    let run = schedule.run_after(last, created)?;
    Some(run.as_second())
}

/// True if the EtcdBackup is periodic and not suspended. An alert about the age of the newest backup must ignore all
/// other EtcdBackups.
fn is_scheduled(backup: &EtcdBackup) -> bool {
    let policy = backup.spec.backup_policy.as_ref();
    backup.spec.is_periodic() && !policy.is_some_and(|policy| policy.suspend)
}

/// The time at which the current verification became due, plus its time limit, in seconds since 1970. `None` if no
/// verification is due.
fn verification_deadline(backup: &EtcdBackup) -> Option<i64> {
    let settings = backup.spec.verification.as_ref()?;
    let record = backup.status.as_ref()?.verification.as_ref()?;
    let due = record.due_time.as_ref()?.0.as_second();
    Some(due.saturating_add(settings.timeout_seconds().into()))
}

fn verification_failures(backup: &EtcdBackup) -> i64 {
    let status = backup.status.as_ref();
    let record = status.and_then(|status| status.verification.as_ref());
    record
        .and_then(|record| record.failures)
        .unwrap_or_default()
        .into()
}

/// True if the condition `Verified` is false.
fn unrestorable(backup: &EtcdBackup) -> bool {
    let mut conditions = backup.conditions().iter();
    let verified = ConditionType::Verified;
    conditions.any(|found| found.type_ == verified.as_str() && found.status == "False")
}

/// True if the condition `Failed` is true. The metric `failed_attempts` does not show a final failure, because its
/// counter is reset when the operator stops retrying.
fn failed(backup: &EtcdBackup) -> bool {
    let status = backup.status.as_ref();
    status.is_some_and(|status| is_true(&status.conditions, &ConditionType::Failed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etcdbackup_has_same_metrics_before_and_after_first_backup() {
        let names = |backup: &EtcdBackup| -> Vec<&str> {
            values(backup, Attempts::default())
                .into_iter()
                .map(|(name, ..)| name)
                .collect()
        };
        let spec = serde_json::json!({ "storageType": "S3" });
        let mut backup = EtcdBackup::new("b", serde_json::from_value(spec).unwrap());
        let before = names(&backup);
        let attempts = Attempts {
            failures: 2,
            queued: Some(Duration::from_secs(7)),
        };
        assert!(
            values(&backup, attempts)
                .iter()
                .filter_map(|(.., value)| *value)
                .eq([2, 7, 1, 0, 0, 0, 0])
        );
        let status = serde_json::json!({
            "succeeded": true, "size": 10, "etcdRevision": 7, "startTime": "2026-01-01T00:00:00Z",
            "completionTime": "2026-01-01T00:00:05Z", "lastSuccessDate": "2026-01-01T00:00:04Z",
            "progress": { "bytes": 10 },
        });
        backup.status = Some(serde_json::from_value(status).unwrap());
        assert_eq!(names(&backup), before);
        let measured: Vec<i64> = values(&backup, Attempts::default())
            .into_iter()
            .filter_map(|(.., value)| value)
            .collect();
        assert_eq!(measured, [1_767_225_604, 10, 5, 7, 10, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn backup_metrics_have_labels_namespace_and_cluster_and_name() {
        let spec = serde_json::json!({ "storageType": "S3", "etcdCluster": { "name": "main" } });
        let mut backup = EtcdBackup::new("nightly", serde_json::from_value(spec).unwrap());
        backup.metadata.namespace = Some("prod".to_owned());
        let found = families([(&backup, Attempts::default())].into_iter());
        let (.., failed) = found.iter().find(|(name, ..)| *name == "failed").unwrap();
        let labels = [
            ("namespace", "prod"),
            ("cluster", "main"),
            ("name", "nightly"),
        ];
        let labels = labels.map(|(label, text)| (label.to_owned(), text.to_owned()));
        assert!(failed.get(&labels.to_vec()).is_some(), "{failed:?}");
    }

    #[test]
    fn documented_metrics_are_the_metrics_of_the_operator() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
        let document = std::fs::read_to_string(path).unwrap();
        let spec = serde_json::json!({ "storageType": "S3" });
        let backup = EtcdBackup::new("b", serde_json::from_value(spec).unwrap());
        let own = families([(&backup, Attempts::default())].into_iter());
        let own = own.iter().map(|(name, ..)| format!("{PREFIX}{name}"));
        let own: std::collections::BTreeSet<String> = own.collect();
        let (_, section) = document.split_once("\n## The backup operator\n").unwrap();
        let section = section.split("\n## ").next().unwrap();
        let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
        let documented = rows.filter_map(|row| row.split('`').next());
        assert_eq!(own, documented.map(str::to_owned).collect());
    }

    #[test]
    fn failed_and_never_completed_backups_have_metrics() {
        let value = |backup: &EtcdBackup, metric: &str| {
            let all = values(backup, Attempts::default());
            let found = all.iter().find(|(name, ..)| *name == metric);
            found.and_then(|(.., value)| *value)
        };
        let spec =
            serde_json::json!({ "storageType": "S3", "backupPolicy": { "schedule": "@daily" } });
        let mut backup = EtcdBackup::new("b", serde_json::from_value(spec).unwrap());
        backup.metadata.creation_timestamp =
            serde_json::from_value(serde_json::json!("2026-01-01T00:00:00Z")).unwrap();
        assert_eq!(value(&backup, "failed"), Some(0));
        assert_eq!(value(&backup, "last_success_timestamp_seconds"), None);
        assert_eq!(
            value(&backup, "created_timestamp_seconds"),
            Some(1_767_225_600)
        );
        assert_eq!(value(&backup, "due_timestamp_seconds"), Some(1_767_312_000));
        let status = serde_json::json!({ "succeeded": false, "conditions": [{
            "type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "m",
            "lastTransitionTime": "2026-01-01T00:10:00Z" }] });
        backup.status = Some(serde_json::from_value(status).unwrap());
        assert_eq!(value(&backup, "failed"), Some(1));
    }

    #[test]
    fn due_verification_has_deadline_metric() {
        let deadline = |record: serde_json::Value| {
            let spec = serde_json::json!({ "storageType": "S3", "verification": { "timeoutSeconds": 100 } });
            let mut backup = EtcdBackup::new("b", serde_json::from_value(spec).unwrap());
            let status = serde_json::json!({ "succeeded": true, "verification": record });
            backup.status = Some(serde_json::from_value(status).unwrap());
            verification_deadline(&backup)
        };
        let due = serde_json::json!({ "location": "s3://b/k", "dueTime": "2026-01-01T00:00:00Z" });
        assert_eq!(deadline(due), Some(1_767_225_700));
        assert_eq!(
            deadline(serde_json::json!({ "location": "s3://b/k" })),
            None
        );
        assert_eq!(deadline(serde_json::Value::Null), None);
    }

    #[test]
    fn success_time_more_than_an_hour_in_future_is_ignored() {
        let at = |text: &str| -> Timestamp { text.parse().unwrap() };
        let (created, now) = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
        let spec = serde_json::json!({
            "storageType": "S3", "backupPolicy": { "backupIntervalInSecond": 3600 },
        });
        let mut backup = EtcdBackup::new("b", serde_json::from_value(spec).unwrap());
        backup.metadata.creation_timestamp =
            serde_json::from_value(serde_json::json!(created)).unwrap();
        for (last, expected) in [
            ("2026-01-01T23:30:00Z", "2026-01-02T00:30:00Z"),
            // This time is 59 minutes after `now`, so it is not ignored.
            ("2026-01-02T00:59:00Z", "2026-01-02T01:59:00Z"),
            ("2027-01-01T00:00:00Z", created),
        ] {
            let status = serde_json::json!({ "succeeded": true, "lastSuccessDate": last });
            backup.status = Some(serde_json::from_value(status).unwrap());
            let found = due(&backup, at(now));
            assert_eq!(found, Some(at(expected).as_second()), "{last}");
        }
    }

    /// The status keeps the duration of the last backup, so that the metric does not disappear when the next backup
    /// starts.
    #[test]
    fn duration_metric_shows_last_backup_while_next_backup_runs() {
        let spec =
            serde_json::json!({ "storageType": "S3", "backupPolicy": { "schedule": "@daily" } });
        let mut backup = EtcdBackup::new("b", serde_json::from_value(spec).unwrap());
        let status = serde_json::json!({
            "succeeded": true, "startTime": "2026-01-02T00:00:00Z", "duration": "1m12s",
            "nextBackupTime": "2026-01-03T00:00:00Z",
        });
        backup.status = Some(serde_json::from_value(status).unwrap());
        let all = values(&backup, Attempts::default());
        let value = |metric: &str| all.iter().find(|(name, ..)| *name == metric).unwrap().2;
        assert_eq!(value("duration_seconds"), Some(72));
        assert_eq!(value("next_timestamp_seconds"), Some(1_767_398_400));
    }

    #[test]
    fn suspended_or_single_etcdbackup_does_not_count_as_scheduled() {
        let periodic = |policy: serde_json::Value| {
            let spec = serde_json::json!({ "storageType": "S3", "backupPolicy": policy });
            is_scheduled(&EtcdBackup::new("b", serde_json::from_value(spec).unwrap()))
        };
        assert!(periodic(serde_json::json!({ "schedule": "@daily" })));
        assert!(periodic(
            serde_json::json!({ "backupIntervalInSecond": 60 })
        ));
        assert!(!periodic(serde_json::json!({ "maxBackups": 3 })));
        assert!(!periodic(
            serde_json::json!({ "schedule": "@daily", "suspend": true })
        ));
    }
}
