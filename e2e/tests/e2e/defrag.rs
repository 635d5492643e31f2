//! Defragmentation when too much of the database is free: one member after the other, the leader last and moved
//! before, and clients write on.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, await_object, field, leader};
use e2e::wait::Look;
use e2e::{Keyspace, PATIENCE, Sandbox, Writer, scenario, until};
use futures::future;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use crate::all_pods_lost::{restarts, same_members};
use crate::fixtures::cluster_with;

const DURABLE: &str = "  pod:
    persistentVolumeClaimSpec:
      accessModes: [ReadWriteOnce]
      resources: {requests: {storage: 256Mi}}
";

/// Mebibytes that are written and deleted.
const FREE: i64 = 32;

/// Invariant 22: the members that the client Service passed by, one at a time, until it leads to all again.
async fn passed_by(sandbox: &Sandbox) -> Result<BTreeSet<String>> {
    let (mut all, mut most) = (BTreeSet::new(), 0);
    until("all were busy and none is", PATIENCE, async || {
        let pods = sandbox.member_pods("c").await?;
        let role = |pod: &Pod| pod.labels().get("etcd.database.coreos.com/role").cloned();
        let busy = pods
            .iter()
            .filter(|pod| role(pod).as_deref() == Some("busy"));
        let busy: Vec<String> = busy.map(ResourceExt::name_any).collect();
        most = most.max(busy.len());
        let none = busy.is_empty();
        all.extend(busy);
        Ok(if none && all.len() == 3 {
            Look::Done(())
        } else {
            Look::NotYet(format!("{all:?}"))
        })
    })
    .await?;
    ensure!(most < 3, "all were taken out of the client Service");
    Ok(all)
}

#[tokio::test]
async fn members_are_defragmented_one_after_the_other_and_the_leader_last() {
    scenario("defrag", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        sandbox.apply(&manifest).await?;
        let before = sandbox.await_members("c", 3).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        for number in 0..FREE {
            keys.write(&format!("big/{number}"), vec![7; 1 << 20])
                .await?;
        }
        let revision = keys.delete("big/").await?;
        keys.compact(revision).await?;
        let writer = Writer::start(sandbox, "c").await?;
        let led = leader(&sandbox.await_members("c", 3).await?)?;

        let rule =
            r#"{"spec":{"upkeep":{"defragmentation":{"freePercent":50,"minFreeBytes":1048576}}}}"#;
        sandbox
            .kubectl(&["patch", "etcdcluster", "c", "--type=merge", "-p", rule])
            .await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        let is_over = await_object(&clusters, "c", "it is defragmented", PATIENCE, |object| {
            !field(object, "/status/defragmentation/completionTime").is_null()
        });
        let (done, passed_by) = future::join(is_over, passed_by(sandbox)).await;
        let (done, passed_by) = (done?, passed_by?);
        ensure!(
            passed_by.len() == 3,
            "the client Service led to who was busy: {passed_by:?}"
        );
        let run = field(&done, "/status/defragmentation");
        let members = run["members"].as_array().context("no members")?;
        ensure!(run["cause"] == "Threshold" && members.len() == 3, "{run}");
        ensure!(members[2]["name"] == led.as_str(), "{led} led: {run}");
        for pair in members.windows(2) {
            // Times of one format, in UTC.
            let (ended, began) = (&pair[0]["completionTime"], &pair[1]["startTime"]);
            ensure!(ended.as_str() <= began.as_str(), "two at a time: {run}");
        }
        for member in members {
            let (was, is) = (&member["sizeBefore"], &member["sizeAfter"]);
            let freed = was.as_i64().unwrap_or(0) - is.as_i64().unwrap_or(0);
            ensure!(member["error"].is_null(), "{run}");
            ensure!(freed > (FREE / 2) << 20, "{freed} bytes freed: {run}");
        }
        let after = sandbox.await_members("c", 3).await?;
        same_members(&before, &after)?;
        ensure!(leader(&after)? != led, "the leadership was moved");
        let pods: Vec<Pod> = sandbox.member_pods("c").await?;
        ensure!(
            pods.iter().all(|pod| restarts(pod) == 0),
            "a member restarted"
        );
        writer.await_more(10).await?;
        writer.finish("defragmented").await.map(drop)
    })
    .await;
}
