//! Reads objects by name if their labels were removed. Without these reads, their members would count as lost although
//! the pod or PVC exists (invariant 1).
//!
//! The operator lists a cluster's objects by label. If the status names a member, and the list of pods, PVCs or
//! Services lacks the member's object, the operator reads that object by its name.

use std::collections::BTreeSet;

use api::EtcdCluster;
use api::names;
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::fmt::Debug;

use super::children::annotation;

/// The names of objects that the list by label did not contain. The operator reads them by name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Missing {
    pods: Vec<String>,
    claims: Vec<String>,
    services: Vec<String>,
}

type Objects<'a> = (
    &'a mut Vec<Pod>,
    &'a mut Vec<PersistentVolumeClaim>,
    &'a mut Vec<Service>,
);

/// Adds the missing objects to the lists. Reads Services, then pods, then PVCs, as the lists were read, so that
/// concurrent writes of another operator process never look like a lost object.
pub(super) async fn complete(
    client: &Client,
    cluster: &EtcdCluster,
    (pods, claims, services): Objects<'_>,
) -> Result<(), kube::Error> {
    let missing = missing(cluster, (pods, claims, services));
    let namespace = cluster.namespace().unwrap_or_default();
    services.extend(find(client, &namespace, &missing.services).await?);
    pods.extend(find(client, &namespace, &missing.pods).await?);
    claims.extend(find(client, &namespace, &missing.claims).await?);
    Ok(())
}

async fn find<K>(client: &Client, namespace: &str, names: &[String]) -> Result<Vec<K>, kube::Error>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let api = Api::<K>::namespaced(client.clone(), namespace);
    let found = try_join_all(names.iter().map(|name| api.get_opt(name))).await?;
    Ok(found.into_iter().flatten().collect())
}

/// The objects of each member and the Services of the whole cluster that should exist according to the status, but that
/// no list contains.
pub(super) fn missing(cluster: &EtcdCluster, (pods, claims, services): Objects<'_>) -> Missing {
    let Some(status) = cluster.status.as_ref() else {
        return Missing::default();
    };
    let details = status.member_details.iter().map(|one| one.name.clone());
    let nothing_exists = pods.is_empty() && claims.is_empty() && services.is_empty();
    let members: BTreeSet<String> = match (&status.cluster_id, &status.bootstrap) {
        // The bootstrap was just recorded: the members have no objects yet, so none is read by name. If an unlabelled
        // object has such a name, the creation fails (invariant 6), and a later reconcile finds it. The Services of the
        // whole cluster are read, because the operator applies them, and must not change a Service of another owner.
        (None, Some(_)) if nothing_exists => BTreeSet::new(),
        (None, Some(bootstrap)) => bootstrap.members.iter().cloned().collect(),
        _ => details.collect(),
    };
    // External members have no Kubernetes objects in this namespace, so the operator reads no objects of them.
    let name = cluster.name_any();
    let ours = |member: &&String| names::cluster_of_member(member) == Some(name.as_str());
    let members = || members.iter().filter(ours).cloned();
    let durable = cluster.spec.is_durable() || !claims.is_empty();
    let shared = [names::headless_service(&name), names::client_service(&name)];
    Missing {
        pods: absent(pods, members()),
        claims: if durable {
            absent(claims, members())
        } else {
            Vec::new()
        },
        services: absent(services, members().chain(shared)),
    }
}

fn absent<K: ResourceExt>(list: &[K], names: impl Iterator<Item = String>) -> Vec<String> {
    let there: BTreeSet<String> = list.iter().map(ResourceExt::name_any).collect();
    names.filter(|name| !there.contains(name)).collect()
}

/// True if an object of a member has the labels by which the operator lists objects, and the labels by which Services
/// select pods.
pub(super) fn is_labelled(metadata: &ObjectMeta, cluster: &str, member: &str) -> bool {
    let has = metadata.labels.as_ref();
    let mut wanted = names::member_labels(cluster, member).into_iter();
    wanted.all(|(key, value)| has.is_some_and(|labels| labels.get(&key) == Some(&value)))
}

/// True if the pod has the token label by which the client Service selects pods, or has no token.
pub(super) fn is_led_to(metadata: &ObjectMeta) -> bool {
    let token = annotation(metadata, names::ANNOTATION_CLUSTER_TOKEN);
    let label = metadata.labels.as_ref();
    let label = label.and_then(|labels| labels.get(names::LABEL_TOKEN));
    token.is_none_or(|token| label.is_some_and(|label| label == names::token_label(&token)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::tests::made_durable;

    #[test]
    fn objects_missing_from_list_are_read_by_name() {
        let asked = |mend: &dyn Fn(&mut crate::objects::Objects)| {
            let mut objects = made_durable();
            mend(&mut objects);
            missing(
                &objects.cluster,
                (
                    &mut objects.pods,
                    &mut objects.claims,
                    &mut objects.services,
                ),
            )
        };
        assert_eq!(
            asked(&|_| ()),
            Missing::default(),
            "no object of a healthy cluster may be read by name"
        );
        let member = vec!["db-aaaaaaaaaa".to_owned()];
        let missing = asked(&|objects| objects.pods.clear());
        assert_eq!(missing.pods, member);
        let missing = asked(&|objects| objects.claims.clear());
        assert_eq!(missing.claims, member);
        let missing = asked(&|objects| objects.services.clear());
        assert_eq!(missing.services, ["db-aaaaaaaaaa", "db", "db-client"]);
        let new = |objects: &mut crate::objects::Objects| {
            objects.cluster.status.as_mut().unwrap().cluster_id = None;
            objects.pods.clear();
            objects.claims.clear();
        };
        assert_eq!(asked(&new).pods, member);
        let nothing = |objects: &mut crate::objects::Objects| {
            new(objects);
            objects.services.clear();
        };
        let of_new_cluster = asked(&nothing);
        assert_eq!(
            of_new_cluster.services,
            ["db", "db-client"],
            "the operator must see Services of other owners before it applies its own"
        );
        assert!(of_new_cluster.pods.is_empty() && of_new_cluster.claims.is_empty());
        let unrecorded = asked(&|objects| {
            nothing(objects);
            objects.cluster.status.as_mut().unwrap().bootstrap = None;
        });
        assert_eq!(unrecorded.pods, member);
        let elsewhere = asked(&|objects| {
            let status = objects.cluster.status.as_mut().unwrap();
            status.member_details[0].name = "etcd-0".to_owned();
        });
        assert_eq!(
            elsewhere,
            Missing::default(),
            "no object of an external member may be read by name"
        );
    }
}
