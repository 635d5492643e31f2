//! The program in a seed's pod. `fetch` downloads the snapshot, and writes a report to the termination message of its
//! container. `start` creates and verifies the data directory, and then executes etcd (exec). `start` writes a report
//! only if it fails.
//!
//! The data directory has a temporary name until it is verified. If a data directory exists, nothing is downloaded or
//! created, so a restarted pod never overwrites live data.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
pub use member::{Contents, Report};
use serde::{Deserialize, Serialize};
use store::progress;
use tokio::signal::unix::{SignalKind, signal};

use crate::reason::{Reason, Trouble};
use crate::source::SecretData;

pub(crate) mod content;
mod fetch;
mod intake;
mod local_etcd;
mod page_cache;
mod prepare;
mod replay;
mod snapshot;
mod start;

pub use fetch::{Fetch, Survivor, fetch};
pub use prepare::{Prepare, prepare};
pub use replay::ReplaySource;
pub use start::Start;

/// Size limit of a termination message in bytes.
const MESSAGE_LIMIT: usize = 4096;

/// Exit code after SIGTERM, as in shells.
const TERMINATED: i32 = 128 + 15;

/// The commands of the seed's containers.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Fetch the snapshot to the data volume and verify it
    Fetch(Box<Fetch>),
    /// Create the data directory from the snapshot, verify it, and run etcd
    Start(Box<Start>),
}

/// Paths in the seed's pod.
#[derive(Args, Clone, Debug)]
pub struct Paths {
    /// Directory where the data volume is mounted
    #[arg(long, default_value = api::names::DATA_MOUNT)]
    pub volume: PathBuf,
    /// File to which the container writes its report
    #[arg(long, default_value = "/dev/termination-log")]
    pub report: PathBuf,
}

impl Paths {
    /// etcd's data directory.
    pub fn data(&self) -> PathBuf {
        self.volume.join("data")
    }

    /// The directory for temporary files, which is deleted after the data directory is complete.
    fn work(&self) -> PathBuf {
        self.volume.join("restore")
    }

    fn snapshot(&self) -> PathBuf {
        self.work().join("snapshot.db")
    }

    /// The directory with the fetched changes.
    fn changes(&self) -> PathBuf {
        self.work().join("changes")
    }

    fn expected(&self) -> PathBuf {
        self.work().join("expected.json")
    }

    /// The file that describes the data in the data directory. The file stays after the restore.
    fn restored(&self) -> PathBuf {
        self.volume.join("restored.json")
    }
}

/// Runs a command and writes its report. Returns true if the command succeeded. If `start` succeeds, the function does
/// not return, because etcd replaces this process. After SIGTERM, this process exits.
pub async fn run(command: &Command) -> bool {
    let work = async {
        match command {
            Command::Fetch(arguments) => {
                let meter = arguments.meter.clone();
                let server = progress::serve(move || meter.read());
                let fetched = tokio::select! {
                    fetched = fetch(arguments) => fetched,
                    // `fetch` continues even if the progress server ends.
                    fetched = async { server.await; std::future::pending().await } => fetched,
                };
                (&arguments.paths, fetched)
            }
            Command::Start(arguments) => (&arguments.paths, Err(start::start(arguments).await)),
        }
    };
    let (paths, result) = tokio::select! {
        done = work => done,
        // This process has PID 1 in its container, so SIGTERM has no effect without a handler. When this process exits,
        // all processes of the container end. The next start of the container repeats unfinished work.
        () = terminated() => std::process::exit(TERMINATED),
    };
    let succeeded = result.is_ok();
    let report = match result {
        Ok(contents) => Report::Done(contents),
        Err(trouble) => Report::Failed {
            reason: trouble.reason.as_str().to_owned(),
            message: shorten(trouble.message),
        },
    };
    let text = serde_json::to_string(&report).unwrap_or_default();
    if let Err(error) = fs::write(&paths.report, &text) {
        tracing::warn!(%error, "cannot write the report for the kubelet");
    }
    tracing::info!(report = text, "command ended");
    succeeded
}

/// Waits for SIGTERM, or forever if the handler cannot be installed.
async fn terminated() {
    if let Ok(mut signals) = signal(SignalKind::terminate()) {
        signals.recv().await;
    } else {
        std::future::pending::<()>().await;
    }
}

