//! The Services of a cluster: one per member, the headless Service, and the client Service.

use std::collections::BTreeMap;

use api::cluster::ClientServicePolicy;
use api::names;
use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::Members;
use super::difference::ANNOTATION_APPLIED_SPEC;

/// The Service of a member, which gives the member a permanent address. It is created before the member is added to
/// etcd. It publishes the address of a pod that is not ready, because a joining member is not ready.
pub fn member_service(members: &Members<'_>, member: &str) -> Service {
    let labels = names::member_labels(members.cluster, member);
    Service {
        metadata: members.metadata(member.to_owned(), labels.clone()),
        spec: Some(ServiceSpec {
            type_: Some("ClusterIP".to_owned()),
            ip_family_policy: Some(both_families()),
            publish_not_ready_addresses: Some(true),
            selector: Some(labels),
            ports: Some(ports(members)),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

/// Removes the endpoints of a Service, so that connections are refused at once: adds to the selector a label that no
/// pod has. The Services of the first members are created without endpoints (see [`is_closed`]).
#[must_use]
pub fn closed(mut service: Service) -> Service {
    let selector = service
        .spec
        .as_mut()
        .and_then(|spec| spec.selector.as_mut());
    if let Some(selector) = selector {
        selector.insert(names::LABEL_FORMED.to_owned(), "true".to_owned());
    }
    service
}

/// Removes the second peer port from a Service before it is created. The API server counts the creation and a later
/// apply as two field managers, so the apply could not remove the port. The port exists only while TLS between members
/// is switched on or off.
#[must_use]
pub fn without_second_port(mut service: Service) -> Service {
    if let Some(ports) = service.spec.as_mut().and_then(|spec| spec.ports.as_mut()) {
        ports.retain(|port| port.port != i32::from(names::SECOND_PEER_PORT));
    }
    service
}

/// True if the Service of a member has no endpoints yet.
///
/// A first member that starts asks the other first members whether they have formed the cluster (`isMemberBootstrapped`
/// in etcd), with a timeout of one second. Members that are starting accept the connection, but do not answer. Without
/// endpoints, the request fails at once, and not only after the timeout.
#[must_use]
pub fn is_closed(service: &Service) -> bool {
    let selector = service
        .spec
        .as_ref()
        .and_then(|spec| spec.selector.as_ref());
    selector.is_some_and(|selector| selector.contains_key(names::LABEL_FORMED))
}

/// The headless Service, with the name of the cluster. It is for clients of v1beta2 clusters, for discovery, and for
/// addresses of the form `<member>.<cluster>.<namespace>.svc`.
pub fn headless_service(members: &Members<'_>) -> Service {
    Service {
        metadata: members.metadata(
            names::headless_service(members.cluster),
            names::cluster_labels(members.cluster),
        ),
        spec: Some(ServiceSpec {
            cluster_ip: Some("None".to_owned()),
            ip_family_policy: Some(both_families()),
            publish_not_ready_addresses: Some(true),
            selector: Some(names::cluster_labels(members.cluster)),
            ports: Some(ports(members)),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

/// The client Service.
/// - It has no endpoints until the status contains the cluster ID, because members of an abandoned bootstrap must not
///   acknowledge writes.
/// - Its selector contains the token of the cluster, so that clients do not connect to pods of an abandoned bootstrap.
/// - It selects only voters, because a learner rejects most requests.
pub fn client_service(members: &Members<'_>) -> Service {
    let none = ClientServicePolicy::default();
    let policy = members.spec.services.as_ref();
    let policy = policy.and_then(|services| services.client.as_ref());
    let applied = policy.and_then(|policy| serde_json::to_string(policy).ok());
    let policy = policy.unwrap_or(&none);
    let mut metadata = members.metadata(
        names::client_service(members.cluster),
        names::cluster_labels(members.cluster),
    );
    let annotations = policy.annotations.clone().into_iter();
    // The annotation records `spec.services.client`, so that the operator can detect settings that a user has removed
    // from the spec.
    let applied = applied.map(|applied| (ANNOTATION_APPLIED_SPEC.to_owned(), applied));
    let annotations = annotations.chain(applied);
    let annotations: BTreeMap<String, String> = annotations.collect();
    metadata.annotations = (!annotations.is_empty()).then_some(annotations);
    let kind = policy.type_.as_ref().map(ToString::to_string);
    let ranges = &policy.load_balancer_source_ranges;
    Service {
        metadata,
        spec: Some(ServiceSpec {
            type_: Some(kind.unwrap_or_else(|| "ClusterIP".to_owned())),
            ip_family_policy: Some(both_families()),
            selector: Some(client_selector(members)),
            ports: Some(vec![ServicePort {
                node_port: policy.node_port,
                ..client_port()
            }]),
            load_balancer_class: policy.load_balancer_class.clone(),
            load_balancer_source_ranges: (!ranges.is_empty()).then(|| ranges.clone()),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

/// True if the existing client Service was built for the same `spec.services.client`. If not, the Service may contain
/// settings that were removed from the spec.
#[must_use]
pub fn has_same_policy(built: &Service, existing: &Service) -> bool {
    let applied = |service: &Service| {
        service
            .metadata
            .annotations
            .as_ref()?
            .get(ANNOTATION_APPLIED_SPEC)
            .cloned()
    };
    applied(built) == applied(existing)
}

/// The `ipFamilyPolicy` of all Services. A Service gets both IP families on a dual-stack Kubernetes cluster.
fn both_families() -> String {
    "PreferDualStack".to_owned()
}

fn client_selector(members: &Members<'_>) -> BTreeMap<String, String> {
    let mut selector = names::cluster_labels(members.cluster);
    let token = names::token_label(members.token);
    selector.insert(names::LABEL_TOKEN.to_owned(), token.to_owned());
    // Only voters are selected, because a learner may be ready, but rejects most requests (`isRPCSupportedForLearner`
    // in `api/v3rpc` of etcd).
    selector.insert(names::LABEL_ROLE.to_owned(), names::ROLE_VOTER.to_owned());
    if members.cluster_id.is_none() {
        selector.insert(names::LABEL_FORMED.to_owned(), "true".to_owned());
    }
    selector
}

fn client_port() -> ServicePort {
    port("client", names::CLIENT_PORT)
}

/// The ports of a member. The second peer port exists only while TLS between members is switched on or off.
fn ports(members: &Members<'_>) -> Vec<ServicePort> {
    let listeners = members.peers().listeners().iter();
    let peers = listeners.map(|(_, number)| match *number {
        names::PEER_PORT => port("peer", names::PEER_PORT),
        second => port("peer-second", second),
    });
    std::iter::once(client_port()).chain(peers).collect()
}

fn port(name: &str, number: u16) -> ServicePort {
    ServicePort {
        name: Some(name.to_owned()),
        port: number.into(),
        target_port: Some(IntOrString::Int(number.into())),
        protocol: Some("TCP".to_owned()),
        ..ServicePort::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Fixture;

    #[test]
    fn member_service_includes_unready_pod() {
        let service = member_service(&Fixture::default().members(), "db-aaaaaaaaaa");
        assert_eq!(service.metadata.name.as_deref(), Some("db-aaaaaaaaaa"));
        let spec = service.spec.unwrap();
        assert_eq!(spec.publish_not_ready_addresses, Some(true));
        assert_eq!(spec.selector.unwrap()["etcd_node"], "db-aaaaaaaaaa");
        let ports: Vec<_> = spec.ports.unwrap().iter().map(|port| port.port).collect();
        assert_eq!(ports, [2379, 2380]);
    }

    #[test]
    fn services_have_second_peer_port_during_tls_switch() {
        let ports = |service: Service| -> Vec<i32> {
            let ports = service.spec.unwrap().ports.unwrap();
            ports.iter().map(|port| port.port).collect()
        };
        for (stage, expected) in [
            ("PlainAndTls", vec![2379, 2380, 2382]),
            ("TlsTwice", vec![2379, 2380, 2382]),
            ("Tls", vec![2379, 2380]),
        ] {
            let mut fixture = Fixture::default();
            let tls =
                format!(r#"{{"static":{{"member":{{"peerSecret":"p"}}}},"peerStage":"{stage}"}}"#);
            fixture.spec.tls = serde_json::from_str(&tls).unwrap();
            let members = fixture.members();
            assert_eq!(ports(headless_service(&members)), expected);
            let own = member_service(&members, "db-aaaaaaaaaa");
            assert_eq!(ports(own.clone()), expected);
            assert_eq!(ports(without_second_port(own)), [2379, 2380]);
        }
    }

    #[test]
    fn services_prefer_dual_stack() {
        let fixture = Fixture::default();
        let members = fixture.members();
        for service in [
            client_service(&members),
            headless_service(&members),
            member_service(&members, "db-aaaaaaaaaa"),
        ] {
            let spec = service.spec.unwrap();
            assert_eq!(spec.ip_family_policy.as_deref(), Some("PreferDualStack"));
            assert_eq!(
                spec.ip_families, None,
                "the order of IP families is that of the Kubernetes cluster"
            );
        }
    }

    #[test]
    fn closed_member_service_selects_no_pod() {
        let fixture = Fixture::default();
        let open = member_service(&fixture.members(), "db-aaaaaaaaaa");
        let closed = closed(open.clone());
        assert!(is_closed(&closed) && !is_closed(&open));
        let selector = closed.spec.unwrap().selector.unwrap();
        assert_eq!(selector["etcd.database.coreos.com/formed"], "true");
    }

    #[test]
    fn client_service_without_cluster_id_has_no_endpoints() {
        let selector = |cluster_id| {
            let fixture = Fixture {
                cluster_id,
                ..Fixture::default()
            };
            client_service(&fixture.members())
                .spec
                .unwrap()
                .selector
                .unwrap()
        };
        assert_eq!(selector(None)["etcd.database.coreos.com/formed"], "true");
        let mut open = names::cluster_labels("db");
        open.insert(names::LABEL_TOKEN.to_owned(), "token".to_owned());
        open.insert(names::LABEL_ROLE.to_owned(), "voter".to_owned());
        assert_eq!(selector(Some("abc")), open);
    }

    #[test]
    fn client_service_selects_only_pods_with_token_of_cluster() {
        let fixture = Fixture::default();
        let of = |token| {
            let mut members = fixture.members();
            members.token = token;
            client_service(&members).spec.unwrap().selector.unwrap()
        };
        assert_ne!(of("db-1"), of("db-2"));
    }

    #[test]
    fn client_service_has_settings_of_spec() {
        let built = |json: &str| {
            let fixture = Fixture::with(json);
            client_service(&fixture.members())
        };
        let plain = built("{}");
        assert_eq!(plain.metadata.annotations, None);
        assert_eq!(
            plain.spec.clone().unwrap().type_.as_deref(),
            Some("ClusterIP")
        );
        let balanced = built(
            r#"{"services":{"client":{"type":"LoadBalancer","annotations":{"a":"b"},"loadBalancerClass":"lb/x",
                "loadBalancerSourceRanges":["10.0.0.0/8"],"nodePort":30379}}}"#,
        );
        assert_eq!(balanced.metadata.annotations.as_ref().unwrap()["a"], "b");
        let spec = balanced.spec.clone().unwrap();
        assert_eq!(spec.type_.as_deref(), Some("LoadBalancer"));
        assert_eq!(spec.load_balancer_class.as_deref(), Some("lb/x"));
        assert_eq!(spec.load_balancer_source_ranges.unwrap(), ["10.0.0.0/8"]);
        assert_eq!(spec.ports.unwrap()[0].node_port, Some(30379));
        assert!(has_same_policy(&plain, &built("{}")) && !has_same_policy(&plain, &balanced));
    }

    #[test]
    fn services_have_names_and_ports_of_v1beta2() {
        let fixture = Fixture::default();
        let (client, headless) = (
            client_service(&fixture.members()),
            headless_service(&fixture.members()),
        );
        assert_eq!(client.metadata.name.as_deref(), Some("db-client"));
        assert_eq!(headless.metadata.name.as_deref(), Some("db"));
        let headless = headless.spec.unwrap();
        assert_eq!(headless.cluster_ip.as_deref(), Some("None"));
        assert_eq!(headless.publish_not_ready_addresses, Some(true));
        assert_eq!(client.spec.unwrap().ports.unwrap()[0].port, 2379);
    }

    #[test]
    fn every_service_is_owned_by_its_cluster() {
        let fixture = Fixture::default();
        let members = fixture.members();
        for service in [
            client_service(&members),
            headless_service(&members),
            member_service(&members, "db-a"),
        ] {
            let owners = service.metadata.owner_references.unwrap();
            assert_eq!(owners[0].uid, "cluster-uid");
            assert_eq!(owners[0].controller, Some(true));
        }
    }
}
