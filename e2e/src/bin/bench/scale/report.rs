//! Prints one table of figures for each scenario and number of replicas, and returns all figures as JSON.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};

/// Number of rows for API requests, and of rows for etcd calls, in the table of a scenario. The table shows the most
/// frequent requests and calls. The JSON file contains all requests and calls.
const SHOWN: usize = 6;

/// A measured value of a scenario.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Figure {
    pub(super) name: &'static str,
    pub(super) value: f64,
}

/// The measured values of one scenario for one number of clusters and replicas.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Measured {
    pub(super) scenario: &'static str,
    pub(super) clusters: usize,
    /// Number of replicas of the operator.
    pub(super) replicas: u16,
    pub(super) figures: Vec<Figure>,
    /// Requests of the operator to the API server, by verb and resource.
    pub(super) requests: BTreeMap<String, f64>,
    /// Calls of the operator to etcd, by method.
    pub(super) calls: BTreeMap<String, f64>,
}

/// The exponent with which a value grows with the number of clusters: 0 if constant, 1 if proportional, 2 if quadratic.
/// `None` if a value is not positive, or if the number of clusters does not increase.
pub(super) fn growth(from: (usize, f64), to: (usize, f64)) -> Option<f64> {
    #[allow(clippy::cast_precision_loss)] // `f64` represents integers below 2^52 exactly.
    let clusters = (to.0 as f64 / from.0 as f64).ln();
    let values = (to.1 / from.1).ln();
    (from.1 > 0.0 && to.1 > 0.0 && clusters > 0.0).then(|| values / clusters)
}

/// A row of a table: a name, and the value for each number of clusters.
type Row = (String, Vec<(usize, Option<f64>)>);

/// The rows of one scenario.
fn rows(all: &[&Measured]) -> Vec<Row> {
    let mut names: Vec<String> = Vec::new();
    let mut add = |name: String| {
        if !names.contains(&name) {
            names.push(name);
        }
    };
    for one in all {
        let own = one.figures.iter().map(|figure| figure.name.to_owned());
        own.for_each(&mut add);
    }
    for (word, of) in [
        ("requests", requests as Part),
        ("etcd calls", calls as Part),
    ] {
        for one in all {
            let mut most: Vec<(&String, &f64)> = of(one).iter().collect();
            most.sort_by(|a, b| b.1.total_cmp(a.1));
            add(format!("{word}: all"));
            let most = most.into_iter().take(SHOWN);
            most.for_each(|(key, _)| add(format!("{word}: {key}")));
        }
    }
    let row = |name: String| {
        let values = all.iter().map(|one| (one.clusters, value(one, &name)));
        let values = values.collect();
        (name, values)
    };
    names.into_iter().map(row).collect()
}

type Part = fn(&Measured) -> &BTreeMap<String, f64>;

fn requests(measured: &Measured) -> &BTreeMap<String, f64> {
    &measured.requests
}

fn calls(measured: &Measured) -> &BTreeMap<String, f64> {
    &measured.calls
}

fn value(measured: &Measured, row: &str) -> Option<f64> {
    let part = |word: &str, of: Part| {
        let key = row.strip_prefix(word)?.strip_prefix(": ")?;
        Some(match key {
            // `fold` starts at 0, because `sum()` of an empty iterator of floats returns -0, which would be printed
            // as "-0".
            "all" => of(measured).values().fold(0.0, |sum, value| sum + value),
            key => of(measured).get(key).copied().unwrap_or_default(),
        })
    };
    let own = measured.figures.iter().find(|figure| figure.name == row);
    own.map(|figure| figure.value)
        .or_else(|| part("requests", requests))
        .or_else(|| part("etcd calls", calls))
}

/// Prints one table for each scenario and number of replicas.
pub(super) fn print(all: &[Measured]) {
    let mut tables: Vec<(&'static str, u16)> = Vec::new();
    for one in all {
        if !tables.contains(&(one.scenario, one.replicas)) {
            tables.push((one.scenario, one.replicas));
        }
    }
    // The tables of one scenario are printed one after another, because a reader compares different numbers of
    // replicas.
    let first = |scenario: &str| tables.iter().position(|(other, _)| *other == scenario);
    let mut sorted = tables.clone();
    sorted.sort_by_key(|&(scenario, replicas)| (first(scenario), replicas));
    for (scenario, replicas) in sorted {
        let own: Vec<&Measured> = { all.iter() }
            .filter(|one| (one.scenario, one.replicas) == (scenario, replicas))
            .collect();
        let sizes: Vec<String> = { own.iter() }
            .map(|one| format!("{:>12}", one.clusters))
            .collect();
        let title = if replicas == 1 {
            scenario.to_owned()
        } else {
            format!("{scenario}, {replicas} replicas")
        };
        println!("\n{title:46}{}   growth", sizes.concat());
        for (name, values) in rows(&own) {
            let shown: Vec<String> = { values.iter() }
                .map(|(_, value)| format!("{:>12}", value.map_or_else(String::new, text)))
                .collect();
            let shown = shown.concat();
            let slopes: Vec<String> = { values.windows(2) }
                .filter_map(|pair| growth((pair[0].0, pair[0].1?), (pair[1].0, pair[1].1?)))
                .map(|growth| format!("{growth:.2}"))
                .collect();
            println!("  {name:44}{shown}   {}", slopes.join(", "));
        }
    }
    println!("\ngrowth: 0 is constant, 1 is proportional to the number of clusters");
}

fn text(value: f64) -> String {
    if value.abs() >= 100.0 || value.fract() == 0.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.3}")
    }
}

/// All figures and the settings of the benchmark, as JSON.
pub(super) fn as_json(all: &[Measured], settings: &Value) -> Value {
    json!({"bench": "scale", "settings": settings, "results": all})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_exponent_is_zero_if_constant_and_one_if_proportional() {
        for (values, expected) in [((2.0, 2.0), 0.0), ((2.0, 20.0), 1.0), ((2.0, 200.0), 2.0)] {
            let found = growth((10, values.0), (100, values.1)).unwrap();
            assert!((found - expected).abs() < 1e-9, "{found}");
        }
        assert_eq!(growth((10, 0.0), (100, 1.0)), None);
    }

    #[test]
    fn report_rows_show_figures_and_most_frequent_requests() {
        let measured = |clusters, seconds: f64| Measured {
            scenario: "created",
            clusters,
            replicas: 1,
            figures: vec![Figure {
                name: "seconds",
                value: seconds,
            }],
            requests: [("get pods".to_owned(), seconds * 2.0)].into(),
            calls: BTreeMap::new(),
        };
        let (small, large) = (measured(10, 1.0), measured(100, 8.0));
        let rows = rows(&[&small, &large]);
        let found = |name: &str| {
            let row = rows.iter().find(|(row, _)| row == name).unwrap();
            row.1
                .iter()
                .map(|(_, value)| value.unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(found("seconds"), [1.0, 8.0]);
        assert_eq!(found("requests: all"), [2.0, 16.0]);
        assert_eq!(found("requests: get pods"), [2.0, 16.0]);
    }
}
