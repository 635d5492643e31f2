//! Fetches recorded changes, and replays them before the member serves.
//!
//! The container `fetch` copies the segments (the files with the recorded changes) to the data volume, so the container
//! of etcd needs no access to the store (invariant 14). The program in the container of etcd starts etcd on localhost
//! with the restored snapshot, replays the segments, and stops etcd. During the replay, the data directory has its
//! temporary name. If the program is interrupted, the next start begins again with the snapshot.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::thread;

use api::problem::Chain;
use clap::Args;
use continuous::{BaseName, CopiedPart, CopyError, EncryptedStore, ReadError, copy_chain};
use member::{DataDirectorySettings, Origin, Replay};
use store::Store;
use store::progress::{Meter, Moved};

use super::content::{EncryptionKeys, in_content};
use super::local_etcd::LocalEtcd;
use super::{Contents, Paths, unusable, volume_trouble};
use crate::reason::{Reason, Trouble};
use crate::source;

/// Recorded changes that are fetched together with the snapshot from which they continue (the base).
#[derive(Args, Clone, Debug, Default)]
pub struct ReplaySource {
    /// Prefix of the recorded changes in the store
    #[arg(
        long,
        value_name = "PREFIX",
        requires_all = ["source", "replay_base", "replay_revision"]
    )]
    pub replay_prefix: Option<String>,
    /// Name of the base
    #[arg(long, value_name = "NAME", requires = "replay_prefix")]
    pub replay_base: Option<String>,
    /// Revision at which the replay ends
    #[arg(long, value_name = "REVISION", requires = "replay_prefix")]
    pub replay_revision: Option<i64>,
}

impl ReplaySource {
    /// The prefix, the base and the last revision. `None` if no changes are replayed.
    fn named(&self) -> Option<(&str, &str, i64)> {
        let prefix = self.replay_prefix.as_deref()?;
        Some((prefix, self.replay_base.as_deref()?, self.replay_revision?))
    }

    /// Decrypts and verifies the segments, and copies them to the data volume. With `keys`, the segments must be
    /// encrypted. `snapshot` is the size of the fetched snapshot. Does nothing if no changes are replayed.
    pub(super) async fn fetch(
        &self,
        (store, keys): (&dyn Store, Option<EncryptionKeys>),
        paths: &Paths,
        (snapshot, meter): (u64, &Meter),
    ) -> Result<(), Trouble> {
        let Some((prefix, base, revision)) = self.named() else {
            return Ok(());
        };
        let (name, directory) = (parse_base(base)?, paths.changes());
        remove(&directory)?;
        let write = |part: &CopiedPart| -> io::Result<()> {
            let path = directory.join(&part.key);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            // The file is not synced, because the replay verifies all files.
            fs::write(path, &part.content)?;
            meter.set(Moved {
                bytes: snapshot + part.bytes,
                total: Some(snapshot + part.total),
            });
            Ok(())
        };
        let (secret, keys) = keys.map(|keys| (keys.secret, keys.keys)).unzip();
        let store = EncryptedStore::for_reading(store, keys);
        let copied = copy_chain(&store, prefix, name, revision, write).await;
        copied.map_err(|error| copy_trouble(&error, &directory, secret.as_deref()))
    }
}

/// The contents of a data directory after the replay up to `revision`.
pub(super) fn after_replay(contents: Contents, revision: Option<i64>) -> Contents {
    let Some(revision) = revision else {
        return contents;
    };
    Contents {
        revision,
        // The hash and the number of keys in a manifest describe the snapshot before the replay. The replay itself
        // compares the hashes in the recorded changes.
        hash: None,
        keys: None,
        origin: contents.origin.map(|origin| Origin {
            replayed_revision: Some(revision),
            ..origin
        }),
        ..contents
    }
}

fn parse_base(name: &str) -> Result<BaseName, Trouble> {
    BaseName::parse(name).ok_or_else(|| {
        let message = format!("{name:?} is not the name of a base");
        Trouble::new(Reason::SeedFailed, message)
    })
}

