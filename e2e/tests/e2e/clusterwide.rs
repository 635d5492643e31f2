//! A cluster-wide operator and a namespaced one in the same Kubernetes: each object has one manager, by its
//! annotation, and an object that has none says so.

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, await_object, condition};
use e2e::sandbox::RELEASE;
use e2e::{PATIENCE, Sandbox, chart, kubectl, scenario};
use kube::api::DynamicObject;
use tokio::sync::Mutex;

use crate::fixtures::cluster;

const SCOPE: &str = "etcd.database.coreos.com/scope";

/// Held by a test while its cluster-wide operators run: they would take each other's objects. `cargo xtask test` runs
/// each test in a process of its own, and never two of the modules `serial` at a time; this is for all other ways.
pub(crate) static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

/// A cluster of one member, annotated or not.
fn manifest(sandbox: &Sandbox, name: &str, annotated: bool) -> Result<String> {
    let plain = cluster(&sandbox.env, name, 1)?;
    if !annotated {
        return Ok(plain);
    }
    let line = format!("  name: {name}\n");
    let more = format!("{line}  annotations:\n    {SCOPE}: clusterwide\n");
    Ok(plain.replacen(&line, &more, 1))
}

/// Waits until the condition `Managed` has this status and reason.
async fn await_managed(
    sandbox: &Sandbox,
    name: &str,
    status: &str,
    reason: &str,
) -> Result<DynamicObject> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = format!("Managed={status} ({reason})");
    await_object(&clusters, name, &what, PATIENCE, |object| {
        condition(object, "Managed")
            .is_some_and(|found| found["status"] == status && found["reason"] == reason)
    })
    .await
}

/// Whether the cluster operator of a namespace may do something in another one.
async fn may(operators: &Sandbox, verb: &str, resource: &str, namespace: &str) -> bool {
    let user = format!(
        "--as=system:serviceaccount:{}:etcd-operator",
        operators.namespace
    );
    let words = ["-n", namespace, "auth", "can-i", verb, resource, &user];
    let answer = kubectl::run(&operators.env, &words).await;
    answer.is_ok_and(|text| text.trim() == "yes")
}

async fn live_together(namespaced: &Sandbox, wide: &Sandbox, empty: &Sandbox) -> Result<()> {
    // Before there is a cluster-wide operator, the namespaced one says that nobody manages what asks for one.
    namespaced
        .apply(&manifest(namespaced, "own", false)?)
        .await?;
    namespaced
        .apply(&manifest(namespaced, "handed", true)?)
        .await?;
    namespaced.await_members("own", 1).await?;
    await_managed(namespaced, "own", "True", "Namespaced").await?;
    let nobodys = await_managed(namespaced, "handed", "False", "NotManaged").await?;
    let said = condition(&nobodys, "Managed").context("just seen")?["message"].to_string();
    ensure!(said.contains("--cluster-wide"), "no remedy: {said}");
    namespaced
        .await_event(Kind::EtcdCluster, "handed", &["NotManaged"])
        .await?;
    ensure!(namespaced.member_pods("handed").await?.is_empty());

    // A cluster-wide one takes it, there and in a namespace without operators, and leaves alone what is not handed
    // to it.
    wide.install_operators_with(&["--set", "clusterWide=true"])
        .await?;
    empty.apply(&manifest(empty, "handed", true)?).await?;
    empty.apply(&manifest(empty, "plain", false)?).await?;
    for sandbox in [namespaced, empty] {
        sandbox.await_members("handed", 1).await?;
        await_managed(sandbox, "handed", "True", "ClusterWide").await?;
    }
    let nobodys = await_managed(empty, "plain", "False", "NotManaged").await?;
    let said = condition(&nobodys, "Managed").context("just seen")?["message"].to_string();
    ensure!(said.contains(SCOPE), "no remedy: {said}");
    ensure!(empty.member_pods("plain").await?.is_empty());
    await_managed(namespaced, "own", "True", "Namespaced").await?;

    // Its remedy works.
    let annotation = format!("{SCOPE}=clusterwide");
    empty
        .kubectl(&["annotate", "etcdcluster", "plain", &annotation])
        .await?;
    empty.await_members("plain", 1).await?;
    await_managed(empty, "plain", "True", "ClusterWide").await?;

    // The one has rights everywhere, the other in its own namespace.
    let elsewhere = &empty.namespace;
    ensure!(may(wide, "create", "pods", elsewhere).await);
    ensure!(!may(wide, "list", "secrets", elsewhere).await);
    ensure!(
        !may(
            wide,
            "delete",
            "etcdclusters.etcd.database.coreos.com",
            elsewhere
        )
        .await
    );
    ensure!(may(namespaced, "create", "pods", &namespaced.namespace).await);
    ensure!(!may(namespaced, "get", "pods", elsewhere).await);
    Ok(())
}

mod serial {
    use super::{ONE_AT_A_TIME, RELEASE, Sandbox, chart, live_together, scenario};

    #[tokio::test]
    async fn every_object_has_one_manager_by_its_annotation_or_says_that_it_has_none() {
        let _one = ONE_AT_A_TIME.lock().await;
        scenario("clusterwide_own", async |namespaced| {
            let wide = Sandbox::create("clusterwide").await?;
            let empty = Sandbox::create("clusterwide_none").await?;
            let outcome = live_together(namespaced, &wide, &empty).await;
            if outcome.is_err() {
                wide.print_state().await;
                empty.print_state().await;
            }
            // Its ClusterRoles are no namespace's.
            let gone = ["uninstall", RELEASE, "-n", &wide.namespace, "--wait"];
            let uninstalled = chart::helm(&wide.env, &gone).await;
            empty.delete().await;
            wide.delete().await;
            outcome?;
            uninstalled.map(drop)
        })
        .await;
    }
}
