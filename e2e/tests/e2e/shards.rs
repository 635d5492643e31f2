//! Three replicas of the cluster operator share shards. One replica is killed, and later another replica shuts down.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::metrics::{Page, operator_pods};
use e2e::objects::field;
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, Writer, chart, cluster_scenario, step, until};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::ResourceExt;
use kube::api::ListParams;

use crate::fixtures::{DURABLE, cluster, cluster_with};
use crate::two_operators::{await_ready_operators, crash, end, holder};

const OPERATOR: &str = "etcd-operator";
const REPLICAS: usize = 3;
const SHARDS: usize = 6;
/// The names of clusters with one member. With these clusters and `c`, each replica probably reconciles a cluster.
const SMALL: [&str; 5] = ["s-a", "s-b", "s-c", "s-d", "s-e"];

async fn leases(sandbox: &Sandbox) -> Result<Vec<Lease>> {
    let all = sandbox.api::<Lease>().list(&ListParams::default()).await?;
    let is_shard = |lease: &Lease| lease.name_any().starts_with("etcd-operator-shard-");
    Ok(all.items.into_iter().filter(is_shard).collect())
}

/// The Leases of the shards that each replica holds, by the name of its pod.
async fn held(sandbox: &Sandbox) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let mut found = BTreeMap::<String, BTreeSet<String>>::new();
    for lease in leases(sandbox).await? {
        if let Some(pod) = holder(&lease) {
            found.entry(pod).or_default().insert(lease.name_any());
        }
    }
    Ok(found)
}

/// Waits until the replicas that run hold the same number of shards, and returns the shards of each replica.
async fn await_shares(sandbox: &Sandbox) -> Result<BTreeMap<String, BTreeSet<String>>> {
    until("each replica holds its share", DEADLINE, async || {
        let pods = operator_pods(sandbox, OPERATOR).await?;
        let pods: BTreeSet<String> = pods.iter().map(ResourceExt::name_any).collect();
        let held = held(sandbox).await?;
        let is_fair = held
            .values()
            .all(|shards| shards.len() == SHARDS / REPLICAS);
        Ok(if held.keys().eq(&pods) && is_fair {
            Poll::Done(held)
        } else {
            Poll::NotYet(format!("{pods:?}, held: {held:?}"))
        })
    })
    .await
}

/// The pods of the replicas that report metrics of a cluster, by cluster.
async fn owners(sandbox: &Sandbox) -> Result<BTreeMap<String, Vec<String>>> {
    let mut owners = BTreeMap::<String, Vec<String>>::new();
    for pod in operator_pods(sandbox, OPERATOR).await? {
        let pod = pod.name_any();
        let page = Page::of_pod(sandbox, &pod).await?;
        for name in SMALL.into_iter().chain(["c"]) {
            let label = format!("cluster=\"{name}\"");
            let mut series = page.series("etcd_operator_cluster_desired_members");
            if series.any(|(labels, _)| labels.contains(&label)) {
                owners.entry(name.to_owned()).or_default().push(pod.clone());
            }
        }
    }
    Ok(owners)
}

/// Waits until exactly one replica reports metrics of each cluster. Returns the replica of each cluster.
async fn await_owners(sandbox: &Sandbox) -> Result<BTreeMap<String, String>> {
    until("one replica has each cluster", DEADLINE, async || {
        let owners = owners(sandbox).await?;
        let is_unique = owners.values().all(|pods| pods.len() == 1);
        Ok(if is_unique && owners.len() == SMALL.len() + 1 {
            let owners = owners.into_iter();
            Poll::Done(owners.map(|(name, pods)| (name, pods.concat())).collect())
        } else {
            Poll::NotYet(format!("{owners:?}"))
        })
    })
    .await
}

