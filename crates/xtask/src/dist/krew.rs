//! The plugin `kubectl etcd`: an archive for each architecture, and the manifest for Krew
//! (<https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest/>).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::listing;
use super::names::Release;
use crate::{archive, checkout, oci};

const API_VERSION: &str = "krew.googlecontainertools.github.com/v1alpha2";
/// The file name of the program, by which kubectl finds the plugin.
const PROGRAM: &str = "kubectl-etcd";
/// The license in the checkout and in the archive. The index of Krew requires a license in each archive.
const LICENSE: &str = "LICENSE";
/// The architectures of the plugin, with their names in Go.
const ARCHITECTURES: [&str; 2] = ["amd64", "arm64"];

/// Writes the archive for this machine's architecture, copies the archives `others`, and writes the manifest if the
/// URL of the files is known. Returns the names of the archives.
pub(super) fn write(
    release: &Release,
    built: &[PathBuf],
    others: &[PathBuf],
    new: &Path,
) -> Result<Vec<String>> {
    let mut programs = built.iter();
    let program = programs.find(|file| file.file_name().is_some_and(|name| name == PROGRAM));
    let program = program.with_context(|| format!("cargo built no program {PROGRAM}"))?;
    let mut names = vec![release.plugin(archive::architecture())];
    let own = new.join(&names[0]);
    fs::write(&own, package(program)?).with_context(|| own.display().to_string())?;
    for other in others {
        let name = other.file_name().unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        let mut missing = ARCHITECTURES.map(|one| release.plugin(one)).to_vec();
        missing.retain(|one| !names.contains(one));
        if !missing.contains(&name) {
            bail!(
                "--add-plugin {}: not an archive of this release for another architecture. The expected name is one of [{}]",
                other.display(),
                missing.join(", ")
            );
        }
        fs::copy(other, new.join(&name)).with_context(|| other.display().to_string())?;
        names.push(name);
    }
    names.sort();
    if let Some(address) = &release.files {
        let manifest = manifest(release, address, &names, new)?;
        let file = new.join(listing::PLUGIN);
        fs::write(&file, serde_yaml_ng::to_string(&manifest)?)
            .with_context(|| file.display().to_string())?;
    }
    Ok(names)
}

/// The archive with the program and the license. It contains no times, so that archives are reproducible.
fn package(program: &Path) -> Result<Vec<u8>> {
    let mut tar = tar::Builder::new(Vec::new());
    let license = checkout::root().join(LICENSE);
    for (file, name, mode) in [(program, PROGRAM, 0o755), (&*license, LICENSE, 0o644)] {
        let bytes = fs::read(file).with_context(|| file.display().to_string())?;
        archive::append(&mut tar, name, mode, bytes.len() as u64, &*bytes)?;
    }
    oci::gzip(&tar.into_inner()?)
}

/// The manifest for the archives in `folder`, which users download from `address`.
fn manifest(release: &Release, address: &str, names: &[String], folder: &Path) -> Result<Value> {
    let mut platforms = Vec::new();
    for architecture in ARCHITECTURES {
        let name = release.plugin(architecture);
        if names.contains(&name) {
            platforms.push(json!({
                "selector": {"matchLabels": {"os": "linux", "arch": architecture}},
                "uri": format!("{address}/{name}"),
                "sha256": listing::sum(&folder.join(&name), &name)?.sha256,
                "bin": PROGRAM,
            }));
        }
    }
    let mut manifest = json!({
        "apiVersion": API_VERSION,
        "kind": "Plugin",
        "metadata": {"name": listing::PLUGIN.trim_end_matches(".yaml")},
        "spec": {
            "version": format!("v{}", release.version),
            "shortDescription": "Show and change the clusters of etcd-operator",
            "description": "Shows the members, backups and problems of EtcdClusters, runs etcdctl with endpoints and \
                            certificates set, upgrades clusters, replaces members, makes backups and restores them, \
                            and collects a support bundle without Secrets.\n",
            "caveats": "The plugin needs the operators of etcd-operator in the Kubernetes cluster. To query members, \
                        you need the verbs create and get for pods/exec.\n",
            "platforms": platforms,
        },
    });
    if let Some(source) = &release.origin.source {
        manifest["spec"]["homepage"] = json!(source);
    }
    Ok(manifest)
}
