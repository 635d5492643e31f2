//! The driver: observe, plan, act, status.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{EtcdCluster, names};
use etcd::Etcd;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Api, Client, ResourceExt};
use runtime::outcome::Failure;
use runtime::{Done, Reconcile};

use crate::act::{Acted, Actor};
use crate::desired::desired;
use crate::observe;
use crate::outcome::{Error, notices};
use crate::plan::{Plan, plan};
use crate::status::Report;

/// How soon a step that was postponed (a lost race, an etcd that is not ready) is planned again.
const POSTPONED: Duration = Duration::from_millis(200);

/// What a reconcile works with.
pub struct ClusterOperator {
    /// Talks to the API server.
    pub client: Client,
    /// Talks to the members of all clusters.
    pub etcd: Arc<dyn Etcd>,
}

impl Reconcile for ClusterOperator {
    type Object = EtcdCluster;
    type Error = Error;

    async fn reconcile(&self, object: Arc<EtcdCluster>) -> Result<Done, Error> {
        let since = Instant::now();
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        let Some(objects) = observe::objects(&self.client, &namespace, &name).await? else {
            return Ok(Done::default());
        };
        let (cluster, etcd) = (&objects.cluster, self.etcd.as_ref());
        let observed = observe::observe(etcd, &objects).await;
        let desired = desired(cluster);
        let now = jiff::Timestamp::now();
        let plan = plan(&desired, &observed, now);
        let acted = Actor {
            client: &self.client,
            etcd,
            cluster,
            observed: &observed,
            since,
        }
        .act(&plan.step)
        .await;
        let report = Report {
            cluster,
            desired: &desired,
            observed: &observed,
            plan: &plan,
            failure: acted.in_words(),
        };
        let status = report.status(&Time(now));
        let api: Api<EtcdCluster> = Api::namespaced(self.client.clone(), &namespace);
        let current = report.current();
        match runtime::apply::status(
            &api,
            names::MANAGER_CLUSTER,
            cluster,
            Some(&current),
            &status,
        )
        .await
        {
            // Deleted meanwhile.
            Err(error) if error.reason() == "NotFound" => Ok(Done::default()),
            written => written
                .map_err(Error::Status)
                .and_then(|_| done(&plan, acted)),
        }
    }
}

fn done(plan: &Plan, acted: Acted) -> Result<Done, Error> {
    let requeue = if acted.failed.is_empty() {
        plan.requeue
    } else {
        POSTPONED
    };
    let notices = notices(plan, &acted);
    match acted.failed.into_iter().find(|error| !error.is_passing()) {
        Some(error) => Err(Error::Act(error)),
        None => Ok(Done {
            requeue: Some(requeue),
            notices,
        }),
    }
}
