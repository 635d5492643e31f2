//! The operators of the commit before, for the tests that replace them by the checkout's: found in git, built beside the
//! checkout once, and kept in the cache. It may change neither the checkout nor what cargo keeps for it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::image::{self, ImageRef};
use crate::{checkout, progress, shell};

/// What the operators are built from.
const SOURCES: &[&str] = &[
    ".cargo",
    "Cargo.lock",
    "Cargo.toml",
    "crates/api",
    "crates/backup",
    "crates/cluster",
    "crates/etcd",
    "crates/restore",
    "crates/runtime",
    "crates/store",
];

/// What lies among it and is in no program.
const TESTS: &[&str] = &[
    ":(exclude,glob)crates/**/tests/**",
    ":(exclude,glob)crates/**/tests.rs",
];

/// What else the tests take of that commit, and what chooses the features of the crates.
const BESIDE: &[&str] = &["charts", "e2e/Cargo.toml", "e2e/fixtures/cel"];

/// Names another commit than the one that is found.
const NAMED: &str = "E2E_BEFORE_COMMIT";

/// How many commits' operators are kept: each has the three programs.
const KEPT: usize = 3;

/// The operators of another commit.
#[derive(Debug, Clone)]
pub(crate) struct Before {
    pub(crate) image: ImageRef,
    /// The commit's files: its chart, its fixtures.
    pub(crate) tree: PathBuf,
}

/// Builds the operators of the commit before, unless they are kept. The error says why there are none.
pub(crate) fn build() -> Result<Before> {
    let commit = commit()?;
    let base = checkout::cache()?.join("before");
    fs::create_dir_all(&base).with_context(|| base.display().to_string())?;
    let lock = base.join("lock");
    let lock = File::create(&lock).with_context(|| lock.display().to_string())?;
    lock.lock().context("lock")?;
    let folder = base.join(key(&commit)?);
    let short = &commit[..commit.len().min(7)];
    if folder.is_dir() {
        progress::say(&format!(
            "the operators of the commit before ({short}) are kept in {}",
            folder.display()
        ));
    } else {
        progress::step(
            &format!("compiling the operators of the commit before ({short})"),
            || compile(&commit, &folder),
        )?;
    }
    // The one used last is forgotten last.
    File::open(&folder)
        .and_then(|open| open.set_modified(SystemTime::now()))
        .with_context(|| folder.display().to_string())?;
    forget_old(&base)?;
    let programs: Vec<PathBuf> = image::PROGRAMS
        .iter()
        .map(|program| folder.join("bin").join(program))
        .collect();
    Ok(Before {
        image: image::build(&programs)?,
        tree: folder.join("tree"),
    })
}

/// The newest commit whose operators are not those of the checkout.
fn commit() -> Result<String> {
    commit_before(&checkout::root(), std::env::var(NAMED).ok().as_deref())
}

fn commit_before(root: &Path, named: Option<&str>) -> Result<String> {
    if let Some(named) = named.filter(|named| !named.is_empty()) {
        let named = format!("{named}^{{commit}}");
        return git(root, &["rev-parse", "--verify", &named]).context(NAMED);
    }
    let paths = [SOURCES, TESTS].concat();
    let changed = [
        &["status", "--porcelain", "--untracked-files=all", "--"][..],
        &paths,
    ]
    .concat();
    let changed = git(root, &changed).context("no history")?;
    let last = [
        &["log", "--first-parent", "-1", "--format=%H", "--"][..],
        &paths,
    ]
    .concat();
    let last = git(root, &last).context("no history")?;
    if last.is_empty() {
        bail!("no commit holds the operators");
    }
    if !changed.is_empty() {
        return Ok(last);
    }
    let parent = format!("{last}^");
    git(root, &["rev-parse", "--verify", "--quiet", &parent]).map_err(|_| {
        anyhow::anyhow!(
            "the history ends at {last}, which changed the operators (a shallow clone?)"
        )
    })
}

/// Twelve hex digits that follow from all that is taken from the commit.
fn key(commit: &str) -> Result<String> {
    let listed = [&["ls-tree", commit, "--"][..], SOURCES, BESIDE].concat();
    let listed = git(&checkout::root(), &listed)?;
    Ok(checkout::hex(&Sha256::digest(listed.as_bytes()))[..12].to_owned())
}

fn git(root: &Path, args: &[&str]) -> Result<String> {
    let text = shell::output(Command::new("git").arg("-C").arg(root).args(args))?;
    Ok(text.trim().to_owned())
}

