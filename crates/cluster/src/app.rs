//! Connects the watches, the controller and the reconciler.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::EtcdCluster;
use etcd::{Access, Deadlines, Etcd, EtcdClient};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::watcher;
use member::Operators;
use proxy::{Proxies, WithProxies};
use runtime::Operator;
use runtime::clients::Clients;
use runtime::controller::{Controllers, drive};
use runtime::endpoints::{EndpointGrant, EndpointGrants, GrantedBy};
use runtime::image::OwnImage;
use runtime::watched::Watched;

use crate::metrics::Metrics;
use crate::pod_deletions::PodDeletions;
use crate::reconcile::{ClusterOperator, SnapshotCache};

/// Deadlines of calls to members. A member that hangs delays each reconcile of its cluster by up to these times.
const DEADLINES: Deadlines = Deadlines {
    connect: Duration::from_secs(1),
    status: Duration::from_secs(1),
    call: Duration::from_secs(3),
    hedge: Duration::from_millis(300),
    defragment: Duration::from_mins(10),
    progress: Duration::from_secs(30),
    idle: Duration::from_mins(2),
};

/// The flag and the Helm value for messages about missing grants. With the flag or the value, an administrator grants
/// the etcd endpoints that EtcdClusters may join.
pub(crate) const JOINS: GrantedBy = GrantedBy {
    operator: "cluster operator",
    flag: "--join",
    value: "clusters.join",
};

/// Interval at which the operator drops its in-memory data about deleted clusters, and closes idle connections.
const FORGET_EVERY: Duration = Duration::from_mins(1);

/// Runs the operator until it shuts down. Every watch event of a child object triggers a reconcile.
///
/// - `image`: the image with which seed members prepare their data; by default the image of the operator's own pod.
/// - `pods`: labels of pods in the operator's namespace that NetworkPolicies admit.
/// - `joins`: etcd endpoints that EtcdClusters of other namespaces may join.
pub async fn work(
    operator: Operator,
    image: Option<String>,
    pods: BTreeMap<String, String>,
    joins: Vec<EndpointGrant>,
) {
    let cache = Arc::new(SnapshotCache::default());
    let deletions = Arc::new(PodDeletions::default());
    let watched = Watched::default();
    let config = watcher::Config::default().labels("app=etcd,etcd_cluster");
    let notify = {
        let (cache, deletions) = (Arc::clone(&cache), Arc::clone(&deletions));
        move |uid: &str, child: &ObjectMeta| {
            cache.invalidate(uid);
            // `deletions.notify` interrupts a running observation that waits for etcd, because the member of a deleted
            // pod may never answer.
            if child.deletion_timestamp.is_some() {
                deletions.notify(uid);
            }
        }
    };
    let proxies = Proxies::new(&operator);
    let controllers = Controllers::<EtcdCluster>::new(&operator)
        .without_concurrency_limit()
        .children(&config, &watched.pods, notify.clone())
        .children(&config, &watched.services, notify.clone())
        .children(&config, &watched.claims, notify.clone())
        .children(&config, &watched.budgets, notify.clone())
        .children(&config, &watched.policies, notify);
    let controllers = proxies.watch(controllers);
    let metrics = Metrics::default();
    let (clusters, shards) = (controllers.cache(), operator.shards.clone());
    metrics.alive_with(move || clusters.uids(&shards));
    operator.metrics.collect(metrics.clone());
    let plain = Arc::new(EtcdClient::with_deadlines(Access::default(), DEADLINES));
    let etcd = Clients::new(Arc::clone(&plain) as Arc<dyn Etcd>, DEADLINES);
    let image = OwnImage::new(&operator, image);
    let reconciler = ClusterOperator::new(operator.client.clone(), etcd, image, cache, metrics)
        .with_pod_deletions(deletions)
        .with_watched(watched)
        .writing_by(operator.client_without_retry.clone())
        .joining(EndpointGrants::new(&operator.namespace, JOINS, joins))
        .of(Operators {
            namespace: operator.namespace.clone(),
            labels: pods,
        });
    let reconciler = Arc::new(reconciler);
    let with_proxies = Arc::new(WithProxies::new(Arc::clone(&reconciler), proxies));
    let forget = async {
        loop {
            tokio::time::sleep(FORGET_EVERY).await;
            reconciler.forget(Instant::now());
            plain.close_idle();
        }
    };
    tokio::select! {
        () = drive(&operator, controllers, with_proxies) => {}
        () = forget => {}
    }
}
