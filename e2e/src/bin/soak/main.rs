//! The soak injects random faults into a cluster that clients use, and then checks the responses to the clients:
//! `cargo xtask soak`.
//!
//! The seed determines the faults, but not their timing, so two runs with the same seed can have different results.

#![allow(clippy::large_futures)] // A soak is one large future.

mod changes;
mod faults;
mod story;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Parser;
use e2e::bucket::Bucket;
use e2e::manifests::aws_secret;
use e2e::soak::{
    Clients, Operation, Planner, Recorder, Snapshot, Step, Verdict, WatchRecord, Watcher,
    check_snapshot, check_watches, linearity, lines,
};
use e2e::wait::Poll;
use e2e::{DEADLINE, Env, Sandbox, Testbed, until};

use crate::story::Story;

const CLUSTER: &str = "c";
/// Number of watchers that run during the whole soak.
const WATCHERS: usize = 3;
/// After each step, clients must receive this many more responses. This shows that the cluster serves clients.
const OPERATIONS_AFTER_STEP: usize = 20;
/// The minor releases for upgrades and downgrades of the cluster.
const MINORS: [&str; 3] = ["3.5", "3.6", "3.7"];

/// Inject random faults into a cluster that clients use, and check the responses to the clients.
#[derive(Parser)]
struct Arguments {
    /// Minutes to inject faults. After this time, the cluster recovers from the last fault.
    #[arg(long, default_value_t = 10)]
    minutes: u64,
    /// The seed of the faults. Default: a random seed.
    #[arg(long)]
    seed: Option<u64>,
    /// The folder for the history of the operations, the log of the steps, and the HTML pages of violations.
    #[arg(long, default_value = "soak")]
    output: PathBuf,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let seed = arguments.seed.unwrap_or(clock.as_secs() % 1_000_000);
    let folder = arguments.output.join(seed.to_string());
    // The files of an earlier run with this seed are deleted, because they could be mistaken for results of this run.
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let soak = Soak {
        seed,
        minutes: arguments.minutes,
        story: Story::begin(&folder)?,
        folder,
    };
    soak.run().await
}

struct Soak {
    seed: u64,
    minutes: u64,
    story: Story,
    folder: PathBuf,
}

/// The history that clients and watchers observed.
#[derive(Default)]
struct Observed {
    operations: Vec<Operation>,
    watchers: Vec<WatchRecord>,
    snapshots: Vec<Snapshot>,
}

impl Soak {
    async fn run(&self) -> Result<()> {
        let (seed, minutes) = (self.seed, self.minutes);
        self.story.tell(&format!("seed {seed}, {minutes} minutes"));
        let sandbox = Sandbox::create("soak").await?;
        let mut observed = Observed::default();
        let outcome = Testbed::with_faults(&sandbox, async |testbed| {
            self.observe(&sandbox, testbed, &mut observed).await
        })
        .await;
        // The history is also checked if `outcome` is an error, because a violation may explain the error.
        let checked = self.check(&observed).await;
        sandbox.delete().await;
        let problems: Vec<String> = [outcome, checked]
            .into_iter()
            .filter_map(|result| result.err().map(|error| format!("{error:?}")))
            .collect();
        if problems.is_empty() {
            self.story.tell(&format!("seed {seed} passed"));
            return Ok(());
        }
        for problem in &problems {
            self.story.tell(problem);
        }
        bail!(
            "seed {seed} failed. The log of the steps (story.txt), the history of the operations and the HTML pages \
             are in {}. To repeat: cargo xtask soak --minutes {minutes} --seed {seed}",
            self.folder.display()
        )
    }

    async fn observe(
        &self,
        sandbox: &Sandbox,
        testbed: &Testbed<'_>,
        observed: &mut Observed,
    ) -> Result<()> {
        let mut planner = Planner::new(self.seed, &versions(&sandbox.env)?);
        sandbox.install_operators().await?;
        let s3 = sandbox.env.s3()?;
        Bucket::create(s3, &sandbox.namespace).await?;
        sandbox.apply(&aws_secret(s3, "aws")).await?;
        sandbox.apply(&changes::cluster(planner.desired())).await?;
        sandbox
            .await_members(CLUSTER, planner.desired().size)
            .await?;
        let recorder = Recorder::new();
        let clients = Clients::start(sandbox, CLUSTER, self.seed, &recorder).await?;
        let watchers: Vec<Watcher> = (0..WATCHERS).map(|_| Watcher::start(&clients, 1)).collect();
        self.story
            .tell(&format!("clients use the cluster {:?}", planner.desired()));
        let end = self.story.elapsed() + Duration::from_mins(self.minutes);
        let mut broken = Ok(());
        while broken.is_ok() && self.story.elapsed() < end {
            let step = planner.step();
            let number = step.number;
            let taken = self.take(&step, &planner, sandbox, testbed);
            broken = match taken.await {
                Ok(snapshot) => {
                    observed.snapshots.extend(snapshot);
                    self.serves(&recorder).await
                }
                Err(error) => Err(error),
            }
            .with_context(|| format!("step {number}"));
        }
        // The clients are also stopped after an error, so that their history can be checked.
        let ended = clients_end(clients, watchers, &recorder, observed).await;
        broken.and(ended)
    }

