//! A passage of prose, and the lengths of its sentences and paragraphs.

/// The maximum number of words in a sentence.
pub(crate) const SENTENCE_WORDS: usize = 40;
/// The maximum number of words in a paragraph.
pub(crate) const PARAGRAPH_WORDS: usize = 80;

/// The kind of a passage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Doc,
    Comment,
    TestName,
    Message,
    Document,
}

impl Kind {
    pub(crate) const ALL: [Self; 5] = [
        Self::Doc,
        Self::Comment,
        Self::TestName,
        Self::Message,
        Self::Document,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Doc => "doc comment",
            Self::Comment => "comment",
            Self::TestName => "test name",
            Self::Message => "message",
            Self::Document => "document",
        }
    }
}

/// A text that can be reviewed alone: a paragraph, list item, table row, message or test name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Passage {
    pub(crate) kind: Kind,
    /// The first line of the passage, counted from 1.
    pub(crate) line: usize,
    /// The number of lines of the passage in its file.
    pub(crate) lines: usize,
    /// The text of the passage, without line breaks.
    pub(crate) text: String,
}

impl Passage {
    pub(crate) fn new(kind: Kind, line: usize, text: &str) -> Self {
        Self {
            kind,
            line,
            lines: 1,
            text: text.to_owned(),
        }
    }

    /// Appends the next line of the passage.
    pub(crate) fn extend(&mut self, text: &str) {
        self.text.push(' ');
        self.text.push_str(text);
        self.lines += 1;
    }

    /// The number of words. For a table row, the number of words of its longest cell.
    pub(crate) fn words(&self) -> usize {
        let paragraphs = self.paragraphs();
        let counts = paragraphs.iter().map(|text| count_words(text));
        counts.max().unwrap_or_default()
    }

    /// The sentences with more than [`SENTENCE_WORDS`] words, and their number of words.
    pub(crate) fn long_sentences(&self) -> Vec<(usize, String)> {
        let paragraphs = self.paragraphs();
        let sentences = paragraphs.iter().flat_map(|text| sentences(text));
        sentences
            .map(|sentence| (count_words(sentence), sentence.to_owned()))
            .filter(|(words, _)| *words > SENTENCE_WORDS)
            .collect()
    }

    /// The paragraphs of the passage. Each cell of a table row is a paragraph.
    fn paragraphs(&self) -> Vec<String> {
        let text = readable(&self.text);
        if !text.starts_with('|') {
            return vec![text];
        }
        text.split('|').map(|cell| cell.trim().to_owned()).collect()
    }
}

/// The text without the targets of links, and with each piece of inline code as one word.
pub(crate) fn readable(text: &str) -> String {
    let mut shown = String::new();
    for (index, part) in text.split('`').enumerate() {
        if index % 2 == 0 {
            shown.push_str(part);
        } else {
            // These characters of inline code are replaced, because in the text around the code they end a word or a
            // sentence, separate table cells, or begin a link target.
            let code = part.replace(['|', ' ', '.', '?', '!', '('], "_");
            shown.push_str(&code);
        }
    }
    without_link_targets(&shown)
}

fn without_link_targets(text: &str) -> String {
    let mut parts = text.split("](");
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        shown.push_str(part.split_once(')').map_or("", |(_, rest)| rest));
    }
    shown.replace('[', "")
}

/// The sentences of a paragraph. A period ends a sentence if a space and a capital letter or digit follow.
fn sentences(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut start = 0;
    for (index, _) in text.match_indices(' ') {
        let ends = text[..index].trim_end_matches([')', '"', '*', '”']);
        let begins = text[index + 1..].chars().find(|c| !"(\"*_“".contains(*c));
        let is_end = ends.ends_with(['.', '?', '!'])
            && begins.is_some_and(|c| c.is_uppercase() || c.is_ascii_digit());
        if is_end {
            found.push(&text[start..index]);
            start = index + 1;
        }
    }
    found.push(&text[start..]);
    found
}

fn count_words(text: &str) -> usize {
    text.split_whitespace()
        .filter(|word| word.chars().any(char::is_alphanumeric))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passage(text: &str) -> Passage {
        Passage::new(Kind::Document, 1, text)
    }

    #[test]
    fn link_target_is_not_counted_and_code_counts_as_one_word() {
        let text = "Run `kubectl get pods -w`, see [the page](install.md#flags).";
        assert_eq!(passage(text).words(), 5);
    }

    #[test]
    fn sentence_ends_only_before_capital_letter_or_digit() {
        let text = "Use etcd 3.5, e.g. in tests. It (v3.5.1) works! 2 of 3 voters answer.";
        let expected = [
            "Use etcd 3.5, e.g. in tests.",
            "It (v3.5.1) works!",
            "2 of 3 voters answer.",
        ];
        assert_eq!(sentences(text), expected);
    }

    #[test]
    fn only_sentences_over_the_limit_are_reported() {
        let fits = format!("{}end.", "word ".repeat(SENTENCE_WORDS - 1));
        let long = format!("One {fits}");
        assert_eq!(passage(&fits).long_sentences(), []);
        let found = passage(&format!("Before. {long} After.")).long_sentences();
        assert_eq!(found, [(SENTENCE_WORDS + 1, long)]);
    }

    #[test]
    fn table_cells_are_measured_separately() {
        let row = format!("| {}| {}|", "word ".repeat(30), "word ".repeat(20));
        assert_eq!(passage(&row).words(), 30);
        assert_eq!(passage(&row).long_sentences(), []);
    }
}
