//! Tools for a release. Each is built once into the cache.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use super::{MODULES, build, cached, digest, go_version, key};
use crate::{checkout, image, shell};

/// Version of cargo-cyclonedx.
pub(crate) const CYCLONEDX: &str = "0.5.9";

/// Helm, as in the testbed.
pub(crate) fn helm() -> Result<PathBuf> {
    let module = MODULES.iter().find(|module| module.name == "helm");
    let module = module.context("unknown module")?;
    let source = checkout::testbed_sources().join(module.name);
    let (cache, _lock) = super::lock()?;
    let folder = cached(
        &cache,
        module.name,
        &key(&source, &go_version()?)?,
        |folder| build(module, "", &source, folder),
    )?;
    Ok(folder.join("helm"))
}

/// cargo-cyclonedx, the tool of the CycloneDX project for the software bill of materials of Rust programs.
pub(crate) fn cyclonedx() -> Result<PathBuf> {
    let (cache, _lock) = super::lock()?;
    let key = digest(&[CYCLONEDX.as_bytes()]);
    let folder = cached(&cache, "cargo-cyclonedx", &key, |folder| {
        let mut cargo = Command::new(image::cargo());
        cargo.args([
            "install",
            "cargo-cyclonedx",
            "--locked",
            "--version",
            CYCLONEDX,
        ]);
        cargo
            .arg("--root")
            .arg(folder)
            .env_remove("CARGO_TARGET_DIR");
        // Outside of the checkout, whose configuration would change the build.
        shell::output(cargo.current_dir(&cache)).map(|_| ())
    })?;
    let program = folder.join("bin/cargo-cyclonedx");
    fs::metadata(&program).with_context(|| program.display().to_string())?;
    Ok(program)
}
