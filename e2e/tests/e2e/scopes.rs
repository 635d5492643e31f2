//! A release manages a list of namespaces, and then all namespaces. `chart_second_release.rs` calls these functions,
//! because that test runs alone, without operators of other tests.

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, await_object, condition};
use e2e::sandbox::RELEASE;
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, chart, until};
use k8s_openapi::api::core::v1::Service;
use kube::api::DeleteParams;

use crate::fixtures::{cluster, may};

const OPERATOR: &str = "etcd-operator";

/// Upgrades the release with these values, and disables the restore operator, which would use CPU time.
async fn upgrade(operators: &Sandbox, values: &str) -> Result<()> {
    let values = format!("restoreOperator.enabled=false,{values}");
    let words = ["--set", values.as_str()];
    chart::install(&operators.env, RELEASE, &operators.namespace, &words).await?;
    operators.await_operators().await
}

/// Waits until the condition Managed names the release in the namespace of `by`.
async fn is_managed(sandbox: &Sandbox, cluster: &str, reason: &str, by: &Sandbox) -> Result<()> {
    let place = format!("in namespace {}", by.namespace);
    let what = format!("Managed by the release {place} ({reason})");
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, cluster, &what, DEADLINE, |object| {
        condition(object, "Managed").is_some_and(|found| {
            let message = found["message"].as_str().unwrap_or_default();
            found["status"] == "True" && found["reason"] == reason && message.ends_with(&place)
        })
    })
    .await
    .map(drop)
}

/// Invariant 28: an EtcdBackup in the tenant's namespace must not back up the cluster `c` in the operators' namespace.
async fn has_no_access(tenant: &Sandbox, operators: &Sandbox, name: &str) -> Result<()> {
    let foreign = format!("http://c-client.{}.svc:2379", operators.namespace);
    let manifest = format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: backups}}\nspec: {{accessModes: \
         [ReadWriteOnce], resources: {{requests: {{storage: 64Mi}}}}}}\n---\napiVersion: \
         etcd.database.coreos.com/v1beta2\nkind: EtcdBackup\nmetadata: {{name: {name}}}\nspec: {{etcdEndpoints: \
         [\"{foreign}\"], storageType: PVC, pvc: {{claimName: backups, path: etcd}}}}\n"
    );
    tenant.apply(&manifest).await?;
    let backups = tenant.objects(Kind::EtcdBackup);
    let refused = await_object(&backups, name, "a rejection", DEADLINE, |object| {
        condition(object, "Complete").is_some_and(|found| found["reason"] == "EndpointNotGranted")
    })
    .await?;
    let message = condition(&refused, "Complete").context("no condition")?["message"].to_string();
    let remedy = format!("--etcd-endpoints={}=c-client", tenant.namespace);
    ensure!(message.contains(&remedy), "{message}");
    Ok(())
}

async fn ensure_right(operators: &Sandbox, namespace: &str, expected: bool) -> Result<()> {
    let allowed = may(operators, OPERATOR, "create", "pods", namespace).await?;
    ensure!(
        allowed == expected,
        "the permission to create pods in {namespace} is {allowed}, expected {expected}"
    );
    Ok(())
}

/// `watchNamespaces`: the release manages its own namespace and that of `tenant`, and has permissions only there. The
/// cluster `c` must exist in the operators' namespace.
pub(crate) async fn watch_namespaces(operators: &Sandbox, tenant: &Sandbox) -> Result<()> {
    let (own, other) = (&operators.namespace, &tenant.namespace);
    upgrade(operators, &format!("watchNamespaces={{{own},{other}}}")).await?;
    for (namespace, expected) in [(own.as_str(), true), (other, true), ("default", false)] {
        ensure_right(operators, namespace, expected).await?;
    }
    tenant.apply(&cluster(&tenant.env, "listed", 1)?).await?;
    tenant.await_members("listed", 1).await?;
    is_managed(tenant, "listed", "Namespaced", operators).await?;
    is_managed(operators, "c", "Namespaced", operators).await?;
    has_no_access(tenant, operators, "of-list").await
}

/// `scope: All`: the release manages objects without the scope annotation in every namespace.
pub(crate) async fn scope_all(operators: &Sandbox, tenant: &Sandbox) -> Result<()> {
    upgrade(operators, "clusterWide=true,scope=All").await?;
    ensure_right(operators, "default", true).await?;
    is_managed(tenant, "listed", "ClusterWide", operators).await?;
    has_no_access(tenant, operators, "of-all").await?;
    // The operator must have permissions in the tenant's namespace: it must create the deleted Service again.
    let services = tenant.api::<Service>();
    services
        .delete("listed-client", &DeleteParams::default())
        .await?;
    until(
        "the client Service is created again",
        DEADLINE,
        async || {
            Ok(match services.get_opt("listed-client").await? {
                Some(_) => Poll::Done(()),
                None => Poll::NotYet(String::from("no Service")),
            })
        },
    )
    .await
}
