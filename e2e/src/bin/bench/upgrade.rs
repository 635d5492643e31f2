//! `bench upgrade` upgrades three members from 3.5 to 3.6, while a client writes ten times per second.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use e2e::objects::{Kind, condition, field};
use e2e::wait::Poll;
use e2e::{Sandbox, Writer, until};
use kube::api::{Patch, PatchParams};
use serde::Serialize;
use serde_json::json;

use crate::cluster::TIMEOUT;

const SIZE: usize = 3;
const WRITE_INTERVAL: Duration = Duration::from_millis(100);
/// The goals in docs/benchmarks.md, in seconds: the duration of the upgrade, and the maximum time between two
/// acknowledged writes.
const GOALS: (f64, f64) = (20.0, 0.5);

#[derive(Debug, Serialize)]
struct Round {
    durable: bool,
    /// Seconds from the change of `spec.version` until three healthy members have the new version and `Upgrading` is
    /// False.
    seconds: f64,
    failed_writes: usize,
    acknowledged_writes: usize,
    write_gap_seconds: f64,
}

/// Runs the measurement and prints the results. Also writes the results to the file `json`, if set.
pub(crate) async fn bench(rounds: usize, json: Option<&Path>) -> Result<()> {
    let sandbox = Sandbox::create("bench-upgrade").await?;
    let outcome = measure(&sandbox, rounds).await;
    sandbox.delete().await;
    let measured = outcome?;
    for durable in [false, true] {
        print(durable, &measured);
    }
    if let Some(path) = json {
        let figures = json!({ "upgrade": measured });
        let text = serde_json::to_string_pretty(&figures)?;
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn print(durable: bool, measured: &[Round]) {
    let disks = if durable {
        "on volumes"
    } else {
        "without volumes"
    };
    let of = || measured.iter().filter(|round| round.durable == durable);
    let median = |figure: fn(&Round) -> f64| {
        let mut all: Vec<f64> = of().map(figure).collect();
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or_default()
    };
    let failed: usize = of().map(|round| round.failed_writes).sum();
    let worst = of().map(|round| round.write_gap_seconds);
    let worst = worst.fold(0.0, f64::max);
    println!(
        "3.5 to 3.6, {SIZE} members {disks}: {:.1} s (goal {} s), {failed} failed writes (goal 0), longest gap {:.2} s \
         (median) and {worst:.2} s (maximum; goal {} s)",
        median(|round| round.seconds),
        GOALS.0,
        median(|round| round.write_gap_seconds),
        GOALS.1,
    );
}

async fn measure(sandbox: &Sandbox, rounds: usize) -> Result<Vec<Round>> {
    sandbox.install_operators().await?;
    let mut measured = Vec::new();
    for number in 0..rounds {
        for durable in [false, true] {
            let name = format!("up-{number}-{}", if durable { "disk" } else { "plain" });
            let round = upgrade(sandbox, &name, durable).await;
            let round = round.with_context(|| name.clone())?;
            println!("{name}: {round:?}");
            measured.push(round);
            sandbox.delete_cluster(&name).await?;
        }
    }
    Ok(measured)
}

async fn upgrade(sandbox: &Sandbox, name: &str, durable: bool) -> Result<Round> {
    let (old, new) = (sandbox.env.newest_of("3.5")?, sandbox.env.newest_of("3.6")?);
    let volumes = if durable {
        "  pod: {persistentVolumeClaimSpec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 64Mi}}}}\n"
    } else {
        ""
    };
    let manifest = format!(
        "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdCluster\nmetadata: {{name: {name}}}\nspec:\n  \
         size: {SIZE}\n  version: \"{old}\"\n{volumes}"
    );
    sandbox.apply(&manifest).await?;
    sandbox.await_members(name, SIZE).await?;
    let writer = Writer::start_retrying(sandbox, name, WRITE_INTERVAL).await?;
    writer.await_more(20).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let patch = json!({ "spec": { "version": new } });
    let begun = Instant::now();
    clusters
        .patch(name, &PatchParams::default(), &Patch::Merge(&patch))
        .await?;
    until(&format!("{name} runs etcd {new}"), TIMEOUT, async || {
        let object = clusters.get(name).await?;
        let details = field(&object, "/status/memberDetails").as_array();
        let run = details.map_or(0, |list| {
            let run = list.iter().filter(|one| one["version"] == new.as_str());
            run.filter(|one| one["healthy"] == true).count()
        });
        let rests = condition(&object, "Upgrading").is_some_and(|found| found["status"] == "False");
        Ok(if run == SIZE && rests {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{run} members run the new version"))
        })
    })
    .await?;
    let seconds = begun.elapsed().as_secs_f64();
    writer.await_more(20).await?;
    let tally = writer.finish(name).await?;
    Ok(Round {
        durable,
        seconds,
        failed_writes: tally.unknown,
        acknowledged_writes: tally.acknowledged,
        write_gap_seconds: tally.gap.as_secs_f64(),
    })
}
