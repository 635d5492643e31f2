//! What the documents and the chart point to exists: files, headings, metrics.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::{files, root};

/// How many invariants docs/architecture.md numbers.
pub(super) fn invariants() -> usize {
    let document = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let part = below(&document, "Invariants");
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

/// The flags a source defines for its program, by the fields clap fills.
fn flags(text: &str) -> Vec<String> {
    let defined = text.split("#[arg(").skip(1);
    let fields = defined.filter_map(|rest| {
        let (_, rest) = rest.split_once(")]\n")?;
        let (field, _) = rest.trim_start().split_once(':')?;
        Some(field.trim_start_matches("pub ").replace('_', "-"))
    });
    fields.collect()
}

/// What stands below a heading of a document, up to the next one of its kind.
fn below<'a>(document: &'a str, heading: &str) -> &'a str {
    let part = document.split_once(&format!("\n## {heading}\n"));
    let (_, part) = part.unwrap_or_else(|| panic!("there is no heading {heading}"));
    part.split("\n## ").next().unwrap_or_default()
}

#[test]
fn every_flag_of_an_operator_is_documented() {
    /// Without effect: only those who come from coreos/etcd-operator have them.
    const OF_OLD: [&str; 2] = ["gc-interval", "chaos-level"];
    let document = fs::read_to_string(root().join("docs/install.md")).unwrap();
    let documented = below(&document, "Flags");
    let of_old = below(&document, "Coming from coreos/etcd-operator");
    for source in [
        "runtime/src/cli.rs",
        "cluster/src/main.rs",
        "backup/src/app.rs",
        "restore/src/main.rs",
    ] {
        let text = fs::read_to_string(root().join("crates").join(source)).unwrap();
        let defined = flags(&text);
        assert!(!defined.is_empty(), "{source}: is its form still read?");
        for flag in defined {
            let is_named = if OF_OLD.contains(&flag.as_str()) {
                of_old.contains(&format!("`-{flag}`"))
            } else {
                documented.contains(&format!("`--{flag}`"))
            };
            assert!(is_named, "{flag} is not where docs/install.md has flags");
        }
    }
}

/// All sources below a folder of the crates, and the file of its name beside it.
fn sources_of(folder: &str) -> String {
    let folder = root().join("crates").join(folder);
    let mut found = vec![folder.with_extension("rs")];
    files(&folder, ".rs", &mut found);
    let texts = found
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok());
    texts.collect()
}

/// The words that follow `before` wherever it stands, as far as they are letters.
fn words_after<'a>(text: &'a str, before: &str) -> BTreeSet<&'a str> {
    let rests = text.split(before).skip(1);
    let words = rests.filter_map(|rest| {
        let rest = rest.trim_start().trim_start_matches('"');
        rest.split(|c: char| !c.is_ascii_alphabetic()).next()
    });
    words
        .filter(|word| word.starts_with(|c: char| c.is_ascii_uppercase()))
        .collect()
}

/// Whoever is woken by a condition looks its reason up.
#[test]
fn every_reason_for_which_something_is_wrong_is_explained() {
    const NOTHING_WRONG: [&str; 19] = [
        "AllInEffect",
        "AsDesired",
        "BackupBegun",
        "BackupSucceeded",
        "BackupsRemoved",
        "Claimed",
        "ClusterCreated",
        "HandedOver",
        "InProgress",
        "NotYetInEffect",
        "Pending",
        "Replacing",
        "RestoreComplete",
        "Scheduled",
        "SeedServes",
        "SeedStarted",
        "Succeeded",
        "Suspended",
        "Unknown",
    ];
    let cluster = root().join("crates/cluster/src/reason.rs");
    let cluster = fs::read_to_string(cluster).unwrap();
    let (backup, restore) = (sources_of("backup/src"), sources_of("restore/src"));
    for (mut reasons, document) in [
        (listed(&cluster, "PROBLEMS"), "troubleshooting.md"),
        (listed(&cluster, "TLS_FAULTS"), "tls.md"),
        (words_after(&backup, "Reason::"), "backup.md"),
        (words_after(&restore, "Reason::"), "restore.md"),
    ] {
        let explained = fs::read_to_string(root().join("docs").join(document)).unwrap();
        reasons.retain(|reason| !NOTHING_WRONG.contains(reason));
        assert!(
            reasons.len() > 10,
            "{document}: is their form still read? {reasons:?}"
        );
        let is_missing = |reason: &&str| !explained.contains(&format!("`{reason}`"));
        let missing: Vec<&str> = reasons.into_iter().filter(is_missing).collect();
        assert!(missing.is_empty(), "not in docs/{document}: {missing:?}");
    }
}

/// A list of the cluster operator's enum of reasons.
fn listed<'a>(text: &'a str, list: &str) -> BTreeSet<&'a str> {
    let rest = text.split_once(&format!("\n    {list} {{\n"));
    let list = rest.and_then(|(_, rest)| rest.split_once('}'));
    let (list, _) = list.unwrap_or_else(|| panic!("there is no list {list:?}"));
    let names = list.split(',').map(str::trim);
    names.filter(|name| !name.is_empty()).collect()
}

#[test]
fn invariants_and_anchors_are_read_from_their_documents() {
    assert!(invariants() >= 21, "{}", invariants());
    let found = anchors("# A `word`, and another\n## The restore operator\n");
    let expected = ["a-word-and-another", "the-restore-operator"];
    assert_eq!(found, expected.map(str::to_owned).into());
    assert_eq!(links("a [b](c.md#d) and [e](#f)"), ["c.md#d", "#f"]);
}
