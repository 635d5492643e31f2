//! The operator is replaced by a newer one while members run, and restarts none of them.
//!
//! In `before`, the operators of the commit before really run, and are followed by today's. One commit rarely changes
//! what pods are made of, so the first form of all is followed here: pods as the first builds made them, with another
//! probe, another variable and no termination messages, under the hash in the form they wrote. Pods of every form as
//! earlier builds really made them are read by a unit test (`observe/earlier.rs` in the crate `cluster`).

mod before;

use anyhow::{Context, Result, ensure};
use e2e::wait::Look;
use e2e::{PATIENCE, Sandbox, Writer, scenario, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::fixtures::{DURABLE, cluster_with};
use crate::rollout::lives;
use crate::upgrade::EVERY;

const HASH: &str = "etcd.database.coreos.com/spec-hash";
const SAID: &str = "etcd.database.coreos.com/said";
/// What the first form of the hash is for a spec that says nothing of pods but their volumes; `hash.rs` in the crate
/// `runtime` holds it, too.
const FIRST_FORM: &str = "85044b41020b7131";

/// The pod as the release before built it.
fn as_before(pod: &Pod) -> Result<Value> {
    let mut old = serde_json::to_value(pod)?;
    old["status"] = Value::Null;
    let metadata = old["metadata"].as_object_mut().context("no metadata")?;
    metadata.retain(|key, _| {
        [
            "name",
            "namespace",
            "labels",
            "annotations",
            "ownerReferences",
        ]
        .contains(&key.as_str())
    });
    let annotations = metadata["annotations"]
        .as_object_mut()
        .context("no annotations")?;
    annotations.insert(HASH.to_owned(), json!(FIRST_FORM));
    annotations.remove(SAID);
    let spec = old["spec"].as_object_mut().context("no spec")?;
    spec.remove("nodeName");
    let etcd = &mut spec["containers"][0];
    etcd["terminationMessagePolicy"] = json!("File");
    etcd["readinessProbe"]["periodSeconds"] = json!(7);
    etcd["env"] = json!([{ "name": "OF_THE_RELEASE_BEFORE", "value": "1" }]);
    Ok(old)
}

/// Makes every pod again on its volume, one after the other.
async fn go_back(sandbox: &Sandbox) -> Result<()> {
    for pod in sandbox.member_pods("c").await? {
        let (name, old) = (pod.name_any(), as_before(&pod)?);
        sandbox.kubectl(&["delete", "pod", &name]).await?;
        sandbox.apply(&old.to_string()).await?;
        let pod = format!("pod/{name}");
        sandbox
            .kubectl(&["wait", "--for=condition=Ready", "--timeout=300s", &pod])
            .await?;
    }
    Ok(())
}

#[tokio::test]
async fn operator_upgrade_restarts_no_member() {
    scenario("operator_upgrade", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        sandbox.apply(&manifest).await?;
        sandbox.await_members("c", 3).await?;
        sandbox
            .kubectl(&["scale", "deployment/etcd-operator", "--replicas=0"])
            .await?;
        until("no operator runs", PATIENCE, async || {
            let pods = sandbox.kubectl(&["get", "pods", "-o", "name"]).await?;
            Ok(if pods.lines().any(is_operator) {
                Look::NotYet(pods)
            } else {
                Look::Done(())
            })
        })
        .await?;
        go_back(sandbox).await?;
        let before = lives(sandbox).await?;
        let writer = Writer::start_retrying(sandbox, "c", EVERY).await?;

        sandbox
            .kubectl(&["scale", "deployment/etcd-operator", "--replicas=1"])
            .await?;
        until(
            "the new operator has recorded what every pod was made for",
            PATIENCE,
            async || {
                let pods = sandbox.member_pods("c").await?;
                let recorded = |pod: &&Pod| {
                    let annotations = pod.annotations();
                    annotations.contains_key(SAID)
                        && annotations.get(HASH).is_some_and(|hash| hash != FIRST_FORM)
                };
                let count = pods.iter().filter(recorded).count();
                Ok(if count == 3 {
                    Look::Done(())
                } else {
                    Look::NotYet(format!("{count} of {}", pods.len()))
                })
            },
        )
        .await?;
        // It has looked, and nothing is left to do.
        sandbox.await_members("c", 3).await?;
        ensure!(lives(sandbox).await? == before, "a member was restarted");
        writer.await_more(20).await?;
        ensure!(
            lives(sandbox).await? == before,
            "a member was restarted afterwards"
        );
        let tally = writer.finish("the operator was replaced").await?;
        ensure!(tally.unknown == 0, "{tally}");
        Ok(())
    })
    .await;
}

fn is_operator(pod: &str) -> bool {
    let name = pod.strip_prefix("pod/etcd-operator-").unwrap_or_default();
    !name.is_empty()
}
