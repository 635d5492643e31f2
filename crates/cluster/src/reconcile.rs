//! The driver: observe, plan, execute, status.

mod observation;
mod outlook;

use std::sync::Arc;
use std::time::Instant;

use api::{EtcdCluster, names};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Api, Client, ResourceExt};
use member::Operators;
use runtime::image::OwnImage;
use runtime::{Done, Reconcile};
use tokio::sync::Semaphore;

use crate::clients::Clients;
use crate::endings::Endings;
use crate::figures::Figures;
use crate::outcome::{Error, turns};
use crate::reason::Reason;
use crate::recall::Recall;
use crate::refusals::Refusals;
use crate::upkeep::Calls;

/// How many clusters are read from the API server at the same time. Waiting for etcd takes no place here: clusters
/// that hang, however many, keep nobody from being read.
const READS: usize = 16;

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
