//! Reads the endpoints of the etcd cluster to back up, and builds the client for these endpoints. Of the results, only
//! the client contains the content of Secrets (invariant 14).

use std::sync::Arc;

use api::manifest::ManifestCluster;
use api::names::{ANNOTATION_RESTORE, Addresses};
use api::{EtcdBackup, EtcdCluster};
use etcd::{Access, Etcd, EtcdClient};
use kube::{Client, ResourceExt};
use runtime::endpoints::EndpointRule;
use runtime::members::{self, MembersError};

use super::ObserveContext;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Endpoint, Source};

/// Reads the endpoints from `spec.etcdEndpoints` or from the EtcdCluster.
pub(super) async fn source(
    client: &Client,
    backup: &EtcdBackup,
    rule: &EndpointRule,
) -> Result<Source, Trouble> {
    let namespace = backup.namespace().unwrap_or_default();
    let Some(reference) = &backup.spec.etcd_cluster else {
        let mut endpoints = Vec::new();
        for url in members::completed(&backup.spec.etcd_endpoints, &namespace) {
            let named = ("spec.etcdEndpoints", url.as_str());
            let reach = Box::pin(members::reach(client, &namespace, named, rule)).await;
            endpoints.push(Endpoint {
                reach: reach.map_err(trouble)?,
                url,
            });
        }
        return Ok(Source::Endpoints(endpoints));
    };
    let cluster = cluster(client, &namespace, &reference.name).await?;
    let forms = members::address_forms(client, &cluster).await;
    let pods = if rule.is_limited() {
        let pods = members::pods_of(client, &cluster, &forms).await;
        Some(pods.map_err(trouble))
    } else {
        None
    };
    let endpoints = forms.iter().flat_map(|form| urls_of(&cluster, form));
    Ok(Source::Cluster {
        endpoints: endpoints.collect(),
        pods,
        restoring: cluster.annotations().contains_key(ANNOTATION_RESTORE),
        recorded: Box::new(ManifestCluster {
            name: cluster.name_any(),
            namespace,
            spec: cluster.spec,
        }),
    })
}

/// The client URLs for an agent, and the EtcdCluster whose changes the agent records; `None` if the spec names
/// endpoints. The URLs of an EtcdCluster are URLs of its client Service, so that the replacement of a member does not
/// change the settings of the agent. The agent runs in the namespace of the EtcdBackup, so it can connect to the same
/// endpoints as other pods of that namespace, and needs no grant.
pub(super) async fn of_agent(
    client: &Client,
    backup: &EtcdBackup,
) -> Result<(Vec<String>, Option<ManifestCluster>), Trouble> {
    let namespace = backup.namespace().unwrap_or_default();
    let Some(reference) = &backup.spec.etcd_cluster else {
        let endpoints = members::completed(&backup.spec.etcd_endpoints, &namespace);
        return Ok((endpoints, None));
    };
    let cluster = cluster(client, &namespace, &reference.name).await?;
    let forms = members::address_forms(client, &cluster).await;
    let endpoints = forms.iter().map(Addresses::service_url).collect();
    let recorded = ManifestCluster {
        name: cluster.name_any(),
        namespace,
        spec: cluster.spec,
    };
    Ok((endpoints, Some(recorded)))
}

/// The etcd client with the credentials from the Secrets of the EtcdCluster or the EtcdBackup.
pub(super) async fn client(
    context: &ObserveContext,
    backup: &EtcdBackup,
) -> Result<Arc<dyn Etcd>, Trouble> {
    let namespace = backup.namespace().unwrap_or_default();
    let spec = &backup.spec;
    let access = match (&spec.etcd_cluster, &spec.auth_secret) {
        (Some(reference), _) => {
            let cluster = cluster(&context.client, &namespace, &reference.name).await?;
            runtime::reach::of_cluster(&context.client, &cluster).await
        }
        (None, secret) => {
            let tls = spec.client_tls_secret();
            let tls = members::tls_access(&context.client, &namespace, tls).await;
            let tls = tls.map_err(|why| Trouble::new(Reason::SecretMissing, why))?;
            match secret {
                None => Ok(tls),
                Some(secret) => {
                    let field = "spec.authSecret";
                    let of_secret = runtime::credentials::of_secret;
                    let found = of_secret(&context.client, &namespace, secret, field).await;
                    found.map(|credentials| Access {
                        credentials: Some(credentials),
                        ..tls
                    })
                }
            }
        }
    };
    let access = access.map_err(|why| Trouble::new(Reason::SecretMissing, why))?;
    if access == Access::default() {
        return Ok(context.etcd.clone());
    }
    let client = EtcdClient::new(access);
    Ok(Arc::new(client.with_max_snapshot(context.max_snapshot)))
}

async fn cluster(client: &Client, namespace: &str, name: &str) -> Result<EtcdCluster, Trouble> {
    let found = members::cluster(client, namespace, name, "spec.etcdCluster.name").await;
    found.map_err(trouble)
}

fn trouble(error: MembersError) -> Trouble {
    match error {
        MembersError::Missing(message) => Trouble::new(Reason::ClusterMissing, message),
        MembersError::Unreachable(message) => Trouble::new(Reason::EtcdUnreachable, message),
    }
}

