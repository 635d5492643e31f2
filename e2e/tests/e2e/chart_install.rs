//! The chart as an administrator installs it: CRDs, Deployments, least rights, and what stays after it is gone.

use anyhow::{Result, ensure};
use e2e::sandbox::RELEASE;
use e2e::{Env, Keyspace, Sandbox, chart, kubectl};

use crate::fixtures::cluster;

/// Whether a ServiceAccount of the namespace may do something there.
async fn may(sandbox: &Sandbox, account: &str, verb: &str, resource: &str) -> Result<bool> {
    let user = format!("--as=system:serviceaccount:{}:{account}", sandbox.namespace);
    // `kubectl` takes what follows a slash for the name of an object.
    let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
    let subresource = format!("--subresource={subresource}");
    let answer = kubectl::run(
        &sandbox.env,
        &[
            "-n",
            &sandbox.namespace,
            "auth",
            "can-i",
            verb,
            resource,
            &subresource,
            &user,
        ],
    )
    .await;
    Ok(answer.is_ok_and(|text| text.trim() == "yes"))
}

/// Each operator has what it needs and not more: account, verb, resource, whether it is allowed.
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
    // Beside claims.
    ("etcd-backup-operator", "create", "pods", true),
    ("etcd-backup-operator", "list", "pods", false),
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
    // Of a seed that was given up, and of the cluster that is restored over.
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

async fn rights_are_what_is_needed(sandbox: &Sandbox) -> Result<()> {
    for (account, verb, resource, allowed) in RIGHTS {
        let found = may(sandbox, account, verb, resource).await?;
        ensure!(
            found == *allowed,
            "{account} {verb} {resource}: allowed is {found}, expected {allowed}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn the_chart_installs_runs_upgrades_and_leaves_clusters_alone() {
    e2e::scenario("chart_install", async |sandbox| {
        // With its CRDs: an upgrade of the release the scenario made.
        let settings = ["--set", "crds.install=true", "--take-ownership"];
        let printed = chart::install(&sandbox.env, RELEASE, &sandbox.namespace, &settings).await?;
        ensure!(
            printed.contains("kubectl"),
            "the notes do not say how to go on: {printed}"
        );
        sandbox.await_operators().await?;
        sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
        sandbox.await_members("c", 3).await?;

        rights_are_what_is_needed(sandbox).await?;

        // A value that does not exist is refused, not ignored.
        let wrong = chart::install(
            &sandbox.env,
            RELEASE,
            &sandbox.namespace,
            &["--set", "noSuchValue=1"],
        )
        .await;
        ensure!(wrong.is_err(), "an unknown value was accepted");

        // Gone again: the cluster serves on, the CRDs and objects are there.
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        let revision = keys.fill("kept/", 50, |_| ()).await?;
        chart::helm(
            &sandbox.env,
            &["uninstall", RELEASE, "-n", &sandbox.namespace, "--wait"],
        )
        .await?;
        ensure!(keys.verify("kept/", 50).await? >= revision);
        ensure!(sandbox.member_pods("c").await?.len() == 3);
        let listed = sandbox
            .kubectl(&["get", "etcdclusters", "-o", "name"])
            .await?;
        ensure!(listed.contains("/c"), "{listed}");
        // And installed anew, they take it over.
        sandbox.install_operators().await?;
        sandbox
            .kubectl(&[
                "delete",
                "pod",
                "-l",
                "etcd_cluster=c",
                "--field-selector=status.phase!=Running",
            ])
            .await?;
        sandbox.await_members("c", 3).await?;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn the_charts_values_have_a_schema() {
    let outcome: Result<()> = async {
        let env = Env::from_vars()?;
        let path = env.chart.to_string_lossy().into_owned();
        chart::helm(&env, &["lint", "--strict", &path]).await?;
        for wrong in [
            "image.pullPolicy=Sometimes",
            "image.repo=x",
            "clusterOperator.replica=2",
            "backupOperator.resources.limit.cpu=1",
            "prometheusRule.backupSeconds=soon",
            "backups.ambientIdentity={team-a=ftp://x}",
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
        // In one namespace nothing of the operators' own rights is the whole cluster's.
        ensure!(!rendered.contains("kind: ClusterRole\n"), "{rendered}");
        Ok(())
    }
    .await;
    if let Err(error) = outcome {
        panic!("{error:?}");
    }
}
