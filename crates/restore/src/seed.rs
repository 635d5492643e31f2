//! What runs in a seed's pod before etcd: `fetch` brings the snapshot, from a backup in a store or straight from a
//! member, `start` makes and verifies the data directory and becomes etcd. What was fetched, and what failed, goes out
//! through the container's termination message, as JSON.
//!
//! The data directory appears under its name by one rename, after everything was verified. If it is there, nothing is
//! fetched and nothing is made: a pod that is started again never overwrites live data. Nothing here talks to
//! Kubernetes.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
pub use member::{Contents, Report};
use serde::{Deserialize, Serialize};
use store::progress;
use tokio::signal::unix::{SignalKind, signal};

use crate::reason::{Reason, Trouble};

mod fetch;
mod forget;
mod intake;
mod prepare;
mod snapshot;
mod start;

pub use fetch::{Fetch, Survivor, fetch};
pub use prepare::{Prepare, prepare};
pub use start::Start;

/// What the kubelet keeps of a termination message, in bytes.
const MESSAGE_LIMIT: usize = 4096;

/// What shells say of a program that SIGTERM ended.
const TERMINATED: i32 = 128 + 15;

/// The commands of the seed's containers.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Bring the snapshot into the data volume and check it
    Fetch(Box<Fetch>),
    /// Make the data directory from it, verify that, and become etcd
    Start(Start),
}

/// Where things are in the seed's pod.
#[derive(Args, Clone, Debug)]
pub struct Paths {
    /// Where the data volume is mounted
    #[arg(long, default_value = api::names::DATA_MOUNT)]
    pub volume: PathBuf,
    /// Where the result is reported
    #[arg(long, default_value = "/dev/termination-log")]
    pub report: PathBuf,
}

impl Paths {
    /// etcd's data directory.
    pub fn data(&self) -> PathBuf {
        self.volume.join("data")
    }

    /// What belongs to the restore alone; removed at its end.
    fn work(&self) -> PathBuf {
        self.volume.join("restore")
    }

    fn snapshot(&self) -> PathBuf {
        self.work().join("snapshot.db")
    }

    fn expected(&self) -> PathBuf {
        self.work().join("expected.json")
    }

    /// What the data directory was made from; stays beside it.
    fn restored(&self) -> PathBuf {
        self.volume.join("restored.json")
    }
}

/// Runs a command and reports. Says whether it worked; one that became etcd says nothing any more.
pub async fn run(command: &Command) -> bool {
    let work = async {
        match command {
            Command::Fetch(arguments) => {
                let meter = arguments.meter.clone();
                let told = progress::serve(move || meter.read());
                let fetched = tokio::select! {
                    fetched = fetch(arguments) => fetched,
                    // It ends only with the process.
                    fetched = async { told.await; std::future::pending().await } => fetched,
                };
                (&arguments.paths, fetched)
            }
            Command::Start(arguments) => (&arguments.paths, Err(start::start(arguments).await)),
        }
    };
    let (paths, result) = tokio::select! {
        done = work => done,
        // The kernel delivers to a container's first process only what it handles, and its other processes, the tool
        // among them, end with it. What is half made is made again.
        () = asked_to_end() => std::process::exit(TERMINATED),
    };
    let worked = result.is_ok();
    let report = match result {
        Ok(contents) => Report::Done(contents),
        Err(trouble) => Report::Failed {
            reason: trouble.reason.as_str().to_owned(),
            message: shorten(trouble.message),
        },
    };
    let text = serde_json::to_string(&report).unwrap_or_default();
    if let Err(error) = fs::write(&paths.report, &text) {
        tracing::warn!(%error, "the result cannot be reported to the kubelet");
    }
    tracing::info!(report = text, "ended");
    worked
}

/// Without a handler nobody is waited for.
async fn asked_to_end() {
    if let Ok(mut signals) = signal(SignalKind::terminate()) {
        signals.recv().await;
    } else {
        std::future::pending::<()>().await;
    }
}

fn shorten(mut message: String) -> String {
    // Room for the JSON around it and for escapes.
    message.truncate(message.floor_char_boundary(MESSAGE_LIMIT / 2));
    message
}

/// An error of the data volume, with its remedy where there is one.
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

fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<Option<T>, Trouble> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(volume_trouble("read", path, &error)),
    };
    // A file cut off by a crash is as good as none.
    Ok(serde_json::from_slice(&text).ok())
}

/// Written under another name and renamed, so that it is there whole or not at all.
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

/// Makes a rename in the directory of `path` last.
fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

/// Makes what was created in a directory, and in those below it, last.
fn sync_directories(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_directories(&entry.path())?;
        }
    }
    File::open(path)?.sync_all()
}

/// Whether the data directory was made. One without anything in it, as a user's own container may leave it, was not:
/// etcd would begin in it with nothing.
fn is_made(paths: &Paths) -> bool {
    // Removes nothing but an empty directory.
    let _ = fs::remove_dir(paths.data());
    paths.data().exists()
}

/// What a data directory that is there already was made from.
fn already_restored(paths: &Paths) -> Result<Option<Contents>, Trouble> {
    if !is_made(paths) {
        return Ok(None);
    }
    let message =
        "the data volume holds a data directory that this restore did not make; it is left alone";
    let contents = read_json(&paths.restored())?;
    contents
        .map(Some)
        .ok_or_else(|| Trouble::new(Reason::SeedFailed, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trouble_with_the_volume_names_what_helps_where_something_does() {
        use io::ErrorKind::{NotFound, PermissionDenied, QuotaExceeded, StorageFull};
        let larger = Some("give the members larger volumes");
        for (kind, helps) in [
            (StorageFull, larger),
            (QuotaExceeded, larger),
            (PermissionDenied, Some("spec.pod.securityContext.fsGroup")),
            (NotFound, None),
        ] {
            let told = volume_trouble("write", Path::new("/data/x"), &io::Error::from(kind));
            assert_eq!(told.reason, Reason::SeedFailed);
            let plain = format!("cannot write /data/x: {}", io::Error::from(kind));
            let remedy = told.message.strip_prefix(&plain).unwrap();
            match helps {
                Some(helps) => assert!(remedy.contains(helps), "{}", told.message),
                None => assert_eq!(remedy, ""),
            }
        }
    }
}