pub(crate) fn shorten(mut message: String) -> String {
    // The termination message contains the whole report, with JSON syntax and escape sequences, so the error message
    // gets half of the limit.
    message.truncate(message.floor_char_boundary(MESSAGE_LIMIT / 2));
    message
}

/// The remedy if recorded changes cannot be replayed.
const OTHER_POINT: &str =
    "create a new EtcdRestore with another point in spec.continuous.at, or restore a backup";

/// An error of the recorded changes, which cannot be restored to the requested point.
fn unusable(why: &str) -> Trouble {
    let message = format!("the recorded changes cannot be restored: {why}; {OTHER_POINT}");
    Trouble::new(Reason::SnapshotUnreadable, message)
}

/// An error of the data volume. The message contains a remedy if one is known.
fn volume_trouble(doing: &str, path: &Path, error: &io::Error) -> Trouble {
    let remedy = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ": a restore needs about twice the size of the backup; give the members larger volumes"
        }
        io::ErrorKind::PermissionDenied => {
            ": the volume must be writable for the pod's user; set spec.pod.securityContext.fsGroup of the cluster"
        }
        _ => "",
    };
    Trouble::new(
        Reason::SeedFailed,
        format!("cannot {doing} {}: {error}{remedy}", path.display()),
    )
}

/// The content of the Secret that is mounted in `directory`.
pub(crate) fn mounted(directory: Option<&Path>) -> Result<Option<SecretData>, Trouble> {
    directory
        .map(|directory| {
            store::mounted(directory).map_err(|error| volume_trouble("read", directory, &error))
        })
        .transpose()
}

fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<Option<T>, Trouble> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(volume_trouble("read", path, &error)),
    };
    // A file with invalid JSON counts as missing.
    Ok(serde_json::from_slice(&text).ok())
}

/// Writes a file under a temporary name, and renames it. The file is therefore complete or missing.
fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), Trouble> {
    let text = serde_json::to_vec(value).unwrap_or_default();
    let unfinished = path.with_extension("unfinished");
    let write = || -> io::Result<()> {
        let mut file = File::create(&unfinished)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&unfinished, path)?;
        sync_parent(path)
    };
    write().map_err(|error| volume_trouble("write", path, &error))
}

/// Syncs the parent directory, so that a rename in it survives a crash.
fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

/// Syncs a directory and its subdirectories, so that their entries survive a crash.
fn sync_directories(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_directories(&entry.path())?;
        }
    }
    File::open(path)?.sync_all()
}

/// True if the data directory was created. Removes an empty directory, because etcd would start in it without data.
/// Another container in the pod may have created the empty directory.
fn is_created(paths: &Paths) -> bool {
    // `remove_dir` fails for a directory with content, so existing data is kept.
    let _ = fs::remove_dir(paths.data());
    paths.data().exists()
}

/// The description of the data in an existing data directory. `None` without a data directory.
fn already_restored(paths: &Paths) -> Result<Option<Contents>, Trouble> {
    if !is_created(paths) {
        return Ok(None);
    }
    let message = "the data volume contains a data directory that this restore did not create. The restore does not \
                   change this directory: check that no container in spec.pod of the EtcdCluster writes to the data \
                   volume";
    let contents = read_json(&paths.restored())?;
    contents
        .map(Some)
        .ok_or_else(|| Trouble::new(Reason::SeedFailed, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_volume_errors_contain_remedy() {
        use io::ErrorKind::{NotFound, PermissionDenied, QuotaExceeded, StorageFull};
        let larger = Some("give the members larger volumes");
        for (kind, expected) in [
            (StorageFull, larger),
            (QuotaExceeded, larger),
            (PermissionDenied, Some("spec.pod.securityContext.fsGroup")),
            (NotFound, None),
        ] {
            let trouble = volume_trouble("write", Path::new("/data/x"), &io::Error::from(kind));
            assert_eq!(trouble.reason, Reason::SeedFailed);
            let plain = format!("cannot write /data/x: {}", io::Error::from(kind));
            let remedy = trouble.message.strip_prefix(&plain).unwrap();
            match expected {
                Some(expected) => assert!(remedy.contains(expected), "{}", trouble.message),
                None => assert_eq!(remedy, ""),
            }
        }
    }
}