async fn share(sandbox: &Sandbox) -> Result<Writer> {
    let shards = format!("clusterOperator.shards={SHARDS}");
    let replicas = format!("clusterOperator.replicas={REPLICAS}");
    let settings = [
        "--set",
        "crds.install=false",
        "--set",
        "backupOperator.enabled=false",
        "--set",
        "restoreOperator.enabled=false",
        "--set",
        &shards,
        "--set",
        &replicas,
    ];
    let (release, namespace) = (e2e::sandbox::RELEASE, &sandbox.namespace);
    chart::install(&sandbox.env, release, namespace, &settings).await?;
    await_ready_operators(sandbox, REPLICAS).await?;
    sandbox
        .apply(&cluster_with(&sandbox.env, "c", 3, DURABLE)?)
        .await?;
    for name in SMALL {
        sandbox.apply(&cluster(&sandbox.env, name, 1)?).await?;
    }
    for name in SMALL {
        sandbox.await_members(name, 1).await?;
    }
    sandbox.await_members("c", 3).await?;
    await_shares(sandbox).await?;
    let group = sandbox.api::<Lease>().get(OPERATOR).await?;
    let expected = format!("shards/{SHARDS}");
    ensure!(holder(&group) == Some(expected), "{group:?}");
    await_owners(sandbox).await?;
    Writer::start(sandbox, "c").await
}

/// The replica that reconciles `c` is killed while `c` grows. Other replicas take over the shards of the killed
/// replica, and the new pod gets its share of the shards.
async fn is_killed(sandbox: &Sandbox) -> Result<()> {
    let before = sandbox.await_members("c", 3).await?;
    let shares = await_shares(sandbox).await?;
    let victim = await_owners(sandbox).await?;
    let victim = victim.get("c").context("no replica has c")?;
    sandbox.scale("c", 5).await?;
    crash(sandbox, victim).await?;
    let begun = Instant::now();
    let lost = shares.get(victim).context("the replica has no shard")?;
    until("other replicas hold the shards", DEADLINE, async || {
        let held = held(sandbox).await?;
        let others = held.iter().filter(|(pod, _)| *pod != victim);
        let others: BTreeSet<&String> = others.flat_map(|(_, shards)| shards).collect();
        Ok(if lost.iter().all(|shard| others.contains(shard)) {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{held:?}"))
        })
    })
    .await?;
    eprintln!("    takeover {:?} after a crash", begun.elapsed());
    let after = sandbox.await_members("c", 5).await?;
    ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
    await_ready_operators(sandbox, REPLICAS).await?;
    await_shares(sandbox).await?;
    await_owners(sandbox).await.map(drop)
}

/// A replica shuts down. The replica must release its Leases before they expire.
async fn shuts_down(sandbox: &Sandbox) -> Result<()> {
    let owners = await_owners(sandbox).await?;
    let victim = owners.get("c").context("no replica has c")?;
    let of_victim = async || -> Result<Vec<Lease>> {
        let leases = leases(sandbox).await?.into_iter();
        Ok(leases
            .filter(|lease| holder(lease).as_ref() == Some(victim))
            .collect())
    };
    let mut ends = Vec::new();
    sandbox
        .kubectl(&["delete", "pod", victim, "--wait=false"])
        .await?;
    let begun = Instant::now();
    loop {
        let own = of_victim().await?;
        if own.is_empty() {
            break;
        }
        ends = own.iter().map(end).collect::<Result<_>>()?;
        ensure!(begun.elapsed() < DEADLINE, "{victim} still holds Leases");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let now = Timestamp::now();
    ensure!(
        ends.iter().all(|end| now < *end),
        "the Leases expired, because {victim} did not release them"
    );
    eprintln!("    released {:?} after the deletion", begun.elapsed());
    sandbox.scale("c", 3).await?;
    sandbox.await_members("c", 3).await?;
    await_ready_operators(sandbox, REPLICAS).await?;
    await_shares(sandbox).await?;
    await_owners(sandbox).await.map(drop)
}

mod full {
    use super::*;

    #[tokio::test]
    async fn shards_hand_over() {
        cluster_scenario("shards_hand_over", async |sandbox| {
            let writer = step("three replicas share the clusters", share(sandbox)).await?;
            step("a replica is killed", is_killed(sandbox)).await?;
            step("a replica shuts down", shuts_down(sandbox)).await?;
            writer.await_more(10).await?;
            writer.finish("handovers of shards").await.map(drop)
        })
        .await;
    }
}
