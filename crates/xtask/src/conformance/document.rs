//! Parses the tables of docs/conformance.md.

use crate::prose::in_backticks;

/// A row of docs/conformance.md: a requirement, its state, and the files with its tests.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) name: String,
    /// `done`, `part` or `later`.
    pub(crate) state: String,
    /// The files with the tests, each as the end of a path. Each end matches exactly one file.
    pub(crate) files: Vec<String>,
}

impl Line {
    /// The number of the invariant. `None` for other requirements.
    pub(crate) fn invariant(&self) -> Option<usize> {
        self.name.strip_prefix("invariant ")?.parse().ok()
    }

    /// True if the name of the requirement contains the text, in upper or lower case. "invariant 1" does not match
    /// "invariant 10".
    pub(super) fn contains(&self, text: &str) -> bool {
        let (name, text) = (self.name.to_lowercase(), text.to_lowercase());
        let is_number = |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit());
        let ends_with_digit = text.ends_with(|c: char| c.is_ascii_digit());
        name.match_indices(&text)
            .any(|(at, _)| !(ends_with_digit && is_number(&name[at + text.len()..])))
    }
}

/// The requirements in all tables of the page.
pub(crate) fn lines(page: &str) -> Vec<Line> {
    page.lines().filter_map(line).collect()
}

fn line(row: &str) -> Option<Line> {
    let cells = row.strip_prefix("| ")?;
    let cells: Vec<&str> = cells.split('|').map(str::trim).collect();
    let [name, state @ ("done" | "part" | "later"), files, ..] = cells[..] else {
        return None;
    };
    Some(Line {
        name: name.to_owned(),
        state: state.to_owned(),
        files: in_backticks(files).map(str::to_owned).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_table_rows_with_state_in_second_cell_are_parsed() {
        let page = "| line | state | tests in | note |\n|---|---|---|---|\n\
                    | clusters 1: start | done | `a.rs`, `b/c.rs` | with `code` |\n\
                    | done | the whole requirement |\n";
        let expected = Line {
            name: "clusters 1: start".to_owned(),
            state: "done".to_owned(),
            files: vec!["a.rs".to_owned(), "b/c.rs".to_owned()],
        };
        assert_eq!(lines(page), [expected]);
    }

    #[test]
    fn search_for_invariant_1_does_not_find_invariant_10() {
        let found = lines("| invariant 10 | done | | |\n");
        let [line] = &found[..] else {
            panic!("{found:?}")
        };
        assert_eq!(line.invariant(), Some(10));
        assert!(line.contains("Invariant 10"));
        assert!(line.contains("invariant"));
        assert!(!line.contains("invariant 1"));
    }
}
