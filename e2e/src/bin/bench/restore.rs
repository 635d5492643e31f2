//! `bench restore` measures the time from the creation of an EtcdRestore until etcd serves, and the time until three
//! members vote. It compares the first time with a manual restore on the same machine. It also measures the downtime
//! of clients during a restore in place.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, restore_with};
use e2e::objects::{Kind, await_complete, conditions_line, field, has_condition};
use e2e::wait::Poll;
use e2e::{Sandbox, Writer, until};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, LogParams};
use serde::Serialize;
use serde_json::{Value, json};

use crate::by_hand::{ByHand, KEY, MINOR, by_hand, flush_disk, store};

/// Time limit for one step.
const STEP_TIMEOUT: Duration = Duration::from_mins(15);
/// The largest database that the benchmark also restores in place, in MiB. For larger databases, this would take too
/// long.
const IN_PLACE_LIMIT: usize = 1024;
/// The goals in docs/benchmarks.md. `GOAL_RATIO` is the time of the operator divided by the time of the manual
/// restore. `GOAL_VOTERS` and `GOAL_DOWNTIME` are in seconds.
const GOAL_RATIO: f64 = 1.1;
const GOAL_VOTERS: f64 = 6.0;
const GOAL_DOWNTIME: f64 = 5.0;

/// The results of one round. Durations are in seconds.
#[derive(Debug, Serialize)]
struct Round {
    mebibytes: usize,
    /// The manual restore that downloads the backup with `aws s3 cp`. `None` without `--aws`.
    #[serde(skip_serializing_if = "Option::is_none")]
    by_hand: Option<ByHand>,
    /// The manual restore that downloads the backup with one HTTP request.
    by_hand_bare: ByHand,
    /// From the creation of the EtcdRestore until a verified seed serves clients.
    ours: f64,
    /// From the verified seed until three members are voters, so that the cluster tolerates the loss of one member.
    voters: f64,
    /// From the verified seed until three members serve clients.
    serving: f64,
    /// The maximum time between two acknowledged writes during a restore in place. `None` for databases larger than
    /// [`IN_PLACE_LIMIT`].
    #[serde(skip_serializing_if = "Option::is_none")]
    downtime: Option<f64>,
    /// For each stage of the restore, the seconds from the creation of the EtcdRestore to the stage.
    stages: Stages,
}

