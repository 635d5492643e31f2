//! Reads the fetched snapshot on the volume.

use std::fs::File;
use std::io::Read as _;

use etcd::{InspectError, Inspected, Inspector};

use super::{Contents, Paths, read_json, volume_trouble};

use crate::reason::{Reason, Trouble};

/// The description of the snapshot on the volume. `None` if the snapshot is missing, incomplete or damaged, for
/// example after a crash of the node.
pub(super) fn fetched_before(paths: &Paths) -> Result<Option<Contents>, Trouble> {
    let Some(expected) = read_json::<Contents>(&paths.expected())? else {
        return Ok(None);
    };
    let Ok(file) = File::open(paths.snapshot()) else {
        return Ok(None);
    };
    let found = inspect(file).map_err(|error| volume_trouble("read", &paths.snapshot(), &error))?;
    let is_complete = found.is_ok_and(|found| hex::encode(found.sha256) == expected.sha256);
    Ok(is_complete.then_some(expected))
}

/// Reads a snapshot file and verifies its checksum.
pub(super) fn inspect(mut file: File) -> std::io::Result<Result<Inspected, InspectError>> {
    let mut inspector = Inspector::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(inspector.finish()),
            read => inspector.push(&buffer[..read]),
        }
    }
}

pub(super) fn unreadable(why: &str) -> Trouble {
    Trouble::new(
        Reason::SnapshotUnreadable,
        format!(
            "the snapshot cannot be restored: {why}; if the snapshot comes from a backup, restore another backup"
        ),
    )
}
