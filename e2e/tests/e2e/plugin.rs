//! The plugin `kubectl etcd`, with kubelets: commands in the containers of members, logs, and waits for the operator.

use anyhow::{Context, Result, ensure};
use e2e::objects::{follower, leader};
use e2e::{Sandbox, cluster_scenario, plugin};
use serde_json::Value;

use crate::auth::secret;
use crate::fixtures::{DURABLE, cluster_with};

const PASSWORD: &str = "correct-horse-battery";

async fn status(sandbox: &Sandbox) -> Result<Value> {
    let text = plugin::run(sandbox, &["status", "c", "-o", "json"]).await?;
    serde_json::from_str(&text).with_context(|| text.clone())
}

/// Checks that the numbers in the view come from the members themselves, and not from the status.
fn ensure_live(view: &Value, members: usize) -> Result<()> {
    ensure!(
        view["source"] == "members",
        "the view does not come from the members: {view}"
    );
    let answers = view["members"].as_array().context("members")?;
    let live = answers
        .iter()
        .filter(|one| one["healthy"] == true && one["term"].is_u64());
    ensure!(
        live.count() == members,
        "not all of the {members} members answer: {view}"
    );
    Ok(())
}

#[tokio::test]
async fn plugin_shows_and_changes_cluster() {
    cluster_scenario("plugin_plain", async |sandbox| {
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, DURABLE)?)
            .await?;
        let before = sandbox.await_members("c", 3).await?;
        ensure_live(&status(sandbox).await?, 3)?;

        plugin::run(sandbox, &["ctl", "c", "--", "put", "k", "v"]).await?;
        let value = plugin::run(
            sandbox,
            &["ctl", "c", "--", "get", "k", "--print-value-only"],
        )
        .await?;
        ensure!(value.trim() == "v", "{value}");
        let failed = plugin::run(sandbox, &["ctl", "c", "--", "get"]).await;
        ensure!(failed.is_err(), "the plugin must fail if etcdctl fails");

        let next = follower(&before)?;
        plugin::run(sandbox, &["move-leader", "c", "--to", &next, "--yes"]).await?;
        ensure!(
            status(sandbox).await?["leader"] == next.as_str(),
            "{next} is not the leader"
        );
        plugin::run(sandbox, &["compact", "c", "--keep", "0", "--yes"]).await?;
        let defragmented = plugin::run(sandbox, &["defrag", "c", "--yes"]).await?;
        ensure!(defragmented.matches('→').count() == 3, "{defragmented}");

        let logs = plugin::run(sandbox, &["logs", "c", "--tail", "20"]).await?;
        ensure!(
            logs.contains(&next),
            "the log has no lines of {next}: {logs}"
        );
        let file = std::env::temp_dir().join(format!("{}.tar.gz", sandbox.namespace));
        let path = file.to_string_lossy().into_owned();
        plugin::run(sandbox, &["report", "c", "--file", &path]).await?;
        std::fs::remove_file(&file)?;

        let old = leader(&sandbox.await_members("c", 3).await?)?;
        plugin::run(
            sandbox,
            &["replace", &old, "--yes", "--wait", "--timeout", "5m"],
        )
        .await?;
        let view = status(sandbox).await?;
        ensure_live(&view, 3)?;
        ensure!(
            !view.to_string().contains(&old),
            "{old} was not replaced: {view}"
        );
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn plugin_works_with_tls_and_authentication() {
    cluster_scenario("plugin_auth", async |sandbox| {
        sandbox.apply(&secret(PASSWORD)).await?;
        let more = "  TLS: {generated: {}}\n  auth: {secret: root, enabled: true}\n";
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, more)?)
            .await?;
        sandbox.await_members("c", 3).await?;
        ensure_live(&status(sandbox).await?, 3)?;
        // With authentication, the plugin runs the etcdctl of this machine through a port-forward, with the password
        // from the Secret.
        plugin::run(sandbox, &["ctl", "c", "--", "put", "k", "v"]).await?;
        let value = plugin::run(
            sandbox,
            &["ctl", "c", "--", "get", "k", "--print-value-only"],
        )
        .await?;
        ensure!(value.trim() == "v", "{value}");
        Ok(())
    })
    .await;
}
