//! The NetworkPolicy of a cluster, which restricts the connections to its members. Some network plugins do not enforce
//! NetworkPolicies.

use std::collections::BTreeMap;

use api::cluster::NetworkAccess;
use api::names;
use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort,
    NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::Members;

/// Label with the name of the namespace, which Kubernetes sets on each namespace.
const NAMESPACE: &str = "kubernetes.io/metadata.name";

/// Labels of the pods that write backups to a PVC, in the namespace of the cluster.
pub const BACKUP_POD_LABELS: [(&str, &str); 2] = [
    ("app.kubernetes.io/name", "etcd-backup"),
    ("app.kubernetes.io/managed-by", names::MANAGER_BACKUP),
];

/// The pods of the operators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Operators {
    /// Namespace of the operators.
    pub namespace: String,
    /// Labels of the operators' pods. If empty, all pods of the namespace match.
    pub labels: BTreeMap<String, String>,
}

/// Builds the policy. It restricts only ingress, because a seed must download its backup. Kubernetes always allows
/// probes from the node of a pod.
pub fn network_policy(
    members: &Members<'_>,
    access: &NetworkAccess,
    operators: &Operators,
) -> NetworkPolicy {
    let of_cluster = names::cluster_labels(members.cluster);
    let peer = NetworkPolicyPeer {
        pod_selector: Some(selector(of_cluster.clone())),
        ..NetworkPolicyPeer::default()
    };
    let mut clients = vec![peer.clone(), from_operators(operators)];
    if access.clients.is_empty() {
        clients.push(NetworkPolicyPeer {
            pod_selector: Some(LabelSelector::default()),
            ..NetworkPolicyPeer::default()
        });
    } else {
        let labels = BACKUP_POD_LABELS.map(|(key, value)| (key.to_owned(), value.to_owned()));
        clients.push(NetworkPolicyPeer {
            pod_selector: Some(selector(labels.into())),
            ..NetworkPolicyPeer::default()
        });
        if members.spec.grpc_proxy.is_some() {
            let proxies = names::grpc_proxy_labels(members.cluster);
            clients.push(NetworkPolicyPeer {
                pod_selector: Some(selector(proxies)),
                ..NetworkPolicyPeer::default()
            });
        }
        clients.extend(access.clients.iter().cloned());
    }
    // The operators may always connect to the metrics port: they use it to check members that do not serve clients yet.
    let metrics = (!access.metrics.is_empty()).then(|| {
        let operators = std::iter::once(from_operators(operators));
        operators.chain(access.metrics.iter().cloned()).collect()
    });
    let listeners = members.peers().listeners().iter();
    let peers = listeners.map(|(_, port)| ingress_rule(*port, Some(vec![peer.clone()])));
    let mut ingress: Vec<_> = peers.collect();
    ingress.extend([
        ingress_rule(names::CLIENT_PORT, Some(clients)),
        ingress_rule(names::METRICS_PORT, metrics),
    ]);
    NetworkPolicy {
        metadata: members.metadata(
            names::network_policy(members.cluster),
            names::cluster_labels(members.cluster),
        ),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(selector(of_cluster)),
            ingress: Some(ingress),
            policy_types: Some(vec!["Ingress".to_owned()]),
            ..NetworkPolicySpec::default()
        }),
    }
}

fn from_operators(operators: &Operators) -> NetworkPolicyPeer {
    let namespace = BTreeMap::from([(NAMESPACE.to_owned(), operators.namespace.clone())]);
    let labels = (!operators.labels.is_empty()).then(|| selector(operators.labels.clone()));
    NetworkPolicyPeer {
        namespace_selector: Some(selector(namespace)),
        pod_selector: labels,
        ..NetworkPolicyPeer::default()
    }
}

fn selector(labels: BTreeMap<String, String>) -> LabelSelector {
    LabelSelector {
        match_labels: Some(labels),
        ..LabelSelector::default()
    }
}

