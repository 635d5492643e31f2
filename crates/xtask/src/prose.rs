//! `cargo xtask prose` prints prose for a review with the rules of docs/contributing/language.md. Changes nothing.

mod markdown;
mod passage;
mod rust;
mod sample;
mod vocabulary;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

pub(crate) use markdown::in_backticks;
pub(crate) use rust::test_names;

use passage::{Kind, PARAGRAPH_WORDS, Passage, SENTENCE_WORDS};

use crate::{checkout, shell};

/// The maximum length of a commit subject, in characters.
const SUBJECT_CHARACTERS: usize = 72;
/// The published branch. Its commits cannot be changed, so their subjects are not checked.
const PUBLISHED: &str = "origin/main";
/// Without a published branch, only commits after this commit are checked.
const RECENT_COMMITS: &str = "HEAD~20";
/// The maximum number of words from the old vocabulary in 1,000 lines of prose (docs/contributing/language.md).
const VOCABULARY_LIMIT: usize = 40;
/// Files that are not reviewed, because they are generated or explain the old vocabulary.
const NOT_SAMPLED: [&str; 4] = [
    "docs/api.md",
    "docs/kubectl-reference.md",
    "docs/contributing/language.md",
    "crates/xtask/src/prose/vocabulary.rs",
];

/// The options of `cargo xtask prose`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Seed of the sample. The same seed selects the same passages.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of passages, in equal shares of doc comments, comments, test names, messages and documents.
    #[arg(long, default_value_t = 60)]
    count: usize,
    /// Check the subjects of commits after this commit [default: origin/main, or the last 20 commits without it]
    #[arg(long)]
    base: Option<String>,
}

/// A passage and its file, relative to the root of the checkout.
struct Found {
    file: String,
    passage: Passage,
}

/// Prints the sample and the reports.
pub(crate) fn run(options: &Options) -> Result<()> {
    let passages = read(&checkout::root())?;
    let subjects = subjects(options.base.as_deref())?;
    print!("{}", sample_report(&passages, options));
    print!("{}", length_report(&passages));
    print!("{}", subject_report(&subjects));
    print!("{}", vocabulary_report(&passages));
    Ok(())
}

/// Reads all passages of the checkout, sorted by file.
fn read(root: &Path) -> Result<Vec<Found>> {
    let mut found = Vec::new();
    for path in checkout::files(root)? {
        let relative = path.strip_prefix(root).unwrap_or(&path);
        let file = relative.to_string_lossy().into_owned();
        let Some(parse) = parser(&file) else { continue };
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {file}"))?;
        found.extend(parse(&text).into_iter().map(|passage| Found {
            file: file.clone(),
            passage,
        }));
    }
    Ok(found)
}

/// The function that finds the passages of a file. `None` if the file is not reviewed.
fn parser(file: &str) -> Option<fn(&str) -> Vec<Passage>> {
    let extension = Path::new(file).extension().and_then(|name| name.to_str());
    match extension {
        _ if NOT_SAMPLED.contains(&file) => None,
        Some("rs") => Some(rust::passages),
        Some("md") => Some(markdown::passages),
        _ => None,
    }
}

/// The commits after `base`: short hash and subject.
fn subjects(base: Option<&str>) -> Result<Vec<String>> {
    let exists = |name: &str| git(&["rev-parse", "--verify", "--quiet", name]).is_ok();
    let ranges = match base {
        Some(base) => vec![format!("{base}..HEAD")],
        None if exists(PUBLISHED) => vec![format!("{PUBLISHED}..HEAD")],
        None if exists(RECENT_COMMITS) => vec![format!("{RECENT_COMMITS}..HEAD")],
        None => Vec::new(),
    };
    let mut arguments = vec!["log", "--no-merges", "--format=%h %s"];
    arguments.extend(ranges.iter().map(String::as_str));
    Ok(git(&arguments)?.lines().map(str::to_owned).collect())
}

fn git(arguments: &[&str]) -> Result<String> {
    let root = checkout::root();
    shell::output(Command::new("git").args(arguments).current_dir(root))
}

fn sample_report(passages: &[Found], options: &Options) -> String {
    let of_kind = |kind| {
        let found = passages.iter().filter(move |it| it.passage.kind == kind);
        found.collect::<Vec<_>>()
    };
    let groups = Kind::ALL.map(of_kind);
    let shares = sample::shares(&groups.each_ref().map(Vec::len), options.count);
    let mut random = sample::Random(options.seed);
    let sample = groups.into_iter().zip(shares);
    let sample = sample.flat_map(|(group, share)| random.choose(group, share));
    let entries = sample.enumerate().map(|(index, Found { file, passage })| {
        let (kind, line, text) = (passage.kind.name(), passage.line, &passage.text);
        format!("\n{}. {file}:{line} ({kind})\n   {text}\n", index + 1)
    });
    let entries: String = entries.collect();
    format!("# Sample with seed {}\n{entries}", options.seed)
}

fn length_report(passages: &[Found]) -> String {
    let mut sentences = Vec::new();
    let mut paragraphs = Vec::new();
    let is_document = |it: &&Found| it.passage.kind == Kind::Document;
    for Found { file, passage } in passages.iter().filter(is_document) {
        let line = passage.line;
        for (words, sentence) in passage.long_sentences() {
            sentences.push(format!("{file}:{line} ({words} words)\n   {sentence}\n"));
        }
        let words = passage.words();
        if words > PARAGRAPH_WORDS {
            paragraphs.push(format!("{file}:{line} ({words} words)\n"));
        }
    }
    format!(
        "\n# Sentences over {SENTENCE_WORDS} words in documents: {}\n\n{}\
         \n# Paragraphs over {PARAGRAPH_WORDS} words in documents: {}\n\n{}",
        sentences.len(),
        sentences.concat(),
        paragraphs.len(),
        paragraphs.concat(),
    )
}

