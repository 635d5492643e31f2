//! The API's rules against a real API server: the very cases the unit tests use.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::{Sandbox, kubectl, scenario};

use crate::fixtures::manifests;

async fn dry_run(sandbox: &Sandbox, path: &Path) -> Result<Result<String>> {
    let manifest = std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
    let arguments = [
        "-n",
        &sandbox.namespace,
        "apply",
        "--dry-run=server",
        "-f",
        "-",
    ];
    Ok(kubectl::run_with_input(&sandbox.env, &arguments, Some(&manifest)).await)
}

#[tokio::test]
async fn the_api_server_applies_every_rule() {
    scenario("api_rules", async |sandbox| {
        for path in manifests("e2e/fixtures/cel/accepted")? {
            let answer = dry_run(sandbox, &path).await?;
            ensure!(
                answer.is_ok(),
                "{} is refused: {:#}",
                path.display(),
                answer.err().context("")?
            );
        }
        for path in manifests("e2e/fixtures/cel/refused")? {
            let first = std::fs::read_to_string(&path)?
                .lines()
                .next()
                .unwrap_or_default()
                .to_owned();
            let expected = first.trim_start_matches('#').trim();
            ensure!(
                !expected.is_empty(),
                "{} does not begin with the message expected",
                path.display()
            );
            match dry_run(sandbox, &path).await? {
                Ok(_) => anyhow::bail!("{} is accepted; expected: {expected}", path.display()),
                Err(error) => {
                    let text = format!("{error:#}");
                    ensure!(
                        text.contains(expected),
                        "{}: expected {expected:?} in: {text}",
                        path.display()
                    );
                }
            }
        }
        Ok(())
    })
    .await;
}
