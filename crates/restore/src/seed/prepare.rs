//! Creates the data directory from the snapshot with the `etcdutl` of the etcd image. The directory has a temporary
//! name until it is verified, so etcd never starts on an unverified directory.
//!
//! `etcdutl` verifies the checksum of the copied data. This program therefore reads only the pages with the revisions.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use etcd::{Revisions, WalkError};
use member::{DataDirectorySettings, Origin};

use super::page_cache::release_copied_pages;
use super::replay::{after_replay, replay_changes};
use super::snapshot::{fetched_before, unreadable};
use super::{
    Contents, Paths, already_restored, read_json, sync_directories, sync_parent, volume_trouble,
    write_json,
};

use crate::reason::{Reason, Trouble};

/// Maximum number of bytes of the tool's output in an error message.
const OUTPUT_LIMIT: usize = 1000;

/// The error of etcdutl on a full volume.
const FULL: &str = "no space left on device";

/// Path of the database in a data directory.
const DATABASE: &str = "member/snap/db";

/// The input for the creation of the data directory.
#[derive(Clone, Debug)]
pub struct Prepare {
    /// The tool that creates the data directory, and its arguments.
    pub settings: DataDirectorySettings,
    /// etcd, for the replay of recorded changes.
    pub etcd: PathBuf,
    /// The paths in the pod.
    pub paths: Paths,
}

/// Creates the data directory, unless it exists. Returns the revision, size and checksums of the data that etcd will
/// serve. With `settings.replay`, the data directory contains the recorded changes.
///
/// # Errors
///
/// Fails if no snapshot was fetched, if the tool or the replay of recorded changes fails, or if the database has
/// another revision than the snapshot or the last change.
pub fn prepare(arguments: &Prepare) -> Result<Contents, Trouble> {
    let paths = &arguments.paths;
    if let Some(contents) = already_restored(paths)? {
        return Ok(contents);
    }
    let expected: Contents = read_json(&paths.expected())?.ok_or_else(|| {
        Trouble::new(
            Reason::SeedFailed,
            "the volume has no fetched snapshot: the container fetch must run first",
        )
    })?;
    let served = expected_contents(paths, expected, arguments.settings.bump_revision)?;
    let created = paths.work().join("data");
    remove_dir(&created)?;
    run_tool(arguments, &created).map_err(|trouble| or_changed(paths, trouble))?;
    check_database(&created.join(DATABASE), &served)?;
    let served = with_changes(arguments, &created, served)?;
    sync_directories(&created).map_err(|error| volume_trouble("write", &created, &error))?;
    write_json(&paths.restored(), &served)?;
    let commit = || {
        // Invariant 9: only a verified data directory gets the name that etcd uses.
        fs::rename(&created, paths.data())?;
        sync_parent(&paths.data())
    };
    commit()
        .map_err(|error| volume_trouble("rename the data directory to", &paths.data(), &error))?;
    if let Err(error) = fs::remove_dir_all(paths.work()) {
        tracing::warn!(%error, "cannot delete the fetched snapshot from the volume");
    }
    Ok(served)
}

/// Replays the recorded changes into the created data directory, and checks its revision.
fn with_changes(
    arguments: &Prepare,
    created: &Path,
    served: Contents,
) -> Result<Contents, Trouble> {
    let Prepare {
        settings,
        etcd,
        paths,
    } = arguments;
    let Some(replay) = &settings.replay else {
        return Ok(served);
    };
    replay_changes(etcd, (settings, replay), created, paths)?;
    // Invariant 38: the database must have exactly the requested revision.
    let served = after_replay(served, Some(replay.revision));
    check_database(&created.join(DATABASE), &served)?;
    Ok(served)
}

/// The revision, size and checksums of the data that etcd will serve after the restore.
pub(super) fn expected_contents(
    paths: &Paths,
    expected: Contents,
    bump_revision: Option<u64>,
) -> Result<Contents, Trouble> {
    let snapshot = check_snapshot(&paths.snapshot(), &expected)?;
    Ok(Contents {
        revision: raised(&snapshot, bump_revision),
        // With `bumpRevision`, etcdutl marks the old revisions as compacted, which changes the hash, so the hash in the
        // manifest does not apply.
        hash: expected.hash.filter(|_| bump_revision.is_none()),
        origin: expected.origin.map(|origin| Origin {
            bump_revision: bump_revision.unwrap_or_default(),
            ..origin
        }),
        ..expected
    })
}

/// The revision of the restored store. etcdutl adds `--bump-revision` to the revision of the last key
/// (`modifyLatestRevision`). The last key has a lower revision than the store if the store is empty, or was compacted
/// after the last key.
fn raised(snapshot: &Revisions, by: Option<u64>) -> i64 {
    match by {
        None => snapshot.store_revision(),
        Some(by) => snapshot
            .revision
            .saturating_add(i64::try_from(by).unwrap_or(i64::MAX)),
    }
}

