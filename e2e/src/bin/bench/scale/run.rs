//! Functions for all scenarios: record metrics before and after a scenario, make changes, and wait for their effect.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use futures::future::try_join_all;
use tokio::time::sleep;

use super::fleet::Fleet;
use super::kubelet::Kubelet;
use super::load::{Conditions, Load};
use super::operator::{Sampler, Usage};
use super::replicas::Replicas;
use super::report::{Figure, Measured};
use super::subject::Subject;
use crate::stats::quantile;

/// The pause after a scenario. The operator completes the work of the scenario in this time, so that the next
/// measurement excludes this work.
pub(super) const SETTLE: Duration = Duration::from_secs(20);
/// Number of clusters that a scenario changes, to test whether the operator manages clusters after an interruption.
const PROBES: usize = 20;
/// Time limit until a change reaches the pods.
const EFFECT: Duration = Duration::from_mins(5);
/// Time limit for one wait in a scenario. [`PER_CLUSTER`] is added for each cluster.
const CONVERGE: Duration = Duration::from_mins(10);
const PER_CLUSTER: Duration = Duration::from_secs(5);
/// The interval between progress messages.
const PROGRESS: Duration = Duration::from_secs(10);

/// The settings of a [`Run`].
pub(super) struct Settings {
    pub(super) clusters: usize,
    pub(super) members: usize,
    /// Number of shards into which the operator is divided. 1 means that it is not divided.
    pub(super) shards: u16,
    /// Number of replicas of the operator.
    pub(super) replicas: u16,
    /// Number of changes. The scenario `changed` measures how long their effect takes.
    pub(super) changes: usize,
    /// Duration of each measurement of the idle operator.
    pub(super) window: Duration,
}

/// The state of a run with one number of clusters and one number of replicas. The module `scenarios` contains the
/// steps.
pub(super) struct Run<'a> {
    pub(super) settings: Settings,
    pub(super) subject: &'a Subject,
    pub(super) client: kube::Client,
    pub(super) fleet: Arc<Fleet>,
    pub(super) kubelet: Arc<Kubelet>,
    pub(super) conditions: Arc<Conditions>,
    pub(super) results: &'a mut Vec<Measured>,
}

/// The metrics before a scenario.
pub(super) struct Before {
    at: Instant,
    /// The resource usage of each replica.
    usages: Vec<Usage>,
    calls: BTreeMap<String, u64>,
    sampler: Sampler,
}

pub(super) fn figure(name: &'static str, value: f64) -> Figure {
    Figure { name, value }
}

pub(super) fn seconds(name: &'static str, since: Instant) -> Figure {
    figure(name, since.elapsed().as_secs_f64())
}

pub(super) fn reactions(all: &[f64]) -> Vec<Figure> {
    [
        ("reaction p50 s", 0.5),
        ("reaction p99 s", 0.99),
        ("reaction longest s", 1.0),
    ]
    .into_iter()
    .filter_map(|(name, share)| Some(figure(name, quantile(all, share)?)))
    .collect()
}

