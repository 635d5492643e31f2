//! Functions that the scenarios share. They record the metrics of the operator before and after a scenario, wait and
//! print the progress, and make changes and wait until these have an effect.

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
use super::operator::{Operator, Sampler, Usage};
use super::report::{Figure, Measured, quantile};
use super::subject::Subject;

/// The pause after a scenario. The operator completes its remaining work during this time, so that this work does not
/// affect the measurement of the next scenario.
pub(super) const SETTLE: Duration = Duration::from_secs(20);
/// Number of clusters that a scenario changes to find out whether the operator does its work.
const PROBES: usize = 20;
/// Time limit for the effect of one change.
const EFFECT: Duration = Duration::from_mins(5);
/// Time limit for a scenario, in addition to [`PER_CLUSTER`].
const CONVERGE: Duration = Duration::from_mins(10);
const PER_CLUSTER: Duration = Duration::from_secs(5);
/// How often a long wait prints its progress.
const PROGRESS: Duration = Duration::from_secs(10);

/// The number of clusters, and the other settings of a [`Run`].
pub(super) struct Settings {
    pub(super) clusters: usize,
    pub(super) members: usize,
    /// Number of changes whose reaction is measured.
    pub(super) changes: usize,
    /// Duration of the measurements at rest.
    pub(super) window: Duration,
}

/// The state of the scenarios that run with one number of clusters. The module `scenarios` contains their steps.
pub(super) struct Run<'a> {
    pub(super) settings: Settings,
    pub(super) subject: &'a Subject,
    pub(super) client: kube::Client,
    pub(super) fleet: Arc<Fleet>,
    pub(super) kubelet: Arc<Kubelet>,
    pub(super) conditions: Arc<Conditions>,
    pub(super) results: &'a mut Vec<Measured>,
}

/// The state before a scenario.
pub(super) struct Before {
    at: Instant,
    usage: Usage,
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

/// A new value for the label of a change. No other change has this value.
pub(super) fn next_value() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    format!("c{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The increase of each counter that has increased.
fn increase(before: &BTreeMap<String, f64>, after: BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    let change = |(key, value)| {
        let change = value - before.get(&key).copied().unwrap_or_default();
        (change > 0.0).then_some((key, change))
    };
    after.into_iter().filter_map(change).collect()
}

#[allow(clippy::cast_precision_loss)] // A float represents numbers below 2^52 exactly, and counters are smaller.
fn as_floats(calls: &BTreeMap<String, u64>) -> BTreeMap<String, f64> {
    let calls = calls.iter();
    calls
        .map(|(key, count)| (key.clone(), *count as f64))
        .collect()
}

impl Run<'_> {
    pub(super) async fn before(&self, operator: &Operator) -> Result<Before> {
        let usage = operator.usage().await?;
        Ok(self.before_with(operator, usage))
    }

    /// The state before a scenario. `usage` is the resource usage of the operator at this time.
    pub(super) fn before_with(&self, operator: &Operator, usage: Usage) -> Before {
        Before {
            at: Instant::now(),
            usage,
            calls: self.fleet.calls(),
            sampler: Sampler::start(operator.port),
        }
    }

    /// Adds the figures of the operator to those of a scenario.
    pub(super) async fn record(
        &mut self,
        scenario: &'static str,
        before: Before,
        operator: &Operator,
        mut figures: Vec<Figure>,
    ) -> Result<()> {
        let (elapsed, after) = (before.at.elapsed().as_secs_f64(), operator.usage().await?);
        let queue = before.sampler.highest();
        let cpu = (after.cpu_seconds - before.usage.cpu_seconds) / elapsed;
        figures.extend([
            figure("operator: CPU cores", cpu),
            figure("operator: memory MiB", after.anonymous_mebibytes),
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
            figures,
            requests: increase(&before.usage.requests, after.requests),
            calls: increase(&calls, as_floats(&self.fleet.calls())),
        });
        Ok(())
    }

    /// Records a scenario after which the operator must manage the clusters again. `effects` are the times at which the
    /// test changes had their effect. Also records the time from `since` to the last effect, and the time from `since`
    /// until no reconcile is due.
    pub(super) async fn record_duty(
        &mut self,
        scenario: &'static str,
        (before, since): (Before, Instant),
        operator: &Operator,
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

    pub(super) async fn settle(&self, operator: &Operator) -> Result<()> {
        operator.await_empty_queue().await?;
        sleep(SETTLE).await;
        Ok(())
    }

    /// Waits until `count` returns `total`. Prints the progress.
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
                bail!("{what}: only {now} of {total} after {} s", waited.as_secs());
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

    /// Waits for the effect of a change, and returns its time.
    pub(super) async fn effect(&self, value: &str) -> Result<Instant> {
        let begun = Instant::now();
        while begun.elapsed() < EFFECT {
            if let Some(at) = self.kubelet.effect(value) {
                return Ok(at);
            }
            sleep(Duration::from_millis(1)).await;
        }
        bail!("a change had no effect for {} s", EFFECT.as_secs())
    }

    /// Changes evenly distributed clusters concurrently. Returns the values that their pods get.
    pub(super) async fn change_some(&self, load: &Load) -> Result<Vec<String>> {
        let count = PROBES.min(load.clusters);
        let changes = (0..count).map(async |nth| {
            let value = next_value();
            load.change(nth * load.clusters / count, &value).await?;
            Ok(value)
        });
        try_join_all(changes).await
    }

    /// The times at which these changes had their effect.
    pub(super) async fn effects(&self, values: &[String]) -> Result<Vec<Instant>> {
        try_join_all(values.iter().map(|value| self.effect(value))).await
    }
}