/// Runs the measurements and prints the results. Also writes the results to the file `json`, if set.
pub(crate) async fn bench(
    sizes: &[usize],
    rounds: usize,
    aws: Option<&Path>,
    json: Option<&Path>,
) -> Result<()> {
    if aws.is_none() {
        println!("without --aws: the manual restore downloads the backup in a single HTTP request");
    }
    let sandbox = Sandbox::create("bench-restore").await?;
    let mut measured = Vec::new();
    let outcome = measure(&sandbox, (sizes, rounds), aws, &mut measured).await;
    if outcome.is_err() {
        sandbox.print_state().await;
    }
    sandbox.delete().await;
    print(sizes, &measured);
    if let Some(path) = json {
        let text = serde_json::to_string_pretty(&json!({ "restore": measured }))?;
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    outcome
}

fn print(sizes: &[usize], measured: &[Round]) {
    println!(
        "| database | operator | manual, with aws s3 cp | ratio (goal {GOAL_RATIO}) | manual, single request | ratio | \
              to three voters (goal {GOAL_VOTERS} s at 1 GiB) | to three serving members | in-place downtime (goal \
              {GOAL_DOWNTIME} s at 1 GiB) |\n|---|---|---|---|---|---|---|---|---|"
    );
    for size in sizes {
        let median = |figure: fn(&Round) -> Option<f64>| {
            let of = measured.iter().filter(|round| round.mebibytes == *size);
            let mut all: Vec<f64> = of.filter_map(figure).collect();
            all.sort_by(f64::total_cmp);
            all.get(all.len() / 2).copied()
        };
        let text = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
        let ours = median(|r| Some(r.ours));
        let by_hand = median(|r| r.by_hand.as_ref().map(ByHand::total));
        let bare = median(|r| Some(r.by_hand_bare.total()));
        let ratio = |to: Option<f64>| ours.zip(to).map(|(ours, to)| ours / to);
        println!(
            "| {size} MiB | {} s | {} s | {} | {} s | {} | {} s | {} s | {} s |",
            text(ours),
            text(by_hand),
            text(ratio(by_hand)),
            text(bare),
            text(ratio(bare)),
            text(median(|r| Some(r.voters))),
            text(median(|r| Some(r.serving))),
            text(median(|r| r.downtime)),
        );
    }
}

async fn measure(
    sandbox: &Sandbox,
    (sizes, rounds): (&[usize], usize),
    aws: Option<&Path>,
    measured: &mut Vec<Round>,
) -> Result<()> {
    sandbox.install_operators().await?;
    let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
    sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
    for size in sizes {
        store(&bucket, *size)
            .await
            .with_context(|| format!("store a backup of {size} MiB"))?;
        for _ in 0..rounds {
            // Restores by the operator and manual restores alternate, so that other load on the machine affects them
            // equally. `flush_disk` waits until the disk writes of the previous restore are complete.
            let mut by_hand_with_tool = None;
            if let Some(aws) = aws {
                flush_disk().await?;
                let took = by_hand(sandbox, &bucket, Some(aws)).await;
                by_hand_with_tool = Some(took.context("manual restore with the AWS command line")?);
            }
            flush_disk().await?;
            let bare = by_hand(sandbox, &bucket, None).await;
            let bare = bare.context("manual restore with a single request")?;
            flush_disk().await?;
            let round = measure_restore(sandbox, &bucket, *size, (by_hand_with_tool, bare)).await?;
            println!("{round:?}");
            measured.push(round);
        }
    }
    Ok(())
}

async fn measure_restore(
    sandbox: &Sandbox,
    bucket: &Bucket,
    mebibytes: usize,
    (by_hand, by_hand_bare): (Option<ByHand>, ByHand),
) -> Result<Round> {
    let version = sandbox.env.newest_of(MINOR)?;
    // The CPU request protects the pods from other load on the machine. The manual restore does not run in pods, so
    // it has no CPU request.
    let target = format!(
        "{{name: c, template: {{spec: {{size: 3, version: \"{version}\", etcd: {{quotaBackendBytes: 8589934592}}, pod: \
         {{resources: {{requests: {{cpu: 500m}}}}, persistentVolumeClaimSpec: {{accessModes: [ReadWriteOnce], \
         resources: {{requests: {{storage: 16Gi}}}}}}}}}}}}}}"
    );
    let path = format!("{}/{KEY}", bucket.name);
    let s3 = sandbox.env.s3()?;
    let manifest = restore_with(s3, "back", &target, &path, "");
    let begun = Instant::now();
    sandbox.apply(&manifest).await?;
    let mut stages = Stages::new();
    await_seed(sandbox, "back", begun, &mut stages).await?;
    let ours = begun.elapsed().as_secs_f64();
    logged(sandbox, begun, &mut stages).await?;
    let (voters, serving) = await_voters(sandbox, begun, &mut stages).await?;
    let restores = sandbox.objects(Kind::EtcdRestore);
    await_complete(&restores, "back", STEP_TIMEOUT).await?;
    let mut downtime = None;
    if mebibytes <= IN_PLACE_LIMIT {
        let writer = Writer::start(sandbox, "c").await?;
        writer.await_more(20).await?;
        let over = restore_with(s3, "over", "{name: c}", &path, "  overwrite: true\n");
        sandbox.apply(&over).await?;
        await_complete(&restores, "over", STEP_TIMEOUT).await?;
        writer.await_more(20).await?;
        let tally = writer.finish_counting("restored in place").await?;
        downtime = Some(tally.gap.as_secs_f64());
        restores.delete("over", &DeleteParams::default()).await?;
    }
    restores.delete("back", &DeleteParams::default()).await?;
    sandbox.delete_cluster("c").await?;
    Ok(Round {
        mebibytes,
        by_hand,
        by_hand_bare,
        ours,
        voters: voters - ours,
        serving: serving - ours,
        downtime,
        stages,
    })
}

async fn await_seed(
    sandbox: &Sandbox,
    name: &str,
    begun: Instant,
    stages: &mut Stages,
) -> Result<()> {
    let restores = sandbox.objects(Kind::EtcdRestore);
    until("the seed serves clients", STEP_TIMEOUT, async || {
        let object = restores.get(name).await?;
        ensure!(
            !has_condition(&object, "Failed", "True"),
            "{}",
            conditions_line(&object)
        );
        pods(sandbox, begun, stages).await?;
        let serves = field(&object, "/status/clusterID").is_string();
        Ok(if serves {
            Poll::Done(())
        } else {
            Poll::NotYet(conditions_line(&object))
        })
    })
    .await
}

/// Waits until three members are voters, and until all three serve clients. Returns both times in seconds since the
/// creation of the EtcdRestore.
async fn await_voters(
    sandbox: &Sandbox,
    begun: Instant,
    stages: &mut Stages,
) -> Result<(f64, f64)> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let mut elected = None;
    let served = until("three members vote and serve", STEP_TIMEOUT, async || {
        let object = clusters.get("c").await?;
        pods(sandbox, begun, stages).await?;
        let restore_lock = "etcd.database.coreos.com/restore";
        let annotations = object.metadata.annotations.as_ref();
        if annotations.is_none_or(|all| !all.contains_key(restore_lock)) {
            note(stages, begun, "handed over".to_owned());
        }
        let details = field(&object, "/status/memberDetails").as_array();
        let list = details.map(Vec::as_slice).unwrap_or_default();
        let has_vote = |one: &&Value| one["role"] == "Voter" || one["role"] == "Leader";
        let voters = || list.iter().filter(has_vote);
        let serving = voters().filter(|one| one["healthy"] == true).count();
        note(stages, begun, format!("{} members", list.len()));
        note(stages, begun, format!("{} voters", voters().count()));
        note(stages, begun, format!("{serving} voters serve"));
        let now = begun.elapsed().as_secs_f64();
        if voters().count() == 3 {
            elected.get_or_insert(now);
        }
        Ok(if serving == 3 {
            Poll::Done(now)
        } else {
            Poll::NotYet(conditions_line(&object))
        })
    })
    .await?;
    Ok((elected.unwrap_or(served), served))
}

