//! Builds the image of the operators: one static program with a name for each operator, CA certificates, a non-root
//! user, and no shell. The tag is a hash of the content and the labels. The image is never pushed.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::archive::{Entry, Image};
use crate::origin::Origin;
use crate::{checkout, progress, testbed};

/// The name of the image without a tag.
pub(crate) const NAME: &str = "localhost/etcd-operator";

/// The file name of the program. Under this name, the program runs the cluster operator.
pub(crate) const PROGRAM: &str = "etcd-operator";
/// Links to the program. Under the name of a link, the program runs the backup operator or the restore operator.
const LINKS: &[&str] = &["etcd-backup-operator", "etcd-restore-operator"];
/// The folder of the program and the links in the image.
const PROGRAMS: &str = "usr/local/bin";

/// The file with the CA certificates, on this machine and in the image.
pub(crate) const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";
/// Maximum number of image archives that are kept.
const KEPT_ARCHIVES: usize = 6;
/// The maximum size of the released image before compression, in bytes.
const LARGEST_IMAGE: u64 = 40_000_000;

/// An image that exists as an archive.
#[derive(Debug, Clone)]
pub(crate) struct ImageRef {
    /// `localhost/etcd-operator:TAG`.
    pub(crate) reference: String,
    pub(crate) archive: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Profile {
    /// Small and fast programs, as in a release. The first build takes about 20 minutes on two cores.
    Release,
    /// Programs that compile quickly. `demo` and `test` use this profile.
    Fast,
}

impl Profile {
    /// The name of the profile on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Fast => "fast",
        }
    }
}

/// The crates that xtask compiles together, even if it needs only some of them. With the same crates, cargo selects the
/// same features of their dependencies, so it compiles large dependencies only once.
pub(crate) const SELECTION: &[&str] = &[
    "-p",
    "cluster",
    "-p",
    "backup",
    "-p",
    "restore",
    "-p",
    "operators",
    "-p",
    "kubectl-etcd",
    "-p",
    "e2e",
];

/// The cargo arguments for failpoints in the operators. An end-to-end test selects the failpoint at which an operator
/// exits.
pub(crate) const FAIL_POINTS: &[&str] = &["--features", "operators/failpoints"];

/// The compiler of the workspace's crates. Dependencies are always compiled with rustc.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compiler {
    /// rustc compiles the crates.
    Rustc,
    /// clippy compiles and lints the crates. `cargo clippy` is not used: it checks the dependencies without generating
    /// code, so the tests would need a second build of the dependencies.
    Clippy,
}

/// Compiles the operators and the programs of the crate `e2e`.
pub(crate) fn compile() -> Result<Vec<PathBuf>> {
    cargo_executables(&[&["build", "--bins"], SELECTION].concat())
}

/// Like [`compile`], with failpoints in the operators.
pub(crate) fn compile_with_fail_points(compiler: Compiler) -> Result<Vec<PathBuf>> {
    let args = [&["build", "--bins"], SELECTION, FAIL_POINTS].concat();
    operators_with_fail_points(&cargo_messages(&args, compiler)?)
}

/// Finds the operators with failpoints in the messages of cargo, and copies them immediately, because the next build
/// without failpoints overwrites them.
pub(crate) fn operators_with_fail_points(messages: &str) -> Result<Vec<PathBuf>> {
    executables(messages)
        .into_iter()
        .filter(|file| file.ends_with(PROGRAM))
        .map(|file| copy_program(&file))
        .collect()
}

fn copy_program(file: &Path) -> Result<PathBuf> {
    let (Some(folder), Some(name)) = (file.parent(), file.file_name()) else {
        bail!("{} is not a program built by cargo", file.display());
    };
    let copies = folder.join("with-fail-points");
    fs::create_dir_all(&copies).with_context(|| copies.display().to_string())?;
    let (kept, new) = (
        copies.join(name),
        copies.join(format!("{}.new", std::process::id())),
    );
    fs::copy(file, &new).with_context(|| new.display().to_string())?;
    fs::rename(&new, &kept).with_context(|| kept.display().to_string())?;
    Ok(kept)
}

