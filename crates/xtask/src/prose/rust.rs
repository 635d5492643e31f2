//! Finds the prose in a Rust file: comments, doc comments, test names and messages.

use super::passage::{Kind, Passage};

/// A message is longer than this number of characters.
const MESSAGE_CHARACTERS: usize = 40;
/// The minimum number of words in a message. Shorter string literals are URLs, keys and flags.
const MESSAGE_WORDS: usize = 5;

/// A part of a Rust file that can contain prose: a comment line or a string literal.
enum Token {
    Comment {
        line: usize,
        kind: Kind,
        text: String,
    },
    Literal {
        line: usize,
        text: String,
    },
}

/// All passages of a Rust file, sorted by line.
pub(crate) fn passages(source: &str) -> Vec<Passage> {
    let tokens = tokens(source);
    let mut found = comments(&tokens);
    found.extend(tokens.iter().filter_map(message));
    found.extend(test_names(source));
    found.sort_by_key(|passage| passage.line);
    found
}

/// Joins comment lines to passages. A blank line or a code fence ends a passage, and code blocks are omitted.
fn comments(tokens: &[Token]) -> Vec<Passage> {
    let mut found: Vec<Passage> = Vec::new();
    let mut previous = None;
    let mut in_code = false;
    for token in tokens {
        let Token::Comment { line, kind, text } = token else {
            continue;
        };
        let follows = previous == Some((*line - 1, *kind));
        let was_in_code = in_code && follows;
        let is_fence = text.starts_with("```");
        in_code = was_in_code != is_fence;
        let is_separator = text.starts_with("----");
        if text.is_empty() || is_separator || is_fence || was_in_code {
            // A skipped line in a code block still counts as `previous`, so that the next line belongs to the same code
            // block.
            previous = in_code.then_some((*line, *kind));
            continue;
        }
        previous = Some((*line, *kind));
        match found.last_mut() {
            Some(last) if follows && starts_no_item(text) => last.extend(text),
            _ => found.push(Passage::new(*kind, *line, text)),
        }
    }
    found
}

/// True if the line continues the paragraph above it. A list item, a heading or a table row starts a new paragraph.
fn starts_no_item(text: &str) -> bool {
    !text.starts_with(['-', '*', '|', '#'])
}

fn message(token: &Token) -> Option<Passage> {
    let Token::Literal { line, text } = token else {
        return None;
    };
    let is_manifest = text.contains('\n') || has_flow_mapping(text);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let words = text.split(' ');
    let plain = words
        .filter(|word| word.chars().filter(|c| c.is_alphabetic()).count() * 2 > word.len())
        .count();
    let is_data = text.contains("\": ") || text.starts_with(['{', '[', '<', '#']);
    let is_message = text.chars().count() > MESSAGE_CHARACTERS
        && plain >= MESSAGE_WORDS
        && plain * 4 > text.split(' ').count() * 3
        && !is_data
        && !is_manifest;
    is_message.then(|| Passage::new(Kind::Message, *line, &text))
}

/// True if the text has a YAML mapping on one line, such as `{name: main}`. Placeholders of `format!` are not mappings,
/// because no space follows their colon.
fn has_flow_mapping(text: &str) -> bool {
    let mut keys = text
        .split('{')
        .skip(1)
        .filter_map(|rest| rest.split_once(": "));
    keys.any(|(key, _)| !key.is_empty() && key.chars().all(char::is_alphanumeric))
}

/// The names of functions with a test attribute.
pub(crate) fn test_names(source: &str) -> Vec<Passage> {
    let mut found = Vec::new();
    let mut is_test = false;
    for (number, line) in source.lines().enumerate() {
        let line = line.trim_start();
        if line.starts_with("#[") || line.starts_with("//") {
            is_test |= line.contains("test]") || line.contains("::test(");
            continue;
        }
        if let Some(name) = function(line).filter(|_| is_test) {
            found.push(Passage::new(Kind::TestName, number + 1, name));
        }
        is_test = false;
    }
    found
}

