//! Finds the prose in a Markdown document: paragraphs, list items and table rows.

use super::passage::{Kind, Passage};

/// The minimum number of words in a passage. Shorter items contain only names and numbers.
const WORDS: usize = 4;

/// All passages of a document, without headings and code blocks.
pub(crate) fn passages(document: &str) -> Vec<Passage> {
    let mut found: Vec<Passage> = Vec::new();
    let mut is_open = false;
    let mut in_code = false;
    for (number, line) in document.lines().enumerate() {
        let text = line.trim().trim_start_matches("> ");
        let is_fence = text.starts_with("```");
        in_code ^= is_fence;
        if is_fence || in_code || text.is_empty() || is_no_prose(text) {
            is_open = false;
            continue;
        }
        match found.last_mut() {
            Some(last) if is_open && !starts_item(text) => last.extend(text),
            _ => found.push(Passage::new(Kind::Document, number + 1, text)),
        }
        is_open = !text.starts_with('|');
    }
    found.retain(|passage| passage.words() >= WORDS);
    found
}

fn is_no_prose(text: &str) -> bool {
    text.starts_with("# ")
        || text.starts_with("##")
        || text.starts_with("<!--")
        || text.chars().all(|c| "|-: ".contains(c))
}

fn starts_item(text: &str) -> bool {
    let number = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let is_numbered = number.len() < text.len() && number.starts_with(". ");
    is_numbered || text.starts_with("- ") || text.starts_with("* ") || text.starts_with('|')
}

/// The pieces of inline code in a text. The text must not contain code blocks.
pub(crate) fn in_backticks(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(document: &str) -> Vec<(usize, String)> {
        let found = passages(document).into_iter();
        found.map(|passage| (passage.line, passage.text)).collect()
    }

    #[test]
    fn lines_of_paragraph_become_one_passage() {
        let expected = [
            (3, "The pod is deleted.".to_owned()),
            (6, "Then the member restarts.".to_owned()),
        ];
        let document = "# Title\n\nThe pod\nis deleted.\n\nThen the member restarts.\n";
        assert_eq!(texts(document), expected);
    }

    #[test]
    fn code_blocks_are_no_passages() {
        let document = "Run this command first:\n```sh\nkubectl get\n```\nThen wait for pods.\n";
        let expected = [
            (1, "Run this command first:".to_owned()),
            (5, "Then wait for pods.".to_owned()),
        ];
        assert_eq!(texts(document), expected);
    }

    #[test]
    fn list_items_and_table_rows_are_separate_passages() {
        let document = "1. one is the first\n   number\n2. two is the next\n- three is the last\n\n\
                        | a | the cell with words |\n|---|---|\n| 12 | 13 |\n";
        let expected = [
            (1, "1. one is the first number"),
            (3, "2. two is the next"),
            (4, "- three is the last"),
            (6, "| a | the cell with words |"),
        ];
        assert_eq!(texts(document), expected.map(|(n, t)| (n, t.to_owned())));
    }
}
