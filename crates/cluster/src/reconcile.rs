//! The driver: observe, plan, execute, status.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::cluster::EtcdClusterStatus;
use api::{EtcdCluster, names};
use etcd::Etcd;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Api, Client, ResourceExt};
use member::Operators;
use runtime::image::OwnImage;
use runtime::{Done, Reconcile};
use tokio::sync::Semaphore;

use crate::action::Action;
use crate::clients::Clients;
use crate::desired::desired;
use crate::endings::Endings;
use crate::execute::{self, Acted, ExecuteContext};
use crate::figures::Figures;
use crate::naming::Seed;
use crate::observe::{self, Look};
use crate::outcome::{Error, notices, turns};
use crate::plan::effective::Effective;
use crate::plan::{Plan, plan, urgent};
use crate::reason::Reason;
use crate::recall::Recall;
use crate::refusals::Refusals;
use crate::snapshot::{Desired, Observed};
use crate::status::Report;
use crate::upkeep::Calls;
use crate::write::Step;

/// How soon a step that was postponed (a lost race, an etcd that is not ready) is planned again.
const POSTPONED: Duration = Duration::from_millis(200);
/// A pause from which on looks are spread in time, so that many clusters are not asked in the same instant.
const SPREAD_FROM: Duration = Duration::from_secs(5);
/// How many clusters are read from the API server at the same time. Waiting for etcd takes no place here: clusters
/// that hang, however many, keep nobody from being read.
const READS: usize = 16;
/// How many looks a reconcile drops because pods end; the one after them is waited for.
const DROPS: usize = 10;

/// What a reconcile works with.
pub struct ClusterOperator {
    client: Client,
    /// Sends each request once.
    writer: Client,
    clients: Clients,
    image: OwnImage,
    recall: Arc<Recall>,
    figures: Figures,
    reads: Semaphore,
    operators: Operators,
    refusals: Refusals,
    calls: Calls,
    endings: Arc<Endings>,
}

/// One look at a cluster and what follows from it.
struct Round {
    look: Look,
    etcd: Arc<dyn Etcd>,
    observed: Observed,
    desired: Desired,
    plan: Plan,
    at: jiff::Timestamp,
}

impl ClusterOperator {
    /// `client` talks to the API server, `clients` to the members; seed members prepare their data with `image`.
    pub fn new(
        client: Client,
        clients: Clients,
        image: OwnImage,
        recall: Arc<Recall>,
        figures: Figures,
    ) -> Self {
        Self {
            writer: client.clone(),
            client,
            clients,
            image,
            recall,
            figures,
            reads: Semaphore::new(READS),
            operators: Operators::default(),
            refusals: Refusals::default(),
            calls: Calls::default(),
            endings: Arc::default(),
        }
    }

    /// Who tells of pods that end while a look is under way.
    #[must_use]
    pub fn told_by(self, endings: Arc<Endings>) -> Self {
        Self { endings, ..self }
    }

    /// Who sends the writes of a step: each once. One that is sent again after a pause, as clients do by themselves,
    /// would be sent however old the look is by then (invariant 11).
    #[must_use]
    pub fn writing_by(self, writer: Client) -> Self {
        Self { writer, ..self }
    }

    /// Where the operators run: NetworkPolicies let them in.
    #[must_use]
    pub fn of(self, operators: Operators) -> Self {
        Self { operators, ..self }
    }

    /// Drops what is remembered of clusters that are gone. Nobody tells of their end: without an object there is no
    /// reconcile.
    pub fn forget(&self, now: Instant) {
        self.recall.forget(now);
        self.clients.forget(now);
        self.calls.forget(now);
        self.refusals.forget(now);
        self.figures.forget();
    }

    /// Reads the Kubernetes side afresh, and keeps it for looks at a cluster at rest.
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

    /// Who asks the cluster, and who asks the seed of its recovery: the same, where there is none.
    fn clients_of(&self, uid: &str, look: &Look) -> (Arc<dyn Etcd>, Arc<dyn Etcd>) {
        let access = look.access().unwrap_or_default();
        let status = look.cluster.status.as_ref();
        let token = status.and_then(|status| Some(status.bootstrap.as_ref()?.token.as_str()));
        let of = |token| self.clients.of((uid, token), &access);
        (of(token), of(look.seeds_token().or(token)))
    }