fn function(line: &str) -> Option<&str> {
    let (before, rest) = line.split_once("fn ")?;
    let modifiers = ["pub", "pub(crate)", "pub(super)", "async", "const", ""];
    let is_function = before.split(' ').all(|word| modifiers.contains(&word));
    rest.split(['(', '<']).next().filter(|_| is_function)
}

fn tokens(source: &str) -> Vec<Token> {
    Lexer {
        rest: source,
        line: 1,
    }
    .collect()
}

/// Finds the comments and string literals of a Rust file.
struct Lexer<'a> {
    rest: &'a str,
    line: usize,
}

impl<'a> Lexer<'a> {
    /// Removes the next `length` bytes, returns them, and counts their lines.
    fn take(&mut self, length: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(length);
        self.line += taken.matches('\n').count();
        self.rest = rest;
        taken
    }

    fn comment(&mut self) -> Token {
        let line = self.line;
        let length = self.rest.find('\n').unwrap_or(self.rest.len());
        let text = self.take(length);
        let is_doc = text.starts_with("//!") || text.starts_with("///");
        Token::Comment {
            line,
            kind: if is_doc { Kind::Doc } else { Kind::Comment },
            text: text.trim_start_matches(['/', '!']).trim().to_owned(),
        }
    }

    /// The length of an opening such as `r#"` in bytes, if a raw string starts here.
    fn raw_opening(&self) -> Option<usize> {
        let rest = self.rest.strip_prefix('r')?;
        let hashes = rest.len() - rest.trim_start_matches('#').len();
        rest[hashes..].starts_with('"').then_some(hashes + 2)
    }

    fn raw_literal(&mut self, opening: usize) -> Token {
        let line = self.line;
        self.take(opening);
        let end = format!("\"{}", "#".repeat(opening - 2));
        let length = self.rest.find(&end).unwrap_or(self.rest.len());
        let text = self.take(length).to_owned();
        self.take(end.len().min(self.rest.len()));
        Token::Literal { line, text }
    }

    fn literal(&mut self) -> Token {
        let line = self.line;
        self.take(1);
        let mut is_escaped = false;
        let end = self.rest.char_indices().find(|(_, c)| {
            let is_end = *c == '"' && !is_escaped;
            is_escaped = *c == '\\' && !is_escaped;
            is_end
        });
        let length = end.map_or(self.rest.len(), |(index, _)| index);
        // A backslash before a line break, after which the literal continues, and the escape sequence `\n` each become
        // a space.
        let text = self.take(length).replace("\\\n", " ").replace("\\n", " ");
        self.take(usize::from(!self.rest.is_empty()));
        Token::Literal {
            line,
            text: text.replace("\\\"", "\""),
        }
    }

    /// The length in bytes of the character literal that starts here. 1 if the quote belongs to a lifetime.
    fn quoted(&self) -> usize {
        let mut characters = self.rest.char_indices().skip(1);
        let first = characters.next();
        if first.is_some_and(|(_, c)| c == '\\') {
            let end = characters.skip(1).find(|(_, c)| *c == '\'');
            return end.map_or(1, |(index, _)| index + 1);
        }
        match characters.next() {
            Some((index, '\'')) => index + 1,
            _ => 1,
        }
    }
}

