//! Shared manifests and functions of the tests.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use e2e::{Env, Sandbox};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use kube::api::{Api, PostParams};
use serde_json::json;

/// The newest etcd version whose image the nodes have. Most tests use this version.
pub(crate) fn newest_version(env: &Env) -> Result<String> {
    env.etcd_versions
        .last()
        .cloned()
        .context("E2E_ETCD_VERSIONS is empty: list the etcd versions whose images the nodes have")
}

/// The manifest of a cluster with this size and the newest version.
pub(crate) fn cluster(env: &Env, name: &str, size: usize) -> Result<String> {
    cluster_with(env, name, size, "")
}

/// The manifest of a cluster with additional lines under `spec`, which are indented by two spaces.
pub(crate) fn cluster_with(env: &Env, name: &str, size: usize, more: &str) -> Result<String> {
    let version = newest_version(env)?;
    Ok(format!(
        "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdCluster\nmetadata:\n  name: {name}\nspec:\n  \
         size: {size}\n  version: \"{version}\"\n{more}"
    ))
}

/// Lines under `spec` that give each member a volume.
pub(crate) const DURABLE: &str = "  pod:
    persistentVolumeClaimSpec:
      accessModes: [ReadWriteOnce]
      resources: {requests: {storage: 64Mi}}
";

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The YAML files in a directory of the repository, sorted.
pub(crate) fn manifests(directory: &str) -> Result<Vec<PathBuf>> {
    let path = root().join(directory);
    let mut files: Vec<PathBuf> = std::fs::read_dir(&path)
        .with_context(|| format!("read {}", path.display()))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "yaml")
        })
        .collect();
    files.sort();
    anyhow::ensure!(
        !files.is_empty(),
        "{} contains no manifests",
        path.display()
    );
    Ok(files)
}

/// True if the ServiceAccount `account` of the sandbox has this permission in `namespace`. `resource` is
/// `NAME[.GROUP][/SUBRESOURCE]`.
pub(crate) async fn may(
    sandbox: &Sandbox,
    account: &str,
    verb: &str,
    resource: &str,
    namespace: &str,
) -> Result<bool> {
    let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
    let (resource, group) = resource.split_once('.').unwrap_or((resource, ""));
    let own = &sandbox.namespace;
    let groups = [
        "system:authenticated".to_owned(),
        "system:serviceaccounts".to_owned(),
        format!("system:serviceaccounts:{own}"),
    ];
    let review = json!({
        "metadata": {},
        "spec": {
            "user": format!("system:serviceaccount:{own}:{account}"),
            "groups": groups,
            "resourceAttributes": {
                "namespace": namespace,
                "verb": verb,
                "group": group,
                "resource": resource,
                "subresource": subresource,
            },
        },
    });
    let review: SubjectAccessReview = serde_json::from_value(review)?;
    let reviews: Api<SubjectAccessReview> = Api::all(sandbox.client.clone());
    let answer = reviews.create(&PostParams::default(), &review).await?;
    let status = answer.status.context("the review has no status")?;
    Ok(status.allowed)
}
