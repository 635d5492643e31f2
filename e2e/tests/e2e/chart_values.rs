//! Installs the operators with all optional objects and settings of the chart, and uses them. The testbed does not
//! enforce NetworkPolicies, so the test only checks their contents.

use std::io::Write as _;

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, backup, restore};
use e2e::objects::{Kind, await_complete};
use e2e::sandbox::{RELEASE, bare_scenario};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, chart, step, until};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt;
use kube::api::ListParams;
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::fixtures::cluster_with;

/// The names of the Deployments, PodDisruptionBudgets and NetworkPolicies.
const NAMES: [&str; 3] = ["shop", "shop-backup", "shop-restore"];
const REPLICAS: u8 = 2;
const KEYS: usize = 50;

const VALUES: &str = r#"
nameOverride: shop-etcd
fullnameOverride: shop
commonLabels: {team: a}
commonAnnotations: {example.com/owner: a}
podSecurityContext: {runAsUser: null, runAsGroup: null, fsGroup: null}
podDisruptionBudget: {enabled: true}
networkPolicy: {enabled: true}
metricsService: {annotations: {prometheus.io/scrape: "true"}}
livenessProbe: {periodSeconds: 20}
readinessProbe: {periodSeconds: 2}
port: 9090
rbac: {aggregate: false}
clusterOperator: &operator
  replicas: 2
  strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}
  dnsPolicy: ClusterFirst
  dnsConfig: {options: [{name: ndots, value: "3"}]}
  podLabels: {tier: operators}
backupOperator: *operator
restoreOperator: *operator
extraObjects:
- |
  apiVersion: v1
  kind: ConfigMap
  metadata: {name: "{{ .Release.Name }}-extra"}
"#;

#[tokio::test]
async fn operators_work_with_all_optional_chart_objects() {
    bare_scenario("chart_values", async |sandbox| {
        step("install with all objects", is_installed(sandbox)).await?;
        step("check the objects", has_objects(sandbox)).await?;
        let words = ["test", RELEASE, "-n", &sandbox.namespace];
        step("run helm test", chart::helm(&sandbox.env, &words)).await?;
        step("manage a cluster and a backup", manages(sandbox)).await
    })
    .await;
}

async fn is_installed(sandbox: &Sandbox) -> Result<()> {
    let mut file = NamedTempFile::new()?;
    file.write_all(VALUES.as_bytes())?;
    let path = file.path().to_string_lossy();
    sandbox.install_operators_with(&["-f", &path]).await?;
    until("all replicas are available", DEADLINE, async || {
        let deployments = sandbox.api::<Deployment>();
        let list = deployments.list(&ListParams::default()).await?;
        let available = |one: &&Deployment| {
            let status = one.status.as_ref();
            status.and_then(|it| it.available_replicas) == Some(REPLICAS.into())
        };
        let ready = list.iter().filter(available).count();
        Ok(if ready == NAMES.len() {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{ready} Deployments"))
        })
    })
    .await
}

async fn network_policy(sandbox: &Sandbox, name: &str) -> Result<Value> {
    let policy = sandbox.api::<NetworkPolicy>().get(name).await?;
    Ok(serde_json::to_value(policy)?)
}

async fn has_objects(sandbox: &Sandbox) -> Result<()> {
    for name in NAMES {
        let budgets = sandbox.api::<PodDisruptionBudget>();
        until("the budget counts the pods", DEADLINE, async || {
            let status = budgets.get(name).await?.status.unwrap_or_default();
            Ok(if status.expected_pods == i32::from(REPLICAS) {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{name} expects {} pods", status.expected_pods))
            })
        })
        .await?;
        let selector = &network_policy(sandbox, name).await?["spec"]["podSelector"];
        let labels = selector["matchLabels"].as_object().context("no labels")?;
        let labels: Option<Vec<String>> = labels
            .iter()
            .map(|(key, value)| Some(format!("{key}={}", value.as_str()?)))
            .collect();
        let labels = labels.context("a label is no text")?.join(",");
        let pods = sandbox.api::<Pod>();
        let pods = pods.list(&ListParams::default().labels(&labels)).await?;
        ensure!(
            pods.items.len() == usize::from(REPLICAS),
            "{name}: {} pods",
            pods.items.len()
        );
        for pod in pods {
            ensure!(pod.labels().get("team").is_some_and(|it| it == "a"));
            ensure!(pod.labels().get("tier").is_some_and(|it| it == "operators"));
            let owner = pod.annotations().get("example.com/owner");
            ensure!(owner.is_some_and(|it| it == "a"));
            let spec = pod.spec.context("a pod without a spec")?;
            let security = spec.security_context.unwrap_or_default();
            ensure!(security.run_as_user.is_none(), "{security:?}");
        }
    }
    let extra = format!("{RELEASE}-extra");
    let found = sandbox.api::<ConfigMap>().get_opt(&extra).await?;
    ensure!(found.is_some(), "extraObjects are missing");
    Ok(())
}

async fn manages(sandbox: &Sandbox) -> Result<()> {
    let s3 = sandbox.env.s3()?;
    let bucket = Bucket::create(s3, &sandbox.namespace).await?;
    sandbox.apply(&aws_secret(s3, "aws")).await?;
    let policy = "  networkPolicy: {}\n";
    let manifest = cluster_with(&sandbox.env, "c", 1, policy)?;
    sandbox.apply(&manifest).await?;
    sandbox.await_members("c", 1).await?;
    // The NetworkPolicy of the cluster must admit the operators by the pod labels that result from the values of the
    // chart.
    let operators = json!({ "matchLabels": {
        "app.kubernetes.io/instance": RELEASE, "app.kubernetes.io/name": "shop-etcd",
    } });
    let policy = network_policy(sandbox, "c-members").await?;
    let rules = policy["spec"]["ingress"].as_array().into_iter().flatten();
    let mut sources = rules.flat_map(|rule| rule["from"].as_array().into_iter().flatten());
    ensure!(
        sources.any(|source| source["podSelector"] == operators),
        "{policy}"
    );
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.fill("kept/", KEYS, |_| ()).await?;
    drop(keys);
    sandbox.scale("c", 3).await?;
    sandbox.await_members("c", 3).await?;

    let path = format!("{}/daily/etcd.backup", bucket.name);
    sandbox.apply(&backup(s3, "first", "c", &path)).await?;
    let backups = sandbox.objects(Kind::EtcdBackup);
    await_complete(&backups, "first", DEADLINE).await?;
    sandbox.delete_cluster("c").await?;
    sandbox.apply(&restore(s3, "back", "c", &path)).await?;
    let restores = sandbox.objects(Kind::EtcdRestore);
    await_complete(&restores, "back", DEADLINE).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.verify("kept/", KEYS).await.map(drop)
}
