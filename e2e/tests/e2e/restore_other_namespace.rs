//! Restores into another namespace, and saves a snapshot with etcdctl. `restore_sources.rs` calls these functions.

use anyhow::{Context, Result, ensure};
use e2e::kubectl::PortForward;
use e2e::manifests::{aws_secret, restore_with};
use e2e::store_state::StoreState;
use e2e::{Keyspace, Sandbox};
use tokio::process::Command;

use crate::restore_sources::{Sources, await_equal_restore};

/// Restores into a cluster of the same name in another namespace with its own operators. The cluster in the namespace
/// of `sandbox` must not change.
pub(crate) async fn other_namespace(sandbox: &Sandbox, sources: &Sources) -> Result<()> {
    let other = Sandbox::create("restore_other_namespace").await?;
    let outcome = async {
        let alone = ["--set", "backupOperator.enabled=false"];
        other.install_operators_with(&alone).await?;
        let s3 = other.env.s3()?;
        other.apply(&aws_secret(s3, "aws")).await?;
        let late = &sources.late;
        let manifest = restore_with(s3, "back", "{name: c}", &late.path, "");
        other.apply(&manifest).await?;
        await_equal_restore(&other, "back", "c", &late.state).await?;
        other.await_members("c", 1).await?;
        let keys = Keyspace::of_cluster(&other.env, &other.namespace, "c").await?;
        keys.fill("after/", 20, |_| ()).await?;
        let first = StoreState::now(&sources.keys).await?;
        late.state
            .ensure_same(&first)
            .context(sandbox.namespace.clone())
    }
    .await;
    if outcome.is_err() {
        other.print_state().await;
    }
    other.delete().await;
    outcome
}

/// Saves a snapshot with `etcdctl snapshot save`. Outside of the testbed, etcdctl may be missing, so the function then
/// requests the snapshot through etcd's API.
pub(crate) async fn save(sandbox: &Sandbox, keys: &Keyspace) -> Result<Vec<u8>> {
    if sandbox.env.xtask.is_none() {
        return keys.snapshot().await;
    }
    let (service, folder) = ("service/c-client", tempfile::tempdir()?);
    let forward = PortForward::open(&sandbox.env, &sandbox.namespace, service, 2379).await?;
    let file = folder.path().join("by-hand.db");
    let saved = Command::new("etcdctl")
        .arg(format!("--endpoints=http://127.0.0.1:{}", forward.port))
        .args(["snapshot", "save"])
        .arg(&file)
        .kill_on_drop(true)
        .output()
        .await
        .context("etcdctl cannot be started: is it on PATH?")?;
    let why = String::from_utf8_lossy(&saved.stderr);
    ensure!(saved.status.success(), "etcdctl: {why}");
    std::fs::read(&file).context("read what etcdctl has saved")
}
