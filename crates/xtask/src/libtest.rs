//! Reads what Rust's test programs print, and adds it up. It may not run them.

use std::collections::BTreeMap;
use std::mem;
use std::ops::AddAssign;

/// What became of some tests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
    /// The names of those that failed, and of those that were skipped.
    pub(crate) failures: Vec<String>,
    pub(crate) ignored: Vec<String>,
    /// The first words of what those that failed said, by their names.
    pub(crate) reasons: BTreeMap<String, Vec<String>>,
    told: Told,
}

/// Whose output is being read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Told {
    #[default]
    Nobody,
    /// What the test of this name printed.
    Output(String),
    /// Why it failed.
    Reason(String),
}

/// So many lines say why a test failed; the rest stands above.
const REASON: usize = 12;

impl Summary {
    /// Takes one line of output into account.
    pub(crate) fn read(&mut self, line: &str) {
        let line = line.trim();
        self.read_reason(line);
        if let Some(counts) = line.strip_prefix("test result: ") {
            self.passed += count(counts, "passed");
            self.failed += count(counts, "failed");
            self.skipped += count(counts, "ignored");
        } else if let Some((name, outcome)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.rsplit_once(" ... "))
        {
            if outcome == "FAILED" {
                self.failures.push(name.to_owned());
            } else if outcome.starts_with("ignored") {
                self.ignored.push(name.to_owned());
            }
        }
    }

    /// What a test that failed has printed follows the names, under its own; its panic is the reason.
    fn read_reason(&mut self, line: &str) {
        let header = line.strip_prefix("---- ");
        if let Some(name) = header.and_then(|rest| rest.strip_suffix(" stdout ----")) {
            self.told = Told::Output(name.to_owned());
            return;
        }
        self.told = match mem::take(&mut self.told) {
            Told::Output(name) if line.starts_with("thread ") && line.contains(" panicked at ") => {
                Told::Reason(name)
            }
            Told::Reason(name) => {
                let said = self.reasons.entry(name.clone()).or_default();
                let ends = line.starts_with("note: ") || line == "Stack backtrace:";
                if ends || said.len() == REASON {
                    Told::Nobody
                } else {
                    said.extend((!line.is_empty()).then(|| line.to_owned()));
                    Told::Reason(name)
                }
            }
            told => told,
        };
    }

    /// A program that ended badly without saying which test failed.
    pub(crate) fn broke(&mut self, what: &str) {
        self.failed += 1;
        self.failures
            .push(format!("{what} (did not run to its end)"));
    }

    /// Tests that are not run here, and why.
    pub(crate) fn skip(&mut self, names: &[String], why: &str) {
        self.skipped += names.len();
        let said = names.iter().map(|name| format!("{name} ({why})"));
        self.ignored.extend(said);
    }

    /// The one line at the end.
    pub(crate) fn line(&self) -> String {
        format!(
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

impl AddAssign for Summary {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.failures.extend(other.failures);
        self.ignored.extend(other.ignored);
        self.reasons.extend(other.reasons);
    }
}

/// The number before a word: `12 passed`.
fn count(text: &str, word: &str) -> usize {
    let mut words = text
        .split([' ', ';', '.'])
        .filter(|part| !part.is_empty())
        .peekable();
    while let Some(part) = words.next() {
        if words.peek() == Some(&word) {
            return part.parse().unwrap_or(0);
        }
    }
    0
}

/// The names in the answer to `--list --format terse`.
pub(crate) fn listed(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(ToOwned::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Summary {
        let mut summary = Summary::default();
        text.lines().for_each(|line| summary.read(line));
        summary
    }

    #[test]
    fn results_of_several_programs_add_up() {
        let summary = read(
            "running 3 tests\n\
             test a::b ... ok\n\
             test a::c ... FAILED\n\
             test a::d ... ignored, needs a moon\n\
             test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s\n\
             test result: ok. 20 passed; 0 failed; 0 ignored; 0 measured; 4 filtered out; finished in 0.01s\n",
        );
        assert_eq!(summary.line(), "21 passed, 1 failed, 1 skipped");
        assert_eq!(summary.failures, ["a::c"]);
        assert_eq!(summary.ignored, ["a::d"]);
    }

    #[test]
    fn why_a_test_failed_is_kept_and_the_rest_of_its_output_is_not() {
        let summary = read(
            "test a::c ... FAILED\n\nfailures:\n\n---- a::c stdout ----\nNAME  READY\n\n\
             thread 'a::c' (7) panicked at e2e/src/sandbox.rs:63:13:\n\
             c: waited 180 s for: a pod\n\nCaused by:\n    a stall\n\nStack backtrace:\n   0: main\n\
             ---- a::d stdout ----\nfine\n\nfailures:\n    a::c\n",
        );
        let why = ["c: waited 180 s for: a pod", "Caused by:", "a stall"];
        assert_eq!(summary.reasons["a::c"], why);
        assert_eq!(summary.reasons.len(), 1);
    }

    #[test]
    fn tests_that_are_not_run_are_counted_and_their_reason_is_said() {
        let mut summary = read("test result: ok. 2 passed; 0 failed; 1 ignored\n");
        summary.skip(&["a::b".to_owned()], "no moon");
        assert_eq!(summary.line(), "2 passed, 0 failed, 2 skipped");
        assert_eq!(summary.ignored, ["a::b (no moon)"]);
    }

    #[test]
    fn output_of_tests_is_not_taken_for_results() {
        assert_eq!(
            read("the test result: ok. 5 passed\ntesting ... FAILED\n"),
            Summary::default()
        );
    }

    #[test]
    fn a_program_that_breaks_counts_as_a_failure() {
        let mut summary =
            read("test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n");
        summary.broke("unit tests");
        assert_eq!(summary.line(), "2 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn the_list_holds_tests_and_no_benchmarks() {
        assert_eq!(
            listed("bootstrap::x: test\nb: benchmark\n\n1 test, 1 benchmark\n"),
            ["bootstrap::x"]
        );
    }
}
