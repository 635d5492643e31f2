//! Code blocks, commands and inline code of the documents.

use std::fs;
use std::path::Path;

use super::{files, root};
use crate::prose::in_backticks;

/// Documents that describe the past, or that a test generates.
const NOT_CHECKED: [&str; 4] = [
    "CHANGELOG.md",
    "docs/adr/",
    "docs/api.md",
    "docs/benchmarks-history.md",
];

/// A document of the current state.
pub(super) struct Page {
    /// Path in the repository.
    pub(super) path: String,
    pub(super) text: String,
}

/// A code block.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Block<'a> {
    pub(super) language: &'a str,
    /// Number of the line before the code.
    pub(super) line: usize,
    /// The code without the indentation of the block.
    pub(super) text: String,
}

/// The documents of the current state.
pub(super) fn pages() -> Vec<Page> {
    let mut found = Vec::new();
    files(&root(), ".md", &mut found);
    let named = found.into_iter().map(|path| {
        let name = path.strip_prefix(root()).unwrap();
        (name.to_string_lossy().into_owned(), path)
    });
    named
        .filter(|(name, _)| !NOT_CHECKED.iter().any(|start| name.starts_with(start)))
        .map(|(path, file)| Page {
            path,
            text: fs::read_to_string(file).unwrap(),
        })
        .collect()
}

/// The code blocks of a document.
pub(super) fn blocks(text: &str) -> Vec<Block<'_>> {
    let mut found: Vec<Block<'_>> = Vec::new();
    let mut open: Option<usize> = None;
    for (number, line) in text.lines().enumerate() {
        let code = line.trim_start();
        let indent = line.len() - code.len();
        match (code.strip_prefix("```"), open) {
            (Some(_), Some(_)) => open = None,
            (Some(language), None) => {
                open = Some(indent);
                found.push(Block {
                    language,
                    line: number + 1,
                    text: String::new(),
                });
            }
            (None, Some(of_block)) => {
                let block = found.last_mut().unwrap();
                block.text.push_str(&line[indent.min(of_block)..]);
                block.text.push('\n');
            }
            (None, None) => {}
        }
    }
    found
}

/// The pieces of inline code in the prose of a document.
pub(super) fn inline_code(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut in_block = false;
    for line in text.lines() {
        let is_fence = line.trim_start().starts_with("```");
        in_block ^= is_fence;
        if !in_block && !is_fence {
            found.extend(in_backticks(line));
        }
    }
    found
}

/// The lines of a script. A line that ends with a backslash continues on the next line.
pub(super) fn commands(script: &str) -> Vec<String> {
    let joined = script.replace("\\\n", " ");
    let lines = joined.lines().map(str::trim);
    lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect()
}

/// The commands of all documents and of the comments in the examples, each with the file that contains it.
pub(super) fn all_commands() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for page in pages() {
        let scripts = blocks(&page.text)
            .into_iter()
            .filter(|block| ["sh", "console"].contains(&block.language));
        for line in scripts.flat_map(|block| commands(&block.text)) {
            found.push((page.path.clone(), line));
        }
        for code in inline_code(&page.text) {
            found.push((page.path.clone(), code.to_owned()));
        }
    }
    let mut examples = Vec::new();
    files(&root().join("examples"), ".yaml", &mut examples);
    for path in examples {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let comments = comments(&path);
        found.extend(commands(&comments).into_iter().map(|it| (name.clone(), it)));
    }
    found
}

/// The comments of a file that are indented as commands.
fn comments(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let lines = text.lines().filter_map(|line| line.strip_prefix("#   "));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn code_blocks_and_inline_code_are_found_in_documents() {
    let text = "Run `a --b`:\n\n1. Step\n\n   ```sh\n   a \\\n     --c   # note\n   ```\n\n```yaml\nspec:\n  a: 1\n```\n";
    let found = blocks(text);
    assert_eq!(found.len(), 2);
    assert_eq!((found[0].language, found[0].line), ("sh", 5));
    assert_eq!(commands(&found[0].text), ["a    --c   # note"]);
    assert_eq!(found[1].text, "spec:\n  a: 1\n");
    assert_eq!(inline_code(text), ["a --b"]);
    assert!(all_commands().len() > 500);
}
