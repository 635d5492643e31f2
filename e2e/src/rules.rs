//! The scrape jobs and the alerts of the chart.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::sandbox::RELEASE;
use crate::{Sandbox, chart, discovery};

/// Scrape jobs and rules in the format of Prometheus.
pub struct Rules {
    /// The scrape jobs from all PodMonitors ([`discovery::scrape_jobs`]).
    pub jobs: Vec<Value>,
    /// The rule groups of the PrometheusRule.
    pub groups: Value,
}

impl Rules {
    /// Renders the chart. `values` is the argument of `helm --set`.
    ///
    /// # Errors
    /// Fails if Helm fails, or if the chart renders no PrometheusRule.
    pub async fn render(sandbox: &Sandbox, values: &str) -> Result<Self> {
        let chart = sandbox.env.chart.to_string_lossy();
        let namespace = &sandbox.namespace;
        let words = [
            "template", RELEASE, &chart, "-n", namespace, "--set", values,
        ];
        let objects = chart::objects(&chart::helm(&sandbox.env, &words).await?)?;
        let of_kind = |kind: &'static str| objects.iter().filter(move |one| one["kind"] == kind);
        let mut jobs = Vec::new();
        for monitor in of_kind("PodMonitor") {
            jobs.extend(discovery::scrape_jobs(monitor)?);
        }
        let rule = of_kind("PrometheusRule").next().context("no alerts")?;
        let groups = rule["spec"]["groups"].clone();
        Ok(Self { jobs, groups })
    }
}

/// Replaces durations such as `5m`: `pending` returns the new `for` of an alert, and `range` the new range in an
/// expression.
#[must_use]
pub fn with_times(
    groups: &Value,
    pending: impl Fn(&str) -> String,
    range: impl Fn(&str) -> String,
) -> Value {
    let mut groups = groups.clone();
    for group in groups.as_array_mut().into_iter().flatten() {
        for rule in group["rules"].as_array_mut().into_iter().flatten() {
            if let Some(time) = rule["for"].as_str().map(&pending) {
                rule["for"] = json!(time);
            }
            let expression = rule["expr"].as_str().unwrap_or_default();
            let parts = expression
                .split('[')
                .map(|part| match part.split_once(']') {
                    Some((time, rest)) => format!("{}]{rest}", range(time)),
                    None => part.to_owned(),
                });
            rule["expr"] = json!(parts.collect::<Vec<_>>().join("["));
        }
    }
    groups
}

/// Divides all pending times and ranges by `speedup`. The minimum is one second.
#[must_use]
pub fn accelerated(groups: &Value, speedup: u32) -> Value {
    let divided = |time: &str| match whole_seconds(time) {
        Some(seconds) => format!("{}s", (seconds / u64::from(speedup.max(1))).max(1)),
        None => time.to_owned(),
    };
    with_times(groups, divided, divided)
}

/// Converts a duration with one unit, such as `90s`, `5m` or `6h`, to seconds.
fn whole_seconds(time: &str) -> Option<u64> {
    let (number, unit) = time.split_at_checked(time.len().checked_sub(1)?)?;
    let unit = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3_600,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups() -> Value {
        json!([{"rules": [
            {"alert": "A", "expr": "rate(a[10m]) > 0 unless rate(b[30m]) > 0", "for": "1h"},
            {"alert": "B", "expr": "b == 1", "for": "10s"},
            {"alert": "C", "expr": "c == 1"},
        ]}])
    }

    #[test]
    fn accelerated_rules_have_shorter_pending_times_and_ranges() {
        let faster = accelerated(&groups(), 20);
        let rules = &faster[0]["rules"];
        assert_eq!(rules[0]["expr"], "rate(a[30s]) > 0 unless rate(b[90s]) > 0");
        assert_eq!(rules[0]["for"], "180s");
        assert_eq!(rules[1]["for"], "1s");
        assert_eq!(rules[2], groups()[0]["rules"][2]);
    }

    #[test]
    fn unaccelerated_rules_keep_their_times() {
        let same = accelerated(&groups(), 1);
        assert_eq!(same[0]["rules"][0]["for"], "3600s");
        assert_eq!(
            same[0]["rules"][0]["expr"],
            "rate(a[600s]) > 0 unless rate(b[1800s]) > 0"
        );
    }

    #[test]
    fn only_durations_with_single_unit_are_parsed() {
        assert_eq!(whole_seconds("90s"), Some(90));
        assert_eq!(whole_seconds("6h"), Some(21_600));
        assert_eq!(whole_seconds("1h30m"), None);
        assert_eq!(whole_seconds("m"), None);
        assert_eq!(whole_seconds(""), None);
    }
}
