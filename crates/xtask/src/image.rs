//! Builds the operators' image: three static programs, certificates of public
//! authorities, a user that is not root, no shell. Its tag follows from its
//! content. It may not push it anywhere.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::archive::{Entry, Image};
use crate::{checkout, progress, testbed};

/// The image's name without tag.
pub(crate) const NAME: &str = "localhost/etcd-operator";

/// The operators.
pub(crate) const PROGRAMS: &[&str] = &[
    "etcd-operator",
    "etcd-backup-operator",
    "etcd-restore-operator",
];

const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";
const KEPT: usize = 6;

/// A built image.
#[derive(Debug, Clone)]
pub(crate) struct ImageRef {
    /// `localhost/etcd-operator:TAG`.
    pub(crate) reference: String,
    /// The docker-archive.
    pub(crate) archive: PathBuf,
}

/// Selects the operators' crates and the e2e crate in all calls of cargo: with one selection there is one set of
/// features, and the large dependencies are compiled once for image, tests and demo.
pub(crate) const SELECTION: &[&str] = &[
    "-p", "cluster", "-p", "backup", "-p", "restore", "-p", "e2e",
];

/// What is added to the operators for the tests: they die where an end-to-end test asks for it.
pub(crate) const FAIL_POINTS: &[&str] = &[
    "--features",
    "cluster/failpoints,backup/failpoints,restore/failpoints",
];

/// Compiles the operators and the programs of the e2e crate.
pub(crate) fn compile() -> Result<Vec<PathBuf>> {
    cargo_executables(&[&["build", "--bins"], SELECTION].concat())
}

/// As [`compile`], with the operators' fail points.
pub(crate) fn compile_with_fail_points() -> Result<Vec<PathBuf>> {
    let messages = cargo_messages(&[&["build", "--bins"], SELECTION, FAIL_POINTS].concat())?;
    operators_with_fail_points(&messages)
}

/// The operators in the messages of a cargo that compiled them with fail points. They are put aside at once: another
/// build without fail points leaves its programs where cargo left these.
pub(crate) fn operators_with_fail_points(messages: &str) -> Result<Vec<PathBuf>> {
    executables(messages)
        .into_iter()
        .filter(|file| PROGRAMS.iter().any(|program| file.ends_with(program)))
        .map(|file| put_aside(&file))
        .collect()
}

fn put_aside(file: &Path) -> Result<PathBuf> {
    let (Some(folder), Some(name)) = (file.parent(), file.file_name()) else {
        bail!("{} is no program of cargo's", file.display());
    };
    let aside = folder.join("with-fail-points");
    fs::create_dir_all(&aside).with_context(|| aside.display().to_string())?;
    let (kept, new) = (
        aside.join(name),
        aside.join(format!("{}.new", std::process::id())),
    );
    fs::copy(file, &new).with_context(|| new.display().to_string())?;
    fs::rename(&new, &kept).with_context(|| kept.display().to_string())?;
    Ok(kept)
}

/// Makes the image of the compiled operators, unless the same image is there already.
pub(crate) fn build(built: &[PathBuf]) -> Result<ImageRef> {
    let mut entries = Vec::new();
    for program in PROGRAMS {
        let file = built
            .iter()
            .find(|file| file.file_name().is_some_and(|name| name == *program));
        let file = file.with_context(|| format!("cargo built no program {program}"))?;
        entries.push(Entry::program(file, &format!("usr/local/bin/{program}")));
    }
    if Path::new(CERTIFICATES).is_file() {
        entries.push(Entry::data(
            Path::new(CERTIFICATES),
            CERTIFICATES.trim_start_matches('/'),
        ));
    } else {
        progress::say(&format!(
            "{CERTIFICATES} is missing: the image will not trust public S3 servers (Debian: `apt-get install ca-certificates`)"
        ));
    }
    let tag = tag(&entries)?;
    let folder = checkout::target()?.join("image");
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let image = ImageRef {
        reference: format!("{NAME}:{tag}"),
        archive: folder.join(format!("etcd-operator-{tag}.tar")),
    };
    if !image.archive.is_file() {
        // Two commands at a time may write the same image: each has a temporary of its own.
        let temporary = folder.join(format!("etcd-operator.{}.new", std::process::id()));
        progress::step("writing the image", || {
            archive_of(&image.reference, entries).write(&temporary)
        })?;
        fs::rename(&temporary, &image.archive)
            .with_context(|| image.archive.display().to_string())?;
    }
    forget_old(&folder)?;
    Ok(image)
}