fn subject_report(commits: &[String]) -> String {
    let long: Vec<String> = commits
        .iter()
        .filter_map(|commit| commit.split_once(' '))
        .filter(|(_, subject)| subject.chars().count() > SUBJECT_CHARACTERS)
        .map(|(hash, subject)| format!("{hash} ({}) {subject}\n", subject.chars().count()))
        .collect();
    format!(
        "\n# Commit subjects over {SUBJECT_CHARACTERS} characters: {} of {}\n\n{}",
        long.len(),
        commits.len(),
        long.concat()
    )
}

fn vocabulary_report(passages: &[Found]) -> String {
    let uses = vocabulary_uses(passages);
    let total: usize = uses.values().sum();
    let share = per_thousand_lines(total, passages);
    let mut rows: Vec<(&str, usize)> = uses.into_iter().collect();
    rows.sort_by_key(|(word, count)| (std::cmp::Reverse(*count), *word));
    let rows = rows.into_iter().map(|(word, count)| {
        let instead = vocabulary::replacement(word).unwrap_or_default();
        format!("{count:>6}  {word:<20} {instead}\n")
    });
    format!(
        "\n# Old vocabulary: {total} uses, {share} in 1,000 lines of prose (limit {VOCABULARY_LIMIT})\n\n{}",
        rows.collect::<String>()
    )
}

/// Counts the words of the old vocabulary in the passages.
fn vocabulary_uses(passages: &[Found]) -> BTreeMap<&'static str, usize> {
    let mut uses = BTreeMap::new();
    for Found { passage, .. } in passages {
        // Underscores of a test name are replaced by spaces, because `vocabulary::uses` looks for words.
        let text = match passage.kind {
            Kind::TestName => &passage.text.replace('_', " "),
            _ => &passage.text,
        };
        for (word, count) in vocabulary::uses(text) {
            *uses.entry(word).or_default() += count;
        }
    }
    uses
}

fn per_thousand_lines(uses: usize, passages: &[Found]) -> usize {
    let lines: usize = passages.iter().map(|it| it.passage.lines).sum();
    uses * 1000 / lines.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(file: &str, kind: Kind, text: &str) -> Found {
        Found {
            file: file.to_owned(),
            passage: Passage::new(kind, 7, text),
        }
    }

    fn options(seed: u64) -> Options {
        Options {
            seed,
            count: 2,
            base: None,
        }
    }

    #[test]
    fn prose_sample_names_file_line_and_kind() {
        let passages = [
            found("a.rs", Kind::Comment, "One."),
            found("b.md", Kind::Document, "Two."),
        ];
        let expected = "# Sample with seed 3\n\n1. a.rs:7 (comment)\n   One.\n\n2. b.md:7 (document)\n   Two.\n";
        assert_eq!(sample_report(&passages, &options(3)), expected);
    }

    #[test]
    fn length_report_contains_only_passages_of_documents() {
        let long = "word ".repeat(PARAGRAPH_WORDS + 1);
        let report = |kind| length_report(&[found("docs/a.md", kind, &long)]);
        let documents = report(Kind::Document);
        assert!(documents.contains("docs/a.md:7 (81 words)"), "{documents}");
        assert!(!report(Kind::Comment).contains(":7"));
    }

    #[test]
    fn documents_have_no_overlong_sentences_or_paragraphs() {
        let report = length_report(&read(&checkout::root()).unwrap());
        assert_eq!(report.matches("in documents: 0\n").count(), 2, "{report}");
    }

    #[test]
    fn uses_of_old_vocabulary_are_within_limit() {
        let passages = read(&checkout::root()).unwrap();
        let uses = vocabulary_uses(&passages).values().sum();
        let share = per_thousand_lines(uses, &passages);
        assert!(
            share <= VOCABULARY_LIMIT,
            "{share} in 1,000 lines; `cargo xtask prose` lists the words"
        );
    }

    #[test]
    fn commit_subjects_over_the_limit_are_reported() {
        let fits = format!("abc {}", "s".repeat(SUBJECT_CHARACTERS));
        let long = format!("def {}", "s".repeat(SUBJECT_CHARACTERS + 1));
        let report = subject_report(&[fits, long]);
        assert!(report.contains("characters: 1 of 2"), "{report}");
        assert!(report.contains("def (73)"), "{report}");
    }

    #[test]
    fn old_vocabulary_is_counted_per_thousand_lines() {
        let passages = [
            found("a.rs", Kind::TestName, "nobody_is_told"),
            found("b.md", Kind::Document, "The operator reports the loss."),
        ];
        let report = vocabulary_report(&passages);
        assert!(
            report.contains("2 uses, 1000 in 1,000 lines of prose"),
            "{report}"
        );
    }

    #[test]
    fn prose_review_covers_rust_sources_and_documents() {
        for file in ["crates/api/src/lib.rs", "docs/backup.md"] {
            assert!(parser(file).is_some(), "{file}");
        }
        for file in ["docs/api.md", "Cargo.toml", "e2e/fixtures/a.db"] {
            assert!(parser(file).is_none(), "{file}");
        }
    }
}
