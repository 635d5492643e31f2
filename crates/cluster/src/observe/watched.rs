//! Reads a cluster's objects from the caches of the watches. The operator requests only unwatched data, such as
//! Secrets, from the API server. The result may be stale, so the operator decides no write from it (invariant 33).

use api::EtcdCluster;
use api::names;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kube::{Client, ResourceExt};
use runtime::watched::Watched;

use super::unlabelled::{self, Missing};
use super::{DEADLINE, pods, switch, unwatched};
use crate::objects::Objects;
use crate::switch::TlsRollout;

/// The objects of a cluster. `None` if a cache may be outdated, if `pods::tells_a_time` is true for a pod, or if the
/// Secrets cannot be read. `None`, too, if the operator has work: the spec has changed, TLS is being switched, an
/// object is missing, a pod is terminating, or the readiness of a pod has changed.
pub async fn objects(client: &Client, watched: &Watched, cluster: &EtcdCluster) -> Option<Objects> {
    let (namespace, name) = (cluster.namespace()?, cluster.name_any());
    let of_cluster = (namespace.as_str(), name.as_str());
    let processed = cluster.status.as_ref()?.observed_generation;
    let is_processed = processed == cluster.metadata.generation;
    if !is_processed || watched.clusters.is_outdated(of_cluster, cluster) {
        return None;
    }
    let mut services = watched.services.get(of_cluster)?;
    let mut pods = watched.pods.get(of_cluster)?;
    let mut claims = watched.claims.get(of_cluster)?;
    let budgets = watched.budgets.get(of_cluster)?;
    let policies = watched.policies.get(of_cluster)?;
    let found = (&mut pods, &mut claims, &mut services);
    let is_complete = unlabelled::missing(cluster, found) == Missing::default();
    let started = switch::started(cluster, &pods, &claims);
    let rollout = TlsRollout::of(&started, cluster.spec.tls.as_ref());
    let stays = |pod: &Pod| pod.metadata.deletion_timestamp.is_none();
    let is_calm = |pod: &Pod| stays(pod) && !pods::tells_a_time(pod);
    // `is_reported` is false if the ready pods differ from the ready pods in the status. The status must then change.
    let is_true = |condition: &PodCondition| condition.status == "True";
    let is_ready = |pod: &&Pod| pods::condition(pod, "Ready").is_some_and(is_true);
    let ready = pods.iter().filter(is_ready).map(ResourceExt::name_any);
    let reported = cluster.status.iter().flat_map(|status| &status.members);
    let is_reported = ready.eq(reported.flat_map(|members| members.ready.iter().cloned()));
    if !(is_complete && rollout.next.is_none() && is_reported && pods.iter().all(is_calm)) {
        return None;
    }
    let objects = unwatched::complete(client, cluster, (pods, claims, services));
    let objects = tokio::time::timeout(DEADLINE, Box::pin(objects)).await;
    let budget = names::disruption_budget(&name);
    let policy = names::network_policy(&name);
    Some(Objects {
        budget: budgets.into_iter().find(|it| it.name_any() == budget),
        policy: policies.into_iter().find(|it| it.name_any() == policy),
        ..objects.ok()?.ok()?
    })
}
