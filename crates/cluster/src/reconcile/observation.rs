//! Observes a cluster once, and plans from the observation.

use std::sync::Arc;
use std::time::Instant;

use api::EtcdCluster;
use api::cluster::ClusterPhase;
use etcd::Etcd;
use futures::future::OptionFuture;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use runtime::Done;

use crate::action::Step;
use crate::desired::desired;
use crate::execute::{Acted, ExecuteContext};
use crate::naming::Seed;
use crate::objects::Objects;
use crate::observe::{self, KubeSnapshot};
use crate::outcome::Error;
use crate::plan::effective::Effective;
use crate::plan::{Plan, plan, urgent};
use crate::reconcile::ClusterOperator;
use crate::snapshot::{Desired, Observed};
use crate::status::Report;

/// Maximum number of interrupted observations in a reconcile. The next observation is never interrupted.
const DROPS: usize = 10;

/// Until this age of an EtcdCluster, the operator does not report each step of the bootstrap in the status.
const FORMING: jiff::SignedDuration = jiff::SignedDuration::from_mins(1);

/// One observation of a cluster, and the plan that follows from it.
pub(super) struct Round {
    pub(super) snapshot: KubeSnapshot,
    pub(super) etcd: Arc<dyn Etcd>,
    pub(super) observed: Observed,
    desired: Desired,
    pub(super) plan: Plan,
    pub(super) at: jiff::Timestamp,
}

impl ClusterOperator {
    /// Reads the Kubernetes objects, and caches them for later reconciles of an idle cluster.
    async fn read(&self, object: &EtcdCluster) -> Result<Option<(KubeSnapshot, Instant)>, Error> {
        let _place = self.reads.acquire().await;
        let (uid, since) = (object.uid().unwrap_or_default(), Instant::now());
        self.cache.begin(&uid);
        let snapshot = Box::pin(self.snapshot(object)).await;
        match &snapshot {
            Ok(Some(snapshot)) => {
                self.cache.record_read(&uid, since);
                let version = snapshot.cluster.metadata.resource_version.as_deref();
                self.cache.keep(&uid, version, snapshot.clone(), since);
            }
            _ => self.cache.invalidate(&uid),
        }
        Ok(snapshot?.map(|snapshot| (snapshot, since)))
    }

    async fn snapshot(&self, object: &EtcdCluster) -> Result<Option<KubeSnapshot>, Error> {
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        let of_cluster = (namespace.as_str(), name.as_str());
        let Some(objects) = observe::objects(&self.client, &self.watched, of_cluster).await? else {
            return Ok(None);
        };
        Ok(Some(Box::pin(self.complete(objects)).await))
    }

    /// Adds the Secrets of `spec.auth` to the objects. Without `spec.auth`, sends no request.
    async fn complete(&self, mut objects: Objects) -> KubeSnapshot {
        let namespace = objects.cluster.namespace().unwrap_or_default();
        let effective = Effective::of(&objects, jiff::Timestamp::now());
        let seen = (&self.operators, objects.policy.take());
        let mut snapshot = objects.snapshot(effective);
        snapshot.limit_join(self.joins.of(&namespace));
        observe::access::complete(&self.client, seen, &mut snapshot).await;
        snapshot
    }

    /// The snapshot for a reconcile that writes nothing, from the last read, or from the watch caches and the current
    /// Secrets. `None` if all objects must be read from the API server.
    async fn cached(&self, object: &EtcdCluster) -> Option<KubeSnapshot> {
        let (uid, since) = (object.uid().unwrap_or_default(), Instant::now());
        if self.cache.needs_read(&uid, since) {
            return None;
        }
        let version = object.metadata.resource_version.as_deref();
        if let Some(snapshot) = self.cache.get(&uid, version, since) {
            return Some(snapshot);
        }
        self.cache.begin(&uid);
        let has_secrets = object.spec.tls.is_some() || object.spec.auth.is_some();
        let place = has_secrets.then(|| self.reads.acquire());
        let _place = OptionFuture::from(place).await;
        let objects = observe::watched::objects(&self.client, &self.watched, object).await?;
        let snapshot = Box::pin(self.complete(objects)).await;
        self.cache.keep(&uid, version, snapshot.clone(), since);
        Some(snapshot)
    }

    async fn round(&self, snapshot: KubeSnapshot) -> Round {
        let uid = snapshot.cluster.uid().unwrap_or_default();
        let (etcd, seed) = self.clients_of(&uid, &snapshot);
        let mut observed = observe::observe((etcd.as_ref(), seed.as_ref()), &snapshot).await;
        observed.upkeep.call = self.calls.of(&uid, observed.upkeep.record.as_ref());
        observe::operator_image(&self.image, &mut observed).await;
        let desired = desired(&snapshot.effective, &self.operators);
        let (names, at) = (new_names(&snapshot), jiff::Timestamp::now());
        let mut planned = plan(&desired, &observed, &names, at);
        if let Some(revision) = planned.asks {
            observe::hashes(etcd.as_ref(), &snapshot, &mut observed, revision).await;
            planned = plan(&desired, &observed, &names, at);
        }
        Round {
            snapshot,
            etcd,
            observed,
            desired,
            plan: planned,
            at,
        }
    }