/// Makes the folder with the commit's files and its operators. It is there whole or not at all.
fn compile(commit: &str, folder: &Path) -> Result<()> {
    let new = folder.with_extension("new");
    let apart = checkout::target()?.join("before");
    clear(&new)?;
    clear(&apart)?;
    let result = compile_in(commit, &new, &apart);
    clear(&apart)?;
    if let Err(error) = result {
        clear(&new)?;
        return Err(error);
    }
    fs::rename(&new, folder).with_context(|| folder.display().to_string())
}

fn compile_in(commit: &str, new: &Path, apart: &Path) -> Result<()> {
    let (tree, bin) = (new.join("tree"), new.join("bin"));
    unpack(commit, &tree)?;
    share(&checkout::target()?, apart, &own_names(&tree)?)?;
    // With the features that the whole selection has, or the large dependencies are compiled again.
    let mut args = [&["build"], image::SELECTION].concat();
    for program in image::PROGRAMS {
        args.extend(["--bin", program]);
    }
    let vars = [
        ("CARGO_TARGET_DIR", apart.as_os_str()),
        ("CARGO_INCREMENTAL", "0".as_ref()),
    ];
    // Tests may run meanwhile: they come first, and this comes to its end all the same.
    let mut command = Command::new("nice");
    command.args(["-n", "5"]).arg(image::cargo());
    command.current_dir(&tree).envs(vars);
    let built = image::cargo_executables_by(command, &args)
        .with_context(|| format!("the operators of {commit} do not compile"))?;
    fs::create_dir_all(&bin).with_context(|| bin.display().to_string())?;
    for program in &built {
        let name = program.file_name().context("a program without a name")?;
        fs::copy(program, bin.join(name)).with_context(|| program.display().to_string())?;
    }
    Ok(())
}

/// Writes the commit's files, as new as if they had been written by hand: cargo goes by their age.
fn unpack(commit: &str, tree: &Path) -> Result<()> {
    fs::create_dir_all(tree).with_context(|| tree.display().to_string())?;
    let mut child = Command::new("git")
        .arg("-C")
        .arg(checkout::root())
        .args(["archive", "--format=tar", commit])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("git")?;
    let mut archive = tar::Archive::new(child.stdout.take().context("output")?);
    archive.set_preserve_mtime(false);
    let unpacked = archive.unpack(tree);
    if !child.wait().context("git")?.success() {
        bail!("git archive {commit} failed");
    }
    unpacked.with_context(|| tree.display().to_string())
}

/// The names of the tree's own packages, libraries and programs, as cargo's files have them.
fn own_names(tree: &Path) -> Result<Vec<String>> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let text = shell::output(
        Command::new(cargo)
            .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
            .current_dir(tree),
    )?;
    let metadata: serde_json::Value = serde_json::from_str(&text).context("cargo metadata")?;
    let mut names = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let targets = package["targets"].as_array().into_iter().flatten();
        for named in targets.chain([package]) {
            let name = named["name"].as_str().context("a package without a name")?;
            names.extend([name.to_owned(), name.replace('-', "_")]);
        }
    }
    if names.is_empty() {
        bail!("{} has no packages", tree.display());
    }
    Ok(names)
}

/// Gives a new target directory what cargo has built of other people's crates. The workspace's own are left out: cargo
/// takes two checkouts for one and the same, and would believe them to be built.
fn share(target: &Path, apart: &Path, own: &[String]) -> Result<()> {
    let mut profiles = vec![PathBuf::from("debug")];
    for entry in fs::read_dir(target).with_context(|| target.display().to_string())? {
        profiles.push(Path::new(&entry?.file_name()).join("debug"));
    }
    for profile in profiles {
        let from = target.join(&profile);
        let Ok(lock) = File::open(from.join(".cargo-lock")) else {
            continue;
        };
        // No cargo builds there meanwhile.
        lock.lock_shared().context("cargo's lock")?;
        let to = apart.join(&profile);
        for part in ["deps", ".fingerprint", "build"] {
            share_part(&from.join(part), &to.join(part), own)
                .with_context(|| from.join(part).display().to_string())?;
        }
    }
    Ok(())
}

fn share_part(from: &Path, to: &Path, own: &[String]) -> Result<()> {
    if !from.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() {
            // Cargo writes into these: copies.
            if !is_own(&name, own) {
                copy(&entry.path(), &to.join(&name))?;
            }
        } else if let Some(library) = library(&name)
            && !is_own(library, own)
        {
            // A compiler that makes one anew puts it in the place of the old one.
            fs::hard_link(entry.path(), to.join(&name))?;
        }
    }
    Ok(())
}

/// The `serde-4ba909767e809f09` of `libserde-4ba909767e809f09.rlib`.
fn library(file: &str) -> Option<&str> {
    let (stem, extension) = file.strip_prefix("lib")?.rsplit_once('.')?;
    ["a", "rlib", "rmeta", "so"]
        .contains(&extension)
        .then_some(stem)
}

