//! What is measured of each EtcdBackup, read from the objects when the metrics are read: nothing is kept for objects
//! that are gone, and nothing is lost by a restart. Labels are the object's namespace and name.

use std::fmt;
use std::sync::Arc;

use api::EtcdBackup;
use api::conditions::{ConditionType, is_true};
use kube::ResourceExt;
use kube::runtime::reflector::Store;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use runtime::controller::Guarded;

use crate::snapshot::Stored;
use crate::workers::Workers;

/// Name, help, and a value for each object.
type Measured = (
    &'static str,
    &'static str,
    Family<Vec<(String, String)>, Gauge>,
);

type Values = Vec<(&'static str, &'static str, Option<i64>)>;

/// Reads the measures of all EtcdBackups.
pub(crate) struct Measures {
    /// As the watch has them.
    pub(crate) objects: Store<Guarded<EtcdBackup>>,
    /// For what failed.
    pub(crate) transfers: Arc<Workers<Stored>>,
}

impl fmt::Debug for Measures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Measures")
    }
}

impl Collector for Measures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut families: Vec<Measured> = Vec::new();
        for object in self.objects.state() {
            let Ok(backup) = &object.0 else { continue };
            let failures = self.transfers.failures(&backup.uid().unwrap_or_default());
            for (index, (name, help, value)) in measures(backup, failures).into_iter().enumerate() {
                if families.len() == index {
                    families.push((name, help, Family::default()));
                }
                let labels = vec![
                    (
                        "namespace".to_owned(),
                        backup.namespace().unwrap_or_default(),
                    ),
                    ("name".to_owned(), backup.name_any()),
                ];
                if let (Some(value), Some((_, _, family))) = (value, families.get(index)) {
                    family.get_or_create(&labels).set(value);
                }
            }
        }
        for (name, help, family) in families {
            let name = format!("etcd_operator_backup_{name}");
            family.encode(encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?)?;
        }
        Ok(())
    }
}

/// The same measures, in the same order, for every object.
fn measures(backup: &EtcdBackup, failures: u32) -> Values {
    let status = backup.status.as_ref();
    let of = |value: Option<i64>| status.and(value);
    let last = status.and_then(|status| status.last_success_date.as_ref());
    let took = status.filter(|status| status.succeeded).and_then(|status| {
        let (begun, ended) = (
            status.start_time.as_ref()?,
            status.completion_time.as_ref()?,
        );
        Some(ended.0.duration_since(begun.0).as_secs())
    });
    vec![
        (
            "last_success_timestamp_seconds",
            "When the newest backup was complete",
            last.map(|time| time.0.as_second()),
        ),
        (
            "size_bytes",
            "Size of the newest backup's snapshot",
            of(status.and_then(|status| status.size)),
        ),
        ("duration_seconds", "Seconds the newest backup took", took),
        (
            "revision",
            "Revision the newest backup holds",
            of(status.and_then(|status| status.etcd_revision)),
        ),
        (
            "progress_bytes",
            "Bytes moved of the backup that is under way, or of the last",
            of(status
                .and_then(|status| status.progress.as_ref())
                .map(|progress| progress.bytes)),
        ),
        (
            "failed_attempts",
            "Attempts that failed since the last that did not",
            Some(i64::from(failures)),
        ),
        (
            "periodic",
            "1 while backups are made again and again",
            Some(goes_on(backup).into()),
        ),
        (
            "failed",
            "1 while the last backup has failed or the spec is refused",
            Some(failed(backup).into()),
        ),
        (
            "created_timestamp_seconds",
            "When the EtcdBackup was created",
            backup
                .metadata
                .creation_timestamp
                .as_ref()
                .map(|time| time.0.as_second()),
        ),
    ]
}

/// Whether there is a next backup, so that the age of the newest says something.
fn goes_on(backup: &EtcdBackup) -> bool {
    let policy = backup.spec.backup_policy.as_ref();
    backup.spec.is_periodic() && !policy.is_some_and(|policy| policy.suspend)
}

/// Whether it was given up, as its conditions say: attempts are counted only while they are made.
fn failed(backup: &EtcdBackup) -> bool {
    let status = backup.status.as_ref();
    status.is_some_and(|status| is_true(&status.conditions, &ConditionType::Failed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_object_has_the_same_measures() {
        let names = |backup: &EtcdBackup| -> Vec<&str> {
            measures(backup, 0)
                .into_iter()
                .map(|(name, ..)| name)
                .collect()
        };
        let spec = serde_json::json!({ "storageType": "S3" });
        let mut backup = EtcdBackup::new("b", serde_json::from_value(spec).unwrap());
        let before = names(&backup);
        assert!(
            measures(&backup, 2)
                .iter()
                .filter_map(|(.., value)| *value)
                .eq([2, 0, 0])
        );
        let status = serde_json::json!({
            "succeeded": true, "size": 10, "etcdRevision": 7, "startTime": "2026-01-01T00:00:00Z",
            "completionTime": "2026-01-01T00:00:05Z", "lastSuccessDate": "2026-01-01T00:00:04Z",
            "progress": { "bytes": 10 },
        });
        backup.status = Some(serde_json::from_value(status).unwrap());
        assert_eq!(names(&backup), before);
        let values: Vec<i64> = measures(&backup, 0)
            .into_iter()
            .filter_map(|(.., value)| value)
            .collect();
        assert_eq!(values, [1_767_225_604, 10, 5, 7, 10, 0, 0, 0]);
    }

    /// Attempts are counted while they are made, which is ten minutes where nobody says otherwise. What was given up,
    /// and what never worked, would be seen by nobody.
    #[test]
    fn a_backup_that_was_given_up_or_never_worked_is_measured() {
        let value = |backup: &EtcdBackup, wanted: &str| {
            let all = measures(backup, 0);
            let found = all.iter().find(|(name, ..)| *name == wanted);
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
        let status = serde_json::json!({ "succeeded": false, "conditions": [{
            "type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "m",
            "lastTransitionTime": "2026-01-01T00:10:00Z" }] });
        backup.status = Some(serde_json::from_value(status).unwrap());
        assert_eq!(value(&backup, "failed"), Some(1));
    }

    #[test]
    fn a_backup_that_is_made_once_or_is_suspended_does_not_grow_old() {
        let periodic = |policy: serde_json::Value| {
            let spec = serde_json::json!({ "storageType": "S3", "backupPolicy": policy });
            goes_on(&EtcdBackup::new("b", serde_json::from_value(spec).unwrap()))
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
