//! The program in a seed's pod. `fetch` downloads the snapshot from a store or from a member. `start` creates and
//! verifies the data directory, and then executes etcd (exec). `fetch` writes its result as JSON to the termination
//! message of its container. `start` writes such a message only if it fails.
//!
//! The data directory is created under a temporary name, and is renamed after everything was verified. If the data
//! directory exists, the program downloads and creates nothing, so a restarted pod never overwrites live data. The
//! program does not use the Kubernetes API.

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

mod content;
mod fetch;
mod intake;
mod page_cache;
mod prepare;
mod snapshot;
mod start;

pub use fetch::{Fetch, Survivor, fetch};
pub use prepare::{Prepare, prepare};
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
    /// Create the data directory from the snapshot, verify it, and become etcd
    Start(Start),
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

    /// The directory for temporary files of the restore. It is deleted when the data directory is complete.
    fn work(&self) -> PathBuf {
        self.volume.join("restore")
    }

    fn snapshot(&self) -> PathBuf {
        self.work().join("snapshot.db")
    }

    fn expected(&self) -> PathBuf {
        self.work().join("expected.json")
    }

    /// The file that describes the snapshot in the data directory. The restore does not delete this file.
    fn restored(&self) -> PathBuf {
        self.volume.join("restored.json")
    }
}

/// Runs a command and writes its report. Returns whether the command succeeded. Does not return if `start` executes
/// etcd.
pub async fn run(command: &Command) -> bool {
    let work = async {
        match command {
            Command::Fetch(arguments) => {
                let meter = arguments.meter.clone();
                let server = progress::serve(move || meter.read());
                let fetched = tokio::select! {
                    fetched = fetch(arguments) => fetched,
                    // The progress is served until `fetch` ends. If the server ends first, `fetch` continues.
                    fetched = async { server.await; std::future::pending().await } => fetched,
                };
                (&arguments.paths, fetched)
            }
            Command::Start(arguments) => (&arguments.paths, Err(start::start(arguments).await)),
        }
    };
    let (paths, result) = tokio::select! {
        done = work => done,
        // The kernel delivers SIGTERM to the first process of a container only if the process has a handler. The other
        // processes of the container, such as etcdutl, end together with the first process. The next start repeats
        // unfinished work.
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

/// Waits for SIGTERM. Waits forever if the handler cannot be installed.
async fn terminated() {
    if let Ok(mut signals) = signal(SignalKind::terminate()) {
        signals.recv().await;
    } else {
        std::future::pending::<()>().await;
    }
}

fn shorten(mut message: String) -> String {
    // The message gets half of the limit. The other half is for the JSON around the message, and for escapes.
    message.truncate(message.floor_char_boundary(MESSAGE_LIMIT / 2));
    message
}

/// An error of the data volume, with the remedy if there is one.
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

/// The keys of the Secret that is mounted in `directory`.
fn mounted(directory: Option<&Path>) -> Result<Option<SecretData>, Trouble> {
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
    // A file that a crash has truncated counts as missing.
    Ok(serde_json::from_slice(&text).ok())
}

/// Writes a file under a temporary name and renames it, so that the file is either complete or missing.
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

/// Syncs the parent directory of `path`, so that a rename in it survives a crash.
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

/// Whether the data directory was created. Returns false for an empty directory, and removes it: a user's container may
/// have created it, and etcd would start in it without data.
fn is_created(paths: &Paths) -> bool {
    // `remove_dir` fails for a directory with content, so only an empty directory is removed.
    let _ = fs::remove_dir(paths.data());
    paths.data().exists()
}

/// The description of the snapshot in an existing data directory. `None` without a data directory.
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
