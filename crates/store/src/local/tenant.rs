//! The subdirectory of one namespace in a shared directory, and the quota of this namespace (invariant 13).

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::port::Error;

/// The directory with one subdirectory for each namespace except the operator's own.
const NAMESPACES: &str = "namespaces";

/// An upload measures the used space again after it has written this number of bytes. Each concurrent upload of a
/// namespace can exceed the quota by at most this number of bytes.
const STEP: u64 = 64 << 20;

/// Maximum depth of directories in which the used space is measured. A path in the spec of an object has at most 512
/// parts.
const MAX_DEPTH: usize = 1_024;

/// A namespace that is not the operator's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tenant {
    pub(super) namespace: String,
    /// Maximum total size in bytes of the namespace's files. `None` means no limit.
    pub(super) quota: Option<u64>,
}

impl Tenant {
    /// The directory of the namespace, relative to the root.
    pub(super) fn below(&self) -> PathBuf {
        Path::new(NAMESPACES).join(&self.namespace)
    }

    /// Fails if a part of `path` below `root` is a symbolic link, because a link could lead to the files of another
    /// namespace. Accepts parts that do not exist.
    pub(super) fn check_links(root: &Path, path: &Path) -> Result<(), Error> {
        let below = path.strip_prefix(root).unwrap_or(path);
        let mut part = root.to_owned();
        for name in below.components() {
            part.push(name);
            match std::fs::symlink_metadata(&part) {
                Ok(metadata) if metadata.is_symlink() => {
                    return Err(Error::Invalid {
                        field: "path".to_owned(),
                        problem: format!(
                            "{} is a symbolic link, which is not followed for this namespace: replace it by a directory or \
                             file",
                            part.display()
                        ),
                    });
                }
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                _ => {}
            }
        }
        Ok(())
    }
}

/// The room that an upload has in the quota of its namespace.
#[derive(Debug)]
pub(super) struct Room {
    tenant: Tenant,
    base: PathBuf,
    quota: u64,
    /// The used space at the last measurement, in bytes.
    used: u64,
    /// Bytes that this upload has written since the last measurement.
    written: u64,
}

impl Room {
    /// Measures the used space in the directory `base` of a namespace. Returns `None` if the namespace has no quota.
    /// Blocks the thread.
    ///
    /// # Errors
    /// Fails if the quota is used up, or if the used space cannot be determined.
    pub(super) fn new(tenant: &Tenant, base: &Path) -> Result<Option<Self>, Error> {
        let Some(quota) = tenant.quota else {
            return Ok(None);
        };
        let mut room = Self {
            tenant: tenant.clone(),
            base: base.to_owned(),
            quota,
            used: 0,
            written: 0,
        };
        room.measure()?;
        room.take(1)?;
        room.written = 0;
        Ok(Some(room))
    }

    /// Reserves room for `bytes` before they are written. Blocks the thread.
    ///
    /// # Errors
    /// Fails if the quota would be exceeded, or if the used space cannot be determined.
    pub(super) fn take(&mut self, bytes: u64) -> Result<(), Error> {
        let fits = |room: &Self| room.used + room.written + bytes <= room.quota;
        if !fits(self) || self.written + bytes > STEP {
            self.measure()?;
        }
        if !fits(self) {
            return Err(self.exceeded());
        }
        self.written += bytes;
        Ok(())
    }

    fn measure(&mut self) -> Result<(), Error> {
        let used = size_of(&self.base, 0).map_err(|error| {
            Error::Other(format!(
                "the size of the backups of namespace {} cannot be determined: {error}",
                self.tenant.namespace
            ))
        })?;
        (self.used, self.written) = (used, 0);
        Ok(())
    }

    fn exceeded(&self) -> Error {
        Error::Full(format!(
            "the backups of namespace {} in the operator's directory use {} of {} bytes, the quota of each namespace \
             (--local-quota, backups.localQuota of the chart): delete old backups or let the administrator raise the quota",
            self.tenant.namespace, self.used, self.quota
        ))
    }
}

/// The total size in bytes of all files below a directory, including unfinished files. Follows no symbolic links.
fn size_of(directory: &Path, depth: usize) -> std::io::Result<u64> {
    let is_gone = |error: &std::io::Error| error.kind() == ErrorKind::NotFound;
    let entries = match std::fs::read_dir(directory) {
        Err(error) if is_gone(&error) => return Ok(0),
        entries => entries?,
    };
    if depth > MAX_DEPTH {
        return Err(std::io::Error::other("too many nested directories"));
    }
    let mut size = 0;
    for entry in entries {
        let entry = entry?;
        match entry.metadata() {
            Err(error) if is_gone(&error) => {}
            Err(error) => return Err(error),
            Ok(metadata) if metadata.is_dir() => size += size_of(&entry.path(), depth + 1)?,
            Ok(metadata) => size += metadata.len(),
        }
    }
    Ok(size)
}
