//! The provenance statement of a release: an in-toto statement with the predicate of SLSA 1.0. It contains no times,
//! so that two builds of a commit have the same files.

use anyhow::Result;
use serde_json::{Value, json};

use super::listing::Sum;
use super::names::Release;

/// The build type in the statement, which docs/contributing/releasing.md describes.
const BUILD_TYPE: &str = "urn:etcd-operator:xtask-dist:v1";
/// The builder in the statement if a developer builds the release.
pub(super) const LOCAL_BUILDER: &str = "urn:etcd-operator:local-machine";

/// The inputs of the build, without the commit.
#[derive(Debug, Clone, Default)]
pub(super) struct Inputs {
    pub(super) tools: Vec<(&'static str, String)>,
    /// Files of this machine that are part of the build, such as the certificates in the image.
    pub(super) files: Vec<Sum>,
}

/// The statement about the files of the release.
pub(super) fn statement(
    release: &Release,
    builder: &str,
    inputs: &Inputs,
    sums: &[Sum],
) -> Result<String> {
    let subject = |name: &str, digest: &str| json!({"name": name, "digest": {"sha256": digest}});
    let mut subjects: Vec<Value> = sums
        .iter()
        .map(|sum| subject(&sum.name, &sum.sha256))
        .collect();
    if let Some(digest) = &release.digest {
        let digest = digest.trim_start_matches("sha256:");
        subjects.push(subject(&release.repository, digest));
    }
    let origin = &release.origin;
    let mut commit = json!({
        "name": "source",
        "digest": {"gitCommit": origin.revision},
    });
    if let Some(source) = &origin.source {
        commit["uri"] = json!(format!("git+{source}"));
    }
    let files = inputs
        .files
        .iter()
        .map(|sum| subject(&sum.name, &sum.sha256));
    let dependencies: Vec<Value> = std::iter::once(commit).chain(files).collect();
    let tools: serde_json::Map<_, _> = inputs
        .tools
        .iter()
        .map(|(name, version)| ((*name).to_owned(), json!(version)))
        .collect();
    let statement = json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "repository": release.repository,
                    "version": release.version,
                    "source": origin.source,
                    "filesUrl": release.files,
                },
                "internalParameters": {"tools": tools},
                "resolvedDependencies": dependencies,
            },
            "runDetails": {"builder": {"id": builder}},
        },
    });
    Ok(format!("{}\n", serde_json::to_string_pretty(&statement)?))
}
