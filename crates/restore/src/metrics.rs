//! The metrics of each EtcdRestore, with its namespace, cluster and name as labels. The metric `failed` also has the
//! reason of the condition as a label.
//!
//! Each scrape computes the values from the cached objects. Deleted objects therefore have no metrics, and a restart
//! of the operator loses no values.

use std::fmt;

use api::EtcdRestore;
use api::conditions::{ConditionType, find};
use api::restore::RestorePhase;
use kube::ResourceExt;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use runtime::controller::Cache;

type Labels = Vec<(String, String)>;
type Values = Family<Labels, Gauge>;

/// Collects the metrics of all EtcdRestores.
pub(crate) struct RestoreMetrics {
    /// All EtcdRestores, from the watch.
    pub(crate) objects: Cache<EtcdRestore>,
}

impl fmt::Debug for RestoreMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RestoreMetrics")
    }
}

impl Collector for RestoreMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let objects = self.objects.state();
        let readable = objects.iter().filter_map(|object| object.0.as_ref().ok());
        for (name, help, values) in metrics(readable) {
            let name = format!("{PREFIX}{name}");
            values.encode(encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?)?;
        }
        Ok(())
    }
}

const PREFIX: &str = "etcd_operator_restore_";

/// Name, help text and values of each metric. An EtcdRestore without a value has no time series.
fn metrics<'a>(
    restores: impl Iterator<Item = &'a EtcdRestore>,
) -> [(&'static str, &'static str, Values); 7] {
    let (duration, size, progress) = (Values::default(), Values::default(), Values::default());
    let (throughput, failed) = (Values::default(), Values::default());
    let (phases, started) = (Values::default(), Values::default());
    for restore in restores {
        let labels = labels(restore);
        let status = restore.status.as_ref();
        let phase = status.and_then(|status| status.phase.as_ref());
        let phase = phase.map_or(RestorePhase::Pending.to_string(), ToString::to_string);
        for known in RestorePhase::KNOWN {
            let mut labels = labels.clone();
            labels.push(("phase".to_owned(), (*known).to_owned()));
            phases.get_or_create(&labels).set((phase == *known).into());
        }
        let Some(status) = status else {
            continue;
        };
        if let Some(time) = &status.start_time {
            started.get_or_create(&labels).set(time.0.as_second());
        }
        let fetched = status.progress.as_ref().map(|progress| progress.bytes);
        if let Some(bytes) = fetched {
            progress.get_or_create(&labels).set(bytes);
        }
        if let (true, Some(seconds)) = (status.succeeded, duration_of(restore)) {
            duration.get_or_create(&labels).set(seconds);
            if let Some(bytes) = fetched {
                size.get_or_create(&labels).set(bytes);
                throughput
                    .get_or_create(&labels)
                    .set(bytes / seconds.max(1));
            }
        }
        let condition = find(&status.conditions, &ConditionType::Failed);
        if let Some(condition) = condition.filter(|failed| failed.status == "True") {
            let mut labels = labels;
            labels.push(("reason".to_owned(), condition.reason.clone()));
            failed.get_or_create(&labels).set(1);
        }
    }
    [
        (
            "duration_seconds",
            "Duration from the start of the restore until the cluster served, in seconds",
            duration,
        ),
        ("size_bytes", "Size of the restored backup in bytes", size),
        (
            "progress_bytes",
            "Bytes of the backup that the seed has fetched so far",
            progress,
        ),
        (
            "throughput_bytes_per_second",
            "Size of the backup divided by the duration of the restore",
            throughput,
        ),
        ("failed", "1 if the restore has failed", failed),
        (
            "phase",
            "1 for the phase of the restore, 0 for every other phase",
            phases,
        ),
        (
            "start_timestamp_seconds",
            "Time at which the restore started, in seconds since 1970",
            started,
        ),
    ]
}

fn labels(restore: &EtcdRestore) -> Labels {
    vec![
        (
            "namespace".to_owned(),
            restore.namespace().unwrap_or_default(),
        ),
        ("cluster".to_owned(), restore.spec.etcd_cluster.name.clone()),
        ("name".to_owned(), restore.name_any()),
    ]
}

fn duration_of(restore: &EtcdRestore) -> Option<i64> {
    let status = restore.status.as_ref()?;
    let (begun, ended) = (
        status.start_time.as_ref()?,
        status.completion_time.as_ref()?,
    );
    Some(ended.0.duration_since(begun.0).as_secs())
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;
    use serde_json::json;

    use super::*;

    fn encoded(status: serde_json::Value) -> String {
        let spec = json!({ "etcdCluster": { "name": "main" } });
        let mut restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
        restore.metadata.namespace = Some("prod".to_owned());
        restore.status = Some(serde_json::from_value(status).unwrap());
        let mut registry = Registry::default();
        for (name, help, values) in metrics([&restore].into_iter()) {
            registry.register(name, help, values);
        }
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn finished_restore_has_duration_and_size_metrics() {
        let text = encoded(json!({
            "succeeded": true, "startTime": "2026-01-01T00:00:00Z", "completionTime": "2026-01-01T00:00:05Z",
            "progress": { "bytes": 100 },
        }));
        for line in [
            "duration_seconds{namespace=\"prod\",cluster=\"main\",name=\"again\"} 5",
            "size_bytes{namespace=\"prod\",cluster=\"main\",name=\"again\"} 100",
            "throughput_bytes_per_second{namespace=\"prod\",cluster=\"main\",name=\"again\"} 20",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert!(!text.contains("failed{"), "{text}");
    }

    #[test]
    fn failure_metric_has_reason_without_message() {
        let text = encoded(
            json!({ "conditions": [{ "type": "Failed", "status": "True", "reason": "BackupMissing",
            "message": "there is no backup at b/k", "lastTransitionTime": "2026-01-01T00:00:00Z" }] }),
        );
        assert!(text.contains("reason=\"BackupMissing\"} 1"), "{text}");
        assert!(
            !text.contains("b/k") && !text.contains("duration_seconds{"),
            "{text}"
        );
    }

    #[test]
    fn phase_metric_is_1_only_for_current_phase() {
        for (status, phase) in [
            (json!({}), "Pending"),
            (json!({ "phase": "Preparing" }), "Preparing"),
            (
                json!({ "phase": "Complete", "succeeded": true }),
                "Complete",
            ),
        ] {
            let text = encoded(status);
            let series: Vec<&str> = text
                .lines()
                .filter(|line| line.starts_with("phase{"))
                .collect();
            assert_eq!(series.len(), RestorePhase::KNOWN.len(), "{text}");
            for line in series {
                let holds = line.contains(&format!("phase=\"{phase}\"}}"));
                assert_eq!(line.ends_with(" 1"), holds, "{line}");
            }
        }
    }

    #[test]
    fn restore_metrics_match_documentation() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
        let document = std::fs::read_to_string(path).unwrap();
        let own = metrics(std::iter::empty());
        let own = own.iter().map(|(name, ..)| format!("{PREFIX}{name}"));
        let own: std::collections::BTreeSet<String> = own.collect();
        let (_, section) = document.split_once("\n## The restore operator\n").unwrap();
        let section = section.split("\n## ").next().unwrap();
        let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
        let documented = rows.filter_map(|row| row.split('`').next());
        assert_eq!(own, documented.map(str::to_owned).collect());
    }
}
