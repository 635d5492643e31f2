//! The operator crashes before each of its writes to etcd and Kubernetes. These tests run only with `--full`.

use std::cell::{Cell, RefCell};

use anyhow::ensure;
use e2e::objects::{field, leader, ready_members};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Writer, cluster_scenario, until};

use super::{CrashingOperator, await_desired_members};
use crate::all_pods_lost::same_members;
use crate::fixtures::{DURABLE, cluster_with};
use crate::nospace::await_writable;
use crate::storage_class_change::{claims_with, with_class};
use crate::upgrade::{await_version, change, manifest};
use crate::volume_growth::{claims, request_size, requested};

/// Failpoints of the creation of a cluster with three members and volumes, in the order in which the operator reaches
/// them.
const BOOTSTRAP: &[&str] = &[
    "before-record-intent",
    "before-apply-headless",
    "before-create-service",
    "before-create-disk",
    "before-create-pod",
    "before-open-service",
    "before-record-cluster-id",
    "before-apply-budget",
    "before-label-disk",
    "before-label-pod",
    "before-apply-client",
];
/// Failpoints before the writes that add a member.
const GROW: &[&str] = &[
    "before-add-member",
    "before-mark-service",
    "before-promote-member",
];
/// The failpoint before the operator transfers the leadership from a leader whose PVC is deleted.
const HANDOVER: &[&str] = &["before-move-leader"];
/// Failpoints before the writes that remove a member.
const SHRINK: &[&str] = &[
    "before-note-removal",
    "before-remove-member",
    "before-delete-pod",
    "before-delete-disk",
    "before-delete-service",
];
/// The failpoint before the repair of a Service that a user has changed.
const REPAIR: &[&str] = &["before-repair-service"];
/// Failpoints of spec changes that do not restart pods.
const SETTINGS: &[&str] = &["before-patch-metadata", "before-resize-pod"];
const NO_BUDGET: &[&str] = &["before-delete-budget"];
/// Failpoints of an upgrade to the next minor release, and of the downgrade to the previous release.
const VERSIONS: &[&str] = &[
    "before-append-entries",
    "before-record-raft-log",
    "before-downgrade",
    "before-note-version",
    "before-patch-image",
    "before-settle-image",
];
/// Failpoints of the recovery of a full database after its keys were deleted.
const NO_SPACE: &[&str] = &[
    "before-compact",
    "before-record-defragmentation",
    "before-defragment",
    "before-disarm",
];
/// The failpoint before the growth of a volume.
const LARGER_VOLUME: &[&str] = &["before-grow-disk"];

/// All failpoints of the tests in this file.
pub(super) const POINTS: [&[&str]; 10] = [
    BOOTSTRAP,
    GROW,
    HANDOVER,
    SHRINK,
    REPAIR,
    SETTINGS,
    NO_BUDGET,
    VERSIONS,
    NO_SPACE,
    LARGER_VOLUME,
];

