//! Programs for releases, for the documentation site, and for tests. Each is built or unpacked once, into the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::{Build, MODULES, Module, PLAIN, build, cached, digest, go_version, key};
use crate::{checkout, image, shell};

pub(crate) const CYCLONEDX: &str = "0.5.9";
const MDBOOK: &str = "0.5.4";
const HYPERLINK: &str = "0.3.2";

/// The validator of bundles for the Operator Lifecycle Manager. Only `dist` and its tests need it.
const OLM: Module = Module {
    name: "olm",
    builds: &[Build {
        output: "olm-validate",
        packages: &["."],
        ..PLAIN
    }],
};

pub(crate) fn helm() -> Result<PathBuf> {
    let module = MODULES.iter().find(|module| module.name == "helm");
    tool(module.context("unknown module")?, "helm")
}

/// The validator of the operator framework. Usage: `olm-validate DIRECTORY`.
pub(crate) fn olm_validate() -> Result<PathBuf> {
    tool(&OLM, "olm-validate")
}

/// The controllers of cert-manager. Only one test with `--full` needs them, and their build takes minutes. Usage:
/// `cert-manager --kubeconfig=FILE --namespace=NAMESPACE`.
pub(crate) fn cert_manager() -> Result<PathBuf> {
    let module = Module {
        name: "cert-manager",
        builds: &[Build {
            output: "cert-manager",
            packages: &["."],
            ..PLAIN
        }],
    };
    tool(&module, "cert-manager")
}

/// actionlint, which checks GitHub workflows. Only unit tests of xtask need it.
#[cfg(test)]
pub(crate) fn actionlint() -> Result<PathBuf> {
    let module = Module {
        name: "actionlint",
        builds: &[Build {
            packages: &["github.com/rhysd/actionlint/cmd/actionlint"],
            ..PLAIN
        }],
    };
    tool(&module, "actionlint")
}

/// Krew, the plugin manager of kubectl. Only unit tests of xtask need it.
#[cfg(test)]
pub(crate) fn krew() -> Result<PathBuf> {
    let module = Module {
        name: "krew",
        builds: &[Build {
            packages: &["sigs.k8s.io/krew/cmd/krew"],
            ..PLAIN
        }],
    };
    tool(&module, "krew")
}

/// The folder with the programs of Debian's Prometheus package.
pub(super) fn prometheus(cache: &Path) -> Result<PathBuf> {
    unpacked(cache, "prometheus")
}

/// The folder with the programs of a Debian package. The package is unpacked into the cache and not installed, because
/// the installation of Prometheus starts a server.
fn unpacked(cache: &Path, package: &str) -> Result<PathBuf> {
    let folder = cached(cache, package, &digest(&[b"debian"]), |folder| {
        shell::output(Command::new("apt-get").arg("update"))?;
        let mut download = Command::new("apt-get");
        shell::output(download.args(["download", package]).current_dir(folder))?;
        let mut files = fs::read_dir(folder)?;
        let package = files.next().context("apt-get downloaded no file")??.path();
        let mut unpack = Command::new("dpkg-deb");
        shell::output(unpack.arg("--extract").arg(&package).arg(folder))?;
        Ok(fs::remove_file(package)?)
    })?;
    Ok(folder.join("usr/bin"))
}

/// promtool, which checks rules and expressions of Prometheus.
#[cfg(test)]
pub(crate) fn promtool() -> Result<PathBuf> {
    if let Some(program) = shell::which("promtool") {
        return Ok(program);
    }
    let (cache, _lock) = super::lock()?;
    Ok(prometheus(&cache)?.join("promtool"))
}

/// Lua 5.4, the language of Argo CD's health checks.
#[cfg(test)]
pub(crate) fn lua() -> Result<PathBuf> {
    if let Some(program) = shell::which("lua5.4") {
        return Ok(program);
    }
    let (cache, _lock) = super::lock()?;
    Ok(unpacked(&cache, "lua5.4")?.join("lua5.4"))
}

/// The paths of the etcd programs that are built from Go modules, without etcd 3.3.
#[cfg(test)]
pub(crate) fn etcds() -> Result<Vec<PathBuf>> {
    let modules = MODULES
        .iter()
        .filter(|module| module.name.starts_with("etcd-"));
    modules.map(|module| tool(module, "etcd")).collect()
}

/// The path of a module's program. Builds the program if it is not in the cache.
fn tool(module: &Module, program: &str) -> Result<PathBuf> {
    let source = checkout::testbed_sources().join(module.name);
    let (cache, _lock) = super::lock()?;
    let folder = cached(
        &cache,
        module.name,
        &key(&source, &go_version()?)?,
        |folder| build(module, "", &source, folder),
    )?;
    Ok(folder.join(program))
}

/// cargo-cyclonedx, which writes the software bill of materials of Rust programs.
pub(crate) fn cyclonedx() -> Result<PathBuf> {
    installed("cargo-cyclonedx", CYCLONEDX)
}

/// mdBook, which builds the documentation site.
pub(crate) fn mdbook() -> Result<PathBuf> {
    installed("mdbook", MDBOOK)
}

/// hyperlink, which checks links in HTML files.
pub(crate) fn hyperlink() -> Result<PathBuf> {
    installed("hyperlink", HYPERLINK)
}

/// The path of a program from crates.io. If it is not in the cache, it is compiled with the dependencies of its own
/// lock file.
fn installed(name: &str, version: &str) -> Result<PathBuf> {
    let (cache, _lock) = super::lock()?;
    let key = digest(&[version.as_bytes()]);
    let folder = cached(&cache, name, &key, |folder| {
        let mut cargo = Command::new(image::cargo());
        cargo.args(["install", name, "--locked", "--version", version]);
        cargo
            .arg("--root")
            .arg(folder)
            .env_remove("CARGO_TARGET_DIR");
        // cargo runs in the cache folder, because the `.cargo/config.toml` of the checkout would change the build.
        shell::output(cargo.current_dir(&cache)).map(|_| ())
    })?;
    let program = folder.join("bin").join(name);
    fs::metadata(&program).with_context(|| program.display().to_string())?;
    Ok(program)
}