impl Iterator for Lexer<'_> {
    type Item = Token;

    fn next(&mut self) -> Option<Token> {
        let mut after_word = false;
        while let Some(next) = self.rest.chars().next() {
            if self.rest.starts_with("//") {
                return Some(self.comment());
            }
            if next == '"' {
                return Some(self.literal());
            }
            if let Some(opening) = self.raw_opening().filter(|_| !after_word) {
                return Some(self.raw_literal(opening));
            }
            let length = if self.rest.starts_with("/*") {
                self.rest.find("*/").map_or(self.rest.len(), |end| end + 2)
            } else if next == '\'' {
                self.quoted()
            } else {
                next.len_utf8()
            };
            // The `r` in `br"..."` begins a raw string, but an `r` at the end of another word does not.
            after_word = (next.is_alphanumeric() || next == '_') && next != 'b';
            self.take(length);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str, kind: Kind) -> Vec<(usize, String)> {
        let found = passages(source).into_iter();
        found
            .filter(|passage| passage.kind == kind)
            .map(|passage| (passage.line, passage.text))
            .collect()
    }

    #[test]
    fn comment_lines_of_paragraph_become_one_passage() {
        let source = "//! One\n//! two.\n//!\n//! Three.\nfn a() {} // Four.\n/// Five.\n// Six.\n";
        let doc = [(1, "One two."), (4, "Three."), (6, "Five.")];
        let plain = [(5, "Four."), (7, "Six.")];
        assert_eq!(
            texts(source, Kind::Doc),
            doc.map(|(n, t)| (n, t.to_owned()))
        );
        assert_eq!(
            texts(source, Kind::Comment),
            plain.map(|(n, t)| (n, t.to_owned()))
        );
    }

    #[test]
    fn code_blocks_in_doc_comments_are_no_passages() {
        let source =
            "/// Before.\n/// ```\n/// let a = 1;\n///\n/// let b = 1;\n/// ```\n/// After.\n";
        let expected = [(1, "Before.".to_owned()), (7, "After.".to_owned())];
        assert_eq!(texts(source, Kind::Doc), expected);
    }

    #[test]
    fn list_items_in_doc_comments_are_separate_passages() {
        let source = "/// - one\n///   more\n/// - two\n";
        let expected = [(1, "- one more".to_owned()), (3, "- two".to_owned())];
        assert_eq!(texts(source, Kind::Doc), expected);
    }

    #[test]
    fn comment_markers_in_string_literals_are_ignored() {
        let source = "let a = \"http://host\"; let b = '\"'; let c = r#\"// \"no\" \"#; // yes\n";
        assert_eq!(texts(source, Kind::Comment), [(1, "yes".to_owned())]);
    }

    #[test]
    fn lifetimes_are_distinguished_from_character_literals() {
        let source = "fn a<'a>(b: &'a str) -> char { '\\'' } // yes\n";
        assert_eq!(texts(source, Kind::Comment), [(1, "yes".to_owned())]);
    }

    #[test]
    fn message_continued_on_next_line_is_one_passage() {
        let source =
            "\nlet a = \"the PersistentVolumeClaim has no \\\n    StorageClass: set one\";\n";
        let expected = "the PersistentVolumeClaim has no StorageClass: set one";
        assert_eq!(texts(source, Kind::Message), [(2, expected.to_owned())]);
    }

    #[test]
    fn urls_json_and_short_literals_are_no_messages() {
        let source = "let a = \"https://a.example.com/a-long-path/of-a-url/without-words\";\n\
                      let b = \"short message\";\n\
                      let c = r#\"{\"kind\": \"EtcdCluster\", \"and so on for a long time\": 1}\"#;\n";
        assert_eq!(texts(source, Kind::Message), []);
    }

    #[test]
    fn manifests_in_literals_are_no_messages() {
        let source =
            "let a = \"kind: EtcdCluster\nspec:\n  a long list of words: and more of them\";\n";
        assert_eq!(texts(source, Kind::Message), []);
        assert!(has_flow_mapping("spec: {static: {member: {}}}"));
        assert!(!has_flow_mapping("the pod {name:?} fails: {cause}"));
    }

    #[test]
    fn separator_comments_are_no_passages() {
        let found = texts("// ---- etcd ----\n// One.\n", Kind::Comment);
        assert_eq!(found, [(2, "One.".to_owned())]);
    }

    #[test]
    fn names_of_test_functions_are_passages() {
        let source = "#[test]\nfn one() {}\n#[tokio::test(start_paused = true)]\nasync fn two() {}\n\
                      #[cfg(test)]\nmod tests {}\nfn three() {}\n";
        let expected = [(2, "one".to_owned()), (4, "two".to_owned())];
        assert_eq!(texts(source, Kind::TestName), expected);
    }
}
