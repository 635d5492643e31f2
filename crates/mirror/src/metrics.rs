//! The metrics of each EtcdMirror, with its namespace, name and destination as labels.
//!
//! Each scrape computes the values from the cached objects and from the running tasks. Deleted objects therefore have
//! no metrics.

use std::fmt;
use std::sync::Arc;

use api::EtcdMirror;
use api::conditions::{ConditionType, is_true};
use jiff::Timestamp;
use kube::ResourceExt;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use runtime::controller::Cache;

use crate::progress::Progress;
use crate::tasks::Tasks;

const PREFIX: &str = "etcd_operator_mirror_";

type Values = Family<Vec<(String, String)>, Gauge>;

/// The metrics of all EtcdMirrors.
#[derive(Clone)]
pub struct MirrorMetrics {
    /// All EtcdMirrors, from the watch.
    pub(crate) objects: Cache<EtcdMirror>,
    pub(crate) tasks: Arc<Tasks>,
}

impl MirrorMetrics {
    /// Writes the metrics.
    ///
    /// # Errors
    /// Fails if the encoder fails.
    pub fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let objects = self.objects.state();
        let readable = objects.iter().filter_map(|object| object.0.as_ref().ok());
        let with_progress = readable.map(|mirror| {
            let monitor = self.tasks.monitor(&mirror.uid().unwrap_or_default());
            (mirror, monitor.map(|monitor| monitor.read()))
        });
        for (name, help, values) in families(with_progress, Timestamp::now()) {
            let name = format!("{PREFIX}{name}");
            values.encode(encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?)?;
        }
        Ok(())
    }
}

/// Name, help text and values of each metric. A mirror without a value has no time series.
fn families<'a>(
    mirrors: impl Iterator<Item = (&'a EtcdMirror, Option<Progress>)>,
    now: Timestamp,
) -> Vec<(&'static str, &'static str, Values)> {
    let mut families: Vec<(&'static str, &'static str, Values)> = DESCRIPTIONS
        .iter()
        .map(|(name, help)| (*name, *help, Values::default()))
        .collect();
    for (mirror, progress) in mirrors {
        let labels = labels(mirror);
        let values = values(mirror, progress.as_ref(), now);
        for ((_, _, family), value) in families.iter_mut().zip(values) {
            if let Some(value) = value {
                family.get_or_create(&labels).set(value);
            }
        }
    }
    families
}

/// Name and help of each metric, in the order of [`values`].
const DESCRIPTIONS: [(&str, &str); 7] = [
    ("ready", "1 if the destination is up to date"),
    (
        "source_revision",
        "Revision of the source that the destination contains",
    ),
    (
        "lag_revisions",
        "Number of revisions of the source that the destination does not contain",
    ),
    (
        "lag_seconds",
        "Age of the time before which the destination contains all changes, in seconds",
    ),
    (
        "copying",
        "1 while all keys are copied, 0 while the changes of the source are applied",
    ),
    (
        "transactions",
        "Number of transactions that this process has applied to the destination",
    ),
    (
        "split_transactions",
        "Number of transactions of the source that this process has applied in parts",
    ),
];

fn values(
    mirror: &EtcdMirror,
    progress: Option<&Progress>,
    now: Timestamp,
) -> [Option<i64>; DESCRIPTIONS.len()] {
    let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    let status = mirror.status.as_ref();
    let lag = progress.and_then(|progress| progress.lag);
    // The lag in seconds is computed from the last known `synced` time, so it grows while the mirror is interrupted.
    let synced = lag.and_then(|lag| lag.synced).or_else(|| {
        let time = status.and_then(|status| status.synced_time.as_ref());
        time.map(|time| time.0)
    });
    let copy = status.and_then(|status| status.copy.as_ref());
    let revision = progress.and_then(|progress| progress.revision);
    [
        Some(is_true(mirror.conditions(), &ConditionType::Ready).into()),
        revision.or(status.and_then(|status| status.source_revision)),
        lag.map(|lag| lag.revisions),
        synced.map(|synced| now.duration_since(synced).as_secs().max(0)),
        copy.map(|copy| (!copy.complete).into()),
        progress.map(|progress| number(progress.transactions)),
        progress.map(|progress| number(progress.splits)),
    ]
}

fn labels(mirror: &EtcdMirror) -> Vec<(String, String)> {
    let destination = mirror.spec.destination.etcd_cluster.name.clone();
    [
        ("namespace", mirror.namespace().unwrap_or_default()),
        ("cluster", destination),
        ("name", mirror.name_any()),
    ]
    .map(|(label, text)| (label.to_owned(), text))
    .to_vec()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;
    use crate::lag::Lag;

    fn mirror(status: serde_json::Value) -> EtcdMirror {
        let spec = json!({
            "source": { "etcdCluster": { "name": "old" } },
            "destination": { "etcdCluster": { "name": "new" } },
        });
        let mut mirror = EtcdMirror::new("copy", serde_json::from_value(spec).unwrap());
        mirror.status = Some(serde_json::from_value(status).unwrap());
        mirror
    }

    #[test]
    fn lag_of_interrupted_mirror_is_age_of_its_synced_time() {
        let now = Timestamp::from_second(1_000).unwrap();
        let interrupted = mirror(json!({ "syncedTime": "1970-01-01T00:15:00Z" }));
        let found = values(&interrupted, None, now);
        assert_eq!(found[2..4], [None, Some(100)]);
        let progress = Progress {
            lag: Some(Lag {
                revisions: 5,
                synced: Timestamp::from_second(997).ok(),
            }),
            ..Progress::default()
        };
        let found = values(&interrupted, Some(&progress), now);
        assert_eq!(found[2..4], [Some(5), Some(3)]);
    }

    #[test]
    fn mirror_metrics_match_documentation() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
        let document = std::fs::read_to_string(path).unwrap();
        let own = DESCRIPTIONS.map(|(name, _)| format!("{PREFIX}{name}"));
        let (_, section) = document.split_once("\n## Mirrors\n").unwrap();
        let section = section.split("\n## ").next().unwrap();
        let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
        let documented = rows.filter_map(|row| row.split('`').next());
        let documented: BTreeSet<String> = documented.map(str::to_owned).collect();
        assert_eq!(BTreeSet::from(own), documented);
    }
}
