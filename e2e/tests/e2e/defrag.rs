//! Members with much free space in their database are defragmented one at a time, while clients write. The leader
//! transfers its leadership and is defragmented last.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use e2e::metrics::Page;
use e2e::objects::{Kind, await_object, field, leader, ready_members};
use e2e::wait::Poll;
use e2e::watch::watch_until;
use e2e::{DEADLINE, Keyspace, Sandbox, Writer, cluster_scenario, until};
use futures::future;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{ListParams, WatchEvent, WatchParams};

use crate::all_pods_lost::{restarts, same_members};
use crate::fixtures::cluster_with;

const DURABLE: &str = "  pod:
    persistentVolumeClaimSpec:
      accessModes: [ReadWriteOnce]
      resources: {requests: {storage: 256Mi}}
";

/// The total size of the values that the test writes and deletes, in MiB.
const FREE: i64 = 32;

/// The pod label by which the client Service selects its pods.
const ROLE_LABEL: &str = "etcd.database.coreos.com/role";
const MEMBERS: &str = "app=etcd,etcd_cluster=c";

/// Invariant 22: during its defragmentation, a member is not an endpoint of the client Service.
///
/// Waits until every member was removed from the endpoints and added again, and returns the removed members. Watches
/// all changes after `since`, because a poll could miss a short removal.
async fn removed_from_endpoints(sandbox: &Sandbox, since: &str) -> Result<BTreeSet<String>> {
    let of_cluster = WatchParams::default().labels(MEMBERS);
    let (mut all, mut busy, mut most) = (BTreeSet::new(), BTreeSet::new(), 0);
    let pods = sandbox.api::<Pod>();
    let seen = watch_until(&pods, &of_cluster, since, DEADLINE, |change| {
        let WatchEvent::Modified(pod) = change else {
            return None;
        };
        if pod
            .labels()
            .get(ROLE_LABEL)
            .is_some_and(|role| role == "busy")
        {
            all.insert(pod.name_any());
            busy.insert(pod.name_any());
        } else {
            busy.remove(&pod.name_any());
        }
        most = most.max(busy.len());
        (all.len() == 3 && busy.is_empty()).then_some(())
    });
    let seen = seen.await;
    seen.with_context(|| {
        format!("not all members were removed and added again; removed so far: {all:?}")
    })?;
    ensure!(
        most < 3,
        "all members were removed from the endpoints at the same time"
    );
    Ok(all)
}

/// The number of leader changes that this member has observed.
async fn elections(sandbox: &Sandbox, member: &str) -> Result<f64> {
    let page = Page::of_member(sandbox, member).await?;
    Ok(page.sum("etcd_server_leader_changes_seen_total", ""))
}

/// Waits until each member has freed space in its database. Each member compacts its database at its own time.
async fn await_compacted(sandbox: &Sandbox, members: &[String]) -> Result<()> {
    until("every member has free space", DEADLINE, async || {
        for member in members {
            let page = Page::of_member(sandbox, member).await?;
            let used = page.sum("etcd_mvcc_db_total_size_in_use_in_bytes", "");
            if used > f64::from(8 << 20) {
                return Ok(Poll::NotYet(format!("{member} uses {used} bytes")));
            }
        }
        Ok(Poll::Done(()))
    })
    .await
}

#[tokio::test]
async fn members_are_defragmented_one_by_one_with_leader_last() {
    cluster_scenario("defrag", async |sandbox| {
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
        let names = ready_members(&before);
        await_compacted(sandbox, &names).await?;
        let led = leader(&sandbox.await_members("c", 3).await?)?;
        let other = names.iter().find(|name| **name != led);
        let other = other.context("the leader is the only member")?;
        let elected = elections(sandbox, other).await?;
        let pods = sandbox.api::<Pod>();
        let pods = pods.list(&ListParams::default().labels(MEMBERS)).await?;
        let started: i32 = pods.iter().map(restarts).sum();
        let since = pods.metadata.resource_version.unwrap_or_default();

        let rule =
            r#"{"spec":{"upkeep":{"defragmentation":{"freePercent":50,"minFreeBytes":1048576}}}}"#;
        sandbox
            .kubectl(&["patch", "etcdcluster", "c", "--type=merge", "-p", rule])
            .await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        let is_over = await_object(
            &clusters,
            "c",
            "all members are defragmented",
            DEADLINE,
            |object| !field(object, "/status/defragmentation/completionTime").is_null(),
        );
        let (done, removed_from_endpoints) =
            future::join(is_over, removed_from_endpoints(sandbox, &since)).await;
        let (done, removed_from_endpoints) = (done?, removed_from_endpoints?);
        ensure!(
            removed_from_endpoints.len() == 3,
            "only these members were removed from the endpoints during their defragmentation: {removed_from_endpoints:?}"
        );
        let run = field(&done, "/status/defragmentation");
        let members = run["members"].as_array().context("no members")?;
        ensure!(run["cause"] == "Threshold" && members.len() == 3, "{run}");
        for pair in members.windows(2) {
            // The two times can be compared as text, because both are in UTC and have the same format.
            let (ended, began) = (&pair[0]["completionTime"], &pair[1]["startTime"]);
            ensure!(
                ended.as_str() <= began.as_str(),
                "two members were defragmented at the same time: {run}"
            );
        }
        for member in members {
            let (was, is) = (&member["sizeBefore"], &member["sizeAfter"]);
            let freed = was.as_i64().unwrap_or(0) - is.as_i64().unwrap_or(0);
            ensure!(member["error"].is_null(), "{run}");
            ensure!(freed > (FREE / 2) << 20, "{freed} bytes freed: {run}");
        }
        let after = sandbox.await_members("c", 3).await?;
        same_members(&before, &after)?;
        // The order of the members is checked only if the transfer of the leadership was the only election. After a
        // further election, a member other than `led` may have been the leader.
        if elections(sandbox, other).await? < elected + 1.5 {
            ensure!(
                members[2]["name"] == led.as_str(),
                "the leader {led} was not defragmented last: {run}"
            );
            ensure!(leader(&after)? != led, "the leadership was not transferred");
        }
        let pods: Vec<Pod> = sandbox.member_pods("c").await?;
        let now: i32 = pods.iter().map(restarts).sum();
        ensure!(now == started, "a member was restarted");
        writer.await_more(10).await?;
        writer.finish("defragmentation").await.map(drop)
    })
    .await;
}
