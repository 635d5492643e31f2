//! `cargo xtask conformance` prints the tests for each requirement in docs/conformance.md. Changes nothing.

mod document;
mod source;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::checkout;

pub(crate) use document::{Line, lines};
#[cfg(test)]
pub(crate) use source::names_invariant;
pub(crate) use source::{Place, Source};

/// The page with the requirements, relative to the root of the checkout.
pub(crate) const PAGE: &str = "docs/conformance.md";

/// The options of `cargo xtask conformance`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Print only requirements whose name contains this text, for example "invariant 5" or "EtcdBackup.spec".
    text: Option<String>,
}

/// Prints the selected requirements with their tests.
pub(crate) fn run(options: &Options) -> Result<()> {
    let root = checkout::root();
    let page =
        fs::read_to_string(root.join(PAGE)).with_context(|| format!("cannot read {PAGE}"))?;
    let sources = sources(&root)?;
    for line in lines(&page) {
        let text = options.text.as_deref().unwrap_or_default();
        if line.contains(text) {
            print!("{}", report(&line, &sources));
        }
    }
    Ok(())
}

/// All Rust files of the checkout, sorted by path.
pub(crate) fn sources(root: &Path) -> Result<Vec<Source>> {
    let mut found = Vec::new();
    for path in checkout::files(root)? {
        let relative = path.strip_prefix(root).unwrap_or(&path);
        let relative = relative.to_string_lossy().into_owned();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let text =
                fs::read_to_string(&path).with_context(|| format!("cannot read {relative}"))?;
            found.push(Source::new(relative, text));
        }
    }
    Ok(found)
}

/// The report for one requirement: its tests and, for an invariant, the comments that name the invariant. The report
/// marks comments in code with the word `enforced`, and comments in test files with the word `checked`.
fn report(line: &Line, sources: &[Source]) -> String {
    let [mut enforced, mut tests, mut checked] = [const { Vec::new() }; 3];
    for source in sources {
        let entry = |place: &Place| format!("{}:{} {}", source.path, place.line, place.text);
        if let Some(number) = line.invariant() {
            let places = if source.is_test() {
                &mut checked
            } else {
                &mut enforced
            };
            places.extend(source.comments(number).iter().map(entry));
            tests.extend(source.tests_of(number).iter().map(entry));
        }
        if line.files.iter().any(|file| source.is_named(file)) {
            tests.extend(source.tests().iter().map(entry));
        }
    }
    let mut report = format!("{}: {}\n", line.name, line.state);
    for (kind, entries) in [
        ("enforced", enforced),
        ("test", tests),
        ("checked", checked),
    ] {
        for entry in entries {
            let _ = writeln!(report, "  {kind} {entry}");
        }
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conformance_report_lists_code_and_tests_of_each_requirement() {
        let plan = "//! Invariant 5: dead members.\nfn plan() {}\n";
        let test = "#[test]\nfn invariant_5_keeps_disk() {\n}\n\n#[test]\nfn other() {\n}\n";
        let sources = [
            Source::new("crates/a/src/plan.rs".to_owned(), plan.to_owned()),
            Source::new("crates/a/tests/plan.rs".to_owned(), test.to_owned()),
        ];
        let page = "| invariant 5 | done | | |\n| clusters 1 | part | `a/tests/plan.rs` | |\n";
        let reports: Vec<String> = lines(page)
            .iter()
            .map(|line| report(line, &sources))
            .collect();
        let expected = [
            "invariant 5: done\n  enforced crates/a/src/plan.rs:1 Invariant 5: dead members.\n  \
             test crates/a/tests/plan.rs:2 invariant_5_keeps_disk\n",
            "clusters 1: part\n  test crates/a/tests/plan.rs:2 invariant_5_keeps_disk\n  \
             test crates/a/tests/plan.rs:6 other\n",
        ];
        assert_eq!(reports, expected);
    }
}
