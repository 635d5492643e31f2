//! Clusters form, serve clients, and are deleted when their EtcdClusters are deleted.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use e2e::objects::{Kind, await_object, field, has_condition, ready_members};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, Writer, cluster_scenario, step, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::ListParams;

use crate::fixtures::{DURABLE, cluster, cluster_with};

#[tokio::test]
async fn clusters_form_serve_and_are_deleted() {
    cluster_scenario("bootstrap", async |sandbox| {
        step("form three members", three_members(sandbox)).await?;
        step("use the IP family of the nodes", ip_family(sandbox)).await?;
        step("form a cluster from a seed", a_seed(sandbox)).await?;
        step("delete the clusters", deleted(sandbox)).await
    })
    .await;
}

async fn three_members(sandbox: &Sandbox) -> Result<()> {
    sandbox.apply(&cluster(&sandbox.env, "plain", 3)?).await?;
    sandbox.await_members("plain", 3).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let object = await_object(
        &clusters,
        "plain",
        "the cluster is healthy",
        DEADLINE,
        |object| {
            field(object, "/status/phase") == "Running"
                && field(object, "/status/currentVersion") == field(object, "/spec/version")
                && has_condition(object, "Available", "True")
                && has_condition(object, "Degraded", "False")
                && ready_members(object).len() == 3
        },
    )
    .await?;
    ensure!(field(&object, "/status/serviceName") == "plain-client");
    ensure!(field(&object, "/status/clientPort") == 2379);

    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "plain").await?;
    keys.fill("boot/", 100, |_| ()).await?;
    keys.verify("boot/", 100).await?;
    let id = format!("{:x}", keys.cluster_id().await?);
    ensure!(
        field(&object, "/status/clusterID") == id.as_str(),
        "clusterID: {id}"
    );

    // etcd, the pods and the status must list the same members.
    let members = keys.members().await?.into_iter();
    let mut members: Vec<String> = members.map(|(name, _)| name).collect();
    members.sort();
    let mut ready = ready_members(&object);
    ready.sort();
    ensure!(members == ready, "etcd: {members:?}, status: {ready:?}");
    let pods = sandbox.member_pods("plain").await?.into_iter();
    let mut pods: Vec<String> = pods.filter_map(|pod| pod.metadata.name).collect();
    pods.sort();
    ensure!(members == pods, "etcd: {members:?}, pods: {pods:?}");
    until("one PDB allows one disruption", DEADLINE, async || {
        let budgets = budgets(sandbox).await?;
        let allowed: Vec<Option<i32>> = budgets
            .iter()
            .map(|budget| budget.status.as_ref().map(|it| it.disruptions_allowed))
            .collect();
        Ok(if allowed == [Some(1)] {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{allowed:?}"))
        })
    })
    .await
}

/// All members and Services have only addresses of the testbed's IP family. Without this check, tests for IPv6 could
/// pass with IPv4.
async fn ip_family(sandbox: &Sandbox) -> Result<()> {
    let Some(family) = sandbox.env.ip_family.as_deref() else {
        return Ok(());
    };
    let mut addresses = Vec::new();
    for pod in sandbox.member_pods("plain").await? {
        let status = pod.status.unwrap_or_default();
        addresses.extend(status.pod_ips.into_iter().flatten().map(|one| one.ip));
    }
    let services = sandbox
        .api::<Service>()
        .list(&ListParams::default())
        .await?;
    for service in services.items {
        let spec = service.spec.unwrap_or_default();
        ensure!(
            spec.ip_families == Some(vec![family.to_owned()]),
            "{:?}: {:?}",
            service.metadata.name,
            spec.ip_families
        );
        let own = spec.cluster_ips.into_iter().flatten();
        addresses.extend(own.filter(|address| address != "None"));
    }
    // Three pods, three member Services and the client Service have at least seven addresses.
    ensure!(addresses.len() >= 7, "{addresses:?}");
    for address in addresses {
        let is_ipv6 = address.parse::<IpAddr>()?.is_ipv6();
        ensure!(is_ipv6 == (family == "IPv6"), "{address} is not {family}");
    }
    Ok(())
}

async fn budgets(sandbox: &Sandbox) -> Result<Vec<PodDisruptionBudget>> {
    let budgets = sandbox.api::<PodDisruptionBudget>();
    Ok(budgets.list(&ListParams::default()).await?.items)
}

/// `bootstrap: Seed`: one member forms the cluster, and two more members join as learners. Then the PVC of the first
/// member is deleted, and the operator replaces this member while clients are served.
async fn a_seed(sandbox: &Sandbox) -> Result<()> {
    let more = format!("  bootstrap: Seed\n{DURABLE}");
    let manifest = cluster_with(&sandbox.env, "durable", 3, &more)?;
    sandbox.apply(&manifest).await?;
    let object = sandbox.await_members("durable", 3).await?;
    let first = field(&object, "/status/bootstrap/members");
    ensure!(
        first.as_array().is_some_and(|members| members.len() == 1),
        "first members: {first}"
    );
    let seed = first[0].as_str().unwrap_or_default().to_owned();
    sandbox
        .await_event(Kind::EtcdCluster, "durable", &["MemberPromoted"])
        .await?;

    // The PVC stays until the operator has replaced the member, because Kubernetes keeps a deleted PVC while a pod
    // uses it.
    let writer = Writer::start(sandbox, "durable").await?;
    writer.await_more(10).await?;
    sandbox
        .kubectl(&["delete", "pvc", &seed, "--wait=false"])
        .await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = "the seed is replaced";
    await_object(&clusters, "durable", what, DEADLINE, |object| {
        let ready = ready_members(object);
        ready.len() == 3 && !ready.contains(&seed) && has_condition(object, "Recovering", "False")
    })
    .await?;
    writer.await_more(10).await?;
    let tally = writer.finish("deletion of the seed's PVC").await;
    tally.map(drop)
}

/// Deletes the clusters, and ensures that all their objects are deleted.
async fn deleted(sandbox: &Sandbox) -> Result<()> {
    sandbox
        .kubectl(&["delete", "etcdcluster", "plain", "durable"])
        .await?;
    let what = "pods, volumes and Services are deleted";
    until(what, DEADLINE, async || {
        let selector = ListParams::default().labels("etcd_cluster in (plain, durable)");
        let pods = sandbox.api::<Pod>().list(&selector).await?.items.len();
        let volumes = sandbox.api::<PersistentVolumeClaim>();
        let volumes = volumes.list(&selector).await?.items.len();
        let services = sandbox.api::<Service>().list(&selector).await?.items.len();
        let budgets = budgets(sandbox).await?.len();
        Ok(if pods + volumes + services + budgets == 0 {
            Poll::Done(())
        } else {
            Poll::NotYet(format!(
                "{pods} pods, {volumes} volumes, {services} Services, {budgets} PDBs"
            ))
        })
    })
    .await
}
