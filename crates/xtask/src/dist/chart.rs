//! The chart of a release, which is the chart of the checkout with the released image. Also renders the manifests.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::names::Release;
use crate::{archive, checkout, oci, shell};

const FOLDER: &str = "charts/etcd-operator";
const CRDS: &str = "crds-generated/";
/// The oldest Kubernetes version that the chart supports. Helm renders the manifests for this version, so they work
/// with all later versions.
pub(super) const KUBERNETES: &str = "1.33.0";

/// A text file of the chart: its path in the chart, and its content.
pub(super) type Text = (String, String);

/// The files of the chart in the checkout.
pub(super) fn files() -> Result<Vec<Text>> {
    let folder = checkout::root().join(FOLDER);
    let read = |path: std::path::PathBuf| {
        let name = path.strip_prefix(&folder)?.display().to_string();
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        Ok((name, text))
    };
    checkout::files(&folder)?.into_iter().map(read).collect()
}

/// Replaces `from` by `to`. Fails unless `from` occurs exactly once in the text.
fn replace(text: &mut String, from: &str, to: &str) -> Result<()> {
    match text.matches(from).count() {
        1 => *text = text.replacen(from, to, 1),
        count => bail!("the text must occur once, but occurs {count} times: {from}"),
    }
    Ok(())
}

/// The replacements for a release: the file, the text in the checkout, and the text in the release.
fn replacements(release: &Release) -> Vec<(&'static str, String, String)> {
    let Release {
        version,
        repository,
        digest,
        ..
    } = release;
    let digest = digest.as_deref().unwrap_or_default();
    let workspace = crate::origin::VERSION;
    let mut all = vec![
        (
            "Chart.yaml",
            format!("version: {workspace}\nappVersion: {workspace}\n"),
            format!("version: {version}\nappVersion: {version}\n"),
        ),
        (
            "values.yaml",
            "  # Repository, with or without a registry. The default image is in no registry: set the repository of your own image.\n".into(),
            "  # Repository, with or without a registry.\n".into(),
        ),
        (
            "values.yaml",
            "  repository: localhost/etcd-operator\n".into(),
            format!("  repository: {repository}\n"),
        ),
        (
            "values.yaml",
            "  digest: \"\"\n".into(),
            format!("  digest: \"{digest}\"\n"),
        ),
        (
            "values.schema.json",
            " The default image is in no registry: set the repository of your own image, for example registry.example.com/etcd-operator.".into(),
            String::new(),
        ),
        (
            "README.md",
            " The default image is in no registry: set the repository of your own image, for example registry.example.com/etcd-operator.".into(),
            String::new(),
        ),
        (
            "README.md",
            "`\"localhost/etcd-operator\"`".into(),
            format!("`\"{repository}\"`"),
        ),
        (
            "README.md",
            "| `image.digest` | `\"\"` |".into(),
            format!("| `image.digest` | `\"{digest}\"` |"),
        ),
        (
            "README.md",
            "helm install etcd-operator charts/etcd-operator --namespace etcd --create-namespace \\\n  --set image.repository=REPOSITORY --set-string image.tag=TAG\n".into(),
            format!("helm install etcd-operator {} --namespace etcd --create-namespace\n", release.chart()),
        ),
        (
            "README.md",
            "No image is published. Build the image with `cargo xtask image`. The command prints the values for `REPOSITORY` and `TAG`.\n".into(),
            format!("The default image is `{}`.\n", release.image()),
        ),
        (
            "README.md",
            "[docs/install.md](../../docs/install.md)".into(),
            release.page("docs/install.md"),
        ),
        (
            "README.md",
            "\nAfter a change of the values, run `UPDATE=1 cargo test -p xtask chart` and add a case to `e2e/fixtures/chart/values.yaml`.\n".into(),
            String::new(),
        ),
        (
            "README.md",
            "<!-- The table is generated: UPDATE=1 cargo test -p xtask chart -->\n\n".into(),
            String::new(),
        ),
    ];
    if let Some(source) = &release.origin.source {
        all.push((
            "Chart.yaml",
            "# This repository has no public address yet. home is the site of etcd, and sources names the predecessor of this project.\n".into(),
            "# home is the site of etcd, and sources names this project and its predecessor.\n".into(),
        ));
        all.push((
            "Chart.yaml",
            "sources:\n".into(),
            format!("sources:\n- {source}\n"),
        ));
    }
    all
}

/// The chart with the released image as its default.
pub(super) fn released(mut files: Vec<Text>, release: &Release) -> Result<Vec<Text>> {
    for (name, from, to) in replacements(release) {
        let found = files.iter_mut().find(|(path, _)| path == name);
        let (_, text) = found.with_context(|| format!("the chart has no file {name}"))?;
        replace(text, &from, &to).with_context(|| format!("{FOLDER}/{name}"))?;
    }
    Ok(files)
}

/// Packages the chart like `helm package`, but without the time of the packaging, so that packages are reproducible.
pub(super) fn package(files: &[Text]) -> Result<Vec<u8>> {
    let (first, others): (Vec<_>, Vec<_>) =
        files.iter().partition(|(path, _)| path == "Chart.yaml");
    tgz("etcd-operator/", first.into_iter().chain(others))
}

/// A tar archive without times, compressed with gzip. All paths start with `prefix`.
pub(super) fn tgz<'a>(prefix: &str, files: impl IntoIterator<Item = &'a Text>) -> Result<Vec<u8>> {
    let mut tar = tar::Builder::new(Vec::new());
    for (path, text) in files {
        let bytes = text.as_bytes();
        let path = format!("{prefix}{path}");
        archive::append(&mut tar, &path, 0o644, bytes.len() as u64, bytes)?;
    }
    oci::gzip(&tar.into_inner()?)
}

/// The files of the chart that contain a CRD.
pub(super) fn definitions(files: &[Text]) -> impl Iterator<Item = &Text> {
    files.iter().filter(|(path, _)| path.starts_with(CRDS))
}

/// All CRDs as one YAML file.
pub(super) fn crds(files: &[Text]) -> String {
    let documents = definitions(files).map(|(_, text)| format!("---\n{}\n", text.trim_end()));
    documents.collect()
}

/// Runs `helm lint` on the packaged chart. Fails if Helm finds a problem.
pub(super) fn lint(helm: &Path, chart: &Path) -> Result<()> {
    shell::output(Command::new(helm).args(["lint", "--strict"]).arg(chart)).map(|_| ())
}

/// A manifest for `kubectl apply`, rendered from the chart.
pub(super) struct Manifest {
    /// The namespace of the operators, which users create before `kubectl apply`.
    pub(super) namespace: &'static str,
    pub(super) values: &'static [&'static str],
}

/// The manifest of operators for one namespace.
pub(super) const NAMESPACED: Manifest = Manifest {
    namespace: "etcd",
    values: &[],
};

/// The manifest of operators for all namespaces.
pub(super) const CLUSTER_WIDE: Manifest = Manifest {
    namespace: "etcd-operator",
    values: &["clusterWide=true"],
};

/// Renders the manifest from the packaged chart. The manifest has no CRDs, so that `kubectl delete -f` does not delete
/// clusters.
pub(super) fn render(helm: &Path, chart: &Path, manifest: &Manifest) -> Result<String> {
    let mut command = Command::new(helm);
    command.args(["template", "etcd-operator"]).arg(chart);
    command.args(["--namespace", manifest.namespace, "--no-hooks"]);
    command.args(["--kube-version", KUBERNETES]);
    for value in ["crds.install=false"].iter().chain(manifest.values) {
        command.args(["--set", value]);
    }
    shell::output(&mut command)
}
