//! One observation of a cluster and the plan that follows from it.

use std::sync::Arc;
use std::time::Instant;

use api::EtcdCluster;
use etcd::Etcd;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use runtime::Done;

use crate::action::Step;
use crate::desired::desired;
use crate::execute::{Acted, ExecuteContext};
use crate::naming::Seed;
use crate::observe::{self, Look};
use crate::outcome::Error;
use crate::plan::effective::Effective;
use crate::plan::{Plan, plan, urgent};
use crate::reconcile::ClusterOperator;
use crate::snapshot::{Desired, Observed};
use crate::status::Report;

/// How many observations a reconcile drops because pods end. The next one runs to its end.
const DROPS: usize = 10;

/// One observation of a cluster and its plan.
pub(super) struct Round {
    pub(super) look: Look,
    pub(super) etcd: Arc<dyn Etcd>,
    pub(super) observed: Observed,
    desired: Desired,
    pub(super) plan: Plan,
    pub(super) at: jiff::Timestamp,
}

impl ClusterOperator {
    /// Reads the Kubernetes side and caches it for reconciles of an idle cluster.
    async fn read(&self, object: &EtcdCluster) -> Result<Option<(Look, Instant)>, Error> {
        let _place = self.reads.acquire().await;
        let (uid, since) = (object.uid().unwrap_or_default(), Instant::now());
        self.recall.begin(&uid);
        let look = Box::pin(self.look(object)).await;
        match &look {
            Ok(Some(look)) => self.recall.keep(&uid, look.clone(), since),
            _ => self.recall.stir(&uid),
        }
        Ok(look?.map(|look| (look, since)))
    }

    async fn look(&self, object: &EtcdCluster) -> Result<Option<Look>, Error> {
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        let (objects, policy) = tokio::join!(
            observe::objects(&self.client, &namespace, &name),
            observe::access::policy(&self.client, &namespace, &name)
        );
        let Some(objects) = objects? else {
            return Ok(None);
        };
        let effective = Effective::of(&objects, jiff::Timestamp::now());
        let mut look = objects.look(effective);
        let seen = (&self.operators, policy?);
        observe::access::complete(&self.client, seen, &mut look).await;
        Ok(Some(look))
    }

    async fn round(&self, look: Look) -> Round {
        let uid = look.cluster.uid().unwrap_or_default();
        let (etcd, seed) = self.clients_of(&uid, &look);
        let mut observed = observe::observe((etcd.as_ref(), seed.as_ref()), &look).await;
        observed.upkeep.call = self.calls.of(&uid, observed.upkeep.record.as_ref());
        observe::operator_image(&self.image, &mut observed).await;
        let desired = desired(&look.effective, &self.operators);
        let (names, at) = (new_names(&look), jiff::Timestamp::now());
        let mut planned = plan(&desired, &observed, &names, at);
        if let Some(revision) = planned.asks {
            observe::hashes(etcd.as_ref(), &look, &mut observed, revision).await;
            planned = plan(&desired, &observed, &names, at);
        }
        Round {
            look,
            etcd,
            observed,
            desired,
            plan: planned,
            at,
        }
    }

    /// The clients for the cluster and for the seed of its recovery; the same client without a recovery.
    fn clients_of(&self, uid: &str, look: &Look) -> (Arc<dyn Etcd>, Arc<dyn Etcd>) {
        let access = look.access().unwrap_or_default();
        let status = look.cluster.status.as_ref();
        let token = status.and_then(|status| Some(status.bootstrap.as_ref()?.token.as_str()));
        let of = |token| self.clients.of((uid, token), &access);
        (of(token), of(look.seeds_token().or(token)))
    }

    /// Reads everything and makes a plan, again as long as pods end before etcd answers. Recreating pods with existing
    /// disks does not wait for the answer; the result contains these early actions.
    pub(super) async fn fresh(
        &self,
        object: &EtcdCluster,
    ) -> Result<Option<(Round, Instant, Acted)>, Error> {
        let uid = object.uid().unwrap_or_default();
        let mut early = Acted::default();
        for left in (0..=DROPS).rev() {
            let mut heed = self.endings.heed(&uid);
            let Some((look, since)) = Box::pin(self.read(object)).await? else {
                return Ok(None);
            };
            if left == 0 {
                return Ok(Some((Box::pin(self.round(look)).await, since, early)));
            }
            let unanswered = observe::unanswered(&look);
            let desired = desired(&look.effective, &self.operators);
            let now = jiff::Timestamp::now();
            let step = urgent(&desired, &unanswered, &new_names(&look), now);
            let round = Box::pin(self.round(look.clone()));
            if let Some(round) = heed.unless_overtaken(round, !step.is_empty()).await {
                return Ok(Some((round, since, early)));
            }
            tracing::debug!("etcd does not answer: the look is dropped");
            let (etcd, _) = self.clients_of(&uid, &look);
            let acted = self.act((&look, &unanswered, &etcd, since), &step).await;
            // Failed actions are planned again.
            early.done.extend(acted.done);
        }
        Ok(None)
    }

    pub(super) async fn act(
        &self,
        (look, observed, etcd, since): (&Look, &Observed, &Arc<dyn Etcd>, Instant),
        step: &Step,
    ) -> Acted {
        let context = ExecuteContext {
            client: &self.writer,
            etcd,
            refusals: &self.refusals,
            calls: &self.calls,
            auth: &look.auth,
            cluster: look.effective.cluster(),
            observed,
            urls: &look.urls,
            since,
        };
        context.execute(step).await
    }

    /// Reconciles an idle cluster from the cache. `None` if the plan has writes, for which everything is read again.
    pub(super) async fn at_rest(&self, object: &EtcdCluster) -> Option<Done> {
        let uid = object.uid().unwrap_or_default();
        let version = object.metadata.resource_version.as_deref();
        let mut heed = self.endings.heed(&uid);
        let look = self.recall.still_true(&uid, version, Instant::now())?;
        let round = Box::pin(self.round(look));
        let round = heed.unless_overtaken(round, false).await?;
        let report = round.report(None);
        let status = report.status(&Time(round.at));
        // Secrets are not watched: a Secret with a problem is read again at each reconcile.
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
    pub(super) fn report(&self, failure: Option<String>) -> Report<'_> {
        Report {
            cluster: &self.look.cluster,
            desired: &self.desired,
            observed: &self.observed,
            plan: &self.plan,
            failure,
        }
    }
}

/// New names for one observation.
fn new_names(look: &Look) -> Seed {
    Seed::new(look.cluster.name_any(), rand::random())
}
