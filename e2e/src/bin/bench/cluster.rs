//! `bench cluster` measures how long it takes to create a cluster and to apply changes to it.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;
use e2e::objects::Kind;
use e2e::wait::Poll;
use e2e::writer::Writer;
use e2e::{Keyspace, Sandbox, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde::Serialize;
use serde_json::json;

use crate::idle;
use crate::stats::{Sample, as_json, print_table};
use crate::subject::{SUBJECTS, Subject};

/// Time limit for one measurement.
pub(crate) const TIMEOUT: Duration = Duration::from_mins(2);
const SIZE: usize = 3;
/// The number of clusters that are created concurrently.
const CLUSTERS: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(crate) enum Row {
    /// From the creation of a cluster to 3 ready voters.
    Create,
    /// From the deletion of one pod to 3 healthy voters.
    DeleteOne,
    /// From the deletion of one pod and its volume to 3 healthy voters.
    LoseVolume,
    /// From the change of `spec.size` from 3 to 5 until 5 voters are healthy.
    Grow,
    /// From the change of `spec.size` from 5 to 3 until etcd lists exactly 3 voters.
    Shrink,
    /// From the deletion of 2 of the 3 pods to 3 healthy voters.
    DeleteTwo,
    /// From the deletion of all 3 pods to 3 healthy voters.
    DeleteAll,
    /// From the creation of 10 clusters with one member each until all are ready. The benchmark then measures the CPU
    /// time and the memory of the idle operator.
    TenClusters,
}

impl Row {
    pub(crate) const ALL: [Self; 8] = [
        Self::Create,
        Self::DeleteOne,
        Self::LoseVolume,
        Self::Grow,
        Self::Shrink,
        Self::DeleteTwo,
        Self::DeleteAll,
        Self::TenClusters,
    ];

    /// The name of the measurement on the command line and in the printed table.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::DeleteOne => "delete_one",
            Self::LoseVolume => "lose_volume",
            Self::Grow => "grow",
            Self::Shrink => "shrink",
            Self::DeleteTwo => "delete_two",
            Self::DeleteAll => "delete_all",
            Self::TenClusters => "ten_clusters",
        }
    }

    /// The goal from docs/benchmarks.md: a maximum time (`6 s`), or a maximum ratio to the time of a StatefulSet
    /// (`x1.3`).
    pub(crate) fn goal(self) -> &'static str {
        match self {
            Self::Create => "x1.3",
            Self::DeleteOne => "x1.0",
            Self::LoseVolume => "6 s",
            Self::Grow => "5 s",
            Self::Shrink => "3 s",
            Self::DeleteTwo => "3.5 s",
            Self::DeleteAll | Self::TenClusters => "4 s",
        }
    }

    /// False if a cluster of the kind `subject` does not support the measurement. A StatefulSet does not change etcd's
    /// member list and does not replace lost data. A cluster without volumes does not survive the loss of most of its
    /// pods.
    fn is_measured(self, subject: Subject) -> bool {
        match self {
            Self::Create | Self::DeleteOne => true,
            Self::LoseVolume => subject == Subject::OperatorDurable,
            Self::Grow | Self::Shrink => subject != Subject::StatefulSet,
            Self::DeleteTwo | Self::DeleteAll => subject != Subject::Operator,
            Self::TenClusters => subject != Subject::OperatorDurable,
        }
    }
}

