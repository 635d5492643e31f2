//! Every manifest under `examples/` is applied.

use anyhow::{Context, ensure};
use e2e::scenario;

use crate::fixtures::manifests;

#[tokio::test]
async fn every_example_is_accepted() {
    scenario("examples", async |sandbox| {
        for path in manifests("examples")? {
            let manifest = std::fs::read_to_string(&path)?;
            let printed = sandbox
                .dry_run(&manifest)
                .await
                .with_context(|| format!("{}", path.display()))?;
            ensure!(printed.contains("created"), "{}: {printed}", path.display());
        }
        Ok(())
    })
    .await;
}
