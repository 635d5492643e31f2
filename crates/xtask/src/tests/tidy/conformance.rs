//! Checks docs/conformance.md, and the invariants in docs/architecture.md.

use std::collections::BTreeSet;
use std::fs;

use super::{documents, named_tests, root};
use crate::conformance::{Line, PAGE, Source, lines, names_invariant, sources};
use crate::prose::in_backticks;

/// The number of known defects of coreos/etcd-operator v0.9.4 in docs/conformance.md.
const DEFECTS: usize = 34;
/// The minimum number of words in a test name. Shorter names in backticks are skipped, because they can also be fields
/// or functions.
const WORDS_OF_A_TEST_NAME: usize = 4;

fn page() -> String {
    fs::read_to_string(root().join(PAGE)).unwrap()
}

fn listed() -> Vec<Line> {
    let found = lines(&page());
    assert!(
        found.len() > 150,
        "{PAGE} has only {} lines: does this check still parse its format?",
        found.len()
    );
    found
}

/// All Rust files except those of xtask, which neither enforces nor tests an invariant.
fn product() -> Vec<Source> {
    let mut found = sources(&root()).unwrap();
    found.retain(|source| !source.path.starts_with("crates/xtask"));
    found
}

#[test]
fn conformance_page_names_existing_files_with_tests() {
    let sources = sources(&root()).unwrap();
    let mut wrong = Vec::new();
    for Line { name, files, .. } in &listed() {
        for file in files {
            let named = sources.iter().filter(|source| source.is_named(file));
            let named: Vec<&Source> = named.collect();
            match named[..] {
                [] => wrong.push(format!("{name}: {file} does not exist")),
                [source] if source.tests().is_empty() => {
                    wrong.push(format!("{name}: {file} contains no test"));
                }
                [_] => {}
                _ => wrong.push(format!("{name}: several sources are named {file}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{PAGE}: {wrong:#?}");
}

/// The page must name files instead of tests, because a renamed test would make the page wrong. `UPDATE=1` replaces
/// each test name in the page by the file of the test.
#[test]
fn conformance_page_names_files_instead_of_tests() {
    let page = page();
    let updated = with_files(&page, &sources(&root()).unwrap());
    if std::env::var_os("UPDATE").is_some() {
        fs::write(root().join(PAGE), updated).unwrap();
        return;
    }
    let names = page.lines().flat_map(named_tests);
    let names: Vec<&str> = names
        .filter(|name| name.split('_').count() >= WORDS_OF_A_TEST_NAME)
        .collect();
    assert!(
        names.is_empty() && page == updated,
        "{PAGE} names tests; run UPDATE=1 cargo test -p xtask conformance: {names:#?}"
    );
}

/// The page with each test name replaced by the file of the test. The row of an invariant omits files with a test that
/// names the invariant, because the command `conformance` finds this test by the invariant.
fn with_files(page: &str, sources: &[Source]) -> String {
    let lines = page.lines().map(|line| match lines(line).pop() {
        Some(entry) => row_with_files(line, &entry, sources),
        None => line.to_owned(),
    });
    lines.map(|line| line + "\n").collect()
}

fn row_with_files(row: &str, line: &Line, sources: &[Source]) -> String {
    if line.files.is_empty() {
        return row.to_owned();
    }
    let mut files: Vec<String> = Vec::new();
    for name in &line.files {
        if name.contains('/') {
            files.push(name.clone());
            continue;
        }
        let has_test = |source: &&Source| source.tests().iter().any(|test| test.text == *name);
        let found: Vec<&Source> = sources.iter().filter(has_test).collect();
        if found.is_empty() {
            files.push(name.clone());
        }
        let is_listed = |source: &&&Source| match line.invariant() {
            Some(number) => source.tests_of(number).is_empty(),
            None => true,
        };
        let listed = found.iter().filter(is_listed);
        files.extend(listed.map(|source| short_path(&source.path)));
    }
    let mut cells: Vec<&str> = row.split('|').collect();
    let mut unique = BTreeSet::new();
    files.retain(|file| unique.insert(file.clone()));
    let files: Vec<String> = files.iter().map(|file| format!("`{file}`")).collect();
    let files = format!(" {} ", files.join(", "));
    cells[3] = &files;
    cells.join("|")
}

/// The path without `crates/`, and with `e2e/` instead of `e2e/tests/e2e/`.
fn short_path(path: &str) -> String {
    let short = path.strip_prefix("crates/").unwrap_or(path);
    short.replace("e2e/tests/e2e/", "e2e/")
}

#[test]
fn update_replaces_test_names_by_files_in_conformance_page() {
    let text = "#[test]\nfn a_b() {\n}\n#[test]\nfn invariant_5_c() {\n}\n".to_owned();
    let sources = [Source::new("e2e/tests/e2e/a.rs".to_owned(), text)];
    let page = "# Page\n| clusters 1 | done | `a_b`, `b/c.rs`, `a_b` | note |\n\
                | invariant 5 | done | `invariant_5_c`, `b/c.rs` | |\n";
    let expected = "# Page\n| clusters 1 | done | `e2e/a.rs`, `b/c.rs` | note |\n\
                    | invariant 5 | done | `b/c.rs` | |\n";
    assert_eq!(with_files(page, &sources), expected);
    assert_eq!(with_files(expected, &sources), expected);
}

#[test]
fn conformance_lines_with_state_done_name_test_files() {
    let is_unproven =
        |line: &&Line| line.state == "done" && line.invariant().is_none() && line.files.is_empty();
    let lines = listed();
    let unproven: Vec<&Line> = lines.iter().filter(is_unproven).collect();
    assert!(
        unproven.is_empty(),
        "lines with the state `done` that name no test: {unproven:#?}"
    );
}

#[test]
fn each_invariant_is_named_by_code_and_test() {
    let sources = product();
    let mut missing = Vec::new();
    for number in 1..=documents::invariants() {
        let has_comment =
            |source: &Source| !source.is_test() && !source.comments(number).is_empty();
        if !sources.iter().any(has_comment) {
            missing.push(format!(
                "no comment in the product names invariant {number}"
            ));
        }
        if !sources
            .iter()
            .any(|source| !source.tests_of(number).is_empty())
        {
            missing.push(format!("no test names invariant {number}"));
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

/// For each invariant, docs/architecture.md names a file that enforces the invariant and a file that tests it.
#[test]
fn architecture_page_names_code_and_test_of_each_invariant() {
    let architecture = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let sources = product();
    let mut wrong = Vec::new();
    for number in 1..=documents::invariants() {
        let (_, entry) = architecture.split_once(&format!("\n{number}. **")).unwrap();
        let entry = entry.split(".\n").find(|part| part.contains("Enforced in"));
        let files: Vec<&str> = in_backticks(entry.unwrap_or_default()).collect();
        let [place, test] = files[..] else {
            wrong.push(format!("invariant {number}: names {files:?}"));
            continue;
        };
        let find = |file: &str| sources.iter().find(|source| source.is_named(file));
        let is_silent = |source: &Source| source.comments(number).is_empty();
        if find(place).is_none_or(is_silent) {
            wrong.push(format!(
                "{place} has no comment that names invariant {number}"
            ));
        }
        let names = |source: &Source| names_invariant(source.text(), number);
        if !find(test).is_some_and(names) {
            wrong.push(format!("{test} does not name invariant {number}"));
        }
    }
    assert!(wrong.is_empty(), "docs/architecture.md: {wrong:#?}");
}

#[test]
fn conformance_page_lists_every_defect_and_invariant() {
    let names: BTreeSet<String> = listed().into_iter().map(|line| line.name).collect();
    let defects = (1..=DEFECTS).map(|number| format!("defect {number}"));
    let invariants = (1..=documents::invariants()).map(|number| format!("invariant {number}"));
    let expected = defects.chain(invariants);
    let missing: Vec<String> = expected.filter(|name| !names.contains(name)).collect();
    assert!(missing.is_empty(), "{PAGE} has no line for: {missing:?}");
}

#[test]
fn conformance_page_lists_every_api_field() {
    let document = page();
    let mut missing = Vec::new();
    for (kind, plural) in [
        ("EtcdCluster", "etcdclusters"),
        ("EtcdBackup", "etcdbackups"),
        ("EtcdRestore", "etcdrestores"),
        ("EtcdMirror", "etcdmirrors"),
        ("EtcdRole", "etcdroles"),
        ("EtcdUser", "etcdusers"),
    ] {
        let path = root()
            .join("charts/etcd-operator/crds-generated")
            .join(format!("{plural}.etcd.database.coreos.com.yaml"));
        let text =
            fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let crd: serde_yaml_ng::Value = serde_yaml_ng::from_str(&text).unwrap();
        let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
        for part in ["spec", "status"] {
            for (name, _) in schema[part]["properties"].as_mapping().unwrap() {
                let field = format!("{kind}.{part}.{}", name.as_str().unwrap());
                if !document.contains(&format!("| {field} |")) {
                    missing.push(field);
                }
            }
        }
    }
    assert!(missing.is_empty(), "{PAGE} has no line for: {missing:#?}");
}
