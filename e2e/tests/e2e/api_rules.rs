//! The API's rules against a real API server: the very cases the unit tests use.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use e2e::{Sandbox, cluster_scenario};
use futures::{StreamExt, TryStreamExt, stream};

use crate::fixtures::manifests;

/// `kubectl` processes at a time.
const AT_A_TIME: usize = 4;

#[tokio::test]
async fn the_api_server_applies_every_rule() {
    cluster_scenario("api_rules", async |sandbox| {
        let accepted: Vec<String> = manifests("e2e/fixtures/cel/accepted")?
            .iter()
            .map(std::fs::read_to_string)
            .collect::<Result<_, _>>()?;
        sandbox
            .dry_run(&accepted.join("\n---\n"))
            .await
            .context("a manifest of e2e/fixtures/cel/accepted is refused")?;

        let refused = manifests("e2e/fixtures/cel/refused")?;
        stream::iter(refused)
            .map(anyhow::Ok)
            .try_for_each_concurrent(AT_A_TIME, async |path| {
                refused_as_expected(sandbox, &path).await
            })
            .await
    })
    .await;
}

/// The first line of the manifest is a comment with what the refusal has to say.
async fn refused_as_expected(sandbox: &Sandbox, path: &Path) -> Result<()> {
    let manifest = std::fs::read_to_string(path)?;
    let first = manifest.lines().next().unwrap_or_default();
    let expected = first.trim_start_matches('#').trim();
    let name = path.display();
    ensure!(
        !expected.is_empty(),
        "{name} does not begin with the message expected"
    );
    match sandbox.dry_run(&manifest).await {
        Ok(_) => bail!("{name} is accepted; expected: {expected}"),
        Err(error) => {
            let text = format!("{error:#}");
            ensure!(
                text.contains(expected),
                "{name}: expected {expected:?} in: {text}"
            );
            Ok(())
        }
    }
}
