//! Builds the image of the operators from an earlier commit, for the test of upgrades and rollbacks. Changes nothing
//! in the checkout.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::image::ImageRef;
use crate::origin::{Origin, git};
use crate::{checkout, image, progress, shell};

/// The commit in the option `--previous`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Commit {
    /// The ID of the commit.
    Found(String),
    /// The reason why the checkout does not have the commit.
    Missing(String),
}

/// The image and the chart of an earlier commit.
#[derive(Debug)]
pub(crate) struct Previous {
    chart: PathBuf,
    pub(crate) image: ImageRef,
}

impl Previous {
    /// The environment variables for the end-to-end tests.
    pub(crate) fn vars(&self) -> [(String, String); 2] {
        let variable = |name: &str, value: String| (name.to_owned(), value);
        [
            variable("E2E_PREVIOUS_IMAGE", self.image.reference.clone()),
            variable("E2E_PREVIOUS_CHART", self.chart.display().to_string()),
        ]
    }
}

/// Finds a commit by its ID, tag, branch, or an expression such as `HEAD~20`. Returns [`Commit::Missing`] without git
/// or without the complete history.
///
/// # Errors
/// Fails if the checkout has the complete history, but not the commit.
pub(crate) fn find(name: &str) -> Result<Commit> {
    let Ok(shallow) = git(&["rev-parse", "--is-shallow-repository"]) else {
        return Ok(Commit::Missing(
            "this directory has no git history, so no earlier release can be built: clone the repository".to_owned(),
        ));
    };
    let commit = format!("{name}^{{commit}}");
    match git(&[
        "rev-parse",
        "--verify",
        "--quiet",
        "--end-of-options",
        &commit,
    ]) {
        Ok(id) => Ok(Commit::Found(id)),
        Err(_) if shallow == "true" => Ok(Commit::Missing(format!(
            "this checkout is shallow and has no commit {name}: run `git fetch --unshallow`"
        ))),
        Err(_) => bail!("--previous {name}: the checkout has no such commit"),
    }
}

/// Builds the operators of a commit in the target directory of this checkout, so that dependencies are compiled only
/// once. The build overwrites the operators that were compiled from this checkout. The next cargo command in this
/// checkout compiles them again.
pub(crate) fn build(commit: &str) -> Result<Previous> {
    let source = clone(commit)?;
    let target = checkout::target()?.display().to_string();
    let command: &[&str] = &["build", "--bin", image::PROGRAM, "--target-dir", &target];
    let args = [command, &selection(&source)].concat();
    let built = image::cargo_executables_in(&source, &args)?;
    Ok(Previous {
        chart: source.join("charts/etcd-operator"),
        image: image::build(&built, &Origin::unreleased())?,
    })
}

/// The options of [`image::SELECTION`] for packages that exist in the commit.
fn selection(source: &Path) -> Vec<&'static str> {
    let exists = |package: &str| {
        let folders = [source.join("crates").join(package), source.join(package)];
        folders.iter().any(|folder| folder.is_dir())
    };
    let pairs = image::SELECTION.chunks(2);
    let chosen = pairs.filter(|pair| pair.last().is_some_and(|package| exists(package)));
    chosen.flatten().copied().collect()
}

/// Clones the commit into the cache, unless it exists there. The clone is not in the target directory, which is often
/// in the checkout, because cargo would also apply the configuration of the checkout.
fn clone(commit: &str) -> Result<PathBuf> {
    let folder = checkout::cache()?
        .join("previous")
        .join(checkout::identity());
    let source = folder.join(commit.get(..12).unwrap_or(commit));
    if source.is_dir() {
        return Ok(source);
    }
    // The clone of another commit is removed, because only one clone is kept.
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
    }
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let new = folder.join("new");
    progress::step(&format!("cloning {commit}"), || {
        let root = checkout::root();
        run_git(
            &root,
            &["clone", "--quiet", "--shared", "--no-checkout", "."],
            Some(&new),
        )?;
        run_git(&new, &["checkout", "--quiet", "--detach", commit], None)
    })?;
    fs::rename(&new, &source).with_context(|| source.display().to_string())?;
    Ok(source)
}

fn run_git(folder: &Path, args: &[&str], target: Option<&Path>) -> Result<()> {
    let mut command = Command::new("git");
    command.current_dir(folder).args(args).args(target);
    shell::output(&mut command).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_commit_is_rejected_and_known_commit_is_found() {
        let head = git(&["rev-parse", "HEAD"]).unwrap();
        assert_eq!(find("HEAD").unwrap(), Commit::Found(head));
        match find("no-such-commit") {
            Ok(Commit::Missing(why)) => assert!(why.contains("--unshallow"), "{why}"),
            Ok(Commit::Found(id)) => panic!("found {id}"),
            Err(error) => assert!(error.to_string().contains("no-such-commit"), "{error}"),
        }
        assert!(!matches!(find("--all"), Ok(Commit::Found(_))));
    }

    #[test]
    fn packages_that_do_not_exist_in_commit_are_not_selected() {
        let dir = tempfile::tempdir().unwrap();
        for folder in ["crates/cluster", "e2e"] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        assert_eq!(selection(dir.path()), ["-p", "cluster", "-p", "e2e"]);
        assert_eq!(selection(&checkout::root()), image::SELECTION);
    }
}
