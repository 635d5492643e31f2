//! The operators of the commit before, built from it and installed with its chart, are replaced by today's under clients
//! that write: no member is restarted. And its definitions are replaced by today's: no object is lost or changed.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use e2e::metrics::{Page, operator_pods};
use e2e::sandbox::bare;
use e2e::wait::Look;
use e2e::{PATIENCE, Sandbox, Writer, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::fixtures::{DURABLE, cluster, cluster_with};
use crate::tls_generated::{GENERATED, client};

/// On volumes, without, and with certificates the operator makes.
const CLUSTERS: [&str; 3] = ["c", "bare", "tls"];
const OPERATORS: [&str; 3] = [
    "etcd-operator",
    "etcd-backup-operator",
    "etcd-restore-operator",
];
/// Clocks are set meanwhile: what etcd says of its start may be a little off.
const CLOCKS: f64 = 3.0;

/// What would be another if a member had been started again.
#[derive(Debug, PartialEq)]
struct Life {
    pod: String,
    /// Of each container: its name, its ID, when it began, how often it was started again.
    containers: Vec<(String, String, String, i32)>,
}

/// The life of every member of a cluster, by pod, and when its etcd says that it began.
async fn lives(sandbox: &Sandbox, cluster: &str) -> Result<BTreeMap<String, (Life, f64)>> {
    let mut lives = BTreeMap::new();
    for pod in sandbox.member_pods(cluster).await? {
        let page = Page::of_member(sandbox, &pod.name_any()).await?;
        let began = page.sum("process_start_time_seconds", "");
        ensure!(began > 1.0, "etcd does not say when it began");
        lives.insert(pod.name_any(), (life(&pod)?, began));
    }
    ensure!(lives.len() == 3, "{cluster} has {} members", lives.len());
    Ok(lives)
}

fn life(pod: &Pod) -> Result<Life> {
    let status = pod.status.as_ref().context("no status")?;
    let parts = [&status.init_container_statuses, &status.container_statuses];
    let mut containers = Vec::new();
    for one in parts.into_iter().flatten().flatten() {
        let state = serde_json::to_value(&one.state)?;
        let began = &state["running"]["startedAt"];
        containers.push((
            one.name.clone(),
            one.container_id.clone().unwrap_or_default(),
            began.as_str().unwrap_or_default().to_owned(),
            one.restart_count,
        ));
    }
    ensure!(!containers.is_empty(), "{} has not begun", pod.name_any());
    Ok(Life {
        pod: pod.uid().context("no UID")?,
        containers,
    })
}

/// No pod, no container and no etcd is another one.
async fn ensure_same(
    sandbox: &Sandbox,
    before: &BTreeMap<&str, BTreeMap<String, (Life, f64)>>,
) -> Result<()> {
    for (cluster, before) in before {
        let now = lives(sandbox, cluster).await?;
        for (name, (life, began)) in before {
            let (other, again) = now
                .get(name)
                .with_context(|| format!("{name} of {cluster} is gone"))?;
            ensure!(life == other, "{name}: {life:?} became {other:?}");
            ensure!(
                (began - again).abs() < CLOCKS,
                "{name}: etcd began at {began}, and now at {again}"
            );
        }
    }
    Ok(())
}

/// Waits until the three operators are these, and none of any other image is left.
async fn await_image(sandbox: &Sandbox, image: &str) -> Result<()> {
    let what = format!("the operators run {image}, and no other");
    until(&what, PATIENCE, async || {
        let mut seen = Vec::new();
        for operator in OPERATORS {
            for pod in operator_pods(sandbox, operator).await? {
                let pod = serde_json::to_value(&pod)?;
                seen.push(pod["spec"]["containers"][0]["image"].clone());
            }
        }
        let all = seen.iter().all(|found| found == image);
        Ok(if all && seen.len() == OPERATORS.len() {
            Look::Done(())
        } else {
            Look::NotYet(format!("{seen:?}"))
        })
    })
    .await
}

/// Has the operator put a label on all pods: it is at work on every cluster, and has seen all of each.
async fn await_work(sandbox: &Sandbox) -> Result<()> {
    let patch = json!({ "spec": { "pod": { "labels": { "team": "a" } } } }).to_string();
    for name in CLUSTERS {
        let words = ["patch", "etcdcluster", name, "--type=merge", "-p", &patch];
        sandbox.kubectl(&words).await?;
    }
    for name in CLUSTERS {
        let what = format!("every pod of {name} has the label");
        until(&what, PATIENCE, async || {
            let pods = sandbox.member_pods(name).await?;
            let has = |pod: &&Pod| pod.labels().get("team").is_some_and(|team| team == "a");
            let count = pods.iter().filter(has).count();
            Ok(if count == 3 {
                Look::Done(())
            } else {
                Look::NotYet(format!("{count} of {}", pods.len()))
            })
        })
        .await?;
        sandbox.await_members(name, 3).await?;
    }
    Ok(())
}

#[tokio::test]
async fn no_member_restarts_when_the_operators_of_the_commit_before_are_replaced() {
    bare("operator_before", async |sandbox| {
        let (before, _) = sandbox.env.before()?;
        ensure!(before.image != sandbox.env.image, "it is the same image");
        sandbox.install_operators_of(&before, &[]).await?;
        await_image(sandbox, &before.image).await?;
        for manifest in [
            cluster_with(&sandbox.env, "c", 3, DURABLE)?,
            cluster(&sandbox.env, "bare", 3)?,
            cluster_with(&sandbox.env, "tls", 3, &format!("{DURABLE}{GENERATED}"))?,
        ] {
            sandbox.apply(&manifest).await?;
        }
        let mut members = BTreeMap::new();
        for name in CLUSTERS {
            sandbox.await_members(name, 3).await?;
            members.insert(name, lives(sandbox, name).await?);
        }
        let identity = client(sandbox, "tls").await?;
        let writers = [
            Writer::start(sandbox, "c").await?,
            Writer::start(sandbox, "bare").await?,
            Writer::start_tls(sandbox, "tls", &identity).await?,
        ];

        sandbox.install_operators().await?;
        await_image(sandbox, &sandbox.env.image).await?;
        await_work(sandbox).await?;
        ensure_same(sandbox, &members).await?;
        for writer in &writers {
            writer.await_more(20).await?;
        }
        ensure_same(sandbox, &members)
            .await
            .context("a little later")?;
        for (writer, name) in writers.into_iter().zip(CLUSTERS) {
            // Nothing that was acknowledged is lost; how long a write takes is the machine's business.
            let what = format!("the operators were replaced, cluster {name}");
            writer.finish(&what).await?;
        }
        Ok(())
    })
    .await;
}

/// They change the definitions of the whole Kubernetes cluster.
mod alone {
    use std::path::Path;

    use e2e::sandbox::install_crds;
    use serde_json::Map;

    use super::*;

    const KINDS: &str = "etcdclusters,etcdbackups,etcdrestores";
    /// The fixture whose cluster gets a status.
    const CLUSTER: &str = "cluster-domain";

    #[tokio::test]
    async fn objects_stay_as_they_are_when_the_definitions_of_the_commit_before_are_replaced() {
        bare("definitions_before", async |sandbox| {
            let outcome = definitions_are_replaced(sandbox).await;
            // The tests that follow need today's, whatever came out.
            let back = install_crds(&sandbox.env).await;
            outcome.and(back)
        })
        .await;
    }

    async fn definitions_are_replaced(sandbox: &Sandbox) -> Result<()> {
        let (before, tree) = sandbox.env.before()?;
        let manifests = accepted(&tree)?;
        install_crds(&before).await?;
        // The API server takes a moment until it goes by them.
        until("the objects are made", PATIENCE, async || {
            sandbox.apply(&manifests).await.map(Look::Done)
        })
        .await?;
        let status = json!({ "status": {
            "phase": "Running", "size": 3, "clusterID": "8ab5ab2f1c5f0b9f",
            "members": { "ready": ["a-1", "a-2", "a-3"], "unready": [] },
        } })
        .to_string();
        let words = ["patch", "etcdcluster", CLUSTER, "--subresource=status"];
        let words = [&words[..], &["--type=merge", "-p", &status]].concat();
        sandbox.kubectl(&words).await?;
        let made = objects(sandbox).await?;
        let patched = &made[&format!("EtcdCluster/{CLUSTER}")];
        ensure!(patched["status"]["size"] == 3, "{patched}");

        install_crds(&sandbox.env).await?;
        let today = accepted(&crate::fixtures::root())?;
        until("today's objects are accepted", PATIENCE, async || {
            sandbox.dry_run(&today).await.map(Look::Done)
        })
        .await?;
        let found = objects(sandbox).await?;
        ensure!(
            made.len() == found.len(),
            "{} became {}",
            made.len(),
            found.len()
        );
        for (name, before) in &made {
            let now = found.get(name).with_context(|| format!("{name} is gone"))?;
            ensure!(holds(before, now), "{name}: {before} became {now}");
        }
        // And each can be changed, as its owner and its operator do.
        let annotate = ["annotate", KINDS, "--all", "e2e=changed"];
        sandbox.kubectl(&annotate).await.map(drop)
    }

    /// All manifests that a commit accepts, each under a name of its own.
    fn accepted(tree: &Path) -> Result<String> {
        let folder = tree.join("e2e/fixtures/cel/accepted");
        let mut all = String::new();
        for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            let name = path.file_stem().context("no name")?.to_string_lossy();
            let text = std::fs::read_to_string(&path)?;
            let mut object: Value = serde_yaml_ng::from_str(&text)?;
            // Names of clusters end at 52 characters.
            object["metadata"]["name"] = json!(&name[..name.len().min(52)]);
            all.push_str("---\n");
            all.push_str(&object.to_string());
            all.push('\n');
        }
        Ok(all)
    }

    /// All objects of the namespace, by kind and name.
    async fn objects(sandbox: &Sandbox) -> Result<BTreeMap<String, Value>> {
        let text = sandbox.kubectl(&["get", KINDS, "-o", "json"]).await?;
        let list: Value = serde_json::from_str(&text)?;
        let items = list["items"].as_array().context("no list")?;
        let named = |item: &Value| {
            let (kind, name) = (item["kind"].as_str()?, item["metadata"]["name"].as_str()?);
            Some((format!("{kind}/{name}"), item.clone()))
        };
        items
            .iter()
            .map(|item| named(item).context("an object without a name"))
            .collect()
    }

    /// Whether all that was there is there as it was; a new field may have its default.
    fn holds(before: &Value, now: &Value) -> bool {
        match (before, now) {
            (Value::Object(before), Value::Object(now)) => {
                let is_there = |(key, value)| {
                    let now: &Map<String, Value> = now;
                    now.get::<String>(key).is_some_and(|now| holds(value, now))
                };
                before.iter().all(is_there)
            }
            (Value::Array(before), Value::Array(now)) => {
                before.len() == now.len()
                    && before
                        .iter()
                        .zip(now)
                        .all(|(before, now)| holds(before, now))
            }
            _ => before == now,
        }
    }
}
