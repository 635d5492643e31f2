//! Cluster-wide and namespaced operators run in the same Kubernetes cluster. The scope annotation of an object selects
//! its operators. If no operator manages an object, its condition `Managed` is False.

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, await_complete, await_object, condition};
use e2e::{DEADLINE, Sandbox, step};
use kube::api::DynamicObject;

use crate::ambient_identity::{self, Grant};
use crate::deletion_backup::await_finalizer;
use crate::fixtures::{DURABLE, cluster, may, newest_version, root};

const SCOPE: &str = "etcd.database.coreos.com/scope";
const OPERATOR: &str = "etcd-operator";

/// The manifest of a cluster with one member, with or without the scope annotation.
fn manifest(sandbox: &Sandbox, name: &str, annotated: bool) -> Result<String> {
    let plain = cluster(&sandbox.env, name, 1)?;
    if !annotated {
        return Ok(plain);
    }
    let line = format!("  name: {name}\n");
    let more = format!("{line}  annotations:\n    {SCOPE}: clusterwide\n");
    Ok(plain.replacen(&line, &more, 1))
}

/// The example with the scope annotation, changed to this name, one member, and the [`newest_version`].
fn example(sandbox: &Sandbox, name: &str) -> Result<String> {
    let path = root().join("examples/example-etcd-cluster-annotated.yaml");
    let text = std::fs::read_to_string(path)?;
    let version = format!("version: \"{}\"", newest_version(&sandbox.env)?);
    Ok(text
        .replace("example-etcd-cluster-annotated", name)
        .replace("size: 3", "size: 1")
        .replace("version: 3.7.3", &version))
}

/// Waits until the condition `Managed` has this status and reason, and returns the EtcdCluster.
async fn await_managed(
    sandbox: &Sandbox,
    name: &str,
    status: &str,
    reason: &str,
) -> Result<DynamicObject> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = format!("Managed={status} ({reason})");
    await_object(&clusters, name, &what, DEADLINE, |object| {
        condition(object, "Managed")
            .is_some_and(|found| found["status"] == status && found["reason"] == reason)
    })
    .await
}

/// Without cluster-wide operators, the namespaced operator reports that no operator manages an annotated object.
async fn has_no_manager_yet(namespaced: &Sandbox) -> Result<()> {
    namespaced
        .apply(&manifest(namespaced, "own", false)?)
        .await?;
    namespaced
        .apply(&manifest(namespaced, "handed", true)?)
        .await?;
    namespaced.await_members("own", 1).await?;
    await_managed(namespaced, "own", "True", "Namespaced").await?;
    let unmanaged = await_managed(namespaced, "handed", "False", "NotManaged").await?;
    let message = condition(&unmanaged, "Managed").context("no condition")?["message"].to_string();
    ensure!(
        message.contains("--cluster-wide"),
        "the message names no remedy: {message}"
    );
    namespaced
        .await_event(Kind::EtcdCluster, "handed", &["NotManaged"])
        .await?;
    ensure!(namespaced.member_pods("handed").await?.is_empty());
    Ok(())
}

/// Cluster-wide operators manage exactly the annotated objects, in the namespace of the namespaced operator and in a
/// namespace without operators.
async fn have_one_manager(namespaced: &Sandbox, empty: &Sandbox) -> Result<()> {
    empty.apply(&example(empty, "handed")?).await?;
    empty.apply(&manifest(empty, "plain", false)?).await?;
    for sandbox in [namespaced, empty] {
        sandbox.await_members("handed", 1).await?;
        await_managed(sandbox, "handed", "True", "ClusterWide").await?;
    }
    let unmanaged = await_managed(empty, "plain", "False", "NotManaged").await?;
    let message = condition(&unmanaged, "Managed").context("no condition")?["message"].to_string();
    ensure!(
        message.contains(SCOPE),
        "the message names no remedy: {message}"
    );
    ensure!(empty.member_pods("plain").await?.is_empty());
    await_managed(namespaced, "own", "True", "Namespaced").await?;

    // The test sets the annotation that the message of the condition recommends.
    let annotation = format!("{SCOPE}=clusterwide");
    empty
        .kubectl(&["annotate", "etcdcluster", "plain", &annotation])
        .await?;
    empty.await_members("plain", 1).await?;
    await_managed(empty, "plain", "True", "ClusterWide")
        .await
        .map(drop)
}

/// The cluster-wide operator has its permissions in every namespace, but may neither list Secrets nor delete
/// EtcdClusters. The namespaced operator has permissions only in its own namespace.
async fn have_least_rights(namespaced: &Sandbox, wide: &Sandbox, elsewhere: &str) -> Result<()> {
    let clusters = "etcdclusters.etcd.database.coreos.com";
    for (operators, verb, resource, namespace, expected) in [
        (wide, "create", "pods", elsewhere, true),
        (wide, "list", "secrets", elsewhere, false),
        (wide, "delete", clusters, elsewhere, false),
        (
            namespaced,
            "create",
            "pods",
            namespaced.namespace.as_str(),
            true,
        ),
        (namespaced, "get", "pods", elsewhere, false),
    ] {
        let allowed = may(operators, OPERATOR, verb, resource, namespace).await?;
        let own = &operators.namespace;
        ensure!(
            allowed == expected,
            "the permission of {own} to {verb} {resource} in {namespace} is {allowed}, expected {expected}"
        );
    }
    Ok(())
}

