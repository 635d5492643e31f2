//! Starts the watches. A change of a watched object triggers a reconcile of its EtcdRestore.

use std::sync::Arc;

use api::names::ANNOTATION_RESTORE;
use api::{EtcdCluster, EtcdRestore};
use etcd::{Access, EtcdClient};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use runtime::Operator;
use runtime::controller::{Cache, Controllers, Guarded, drive};
use runtime::image::OwnImage;
use runtime::slots::{SlotLimits, Slots};
use store::grants::{Grant, Grants};

use crate::execute::{ExecuteContext, Undo};
use crate::metrics::RestoreMetrics;
use crate::naming;
use crate::reconcile::ReconcileContext;

/// Runs the restore operator until its shutdown. `image` is the image of seed pods; without it, the operator uses its
/// own image. `ambient` contains the locations that each namespace may read with the operator's own cloud identity.
pub async fn run(operator: Operator, image: Option<String>, ambient: Vec<Grant>) {
    let controllers = Controllers::<EtcdRestore>::new(&operator);
    operator.metrics.collect(RestoreMetrics {
        objects: controllers.cache(),
    });
    let reconciler = Arc::new(ReconcileContext {
        client: operator.client.clone(),
        execute: ExecuteContext {
            client: operator.client_without_retry.clone(),
            undo: Undo::default(),
        },
        etcd: EtcdClient::new(Access::default()),
        image: OwnImage::new(&operator, image),
        grants: Grants {
            operator: "restore operator",
            own: operator.namespace.clone(),
            others: ambient,
        },
        reads: Slots::new(SlotLimits::of_reads(&operator.scope)),
    });
    let controllers = watch_targets(controllers);
    drive(&operator, controllers, reconciler.clone()).await;
    reconciler.execute.undo.join().await;
}

/// Reconciles an EtcdRestore when its target EtcdCluster or the pod of its seed changes.
fn watch_targets(controllers: Controllers<EtcdRestore>) -> Controllers<EtcdRestore> {
    let (of_cluster, of_pod) = (controllers.cache(), controllers.cache());
    let seeds = watcher::Config::default().labels(ANNOTATION_RESTORE);
    controllers
        .watches(
            &watcher::Config::default(),
            move |cluster: PartialObjectMeta<EtcdCluster>| {
                let (namespace, name) = (cluster.namespace(), cluster.name_any());
                matching(&of_cluster, |restore| {
                    restore.metadata.namespace == namespace && naming::target(restore) == name
                })
            },
        )
        .watches(&seeds, move |pod: PartialObjectMeta<Pod>| {
            let uid = pod.labels().get(ANNOTATION_RESTORE).cloned();
            matching(&of_pod, |restore| restore.metadata.uid == uid)
        })
}

fn matching(
    cache: &Cache<EtcdRestore>,
    matches: impl Fn(&EtcdRestore) -> bool,
) -> Vec<ObjectRef<Guarded<EtcdRestore>>> {
    let restores = cache.select(|restore| restore.0.as_ref().is_ok_and(&matches));
    restores
        .iter()
        .map(|restore| ObjectRef::from_obj(restore.as_ref()))
        .collect()
}
