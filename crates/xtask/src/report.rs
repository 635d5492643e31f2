//! The final report of `cargo xtask test`: stages, slowest tests, reasons of failures, and the numbers of passed,
//! failed and skipped tests.

use std::fmt::Write as _;
use std::time::Duration;

use crate::libtest::Outcome;
use crate::{libtest, progress};

/// The maximum number of slowest tests in the report.
const SLOWEST: usize = 20;

/// The result of a finished test.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Test {
    /// The full name of the test.
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    pub(crate) took: Duration,
    /// The output of a failed test, or the reason why a test was skipped.
    pub(crate) output: String,
}

/// The results of one `cargo xtask test`.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) stages: Vec<(String, Duration)>,
    pub(crate) tests: Vec<Test>,
}

impl Report {
    /// Adds these tests as skipped, with this reason.
    pub(crate) fn skip(&mut self, names: Vec<String>, why: &str) {
        self.tests.extend(names.into_iter().map(|name| Test {
            name,
            outcome: Outcome::Skipped,
            took: Duration::ZERO,
            output: why.to_owned(),
        }));
    }

    /// Adds an error that ended `cargo xtask test` before all tests had run.
    pub(crate) fn fail(&mut self, error: &anyhow::Error) {
        self.tests.push(Test {
            name: "the run was aborted".to_owned(),
            outcome: Outcome::Failed,
            took: Duration::ZERO,
            output: format!("Error: {error:#}"),
        });
    }

    pub(crate) fn count(&self, outcome: Outcome) -> usize {
        self.of(outcome).count()
    }

    fn of(&self, outcome: Outcome) -> impl Iterator<Item = &Test> {
        self.tests
            .iter()
            .filter(move |test| test.outcome == outcome)
    }

    /// The text of the report. The last line contains the numbers of passed, failed and skipped tests.
    pub(crate) fn text(&self, took: Duration) -> String {
        let mut text = String::new();
        // A write to a `String` cannot fail.
        let _ = writeln!(text, "\nstages:");
        for (stage, took) in &self.stages {
            let _ = writeln!(text, "{:>10}  {stage}", progress::seconds(*took));
        }
        let _ = writeln!(text, "{:>10}  total", progress::seconds(took));
        let mut timed: Vec<&Test> = self
            .tests
            .iter()
            .filter(|test| !test.took.is_zero())
            .collect();
        timed.sort_by_key(|test| std::cmp::Reverse(test.took));
        let _ = writeln!(text, "\nthe {} slowest tests:", SLOWEST.min(timed.len()));
        for test in timed.iter().take(SLOWEST) {
            let _ = writeln!(text, "{:>10}  {}", progress::seconds(test.took), test.name);
        }
        let _ = writeln!(text);
        for test in self.of(Outcome::Skipped) {
            let why = match test.output.as_str() {
                "" => String::new(),
                why => format!(" ({why})"),
            };
            let _ = writeln!(text, "skipped: {}{why}", test.name);
        }
        for test in self.of(Outcome::Failed) {
            let _ = writeln!(text, "failed: {}", test.name);
            for line in libtest::reason(&test.output) {
                let _ = writeln!(text, "    {line}");
            }
        }
        let _ = writeln!(
            text,
            "{} passed, {} failed, {} skipped",
            self.count(Outcome::Passed),
            self.count(Outcome::Failed),
            self.count(Outcome::Skipped)
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test(name: &str, outcome: Outcome, seconds: u64, output: &str) -> Test {
        Test {
            name: name.into(),
            outcome,
            took: Duration::from_secs(seconds),
            output: output.into(),
        }
    }

    #[test]
    fn test_report_lists_stages_slowest_tests_and_failure_reasons() {
        let mut report = Report {
            stages: vec![("clippy".into(), Duration::from_secs(3))],
            tests: vec![
                test("quick", Outcome::Passed, 1, ""),
                test("slow", Outcome::Failed, 9, "Error: no quorum\n"),
            ],
        };
        report.skip(vec!["node".into()], "own cluster");
        let text = report.text(Duration::from_secs(12));
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"));
        assert!(at("3.0 s  clippy") < at("12.0 s  total"));
        assert!(at("9.0 s  slow") < at("1.0 s  quick"));
        assert!(at("skipped: node (own cluster)") < at("failed: slow\n    Error: no quorum"));
        assert!(
            text.ends_with("\n1 passed, 1 failed, 1 skipped\n"),
            "{text}"
        );
    }

    #[test]
    fn aborted_run_counts_as_failure() {
        let mut report = Report::default();
        report.fail(&anyhow::anyhow!("protoc is missing").context("cargo"));
        let text = report.text(Duration::ZERO);
        assert!(
            text.contains("    Error: cargo: protoc is missing\n"),
            "{text}"
        );
        assert!(
            text.ends_with("\n0 passed, 1 failed, 0 skipped\n"),
            "{text}"
        );
    }

    #[test]
    fn test_report_lists_twenty_slowest_tests() {
        let tests = (1..40)
            .map(|n| test(&format!("t{n}."), Outcome::Passed, n, ""))
            .collect();
        let report = Report {
            tests,
            ..Report::default()
        };
        let text = report.text(Duration::ZERO);
        assert!(
            text.contains("the 20 slowest") && text.contains(" t20.") && !text.contains(" t19.")
        );
    }
}
