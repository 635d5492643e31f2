//! Checks of the repository that run as unit tests: lengths of files and functions, names of tests, and references in
//! documents.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

mod alerts;
mod blocks;
mod chart;
mod commands;
mod conformance;
mod dashboards;
mod documents;
mod health_check;
mod imports;
mod manifests;
mod schemas;
mod site;

use crate::checkout::root;
use crate::prose::in_backticks;

/// The maximum number of lines in a function, without blank lines and comments (CONTRIBUTING.md).
const FUNCTION_BUDGET: usize = 100;
/// The maximum number of lines in a file, with blank lines, comments and inline tests (CONTRIBUTING.md).
const FILE_BUDGET: usize = 500;
/// The maximum number of lines in a file with only tests, with blank lines and comments.
const TEST_FILE_BUDGET: usize = 600;

/// The maximum total number of lines in `crates/cluster`, without tests (ADR 25).
const CLUSTER_BUDGET: usize = 19_300;

/// Adds all files below `directory` with this extension to `found`, except those in hidden directories and `target`.
fn files(directory: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                files(&path, extension, found);
            }
        } else if name.ends_with(extension) {
            found.push(path);
        }
    }
}

fn sources() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    files(&root(), ".rs", &mut found);
    found
        .into_iter()
        .map(|path| {
            let text = fs::read_to_string(&path).unwrap();
            (path, text)
        })
        .collect()
}

/// The maximum number of lines in the file `path`.
fn budget(path: &Path) -> usize {
    if is_test_file(path) {
        TEST_FILE_BUDGET
    } else {
        FILE_BUDGET
    }
}

/// True for a module `tests`, and for files below such a module or below a directory `tests`.
fn is_test_file(path: &Path) -> bool {
    let is_tests = |part: &std::ffi::OsStr| part == "tests" || part == "tests.rs";
    let mut below_root = path.strip_prefix(root()).unwrap().iter();
    below_root.any(is_tests)
}

/// The texts in backticks that look like test names: lower case, with underscores.
fn named_tests(line: &str) -> Vec<&str> {
    in_backticks(line)
        .filter(|name| {
            name.contains('_')
                && name
                    .chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        })
        .collect()
}

/// The names of the functions with a test attribute.
fn tests(sources: &[(PathBuf, String)]) -> BTreeSet<&str> {
    let mut names = BTreeSet::new();
    for (_, text) in sources {
        let mut is_test = false;
        for line in text.lines().map(str::trim_start) {
            if line.starts_with("#[") || line.starts_with("//") {
                is_test |= line.starts_with("#[") && line.contains("test");
                continue;
            }
            let name = function(line).filter(|_| is_test);
            names.extend(name);
            is_test = false;
        }
    }
    names
}

/// The name of the function that begins on this line. `None` if no function begins here.
fn function(line: &str) -> Option<&str> {
    let words = ["pub(crate) ", "pub(super) ", "pub ", "const ", "async "];
    let mut line = line.trim_start();
    for word in words {
        line = line.strip_prefix(word).unwrap_or(line);
    }
    line.strip_prefix("fn ")?.split(['(', '<']).next()
}

/// The functions in a source, each with its number of code lines. rustfmt gives the closing brace of a function the
/// indentation of its first line.
fn lengths(text: &str) -> Vec<(&str, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let Some(name) = function(line) else { continue };
        let signature = lines.iter().skip(start);
        let last = signature
            .clone()
            .find(|line| line.ends_with(['{', ';', '}']));
        if last.is_none_or(|last| !last.ends_with('{')) {
            // The signature ends with `;` or `}`: the function has no body, or its whole body is on one line.
            continue;
        }
        let indent = &line[..line.len() - line.trim_start().len()];
        let end = format!("{indent}}}");
        let body: Vec<&&str> = signature.take_while(|line| **line != end).collect();
        found.push((name, 1 + body.iter().filter(|line| is_code(line)).count()));
    }
    found
}

fn is_code(line: &str) -> bool {
    let line = line.trim();
    !line.is_empty() && !line.starts_with("//")
}

#[test]
fn source_files_are_within_line_limit() {
    let mut over = Vec::new();
    for (path, text) in &sources() {
        let (lines, budget) = (text.lines().count(), budget(path));
        if lines > budget {
            over.push(format!("{}: {lines} of {budget} lines", path.display()));
        }
    }
    assert!(over.is_empty(), "files with too many lines: {over:#?}");
}

#[test]
fn test_files_have_larger_line_limit() {
    for (path, expected) in [
        ("crates/cluster/src/plan.rs", FILE_BUDGET),
        ("crates/cluster/src/contests.rs", FILE_BUDGET),
        ("crates/cluster/src/plan/tests.rs", TEST_FILE_BUDGET),
        ("crates/cluster/src/plan/tests/log.rs", TEST_FILE_BUDGET),
        ("crates/cluster/tests/model/switch.rs", TEST_FILE_BUDGET),
    ] {
        assert_eq!(budget(&root().join(path)), expected, "{path}");
    }
}