fn remove(directory: &Path) -> Result<(), Trouble> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(volume_trouble("remove", directory, &error))
        }
        _ => Ok(()),
    }
}

fn copy_trouble(error: &CopyError, directory: &Path, secret: Option<&str>) -> Trouble {
    match error {
        CopyError::Read(ReadError::Store { error, .. }) => source::trouble(error),
        CopyError::Read(ReadError::Encryption { error, .. }) => {
            in_content(&error.clone().into(), secret)
        }
        CopyError::Write { key, error } => volume_trouble("write", &directory.join(key), error),
        error => unusable(&Chain(error).to_string()),
    }
}

/// Replays the fetched changes into the data directory `data`, which was restored from the snapshot of the base.
/// `program` is the path of etcd. Blocks until etcd has ended.
pub(super) fn replay_changes(
    program: &Path,
    (settings, replay): (&DataDirectorySettings, &Replay),
    data: &Path,
    paths: &Paths,
) -> Result<(), Trouble> {
    let name = parse_base(&replay.base)?;
    let log = paths.work().join("etcd.log");
    let etcd = LocalEtcd::start(program, settings, data, &log)?;
    // The caller may run in a tokio runtime. A thread of a runtime must not block on another runtime, so the replay
    // runs in a new thread.
    let replayed = thread::scope(|scope| {
        let replay = || {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = runtime.enable_all().build().map_err(|error| {
                let message = format!("the replay cannot start: {error}");
                Trouble::new(Reason::SeedFailed, message)
            })?;
            runtime.block_on(etcd.replay(name, replay.revision, &paths.changes()))
        };
        let replayed = scope.spawn(replay).join();
        replayed.unwrap_or_else(|_| {
            let message = "the replay of the recorded changes has failed";
            Err(Trouble::new(Reason::SeedFailed, message))
        })
    });
    let report = replayed?;
    etcd.stop()?;
    tracing::info!(
        revision = report.revision,
        transactions = report.transactions,
        hashes = report.hashes_compared,
        "replayed the recorded changes"
    );
    // etcd may have run without fsync, so its files are synced here.
    sync_files(data).map_err(|error| volume_trouble("write", data, &error))
}

/// Syncs all files in a directory and its subdirectories.
fn sync_files(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_files(&entry.path())?;
        } else {
            File::open(entry.path())?.sync_all()?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Parsed {
        #[arg(long)]
        source: Option<String>,
        #[command(flatten)]
        replay: ReplaySource,
    }

    #[test]
    fn incomplete_replay_arguments_are_rejected() {
        let parse =
            |arguments: &[&str]| Parsed::try_parse_from([&["seed"][..], arguments].concat());
        let all = [
            "--source=s",
            "--replay-prefix=a/",
            "--replay-base=b",
            "--replay-revision=7",
        ];
        let parsed = parse(&all).unwrap();
        assert_eq!(parsed.source.as_deref(), Some("s"));
        assert_eq!(parsed.replay.named(), Some(("a/", "b", 7)));
        assert_eq!(parse(&[]).unwrap().replay.named(), None);
        for left_out in 0..all.len() {
            let mut some = all.to_vec();
            some.remove(left_out);
            assert!(parse(&some).is_err(), "{some:?}");
        }
    }

    #[test]
    fn contents_after_replay_have_requested_revision() {
        let contents = Contents {
            revision: 10,
            size: 100,
            sha256: "ab".to_owned(),
            hash: None,
            keys: Some(3),
            origin: Some(Origin {
                location_hash: "cd".to_owned(),
                bump_revision: 0,
                encrypted: Some(false),
                replayed_revision: None,
            }),
        };
        assert_eq!(after_replay(contents.clone(), None), contents);
        let replayed = after_replay(contents, Some(17));
        assert_eq!((replayed.revision, replayed.keys), (17, None));
        let origin = replayed.origin.unwrap();
        assert_eq!(origin.replayed_revision, Some(17));
    }
}