/// Whether a name with a hash behind it is one of these.
fn is_own(name: &str, own: &[String]) -> bool {
    let name = name.rsplit_once('-').map_or(name, |(name, _)| name);
    own.iter().any(|one| one == name)
}

/// Copies a file or a folder with all in it; each copy is as old as its original.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let about = fs::metadata(from)?;
    if about.is_dir() {
        fs::create_dir_all(to)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
        return Ok(());
    }
    fs::copy(from, to)?;
    Ok(File::open(to)?.set_modified(about.modified()?)?)
}

fn clear(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    Ok(())
}

/// Keeps the commits used last only.
fn forget_old(base: &Path) -> Result<()> {
    let entries = fs::read_dir(base).with_context(|| base.display().to_string())?;
    let mut kept: Vec<_> = entries
        .flatten()
        .filter(|entry| entry.path().is_dir())
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    kept.sort();
    let old = kept.len().saturating_sub(KEPT);
    kept[..old].iter().try_for_each(|(_, folder)| clear(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A repository whose first commit has the operators.
    fn repository() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        git(dir.path(), &["init", "--quiet"]).unwrap();
        change(dir.path(), "crates/cluster/src/lib.rs", "1");
        dir
    }

    /// Changes a file and commits it; returns the commit.
    fn change(root: &Path, file: &str, text: &str) -> String {
        write(root, file, text);
        git(root, &["add", "--all"]).unwrap();
        let who = ["-c", "user.name=a", "-c", "user.email=a@b"];
        let how = ["commit", "--quiet", "--no-gpg-sign", "--message=x"];
        git(root, &[&who[..], &how].concat()).unwrap();
        git(root, &["rev-parse", "HEAD"]).unwrap()
    }

    fn write(root: &Path, file: &str, text: &str) {
        let file = root.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    #[test]
    fn the_commit_before_has_other_operators() {
        let dir = repository();
        let root = dir.path();
        let before = change(root, "docs/a.md", "1");
        let last = change(root, "crates/cluster/src/lib.rs", "2");
        change(root, "crates/cluster/src/plan/tests/a.rs", "1");
        change(root, "docs/a.md", "2");
        assert_eq!(commit_before(root, None).unwrap(), before);
        assert_eq!(commit_before(root, Some("HEAD~3")).unwrap(), before);
        // What is not committed yet is upgraded to from what is.
        write(root, "crates/store/src/new.rs", "1");
        assert_eq!(commit_before(root, None).unwrap(), last);
    }

    #[test]
    fn without_a_commit_before_the_reason_is_said() {
        let dir = repository();
        let error = commit_before(dir.path(), None).unwrap_err();
        assert!(error.to_string().contains("the history ends"), "{error}");
        let none = tempfile::tempdir().unwrap();
        let error = commit_before(none.path(), None).unwrap_err();
        assert!(error.to_string().contains("no history"), "{error}");
    }

    #[test]
    fn a_new_target_directory_gets_what_other_people_wrote() {
        let dir = tempfile::tempdir().unwrap();
        let (target, apart) = (dir.path().join("target"), dir.path().join("apart"));
        for file in [
            ".cargo-lock",
            "deps/libserde-12.rlib",
            "deps/libcrc_fast-13.a",
            "deps/serde-12.d",
            "deps/libcluster-34.rlib",
            "deps/etcd_operator-56",
            ".fingerprint/serde-12/lib-serde",
            ".fingerprint/etcd-client-78/lib-etcd_client",
            ".fingerprint/etcd-90/lib-etcd",
        ] {
            write(&target.join("triple/debug"), file, "x");
        }
        share(&target, &apart, &["cluster".into(), "etcd".into()]).unwrap();
        let is_there = |file: &str| apart.join("triple/debug").join(file).is_file();
        assert!(is_there("deps/libserde-12.rlib"));
        assert!(is_there("deps/libcrc_fast-13.a"));
        assert!(is_there(".fingerprint/serde-12/lib-serde"));
        assert!(is_there(".fingerprint/etcd-client-78/lib-etcd_client"));
        assert!(!is_there("deps/libcluster-34.rlib"));
        assert!(!is_there("deps/etcd_operator-56"));
        assert!(!is_there(".fingerprint/etcd-90/lib-etcd"));
        let age = |root: &Path| {
            let file = root.join("triple/debug/.fingerprint/serde-12/lib-serde");
            fs::metadata(file).unwrap().modified().unwrap()
        };
        assert_eq!(age(&target), age(&apart));
    }
}
