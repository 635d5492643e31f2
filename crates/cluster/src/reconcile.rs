//! Reconciles one cluster: observe, plan, execute, status.

mod observation;
mod outlook;

use std::sync::Arc;
use std::time::Instant;

use api::{EtcdCluster, names};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Api, Client, ResourceExt};
use member::Operators;
use runtime::clients::Clients;
use runtime::endpoints::EndpointGrants;
use runtime::image::OwnImage;
use runtime::logs::in_stage;
use runtime::watched::Watched;
use runtime::{Done, Reconcile};
use tokio::sync::Semaphore;

use crate::metrics::Metrics;
use crate::observe::KubeSnapshot;
use crate::outcome::{Error, notices, turns};
use crate::pod_deletions::PodDeletions;
use crate::reason::Reason;
use crate::refusals::Refusals;
use crate::upkeep::Calls;

/// Maximum number of clusters that are read from the API server concurrently. A reconcile that waits for etcd is not
/// limited, so clusters that hang do not block other clusters.
const READS: usize = 16;

/// The last snapshot of each cluster's Kubernetes objects, by the cluster's UID.
pub type SnapshotCache = runtime::snapshot_cache::SnapshotCache<KubeSnapshot>;

/// The clients, caches and states that all reconciles share.
pub struct ClusterOperator {
    client: Client,
    /// The Kubernetes client for writes. It sends each request once.
    writer: Client,
    clients: Clients,
    image: OwnImage,
    cache: Arc<SnapshotCache>,
    watched: Watched,
    metrics: Metrics,
    reads: Semaphore,
    operators: Operators,
    refusals: Refusals,
    calls: Calls,
    deletions: Arc<PodDeletions>,
    joins: EndpointGrants,
}

impl ClusterOperator {
    /// `client` connects to the API server, and `clients` to the members. Seed members prepare their data with
    /// `image`.
    pub fn new(
        client: Client,
        clients: Clients,
        image: OwnImage,
        cache: Arc<SnapshotCache>,
        metrics: Metrics,
    ) -> Self {
        Self {
            writer: client.clone(),
            client,
            clients,
            image,
            cache,
            watched: Watched::default(),
            metrics,
            reads: Semaphore::new(READS),
            operators: Operators::default(),
            refusals: Refusals::default(),
            calls: Calls::default(),
            deletions: Arc::default(),
            joins: EndpointGrants::default(),
        }
    }

    /// Sets the source of notifications about pods that are deleted during an observation.
    #[must_use]
    pub fn with_pod_deletions(self, deletions: Arc<PodDeletions>) -> Self {
        Self { deletions, ..self }
    }

    /// Sets the caches of the watches. Without these caches, each reconcile after a watch event reads the objects from
    /// the API server.
    #[must_use]
    pub fn with_watched(self, watched: Watched) -> Self {
        Self { watched, ..self }
    }

    /// Sets the client that sends writes. The client must not retry a request: after a pause, the observation could be
    /// too old for the write (invariant 11).
    #[must_use]
    pub fn writing_by(self, writer: Client) -> Self {
        Self { writer, ..self }
    }

    /// Sets the grants: the external endpoints that an EtcdCluster may join, for each namespace.
    #[must_use]
    pub fn joining(self, joins: EndpointGrants) -> Self {
        Self { joins, ..self }
    }

    /// Sets the namespace and the labels of the operators' pods. NetworkPolicies admit these pods.
    #[must_use]
    pub fn of(self, operators: Operators) -> Self {
        Self { operators, ..self }
    }

    /// Drops the in-memory data about deleted clusters. Called periodically, because a deleted EtcdCluster triggers no
    /// reconcile.
    pub fn forget(&self, now: Instant) {
        self.cache.forget(now);
        self.clients.forget(now);
        self.calls.forget(now);
        self.refusals.forget(now);
        self.metrics.forget();
    }
}

impl Reconcile for ClusterOperator {
    type Object = EtcdCluster;
    type Error = Error;

    async fn reconcile(&self, object: Arc<EtcdCluster>) -> Result<Done, Error> {
        if let Some(done) = in_stage("observe", Box::pin(self.at_rest(&object))).await {
            return Ok(done);
        }
        let fresh = in_stage("observe", Box::pin(self.fresh(&object)));
        let Some((round, since, early)) = fresh.await? else {
            return Ok(Done::default());
        };
        let cluster = &round.snapshot.cluster;
        let seen = (&round.snapshot, &round.observed, &round.etcd, since);
        let acted = in_stage("execute", self.act(seen, &round.plan.step));
        let acted = early.merge(acted.await);
        let report = round.report(acted.in_words());
        let (current, status) = (report.current(), report.status(&Time(round.at)));
        if round.only_forms() && acted.failed.is_empty() {
            // No status is written here, because the next reconcile follows at once and reports the result.
            return self.done(&round, &status, acted);
        }
        let namespace = cluster.namespace().unwrap_or_default();
        let api: Api<EtcdCluster> = Api::namespaced(self.writer.clone(), &namespace);
        let manager = names::MANAGER_CLUSTER;
        let written = runtime::apply::status(&api, manager, cluster, Some(&current), &status);
        match in_stage("status", written).await {
            // If the EtcdCluster was deleted during the reconcile, for example because its last finalizer was removed
            // (invariant 41), no status needs to be written.
            Err(error) if Reason::from(&error) == Reason::NotFound => Ok(Done {
                notices: notices(&round.plan, &acted),
                ..Done::default()
            }),
            Err(error) => Err(Error::Status(error)),
            Ok(_) => {
                let mut done = self.done(&round, &status, acted)?;
                done.notices.extend(turns(&current, &status));
                Ok(done)
            }
        }
    }
}