/// A unique value for the label of a change.
pub(super) fn next_value() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    format!("c{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The counters that increased, with their increase.
fn increase(before: &BTreeMap<String, f64>, after: BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    let change = |(key, value)| {
        let change = value - before.get(&key).copied().unwrap_or_default();
        (change > 0.0).then_some((key, change))
    };
    after.into_iter().filter_map(change).collect()
}

/// The requests of all replicas together.
fn requests(usages: &[Usage]) -> BTreeMap<String, f64> {
    let mut all = BTreeMap::<String, f64>::new();
    for (key, count) in usages.iter().flat_map(|usage| &usage.requests) {
        *all.entry(key.clone()).or_default() += count;
    }
    all
}

/// The CPU usage and the memory of all replicas together, and the highest values of one replica.
fn resources(before: &[Usage], after: &[Usage], elapsed: f64) -> Vec<Figure> {
    let pairs = before.iter().zip(after);
    let cpu = pairs.map(|(before, after)| (after.cpu_seconds - before.cpu_seconds) / elapsed);
    let cpu: Vec<f64> = cpu.collect();
    let memory: Vec<f64> = after.iter().map(|one| one.anonymous_mebibytes).collect();
    let highest = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    let mut figures = vec![
        figure("operator: CPU cores", cpu.iter().sum()),
        figure("operator: memory MiB", memory.iter().sum()),
    ];
    if after.len() > 1 {
        figures.extend([
            figure("one replica: most CPU cores", highest(&cpu)),
            figure("one replica: most memory MiB", highest(&memory)),
        ]);
    }
    figures
}

#[allow(clippy::cast_precision_loss)] // `f64` represents integers below 2^52 exactly, and counters are smaller.
fn as_floats(calls: &BTreeMap<String, u64>) -> BTreeMap<String, f64> {
    let calls = calls.iter();
    calls
        .map(|(key, count)| (key.clone(), *count as f64))
        .collect()
}

impl Run<'_> {
    pub(super) async fn before(&self, operator: &Replicas) -> Result<Before> {
        let usages = operator.usages().await?;
        Ok(self.before_with(operator, usages))
    }

    /// The metrics before a scenario. `usages` is the current resource usage of each replica.
    pub(super) fn before_with(&self, operator: &Replicas, usages: Vec<Usage>) -> Before {
        Before {
            at: Instant::now(),
            usages,
            calls: self.fleet.calls(),
            sampler: Sampler::start(operator.ports()),
        }
    }

    /// Adds the operator's metrics during the scenario to `figures`, and records all of them.
    pub(super) async fn record(
        &mut self,
        scenario: &'static str,
        before: Before,
        operator: &Replicas,
        mut figures: Vec<Figure>,
    ) -> Result<()> {
        let (elapsed, after) = (before.at.elapsed().as_secs_f64(), operator.usages().await?);
        let queue = before.sampler.highest();
        figures.extend(resources(&before.usages, &after, elapsed));
        figures.extend([
            figure("queue: highest depth", queue.depth),
            figure("queue: oldest s", queue.oldest_seconds),
        ]);
        for figure in &figures {
            println!("  {scenario}: {} {:.3}", figure.name, figure.value);
        }
        let calls = as_floats(&before.calls);
        self.results.push(Measured {
            scenario,
            clusters: self.settings.clusters,
            replicas: self.settings.replicas,
            figures,
            requests: increase(&requests(&before.usages), requests(&after)),
            calls: increase(&calls, as_floats(&self.fleet.calls())),
        });
        Ok(())
    }

    /// Records a scenario that interrupts the operator, such as a restart. Adds two durations since `since`: until the
    /// last time in `effects`, and until the operator's queue is empty.
    pub(super) async fn record_duty(
        &mut self,
        scenario: &'static str,
        (before, since): (Before, Instant),
        operator: &Replicas,
        (effects, mut figures): (Vec<Instant>, Vec<Figure>),
    ) -> Result<()> {
        let last = effects.into_iter().max().unwrap_or(since);
        let duty = last.saturating_duration_since(since).as_secs_f64();
        figures.push(figure("seconds until changes have effect", duty));
        operator.await_empty_queue().await?;
        figures.push(seconds("seconds until the queue is empty", since));
        self.record(scenario, before, operator, figures).await?;
        sleep(SETTLE).await;
        Ok(())
    }

    pub(super) async fn settle(&self, operator: &Replicas) -> Result<()> {
        operator.await_empty_queue().await?;
        sleep(SETTLE).await;
        Ok(())
    }

    /// Waits until `count` returns at least `total`, and prints the progress.
    pub(super) async fn await_count(
        &self,
        what: &str,
        total: usize,
        count: impl Fn() -> usize,
    ) -> Result<()> {
        let (begun, mut printed) = (Instant::now(), Instant::now());
        let limit = CONVERGE + PER_CLUSTER * u32::try_from(self.settings.clusters)?;
        loop {
            let now = count();
            let waited = begun.elapsed();
            if now >= total {
                return Ok(());
            }
            if waited > limit {
                bail!(
                    "{what}: {now} of {total} at the time limit of {} s",
                    waited.as_secs()
                );
            }
            if printed.elapsed() >= PROGRESS {
                println!("  {what}: {now} of {total} after {} s", waited.as_secs());
                printed = Instant::now();
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until all clusters are ready, and all their members run `version`.
    pub(super) async fn await_complete(
        &self,
        what: &str,
        load: &Load,
        version: &str,
    ) -> Result<()> {
        let size = self.settings.members;
        let complete = || {
            let complete = self.fleet.complete(size, version);
            complete.min(load.ready(&self.conditions))
        };
        self.await_count(what, load.clusters, complete).await
    }

    /// Waits until a pod has the change `value`, and returns the time at which this was first observed.
    pub(super) async fn effect(&self, value: &str) -> Result<Instant> {
        let begun = Instant::now();
        while begun.elapsed() < EFFECT {
            if let Some(at) = self.kubelet.effect(value) {
                return Ok(at);
            }
            sleep(Duration::from_millis(1)).await;
        }
        bail!("no pod showed a change within {} s", EFFECT.as_secs())
    }

    /// Changes several evenly distributed clusters concurrently. Returns the value of the label [`CHANGE`] for each.
    pub(super) async fn change_some(&self, load: &Load) -> Result<Vec<String>> {
        let count = PROBES.min(load.clusters);
        let changes = (0..count).map(async |nth| {
            let value = next_value();
            load.change(nth * load.clusters / count, &value).await?;
            Ok(value)
        });
        try_join_all(changes).await
    }

    /// For each change, the time at which a pod first had it.
    pub(super) async fn effects(&self, values: &[String]) -> Result<Vec<Instant>> {
        try_join_all(values.iter().map(|value| self.effect(value))).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(cpu_seconds: f64, anonymous_mebibytes: f64, lists: f64) -> Usage {
        Usage {
            cpu_seconds,
            anonymous_mebibytes,
            requests: [("list pods".to_owned(), lists)].into(),
        }
    }

    /// The second replica was started during the scenario.
    #[test]
    fn resource_figures_contain_sum_and_maximum_of_replicas() {
        let before = [usage(4.0, 20.0, 10.0), Usage::default()];
        let after = [usage(5.0, 30.0, 12.0), usage(3.0, 50.0, 7.0)];
        let found = resources(&before, &after, 2.0);
        let found: Vec<(&str, f64)> = found.iter().map(|one| (one.name, one.value)).collect();
        let expected = [
            ("operator: CPU cores", 2.0),
            ("operator: memory MiB", 80.0),
            ("one replica: most CPU cores", 1.5),
            ("one replica: most memory MiB", 50.0),
        ];
        assert_eq!(found, expected);
        assert_eq!(resources(&before[..1], &after[..1], 2.0).len(), 2);
        let sent = increase(&requests(&before), requests(&after));
        assert_eq!(sent, BTreeMap::from([("list pods".to_owned(), 9.0)]));
    }
}
