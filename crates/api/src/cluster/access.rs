//! Access to a cluster: etcd's authentication and the NetworkPolicy.

use k8s_openapi::api::networking::v1::NetworkPolicyPeer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema::{embedded_list, null_as_empty, object_name};

/// The name of the user that must exist before etcd can enable authentication.
pub const ROOT_USER: &str = "root";

/// Credentials for a cluster with authentication.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Auth {
    /// Name of the Secret with the keys `username` and `password` (type `kubernetes.io/basic-auth`) of an etcd user
    /// with the role `root`.
    #[schemars(schema_with = "object_name")]
    pub secret: String,
    /// `true`: the operator enables authentication with the user of the Secret, which must be `root`, and
    /// keeps the password equal to the Secret. `false`: the operator disables authentication that it enabled.
    /// If not set, the operator does not change users or authentication, and logs in if etcd requires it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

/// NetworkPolicy of the members. Members may always connect to each other, and the operators may always
/// connect to members.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkAccess {
    /// Whether the operator creates the NetworkPolicy. Default true.
    #[serde(default = "enabled")]
    pub enabled: bool,
    /// Peers that may connect to the client port, as in a NetworkPolicy's `from`. If not set, every pod in
    /// the namespace of the cluster may connect.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(schema_with = "embedded_list::<NetworkPolicyPeer>")]
    pub clients: Vec<NetworkPolicyPeer>,
    /// Peers that may connect to the port for health and metrics, which exposes no data. If not set, every peer
    /// may connect.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(schema_with = "embedded_list::<NetworkPolicyPeer>")]
    pub metrics: Vec<NetworkPolicyPeer>,
}

impl Default for NetworkAccess {
    fn default() -> Self {
        Self {
            enabled: enabled(),
            clients: Vec::new(),
            metrics: Vec::new(),
        }
    }
}

fn enabled() -> bool {
    true
}
