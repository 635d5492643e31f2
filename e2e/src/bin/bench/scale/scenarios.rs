//! The scenarios, in the order of execution.

use std::collections::HashSet;
use std::time::Instant;

use anyhow::Result;
use futures::stream::{self, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams};
use tokio::time::sleep;

use super::load::{CONCURRENCY, Load, Template, delete_namespaces, is_missing, operator_namespace};
use super::operator::Usage;
use super::replicas::Replicas;
use super::run::{Run, SETTLE, figure, next_value, reactions, seconds};
use super::subject::testbed;

/// The etcd versions before and after the rolling update. The images need not exist, because the pods are simulated.
const VERSION: &str = "3.6.15";
const NEXT_VERSION: &str = "3.6.16";
/// Number of clusters that are created while the pods of other clusters are unschedulable.
const ANOTHER: usize = 10;
/// The zone in which the scenario `lost` deletes pods.
const LOST_ZONE: usize = 0;

impl Run<'_> {
    /// Runs all scenarios. If a scenario fails, the results of earlier scenarios are kept.
    pub(super) async fn scenarios(&mut self) -> Result<()> {
        let load = self.load("scale", self.settings.clusters);
        let reference = self.reference().await?;
        let mut operator = self.start().await?;
        self.created(&operator, &load, reference).await?;
        self.at_rest("at rest", &operator).await?;
        self.changed(&operator, &load).await?;
        self.lost(&operator, &load).await?;
        operator = self.restarted(operator, &load).await?;
        operator = self.handed_over(operator, &load).await?;
        operator = self.api_restarted(operator, &load).await?;
        self.rolled(&operator, &load).await?;
        self.discard(operator).await?;
        let operator = self.start().await?;
        self.unschedulable(&operator).await?;
        self.discard(operator).await
    }

    fn load(&self, prefix: &'static str, clusters: usize) -> Load {
        let size = (clusters, self.settings.members);
        Load::new(&self.client, prefix, size, VERSION)
    }

    fn launch(&self) -> Result<Replicas> {
        let (shards, replicas) = (self.settings.shards, self.settings.replicas);
        Replicas::start(&self.subject.program, shards, replicas)
    }

    async fn start(&self) -> Result<Replicas> {
        let operator = self.launch()?;
        operator.await_shares().await?;
        Ok(operator)
    }

    /// Stops the operator, and then deletes all objects.
    async fn discard(&self, operator: Replicas) -> Result<()> {
        operator.stop().await?;
        self.delete().await
    }

    async fn delete(&self) -> Result<()> {
        println!("deleting the objects");
        delete_namespaces(&self.client).await?;
        self.fleet.clear();
        operator_namespace(&self.client).await
    }

    /// Creates the objects of all clusters without an operator. Returns the seconds until all pods are ready.
    async fn reference(&self) -> Result<f64> {
        let warm = self.load("scale-warm", 1);
        let operator = self.start().await?;
        warm.prepare().await?;
        warm.create().await?;
        self.await_complete("the cluster for the template", &warm, VERSION)
            .await?;
        let template = Template::of(&warm).await?;
        self.discard(operator).await?;
        let load = self.load("scale-plain", self.settings.clusters);
        load.prepare().await?;
        let (clusters, objects) = (load.clusters, template.objects());
        println!(
            "reference: a plain client creates {objects} objects for each of {clusters} clusters"
        );
        let begun = Instant::now();
        template.create(&load).await?;
        let pods = clusters * self.settings.members;
        self.await_count("reference: ready pods", pods, || self.kubelet.ready())
            .await?;
        let took = begun.elapsed().as_secs_f64();
        println!("  reference: {took:.3} s");
        self.delete().await?;
        Ok(took)
    }

    async fn created(&mut self, operator: &Replicas, load: &Load, reference: f64) -> Result<()> {
        load.prepare().await?;
        println!("created: {} clusters at once", load.clusters);
        let before = self.before(operator).await?;
        let begun = Instant::now();
        load.create().await?;
        let posted = seconds("seconds until all are posted", begun);
        self.await_complete("created: ready clusters", load, VERSION)
            .await?;
        let took = begun.elapsed().as_secs_f64();
        let figures = vec![
            posted,
            figure("seconds", took),
            figure("seconds of a plain client", reference),
            figure("ratio", took / reference),
        ];
        self.record("created", before, operator, figures).await?;
        self.settle(operator).await
    }

    async fn at_rest(&mut self, scenario: &'static str, operator: &Replicas) -> Result<()> {
        println!("{scenario}: {} s", self.settings.window.as_secs());
        let before = self.before(operator).await?;
        sleep(self.settings.window).await;
        self.record(scenario, before, operator, Vec::new()).await
    }

    async fn changed(&mut self, operator: &Replicas, load: &Load) -> Result<()> {
        let changes = self.settings.changes;
        println!("changed: {changes} changes, one after another");
        let before = self.before(operator).await?;
        let mut all = Vec::new();
        for nth in 0..changes {
            let (value, begun) = (next_value(), Instant::now());
            // The factor 7919 is a prime number, so the changes are spread over all clusters.
            load.change(nth * 7919 % load.clusters, &value).await?;
            let effect = self.effect(&value).await?;
            all.push(effect.duration_since(begun).as_secs_f64());
        }
        self.record("changed", before, operator, reactions(&all))
            .await?;
        self.settle(operator).await
    }

    /// Deletes the pods of a zone from the API server, as after the deletion of the zone's nodes. At most a minority
    /// of each cluster is deleted, because a cluster without volumes does not survive the loss of its quorum.
    async fn lost(&mut self, operator: &Replicas, load: &Load) -> Result<()> {
        let most = (self.settings.members - 1) / 2;
        let lost: HashSet<_> = { self.kubelet.in_zone(LOST_ZONE, most) }
            .into_iter()
            .collect();
        println!("lost: {} of {} pods", lost.len(), self.kubelet.pods());
        let before = self.before(operator).await?;
        let begun = Instant::now();
        let now = DeleteParams::default().grace_period(0);
        stream::iter(&lost)
            .map(async |(namespace, name)| {
                let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
                is_missing(pods.delete(name, &now).await)
            })
            .buffer_unordered(CONCURRENCY)
            .try_collect::<()>()
            .await?;
        let seen = || usize::from(!self.kubelet.has_any(&lost));
        self.await_count("lost: deleted pods", 1, seen).await?;
        let deleted = seconds("seconds until all are deleted", begun);
        self.await_complete("lost: complete clusters", load, VERSION)
            .await?;
        let figures = vec![deleted, seconds("seconds", begun)];
        self.record("a third of the pods lost", before, operator, figures)
            .await?;
        self.settle(operator).await
    }

    async fn restarted(&mut self, operator: Replicas, load: &Load) -> Result<Replicas> {
        println!("restarted");
        operator.stop().await?;
        let changes = self.change_some(load).await?;
        let begun = Instant::now();
        let operator = self.launch()?;
        let usages = vec![Usage::default(); usize::from(self.settings.replicas)];
        let before = self.before_with(&operator, usages);
        operator.await_duty().await?;
        let figures = vec![seconds("seconds until it leads", begun)];
        let effects = self.effects(&changes).await?;
        let found = (effects, figures);
        self.record_duty("operator restarted", (before, begun), &operator, found)
            .await?;
        Ok(operator)
    }

    /// A new replica starts, and the first replica shuts down. Without shards, the new replica is on standby until the
    /// first replica shuts down. It then becomes the leader.
    async fn handed_over(&mut self, mut operator: Replicas, load: &Load) -> Result<Replicas> {
        println!("handed over");
        operator.add()?;
        operator.await_ready().await?;
        operator.await_shares().await?;
        sleep(SETTLE).await;
        let leader = operator.take_first()?;
        let before = self.before(&operator).await?;
        let begun = Instant::now();
        leader.terminate()?;
        let changes = self.change_some(load).await?;
        let found = (self.effects(&changes).await?, Vec::new());
        leader.await_end().await?;
        operator.await_duty().await?;
        self.record_duty("leader handed over", (before, begun), &operator, found)
            .await?;
        Ok(operator)
    }

    async fn api_restarted(&mut self, mut operator: Replicas, load: &Load) -> Result<Replicas> {
        println!("API server restarted");
        let mut usages = operator.usages().await?;
        let begun = Instant::now();
        testbed(&self.subject.xtask, &["daemon", "stop", "kube-apiserver"]).await?;
        testbed(&self.subject.xtask, &["daemon", "start", "kube-apiserver"]).await?;
        let (outage, serves) = (seconds("seconds of the outage", begun), Instant::now());
        // A replica that cannot renew its Leases during the outage exits. The benchmark then starts it again, as a
        // kubelet would.
        let ended = operator.replace_ended()?;
        for position in &ended {
            usages[*position] = Usage::default();
        }
        let before = self.before_with(&operator, usages);
        let restarts = f64::from(u16::try_from(ended.len())?);
        let restarts = figure("restarts of the operator", restarts);
        let changes = self.change_some(load).await?;
        let found = (self.effects(&changes).await?, vec![outage, restarts]);
        operator.await_duty().await?;
        self.record_duty("API server restarted", (before, serves), &operator, found)
            .await?;
        Ok(operator)
    }

    async fn rolled(&mut self, operator: &Replicas, load: &Load) -> Result<()> {
        println!("rolled: all clusters from {VERSION} to {NEXT_VERSION}");
        let before = self.before(operator).await?;
        let begun = Instant::now();
        load.set_version(NEXT_VERSION).await?;
        self.await_complete("rolled: complete clusters", load, NEXT_VERSION)
            .await?;
        let figures = vec![seconds("seconds", begun)];
        self.record("all rolled to another etcd", before, operator, figures)
            .await
    }

    async fn unschedulable(&mut self, operator: &Replicas) -> Result<()> {
        let load = { self.load("scale-full", self.settings.clusters) }.unschedulable();
        load.prepare().await?;
        let (clusters, pods) = (load.clusters, load.clusters * self.settings.members);
        println!("unschedulable: {clusters} clusters whose pods no node accepts");
        let before = self.before(operator).await?;
        let begun = Instant::now();
        load.create().await?;
        let waiting = || self.kubelet.unschedulable();
        self.await_count("unschedulable: waiting pods", pods, waiting)
            .await?;
        let figures = vec![seconds("seconds until all pods wait", begun)];
        self.record("unschedulable, created", before, operator, figures)
            .await?;
        // The benchmark pauses for a fixed time and does not wait for an empty queue, because the operator may
        // reconcile unschedulable clusters again and again.
        sleep(SETTLE).await;
        self.at_rest("unschedulable, at rest", operator).await?;
        println!("unschedulable: {ANOTHER} more clusters, one after another");
        let before = self.before(operator).await?;
        let mut all = Vec::new();
        for nth in 0..ANOTHER {
            let (value, begun) = (next_value(), Instant::now());
            load.create_another(nth, &value).await?;
            let effect = self.effect(&value).await?;
            all.push(effect.duration_since(begun).as_secs_f64());
        }
        let scenario = "unschedulable, one more created";
        self.record(scenario, before, operator, reactions(&all))
            .await
    }
}