/// A rule for one port. Without `from`, every source is allowed.
pub fn ingress_rule(port: u16, from: Option<Vec<NetworkPolicyPeer>>) -> NetworkPolicyIngressRule {
    NetworkPolicyIngressRule {
        from,
        ports: Some(vec![NetworkPolicyPort {
            port: Some(IntOrString::Int(i32::from(port))),
            protocol: Some("TCP".to_owned()),
            ..NetworkPolicyPort::default()
        }]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture::Fixture;

    fn built(access: &Value) -> Value {
        let access: NetworkAccess = serde_json::from_value(access.clone()).unwrap();
        let operators = Operators {
            namespace: "operators".to_owned(),
            labels: BTreeMap::from([(
                "app.kubernetes.io/name".to_owned(),
                "etcd-operator".to_owned(),
            )]),
        };
        let fixture = Fixture::durable();
        let policy = network_policy(&fixture.members(), &access, &operators);
        serde_json::to_value(policy).unwrap()
    }

    #[test]
    fn network_policy_limits_sources_of_peer_and_client_port() {
        let team = json!({ "namespaceSelector": { "matchLabels": { "team": "a" } } });
        let policy = built(&json!({ "clients": [team] }));
        let (spec, sources) = (&policy["spec"], |port: i64| {
            let rules = policy["spec"]["ingress"].as_array().unwrap();
            rules
                .iter()
                .find(|rule| rule["ports"][0]["port"] == port)
                .unwrap()["from"]
                .clone()
        });
        let labels = spec["podSelector"]["matchLabels"].clone();
        assert_eq!(labels["etcd_cluster"], "db");
        assert_eq!(policy["metadata"]["name"], "db-members");
        let member = json!({ "podSelector": { "matchLabels": labels } });
        assert_eq!(sources(2380), json!([member]));
        let operator = json!({
            "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": "operators" } },
            "podSelector": { "matchLabels": { "app.kubernetes.io/name": "etcd-operator" } },
        });
        // Backup pods are allowed on the client port, because they connect to etcd.
        let backup_pod = json!({ "podSelector": { "matchLabels": {
            "app.kubernetes.io/managed-by": "etcd-backup-operator", "app.kubernetes.io/name": "etcd-backup",
        } } });
        assert_eq!(sources(2379), json!([member, operator, backup_pod, team]));
        assert_eq!(
            sources(2381),
            Value::Null,
            "the metrics port must admit all sources"
        );
        assert_eq!(spec["policyTypes"], json!(["Ingress"]));
    }

    #[test]
    fn network_policy_admits_all_pods_of_namespace_by_default() {
        let policy = built(&json!({}));
        let from = policy["spec"]["ingress"][1]["from"]
            .as_array()
            .unwrap()
            .clone();
        assert_eq!(from.last().unwrap(), &json!({ "podSelector": {} }));
    }

    #[test]
    fn network_policy_admits_grpc_proxies() {
        let team = json!({ "namespaceSelector": { "matchLabels": { "team": "a" } } });
        let access: NetworkAccess = serde_json::from_value(json!({ "clients": [team] })).unwrap();
        let from = |json: &str| {
            let fixture = Fixture::with(json);
            let policy = network_policy(&fixture.members(), &access, &Operators::default());
            let policy = serde_json::to_value(policy).unwrap();
            policy["spec"]["ingress"][1]["from"]
                .as_array()
                .unwrap()
                .clone()
        };
        let labels = json!({ "app": "etcd-grpc-proxy", "etcd_cluster": "db" });
        let proxies = json!({ "podSelector": { "matchLabels": labels } });
        assert!(from(r#"{"grpcProxy":{}}"#).contains(&proxies));
        assert!(!from("{}").contains(&proxies));
    }

    #[test]
    fn network_policy_restricts_metrics_port_to_listed_peers() {
        let metrics = json!([{ "namespaceSelector": { "matchLabels": { "team": "watch" } } }]);
        let policy = built(&json!({ "metrics": metrics }));
        let from = policy["spec"]["ingress"][2]["from"].as_array().unwrap();
        assert_eq!(from[1..], metrics.as_array().unwrap()[..]);
        let operators = &from[0]["namespaceSelector"]["matchLabels"];
        assert_eq!(operators["kubernetes.io/metadata.name"], "operators");
    }
}
