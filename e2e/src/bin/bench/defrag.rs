//! `bench defrag`: defragments three members with a large database, while a client writes ten times per second.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use e2e::objects::{Kind, await_object, field};
use e2e::wait::Poll;
use e2e::{Keyspace, Sandbox, Writer, until};
use kube::api::{Patch, PatchParams};
use serde::Serialize;
use serde_json::json;

const SIZE: usize = 3;
const WRITE_INTERVAL: Duration = Duration::from_millis(100);
/// The goal in docs/benchmarks.md: the maximum time between two acknowledged writes, in seconds.
const GOAL: f64 = 0.5;
/// Time limit for one step. Steps are slow, because all three large databases are on one machine.
const STEP_TIMEOUT: Duration = Duration::from_mins(15);

/// The results of one round, which defragments one cluster.
#[derive(Debug, Serialize)]
struct Round {
    /// The size of the largest database file among the members in bytes, before and after the defragmentation.
    bytes_before: i64,
    bytes_after: i64,
    /// Seconds from the change of the spec until the last member is defragmented.
    seconds: f64,
    failed_writes: usize,
    acknowledged_writes: usize,
    write_gap_seconds: f64,
    /// The results of a second client, which connects to all members and stops using an unhealthy member.
    listening_failed_writes: usize,
    listening_acknowledged_writes: usize,
    listening_write_gap_seconds: f64,
}

/// Runs the measurement and prints the results. Also writes the results to the file `json`, if set.
pub(crate) async fn bench(mebibytes: usize, rounds: usize, json: Option<&Path>) -> Result<()> {
    let sandbox = Sandbox::create("bench-defrag").await?;
    let outcome = measure(&sandbox, mebibytes, rounds).await;
    sandbox.delete().await;
    let measured = outcome?;
    let worst = |gap: fn(&Round) -> f64| measured.iter().map(gap).fold(0.0, f64::max);
    let failed = |count: fn(&Round) -> usize| measured.iter().map(count).sum::<usize>();
    println!(
        "defragmentation of {mebibytes} MiB, half of it free, {SIZE} members (goal: no gap longer than {GOAL} s)\n  a \
         client of the Service with a deadline of 1 s: longest gap {:.2} s, {} failed writes\n  a client of all members that \
         watches their health: longest gap {:.2} s, {} failed writes",
        worst(|round| round.write_gap_seconds),
        failed(|round| round.failed_writes),
        worst(|round| round.listening_write_gap_seconds),
        failed(|round| round.listening_failed_writes),
    );
    if let Some(path) = json {
        let figures = json!({ "defrag": measured });
        let text = serde_json::to_string_pretty(&figures)?;
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

async fn measure(sandbox: &Sandbox, mebibytes: usize, rounds: usize) -> Result<Vec<Round>> {
    sandbox.install_operators().await?;
    let mut measured = Vec::new();
    for number in 0..rounds {
        let name = format!("defrag-{number}");
        let round = defragment(sandbox, &name, mebibytes).await;
        let round = round.with_context(|| name.clone())?;
        println!("{name}: {round:?}");
        measured.push(round);
        sandbox.delete_cluster(&name).await?;
    }
    Ok(measured)
}

async fn defragment(sandbox: &Sandbox, name: &str, mebibytes: usize) -> Result<Round> {
    let newest = sandbox.env.etcd_versions.last();
    let version = newest.context("the nodes have no image of etcd")?;
    let manifest = format!(
        "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdCluster\nmetadata: {{name: {name}}}\nspec:\n  \
         size: {SIZE}\n  version: \"{version}\"\n  etcd: {{quotaBackendBytes: 8589934592}}\n  pod: \
         {{persistentVolumeClaimSpec: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 4Gi}}}}}}}}\n"
    );
    sandbox.apply(&manifest).await?;
    sandbox.await_members(name, SIZE).await?;
    fill(sandbox, name, mebibytes).await?;
    let writer = Writer::start_retrying(sandbox, name, WRITE_INTERVAL).await?;
    let listening = Writer::start_health_aware(sandbox, name, WRITE_INTERVAL).await?;
    writer.await_more(20).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let rule = json!({ "spec": { "upkeep": { "defragmentation": {
        "freePercent": 30, "minFreeBytes": 1_048_576
    } } } });
    let begun = Instant::now();
    clusters
        .patch(name, &PatchParams::default(), &Patch::Merge(&rule))
        .await?;
    let done = await_object(
        &clusters,
        name,
        "all members are defragmented",
        STEP_TIMEOUT,
        |object| !field(object, "/status/defragmentation/completionTime").is_null(),
    )
    .await?;
    let seconds = begun.elapsed().as_secs_f64();
    writer.await_more(20).await?;
    let tally = writer.finish(name).await?;
    let health_aware = listening.finish(&format!("{name}, health-aware")).await?;
    let members = field(&done, "/status/defragmentation/members").as_array();
    let largest = |figure: &str| {
        let all = members.into_iter().flatten();
        all.filter_map(|one| one[figure].as_i64()).max()
    };
    Ok(Round {
        bytes_before: largest("sizeBefore").unwrap_or_default(),
        bytes_after: largest("sizeAfter").unwrap_or_default(),
        seconds,
        failed_writes: tally.unknown,
        acknowledged_writes: tally.acknowledged,
        write_gap_seconds: tally.gap.as_secs_f64(),
        listening_failed_writes: health_aware.unknown,
        listening_acknowledged_writes: health_aware.acknowledged,
        listening_write_gap_seconds: health_aware.gap.as_secs_f64(),
    })
}

/// Writes keys, and then deletes half of them, so that the defragmentation can free space.
async fn fill(sandbox: &Sandbox, name: &str, mebibytes: usize) -> Result<()> {
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, name).await?;
    for number in 0..mebibytes {
        let half = if number % 2 == 0 { "kept" } else { "freed" };
        let value = vec![u8::try_from(number % 251).unwrap_or_default(); 1 << 20];
        keys.write(&format!("{half}/{number}"), value).await?;
    }
    let revision = keys.delete("freed/").await?;
    // The request is repeated until etcd has compacted its history, because the compaction can exceed the timeout of
    // the client. Without the compaction, too little space would be free, and the operator would not defragment.
    until("the history is compacted", STEP_TIMEOUT, async || {
        let outcome = keys.compact(revision).await;
        let was = |error: &anyhow::Error| format!("{error:#}").contains("has been compacted");
        Ok(match outcome {
            Err(error) if !was(&error) => Poll::NotYet(format!("{error:#}")),
            _ => Poll::Done(()),
        })
    })
    .await
}
