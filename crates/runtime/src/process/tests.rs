//! Tests that docs/metrics.md describes the metrics of every operator.

use std::collections::BTreeSet;

use super::*;

/// The names of the metrics that every operator has.
fn names(word: &str) -> BTreeSet<String> {
    let mut registry = Registry::default();
    let requests = ApiRequests::default();
    requests.register(&mut registry);
    let definition = Definition {
        name: "test-operator",
        word: match word {
            "cluster" => "cluster",
            "backup" => "backup",
            _ => "restore",
        },
        kind: ApiResource::erase::<k8s_openapi::api::core::v1::ConfigMap>(&()),
        crd: CustomResourceDefinition::default,
        shards: 1,
    };
    let client = Client::try_from(Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
    let options = crate::cli::tests::common(&[]);
    let clients = (client.clone(), client);
    let (operator, _) = assemble(&definition, &options, clients, &mut registry).unwrap();
    // `fill` and `fill_metrics` add a time series to each metric, because a metric without a time series is not
    // exported.
    requests.fill();
    operator.report.fill_metrics();
    let mut page = String::new();
    prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let names = types.map(|line| match line.split_once(' ').unwrap() {
        (name, "counter") => format!("{name}_total"),
        (name, _) => name.to_owned(),
    });
    names.collect()
}

#[tokio::test]
async fn metrics_of_every_operator_match_documentation() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
    let document = std::fs::read_to_string(path).unwrap();
    let (_, section) = document
        .split_once("\n## Metrics of every operator\n")
        .unwrap();
    let section = section.split("\n## ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let words = rows.flat_map(|row| row.split('`').skip(1).step_by(2));
    let is_name = |word: &&str| word.starts_with("etcd_operator_") || word.starts_with("process_");
    let documented: BTreeSet<String> = words.filter(is_name).map(str::to_owned).collect();
    let existing = ["cluster", "backup", "restore"].map(names);
    let existing: BTreeSet<String> = existing.into_iter().flatten().collect();
    assert_eq!(existing, documented);
}
