//! Reads the endpoints of the etcd cluster to back up, and builds the client for them. Only the client contains the
//! content of Secrets (invariant 14).

use std::sync::Arc;

use api::backup::EtcdBackupSpec;
use api::manifest::ManifestCluster;
use api::names::{ANNOTATION_RESTORE, Addresses};
use api::{EtcdBackup, EtcdCluster};
use etcd::{Access, Etcd, EtcdClient};
use futures::future::join_all;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{Api, Client, ResourceExt};
use member::Members;
use member::tls::{self, Purpose};
use runtime::endpoints::{EndpointRule, clusters_named};

use super::ObserveContext;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Endpoint, EndpointReach, MemberPods, Source};

/// Reads the endpoints from `spec.etcdEndpoints` or from the EtcdCluster.
pub(super) async fn source(
    client: &Client,
    backup: &EtcdBackup,
    rule: &EndpointRule,
) -> Result<Source, Trouble> {
    let namespace = backup.namespace().unwrap_or_default();
    let Some(reference) = &backup.spec.etcd_cluster else {
        let mut endpoints = Vec::new();
        for url in completed(&backup.spec.etcd_endpoints, &namespace) {
            let reach = Box::pin(reach(client, &namespace, &url, rule)).await?;
            endpoints.push(Endpoint { url, reach });
        }
        return Ok(Source::Endpoints(endpoints));
    };
    let cluster = cluster(client, &namespace, &reference.name).await?;
    let forms = forms_of(client, &cluster, &namespace).await;
    let pods = if rule.is_limited() {
        Some(pods_of(client, &cluster, &forms).await)
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

/// The client URLs for an agent, and the EtcdCluster that the agent records. The URLs name the client Service of the
/// EtcdCluster, so that the replacement of a member does not change the settings of the agent. The agent runs in the
/// namespace of the EtcdBackup, so it can connect to the same endpoints as other pods of that namespace, and needs no
/// grant.
pub(super) async fn of_agent(
    client: &Client,
    backup: &EtcdBackup,
) -> Result<(Vec<String>, Option<ManifestCluster>), Trouble> {
    let namespace = backup.namespace().unwrap_or_default();
    let Some(reference) = &backup.spec.etcd_cluster else {
        let endpoints = completed(&backup.spec.etcd_endpoints, &namespace);
        return Ok((endpoints, None));
    };
    let cluster = cluster(client, &namespace, &reference.name).await?;
    let forms = forms_of(client, &cluster, &namespace).await;
    let endpoints = forms.iter().map(Addresses::service_url).collect();
    let recorded = ManifestCluster {
        name: cluster.name_any(),
        namespace,
        spec: cluster.spec,
    };
    Ok((endpoints, Some(recorded)))
}

/// Returns how the operator may connect to a URL of the spec: directly, only at the addresses of pods, or not at all
/// (invariant 28).
async fn reach(
    client: &Client,
    namespace: &str,
    url: &str,
    rule: &EndpointRule,
) -> Result<EndpointReach, Trouble> {
    let Err(why) = rule.check(url) else {
        return Ok(EndpointReach::Direct);
    };
    for name in clusters_named(url, namespace) {
        if let Some(cluster) = found(client, namespace, &name, "spec.etcdEndpoints").await? {
            let forms = forms_of(client, &cluster, namespace).await;
            let scheme = |form| Addresses {
                client_tls: url.starts_with("https://"),
                ..form
            };
            let form = forms.into_iter().next().map(scheme);
            let pods = pods_of(client, &cluster, form.as_slice()).await?;
            return Ok(EndpointReach::Pods(pods));
        }
    }
    Ok(EndpointReach::NotGranted(why))
}

/// The URL formats of the members of an EtcdCluster. The formats depend on the TLS settings of the EtcdCluster.
async fn forms_of(client: &Client, cluster: &EtcdCluster, namespace: &str) -> Vec<Addresses> {
    let name = cluster.name_any();
    let policy = cluster.spec.tls.as_ref();
    let tls = runtime::reach::cluster_tls(client, (namespace, &name), policy).await;
    let mut effective = cluster.clone();
    tls.complete_spec(&mut effective.spec, (namespace, &name), None);
    let addresses = Members::of(&effective, namespace, "", None).addresses();
    // During a TLS switch, a member may accept only http or only https, so the operator tries the URLs of both schemes.
    let policy = effective.spec.tls;
    let with_tls = policy.is_some_and(|tls| tls.accepts_plaintext());
    let with_tls = with_tls.then(|| Addresses {
        client_tls: true,
        ..addresses.clone()
    });
    [addresses].into_iter().chain(with_tls).collect()
}

/// The client URLs of an EtcdCluster's members, at the addresses of their pods. Users cannot change these addresses:
/// the cluster operator writes the member names, and the kubelet writes the pod addresses. A pod in the host network
/// is left out, because its address is the address of the node.
async fn pods_of(
    client: &Client,
    cluster: &EtcdCluster,
    forms: &[Addresses],
) -> Result<MemberPods, Trouble> {
    let (name, namespace) = (cluster.name_any(), cluster.namespace().unwrap_or_default());
    let status = cluster.status.as_ref();
    let cluster_id = status.and_then(|status| status.cluster_id.as_ref()?.parse().ok());
    let Some(cluster_id) = cluster_id else {
        return Err(Trouble::new(
            Reason::EtcdUnreachable,
            format!(
                "EtcdCluster {name} has no cluster ID yet: the backup starts when the cluster has formed"
            ),
        ));
    };
    let pods = Api::<Pod>::namespaced(client.clone(), &namespace);
    let details = status.iter().flat_map(|status| &status.member_details);
    let reads = join_all(details.map(|member| pods.get_opt(&member.name))).await;
    let mut urls = Vec::new();
    for read in reads {
        let pod = read.map_err(|error| {
            Trouble::new(
                Reason::EtcdUnreachable,
                format!("a pod of EtcdCluster {name} cannot be read: {error}"),
            )
        })?;
        if let Some(pod) = pod {
            urls.extend(forms.iter().filter_map(|form| url_at(&pod, form)));
        }
    }
    if urls.is_empty() {
        return Err(Trouble::new(
            Reason::EtcdUnreachable,
            format!("no pod of EtcdCluster {name} has an address yet"),
        ));
    }
    Ok(MemberPods { urls, cluster_id })
}

fn url_at(pod: &Pod, form: &Addresses) -> Option<String> {
    let of_node = pod.spec.as_ref().and_then(|spec| spec.host_network);
    let address = pod.status.as_ref()?.pod_ip.as_ref()?.parse().ok()?;
    (of_node != Some(true)).then(|| form.client_url_at(address, &pod.name_any()))
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
            let tls = tls_access(&context.client, &namespace, spec).await?;
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

/// Reads the client certificate from the Secret in `spec.clientTLSSecret`.
async fn tls_access(
    client: &Client,
    namespace: &str,
    spec: &EtcdBackupSpec,
) -> Result<Access, Trouble> {
    let Some(name) = spec.client_tls_secret() else {
        return Ok(Access::default());
    };
    let secrets = Api::<Secret>::namespaced(client.clone(), namespace);
    let read = runtime::reach::tls_secret(&secrets, Purpose::Client, name).await;
    read.map(|material| tls::access(&material))
        .map_err(|fault| Trouble::new(Reason::SecretMissing, fault.message))
}

async fn cluster(client: &Client, namespace: &str, name: &str) -> Result<EtcdCluster, Trouble> {
    let field = "spec.etcdCluster.name";
    found(client, namespace, name, field).await?.ok_or_else(|| {
        Trouble::new(
            Reason::ClusterMissing,
            format!("{field}: there is no EtcdCluster {name} in this namespace: create it or correct the name"),
        )
    })
}

async fn found(
    client: &Client,
    namespace: &str,
    name: &str,
    field: &str,
) -> Result<Option<EtcdCluster>, Trouble> {
    let clusters = Api::<EtcdCluster>::namespaced(client.clone(), namespace);
    clusters.get_opt(name).await.map_err(|error| {
        Trouble::new(
            Reason::ClusterMissing,
            format!("{field}: EtcdCluster {name} cannot be read: {error}"),
        )
    })
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

/// The endpoints of a spec with complete host names. A Service name without a namespace, as in manifests for
/// coreos/etcd-operator, means a Service in the namespace of the EtcdBackup.
fn completed(given: &[String], namespace: &str) -> Vec<String> {
    given.iter().map(|url| endpoint(url, namespace)).collect()
}

fn endpoint(url: &str, namespace: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
    let rest = rest.trim_end_matches('/');
    let (host, port) = match rest.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => (host, Some(port)),
        _ => (rest, None),
    };
    let bare = !host.is_empty() && !host.contains(['.', ':', '[']) && host != "localhost";
    let host = if bare {
        format!("{host}.{namespace}.svc")
    } else {
        host.to_owned()
    };
    match port {
        Some(port) => format!("{scheme}://{host}:{port}"),
        None => format!("{scheme}://{host}"),
    }
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

    #[test]
    fn bare_service_name_resolves_in_namespace_of_etcdbackup() {
        let cases = [
            (
                "http://example-client:2379",
                "http://example-client.prod.svc:2379",
            ),
            ("example-client:2379", "http://example-client.prod.svc:2379"),
            (
                "http://example-client:2379/",
                "http://example-client.prod.svc:2379",
            ),
            ("http://a.other.svc:2379", "http://a.other.svc:2379"),
            ("http://10.0.0.1:2379", "http://10.0.0.1:2379"),
            ("http://[fd00::1]:2379", "http://[fd00::1]:2379"),
            ("[fd00::1]:2379/", "http://[fd00::1]:2379"),
            ("https://[fd00::1]", "https://[fd00::1]"),
            ("http://[::1]:2379", "http://[::1]:2379"),
            ("http://localhost:2379", "http://localhost:2379"),
            ("http://plain", "http://plain.prod.svc"),
        ];
        for (given, expected) in cases {
            assert_eq!(endpoint(given, "prod"), expected);
        }
    }

    const OWN_ID: ClusterId = ClusterId(0xb);

    /// A fake API server with an EtcdCluster `main` in two namespaces. One of its pods in team-b uses the host
    /// network.
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

    /// Invariant 28: the operator connects directly to a granted endpoint. An operator without the restriction (the
    /// default `EndpointRule`) connects to every endpoint.
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
    async fn invariant_28_operator_connects_to_pods_in_other_namespace() {
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
