//! Access to a cluster: authentication and the NetworkPolicy.

use k8s_openapi::api::networking::v1::NetworkPolicyPeer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema::{embedded_list, null_as_empty, object_name};

/// The user that must exist before etcd can enable authentication.
pub const ROOT_USER: &str = "root";

/// Credentials of the operators for a cluster with authentication.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Auth {
    /// Name of a Secret of the type `kubernetes.io/basic-auth`. Its keys `username` and `password` are those of an
    /// etcd user with the role `root`.
    #[schemars(schema_with = "object_name")]
    pub secret: String,
    /// `true`: the operator enables authentication, and changes the password in etcd when the Secret changes. The user
    /// must be `root`. `false`: the operator disables authentication that it has enabled. If not set, the operator
    /// only logs in, and does not change authentication.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

/// NetworkPolicy of the members. It always allows connections between members, and from the operators to members.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkAccess {
    /// If false, the operator creates no NetworkPolicy.
    #[serde(default = "enabled")]
    pub enabled: bool,
    /// Peers that may connect to the client port, in the format of `from` of a NetworkPolicy. If not set, all pods in
    /// the namespace may connect.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(schema_with = "embedded_list::<NetworkPolicyPeer>")]
    pub clients: Vec<NetworkPolicyPeer>,
    /// Peers that may connect to the port for health and metrics, which exposes no keys. If not set, all peers may
    /// connect.
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