    /// Reads everything and makes a plan of it, again as long as pods end before etcd answers. Pods whose disks are
    /// there do not wait for the answer; what was done of that comes along.
    async fn fresh(&self, object: &EtcdCluster) -> Result<Option<(Round, Instant, Acted)>, Error> {
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
            // What failed is planned again.
            early.done.extend(acted.done);
        }
        Ok(None)
    }

    async fn act(
        &self,
        (look, observed, etcd, since): (&Look, &Observed, &Arc<dyn Etcd>, Instant),
        step: &Step<Action>,
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

    /// The look at a cluster at rest: `None` when there is something to write, for which everything is read again.
    async fn at_rest(&self, object: &EtcdCluster) -> Option<Done> {
        let uid = object.uid().unwrap_or_default();
        let version = object.metadata.resource_version.as_deref();
        let mut heed = self.endings.heed(&uid);
        let look = self.recall.still_true(&uid, version, Instant::now())?;
        let round = Box::pin(self.round(look));
        let round = heed.unless_overtaken(round, false).await?;
        let report = round.report(None);
        let status = report.status(&Time(round.at));
        // Secrets are not watched: one that is to be corrected is read again at each look.
        let rests = round.plan.step.is_empty()
            && status == report.current()
            && round.observed.tls.faults.is_empty();
        rests.then(|| {
            self.done(&round, &status, Acted::default())
                .unwrap_or_default()
        })
    }

    fn done(&self, round: &Round, status: &EtcdClusterStatus, acted: Acted) -> Result<Done, Error> {
        self.figures.see(&round.look.cluster, status, &acted.done);
        let requeue = if acted.failed.is_empty() {
            spread(round.plan.requeue, rand::random())
        } else {
            POSTPONED
        };
        let notices = notices(&round.plan, &acted);
        let failed = acted.failed.into_iter();
        let lasting = failed.filter(|error| !error.is_passing());
        // What is only held back comes after what has failed now, and first what is tried again first.
        match lasting.min_by_key(execute::Error::held) {
            Some(source) => Err(Error::Act {
                source,
                told: notices,
            }),
            None => Ok(Done {
                requeue: Some(requeue),
                notices,
            }),
        }
    }
}

impl Reconcile for ClusterOperator {
    type Object = EtcdCluster;
    type Error = Error;

    async fn reconcile(&self, object: Arc<EtcdCluster>) -> Result<Done, Error> {
        if let Some(done) = Box::pin(self.at_rest(&object)).await {
            return Ok(done);
        }
        let Some((round, since, early)) = Box::pin(self.fresh(&object)).await? else {
            return Ok(Done::default());
        };
        let cluster = &round.look.cluster;
        let seen = (&round.look, &round.observed, &round.etcd, since);
        let acted = early.merge(self.act(seen, &round.plan.step).await);
        let report = round.report(acted.in_words());
        let (current, status) = (report.current(), report.status(&Time(round.at)));
        let namespace = cluster.namespace().unwrap_or_default();
        let api: Api<EtcdCluster> = Api::namespaced(self.writer.clone(), &namespace);
        let manager = names::MANAGER_CLUSTER;
        match runtime::apply::status(&api, manager, cluster, Some(&current), &status).await {
            // Deleted meanwhile.
            Err(error) if Reason::from(&error) == Reason::NotFound => Ok(Done::default()),
            Err(error) => Err(Error::Status(error)),
            Ok(_) => {
                let mut done = self.done(&round, &status, acted)?;
                done.notices.extend(turns(&current, &status));
                Ok(done)
            }
        }
    }
}

impl Round {
    fn report(&self, failure: Option<String>) -> Report<'_> {
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

/// Up to a fifth sooner, by chance.
fn spread(pause: Duration, chance: f64) -> Duration {
    if pause < SPREAD_FROM {
        pause
    } else {
        pause.mul_f64(1.0 - 0.2 * chance.clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_pauses_are_spread_and_short_ones_are_kept() {
        let (short, long) = (Duration::from_millis(100), Duration::from_secs(10));
        assert_eq!(spread(short, 1.0), short);
        assert_eq!(spread(long, 0.0), long);
        assert_eq!(spread(long, 1.0), Duration::from_secs(8));
        assert!(spread(long, 0.3) < long);
    }
}