#[tokio::test]
async fn bootstrap_forms_one_cluster_despite_crash_before_every_write() {
    cluster_scenario("crash_bootstrap", async |sandbox| {
        let mut operator = CrashingOperator {
            sandbox,
            crashes: 0,
        };
        let made = RefCell::new(Vec::new());
        operator
            .crash_at_each(BOOTSTRAP, async |number| {
                let name = format!("c{number}");
                let manifest = cluster_with(&sandbox.env, &name, 3, DURABLE)?;
                made.borrow_mut().push(name);
                sandbox.apply(&manifest).await.map(drop)
            })
            .await?;
        ensure!(operator.run_without_failpoints().await? == BOOTSTRAP.len());
        for name in made.into_inner() {
            await_desired_members(sandbox, &name, 3).await?;
            let writer = Writer::start(sandbox, &name).await?;
            writer.finish("crashes during the bootstrap").await?;
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn member_changes_resume_after_crash_before_every_write() {
    cluster_scenario("crash_members", async |sandbox| {
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, DURABLE)?)
            .await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        let mut operator = CrashingOperator {
            sandbox,
            crashes: 0,
        };
        let size = Cell::new(3);
        operator
            .crash_at_each(GROW, async |_| {
                size.set(size.get() + 1);
                sandbox.scale("c", size.get()).await
            })
            .await?;
        operator
            .crash_at_each(HANDOVER, async |_| {
                let leader = leader(&sandbox.await_members("c", size.get()).await?)?;
                let delete = ["delete", "pvc", &leader, "--wait=false"];
                sandbox.kubectl(&delete).await.map(drop)
            })
            .await?;
        operator
            .crash_at_each(SHRINK, async |_| {
                size.set(size.get() - 1);
                sandbox.scale("c", size.get()).await
            })
            .await?;
        let points = GROW.len() + HANDOVER.len() + SHRINK.len();
        ensure!(operator.run_without_failpoints().await? == points);
        await_desired_members(sandbox, "c", size.get()).await?;
        let after = sandbox.await_members("c", size.get()).await?;
        ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
        writer.await_more(10).await?;
        writer
            .finish("crashes while members change")
            .await
            .map(drop)
    })
    .await;
}

#[tokio::test]
async fn repairs_resume_after_crash_before_every_write() {
    cluster_scenario("crash_repair", async |sandbox| {
        // The pods get a resource request now, so that they can be resized in place later: Kubernetes does not change
        // the QoS class of a running pod, and a first request would change it.
        let more = format!("{DURABLE}    resources: {{requests: {{cpu: 10m}}}}\n");
        let durable = cluster_with(&sandbox.env, "d", 3, &more)?;
        sandbox.apply(&durable).await?;
        let before = sandbox.await_members("d", 3).await?;
        let writer = Writer::start(sandbox, "d").await?;
        let mut operator = CrashingOperator {
            sandbox,
            crashes: 0,
        };
        operator
            .crash_at_each(REPAIR, async |_| {
                let patch = r#"{"spec":{"publishNotReadyAddresses":false}}"#;
                let member = ready_members(&before).remove(0);
                sandbox
                    .kubectl(&["patch", "service", &member, "-p", patch])
                    .await
                    .map(drop)
            })
            .await?;
        operator
            .crash_at_each(SETTINGS, async |times| {
                let (round, cpu) = (times.to_string(), format!("{}m", 20 + times));
                let pod = serde_json::json!({ "labels": { "round": round }, "resources": { "requests": { "cpu": cpu } } });
                let patch = serde_json::json!({ "spec": { "pod": pod } }).to_string();
                let args = ["patch", "etcdcluster", "d", "--type=merge", "-p", &patch];
                sandbox.kubectl(&args).await.map(drop)
            })
            .await?;
        operator
            .crash_at_each(NO_BUDGET, async |_| {
                let patch = r#"{"spec":{"podDisruptionBudget":{"enabled":false}}}"#;
                let args = ["patch", "etcdcluster", "d", "--type=merge", "-p", patch];
                sandbox.kubectl(&args).await.map(drop)
            })
            .await?;
        let points = REPAIR.len() + SETTINGS.len() + NO_BUDGET.len();
        ensure!(operator.run_without_failpoints().await? == points);
        await_desired_members(sandbox, "d", 3).await?;
        let after = sandbox.await_members("d", 3).await?;
        same_members(&before, &after)?;
        writer.await_more(10).await?;
        writer.finish("crashes while repairing").await.map(drop)
    })
    .await;
}

#[tokio::test]
async fn version_changes_resume_after_crash_before_every_write() {
    cluster_scenario("crash_versions", async |sandbox| {
        let (old, new) = (sandbox.env.newest_of("3.6")?, sandbox.env.newest_of("3.7")?);
        let more = format!("{DURABLE}  etcd: {{snapshotCount: 1000}}\n");
        sandbox.apply(&manifest("c", 3, &old, &more)).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        let mut operator = CrashingOperator {
            sandbox,
            crashes: 0,
        };
        let desired = Cell::new(&old);
        operator
            .crash_at_each(VERSIONS, async |times| {
                desired.set(if times % 2 == 0 { &new } else { &old });
                let spec = serde_json::json!({ "version": desired.get() });
                change(sandbox, "c", spec).await
            })
            .await?;
        ensure!(operator.run_without_failpoints().await? == VERSIONS.len());
        let after = await_version(sandbox, "c", 3, desired.get()).await?;
        same_members(&before, &after)?;
        await_desired_members(sandbox, "c", 3).await?;
        writer.await_more(10).await?;
        writer
            .finish("crashes while versions change")
            .await
            .map(drop)
    })
    .await;
}

#[tokio::test]
async fn full_database_recovers_after_crash_before_every_write() {
    cluster_scenario("crash_no_space", async |sandbox| {
        let small =
            "  etcd: {quotaBackendBytes: 25165824}\n  upkeep: {noSpace: {keepRevisions: 0}}\n";
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, small)?)
            .await?;
        let before = sandbox.await_members("c", 3).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        keys.fill("kept/", 100, |_| {}).await?;
        let mut operator = CrashingOperator {
            sandbox,
            crashes: 0,
        };
        operator
            .crash_at_each(NO_SPACE, async |times| {
                let mut number = 0;
                while let Ok(()) = keys
                    .write(&format!("big/{times}/{number}"), vec![7; 1 << 20])
                    .await
                {
                    number += 1;
                }
                keys.delete("big/").await.map(drop)
            })
            .await?;
        ensure!(operator.run_without_failpoints().await? == NO_SPACE.len());
        await_writable(&keys).await?;
        keys.verify("kept/", 100).await?;
        same_members(&before, &sandbox.await_members("c", 3).await?)
    })
    .await;
}

#[tokio::test]
async fn volume_growth_resumes_after_operator_crash() {
    cluster_scenario("crash_larger", async |sandbox| {
        with_class(sandbox, "larger", true, async |class| {
            let manifest = cluster_with(&sandbox.env, "c", 1, &claims_with(class, "64Mi"))?;
            sandbox.apply(&manifest).await?;
            sandbox.await_members("c", 1).await?;
            let mut operator = CrashingOperator {
                sandbox,
                crashes: 0,
            };
            operator
                .crash_at_each(LARGER_VOLUME, async |_| {
                    request_size(sandbox, "128Mi").await
                })
                .await?;
            ensure!(operator.run_without_failpoints().await? == LARGER_VOLUME.len());
            until("the PVC requests the new size", DEADLINE, async || {
                let asked: Vec<String> = claims(sandbox).await?.iter().map(requested).collect();
                Ok(if asked == ["128Mi"] {
                    Poll::Done(())
                } else {
                    Poll::NotYet(format!("{asked:?}"))
                })
            })
            .await
        })
        .await
    })
    .await;
}
