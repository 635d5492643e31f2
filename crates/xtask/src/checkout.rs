//! The paths of the checkout, the target directory, the cache of the user, and the run folder of the testbed. Creates
//! no files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::shell;

/// The default folder for the run folders of all testbeds on this machine.
const RUN_BASE: &str = "/var/tmp/etcd-operator-testbed";

/// The root of the checkout in which cargo runs. It can differ from the checkout in which xtask was compiled, because
/// checkouts can share a target directory.
pub(crate) fn root() -> PathBuf {
    let here = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    here.ancestors().nth(2).unwrap_or(&here).to_path_buf()
}

/// All files in `folder` and its subfolders, sorted. Skips hidden files and folders, symbolic links, and target
/// directories.
pub(crate) fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let context = || format!("cannot list {}", folder.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(context)? {
        let path = entry.with_context(context)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with('.') || name == "target" || path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            found.extend(files(&path)?);
        } else {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

pub(crate) fn testbed_sources() -> PathBuf {
    root().join("e2e/testbed")
}

/// Cargo's target directory.
pub(crate) fn target() -> Result<PathBuf> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let text = shell::output(
        Command::new(cargo)
            .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
            .current_dir(root()),
    )?;
    let metadata: serde_json::Value = serde_json::from_str(&text).context("cargo metadata")?;
    let target = metadata["target_directory"]
        .as_str()
        .context("cargo metadata names no target directory")?;
    Ok(target.into())
}

/// The folder with the programs that xtask has built, which all checkouts of this user share.
pub(crate) fn cache() -> Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cache"),
    };
    Ok(base.join("etcd-operator-testbed"))
}

/// The folder with the sockets, data and logs of this checkout's testbed.
pub(crate) fn run_folder() -> PathBuf {
    let base = std::env::var_os("ETCD_OPERATOR_TESTBED_DIR")
        .map_or_else(|| RUN_BASE.into(), PathBuf::from);
    base.join(identity())
}

/// The folder with the files that reserve slots for testbeds. All checkouts on the machine share this folder.
pub(crate) fn slots_folder() -> PathBuf {
    Path::new(RUN_BASE).join("slots")
}

/// Eight hexadecimal digits that identify the checkout: the start of a hash of its path.
pub(crate) fn identity() -> String {
    hex::encode(&Sha256::digest(root().as_os_str().as_encoded_bytes())[..4])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkout_root_contains_workspace() {
        assert!(root().join("Cargo.toml").is_file());
        assert!(testbed_sources().join("init.c").is_file());
    }
}
