//! A cluster whose members hang does not delay other clusters. An idle cluster causes no writes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::metrics::{Page, operator_pods};
use e2e::objects::{Kind, await_object, field, has_condition};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, Testbed, cluster_scenario, until};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::ListParams;
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;

use crate::fixtures::cluster;

const OPERATOR: &str = "etcd-operator";
/// The maximum start delay of most clusters. The delay would be longer if the operator waited for the hanging cluster.
/// One or two clusters may exceed the limit because of a freeze of the machine.
const MAX_START_DELAY: Duration = Duration::from_secs(5);
/// Maximum anonymous memory of the operator with ten clusters, in bytes. The pages of the program file do not count,
/// because they depend on the profile of the build.
const MAX_MEMORY: u64 = 24 * 1024 * 1024;

/// Applies a cluster. Returns the time until the operator has recorded the bootstrap.
async fn start_cluster(sandbox: &Sandbox, name: &str) -> Result<Duration> {
    sandbox.apply(&cluster(&sandbox.env, name, 1)?).await?;
    let applied = Instant::now();
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(
        &clusters,
        name,
        "the bootstrap is recorded",
        DEADLINE,
        |object| field(object, "/status/bootstrap/token").is_string(),
    )
    .await?;
    Ok(applied.elapsed())
}

async fn memory(sandbox: &Sandbox, testbed: &Testbed<'_>) -> Result<u64> {
    let page = Page::of_operator(sandbox, OPERATOR).await?;
    let resident = page.sum("process_resident_memory_bytes", "");
    ensure!(resident > 0.0, "the operator does not report its memory");
    let pods = operator_pods(sandbox, OPERATOR).await?;
    let pod = pods.first().context("the operator has no pod")?;
    testbed.anonymous_memory(pod).await
}

/// Sends a signal to the processes of all members. After SIGSTOP, the processes keep their connections but do not
/// respond.
async fn signal_members(
    sandbox: &Sandbox,
    testbed: &Testbed<'_>,
    name: &str,
    signal: &str,
) -> Result<()> {
    let pods = sandbox.member_pods(name).await?;
    testbed.signal_containers(&pods, signal).await
}

async fn others_are_managed(sandbox: &Sandbox, testbed: &Testbed<'_>) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    signal_members(sandbox, testbed, "hanging", "SIGSTOP").await?;
    await_object(
        &clusters,
        "hanging",
        "the loss is reported",
        DEADLINE,
        |object| has_condition(object, "Available", "False"),
    )
    .await?;
    let mut taken = Vec::new();
    for number in 0..9 {
        taken.push(start_cluster(sandbox, &format!("good-{number}")).await?);
    }
    taken.sort();
    let (typical, slowest) = (taken[6], taken[8]);
    for number in 0..9 {
        sandbox.await_members(&format!("good-{number}"), 1).await?;
    }
    // The operator must reconcile other clusters while the cluster `hanging` does not answer.
    sandbox.scale("good-0", 3).await?;
    sandbox.await_members("good-0", 3).await?;
    await_object(
        &clusters,
        "good-0",
        "the cluster is healthy",
        DEADLINE,
        |object| has_condition(object, "Degraded", "False"),
    )
    .await?;
    let taken = memory(sandbox, testbed).await?;
    eprintln!("    started within {typical:?}, slowest {slowest:?}; {taken} bytes of memory");
    ensure!(
        typical < MAX_START_DELAY,
        "three of nine clusters started only after {typical:?} or later"
    );
    ensure!(taken < MAX_MEMORY, "{taken} bytes of memory");
    let hanging = clusters.get("hanging").await?;
    ensure!(has_condition(&hanging, "Available", "False"));
    Ok(())
}

#[tokio::test]
async fn hanging_cluster_does_not_delay_other_clusters() {
    cluster_scenario("noisy_neighbor", async |sandbox| {
        let testbed = Testbed::of(sandbox)?;
        sandbox.apply(&cluster(&sandbox.env, "hanging", 3)?).await?;
        sandbox.await_members("hanging", 3).await?;
        let outcome = others_are_managed(sandbox, &testbed).await;
        // The processes get SIGCONT even after a failure, because stopped processes would block the deletion of the
        // namespace. Then the cluster `hanging` must become healthy.
        signal_members(sandbox, &testbed, "hanging", "SIGCONT").await?;
        outcome?;
        sandbox.await_members("hanging", 3).await.map(drop)
    })
    .await;
}