/// Puts the image into all nodes of the running testbed.
pub(crate) fn load(image: &ImageRef) -> Result<()> {
    progress::step(&format!("loading {}", image.reference), || {
        testbed::load_image(&image.archive, &image.reference)
    })
}

/// Runs cargo with its progress on the terminal; returns the programs it built.
pub(crate) fn cargo_executables(args: &[&str]) -> Result<Vec<PathBuf>> {
    Ok(executables(&cargo_messages(args)?))
}

/// How cargo is called.
pub(crate) fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Runs cargo with its progress on the terminal; returns its JSON messages, one a line.
pub(crate) fn cargo_messages(args: &[&str]) -> Result<String> {
    progress::say(&format!("cargo {}", args.join(" ")));
    let output = Command::new(cargo())
        .current_dir(checkout::root())
        .args(args)
        .arg("--message-format=json-render-diagnostics")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    if !output.status.success() {
        bail!("cargo {} failed; its messages are above", args.join(" "));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The programs in cargo's JSON messages.
fn executables(messages: &str) -> Vec<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| Some(PathBuf::from(message["executable"].as_str()?)))
        .collect()
}

fn archive_of(reference: &str, entries: Vec<Entry>) -> Image {
    Image {
        names: vec![reference.to_owned()],
        entries,
        user: "65532:65532".into(),
        labels: vec![
            (
                "org.opencontainers.image.title".into(),
                "etcd-operator".into(),
            ),
            (
                "org.opencontainers.image.licenses".into(),
                "Apache-2.0".into(),
            ),
            (
                "org.opencontainers.image.version".into(),
                env!("CARGO_PKG_VERSION").into(),
            ),
        ],
        ..Image::default()
    }
}

/// Twelve hex digits that follow from names and content of the files.
fn tag(entries: &[Entry]) -> Result<String> {
    let mut hash = Sha256::new();
    for entry in entries {
        hash.update(&entry.path);
        let mut file =
            fs::File::open(&entry.source).with_context(|| entry.source.display().to_string())?;
        std::io::copy(&mut file, &mut hash).with_context(|| entry.source.display().to_string())?;
    }
    Ok(hex::encode(hash.finalize())[..12].to_owned())
}

/// Keeps the newest archives only: each is as large as the three programs.
fn forget_old(folder: &Path) -> Result<()> {
    let mut archives: Vec<_> = fs::read_dir(folder)
        .with_context(|| folder.display().to_string())?
        .flatten()
        .filter(|entry| {
            entry
                .path()
                .extension()
                .is_some_and(|extension| extension == "tar")
        })
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    archives.sort();
    let old = archives.len().saturating_sub(KEPT);
    for (_, archive) in &archives[..old] {
        // Another run may have removed it.
        let _ = fs::remove_file(archive);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_are_found_in_cargos_messages() {
        let messages = "{\"reason\":\"compiler-artifact\",\"executable\":null}\nnot json\n{\"executable\":\"/t/etcd-operator\"}\n";
        assert_eq!(executables(messages), [PathBuf::from("/t/etcd-operator")]);
    }

    #[test]
    fn the_tag_follows_the_content() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        fs::write(&file, "a").unwrap();
        let entries = [Entry::program(&file, "x")];
        let first = tag(&entries).unwrap();
        assert_eq!(first, tag(&entries).unwrap());
        fs::write(&file, "b").unwrap();
        assert_ne!(first, tag(&entries).unwrap());
        assert_eq!(first.len(), 12);
    }

    #[test]
    fn only_the_newest_archives_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..KEPT + 2 {
            fs::write(dir.path().join(format!("{number}.tar")), "").unwrap();
        }
        fs::write(dir.path().join("other"), "").unwrap();
        forget_old(dir.path()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), KEPT + 1);
    }
}
