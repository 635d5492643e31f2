//! Parses the output of Rust test programs with `--format=json`. Does not run them.
//!
//! The format is unstable, so test programs need [`ARGS`] and the environment variable [`UNLOCK`].

use std::time::Duration;

use serde::Deserialize;

/// Arguments with which a test program prints JSON and the duration of each test.
pub(crate) const ARGS: &[&str] = &["-Zunstable-options", "--format=json", "--report-time"];
/// The environment variable with which a test program accepts `-Z` options, although the toolchain is stable.
pub(crate) const UNLOCK: (&str, &str) = ("RUSTC_BOOTSTRAP", "1");

/// Number of lines of a failed test's output that are printed as the reason.
const REASON_LINES: usize = 12;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    Failed,
    Skipped,
}

/// The result of a completed test.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Ended {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    pub(crate) took: Duration,
    /// The output of a failed test, or the reason of a skipped test.
    pub(crate) output: String,
}

/// A line in the output of a test program.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Line {
    Started(String),
    Ended(Ended),
    /// A line about the whole program: the number of tests, or the summary.
    Suite,
    /// A line of a test, or of a program that a test started.
    Other,
}

#[derive(Deserialize)]
struct Printed {
    r#type: String,
    event: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    exec_time: f64,
    #[serde(default)]
    stdout: String,
    #[serde(default)]
    message: String,
}

pub(crate) fn read(line: &str) -> Line {
    // The JSON of libtest may begin in the middle of `line`, because the test program may have printed text without a
    // line break before it.
    let json = line.find("{ \"type\": ").map_or(line, |at| &line[at..]);
    let Ok(printed) = serde_json::from_str::<Printed>(json) else {
        return Line::Other;
    };
    let outcome = match (printed.r#type.as_str(), printed.event.as_str()) {
        ("suite", _) => return Line::Suite,
        ("test", "started") => return Line::Started(printed.name),
        ("test", "ok") => Outcome::Passed,
        ("test", "failed") => Outcome::Failed,
        ("test", "ignored") => Outcome::Skipped,
        _ => return Line::Other,
    };
    Line::Ended(Ended {
        name: printed.name,
        outcome,
        took: Duration::try_from_secs_f64(printed.exec_time).unwrap_or_default(),
        output: printed.stdout + &printed.message,
    })
}

/// The lines that explain the failure of a test: the first panic, or the returned error, or the last lines.
pub(crate) fn reason(output: &str) -> Vec<String> {
    let lines: Vec<&str> = output.lines().map(str::trim).collect();
    let panic = |line: &&str| line.starts_with("thread ") && line.contains(" panicked at ");
    let begin = lines.iter().position(panic).map_or_else(
        || lines.iter().position(|line| line.starts_with("Error: ")),
        |at| Some(at + 1),
    );
    let ends = |line: &str| line.starts_with("note: ") || line == "Stack backtrace:";
    let reason: Vec<String> = lines[begin.unwrap_or(lines.len().saturating_sub(REASON_LINES))..]
        .iter()
        .take_while(|line| begin.is_none() || !ends(line))
        .filter(|line| !line.is_empty())
        .take(REASON_LINES)
        .map(|line| (*line).to_owned())
        .collect();
    reason
}

/// The names of tests in the output of `--list --format terse`.
pub(crate) fn listed(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(ToOwned::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_and_end_of_tests_are_parsed() {
        assert_eq!(
            read(r#"{ "type": "test", "event": "started", "name": "a::b" }"#),
            Line::Started("a::b".into())
        );
        assert_eq!(
            read(r#"{ "type": "test", "name": "a::b", "event": "ok", "exec_time": 1.5 }"#),
            Line::Ended(Ended {
                name: "a::b".into(),
                outcome: Outcome::Passed,
                took: Duration::from_millis(1500),
                output: String::new(),
            })
        );
        let Line::Ended(skipped) =
            read(r#"{ "type": "test", "name": "c", "event": "ignored", "message": "slow" }"#)
        else {
            panic!("no end")
        };
        assert_eq!(
            (skipped.outcome, &*skipped.output),
            (Outcome::Skipped, "slow")
        );
        assert_eq!(
            read(r#"{ "type": "suite", "event": "started", "test_count": 2 }"#),
            Line::Suite
        );
    }

    #[test]
    fn test_event_after_other_output_on_same_line_is_parsed() {
        let line = r#"etcd says{ "type": "test", "event": "started", "name": "x" }"#;
        assert_eq!(read(line), Line::Started("x".into()));
        for other in ["plain text", "{\"level\":\"info\"}", ""] {
            assert_eq!(read(other), Line::Other, "{other}");
        }
    }

    #[test]
    fn slow_test_warning_does_not_end_test() {
        let line = r#"{ "type": "test", "event": "timeout", "name": "x" }"#;
        assert_eq!(read(line), Line::Other);
    }

    #[test]
    fn failure_reason_is_panic_without_backtrace() {
        let output = "NAME  READY\n\n\
             thread 'a::c' (7) panicked at e2e/src/sandbox.rs:63:13:\n\
             c: waited 180 s for: a pod\n\nCaused by:\n    a stall\n\nStack backtrace:\n   0: main\n";
        let why = ["c: waited 180 s for: a pod", "Caused by:", "a stall"];
        assert_eq!(reason(output), why);
    }

    #[test]
    fn failure_reason_without_panic_is_error_or_last_lines() {
        assert_eq!(reason("x\nError: no\nbecause\n"), ["Error: no", "because"]);
        let long: Vec<String> = (0..40).map(|line| format!("line {line}")).collect();
        let last = reason(&long.join("\n"));
        assert_eq!((last.len(), last[11].as_str()), (12, "line 39"));
        assert!(reason("").is_empty());
    }

    #[test]
    fn test_list_omits_benchmarks() {
        assert_eq!(
            listed("bootstrap::x: test\nb: benchmark\n\n1 test, 1 benchmark\n"),
            ["bootstrap::x"]
        );
    }
}
