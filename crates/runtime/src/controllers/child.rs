//! Converts the change of a watched child into a request to reconcile its owner. Performs no I/O.

use api::names;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use kube::runtime::controller::{ReconcileReason, ReconcileRequest};
use kube::runtime::reflector::ObjectRef;

use crate::guarded::Guarded;

/// The request to reconcile the owner of a child. `None` if no `K` owns the child. For a retained PVC, which has no
/// owner, the label of the PVC names the `K`. `uid_of` returns the UID of an existing `K`.
pub(super) fn request<K, Child>(
    child: &ObjectMeta,
    notify: impl Fn(&str, &ObjectMeta),
    uid_of: impl Fn(&ObjectRef<Guarded<K>>) -> Option<String>,
) -> Option<ReconcileRequest<Guarded<K>>>
where
    K: Resource<DynamicType = ()> + Clone,
    Child: Resource<DynamicType = ()>,
{
    let namespace = child.namespace.as_deref()?;
    let name = child.name.as_deref().unwrap_or_default();
    let owners = child.owner_references.as_deref().unwrap_or_default();
    let (obj_ref, uid) = if owners.is_empty() {
        let cluster = child.labels.as_ref()?.get(names::LABEL_CLUSTER)?;
        let obj_ref = ObjectRef::<Guarded<K>>::new(cluster).within(namespace);
        let uid = uid_of(&obj_ref)?;
        (obj_ref, uid)
    } else {
        let is_one = |owner: &&OwnerReference| {
            owner.kind == K::kind(&()) && owner.api_version == K::api_version(&())
        };
        let owner = owners.iter().find(is_one)?;
        let obj_ref = ObjectRef::new(&owner.name).within(namespace);
        (obj_ref, owner.uid.clone())
    };
    notify(&uid, child);
    let related = ObjectRef::<Child>::new(name).within(namespace).erase();
    Some(ReconcileRequest {
        obj_ref,
        reason: ReconcileReason::RelatedObjectUpdated {
            obj_ref: Box::new(related),
        },
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use api::EtcdCluster;
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    #[test]
    fn changed_child_requests_reconcile_of_its_owner() {
        let child = |kind: &str, api_version: &str| ObjectMeta {
            name: Some("child".to_owned()),
            namespace: Some("prod".to_owned()),
            owner_references: Some(vec![OwnerReference {
                api_version: api_version.to_owned(),
                kind: kind.to_owned(),
                name: "db".to_owned(),
                uid: "uid".to_owned(),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        };
        let notified = Cell::new(0);
        let requested = |child: &ObjectMeta| {
            let notify = |uid: &str, _: &ObjectMeta| {
                assert_eq!(uid, "uid");
                notified.set(notified.get() + 1);
            };
            let uid_of = |object: &ObjectRef<Guarded<EtcdCluster>>| {
                (object.name == "db").then(|| "uid".to_owned())
            };
            request::<EtcdCluster, ConfigMap>(child, notify, uid_of).map(|request| request.obj_ref)
        };
        let own = child("EtcdCluster", "etcd.database.coreos.com/v1beta2");
        let expected = ObjectRef::<Guarded<EtcdCluster>>::new("db").within("prod");
        assert_eq!(requested(&own), Some(expected.clone()));
        assert_eq!(requested(&child("StatefulSet", "apps/v1")), None);
        assert_eq!(requested(&child("EtcdCluster", "example.com/v1")), None);
        assert_eq!(requested(&ObjectMeta::default()), None);
        assert_eq!(notified.get(), 1);

        // A retained PVC has no owner, so its label names the cluster to reconcile. If this cluster does not exist,
        // nothing is reconciled.
        let labelled = |cluster: &str| ObjectMeta {
            labels: Some([(names::LABEL_CLUSTER.to_owned(), cluster.to_owned())].into()),
            owner_references: None,
            ..child("", "")
        };
        assert_eq!(requested(&labelled("db")), Some(expected));
        assert_eq!(requested(&labelled("deleted")), None);
        assert_eq!(notified.get(), 2);
    }
}
