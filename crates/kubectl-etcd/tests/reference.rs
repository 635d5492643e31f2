//! Tests that docs/kubectl-reference.md is up to date, and that the commands in the documents exist.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;
use kubectl_etcd::cli::Cli;
use kubectl_etcd::reference;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

#[test]
fn reference_page_is_up_to_date() {
    let file = root().join("docs/kubectl-reference.md");
    let page = reference::page();
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&file, &page).unwrap();
    }
    let found = fs::read_to_string(&file).unwrap_or_default();
    assert!(
        found == page,
        "docs/kubectl-reference.md is out of date: run `UPDATE=1 cargo test -p kubectl-etcd --test reference`"
    );
}

/// Adds the Markdown files below a directory to `found`.
fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

/// The plugin commands in a document, from code blocks and inline code.
fn commands(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut in_block = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if in_block {
            let command = line.trim().strip_prefix("kubectl etcd ");
            found.extend(command.map(|rest| rest.split(" #").next().unwrap().to_owned()));
        } else {
            let code = line.split('`').skip(1).step_by(2);
            found.extend(
                code.filter_map(|code| code.strip_prefix("kubectl etcd "))
                    .map(str::to_owned),
            );
        }
    }
    found
}

#[test]
fn kubectl_etcd_commands_in_documents_exist() {
    let mut files = vec![root().join("README.md")];
    pages(&root().join("docs"), &mut files);
    let mut checked = 0;
    for file in files
        .iter()
        .filter(|file| !file.ends_with("kubectl-reference.md"))
    {
        for command in commands(&fs::read_to_string(file).unwrap()) {
            checked += 1;
            let words = shlex::split(&command).unwrap();
            // clap's error about a missing argument is accepted, because a document may omit required arguments.
            let words = ["kubectl-etcd".to_owned()].into_iter().chain(words.clone());
            if let Err(error) = Cli::try_parse_from(words)
                && error.use_stderr()
                && error.kind() != clap::error::ErrorKind::MissingRequiredArgument
            {
                panic!("{}: kubectl etcd {command}\n{error}", file.display());
            }
        }
    }
    assert!(
        checked > 20,
        "the documents contain only {checked} commands: does this check still parse their format?"
    );
}

#[test]
fn commands_are_found_in_blocks_and_inline_code() {
    let text = "Run `kubectl etcd plan main`.\n\n```sh\nkubectl etcd status -A   # all\nkubectl get pods\n```\n";
    assert_eq!(commands(text), ["plan main", "status -A  "]);
    assert!(Cli::try_parse_from(["kubectl-etcd", "plann"]).is_err());
}
