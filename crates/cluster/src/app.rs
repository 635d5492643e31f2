//! The wiring: the watched kinds, and the controller that runs the driver.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::EtcdCluster;
use etcd::{Access, Deadlines, Etcd, EtcdClient};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::core::PartialObjectMeta;
use kube::runtime::controller::Controller;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use kube::{Resource, ResourceExt};
use member::Operators;
use runtime::Operator;
use runtime::controller::{Guarded, controller, drive, watched, without_concurrency_limit};
use runtime::image::OwnImage;

use crate::clients::Clients;
use crate::endings::Endings;
use crate::figures::Figures;
use crate::recall::Recall;
use crate::reconcile::ClusterOperator;

/// Each reconcile reads the health of all members: a hanging member delays its own cluster by this much.
const DEADLINES: Deadlines = Deadlines {
    connect: Duration::from_secs(1),
    status: Duration::from_secs(1),
    call: Duration::from_secs(3),
    hedge: Duration::from_millis(300),
    defragment: Duration::from_mins(10),
    progress: Duration::from_secs(30),
    idle: Duration::from_mins(2),
};

/// Interval at which the state of deleted clusters is dropped.
const FORGET_EVERY: Duration = Duration::from_mins(1);

/// Runs until shutdown. Every event of a child triggers a reconcile of its cluster. Seed members prepare their data
/// with `image`, or with the image of the operator's own pod. NetworkPolicies admit the `pods` with these labels in the
/// operator's namespace.
pub async fn work(operator: Operator, image: Option<String>, pods: BTreeMap<String, String>) {
    let recall = Arc::new(Recall::default());
    let endings = Arc::new(Endings::default());
    let told = Told {
        recall: Arc::clone(&recall),
        endings: Arc::clone(&endings),
    };
    let controller = without_concurrency_limit(controller::<EtcdCluster>(&operator));
    let controller = children::<Pod>(&operator, controller, &told);
    let controller = children::<Service>(&operator, controller, &told);
    let controller = children::<PersistentVolumeClaim>(&operator, controller, &told);
    let controller = children::<PodDisruptionBudget>(&operator, controller, &told);
    let controller = children::<NetworkPolicy>(&operator, controller, &told);
    let figures = Figures::default();
    let store = controller.store();
    figures.alive_with(move || store.state().iter().filter_map(|one| one.uid()).collect());
    operator.metrics.collect(figures.clone());
    let plain = Arc::new(EtcdClient::with_deadlines(Access::default(), DEADLINES));
    let etcd = Clients::new(Arc::clone(&plain) as Arc<dyn Etcd>, DEADLINES);
    let image = OwnImage::new(&operator, image);
    let reconciler = ClusterOperator::new(operator.client.clone(), etcd, image, recall, figures)
        .told_by(endings)
        .writing_by(operator.client_without_retry.clone())
        .of(Operators {
            namespace: operator.namespace.clone(),
            labels: pods,
        });
    let reconciler = Arc::new(reconciler);
    let forget = async {
        loop {
            tokio::time::sleep(FORGET_EVERY).await;
            reconciler.forget(Instant::now());
            plain.close_idle();
        }
    };
    tokio::select! {
        () = drive(&operator, controller, Arc::clone(&reconciler)) => {}
        () = forget => {}
    }
}

/// The receivers of the children's events.
#[derive(Clone)]
struct Told {
    recall: Arc<Recall>,
    endings: Arc<Endings>,
}

impl Told {
    fn of<K>(&self, uid: &str, child: &PartialObjectMeta<K>) {
        self.recall.stir(uid);
        // The last event of a deleted pod is that it was ending.
        if child.metadata.deletion_timestamp.is_some() {
            self.endings.tell(uid);
        }
    }
}

/// Watches the metadata of one kind of a cluster's objects; the operator only needs to know that something changed.
fn children<K>(
    operator: &Operator,
    controller: Controller<Guarded<EtcdCluster>>,
    told: &Told,
) -> Controller<Guarded<EtcdCluster>>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + std::fmt::Debug
        + Send
        + 'static,
{
    let told = told.clone();
    let config = watcher::Config::default().labels("app=etcd,etcd_cluster");
    controller.watches(watched::<K>(operator), config, move |child| {
        let owner = owner(&child);
        if let Some((uid, _)) = &owner {
            told.of(uid, &child);
        }
        owner.map(|(_, cluster)| cluster)
    })
}

/// The EtcdCluster that owns an object: its UID and its reference.
fn owner<K>(child: &PartialObjectMeta<K>) -> Option<(String, ObjectRef<Guarded<EtcdCluster>>)> {
    let owners = child.metadata.owner_references.iter().flatten();
    let mut ours = owners.filter(|owner| {
        owner.kind == EtcdCluster::kind(&()) && owner.api_version == EtcdCluster::api_version(&())
    });
    let owner = ours.next()?;
    let namespace = child.metadata.namespace.as_deref()?;
    let cluster = ObjectRef::new(&owner.name).within(namespace);
    Some((owner.uid.clone(), cluster))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

    use super::*;

    fn child(kind: &str, api_version: &str) -> PartialObjectMeta<Pod> {
        let mut child = PartialObjectMeta::<Pod>::default();
        child.metadata.namespace = Some("prod".into());
        child.metadata.owner_references = Some(vec![OwnerReference {
            api_version: api_version.into(),
            kind: kind.into(),
            name: "db".into(),
            uid: "uid".into(),
            ..OwnerReference::default()
        }]);
        child
    }

    #[test]
    fn child_event_reconciles_only_its_cluster() {
        let (uid, cluster) =
            owner(&child("EtcdCluster", "etcd.database.coreos.com/v1beta2")).unwrap();
        assert_eq!((uid.as_str(), cluster.name.as_str()), ("uid", "db"));
        assert_eq!(cluster.namespace.as_deref(), Some("prod"));
        assert!(owner(&child("StatefulSet", "apps/v1")).is_none());
        assert!(owner(&child("EtcdCluster", "example.com/v1")).is_none());
    }
}
