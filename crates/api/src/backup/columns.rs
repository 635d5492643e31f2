//! Texts for the columns of an EtcdBackup.

use super::{EtcdBackupSpec, EtcdBackupStatus, Progress};
use crate::display;

impl EtcdBackupSpec {
    /// The name of the EtcdCluster, or the host of the first endpoint, for columns and metrics. The text contains no
    /// user and no password of a URL.
    pub fn cluster_text(&self) -> Option<String> {
        if let Some(cluster) = &self.etcd_cluster {
            return Some(cluster.name.clone());
        }
        display::host(self.etcd_endpoints.first()?)
    }

    /// The schedule or the interval for the column. `None` for a single backup.
    pub fn schedule_text(&self) -> Option<String> {
        let policy = self.backup_policy.as_ref()?;
        let text = match (&policy.schedule, policy.backup_interval_in_second) {
            (Some(schedule), _) => match &policy.time_zone {
                Some(zone) => format!("{schedule} {zone}"),
                None => schedule.clone(),
            },
            (None, Some(seconds)) if seconds > 0 => format!("every {}", display::duration(seconds)),
            _ => return None,
        };
        Some(if policy.suspend {
            format!("{text} (suspended)")
        } else {
            text
        })
    }
}

impl EtcdBackupStatus {
    /// The status without the fields for display, which an API server with older CRDs does not store.
    #[must_use]
    pub fn without_display(&self) -> Self {
        Self {
            size_text: None,
            duration: None,
            cluster: None,
            schedule: None,
            next_backup_time: None,
            progress: self.progress.as_ref().map(Progress::without_text),
            ..self.clone()
        }
    }
}

impl Progress {
    /// Creates a progress with its text.
    pub fn new(bytes: i64, total_bytes: Option<i64>) -> Self {
        let progress = Self {
            bytes,
            total_bytes,
            text: None,
        };
        let text = Some(text(&progress));
        Self { text, ..progress }
    }

    /// The progress without its text.
    pub(crate) fn without_text(&self) -> Self {
        Self {
            text: None,
            ..self.clone()
        }
    }
}

/// The text of a progress: a percentage, or the number of bytes if the total is unknown. The percentage is rounded
/// down, so that `100%` means all bytes.
fn text(progress: &Progress) -> String {
    let number = |bytes: i64| u64::try_from(bytes).unwrap_or_default();
    let done = number(progress.bytes);
    match progress.total_bytes.map(number) {
        Some(total) if total > 0 => {
            let percent = u128::from(done.min(total)) * 100 / u128::from(total);
            format!("{percent}%")
        }
        _ => display::bytes(done),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(spec: serde_json::Value) -> EtcdBackupSpec {
        serde_json::from_value(spec).unwrap()
    }

    #[test]
    fn cluster_column_shows_etcdcluster_or_endpoint_host() {
        let of = |endpoint: &str| {
            spec(json!({ "etcdEndpoints": [endpoint], "storageType": "S3" })).cluster_text()
        };
        for (endpoint, host) in [
            ("http://db-client:2379", "db-client"),
            (
                "https://user:secret@etcd.example.com:2379/path",
                "etcd.example.com",
            ),
            ("https://[fd00::7]:2379", "[fd00::7]"),
            ("db-client", "db-client"),
        ] {
            assert_eq!(of(endpoint).as_deref(), Some(host), "{endpoint}");
        }
        assert_eq!(of("http://"), None);
        let named = spec(json!({ "etcdCluster": { "name": "main" }, "storageType": "S3" }));
        assert_eq!(named.cluster_text().as_deref(), Some("main"));
    }

    #[test]
    fn schedule_column_shows_schedule_interval_and_suspension() {
        let of = |policy: serde_json::Value| {
            spec(json!({ "storageType": "S3", "backupPolicy": policy })).schedule_text()
        };
        for (policy, text) in [
            (json!({ "schedule": "@daily" }), Some("@daily")),
            (
                json!({ "schedule": "0 3 * * *", "timeZone": "Europe/Berlin" }),
                Some("0 3 * * * Europe/Berlin"),
            ),
            (json!({ "backupIntervalInSecond": 90 }), Some("every 1m30s")),
            (
                json!({ "schedule": "@daily", "suspend": true }),
                Some("@daily (suspended)"),
            ),
            (json!({ "maxBackups": 3 }), None),
        ] {
            assert_eq!(of(policy).as_deref(), text);
        }
    }

    #[test]
    fn progress_shows_100_percent_only_after_all_bytes() {
        let text = |bytes, total_bytes| {
            text(&Progress {
                bytes,
                total_bytes,
                ..Progress::default()
            })
        };
        assert_eq!(text(0, Some(7)), "0%");
        assert_eq!(text(999_999, Some(1_000_000)), "99%");
        assert_eq!(text(7, Some(7)), "100%");
        // The transferred bytes (9) can exceed the total (7), because the database can grow during the transfer.
        assert_eq!(text(9, Some(7)), "100%");
        assert_eq!(text(2048, None), "2.0 KiB");
        assert_eq!(text(0, Some(0)), "0 B");
    }
}