/// Ensures that the scale subresource, which `kubectl scale` and autoscalers use, is correct.
async fn ensure_scale_subresource(sandbox: &Sandbox, size: usize) -> Result<()> {
    let words = ["get", "etcdcluster", "c", "--subresource=scale", "-o"];
    let get = async |path: &str| {
        let path = format!("jsonpath={path}");
        sandbox
            .kubectl(&[words.as_slice(), &[path.as_str()]].concat())
            .await
    };
    let numbers = get("{.spec.replicas} {.status.replicas}").await?;
    ensure!(numbers == format!("{size} {size}"), "{numbers}");
    let selector = get("{.status.selector}").await?;
    let pods = sandbox
        .kubectl(&["get", "pods", "-o", "name", "-l", &selector])
        .await?;
    ensure!(pods.lines().count() == size, "{selector}: {pods}");
    Ok(())
}

/// Ensures that the metrics report three healthy members.
async fn ensure_metrics(sandbox: &Sandbox) -> Result<()> {
    let page = Page::of_operator(sandbox, OPERATOR).await?;
    let gauge = |name: &str| page.sum(&format!("etcd_operator_cluster_{name}"), "cluster=\"c\"");
    for (name, expected) in [
        ("desired_members", 3),
        ("ready_members", 3),
        ("healthy_voters", 3),
        ("has_quorum", 1),
        ("degraded", 0),
    ] {
        let found = gauge(name);
        ensure!((found - f64::from(expected)).abs() < 0.5, "{name}: {found}");
    }
    ensure!(gauge("db_size_bytes") > 0.0);
    Ok(())
}

/// The resource versions of the cluster's objects of one kind.
async fn versions<K>(sandbox: &Sandbox) -> Result<Vec<String>>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug,
{
    let selector = ListParams::default().labels("etcd_cluster=c");
    let list = sandbox.api::<K>().list(&selector).await?;
    let line = |one: &K| format!("{} {:?}", one.name_any(), one.resource_version());
    Ok(list.iter().map(line).collect())
}

async fn versions_of_shared(sandbox: &Sandbox) -> Result<Vec<String>> {
    let mut all = versions::<Service>(sandbox).await?;
    ensure!(all.len() == 5, "Services: {all:?}");
    let budgets = versions::<PodDisruptionBudget>(sandbox).await?;
    ensure!(budgets.len() == 1, "budgets: {budgets:?}");
    all.extend(budgets);
    Ok(all)
}

/// A value in the status that changes in each reconcile would trigger the next reconcile, without end.
#[tokio::test]
async fn idle_cluster_is_reconciled_without_writes() {
    cluster_scenario("idle", async |sandbox| {
        sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        let reconciles = async || -> Result<f64> {
            let page = Page::of_operator(sandbox, OPERATOR).await?;
            Ok(page.sum("etcd_operator_cluster_reconcile_duration_count", ""))
        };
        let object = sandbox.await_members("c", 3).await?;
        ensure!(has_condition(&object, "Managed", "True"));
        until("the scale subresource is correct", DEADLINE, async || {
            ensure_scale_subresource(sandbox, 3).await.map(Poll::Done)
        })
        .await?;
        until("the metrics are correct", DEADLINE, async || {
            ensure_metrics(sandbox).await.map(Poll::Done)
        })
        .await?;
        let version = async || {
            let object = clusters.get("c").await?;
            let version = object.metadata.resource_version.context("no version")?;
            let mut versions = versions::<Pod>(sandbox).await?;
            versions.extend(versions_of_shared(sandbox).await?);
            versions.push(version);
            anyhow::Ok(versions)
        };
        // If a poll finds a changed resource version, the cluster was not idle, and the count of reconciles starts
        // again at zero.
        let mut last = (version().await?, reconciles().await?);
        until("five reconciles without a write", DEADLINE, async || {
            let now = (version().await?, reconciles().await?);
            if now.0 != last.0 {
                last = now;
                return Ok(Poll::NotYet("an object was changed".to_owned()));
            }
            Ok(if now.1 >= last.1 + 5.0 {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{} reconciles", now.1 - last.1))
            })
        })
        .await
    })
    .await;
}
