//! Installs, upgrades and uninstalls the chart: CRDs, Deployments, minimal permissions, and objects that stay after the
//! uninstall. The EtcdCluster is `example-etcd-cluster.yaml` of coreos/etcd-operator v0.9.4.

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, await_object, conditions_line, field};
use e2e::sandbox::RELEASE;
use e2e::wait::Poll;
use e2e::{DEADLINE, Env, Keyspace, Sandbox, chart, scenario, step, until};
use k8s_openapi::api::core::v1::Service;

use crate::fixtures::{may, newest_version, root};

const CLUSTER: &str = "example-etcd-cluster";
const CLIENT: &str = "example-etcd-cluster-client";

/// Permissions to check: ServiceAccount, verb, resource, and true if the ServiceAccount must have the permission.
const RIGHTS: &[(&str, &str, &str, bool)] = &[
    ("etcd-operator", "create", "pods", true),
    (
        "etcd-operator",
        "create",
        "poddisruptionbudgets.policy",
        true,
    ),
    (
        "etcd-operator",
        "delete",
        "etcdclusters.etcd.database.coreos.com",
        false,
    ),
    ("etcd-operator", "create", "secrets", true),
    ("etcd-operator", "list", "secrets", false),
    ("etcd-operator", "create", "pods/exec", false),
    ("etcd-backup-operator", "get", "secrets", true),
    // The backup operator creates a pod for each backup to a PVC.
    ("etcd-backup-operator", "create", "pods", true),
    ("etcd-backup-operator", "list", "pods", true),
    ("etcd-backup-operator", "create", "pods/exec", false),
    (
        "etcd-backup-operator",
        "get",
        "persistentvolumeclaims",
        true,
    ),
    (
        "etcd-backup-operator",
        "delete",
        "persistentvolumeclaims",
        false,
    ),
    (
        "etcd-backup-operator",
        "delete",
        "etcdclusters.etcd.database.coreos.com",
        false,
    ),
    (
        "etcd-restore-operator",
        "create",
        "etcdclusters.etcd.database.coreos.com",
        true,
    ),
    (
        "etcd-restore-operator",
        "delete",
        "etcdclusters.etcd.database.coreos.com",
        false,
    ),
    // The restore operator deletes the PVCs of failed seeds, and of the members that a restore in place replaces.
    (
        "etcd-restore-operator",
        "delete",
        "persistentvolumeclaims",
        true,
    ),
    (
        "etcd-restore-operator",
        "delete",
        "etcdbackups.etcd.database.coreos.com",
        false,
    ),
    ("etcd-restore-operator", "create", "secrets", false),
    ("etcd-operator", "get", "nodes", false),
    ("etcd-operator", "patch", "pods/resize", true),
    ("etcd-operator", "create", "pods/exec", false),
    ("etcd-operator", "get", "secrets", true),
];

