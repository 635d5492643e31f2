//! Members that somebody else runs, of a cluster that this one joins: asked at the addresses they tell.

use api::EtcdCluster;
use api::names;
use etcd::Etcd;
use futures::future::join_all;
use kube::ResourceExt;

use super::{seen, status};
use crate::observed::{Observed, Seen};
use crate::plan::name_of;

/// The endpoints in the object's annotation.
pub(super) fn endpoints(cluster: &EtcdCluster) -> Vec<String> {
    let annotation = cluster.annotations().get(names::ANNOTATION_JOIN);
    let list = annotation.map(String::as_str).unwrap_or_default();
    let urls = list.split(',').map(str::trim).filter(|url| !url.is_empty());
    urls.map(str::to_owned).collect()
}

/// Whom to ask for the list beside our own members: the endpoints, as long as the cluster is one that was joined. It
/// was recorded without first members, as it did not begin here. A cluster that did is never asked for elsewhere,
/// whatever its annotation says.
pub(super) fn via(observed: &Observed) -> &[String] {
    let joined = observed.intent.as_ref().is_none_or(|intent| intent.members.is_empty());
    if joined { &observed.join } else { &[] }
}

/// What the members somebody else runs say of themselves.
pub(super) async fn ask(etcd: &dyn Etcd, observed: &mut Observed) {
    let Seen::Known(list) = &observed.members else {
        return;
    };
    if observed.join.is_empty() {
        return;
    }
    let here = |name: &String| {
        observed.pods.contains_key(name)
            || names::cluster_of_member(name) == Some(&observed.cluster)
    };
    let members = list.members.iter();
    let asked: Vec<(String, String)> = members
        .filter_map(|member| Some((name_of(member), member.client_urls.first()?.clone())))
        .filter(|(name, _)| !here(name))
        .collect();
    let answers = join_all(asked.iter().map(|(_, url)| status(etcd, url, true))).await;
    for ((name, url), answer) in asked.into_iter().zip(answers) {
        observed.statuses.insert(name.clone(), seen(answer));
        observed.elsewhere.insert(name, url);
    }
}