    /// Carries out one step of the plan, and waits until the cluster matches its spec and serves clients.
    async fn take(
        &self,
        step: &Step,
        planner: &Planner,
        sandbox: &Sandbox,
        testbed: &Testbed<'_>,
    ) -> Result<Option<Snapshot>> {
        let mut deleted = Vec::new();
        self.story.tell(&format!("step {}", step.number));
        if let Some(change) = &step.change {
            self.story.tell(&format!("  change: {change}"));
            changes::begin(change, step.number, sandbox).await?;
        }
        if let Some(fault) = step.fault {
            tokio::time::sleep(step.delay).await;
            let injected = faults::inject(fault, sandbox, testbed, &self.story);
            deleted = injected.await.with_context(|| fault.to_string())?;
        }
        let settled = changes::settle(planner.desired(), &deleted, sandbox).await;
        settled.context("the cluster did not recover from the step")?;
        self.story.tell("  the cluster matches its spec");
        match &step.change {
            Some(change) => {
                let ended = changes::end(change, step.number, sandbox, &self.story);
                ended.await.with_context(|| change.to_string())
            }
            None => Ok(None),
        }
    }

    /// Waits until the clients have received [`OPERATIONS_AFTER_STEP`] more responses.
    async fn serves(&self, recorder: &Recorder) -> Result<()> {
        let before = recorder.answered();
        until(
            "the cluster answers the clients' operations",
            DEADLINE,
            async || {
                let more = recorder.answered() - before;
                Ok(if more >= OPERATIONS_AFTER_STEP {
                    Poll::Done(())
                } else {
                    Poll::NotYet(format!("{more} answers"))
                })
            },
        )
        .await
    }

    async fn check(&self, observed: &Observed) -> Result<()> {
        let operations = &observed.operations;
        self.write("history.jsonl", &lines(operations)?)?;
        for (number, watcher) in observed.watchers.iter().enumerate() {
            let text = serde_json::to_string_pretty(&watcher.events)?;
            self.write(&format!("watcher-{number}.json"), &text)?;
        }
        self.write(
            "restored.json",
            &serde_json::to_string_pretty(&observed.snapshots)?,
        )?;
        let unknown = operations.iter().filter(|one| one.end.is_none()).count();
        let connections: Vec<usize> = observed
            .watchers
            .iter()
            .map(|watcher| watcher.connections)
            .collect();
        self.story.tell(&format!(
            "{} operations, {unknown} with unknown outcome; {} restored clusters; connections of the watchers: \
             {connections:?}",
            operations.len(),
            observed.snapshots.len()
        ));
        let mut violations = check_watches(operations, &observed.watchers);
        let events = observed.watchers.iter().map(|watcher| &watcher.events);
        let longest = events.max_by_key(|events| events.len());
        for snapshot in &observed.snapshots {
            let events = longest.context("there is no watcher")?;
            violations.extend(check_snapshot(snapshot, events));
        }
        match linearity(Path::new("linearize"), operations, &self.folder).await? {
            Verdict::Linearizable(text) => self.story.tell(&text),
            Verdict::Violated(text) => violations.push(text),
        }
        if violations.is_empty() {
            self.story.tell("the watches are complete and in order");
            return Ok(());
        }
        bail!("violations:\n{}", violations.join("\n"))
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.folder.join(name);
        std::fs::write(&path, text).with_context(|| path.display().to_string())
    }
}

/// Stops the clients and the watchers, and collects their history. An additional watcher, which this function starts,
/// reads all events from the first revision on.
async fn clients_end(
    clients: Clients,
    watchers: Vec<Watcher>,
    recorder: &Recorder,
    observed: &mut Observed,
) -> Result<()> {
    let late = Watcher::start(&clients, 1);
    let finished = clients.finish(recorder).await;
    observed.operations = recorder.operations();
    let last = observed.operations.iter().map(|one| one.revision).max();
    let mut ended = finished;
    for watcher in watchers.into_iter().chain([late]) {
        match watcher.finish(last.unwrap_or_default()).await {
            Ok(record) => observed.watchers.push(record),
            Err(error) => ended = ended.and(Err(error)),
        }
    }
    ended
}

/// For each minor release in [`MINORS`], its newest patch release whose image the nodes have.
fn versions(env: &Env) -> Result<Vec<String>> {
    MINORS.iter().map(|minor| env.newest_of(minor)).collect()
}