async fn rights_are_minimal(sandbox: &Sandbox) -> Result<()> {
    for (account, verb, resource, allowed) in RIGHTS {
        let found = may(sandbox, account, verb, resource, &sandbox.namespace).await?;
        ensure!(
            found == *allowed,
            "the permission of {account} to {verb} {resource} is {found}, expected {allowed}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn chart_upgrade_and_uninstall_leave_clusters_running() {
    scenario("chart_install", async |sandbox| {
        step("upgrade the release with CRDs", upgrades(sandbox)).await?;
        step("run the example of v0.9.4", runs_old_example(sandbox)).await?;
        step("check the rights", rights_are_minimal(sandbox)).await?;
        step("reject an unknown value", rejects_unknown(sandbox)).await?;
        step("uninstall and install again", is_installed_again(sandbox)).await
    })
    .await;
}

/// Upgrades the release to install the CRDs too. The release was installed without CRDs.
async fn upgrades(sandbox: &Sandbox) -> Result<()> {
    let settings = ["--set", "crds.install=true", "--take-ownership"];
    let printed = chart::install(&sandbox.env, RELEASE, &sandbox.namespace, &settings).await?;
    ensure!(
        printed.contains("kubectl"),
        "the notes that Helm prints name no next step: {printed}"
    );
    sandbox.await_operators().await
}

/// Runs the example of v0.9.4. The test changes the etcd version, because the nodes do not have the image of 3.2.13.
async fn runs_old_example(sandbox: &Sandbox) -> Result<()> {
    let path = root().join("e2e/fixtures/v0.9.4/example-etcd-cluster.yaml");
    let old = std::fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
    ensure!(
        old.contains("3.2.13"),
        "the fixture does not name the old version"
    );
    sandbox.apply(&old).await?;
    // The schema accepts the version 3.2.13, which this release does not support. A condition must name this version.
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = "a condition about 3.2.13";
    await_object(&clusters, CLUSTER, what, DEADLINE, |object| {
        conditions_line(object).contains("3.2.13")
    })
    .await?;
    let manifest = old.replace("3.2.13", &newest_version(&sandbox.env)?);
    sandbox.apply(&manifest).await?;
    let object = sandbox.await_members(CLUSTER, 3).await?;
    ensure!(field(&object, "/status/serviceName") == CLIENT);
    // Clients of coreos/etcd-operator use two Services by name, and pods by label. These Services and pods must exist.
    let services = sandbox.kubectl(&["get", "services", "-o", "name"]).await?;
    for name in [CLUSTER, CLIENT] {
        let line = format!("service/{name}\n");
        ensure!(services.contains(&line), "{services}");
    }
    let pods = sandbox.member_pods(CLUSTER).await?;
    ensure!(pods.len() == 3, "{} pods", pods.len());
    let listed = sandbox.kubectl(&["get", "etcd"]).await?;
    ensure!(listed.contains(CLUSTER), "short name: {listed}");
    Ok(())
}

async fn rejects_unknown(sandbox: &Sandbox) -> Result<()> {
    let unknown = ["--set", "noSuchValue=1"];
    let outcome = chart::install(&sandbox.env, RELEASE, &sandbox.namespace, &unknown).await;
    ensure!(outcome.is_err(), "an unknown value was accepted");
    Ok(())
}

/// Uninstalls the operators, and installs them again. Without operators, the cluster serves clients, and the CRDs and
/// objects stay. The new operators manage the cluster.
async fn is_installed_again(sandbox: &Sandbox) -> Result<()> {
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, CLUSTER).await?;
    let revision = keys.fill("kept/", 50, |_| ()).await?;
    let uninstall = ["uninstall", RELEASE, "-n", &sandbox.namespace, "--wait"];
    chart::helm(&sandbox.env, &uninstall).await?;
    ensure!(keys.verify("kept/", 50).await? >= revision);
    ensure!(sandbox.member_pods(CLUSTER).await?.len() == 3);
    let listed = sandbox
        .kubectl(&["get", "etcdclusters", "-o", "name"])
        .await?;
    ensure!(listed.contains(CLUSTER), "{listed}");
    drop(keys);
    sandbox.kubectl(&["delete", "service", CLIENT]).await?;
    sandbox.install_operators().await?;
    until(
        "the client Service is created again",
        DEADLINE,
        async || {
            let service = sandbox.api::<Service>().get_opt(CLIENT).await?;
            Ok(if service.is_some() {
                Poll::Done(())
            } else {
                Poll::NotYet(String::from("no Service"))
            })
        },
    )
    .await?;
    sandbox.await_members(CLUSTER, 3).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, CLUSTER).await?;
    ensure!(keys.verify("kept/", 50).await? >= revision);
    Ok(())
}

#[tokio::test]
async fn invalid_chart_values_are_rejected_by_schema() {
    let outcome: Result<()> = async {
        let env = Env::from_vars()?;
        let path = env.chart.to_string_lossy().into_owned();
        chart::helm(&env, &["lint", "--strict", &path]).await?;
        for wrong in [
            "image.pullPolicy=Sometimes",
            "image.repo=x",
            "clusterOperator.replica=2",
            "backupOperator.resources.limit.cpu=1",
            "prometheusRule.backupDelaySeconds=soon",
            "backups.ambientIdentity={team-a=ftp://x}",
            "backups.etcdEndpoints={http://x:2379}",
            "clusters.join={team-a=http://x:2379}",
        ] {
            let rendered = chart::helm(&env, &["template", "x", &path, "--set", wrong]).await;
            ensure!(rendered.is_err(), "{wrong} was accepted");
        }
        let more = "podMonitor.enabled=true,prometheusRule.enabled=true";
        let rendered = chart::helm(&env, &["template", "x", &path, "--set", more]).await?;
        let monitors = rendered.matches("kind: PodMonitor").count();
        ensure!(monitors == 3, "{monitors} PodMonitors for three operators");
        let rules = rendered.matches("kind: PrometheusRule").count();
        ensure!(rules == 1, "{rules} PrometheusRules");
        let absent = rendered.matches("alert: EtcdOperatorAbsent").count();
        ensure!(absent == 3, "{absent} alerts on three operators");
        // The chart must render no ClusterRole, because namespaced operators have no cluster-wide permissions.
        ensure!(!rendered.contains("kind: ClusterRole\n"), "{rendered}");
        Ok(())
    }
    .await;
    if let Err(error) = outcome {
        panic!("{error:?}");
    }
}
