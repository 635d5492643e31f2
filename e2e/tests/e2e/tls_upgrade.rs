//! Upgrades and downgrades of clusters with TLS. etcd 3.6 changed the name of a TLS flag, and etcd 3.7 removed the
//! earlier name, so the operator recreates or replaces members whose pods have the wrong flag.

use anyhow::{Context, Result, ensure};
use e2e::objects::{members, ready_members};
use e2e::{Sandbox, Writer, cluster_scenario, step};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;

use crate::fixtures::DURABLE;
use crate::tls_generated::{GENERATED, client};
use crate::upgrade::{await_one_of_version, await_version, change, manifest};

/// Changes the version while a client writes. Ensures that no acknowledged write is lost.
async fn changes(sandbox: &Sandbox, name: &str, version: &str) -> Result<()> {
    let identity = client(sandbox, name).await?;
    let writer = Writer::start_tls(sandbox, name, &identity).await?;
    change(sandbox, name, json!({ "version": version })).await?;
    await_version(sandbox, name, 3, version).await?;
    writer.await_more(10).await?;
    writer.finish(&format!("{name} to {version}")).await?;
    Ok(())
}

/// Downgrades the cluster `c`. After the first member was changed, deletes another member with its volume. Ensures that
/// this member is replaced, although etcd rejects new members during a downgrade, and that the downgrade completes.
async fn downgrade_replaces_lost_member(sandbox: &Sandbox, version: &str) -> Result<()> {
    let identity = client(sandbox, "c").await?;
    let writer = Writer::start_tls(sandbox, "c", &identity).await?;
    change(sandbox, "c", json!({ "version": version })).await?;
    await_one_of_version(sandbox, "c", version).await?;
    let tag = format!(":v{version}");
    let is_changed = |pod: &Pod| {
        let spec = pod.spec.as_ref();
        let image = spec.and_then(|spec| spec.containers.first()?.image.as_ref());
        image.is_some_and(|image| image.ends_with(&tag))
    };
    let pods = sandbox.member_pods("c").await?;
    let unchanged = pods.iter().find(|pod| !is_changed(pod));
    let lost = unchanged.context("all members are changed")?.name_any();
    sandbox
        .kubectl(&["delete", "pvc", &lost, "--wait=false"])
        .await?;
    sandbox.lose_pod("c", &lost).await?;
    let after = await_version(sandbox, "c", 3, version).await?;
    ensure!(
        !ready_members(&after).contains(&lost),
        "{lost} was not replaced"
    );
    writer.await_more(10).await?;
    writer
        .finish("downgrade with a lost member")
        .await
        .map(drop)
}

#[tokio::test]
async fn tls_cluster_is_upgraded_to_newest_release_and_downgraded() {
    cluster_scenario("tls_upgrade", async |sandbox| {
        let newest = |minor: &str| sandbox.env.newest_of(minor);
        let (old, middle, new) = (newest("3.5")?, newest("3.6")?, newest("3.7")?);
        // Invariant 29: before the upgrade to 3.7, the operator appends `snapshotCount` entries to the Raft log, so
        // that etcd saves a snapshot of the log. The small value makes this fast.
        let durable = format!("{GENERATED}{DURABLE}  etcd: {{snapshotCount: 1000}}\n");
        sandbox.apply(&manifest("c", 3, &old, &durable)).await?;
        sandbox
            .apply(&manifest("plain", 3, &middle, GENERATED))
            .await?;
        await_version(sandbox, "plain", 3, &middle).await?;
        let before = await_version(sandbox, "c", 3, &old).await?;

        let downgraded = changes(sandbox, "plain", &old);
        step("downgrade members without volumes", downgraded).await?;
        sandbox.delete_cluster("plain").await?;
        for (what, version) in [
            ("upgrade to 3.6", &middle),
            ("upgrade to 3.7", &new),
            ("downgrade to 3.6", &middle),
        ] {
            step(what, changes(sandbox, "c", version)).await?;
        }
        let after = sandbox.await_members("c", 3).await?;
        ensure!(members(&after) == members(&before), "the members changed");
        let downgraded = downgrade_replaces_lost_member(sandbox, &old);
        step("lose a member during the downgrade to 3.5", downgraded).await
    })
    .await;
}