/// For each stage of a restore, the seconds from the creation of the EtcdRestore to the stage.
type Stages = std::collections::BTreeMap<String, f64>;

fn note(stages: &mut Stages, begun: Instant, what: String) {
    let seconds = (begun.elapsed().as_secs_f64() * 100.0).round() / 100.0;
    stages.entry(what).or_insert(seconds);
}

/// Log lines of the seed's etcd container, with the name of the stage that begins at each line.
const LOGGED: [(&str, &str); 2] = [
    (
        "the data directory exists: starting etcd",
        "seed: data directory is made",
    ),
    ("ready to serve client requests", "seed: etcd serves"),
];

/// Adds the stages in [`LOGGED`], which only the log of the seed's pod shows.
async fn logged(sandbox: &Sandbox, begun: Instant, stages: &mut Stages) -> Result<()> {
    let applied = Timestamp::now() - SignedDuration::try_from(begun.elapsed())?;
    let members = ListParams::default().labels("app=etcd");
    let api = sandbox.api::<Pod>();
    let params = LogParams {
        container: Some("etcd".to_owned()),
        timestamps: true,
        ..LogParams::default()
    };
    for pod in api.list(&members).await? {
        let log = api.logs(&pod.name_any(), &params).await?;
        for (words, stage) in LOGGED {
            let line = log.lines().find(|line| line.contains(words));
            let Some(time) = line.and_then(|line| line.split(' ').next()) else {
                continue;
            };
            let time: Timestamp = time.parse().with_context(|| time.to_owned())?;
            let seconds = time.duration_since(applied).as_secs_f64();
            stages.insert(stage.to_owned(), (seconds * 100.0).round() / 100.0);
        }
    }
    Ok(())
}

/// Adds the stages that the statuses of the containers show.
async fn pods(sandbox: &Sandbox, begun: Instant, stages: &mut Stages) -> Result<()> {
    let members = ListParams::default().labels("app=etcd");
    let pods = sandbox.api::<Pod>().list(&members).await?;
    let mut running = 0;
    for pod in &pods {
        let Some(status) = &pod.status else { continue };
        let prepare = status.init_container_statuses.iter().flatten();
        for container in prepare.chain(status.container_statuses.iter().flatten()) {
            let state = container.state.clone().unwrap_or_default();
            let seed = status.init_container_statuses.is_some();
            if seed && state.running.is_some() {
                note(stages, begun, format!("seed: {} runs", container.name));
            }
            if seed && state.terminated.is_some() {
                note(stages, begun, format!("seed: {} has ended", container.name));
            }
            running += usize::from(container.name == "etcd" && state.running.is_some());
        }
    }
    note(stages, begun, format!("{} pods", pods.items.len()));
    note(stages, begun, format!("{running} etcd containers"));
    Ok(())
}
