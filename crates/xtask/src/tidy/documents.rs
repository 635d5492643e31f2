//! What the documents and the chart point to exists: files, headings, metrics.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::{files, root};

/// How many invariants docs/architecture.md numbers.
pub(super) fn invariants() -> usize {
    let document = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let (_, part) = document.split_once("\n## Invariants\n").unwrap();
    let part = part.split("\n## ").next().unwrap_or_default();
    let numbered = |number: &usize| part.contains(&format!("\n{number}. "));
    (1..1000).take_while(numbered).count()
}

/// The targets of the links of a document.
fn links(text: &str) -> Vec<&str> {
    let rest = text.split("](").skip(1);
    rest.filter_map(|rest| rest.split(')').next()).collect()
}

/// The anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let words = line.trim_start_matches('#').trim().to_lowercase();
            let kept = words
                .chars()
                .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            kept.collect::<String>().replace(' ', "-")
        })
        .collect()
}

fn documents() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    files(&root(), ".md", &mut found);
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        (path, text)
    };
    found.into_iter().map(read).collect()
}

/// The metrics that are asked for in a text, by their names.
fn metrics(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words
        .filter(|word| word.starts_with("etcd_operator_") && !word.ends_with('_'))
        .collect()
}

#[test]
fn every_link_of_a_document_leads_somewhere() {
    let mut dead = Vec::new();
    for (path, text) in documents() {
        let folder = path.parent().unwrap_or(Path::new("."));
        for link in links(&text) {
            if link.starts_with("http") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() {
                path.clone()
            } else {
                folder.join(file)
            };
            let there = if anchor.is_empty() {
                target.exists()
            } else {
                fs::read_to_string(&target).is_ok_and(|text| anchors(&text).contains(anchor))
            };
            if !there {
                dead.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(dead.is_empty(), "links that lead nowhere: {dead:#?}");
}

/// An alert on a metric that does not exist is silent for ever.
#[test]
fn alerts_ask_for_metrics_that_are_documented() {
    let document = fs::read_to_string(root().join("docs/metrics.md")).unwrap();
    let rows = document.lines().filter(|line| line.starts_with("| `"));
    let documented: String = rows.collect();
    let (_, alerts) = document.split_once("\n## Alerts").unwrap();
    let chart = root().join("charts/etcd-operator/templates/prometheusrules.yaml");
    let chart = fs::read_to_string(chart).unwrap();
    for text in [alerts, &chart] {
        let asked = metrics(text);
        assert!(
            !asked.is_empty(),
            "no alert is found: is its form still read?"
        );
        for metric in asked {
            let named = format!("`{metric}`");
            assert!(
                documented.contains(&named),
                "{metric} is not in docs/metrics.md"
            );
        }
    }
}

#[test]
fn invariants_and_anchors_are_read_from_their_documents() {
    assert!(invariants() >= 21, "{}", invariants());
    let found = anchors("# A `word`, and another\n## The restore operator\n");
    let expected = ["a-word-and-another", "the-restore-operator"];
    assert_eq!(found, expected.map(str::to_owned).into());
    assert_eq!(links("a [b](c.md#d) and [e](#f)"), ["c.md#d", "#f"]);
}