/// The operators connect only to clusters in the namespace of the object that they reconcile. The cluster `own` in
/// another namespace has neither TLS nor authentication, so only this rule protects it.
async fn have_no_access_to_other_namespaces(
    grant: &Grant,
    tenant: &Sandbox,
    other: &Sandbox,
) -> Result<()> {
    let foreign = format!("http://own-client.{}.svc:2379", other.namespace);
    let backup = |name: &str, endpoint: &str| {
        format!(
            "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdBackup\nmetadata: {{name: {name}, annotations: \
             {{{SCOPE}: clusterwide}}}}\nspec: {{etcdEndpoints: [\"{endpoint}\"], storageType: S3, s3: {{path: {}, \
             forcePathStyle: true}}}}\n",
            grant.path(name)
        )
    };
    let backups = tenant.objects(Kind::EtcdBackup);
    tenant.apply(&backup("foreign-etcd", &foreign)).await?;
    let refused = await_object(
        &backups,
        "foreign-etcd",
        "a rejection",
        DEADLINE,
        |object| {
            condition(object, "Complete")
                .is_some_and(|found| found["reason"] == "EndpointNotGranted")
        },
    )
    .await?;
    let message = condition(&refused, "Complete").context("no condition")?["message"].to_string();
    let remedy = format!("--etcd-endpoints={}=own-client", tenant.namespace);
    ensure!(message.contains(&remedy), "{message}");
    tenant
        .await_event(Kind::EtcdBackup, "foreign-etcd", &["EndpointNotGranted"])
        .await?;
    tenant
        .apply(&backup("own-etcd", "http://handed-client:2379"))
        .await?;
    await_complete(&backups, "own-etcd", DEADLINE).await?;

    let joins = manifest(tenant, "joins", true)?;
    let line = format!("    {SCOPE}: clusterwide\n");
    let join = format!("{line}    etcd.database.coreos.com/join: {foreign}\n");
    tenant.apply(&joins.replacen(&line, &join, 1)).await?;
    let clusters = tenant.objects(Kind::EtcdCluster);
    let refused = await_object(&clusters, "joins", "a rejection", DEADLINE, |object| {
        condition(object, "Degraded").is_some_and(|found| found["reason"] == "JoinRefused")
    })
    .await?;
    let message = condition(&refused, "Degraded").context("no condition")?["message"].to_string();
    let remedy = format!("--join={}=own-client", tenant.namespace);
    ensure!(message.contains(&remedy), "{message}");
    ensure!(tenant.member_pods("joins").await?.is_empty());
    ensure!(other.member_pods("own").await?.len() == 1);
    Ok(())
}

/// The deletion of a namespace ends, although it contains a cluster whose deletion waits for a backup (invariant 41).
/// No backup is possible, because the namespace controller deletes the pods. The operators run in another namespace.
async fn namespace_with_waiting_deletion_is_deleted(empty: &Sandbox) -> Result<()> {
    let plain = manifest(empty, "guarded", true)?;
    let policy = "  deletionPolicy: BackupThenDelete\n  backup:\n    storageType: S3\n    s3: {path: \
                  no-such-bucket/etcd}\n    backupPolicy: {schedule: \"@yearly\"}\n";
    empty.apply(&format!("{plain}{DURABLE}{policy}")).await?;
    empty.await_members("guarded", 1).await?;
    await_finalizer(empty, "guarded").await?;
    let words = ["delete", "namespace", &empty.namespace, "--timeout=300s"];
    empty.kubectl(&words).await.map(drop)
}

async fn run_together(namespaced: &Sandbox, wide: &Sandbox, empty: &Sandbox) -> Result<()> {
    let first = has_no_manager_yet(namespaced);
    step("report objects without a manager", first).await?;
    let grant = Grant::create(wide, empty).await?;
    step("install cluster-wide operators", grant.install(wide)).await?;
    let second = have_one_manager(namespaced, empty);
    step("manage annotated objects", second).await?;
    let third = have_least_rights(namespaced, wide, &empty.namespace);
    step("check the rights", third).await?;
    let fourth =
        ambient_identity::only_granted_identity_is_used(&grant, empty, "handed", namespaced);
    step("use the operators' identity", fourth).await?;
    let fifth = have_no_access_to_other_namespaces(&grant, empty, namespaced);
    step("refuse clusters of other namespaces", fifth).await?;
    let sixth = namespace_with_waiting_deletion_is_deleted(empty);
    step("delete a namespace", sixth).await
}

mod serial {
    use e2e::sandbox::RELEASE;
    use e2e::{Sandbox, chart, cluster_scenario};

    use super::run_together;
    use crate::ambient_identity::remove_policies;

    #[tokio::test]
    async fn clusterwide_operators_manage_only_annotated_objects() {
        cluster_scenario("clusterwide_own", async |namespaced| {
            let wide = Sandbox::create("clusterwide").await?;
            let empty = Sandbox::create("clusterwide_none").await?;
            let outcome = run_together(namespaced, &wide, &empty).await;
            if outcome.is_err() {
                wide.print_state().await;
                empty.print_state().await;
            }
            // The release of `wide` is uninstalled before the namespace is deleted, because the ClusterRoles and
            // admission policies of the release are cluster-scoped and would outlive the namespace.
            let uninstall = ["uninstall", RELEASE, "-n", &wide.namespace, "--wait"];
            let uninstalled = chart::helm(&wide.env, &uninstall).await;
            let removed = remove_policies(&wide, &empty).await;
            empty.delete().await;
            wide.delete().await;
            outcome?;
            removed?;
            uninstalled.map(drop)
        })
        .await;
    }
}
