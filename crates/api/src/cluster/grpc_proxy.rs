//! `EtcdCluster.spec.grpcProxy`: gRPC proxies of etcd between clients and members.

use k8s_openapi::api::core::v1::{ResourceRequirements, Toleration};
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::{EtcdCluster, TlsPolicy};
use crate::names;
use crate::problem::Problem;
use crate::schema::{TextMap, embedded, embedded_list, null_as_empty, object_name, text_map};

/// The default of `spec.grpcProxy.replicas`.
pub const DEFAULT_PROXY_REPLICAS: i32 = 2;

/// Maximum length of the name of a Service.
const MAX_SERVICE_NAME: usize = 63;

/// gRPC proxies of etcd, which combine the watches of their clients. They run the etcd image of the members.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "has(self.clientSecret) == has(self.serverSecret)",
    "spec.grpcProxy needs both Secrets or none: set clientSecret and serverSecret, or remove both"
))]
pub struct GrpcProxy {
    /// Number of proxies. The default is 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub replicas: Option<i32>,
    /// Prefix that the proxies add to every key of a client. Clients see only keys with this prefix, and see them
    /// without the prefix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    #[x_kube(validation = (
        "self.matches('^[!-~]+$')",
        "spec.grpcProxy.namespacePrefix may have only printable ASCII characters without spaces: use a prefix such as /team-a/"
    ))]
    pub namespace_prefix: Option<String>,
    /// Name of the Service of the proxies. The default is `<cluster>-proxy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(validation = (
        "self.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "spec.grpcProxy.serviceName must be a DNS-1035 label: use lowercase letters, digits and dashes, and begin with a letter"
    ))]
    pub service_name: Option<String>,
    /// Secret with the proxies' client certificate for the members, only with static certificates. Its keys are
    /// `tls.crt`, `tls.key` and `ca.crt`. The certificate must have no common name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name")]
    pub client_secret: Option<String>,
    /// Secret with the proxies' certificate for clients, only with static certificates. Its keys are `tls.crt`,
    /// `tls.key` and `ca.crt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name")]
    pub server_secret: Option<String>,
    /// Resources of the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "embedded::<ResourceRequirements>")]
    pub resources: Option<ResourceRequirements>,
    /// Labels of the pods, in addition to the operator's labels.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "TextMap::is_empty"
    )]
    #[schemars(schema_with = "text_map")]
    pub labels: TextMap,
    /// Annotations of the pods, in addition to the operator's annotations.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "TextMap::is_empty"
    )]
    #[schemars(schema_with = "text_map")]
    pub annotations: TextMap,
    /// Labels of the nodes on which the pods may run.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "TextMap::is_empty"
    )]
    #[schemars(schema_with = "text_map")]
    pub node_selector: TextMap,
    /// Tolerations of the pods.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(schema_with = "embedded_list::<Toleration>")]
    pub tolerations: Vec<Toleration>,
    /// Priority class of the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name")]
    pub priority_class_name: Option<String>,
}

impl GrpcProxy {
    /// The number of proxies.
    pub fn replicas(&self) -> i32 {
        self.replicas.unwrap_or(DEFAULT_PROXY_REPLICAS)
    }

    /// The name of the Service of the proxies of this cluster.
    pub fn service_name(&self, cluster: &str) -> String {
        let given = self.service_name.clone();
        given.unwrap_or_else(|| names::grpc_proxy(cluster))
    }
}

/// The problems of `spec.grpcProxy`.
pub(super) fn grpc_proxy_problems(cluster: &EtcdCluster) -> Vec<Problem> {
    let Some(proxy) = &cluster.spec.grpc_proxy else {
        return Vec::new();
    };
    let name = cluster.metadata.name.as_deref().unwrap_or_default();
    let mut problems = Vec::new();
    problems.extend(secrets_problem(proxy, cluster.spec.tls.as_ref()));
    problems.extend(service_problem(&proxy.service_name(name), name));
    let prefix = proxy.namespace_prefix.as_deref();
    if prefix.is_some_and(|prefix| {
        prefix.is_empty() || !prefix.bytes().all(|byte| byte.is_ascii_graphic())
    }) {
        problems.push(Problem::new(
            "spec.grpcProxy.namespacePrefix",
            "is empty or has other characters than printable ASCII characters without spaces",
            "use a prefix such as /team-a/",
        ));
    }
    problems
}

