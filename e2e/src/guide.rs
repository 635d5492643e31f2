//! Runs the code blocks of a document in their order, with names of the test instead of placeholders.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;
use tokio::process::Command;

use crate::Env;

/// The code blocks of one section of a document, and the directory in which their commands run.
pub struct Guide {
    blocks: std::vec::IntoIter<Block>,
    /// Placeholders in the code blocks, each with its replacement.
    values: Vec<(String, String)>,
    folder: TempDir,
}

#[derive(Debug, PartialEq, Eq)]
struct Block {
    language: String,
    text: String,
}

impl Guide {
    /// Reads the section with this heading, such as `Move with a backup`. `values` are placeholders such as
    /// `NAMESPACE` and their replacements.
    ///
    /// # Errors
    /// Fails if the document has no such section.
    pub fn open(document: &Path, heading: &str, values: &[(&str, &str)]) -> Result<Self> {
        let text = std::fs::read_to_string(document)
            .with_context(|| format!("read {}", document.display()))?;
        let title = format!("\n## {heading}\n");
        let (_, section) = text
            .split_once(&title)
            .with_context(|| format!("{} has no section {heading}", document.display()))?;
        let section = section.split("\n## ").next().unwrap_or_default();
        let owned = |(from, to): &(&str, &str)| ((*from).to_owned(), (*to).to_owned());
        Ok(Self {
            blocks: blocks(section).into_iter(),
            values: values.iter().map(owned).collect(),
            folder: tempfile::tempdir()?,
        })
    }

    /// Removes all lines that equal `line` from the remaining code blocks. The document says in which case a reader
    /// removes this line.
    ///
    /// # Errors
    /// Fails if no block has this line.
    pub fn leave_out(&mut self, line: &str) -> Result<()> {
        let mut blocks: Vec<Block> = self.blocks.by_ref().collect();
        let mut found = false;
        for block in &mut blocks {
            let lines = block.text.split_inclusive('\n');
            let kept: String = lines.filter(|one| one.trim() != line).collect();
            found |= kept != block.text;
            block.text = kept;
        }
        self.blocks = blocks.into_iter();
        ensure!(found, "no block has the line {line}");
        Ok(())
    }

    /// Returns the next code block, with values instead of placeholders.
    ///
    /// # Errors
    /// Fails if the section has no more blocks, or if the next block has another language.
    fn next(&mut self, language: &str) -> Result<String> {
        let block = self
            .blocks
            .next()
            .context("the section has no more blocks")?;
        ensure!(
            block.language == language,
            "the next block is {}, not {language}: {}",
            block.language,
            block.text
        );
        let mut text = block.text;
        for (from, to) in &self.values {
            text = text.replace(from, to);
        }
        Ok(text)
    }

    /// Writes the next code block, which must be YAML, to a file.
    ///
    /// # Errors
    /// Fails if the next block is not YAML.
    pub fn write(&mut self, file: &str) -> Result<()> {
        let text = self.next("yaml")?;
        println!("{file}:\n{text}");
        std::fs::write(self.folder.path().join(file), text).context(file.to_owned())
    }

    /// Skips the next code block, which is for a case that the test does not cover.
    ///
    /// # Errors
    /// Fails if the next block has another language.
    pub fn skip(&mut self, language: &str) -> Result<()> {
        self.next(language).map(drop)
    }

    /// Runs the commands of the next code block, and returns their output.
    ///
    /// # Errors
    /// Fails if a command fails. The error contains the exit status and the output of the command.
    pub async fn run(&mut self, env: &Env) -> Result<String> {
        let script = self.next("sh")?;
        println!("{script}");
        // The shell functions `kubectl` and `helm` add the kubeconfig context of the test to each command.
        let mut prefix = String::new();
        if let Some(context) = &env.context {
            prefix = format!(
                "kubectl() {{ command kubectl --context {context} \"$@\"; }}\nhelm() {{ command helm --kube-context {context} \"$@\"; }}\n"
            );
        }
        let output = Command::new("bash")
            .args(["-euo", "pipefail", "-c", &format!("{prefix}{script}")])
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .output()
            .await
            .context("bash")?;
        if !output.status.success() {
            bail!(
                "{script}\nfailed with {}: {}{}",
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// The code blocks of a text, without their indentation.
fn blocks(text: &str) -> Vec<Block> {
    let mut found = Vec::new();
    let mut open: Option<(usize, Block)> = None;
    for line in text.lines() {
        let code = line.trim_start();
        match (code.strip_prefix("```"), open.take()) {
            (Some(language), None) => {
                let block = Block {
                    language: language.to_owned(),
                    text: String::new(),
                };
                open = Some((line.len() - code.len(), block));
            }
            (Some(_), Some((_, block))) => found.push(block),
            (None, Some((indent, mut block))) => {
                block.text.push_str(line.get(indent..).unwrap_or_default());
                block.text.push('\n');
                open = Some((indent, block));
            }
            (None, None) => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guide_reads_code_blocks_of_section_in_order_and_replaces_placeholders() {
        let folder = tempfile::tempdir().unwrap();
        let document = folder.path().join("a.md");
        let text = "# A\n\n## First\n\n```sh\nno\n```\n\n## Second\n\n1. Do:\n\n   ```yaml\n   a:\n     b: NAME\n   ```\n\n```sh\nrun NAME\n```\n\n## Third\n\n```sh\nno\n```\n";
        std::fs::write(&document, text).unwrap();
        let mut guide = Guide::open(&document, "Second", &[("NAME", "c")]).unwrap();
        assert_eq!(guide.next("yaml").unwrap(), "a:\n  b: c\n");
        assert!(guide.next("yaml").is_err());
        assert!(guide.next("sh").is_err());
        assert!(Guide::open(&document, "Fourth", &[]).is_err());
    }

    #[test]
    fn leave_out_removes_line_with_its_indentation() {
        let folder = tempfile::tempdir().unwrap();
        let document = folder.path().join("a.md");
        let text = "\n## First\n\n```yaml\na:\n    b: {c: d}\n    e: f\n```\n";
        std::fs::write(&document, text).unwrap();
        let mut guide = Guide::open(&document, "First", &[]).unwrap();
        guide.leave_out("b: {c: d}").unwrap();
        assert!(guide.leave_out("b: {c: d}").is_err());
        assert_eq!(guide.next("yaml").unwrap(), "a:\n    e: f\n");
    }
}
