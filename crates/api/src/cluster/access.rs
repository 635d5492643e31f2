//! Who may reach a cluster: etcd's own authentication, and the network.

use k8s_openapi::api::networking::v1::NetworkPolicyPeer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema::{embedded_list, null_as_empty, object_name};

/// The user etcd asks for when its authentication is turned on.
pub const ROOT_USER: &str = "root";

/// Credentials for a cluster with authentication.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Auth {
    /// Name of the Secret with the keys `username` and `password` (type `kubernetes.io/basic-auth`) of an etcd user
    /// with the role `root`.
    #[schemars(schema_with = "object_name")]
    pub secret: String,
    /// `true`: authentication is turned on, with the Secret's user, which must be `root`, and its password follows the
    /// Secret. `false`: it is turned off again, where the operator had turned it on. Where it is not given, the
    /// operator leaves etcd's users and switch alone and logs in if it has to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

/// The NetworkPolicy of the members: who may connect to them. Members may always connect to each other, and the
/// operators to them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkAccess {
    /// Whether there is one; default true.
    #[serde(default = "enabled")]
    pub enabled: bool,
    /// Who may connect to the client port, as in a NetworkPolicy's `from`. Where it is not given, every pod of the
    /// cluster's own namespace may.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(schema_with = "embedded_list::<NetworkPolicyPeer>")]
    pub clients: Vec<NetworkPolicyPeer>,
    /// Who may connect to the port with health and metrics, which holds no data. Where it is not given, everybody may.
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