/// The Secrets must be set if the members use static certificates for clients, and only then.
fn secrets_problem(proxy: &GrpcProxy, tls: Option<&TlsPolicy>) -> Option<Problem> {
    let is_static = tls.is_some_and(|tls| tls.server_secret().is_some());
    let set = (proxy.client_secret.is_some(), proxy.server_secret.is_some());
    (set != (is_static, is_static)).then(|| {
        Problem::new(
            "spec.grpcProxy",
            "needs clientSecret and serverSecret if spec.TLS.static.member.serverSecret is set, and only then",
            "set or remove the two fields",
        )
    })
}

/// The Service must not have the name of another Service of the cluster.
fn service_problem(service: &str, cluster: &str) -> Option<Problem> {
    const FIELD: &str = "spec.grpcProxy.serviceName";
    let is_label = service.len() <= MAX_SERVICE_NAME
        && service.starts_with(|first: char| first.is_ascii_lowercase())
        && !service.ends_with('-')
        && service
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    if !is_label {
        let problem = format!("is {service:?}, which is not a DNS-1035 label");
        let remedy = "use lowercase letters, digits and dashes, and begin with a letter";
        return Some(Problem::new(FIELD, problem, remedy));
    }
    let taken = service == names::headless_service(cluster)
        || service == names::client_service(cluster)
        || names::cluster_of_member(service) == Some(cluster);
    taken.then(|| {
        let problem =
            format!("is {service:?}, which is the name of another Service of the cluster");
        Problem::new(FIELD, problem, "choose another name")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::cluster::validate;
    use crate::problem::fields;

    fn cluster(spec: &Value) -> EtcdCluster {
        let metadata = json!({ "name": "db", "namespace": "prod" });
        serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": metadata, "spec": spec,
        }))
        .unwrap()
    }

    fn is_valid(spec: &Value) -> bool {
        validate(&cluster(spec)).is_empty()
    }

    #[test]
    fn grpc_proxy_has_documented_defaults() {
        let proxy = GrpcProxy::default();
        assert_eq!(proxy.replicas(), 2);
        assert_eq!(proxy.service_name("db"), "db-proxy");
        assert!(is_valid(&json!({ "grpcProxy": {} })));
    }

    #[test]
    fn grpc_proxy_has_secrets_if_and_only_if_tls_is_static() {
        let tls = json!({ "static": { "member": { "serverSecret": "s" }, "operatorSecret": "o" } });
        let secrets = json!({ "clientSecret": "a", "serverSecret": "b" });
        assert!(is_valid(&json!({ "TLS": tls, "grpcProxy": secrets })));
        assert!(is_valid(
            &json!({ "TLS": { "generated": {} }, "grpcProxy": {} })
        ));
        let issued = json!({ "certManager": { "issuerRef": { "name": "ca" } } });
        assert!(is_valid(&json!({ "TLS": issued, "grpcProxy": {} })));
        for spec in [
            json!({ "TLS": issued, "grpcProxy": secrets }),
            json!({ "TLS": tls, "grpcProxy": {} }),
            json!({ "TLS": tls, "grpcProxy": { "clientSecret": "a" } }),
            json!({ "TLS": { "generated": {} }, "grpcProxy": secrets }),
            json!({ "grpcProxy": secrets }),
        ] {
            let problems = validate(&cluster(&spec));
            assert_eq!(fields(&problems), ["spec.grpcProxy"], "{spec}");
        }
    }

    #[test]
    fn grpc_proxy_service_name_must_be_valid_and_unused_by_cluster() {
        let named = |name: &str| json!({ "grpcProxy": { "serviceName": name } });
        assert!(is_valid(&named("etcd-for-clients")));
        for name in ["db", "db-client", "db-aaaaaaaaaa", "DB", "1", "a-", ""] {
            let problems = validate(&cluster(&named(name)));
            assert_eq!(fields(&problems), ["spec.grpcProxy.serviceName"], "{name}");
        }
    }

    #[test]
    fn grpc_proxy_prefix_must_be_nonempty_visible_ascii() {
        let with = |prefix: &str| json!({ "grpcProxy": { "namespacePrefix": prefix } });
        assert!(is_valid(&with("/team-a/")));
        for prefix in ["", "a b", "ü", "a\n"] {
            assert!(!is_valid(&with(prefix)), "{prefix:?}");
        }
    }
}
