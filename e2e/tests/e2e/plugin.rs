//! The plugin `kubectl etcd`: commands in containers, logs, changes, backups, restores and recoveries.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::aws_secret;
use e2e::objects::{Kind, await_object, condition, field, follower, leader, ready_members};
use e2e::{DEADLINE, Sandbox, cluster_scenario, plugin, scenario, step};
use serde_json::Value;

use crate::auth::secret;
use crate::fixtures::{DURABLE, cluster_with, newest_version};
use crate::quorum_loss::lose;

const PASSWORD: &str = "correct-horse-battery";

async fn status(sandbox: &Sandbox) -> Result<Value> {
    let text = plugin::run(sandbox, &["status", "c", "-o", "json"]).await?;
    serde_json::from_str(&text).with_context(|| text.clone())
}

/// Ensures that the values in the output come from the members, and not from the status of the EtcdCluster.
fn ensure_live(view: &Value, members: usize) -> Result<()> {
    ensure!(
        view["source"] == "members",
        "the view does not come from the members: {view}"
    );
    let answers = view["members"].as_array().context("no members")?;
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
        let object = sandbox.await_members("c", 3).await?;
        ensure_live(&status(sandbox).await?, 3)?;
        // Because authentication is enabled, the plugin runs the local etcdctl through a port-forward, with the
        // password from the Secret.
        plugin::run(sandbox, &["ctl", "c", "--", "put", "k", "v"]).await?;
        let value = plugin::run(
            sandbox,
            &["ctl", "c", "--", "get", "k", "--print-value-only"],
        )
        .await?;
        ensure!(value.trim() == "v", "{value}");

        let next = follower(&object)?;
        plugin::run(sandbox, &["move-leader", "c", "--to", &next, "--yes"]).await?;
        ensure!(
            status(sandbox).await?["leader"] == next.as_str(),
            "{next} is not the leader"
        );
        plugin::run(sandbox, &["compact", "c", "--keep", "0", "--yes"]).await?;
        let defragmented = plugin::run(sandbox, &["defrag", "c", "--yes"]).await?;
        ensure!(defragmented.matches('→').count() == 3, "{defragmented}");
        Ok(())
    })
    .await;
}

/// The options of commands that wait.
const LIMIT: [&str; 3] = ["--wait", "--timeout", "10m"];

/// Runs a command that changes the cluster. Confirms the command with `--yes`, and waits for its result.
async fn change(sandbox: &Sandbox, args: &[&str]) -> Result<String> {
    let words = [args, &["--yes"][..], &LIMIT[..]].concat();
    step(&args.join(" "), plugin::run(sandbox, &words)).await
}

async fn value_of_key(sandbox: &Sandbox, cluster: &str) -> Result<String> {
    let words = ["ctl", cluster, "--", "get", "k", "--print-value-only"];
    let value = plugin::run(sandbox, &words).await?;
    Ok(value.trim().to_owned())
}

/// Waits until `status.state`, which `kubectl get` shows as `STATE`, contains this text.
async fn await_state(sandbox: &Sandbox, state: &str) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, "c", state, DEADLINE, |object| {
        let found = field(object, "/status/state").as_str();
        found.is_some_and(|found| found.contains(state))
    })
    .await
    .map(drop)
}

/// Deletes the volumes and pods of the followers at the same time, which loses the quorum, and approves the recovery.
/// The leader survives with all acknowledged writes.
async fn recovers(sandbox: &Sandbox) -> Result<()> {
    let before = sandbox.await_members("c", 3).await?;
    let survivor = leader(&before)?;
    let mut victims = ready_members(&before);
    victims.retain(|member| *member != survivor);
    lose(sandbox, &["pvc", "pod"], &victims).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = "the lost quorum is reported";
    await_object(&clusters, "c", what, DEADLINE, |object| {
        let degraded = condition(object, "Degraded");
        degraded.is_some_and(|found| found["reason"] == "QuorumLost")
    })
    .await?;
    let plan = plugin::run(sandbox, &["plan", "c"]).await?;
    ensure!(plan.contains("QuorumLost"), "{plan}");
    let preview = plugin::run(sandbox, &["recover", "c", "--dry-run"]).await?;
    ensure!(preview.contains(&survivor), "{preview}");
    change(sandbox, &["recover", "c"]).await?;
    let after = sandbox.await_members("c", 3).await?;
    ensure!(field(&after, "/status/clusterID") != field(&before, "/status/clusterID"));
    ensure!(value_of_key(sandbox, "c").await? == "v");
    Ok(())
}