/// The content of the image. `built` contains the program.
pub(crate) fn content(built: &[PathBuf], origin: &Origin) -> Result<Image> {
    let file = built
        .iter()
        .find(|file| file.file_name().is_some_and(|name| name == PROGRAM));
    let file = file.with_context(|| format!("cargo built no program {PROGRAM}"))?;
    let mut entries = vec![Entry::program(file, &format!("{PROGRAMS}/{PROGRAM}"))];
    if Path::new(CERTIFICATES).is_file() {
        entries.push(Entry::data(
            Path::new(CERTIFICATES),
            CERTIFICATES.trim_start_matches('/'),
        ));
    } else {
        progress::say(&format!(
            "{CERTIFICATES} is missing: the image will not trust public S3 servers (on Debian: `apt-get install ca-certificates`)"
        ));
    }
    Ok(Image {
        entries,
        links: LINKS
            .iter()
            .map(|name| (format!("{PROGRAMS}/{name}"), PROGRAM.to_owned()))
            .collect(),
        user: "65532:65532".into(),
        labels: origin.labels(),
        created: origin.created.clone(),
        ..Image::default()
    })
}

/// Writes the archive with the image of the compiled operators, unless it exists. Removes old archives.
pub(crate) fn build(built: &[PathBuf], origin: &Origin) -> Result<ImageRef> {
    let mut content = content(built, origin)?;
    let tag = tag(&content)?;
    let folder = checkout::target()?.join("image");
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let image = ImageRef {
        reference: format!("{NAME}:{tag}"),
        archive: folder.join(format!("etcd-operator-{tag}.tar")),
    };
    content.names = vec![image.reference.clone()];
    if !image.archive.is_file() {
        // The name of the temporary file contains the process ID, because another command may write the same image at
        // the same time.
        let temporary = folder.join(format!("etcd-operator.{}.new", std::process::id()));
        progress::step("writing the image", || content.write(&temporary))?;
        fs::rename(&temporary, &image.archive)
            .with_context(|| image.archive.display().to_string())?;
    }
    remove_old_archives(&folder)?;
    Ok(image)
}

/// A size in megabytes with one decimal, such as `38.1 MB`.
pub(crate) fn megabytes(bytes: u64) -> String {
    let tenths = bytes.div_ceil(100_000);
    format!("{}.{} MB", tenths / 10, tenths % 10)
}

/// Rejects a released image whose size before compression exceeds `LARGEST_IMAGE`.
pub(crate) fn check_size(bytes: u64) -> Result<()> {
    if bytes > LARGEST_IMAGE {
        bail!(
            "the image has {}, but the limit for a release is {}: `cargo bloat --release -p operators` shows which crates are large",
            megabytes(bytes),
            megabytes(LARGEST_IMAGE)
        );
    }
    Ok(())
}

/// Loads the image into all running nodes of the testbed.
pub(crate) fn load(image: &ImageRef) -> Result<()> {
    progress::step(&format!("loading {}", image.reference), || {
        testbed::load_image(&image.archive, &image.reference)
    })
}

/// Runs cargo, and returns the programs that it has built.
pub(crate) fn cargo_executables(args: &[&str]) -> Result<Vec<PathBuf>> {
    cargo_executables_in(&checkout::root(), args)
}

/// Like [`cargo_executables`], in another checkout.
pub(crate) fn cargo_executables_in(folder: &Path, args: &[&str]) -> Result<Vec<PathBuf>> {
    let messages = cargo_messages_in(folder, args, Compiler::Rustc)?;
    Ok(executables(&messages))
}

pub(crate) fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Runs cargo, and returns its JSON messages. With clippy, a warning is an error.
pub(crate) fn cargo_messages(args: &[&str], compiler: Compiler) -> Result<String> {
    cargo_messages_in(&checkout::root(), args, compiler)
}

fn cargo_messages_in(folder: &Path, args: &[&str], compiler: Compiler) -> Result<String> {
    progress::say(&format!("cargo {}", args.join(" ")));
    let mut command = Command::new(cargo());
    command.current_dir(folder).args(args);
    match compiler {
        Compiler::Rustc => command.arg("--message-format=json-render-diagnostics"),
        Compiler::Clippy => command
            .arg("--message-format=json")
            .env("RUSTC_WORKSPACE_WRAPPER", "clippy-driver"),
    };
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    let messages = String::from_utf8_lossy(&output.stdout).into_owned();
    let diagnostics = diagnostics(&messages);
    for diagnostic in &diagnostics {
        eprint!("{diagnostic}");
    }
    if !output.status.success() {
        bail!("cargo {} failed: see its messages above", args.join(" "));
    }
    if !diagnostics.is_empty() {
        bail!(
            "clippy reported {} warnings: see its messages above",
            diagnostics.len()
        );
    }
    Ok(messages)
}

