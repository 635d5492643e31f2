//! Reads a cluster's objects from the caches of the watches, without a request to the API server. The result may be
//! stale, so the operator decides no write from it (invariant 33).

use api::EtcdCluster;
use api::names;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kube::ResourceExt;
use runtime::watched::Watched;

use super::unlabelled::{self, Missing};
use super::{pods, switch, tls};
use crate::clock::ApiServerClock;
use crate::objects::Objects;
use crate::switch::TlsRollout;

/// The objects of a cluster. `None` if a cache may be outdated, or if the operator must read Secrets or the API server's
/// clock. Also `None` if the operator has work: an object is missing, a pod is terminating, or the readiness of a pod
/// has changed.
pub fn objects(watched: &Watched, cluster: &EtcdCluster) -> Option<Objects> {
    let (namespace, name) = (cluster.namespace()?, cluster.name_any());
    let of_cluster = (namespace.as_str(), name.as_str());
    if watched.clusters.is_outdated(of_cluster, cluster) {
        return None;
    }
    let (mut services, mut pods) = (
        watched.services.get(of_cluster)?,
        watched.pods.get(of_cluster)?,
    );
    let (mut claims, budgets) = (
        watched.claims.get(of_cluster)?,
        watched.budgets.get(of_cluster)?,
    );
    let policies = watched.policies.get(of_cluster)?;
    let found = (&mut pods, &mut claims, &mut services);
    let is_complete = unlabelled::missing(cluster, found) == Missing::default();
    let started = switch::started(cluster, &pods, &claims);
    let rollout = TlsRollout::of(&started, cluster.spec.tls.as_ref());
    let plain = rollout.at.is_none() && rollout.next.is_none() && cluster.spec.auth.is_none();
    let stays = |pod: &Pod| pod.metadata.deletion_timestamp.is_none();
    let is_calm = |pod: &Pod| stays(pod) && !pods::tells_a_time(pod);
    // `is_reported` is false if a pod became ready or unready, because the status must then change.
    let is_true = |condition: &PodCondition| condition.status == "True";
    let is_ready = |pod: &&Pod| pods::condition(pod, "Ready").is_some_and(is_true);
    let ready = pods.iter().filter(is_ready).map(ResourceExt::name_any);
    let reported = cluster.status.iter().flat_map(|status| &status.members);
    let is_reported = ready.eq(reported.flat_map(|members| members.ready.iter().cloned()));
    if !(is_complete && plain && is_reported && pods.iter().all(is_calm)) {
        return None;
    }
    Some(Objects {
        form: tls::running_form(cluster, &pods),
        cluster: cluster.clone(),
        pods,
        claims,
        services,
        budget: named(budgets, &names::disruption_budget(&name)),
        policy: named(policies, &names::network_policy(&name)),
        secrets: Vec::new(),
        tls: member::tls::ClusterTls::default(),
        next_tls: member::tls::ClusterTls::default(),
        started,
        clock: ApiServerClock::default(),
    })
}

fn named<K: ResourceExt>(objects: Vec<K>, name: &str) -> Option<K> {
    let mut objects = objects.into_iter();
    objects.find(|object| object.name_any() == name)
}
