//! The API server accepts valid manifests and rejects invalid manifests. The manifests are the fixtures of the unit
//! tests, the examples, and the examples of coreos/etcd-operator v0.9.4. No operator runs.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use e2e::sandbox::bare_scenario;
use e2e::{Sandbox, step};
use futures::{StreamExt, TryStreamExt, stream};
use http::Request;

use crate::fixtures::manifests;

/// Number of concurrent requests.
const AT_A_TIME: usize = 4;

#[tokio::test]
async fn api_server_accepts_valid_and_rejects_invalid_manifests() {
    bare_scenario("api_rules", async |sandbox| {
        sandbox.install_crds().await?;
        for folder in [
            "e2e/fixtures/cel/accepted",
            "examples",
            "e2e/fixtures/v0.9.4",
        ] {
            step(folder, is_accepted(sandbox, folder)).await?;
        }
        step("e2e/fixtures/cel/refused", is_rejected(sandbox)).await
    })
    .await;
}

/// Sends all manifests of a folder in one dry run. Ensures that the API server would create every object.
async fn is_accepted(sandbox: &Sandbox, folder: &str) -> Result<()> {
    let paths = manifests(folder)?;
    ensure!(paths.len() >= 5, "only {} manifests", paths.len());
    let texts: Vec<String> = paths
        .iter()
        .map(std::fs::read_to_string)
        .collect::<Result<_, _>>()?;
    let printed = sandbox.dry_run(&texts.join("\n---\n")).await?;
    let lines = texts.iter().flat_map(|text| text.lines());
    let objects = lines.filter(|line| line.starts_with("kind:")).count();
    let created = printed
        .lines()
        .filter(|line| line.contains("created"))
        .count();
    ensure!(
        created == objects,
        "{created} of {objects} objects would be created: {printed}"
    );
    Ok(())
}

async fn is_rejected(sandbox: &Sandbox) -> Result<()> {
    let rejected = manifests("e2e/fixtures/cel/refused")?;
    stream::iter(rejected)
        .map(anyhow::Ok)
        .try_for_each_concurrent(AT_A_TIME, async |path| {
            is_rejected_as_expected(sandbox, &path)
                .await
                .with_context(|| path.display().to_string())
        })
        .await
}

/// Ensures that the API server rejects the manifest. The comment in its first line is a part of the expected message.
async fn is_rejected_as_expected(sandbox: &Sandbox, path: &Path) -> Result<()> {
    let manifest = std::fs::read_to_string(path)?;
    let first = manifest.lines().next().unwrap_or_default();
    let expected = first.trim_start_matches('#').trim();
    ensure!(
        !expected.is_empty(),
        "the first line is not a comment with the expected message"
    );
    let request = dry_run(sandbox, &manifest)?;
    match sandbox.client.request_text(request).await {
        Ok(_) => bail!("accepted; expected: {expected}"),
        Err(kube::Error::Api(status)) => {
            let text = &status.message;
            ensure!(text.contains(expected), "expected {expected:?} in: {text}");
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// The request of `kubectl create --dry-run=server`. The test sends this request itself, which saves one kubectl
/// process per manifest.
fn dry_run(sandbox: &Sandbox, manifest: &str) -> Result<Request<Vec<u8>>> {
    let kind = manifest
        .lines()
        .find_map(|line| line.strip_prefix("kind: "))
        .context("the manifest has no kind")?;
    let url = format!(
        "/apis/etcd.database.coreos.com/v1beta2/namespaces/{}/{}s?dryRun=All&fieldValidation=Strict",
        sandbox.namespace,
        kind.trim().to_lowercase()
    );
    let request = Request::post(url).header("Content-Type", "application/yaml");
    Ok(request.body(manifest.as_bytes().to_vec())?)
}