/// The warnings and errors in the messages of cargo. Cargo reports the warnings of a library twice, because it compiles
/// the library again for its tests, so duplicates are removed.
fn diagnostics(messages: &str) -> BTreeSet<String> {
    let rendered = |line: &str| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        Some(message["message"]["rendered"].as_str()?.to_owned())
    };
    messages.lines().filter_map(rendered).collect()
}

/// The programs in the messages of cargo.
fn executables(messages: &str) -> Vec<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| Some(PathBuf::from(message["executable"].as_str()?)))
        .collect()
}

/// The tag of an image: twelve hexadecimal digits of a hash. The hash covers the properties of the image, and the names
/// and content of its files.
fn tag(image: &Image) -> Result<String> {
    let mut hash = Sha256::new();
    hash.update(image.settings());
    hash.update(image.created.as_deref().unwrap_or_default());
    for entry in &image.entries {
        let mut file =
            fs::File::open(&entry.source).with_context(|| entry.source.display().to_string())?;
        std::io::copy(&mut file, &mut hash).with_context(|| entry.source.display().to_string())?;
    }
    Ok(hex::encode(hash.finalize())[..12].to_owned())
}

/// Keeps only the newest archives, because archives are large.
fn remove_old_archives(folder: &Path) -> Result<()> {
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
    let old = archives.len().saturating_sub(KEPT_ARCHIVES);
    for (_, archive) in &archives[..old] {
        // An error is ignored, because another command may have removed the archive already.
        let _ = fs::remove_file(archive);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_cargo_messages() {
        let messages = "{\"reason\":\"compiler-artifact\",\"executable\":null}\nnot json\n{\"executable\":\"/t/etcd-operator\"}\n";
        assert_eq!(executables(messages), [PathBuf::from("/t/etcd-operator")]);
    }

    #[test]
    fn repeated_compiler_diagnostics_are_shown_once() {
        let warning =
            "{\"reason\":\"compiler-message\",\"message\":{\"rendered\":\"warning: x\"}}\n";
        let artifact = "{\"reason\":\"compiler-artifact\"}\n";
        let messages = [warning, artifact, warning].concat();
        assert_eq!(
            diagnostics(&messages),
            BTreeSet::from(["warning: x".to_owned()])
        );
        assert!(diagnostics(artifact).is_empty());
    }

    fn program(folder: &Path, bytes: &str) -> PathBuf {
        let file = folder.join(PROGRAM);
        fs::write(&file, bytes).unwrap();
        file
    }

    #[test]
    fn image_tag_depends_on_content_and_labels() {
        let dir = tempfile::tempdir().unwrap();
        let built = [program(dir.path(), "a")];
        let origin = Origin::unreleased();
        let first = tag(&content(&built, &origin).unwrap()).unwrap();
        assert_eq!(first, tag(&content(&built, &origin).unwrap()).unwrap());
        assert_eq!(first.len(), 12);
        let commit = Origin {
            revision: Some("0123".into()),
            ..origin.clone()
        };
        assert_ne!(first, tag(&content(&built, &commit).unwrap()).unwrap());
        program(dir.path(), "b");
        assert_ne!(first, tag(&content(&built, &origin).unwrap()).unwrap());
    }

    #[test]
    fn image_has_one_executable_file_and_non_root_user() {
        let dir = tempfile::tempdir().unwrap();
        let built = [program(dir.path(), "a")];
        let image = content(&built, &Origin::unreleased()).unwrap();
        assert_eq!(image.user, "65532:65532");
        // The image has no executable file except the program, so it has no shell.
        let programs = image.entries.iter().filter(|entry| entry.mode & 0o111 != 0);
        let paths: Vec<&str> = programs.map(|entry| entry.path.as_str()).collect();
        assert_eq!(paths, ["usr/local/bin/etcd-operator"]);
        assert!(image.links.iter().all(|(_, target)| target == PROGRAM));
        assert!(content(&[], &Origin::unreleased()).is_err());
    }

    #[test]
    fn too_large_image_is_rejected() {
        check_size(LARGEST_IMAGE).unwrap();
        let error = check_size(LARGEST_IMAGE + 1).unwrap_err().to_string();
        assert!(error.contains("40.1 MB"), "{error}");
    }

    #[test]
    fn only_newest_image_archives_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..KEPT_ARCHIVES + 2 {
            fs::write(dir.path().join(format!("{number}.tar")), "").unwrap();
        }
        fs::write(dir.path().join("other"), "").unwrap();
        remove_old_archives(dir.path()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), KEPT_ARCHIVES + 1);
    }
}
