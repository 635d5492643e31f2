//! The metrics of a continuous backup.

use api::EtcdBackup;
use api::conditions::{ConditionType, find};
use jiff::Timestamp;

use super::Values;
use crate::reason::Reason;

/// The values about the continuous backup of an EtcdBackup. Each value is `None` without `spec.continuous`.
pub(super) fn values(backup: &EtcdBackup, now: Timestamp) -> Values {
    let enabled = backup.spec.continuous.as_ref();
    let status = backup.status.as_ref().filter(|_| enabled.is_some());
    let continuous = status.and_then(|status| status.continuous.as_deref());
    let base = continuous.and_then(|continuous| continuous.base.as_ref());
    // The lag is the time since `complete_time`, so it grows while the agent does not report.
    let complete = continuous.and_then(|continuous| continuous.complete_time.as_ref());
    let lag = complete.map(|time| now.duration_since(time.0).as_secs().max(0));
    let condition = find(backup.conditions(), &ConditionType::Recording);
    // A hibernated cluster has no changes to record, so `continuous_recording` is left out.
    let hibernates = condition.is_some_and(|found| found.reason == Reason::Hibernated.as_str());
    let recording = condition.is_some_and(|found| found.status == "True");
    vec![
        (
            "continuous_recording",
            "1 if the agent records all changes without a long delay",
            (enabled.is_some() && !hibernates).then(|| recording.into()),
        ),
        (
            "continuous_lag_seconds",
            "Age of the time before which all changes are in the store, in seconds",
            lag,
        ),
        (
            "continuous_lag_revisions",
            "Number of revisions that were not in the store at the last check",
            continuous.and_then(|continuous| continuous.lag_revisions),
        ),
        (
            "continuous_segments",
            "Number of segments of the current base",
            base.and_then(|base| base.segments),
        ),
        (
            "continuous_segment_bytes",
            "Size of the segments of the current base in bytes",
            base.and_then(|base| base.bytes),
        ),
        (
            "continuous_gaps",
            "Number of gaps between the bases in the store",
            continuous.and_then(|continuous| continuous.gap_count),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lag_grows_while_the_agent_does_not_report() {
        let now: Timestamp = "2026-01-01T00:02:00Z".parse().unwrap();
        let found = |spec: serde_json::Value| -> Vec<i64> {
            let mut backup = EtcdBackup::new("b", serde_json::from_value(spec).unwrap());
            let status = serde_json::json!({ "continuous": {
                "completeTime": "2026-01-01T00:00:30Z", "lagSeconds": 1, "lagRevisions": 4, "gapCount": 2,
                "base": { "revision": 7, "segments": 3, "bytes": 100 },
            }});
            backup.status = Some(serde_json::from_value(status).unwrap());
            let all = values(&backup, now).into_iter();
            all.filter_map(|(.., value)| value).collect()
        };
        let with = serde_json::json!({ "storageType": "S3", "continuous": {} });
        assert_eq!(found(with), [0, 90, 4, 3, 100, 2]);
        let without = serde_json::json!({ "storageType": "S3" });
        assert_eq!(found(without), [] as [i64; 0]);
    }
}