/// The client URLs of the members in `status.memberDetails`, and of the client Service.
fn urls_of(cluster: &EtcdCluster, addresses: &Addresses) -> Vec<String> {
    let details = cluster
        .status
        .iter()
        .flat_map(|status| &status.member_details);
    let members = details.map(|member| addresses.client_url(&member.name));
    members.chain([addresses.service_url()]).collect()
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use etcd::ClusterId;
    use http::{Request, Response};
    use kube::client::Body;
    use runtime::endpoints::EndpointGrants;
    use serde_json::{Value, json};
    use tower::service_fn;

    use super::*;
    use crate::snapshot::{EndpointReach, MemberPods};

    const OWN_ID: ClusterId = ClusterId(0xb);

    /// A fake API server with an EtcdCluster `main` in team-a and an EtcdCluster in team-b. One of the two pods in
    /// team-b uses the host network.
    fn server() -> Client {
        let service = service_fn(|request: Request<Body>| async move {
            let path = request.uri().path();
            let answer = match path.rsplit_once('/') {
                Some((kind, "main")) if kind.ends_with("/etcdclusters") => json!({
                    "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
                    "metadata": { "name": "main", "namespace": if path.contains("/team-a/") { "team-a" } else { "team-b" } },
                    "spec": { "size": 2 },
                    "status": { "clusterID": OWN_ID.to_string(), "memberDetails": [
                        { "name": "main-aaaaaaaaaa" }, { "name": "main-bbbbbbbbbb" }, { "name": "main-cccccccccc" },
                    ] },
                }),
                Some((
                    "/api/v1/namespaces/team-b/pods",
                    name @ ("main-aaaaaaaaaa" | "main-bbbbbbbbbb"),
                )) => json!({
                    "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": "team-b" },
                    "spec": { "containers": [], "hostNetwork": name.ends_with('b') },
                    "status": { "podIP": "10.0.0.7" },
                }),
                _ => {
                    json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
                             "reason": "NotFound", "message": "no" })
                }
            };
            let code = if answer["code"] == 404 { 404 } else { 200 };
            let body = Body::from(serde_json::to_vec(&answer).unwrap());
            Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
        });
        Client::new(service, "team-b")
    }

    fn rule(grants: &[&str], namespace: &str) -> EndpointRule {
        let grants = grants.iter().map(|text| text.parse().unwrap()).collect();
        EndpointGrants::new("operators", crate::app::ENDPOINTS, grants).of(namespace)
    }

    async fn observed(spec: &Value, rule: &EndpointRule) -> Result<Source, Trouble> {
        let mut spec = spec.clone();
        spec["storageType"] = json!("S3");
        let mut backup = EtcdBackup::new("nightly", serde_json::from_value(spec).unwrap());
        backup.metadata.namespace = Some("team-b".to_owned());
        source(&server(), &backup, rule).await
    }

    async fn reached(url: &str, rule: &EndpointRule) -> EndpointReach {
        let spec = json!({ "etcdEndpoints": [url] });
        match observed(&spec, rule).await.unwrap() {
            Source::Endpoints(mut endpoints) => endpoints.remove(0).reach,
            source @ Source::Cluster { .. } => panic!("{source:?}"),
        }
    }

    fn pods() -> MemberPods {
        MemberPods {
            urls: vec!["http://10.0.0.7:2379".to_owned()],
            cluster_id: OWN_ID,
        }
    }

    #[tokio::test]
    async fn invariant_28_namespace_without_grant_reaches_only_own_clusters() {
        let none = rule(&[], "team-b");
        for own in [
            "http://main-client.team-b.svc:2379",
            "http://main-client:2379",
            "main-client:2379",
            "http://main-aaaaaaaaaa.main.team-b.svc:2379",
            "http://main-aaaaaaaaaa.team-b.svc.cluster.local:2379",
        ] {
            let reach = reached(own, &none).await;
            assert_eq!(reach, EndpointReach::Pods(pods()), "{own}");
        }
        for foreign in [
            "http://main-client.team-a.svc:2379",
            "http://main-client.team-b.svc.:2379",
            "http://other-client.team-b.svc:2379",
            "http://user@main-client.team-b.svc:2379",
            "http://10.0.0.7:2379",
            "http://[fd00::7]:2379",
            "http://localhost:2379",
        ] {
            let reach = reached(foreign, &none).await;
            assert!(matches!(reach, EndpointReach::NotGranted(_)), "{foreign}");
        }
    }

    /// Invariant 28: the operator connects directly to a granted endpoint. The default `EndpointRule` restricts no
    /// endpoint.
    #[tokio::test]
    async fn invariant_28_operator_connects_directly_to_granted_endpoint() {
        let url = "http://main-client.team-a.svc:2379";
        for rule in [
            EndpointRule::default(),
            rule(&["team-b=main-client.team-a.svc"], "team-b"),
            rule(&["*=*.team-a.svc"], "team-b"),
        ] {
            assert_eq!(reached(url, &rule).await, EndpointReach::Direct);
        }
        let withdrawn = rule(&["team-c=main-client.team-a.svc"], "team-b");
        let EndpointReach::NotGranted(why) = reached(url, &withdrawn).await else {
            panic!("the operator may connect to an endpoint without a grant")
        };
        let remedy = "--etcd-endpoints=team-b=main-client.team-a.svc:2379";
        assert!(why.contains(remedy), "{why}");
    }

    /// Invariant 28: the operator connects to the addresses of the pods, and not to the Service, because users of the
    /// namespace can change the Service.
    #[tokio::test]
    async fn invariant_28_restricted_operator_connects_to_pods_not_service() {
        let spec = json!({ "etcdCluster": { "name": "main" } });
        for (rule, expected) in [
            (EndpointRule::default(), None),
            (rule(&[], "team-b"), Some(Ok(pods()))),
        ] {
            match observed(&spec, &rule).await.unwrap() {
                Source::Cluster { pods, .. } => assert_eq!(pods, expected),
                source @ Source::Endpoints(_) => panic!("{source:?}"),
            }
        }
    }
}
