//! The files of a release: names, checksums and descriptions.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::path::Path;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::chart::{CLUSTER_WIDE, NAMESPACED};
use super::names::Release;

pub(super) const INSTALL: &str = "install.yaml";
pub(super) const INSTALL_CLUSTER_WIDE: &str = "install-cluster-wide.yaml";
pub(super) const CRDS: &str = "crds.yaml";
/// The manifest of the plugin. Krew requires that the file has the name of the plugin.
pub(super) const PLUGIN: &str = "etcd.yaml";
pub(super) const PROVENANCE: &str = "provenance.intoto.json";
pub(super) const README: &str = "README.md";
pub(super) const SUMS: &str = "SHA256SUMS";

/// The name and the checksum of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) name: String,
    /// The SHA-256 of the file, in hexadecimal.
    pub(super) sha256: String,
}

/// Computes the checksum of `file`, which the list of checksums calls `name`.
pub(super) fn sum(file: &Path, name: &str) -> Result<Sum> {
    let mut hash = Sha256::new();
    File::open(file)
        .and_then(|mut file| io::copy(&mut file, &mut hash))
        .with_context(|| file.display().to_string())?;
    Ok(Sum {
        name: name.to_owned(),
        sha256: hex::encode(hash.finalize()),
    })
}

/// The checksums of all files in a folder, sorted by name.
pub(super) fn sums(folder: &Path) -> Result<Vec<Sum>> {
    let context = || folder.display().to_string();
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).with_context(context)? {
        names.push(entry.with_context(context)?.file_name());
    }
    names.sort();
    names
        .iter()
        .map(|name| sum(&folder.join(name), &name.to_string_lossy()))
        .collect()
}

/// The checksums in the format of `sha256sum`.
pub(super) fn text(sums: &[Sum]) -> String {
    let line = |sum: &Sum| format!("{}  {}\n", sum.sha256, sum.name);
    sums.iter().map(line).collect()
}

/// The names of files that exist only in one list, or that have different checksums.
pub(super) fn differences(first: &[Sum], second: &[Sum]) -> Vec<String> {
    let one_side = |these: &[Sum], those: &[Sum]| -> Vec<String> {
        let missing = these.iter().filter(|sum| !those.contains(sum));
        missing.map(|sum| sum.name.clone()).collect()
    };
    let mut all = [one_side(first, second), one_side(second, first)].concat();
    all.sort();
    all.dedup();
    all
}

/// All files of a release with their descriptions.
pub(super) fn files(release: &Release) -> Vec<(String, String)> {
    let digest = release.digest.as_deref();
    let digest = digest.map_or(String::new(), |digest| {
        format!(" with the digest `{digest}`")
    });
    let manifest = |scope: &str, namespace: &str| {
        format!("the operators for {scope}, in the namespace `{namespace}`, for `kubectl apply`")
    };
    let mut files = vec![
        (
            release.image_archive(),
            format!(
                "the image `{}`{digest}, as an OCI archive",
                release.image_name()
            ),
        ),
        (
            release.chart(),
            "the Helm chart. Its default image is the image of this release".to_owned(),
        ),
        (
            CRDS.to_owned(),
            "the CRDs. Deleting them deletes every cluster".to_owned(),
        ),
        (
            INSTALL.to_owned(),
            manifest("one namespace", NAMESPACED.namespace),
        ),
        (
            INSTALL_CLUSTER_WIDE.to_owned(),
            manifest("all namespaces", CLUSTER_WIDE.namespace),
        ),
        (
            release.bundle(),
            "the bundle for the Operator Lifecycle Manager (OLM), for one namespace".to_owned(),
        ),
        (
            release.sbom(),
            "the software bill of materials of the operators (CycloneDX)".to_owned(),
        ),
        (
            PROVENANCE.to_owned(),
            "commit, tools and parameters of the build (in-toto, SLSA 1.0)".to_owned(),
        ),
        (README.to_owned(), "this page".to_owned()),
        (SUMS.to_owned(), "checksums of all other files".to_owned()),
    ];
    let plugin = "the plugin `kubectl etcd` and its license";
    let plugins = release.plugins.iter();
    files.extend(plugins.map(|name| (name.clone(), plugin.to_owned())));
    if release.files.is_some() {
        let text = "the manifest with which Krew installs the plugin";
        files.push((PLUGIN.to_owned(), text.to_owned()));
    }
    files
}

/// The page about the files of the release, in Markdown.
pub(super) fn readme(release: &Release) -> String {
    let mut rows = String::new();
    for (name, text) in files(release) {
        let _ = writeln!(rows, "| `{name}` | {text} |");
    }
    let namespace = NAMESPACED.namespace;
    let image = if release.digest.is_some() {
        String::new()
    } else {
        format!(
            "No registry serves the image of this build. Load `{}` into the nodes first, for example with `kind load image-archive` or `ctr -n k8s.io images import`.\n\n",
            release.image_archive()
        )
    };
    let mut plugins = String::new();
    for name in &release.plugins {
        let _ = writeln!(plugins, "tar -xzf {name} kubectl-etcd");
    }
    let krew = if release.files.is_some() {
        format!(
            "\nOr with Krew, after the files are published:\n\n```sh\nkubectl krew install --manifest={PLUGIN}\n```\n"
        )
    } else {
        String::new()
    };
    format!(
        "# etcd-operator {version}\n\n\
         | file | content |\n|---|---|\n{rows}\n\
         ## Check the files\n\n```sh\nsha256sum -c {SUMS}\n```\n\n\
         ## Install\n\n{image}With Helm:\n\n```sh\n\
         helm install etcd-operator {chart} -n {namespace} --create-namespace\n```\n\n\
         Or with kubectl:\n\n```sh\n\
         kubectl create namespace {namespace}\n\
         kubectl apply --server-side -f {CRDS}\n\
         kubectl apply -f {INSTALL}\n```\n\n\
         `kubectl delete -f {INSTALL}` removes the operators. The clusters continue to run.\n\n\
         {page} explains all options.\n\n\
         ## Install the plugin of kubectl\n\nChoose the archive for the architecture of your machine:\n\n```sh\n{plugins}\
         install kubectl-etcd /usr/local/bin/\nkubectl etcd --version\n```\n{krew}",
        version = release.version,
        chart = release.chart(),
        page = release.page("docs/install.md"),
    )
}
