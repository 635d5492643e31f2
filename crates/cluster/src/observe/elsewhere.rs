//! Observes the external members of a cluster that this EtcdCluster joins, at the client URLs in etcd's member list.

use api::EtcdCluster;
use api::names;
use etcd::Etcd;
use futures::future::join_all;
use kube::ResourceExt;

use super::{seen, status};
use crate::plan::name_of;
use crate::snapshot::{Observed, Seen};

/// The endpoints in the annotation `join` of the EtcdCluster.
pub(super) fn endpoints(cluster: &EtcdCluster) -> Vec<String> {
    let annotation = cluster.annotations().get(names::ANNOTATION_JOIN);
    let list = annotation.map(String::as_str).unwrap_or_default();
    let urls = list.split(',').map(str::trim).filter(|url| !url.is_empty());
    urls.map(str::to_owned).collect()
}

/// Additional endpoints to which the operator sends the request for the member list, if this EtcdCluster joins an
/// existing cluster. The status of such an EtcdCluster records no first members. A cluster that this operator
/// bootstrapped has no additional endpoints, whatever its annotation says.
///
/// Invariant 28: if any endpoint has no grant, the operator calls no endpoint.
pub(super) fn via(observed: &Observed) -> &[String] {
    let joined = observed
        .intent
        .as_ref()
        .is_none_or(|intent| intent.members.is_empty());
    let mut urls = observed.join.iter();
    let granted = urls.all(|url| observed.join_rule.allows(url));
    if joined && granted {
        &observed.join
    } else {
        &[]
    }
}

/// Reads the status of the external members. Invariant 28: an external etcd may be hostile, so the operator calls a URL
/// from its member list only with a grant.
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
    let (asked, closed): (Vec<_>, Vec<_>) = asked
        .into_iter()
        .partition(|(_, url)| observed.join_rule.allows(url));
    for (name, url) in closed {
        let why = format!("no grant allows calls to {url}");
        observed.statuses.insert(name, Seen::Unknown(why));
    }
    let answers = join_all(asked.iter().map(|(_, url)| status(etcd, url, true))).await;
    for ((name, url), answer) in asked.into_iter().zip(answers) {
        observed.statuses.insert(name.clone(), seen(answer));
        observed.elsewhere.insert(name, url);
    }
}

#[cfg(test)]
mod tests {
    use etcd::fake::FakeEtcd;
    use runtime::endpoints::{EndpointGrants, EndpointRule};

    use super::*;
    use crate::plan::tests::scene::Scene;

    #[test]
    fn endpoints_are_read_from_join_annotation() {
        let mut cluster = EtcdCluster::new("db", api::cluster::EtcdClusterSpec::default());
        assert!(endpoints(&cluster).is_empty());
        let urls = "http://x:2379, http://y:2379,".to_owned();
        let annotations = cluster.metadata.annotations.get_or_insert_default();
        annotations.insert(names::ANNOTATION_JOIN.to_owned(), urls);
        assert_eq!(endpoints(&cluster), ["http://x:2379", "http://y:2379"]);
    }

    /// Invariant 7: the annotation has no effect on a cluster that this operator bootstrapped.
    #[test]
    fn bootstrapped_cluster_ignores_endpoints_of_join_annotation() {
        let url = "http://x:2379".to_owned();
        let mut new = Scene::nothing(3).observed;
        new.join = vec![url.clone()];
        assert_eq!(via(&new), std::slice::from_ref(&url));
        let mut began_here = Scene::formed(&["a", "b", "c"]).observed;
        began_here.join = vec![url.clone()];
        assert!(via(&began_here).is_empty());
        // Without recorded first members, the cluster was joined, not bootstrapped, so the annotation has an effect.
        began_here.intent.as_mut().unwrap().members.clear();
        assert_eq!(via(&began_here), [url]);
    }

    /// Invariant 28: without a grant, the operator calls neither the endpoints in the annotation nor the URLs in an
    /// answer of etcd.
    #[tokio::test]
    async fn tenant_join_calls_no_endpoint_without_grant() {
        let granted = ["a", "b"].map(|name| format!("http://{name}.team-b.svc:2379"));
        let foreign = "http://main-client.team-a.svc:2379".to_owned();
        let mut observed = Scene::nothing(3).observed;
        observed.join_rule = rule(&["team-b=*.team-b.svc"]);
        observed.join = granted.to_vec();
        assert_eq!(via(&observed), granted);
        observed.join.push(foreign.clone());
        assert!(via(&observed).is_empty());
        observed.join.pop();

        let url = |name: &str| format!("http://{name}.team-b.svc:2379");
        let etcd = FakeEtcd::formed(1, &["a", "b"], url);
        let mut list = etcd.members(&granted).await.unwrap();
        list.members[1].client_urls = vec![foreign];
        let redirected = list.members[1].name.clone();
        observed.members = Seen::Known(list);
        ask(&etcd, &mut observed).await;
        assert!(observed.statuses["a"].known().is_some());
        assert!(observed.statuses[&redirected].known().is_none());
        assert!(!observed.elsewhere.contains_key(&redirected));
    }

    fn rule(grants: &[&str]) -> EndpointRule {
        let grants = grants.iter().map(|text| text.parse().unwrap()).collect();
        EndpointGrants::new("operators", crate::app::JOINS, grants).of("team-b")
    }
}