/// Runs the measurements and prints the results. Also writes the results to the file `json`, if set.
pub(crate) async fn bench(
    rounds: usize,
    only: &[Row],
    json: Option<&Path>,
    dns: &str,
) -> Result<()> {
    let wanted = |row: Row| only.is_empty() || only.contains(&row);
    let sandbox = Sandbox::create("bench").await?;
    let mut samples = Vec::new();
    let outcome = measure(&sandbox, rounds, &wanted, &mut samples).await;
    sandbox.delete().await;
    print_table(&samples, dns);
    let idle = outcome?;
    if let Some(idle) = &idle {
        idle.print();
    }
    if let Some(path) = json {
        let figures = serde_json::to_string_pretty(&as_json(&samples, dns, idle.as_ref()))?;
        std::fs::write(path, figures).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

async fn measure(
    sandbox: &Sandbox,
    rounds: usize,
    wanted: &impl Fn(Row) -> bool,
    samples: &mut Vec<Sample>,
) -> Result<Option<idle::Idle>> {
    sandbox.install_operators().await?;
    // Round 0 also fills caches and loads images, so its results are discarded.
    for number in 0..=rounds {
        for subject in SUBJECTS {
            let life = Life {
                sandbox,
                subject,
                name: format!("{}-{number}", subject.short()),
            };
            let mut taken = life
                .live(wanted)
                .await
                .with_context(|| format!("{subject:?}, round {number}"))?;
            print_round(number, subject, &taken);
            if number > 0 {
                samples.append(&mut taken);
            }
        }
    }
    if !wanted(Row::TenClusters) {
        return Ok(None);
    }
    for number in 1..=rounds {
        for subject in [Subject::StatefulSet, Subject::Operator] {
            let name = |at: usize| format!("{}-ten-{number}-{at}", subject.short());
            let seconds = ten_clusters(sandbox, subject, &name).await?;
            let sample = Sample {
                row: Row::TenClusters,
                subject,
                seconds,
                write_gap_seconds: None,
            };
            print_round(number, subject, std::slice::from_ref(&sample));
            samples.push(sample);
            if number == rounds && subject == Subject::Operator {
                let idle = idle::measure(sandbox, CLUSTERS).await?;
                return Ok(Some(idle));
            }
            for at in 0..CLUSTERS {
                subject.remove(sandbox, &name(at)).await?;
            }
        }
    }
    Ok(None)
}

fn print_round(number: usize, subject: Subject, samples: &[Sample]) {
    let kind = if number == 0 { "warm-up" } else { "round" };
    let figures: Vec<String> = samples
        .iter()
        .map(|sample| {
            let gap = sample
                .write_gap_seconds
                .map_or_else(String::new, |gap| format!(" (gap {gap:.2} s)"));
            format!("{} {:.2} s{gap}", sample.row.name(), sample.seconds)
        })
        .collect();
    println!("{kind} {number} {subject:?}: {}", figures.join(", "));
}

/// One cluster that a round creates, changes and measures.
struct Life<'a> {
    sandbox: &'a Sandbox,
    subject: Subject,
    name: String,
}

impl Life<'_> {
    async fn live(&self, wanted: &impl Fn(Row) -> bool) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for row in Row::ALL {
            // `Create` always runs, because it creates the cluster for the other measurements. `Grow` also runs if only
            // `Shrink` is measured, because `Shrink` removes the members that `Grow` adds. `TenClusters` is skipped,
            // because it runs separately.
            let prepares = row == Row::Create || row == Row::Grow && wanted(Row::Shrink);
            if row == Row::TenClusters
                || !row.is_measured(self.subject)
                || !(wanted(row) || prepares)
            {
                continue;
            }
            let (seconds, write_gap_seconds) = self
                .timed(row)
                .await
                .with_context(|| row.name().to_owned())?;
            samples.push(Sample {
                row,
                subject: self.subject,
                seconds,
                write_gap_seconds,
            });
            let size = if row == Row::Grow { SIZE + 2 } else { SIZE };
            self.subject
                .await_idle(self.sandbox, &self.name, size)
                .await?;
        }
        self.subject.remove(self.sandbox, &self.name).await?;
        samples.retain(|sample| wanted(sample.row));
        Ok(samples)
    }

    async fn timed(&self, row: Row) -> Result<(f64, Option<f64>)> {
        Ok(match row {
            Row::Create => (self.create().await?, None),
            Row::DeleteOne => (self.delete(1, false).await?, None),
            Row::LoseVolume => (self.delete(1, true).await?, None),
            Row::Grow => (self.resize(SIZE + 2).await?, None),
            Row::Shrink => (self.resize(SIZE).await?, None),
            Row::DeleteTwo | Row::DeleteAll => {
                let count = if row == Row::DeleteTwo { 2 } else { SIZE };
                let writer = Writer::start(self.sandbox, &self.name).await?;
                let seconds = self.delete(count, false).await?;
                let what = format!("{} {:?}", row.name(), self.subject);
                let tally = writer.finish(&what).await?;
                (seconds, Some(tally.gap.as_secs_f64()))
            }
            Row::TenClusters => (0.0, None),
        })
    }

    async fn create(&self) -> Result<f64> {
        let manifest = self.subject.manifest(self.sandbox, &self.name, SIZE)?;
        // The time starts after `apply`, so that it excludes the start of kubectl.
        self.sandbox.apply(&manifest).await?;
        let begun = Instant::now();
        self.await_complete(SIZE, &[], &[]).await?;
        Ok(begun.elapsed().as_secs_f64())
    }

    /// Deletes `count` pods, and their volumes if `volumes` is true. Returns the seconds until the cluster has its
    /// previous number of healthy voters again.
    async fn delete(&self, count: usize, volumes: bool) -> Result<f64> {
        let pods = self.sandbox.member_pods(&self.name).await?;
        let name = |pod: &Pod| pod.metadata.name.clone().unwrap_or_default();
        let (victims, survivors) = pods.split_at(count.min(pods.len()));
        let survivors: Vec<String> = survivors.iter().map(name).collect();
        let deleted: Vec<String> = victims
            .iter()
            .filter_map(|pod| pod.metadata.uid.clone())
            .collect();
        let api = self.sandbox.api::<Pod>();
        let claims = self.sandbox.api::<PersistentVolumeClaim>();
        let begun = Instant::now();
        for victim in victims.iter().map(name) {
            if volumes {
                claims.delete(&victim, &DeleteParams::default()).await?;
            }
            api.delete(&victim, &DeleteParams::default()).await?;
        }
        self.await_complete(SIZE, &survivors, &deleted).await?;
        Ok(begun.elapsed().as_secs_f64())
    }

    async fn resize(&self, size: usize) -> Result<f64> {
        let clusters = self.sandbox.objects(Kind::EtcdCluster);
        let patch = json!({"spec": {"size": size}});
        let begun = Instant::now();
        clusters
            .patch(&self.name, &PatchParams::default(), &Patch::Merge(&patch))
            .await?;
        self.await_complete(size, &[], &[]).await?;
        Ok(begun.elapsed().as_secs_f64())
    }

    /// Waits until `size` pods are ready and etcd lists exactly `size` voters. Pods with a UID in `deleted` do not
    /// count.
    async fn await_complete(&self, size: usize, via: &[String], deleted: &[String]) -> Result<()> {
        let (env, namespace) = (&self.sandbox.env, &self.sandbox.namespace);
        let mut connection: Option<Keyspace> = match via.first() {
            Some(pod) => Some(Keyspace::of_pod(env, namespace, pod).await?),
            None => None,
        };
        until(&format!("{} is complete", self.name), TIMEOUT, async || {
            let pods = self.sandbox.member_pods(&self.name).await?;
            let is_deleted = |pod: &Pod| {
                pod.metadata
                    .uid
                    .as_ref()
                    .is_some_and(|uid| deleted.contains(uid))
            };
            let ready: Vec<&Pod> = pods
                .iter()
                .filter(|pod| is_ready(pod) && !is_deleted(pod))
                .collect();
            if ready.len() != size || pods.len() != size {
                let text = format!("{} of {} pods ready", ready.len(), pods.len());
                return Ok(Poll::NotYet(text));
            }
            if connection.is_none() {
                let pod = ready[0].metadata.name.clone().unwrap_or_default();
                connection = Some(Keyspace::of_pod(env, namespace, &pod).await?);
            }
            let Some(keys) = &connection else {
                return Ok(Poll::NotYet("no connection".to_owned()));
            };
            let members = keys.members().await?;
            let voters = members
                .iter()
                .filter(|(name, learner)| !learner && !name.is_empty())
                .count();
            Ok(if voters == size && members.len() == size {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{members:?}"))
            })
        })
        .await
    }
}

/// Creates 10 clusters of one member. Returns the seconds until all are ready.
async fn ten_clusters(
    sandbox: &Sandbox,
    subject: Subject,
    name: &impl Fn(usize) -> String,
) -> Result<f64> {
    let names: Vec<String> = (0..CLUSTERS).map(name).collect();
    let manifests: Result<Vec<String>> = names
        .iter()
        .map(|name| subject.manifest(sandbox, name, 1))
        .collect();
    let selector = format!("app=etcd,etcd_cluster in ({})", names.join(","));
    sandbox.apply(&manifests?.join("\n---\n")).await?;
    let begun = Instant::now();
    until("10 clusters are ready", TIMEOUT, async || {
        let list = ListParams::default().labels(&selector);
        let pods = sandbox.api::<Pod>().list(&list).await?.items;
        let ready = pods.iter().filter(|pod| is_ready(pod)).count();
        Ok(if ready == CLUSTERS && pods.len() == CLUSTERS {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{ready} of {} pods ready", pods.len()))
        })
    })
    .await?;
    Ok(begun.elapsed().as_secs_f64())
}

fn is_ready(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