    /// The clients for the cluster and for the seed of its recovery. Without a recovery, both are the same client.
    fn clients_of(&self, uid: &str, snapshot: &KubeSnapshot) -> (Arc<dyn Etcd>, Arc<dyn Etcd>) {
        let access = snapshot.access().unwrap_or_default();
        let status = snapshot.cluster.status.as_ref();
        let token = status.and_then(|status| Some(status.bootstrap.as_ref()?.token.as_str()));
        let of = |token| self.clients.of((uid, token), &access);
        (of(token), of(snapshot.seeds_token().or(token)))
    }

    /// Observes and plans. If pods end before etcd has answered, first recreates pods on existing volumes, and then
    /// observes again. The result contains the actions that recreated pods.
    pub(super) async fn fresh(
        &self,
        object: &EtcdCluster,
    ) -> Result<Option<(Round, Instant, Acted)>, Error> {
        let uid = object.uid().unwrap_or_default();
        let mut early = Acted::default();
        for left in (0..=DROPS).rev() {
            let mut subscription = self.deletions.subscribe(&uid);
            let Some((snapshot, since)) = Box::pin(self.read(object)).await? else {
                return Ok(None);
            };
            if left == 0 {
                return Ok(Some((Box::pin(self.round(snapshot)).await, since, early)));
            }
            let unanswered = observe::unanswered(&snapshot);
            let desired = desired(&snapshot.effective, &self.operators);
            let now = jiff::Timestamp::now();
            let step = urgent(&desired, &unanswered, &new_names(&snapshot), now);
            let round = Box::pin(self.round(snapshot.clone()));
            if let Some(round) = subscription.or_interrupted(round, !step.is_empty()).await {
                return Ok(Some((round, since, early)));
            }
            tracing::debug!(
                "etcd does not answer: the operator drops this observation and acts on the Kubernetes objects"
            );
            let (etcd, _) = self.clients_of(&uid, &snapshot);
            let acted = self
                .act((&snapshot, &unanswered, &etcd, since), &step)
                .await;
            // Errors of urgent actions are ignored, because the next plan contains the failed actions again.
            early.done.extend(acted.done);
        }
        Ok(None)
    }

    pub(super) async fn act(
        &self,
        (snapshot, observed, etcd, since): (&KubeSnapshot, &Observed, &Arc<dyn Etcd>, Instant),
        step: &Step,
    ) -> Acted {
        let context = ExecuteContext {
            client: &self.writer,
            etcd,
            refusals: &self.refusals,
            calls: &self.calls,
            auth: &snapshot.auth,
            cluster: snapshot.effective.cluster(),
            observed,
            urls: &snapshot.urls,
            since,
        };
        context.execute(step).await
    }

    /// Reconciles a cluster from a cached snapshot. `None` without a usable snapshot, or if something must be written:
    /// the caller then reads all objects and plans again (invariant 33).
    pub(super) async fn at_rest(&self, object: &EtcdCluster) -> Option<Done> {
        let uid = object.uid().unwrap_or_default();
        let mut subscription = self.deletions.subscribe(&uid);
        let snapshot = Box::pin(self.cached(object)).await?;
        let round = Box::pin(self.round(snapshot));
        let round = subscription.or_interrupted(round, false).await?;
        let report = round.report(None);
        let status = report.status(&Time(round.at));
        // While a Secret has a problem, each reconcile reads all objects, because the operator does not watch Secrets.
        let rests = round.plan.step.is_empty()
            && status == report.current()
            && round.observed.tls.faults.is_empty();
        rests.then(|| {
            self.done(&round, &status, Acted::default())
                .unwrap_or_default()
        })
    }
}

impl Round {
    /// True if the plan contains a step of a new cluster, and nothing that the status must explain. False after a
    /// minute, so that the status stays current even if the operator had a step in every reconcile.
    pub(super) fn only_forms(&self) -> bool {
        let cluster = &self.snapshot.cluster;
        let mut waits = self.plan.waiting_for.iter();
        let phase = cluster.status.as_ref().and_then(|it| it.phase.as_ref());
        let created = cluster.creation_timestamp();
        let is_new = created.is_some_and(|it| self.at.duration_since(it.0) < FORMING);
        let forms = is_new && matches!(phase, None | Some(ClusterPhase::Creating));
        let explains =
            !self.plan.problems.is_empty() || waits.any(|wait| wait.reason.warns_of_wait());
        forms && !self.plan.step.is_empty() && !explains
    }

    pub(super) fn report(&self, failure: Option<String>) -> Report<'_> {
        Report {
            cluster: &self.snapshot.cluster,
            desired: &self.desired,
            observed: &self.observed,
            plan: &self.plan,
            failure,
        }
    }
}

fn new_names(snapshot: &KubeSnapshot) -> Seed {
    Seed::new(snapshot.cluster.name_any(), rand::random())
}