#[tokio::test]
async fn plugin_upgrades_hibernates_and_recovers_cluster() {
    cluster_scenario("plugin_changes", async |sandbox| {
        let (old, new) = (sandbox.env.newest_of("3.5")?, sandbox.env.newest_of("3.6")?);
        let more = format!("  TLS: {{generated: {{}}}}\n{DURABLE}");
        let manifest = cluster_with(&sandbox.env, "c", 3, &more)?;
        let manifest = manifest.replace(&newest_version(&sandbox.env)?, &old);
        sandbox.apply(&manifest).await?;
        sandbox.await_members("c", 3).await?;
        plugin::run(sandbox, &["ctl", "c", "--", "put", "k", "v"]).await?;

        plugin::run(sandbox, &["pause", "c", "--yes"]).await?;
        await_state(sandbox, "Paused").await?;
        let refused = plugin::run(sandbox, &["upgrade", "c", &new, "--yes"]).await;
        ensure!(refused.is_err(), "a paused cluster must not be upgraded");
        plugin::run(sandbox, &["resume", "c", "--yes"]).await?;
        await_state(sandbox, "Ready").await?;

        let path = plugin::run(sandbox, &["upgrade", "c", &new, "--dry-run"]).await?;
        ensure!(path.contains(&old) && path.contains(&new), "{path}");
        let upgraded = change(sandbox, &["upgrade", "c", &new]).await?;
        ensure!(upgraded.contains(&new), "{upgraded}");
        let events = plugin::run(sandbox, &["events", "c"]).await?;
        ensure!(events.contains(&new), "{events}");

        change(sandbox, &["hibernate", "c"]).await?;
        ensure!(sandbox.member_pods("c").await?.is_empty());
        change(sandbox, &["wake", "c"]).await?;
        sandbox.await_members("c", 3).await?;
        ensure!(value_of_key(sandbox, "c").await? == "v");
        step("lose the quorum and recover", recovers(sandbox)).await
    })
    .await;
}

#[tokio::test]
async fn plugin_backs_up_verifies_and_restores_cluster() {
    scenario("plugin_backups", async |sandbox| {
        let s3 = sandbox.env.s3()?;
        let bucket = Bucket::create(s3, &sandbox.namespace).await?;
        let more = format!("  TLS: {{generated: {{}}}}\n{DURABLE}");
        let cluster = cluster_with(&sandbox.env, "c", 1, &more)?;
        let manifests = [cluster, aws_secret(s3, "aws")];
        sandbox.apply(&manifests.join("---\n")).await?;
        sandbox.await_members("c", 1).await?;
        plugin::run(sandbox, &["ctl", "c", "--", "put", "k", "v"]).await?;

        let path = format!("{}/c", bucket.name);
        let mut words = vec!["backup", "c", "--name", "first", "--s3", &path];
        words.extend(["--aws-secret", "aws", "--endpoint", &s3.endpoint]);
        change(sandbox, &words).await?;
        let known = plugin::run(sandbox, &["verify", "first"]).await?;
        ensure!(known.contains("checksum matches"), "{known}");
        let words = ["verify", "first", "--rehearse", "--yes", "--timeout", "10m"];
        let rehearsed = step("rehearse", plugin::run(sandbox, &words)).await?;
        ensure!(rehearsed.contains("the backup is usable"), "{rehearsed}");
        let left = sandbox
            .kubectl(&["get", "etcdclusters", "-o", "name"])
            .await?;
        ensure!(left.lines().count() == 1, "the rehearsal is left: {left}");

        plugin::run(sandbox, &["ctl", "c", "--", "put", "k", "later"]).await?;
        change(sandbox, &["restore", "c", "--from", "first", "--overwrite"]).await?;
        sandbox.await_members("c", 1).await?;
        ensure!(value_of_key(sandbox, "c").await? == "v");
        change(sandbox, &["restore", "copy", "--from", "first"]).await?;
        sandbox.await_members("copy", 1).await?;
        ensure!(value_of_key(sandbox, "copy").await? == "v");
        let all = plugin::run(sandbox, &["status"]).await?;
        ensure!(all.contains("copy"), "{all}");
        Ok(())
    })
    .await;
}
