//! The NetworkPolicy of a cluster: who may connect to its members. Whether it is enforced is up to the network.

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

/// The label every namespace has, with its name.
const NAMESPACE: &str = "kubernetes.io/metadata.name";

/// The labels of the pods that write a cluster's backups to a claim. They run in the cluster's namespace.
pub const BESIDE_A_CLAIM: [(&str, &str); 2] = [
    ("app.kubernetes.io/name", "etcd-backup"),
    ("app.kubernetes.io/managed-by", names::MANAGER_BACKUP),
];

/// Where the operators run, all three of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Operators {
    /// Their namespace.
    pub namespace: String,
    /// Labels of their pods; none: every pod there.
    pub labels: BTreeMap<String, String>,
}

/// The policy of a cluster that has one. It also holds for a seed that prepares its data: it only lets in. The kubelet's
/// probes come from the pod's own node, which Kubernetes never keeps out.
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
        let labels = BESIDE_A_CLAIM.map(|(key, value)| (key.to_owned(), value.to_owned()));
        clients.push(NetworkPolicyPeer {
            pod_selector: Some(selector(labels.into())),
            ..NetworkPolicyPeer::default()
        });
        clients.extend(access.clients.iter().cloned());
    }
    // The operators ask for the health of a member that does not serve clients yet.
    let metrics = (!access.metrics.is_empty()).then(|| {
        let operators = std::iter::once(from_operators(operators));
        operators.chain(access.metrics.iter().cloned()).collect()
    });
    let listeners = members.peers().listeners().iter();
    let peers = listeners.map(|(_, port)| rule(*port, Some(vec![peer.clone()])));
    let mut ingress: Vec<_> = peers.collect();
    ingress.extend([
        rule(names::CLIENT_PORT, Some(clients)),
        rule(names::METRICS_PORT, metrics),
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

/// Without `from` everybody may connect to that port.
fn rule(port: u16, from: Option<Vec<NetworkPolicyPeer>>) -> NetworkPolicyIngressRule {
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

    use super::super::fixture::Fixture;
    use super::*;

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
    fn members_reach_members_and_operators_and_clients_the_client_port_alone() {
        let team = json!({ "namespaceSelector": { "matchLabels": { "team": "a" } } });
        let policy = built(&json!({ "clients": [team] }));
        let (spec, of) = (&policy["spec"], |port: i64| {
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
        assert_eq!(of(2380), json!([member]));
        let operator = json!({
            "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": "operators" } },
            "podSelector": { "matchLabels": { "app.kubernetes.io/name": "etcd-operator" } },
        });
        // Without them no backup of this cluster would get onto a claim.
        let beside_a_claim = json!({ "podSelector": { "matchLabels": {
            "app.kubernetes.io/managed-by": "etcd-backup-operator", "app.kubernetes.io/name": "etcd-backup",
        } } });
        assert_eq!(of(2379), json!([member, operator, beside_a_claim, team]));
        assert_eq!(of(2381), Value::Null, "everybody");
        assert_eq!(spec["policyTypes"], json!(["Ingress"]));
    }

    #[test]
    fn without_named_clients_the_own_namespace_is_let_in() {
        let policy = built(&json!({}));
        let from = policy["spec"]["ingress"][1]["from"]
            .as_array()
            .unwrap()
            .clone();
        assert_eq!(from.last().unwrap(), &json!({ "podSelector": {} }));
    }

    #[test]
    fn metrics_may_be_kept_to_those_who_collect_them() {
        let metrics = json!([{ "namespaceSelector": { "matchLabels": { "team": "watch" } } }]);
        let policy = built(&json!({ "metrics": metrics }));
        let from = policy["spec"]["ingress"][2]["from"].as_array().unwrap();
        assert_eq!(from[1..], metrics.as_array().unwrap()[..]);
        let operators = &from[0]["namespaceSelector"]["matchLabels"];
        assert_eq!(operators["kubernetes.io/metadata.name"], "operators");
    }
}