#[test]
fn cluster_operator_is_within_line_limit() {
    let root = root().join("crates/cluster/src");
    let sources = sources();
    let own = sources
        .iter()
        .filter(|(path, _)| path.starts_with(&root) && !is_test_file(path));
    let without_tests = own.map(|(_, text)| {
        let code = text.split("\n#[cfg(test)]\nmod tests {").next();
        code.unwrap_or(text).lines().count()
    });
    let lines: usize = without_tests.sum();
    assert!(
        lines > CLUSTER_BUDGET / 2,
        "only {lines} lines of crates/cluster are found: does this check still read its files?"
    );
    assert!(
        lines <= CLUSTER_BUDGET,
        "crates/cluster has {lines} lines without tests, and its limit is {CLUSTER_BUDGET} (ADR 25)"
    );
}

#[test]
fn functions_are_within_line_limit() {
    let mut over = Vec::new();
    for (path, text) in &sources() {
        for (name, lines) in lengths(text) {
            if lines > FUNCTION_BUDGET {
                over.push(format!("{}: {name} ({lines} lines)", path.display()));
            }
        }
    }
    assert!(
        over.is_empty(),
        "functions over {FUNCTION_BUDGET} lines of code: {over:#?}"
    );
}

/// The modules that may have the attribute `#[cfg(test)]`. Tests of several modules share the code in `fixture` and
/// `fake`. All other test modules must be below a module `tests`.
const TEST_SUPPORT: [&str; 3] = ["tests", "fixture", "fake"];

#[test]
fn test_modules_are_below_module_tests() {
    let sources = sources();
    let mut found = Vec::new();
    for (path, text) in &sources {
        let after = text.split("#[cfg(test)]\n").skip(1);
        let lines = after.filter_map(|rest| rest.lines().next());
        let named = lines.filter_map(|line| line.split("mod ").nth(1)?.split([';', ' ']).next());
        let other = named.filter(|name| !TEST_SUPPORT.contains(name));
        found.extend(other.map(|name| format!("{}: {name}", path.display())));
    }
    assert!(
        found.is_empty(),
        "test modules that are not below a module `tests`: {found:#?}"
    );
}

#[test]
fn doc_comments_contain_no_rust_code() {
    // Rust code in a doc comment would never be compiled, because doc tests are turned off in every crate.
    let found: Vec<String> = sources()
        .iter()
        .filter(|(_, text)| has_rust_code(text))
        .map(|(path, _)| path.display().to_string())
        .collect();
    assert!(found.is_empty(), "Rust code in doc comments: {found:#?}");
}

/// True if a doc comment contains a block of Rust code. A block without a language is Rust.
fn has_rust_code(text: &str) -> bool {
    let marks = text.lines().filter_map(|line| {
        let line = line.trim_start();
        let doc = line
            .strip_prefix("///")
            .or_else(|| line.strip_prefix("//!"))?;
        doc.trim().strip_prefix("```")
    });
    // Fences begin and end code blocks in turn. Only a fence that begins a block can name a language.
    marks
        .step_by(2)
        .any(|language| !["sh", "text", "console", "yaml", "json"].contains(&language))
}

#[test]
fn every_file_has_module_documentation() {
    let silent: Vec<String> = sources()
        .iter()
        .filter(|(_, text)| !text.trim_start().starts_with("//!"))
        .map(|(path, _)| path.display().to_string())
        .collect();
    assert!(
        silent.is_empty(),
        "files that do not start with `//!`: {silent:#?}"
    );
}

/// The minimum number of words in a test name. Shorter names in backticks are skipped, because they can also be
/// fields, labels or functions.
const WORDS_OF_A_TEST_NAME: usize = 4;

#[test]
fn tests_named_in_contributor_pages_exist() {
    let sources = sources();
    let tests = tests(&sources);
    let mut found = 0;
    let mut missing = Vec::new();
    for page in ["CONTRIBUTING.md", "docs/contributing/testing.md"] {
        let document = fs::read_to_string(root().join(page)).unwrap();
        let names = document.lines().flat_map(named_tests);
        for name in names.filter(|name| name.split('_').count() >= WORDS_OF_A_TEST_NAME) {
            found += 1;
            if !tests.contains(name) {
                missing.push(format!("{page}: {name}"));
            }
        }
    }
    assert!(
        missing.is_empty(),
        "pages name tests that do not exist: {missing:#?}"
    );
    assert!(
        found > 10,
        "the pages name only {found} tests: does this check still parse their format?"
    );
}

#[test]
fn banned_names_of_coreos_operator_are_not_used() {
    // coreos/etcd-operator uses names that begin with these words. Comments may quote the names, so the filter below
    // skips comments.
    let banned = [
        "fn get_",
        "struct ClusterManager",
        "mod util",
        "mod helper",
        "mod common",
    ];
    let found: Vec<String> = sources()
        .iter()
        .filter(|(path, _)| !path.ends_with("tidy.rs"))
        .flat_map(|(path, text)| {
            let lines = text
                .lines()
                .map(str::trim_start)
                // `get_token` is allowed, because a trait of the crate azure_core requires this name.
                .filter(|line| !line.starts_with("//") && !line.contains("fn get_token("));
            let hits = lines.filter(|line| banned.iter().any(|word| line.contains(word)));
            hits.map(|line| format!("{}: {line}", path.display()))
                .collect::<Vec<_>>()
        })
        .collect();
    assert!(found.is_empty(), "{found:#?}");
}
