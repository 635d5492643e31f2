//! Checks the names in the documents and in the chart. The files, headings, metrics, flags and reasons that they name
//! must exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::{files, root};
use crate::prose::in_backticks;

/// The number of invariants in `docs/architecture.md`.
pub(super) fn invariants() -> usize {
    let document = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let part = section(&document, "Invariants");
    let numbered = |number: &usize| part.contains(&format!("\n{number}. "));
    (1..1000).take_while(numbered).count()
}

/// The targets of the links in a document.
fn links(text: &str) -> Vec<&str> {
    let rest = text.split("](").skip(1);
    rest.filter_map(|rest| rest.split(')').next()).collect()
}

/// The anchors of a document's headings, as on GitHub.
pub(super) fn anchors(text: &str) -> BTreeSet<String> {
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

/// The operators' metrics in a text.
pub(super) fn metrics(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words
        .filter(|word| word.starts_with("etcd_operator_") && !word.ends_with('_'))
        .collect()
}

#[test]
fn links_in_documents_have_targets() {
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
            let exists = if anchor.is_empty() {
                target.exists()
            } else {
                fs::read_to_string(&target).is_ok_and(|text| anchors(&text).contains(anchor))
            };
            if !exists {
                dead.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(
        dead.is_empty(),
        "links to files or headings that do not exist: {dead:#?}"
    );
}

/// The source files that a text names in backticks.
fn named_sources(text: &str) -> Vec<&str> {
    let is_source = |name: &&str| {
        Path::new(name)
            .extension()
            .is_some_and(|extension| extension == "rs")
    };
    let is_path = |name: &&str| is_source(name) && !name.contains(char::is_whitespace);
    in_backticks(text).filter(is_path).collect()
}

/// ADRs are not checked, because they describe the source files at the time of the decision.
#[test]
fn source_files_named_in_documents_exist() {
    let mut sources = Vec::new();
    files(&root(), ".rs", &mut sources);
    let mut missing = Vec::new();
    let mut named = 0;
    for (path, text) in documents() {
        if path.components().any(|part| part.as_os_str() == "adr") {
            continue;
        }
        // Code blocks are removed first. They contain no names in backticks, but the backticks of their fences would
        // look like inline code.
        let prose: String = text.split("```").step_by(2).collect();
        for name in named_sources(&prose) {
            named += 1;
            if !sources.iter().any(|source| source.ends_with(name)) {
                missing.push(format!("{}: {name}", path.display()));
            }
        }
    }
    assert!(
        missing.is_empty(),
        "documents name source files that do not exist: {missing:#?}"
    );
    assert!(
        named > 20,
        "documents name only {named} source files: does this check still parse the format?"
    );
}

/// With a metric that does not exist, an alert never fires, and a recording rule records nothing.
#[test]
fn rules_use_documented_metrics() {
    let document = fs::read_to_string(root().join("docs/metrics.md")).unwrap();
    let rows = document.lines().filter(|line| line.starts_with("| `"));
    let documented: String = rows.collect();
    let (_, alerts) = document.split_once("\n## Alerts").unwrap();
    let chart = root().join("charts/etcd-operator/alerts.yaml");
    // In the chart's alert templates, `WORD` stands for an operator: `cluster`, `backup` or `restore`.
    let chart = fs::read_to_string(chart)
        .unwrap()
        .replace("WORD", "cluster");
    let recordings =
        fs::read_to_string(root().join("charts/etcd-operator/recordings.yaml")).unwrap();
    for text in [alerts, &chart, &recordings] {
        let asked = metrics(text);
        assert!(
            !asked.is_empty(),
            "no rule found: does this check still parse the format?"
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

/// The source files that define the flags of the operators.
const FLAG_SOURCES: [&str; 5] = [
    "runtime/src/cli.rs",
    "cluster/src/command.rs",
    "backup/src/app.rs",
    "mirror/src/app.rs",
    "restore/src/command.rs",
];

/// The flags of the operators.
pub(super) fn operator_flags() -> BTreeSet<String> {
    let texts = FLAG_SOURCES.map(|source| {
        let path = root().join("crates").join(source);
        fs::read_to_string(path).unwrap()
    });
    texts.iter().flat_map(|text| flags(text)).collect()
}

/// The flags that clap attributes in a source define.
fn flags(text: &str) -> Vec<String> {
    let defined = text.split("#[arg(").skip(1);
    let fields = defined.filter_map(|rest| {
        let (_, rest) = rest.split_once(")]\n")?;
        let (field, _) = rest.trim_start().split_once(':')?;
        Some(field.trim_start_matches("pub ").replace('_', "-"))
    });
    fields.collect()
}

/// The text of a section, up to the next heading of the same level.
fn section<'a>(document: &'a str, heading: &str) -> &'a str {
    let part = document.split_once(&format!("\n## {heading}\n"));
    let (_, part) = part.unwrap_or_else(|| panic!("no heading {heading}"));
    part.split("\n## ").next().unwrap_or_default()
}

#[test]
fn operator_flags_are_documented() {
    /// Flags of coreos/etcd-operator that have no effect in this project. Only the section about the migration may name
    /// them.
    const OF_OLD: [&str; 2] = ["gc-interval", "chaos-level"];
    let document = fs::read_to_string(root().join("docs/install.md")).unwrap();
    let documented = section(&document, "Flags");
    let of_old = section(&document, "Migrate from coreos/etcd-operator");
    for source in FLAG_SOURCES {
        let text = fs::read_to_string(root().join("crates").join(source)).unwrap();
        let defined = flags(&text);
        assert!(
            !defined.is_empty(),
            "{source}: does this check still parse its format?"
        );
        for flag in defined {
            let is_named = if OF_OLD.contains(&flag.as_str()) {
                of_old.contains(&format!("`-{flag}`"))
            } else {
                documented.contains(&format!("`--{flag}`"))
            };
            assert!(is_named, "docs/install.md does not document {flag}");
        }
    }
}

/// The text of all source files below a folder of `crates`, and of the file with its name: for the folder `a/b`, the
/// file `a/b.rs`.
fn sources_of(folder: &str) -> String {
    let folder = root().join("crates").join(folder);
    let mut found = vec![folder.with_extension("rs")];
    files(&folder, ".rs", &mut found);
    let texts = found
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok());
    texts.collect()
}

/// The words in upper camel case directly after the text `before`.
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

/// Users must find the reason of a condition in the documents, unless the reason describes no problem (`NO_PROBLEM`).
#[test]
fn reasons_of_problems_are_documented() {
    const NO_PROBLEM: [&str; 19] = [
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
    let (mirror, access) = (sources_of("mirror/src"), sources_of("access/src"));
    for (mut reasons, document) in [
        (listed(&cluster, "PROBLEMS"), "troubleshooting.md"),
        (listed(&cluster, "TLS_FAULTS"), "tls.md"),
        (words_after(&backup, "Reason::"), "backup.md"),
        (words_after(&restore, "Reason::"), "restore.md"),
        (words_after(&mirror, "Reason::"), "mirror.md"),
        (words_after(&access, "Reason::"), "users.md"),
    ] {
        let documentation = fs::read_to_string(root().join("docs").join(document)).unwrap();
        reasons.retain(|reason| !NO_PROBLEM.contains(reason));
        assert!(
            reasons.len() > 10,
            "only these reasons for {document} are found: does this check still parse the format? {reasons:?}"
        );
        let is_missing = |reason: &&str| !documentation.contains(&format!("`{reason}`"));
        let missing: Vec<&str> = reasons.into_iter().filter(is_missing).collect();
        assert!(
            missing.is_empty(),
            "docs/{document} does not explain the reasons {missing:?}"
        );
    }
}

/// The reasons in one list, such as `PROBLEMS`, of the cluster operator's `reason.rs`. `text` is the content of
/// `reason.rs`.
fn listed<'a>(text: &'a str, list: &str) -> BTreeSet<&'a str> {
    let rest = text.split_once(&format!("\n    {list} {{\n"));
    let list = rest.and_then(|(_, rest)| rest.split_once('}'));
    let (list, _) = list.unwrap_or_else(|| panic!("there is no list {list:?}"));
    let names = list.split(',').map(str::trim);
    names.filter(|name| !name.is_empty()).collect()
}

#[test]
fn document_parsers_find_invariants_anchors_links_and_sources() {
    assert!(invariants() >= 21, "{}", invariants());
    let found = anchors("# A `word`, and another\n## The restore operator\n");
    let expected = ["a-word-and-another", "the-restore-operator"];
    assert_eq!(found, expected.map(str::to_owned).into());
    assert_eq!(links("a [b](c.md#d) and [e](#f)"), ["c.md#d", "#f"]);
    assert_eq!(
        named_sources("see `plan/fate.rs`, `fate` and `a b.rs`"),
        ["plan/fate.rs"]
    );
}
