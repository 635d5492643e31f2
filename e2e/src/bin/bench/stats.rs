//! Medians and quantiles, and the results of `bench cluster` as a table and as JSON.

use serde::Serialize;
use serde_json::{Value, json};

use crate::cluster::Row;
use crate::idle::Idle;
use crate::subject::{SUBJECTS, Subject};

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Sample {
    pub(crate) row: Row,
    pub(crate) subject: Subject,
    pub(crate) seconds: f64,
    /// The maximum time between two acknowledged writes. `None` if no client wrote during the measurement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) write_gap_seconds: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) low: f64,
    pub(crate) median: f64,
    pub(crate) high: f64,
}

pub(crate) fn spread(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let (low, high) = (*values.first()?, *values.last()?);
    let half = values.len() / 2;
    let median = if values.len() % 2 == 1 {
        values[half]
    } else {
        f64::midpoint(values[half - 1], values[half])
    };
    Some(Spread { low, median, high })
}

/// The quantile of the values by the nearest-rank method. `None` if there are no values.
pub(crate) fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss
    )] // `rank` is between 0 and the number of values.
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

fn of(
    samples: &[Sample],
    row: Row,
    subject: Subject,
    value: impl Fn(&Sample) -> Option<f64>,
) -> Option<Spread> {
    let here = samples
        .iter()
        .filter(|sample| sample.row == row && sample.subject == subject);
    spread(here.filter_map(value))
}

/// Prints all results. The results of the operator have the goal and the ratio to the result of the StatefulSet.
pub(crate) fn print_table(samples: &[Sample], dns: &str) {
    println!(
        "\nDNS: {dns}; seconds: median (lowest to highest), ratio to the StatefulSet's median\n"
    );
    println!(
        "{:14} {:16} {:>24} {:>7} {:>7}   longest write gap",
        "", "", "seconds", "ratio", "goal"
    );
    for row in Row::ALL {
        for subject in SUBJECTS {
            let Some(seconds) = of(samples, row, subject, |sample| Some(sample.seconds)) else {
                continue;
            };
            let reference = of(samples, row, Subject::StatefulSet, |sample| {
                Some(sample.seconds)
            });
            let is_operator = subject != Subject::StatefulSet;
            let ratio = reference
                .filter(|_| is_operator)
                .map_or_else(String::new, |reference| {
                    format!("x{:.2}", seconds.median / reference.median)
                });
            let goal = if is_operator { row.goal() } else { "" };
            let gap = of(samples, row, subject, |sample| sample.write_gap_seconds)
                .map_or_else(String::new, |gap| text(&gap));
            println!(
                "{:14} {:16} {:>24} {ratio:>7} {goal:>7}   {gap}",
                row.name(),
                format!("{subject:?}"),
                text(&seconds)
            );
        }
    }
}

fn text(spread: &Spread) -> String {
    format!(
        "{:.2} ({:.2} to {:.2})",
        spread.median, spread.low, spread.high
    )
}

pub(crate) fn as_json(samples: &[Sample], dns: &str, idle: Option<&Idle>) -> Value {
    let mut medians = Vec::new();
    for row in Row::ALL {
        for subject in SUBJECTS {
            if let Some(seconds) = of(samples, row, subject, |sample| Some(sample.seconds)) {
                medians.push(json!({
                    "row": row, "subject": subject, "seconds": seconds,
                    "write_gap_seconds": of(samples, row, subject, |sample| sample.write_gap_seconds),
                }));
            }
        }
    }
    json!({"bench": "cluster", "dns": dns, "rows": medians, "idle": idle, "samples": samples})
}

#[cfg(test)]
mod tests {
    use super::{Spread, quantile, spread};

    #[test]
    fn quantile_is_value_at_nearest_rank() {
        let values: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        for (share, expected) in [(0.5, 100.0), (0.99, 198.0), (1.0, 200.0), (0.0, 1.0)] {
            assert_eq!(quantile(&values, share), Some(expected), "{share}");
        }
        assert_eq!(quantile(&[7.0], 0.99), Some(7.0));
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn median_of_even_sample_count_is_midpoint_of_middle_two() {
        let cases = [
            (vec![5.0, 1.0, 3.0], 1.0, 3.0, 5.0),
            (vec![4.0, 1.0, 2.0, 9.0], 1.0, 3.0, 9.0),
        ];
        for (values, low, median, high) in cases {
            assert_eq!(spread(values), Some(Spread { low, median, high }));
        }
        assert_eq!(spread([]), None);
    }
}
