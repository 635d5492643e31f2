//! Finds tests and comments about invariants in a Rust file.

use std::ops::Range;
use std::path::Path;

use crate::prose::test_names;

/// A line of a Rust file, with a text for the report.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The line number, counted from 1.
    pub(crate) line: usize,
    pub(crate) text: String,
}

/// A Rust file of the checkout.
#[derive(Debug)]
pub(crate) struct Source {
    /// The path of the file, relative to the root of the checkout.
    pub(crate) path: String,
    text: String,
}

impl Source {
    pub(crate) fn new(path: String, text: String) -> Self {
        Self { path, text }
    }

    #[cfg(test)]
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// True if the path of the file ends with `end`.
    pub(crate) fn is_named(&self, end: &str) -> bool {
        Path::new(&self.path).ends_with(end)
    }

    /// True if the file contains only tests and the code that tests use.
    pub(crate) fn is_test(&self) -> bool {
        let mut parts = Path::new(&self.path).iter();
        self.path.starts_with("e2e/") || parts.any(|part| part == "tests" || part == "tests.rs")
    }

    /// The names of all tests in the file, with their lines.
    pub(crate) fn tests(&self) -> Vec<Place> {
        self.spans().into_iter().map(|(test, _)| test).collect()
    }

    /// The tests whose name, comments or body name the invariant.
    pub(crate) fn tests_of(&self, number: usize) -> Vec<Place> {
        let lines: Vec<&str> = self.text.lines().collect();
        let spans = self.spans().into_iter();
        spans
            .filter(|(_, span)| names_invariant(&lines[span.clone()].join("\n"), number))
            .map(|(test, _)| test)
            .collect()
    }

    /// The comments outside of tests that name the invariant.
    pub(crate) fn comments(&self, number: usize) -> Vec<Place> {
        let spans = self.spans();
        let in_test = |index: &usize| spans.iter().any(|(_, span)| span.contains(index));
        self.text
            .lines()
            .enumerate()
            .filter(|(index, line)| !in_test(index) && names_invariant(line, number))
            .filter_map(|(index, line)| {
                let (_, comment) = line.split_once("//")?;
                let text = comment.trim_start_matches(['/', '!']).trim().to_owned();
                let line = index + 1;
                Some(Place { line, text })
            })
            .collect()
    }

    /// Each test with its range of lines, from its comments to the end of its body. The body ends at a closing brace
    /// with the indentation of the function, because rustfmt formats all files.
    fn spans(&self) -> Vec<(Place, Range<usize>)> {
        let lines: Vec<&str> = self.text.lines().collect();
        let is_before = |line: &&&str| line.trim_start().starts_with(['#', '/']);
        let span = |test: &Place| {
            let at = test.line - 1;
            let before = lines[..at].iter().rev().take_while(is_before).count();
            let indent = lines[at].len() - lines[at].trim_start().len();
            let end = format!("{}}}", &lines[at][..indent]);
            let body = lines[at..].iter().take_while(|line| **line != end).count();
            at - before..(at + body + 1).min(lines.len())
        };
        let tests = test_names(&self.text).into_iter().map(|test| Place {
            line: test.line,
            text: test.text,
        });
        tests
            .map(|test| {
                let span = span(&test);
                (test, span)
            })
            .collect()
    }
}

/// True if the text names the invariant `number`, for example as `invariant_5_` or "invariants 3 and 5".
pub(crate) fn names_invariant(text: &str, number: usize) -> bool {
    let text = text.to_lowercase();
    let is_named = |rest: &str| numbers(rest).contains(&number);
    text.contains(&format!("invariant_{number}_")) || text.split("invariant").skip(1).any(is_named)
}

/// The numbers at the start of `text`, which follows the word "invariant". For example, the text "s 3 and 5." has the
/// numbers 3 and 5.
fn numbers(text: &str) -> Vec<usize> {
    let words = text.trim_start_matches('s').split([' ', ',', '\n']);
    words
        .filter(|word| !word.is_empty() && *word != "and")
        .map_while(|word| {
            let end = word.trim_end_matches(|c: char| !c.is_ascii_digit());
            end.parse().ok()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invariant_numbers_in_text_are_found() {
        for text in [
            "Invariant 5: dead members",
            "(invariant 5)",
            "invariants 3 and 5.",
            "invariants 3, 5",
            "fn invariant_5_keeps_disk()",
        ] {
            assert!(names_invariant(text, 5), "{text}");
        }
        for text in ["invariant 15", "invariant of 5", "invariant_15_a", "5"] {
            assert!(!names_invariant(text, 5), "{text}");
        }
    }

    #[test]
    fn comments_of_tests_are_distinguished_from_comments_of_code() {
        let text = "// Invariant 2.\nfn a() {}\n\n/// Invariant 2.\n#[test]\nfn b() {\n    a();\n}\n\n\
                    #[test]\nfn c() {\n    // Invariant 3.\n}\n";
        let source = Source::new("a/src/b.rs".to_owned(), text.to_owned());
        let place = |line, text: &str| Place {
            line,
            text: text.to_owned(),
        };
        assert_eq!(source.comments(2), [place(1, "Invariant 2.")]);
        assert_eq!(source.tests_of(2), [place(6, "b")]);
        assert_eq!(source.comments(3), []);
        assert_eq!(source.tests_of(3), [place(11, "c")]);
        assert_eq!(source.tests(), [place(6, "b"), place(11, "c")]);
    }

    #[test]
    fn test_sources_are_recognized_by_path() {
        let is_test = |path: &str| Source::new(path.to_owned(), String::new()).is_test();
        assert!(is_test("crates/a/tests/b.rs"));
        assert!(is_test("crates/a/src/b/tests.rs"));
        assert!(is_test("e2e/src/leaks.rs"));
        assert!(!is_test("crates/a/src/b.rs"));
    }
}