/// Fails if the file was replaced after it was fetched. Compares only the size and the revision, because etcdutl
/// detects damaged content.
fn check_snapshot(path: &Path, expected: &Contents) -> Result<Revisions, Trouble> {
    let found = revisions(path)?;
    let size = fs::metadata(path).map_err(|error| volume_trouble("read", path, &error))?;
    if size.len() != expected.size || found.store_revision() != expected.revision {
        return Err(changed(path));
    }
    Ok(found)
}

/// If the tool has failed because the snapshot on the volume is damaged, deletes the snapshot and reports this cause.
fn or_changed(paths: &Paths, trouble: Trouble) -> Trouble {
    match fetched_before(paths) {
        Ok(None) => changed(&paths.snapshot()),
        Ok(Some(_)) | Err(_) => trouble,
    }
}

fn changed(snapshot: &Path) -> Trouble {
    let _ = fs::remove_file(snapshot);
    unreadable("the snapshot changed on the volume after the fetch")
}

fn check_database(path: &Path, expected: &Contents) -> Result<(), Trouble> {
    let found = revisions(path)?;
    if found.store_revision() != expected.revision {
        return Err(unreadable(&format!(
            "the restored database has revision {} instead of {}",
            found.store_revision(),
            expected.revision
        )));
    }
    Ok(())
}

fn revisions(path: &Path) -> Result<Revisions, Trouble> {
    let trouble = |error| volume_trouble("read", path, &error);
    let file = File::open(path).map_err(trouble)?;
    Revisions::of_file(&file).map_err(|error| match error {
        WalkError::Read(error) => trouble(error),
        WalkError::Database(error) => unreadable(&error.to_string()),
    })
}

fn remove_dir(path: &Path) -> Result<(), Trouble> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(volume_trouble("remove", path, &error))
        }
        _ => Ok(()),
    }
}

fn run_tool(arguments: &Prepare, directory: &Path) -> Result<(), Trouble> {
    let Prepare {
        settings, paths, ..
    } = arguments;
    let DataDirectorySettings {
        tool,
        name,
        peer_url,
        token,
        bump_revision,
        replay: _,
    } = settings;
    // `--mark-compacted` ends watches that started before the restore. Without this flag, a client could continue its
    // watch although the history has changed.
    let bump = bump_revision.map(|by| {
        [
            format!("--bump-revision={by}"),
            "--mark-compacted".to_owned(),
        ]
    });
    let mut command = Command::new(tool);
    command
        // etcdctl before 3.4 uses the v2 API by default.
        .env("ETCDCTL_API", "3")
        .args(["snapshot", "restore"])
        .arg(paths.snapshot())
        .arg(format!("--name={name}"))
        .arg(format!("--initial-cluster={name}={peer_url}"))
        .arg(format!("--initial-cluster-token={token}"))
        .arg(format!("--initial-advertise-peer-urls={peer_url}"))
        .arg(format!("--data-dir={}", directory.display()))
        .args(bump.iter().flatten());
    let database = directory.join(DATABASE);
    let output = release_copied_pages(&paths.snapshot(), &database, || command.output());
    let output = output.map_err(|error| {
        Trouble::new(
            Reason::SeedFailed,
            format!(
                "cannot run {}: {error}; spec.repository must contain the images of etcd",
                tool.display()
            ),
        )
    })?;
    if output.status.success() {
        return Ok(());
    }
    if let Some(signal) = output.status.signal() {
        // A signal ended the tool, so the snapshot is not the cause of the failure. The kubelet restarts the container.
        let text = format!(
            "{} was ended by signal {signal}: check the memory of the node and spec.pod.resources",
            tool.display()
        );
        return Err(Trouble::new(Reason::PodNotStarting, text));
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    if stderr.contains(FULL) {
        let full = io::ErrorKind::StorageFull.into();
        return Err(volume_trouble("create", directory, &full));
    }
    let start = stderr.ceil_char_boundary(stderr.len().saturating_sub(OUTPUT_LIMIT));
    Err(unreadable(&format!(
        "{} ended with {}: {}",
        tool.display(),
        output.status,
        stderr[start..].trim()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Measured with etcdutl 3.7.3: for an empty store, `--bump-revision=1000000000` results in the revision
    /// 1000000000, not 1000000001.
    #[test]
    fn bump_revision_is_added_to_revision_of_last_key() {
        let snapshot = |revision, compacted| Revisions {
            revision,
            compacted,
        };
        for (revision, compacted, unchanged, by_1000) in
            [(0, 0, 1, 1000), (21, 0, 21, 1021), (10, 15, 15, 1010)]
        {
            let snapshot = snapshot(revision, compacted);
            assert_eq!(raised(&snapshot, None), unchanged);
            assert_eq!(raised(&snapshot, Some(1000)), by_1000);
        }
    }
}
