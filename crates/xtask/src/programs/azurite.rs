//! Azurite, the server for Azure Blob Storage in the tests, from a pinned npm package. Without Node.js, the testbed has
//! no Azurite, and only the tests with Azure Blob Storage fail.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::{cached, digest};
use crate::{checkout, shell};

/// Files in `e2e/testbed/azurite`. A change of their content creates a new cache folder, because the name of the folder
/// contains a hash of them.
const FILES: &[&str] = &["package.json", "package-lock.json", "serve.js"];

/// Returns the cache folder with the npm package and `serve.js`. Installs the package if the folder does not exist.
pub(super) fn ensure(cache: &Path) -> Result<PathBuf> {
    let node = shell::output(Command::new("node").arg("--version")).context(
        "Node.js is missing: install version 18 or later with npm (on Debian: `apt-get install nodejs npm`)",
    )?;
    let source = checkout::testbed_sources().join("azurite");
    let mut parts = vec![node.into_bytes()];
    for file in FILES {
        let path = source.join(file);
        parts.push(fs::read(&path).with_context(|| path.display().to_string())?);
    }
    let key = digest(&parts.iter().map(Vec::as_slice).collect::<Vec<_>>());
    cached(cache, "azurite", &key, |folder| {
        for file in FILES {
            fs::copy(source.join(file), folder.join(file)).context(*file)?;
        }
        let mut npm = Command::new("npm");
        npm.current_dir(folder).args([
            "ci",
            "--omit=dev",
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
        ]);
        shell::output(&mut npm)?;
        Ok(())
    })
}
