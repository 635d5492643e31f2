//! `EtcdUser`: a user of etcd's authentication.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{AccessDeletionPolicy, OwnedStatus};
use crate::backup::ClusterReference;
use crate::schema::{is_false, null_as_empty, object_name, readable_items};

/// Desired state of an EtcdUser.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "etcd.database.coreos.com",
    version = "v1beta2",
    kind = "EtcdUser",
    plural = "etcdusers",
    category = "etcds",
    namespaced,
    doc = "EtcdUser is a user of etcd's authentication.",
    status = "EtcdUserStatus",
    derive = "PartialEq",
    printcolumn(
        name = "Cluster",
        type_ = "string",
        json_path = ".spec.etcdCluster.name"
    ),
    printcolumn(
        name = "User",
        type_ = "string",
        json_path = ".status.owned.name",
        description = "Name of the user in etcd"
    ),
    printcolumn(name = "Roles", type_ = "string", json_path = ".spec.roles"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "Whether the user in etcd matches the spec"
    ),
    printcolumn(
        name = "State",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        description = "Reason of the condition Ready: the progress or the problem"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    ),
    validation = Rule::new("!((has(self.spec.userName) ? self.spec.userName : self.metadata.name) in ['root', 'etcd-operator'])")
        .message("the users root and etcd-operator belong to the operator: choose another name in spec.userName")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "has(self.password) != (has(self.clientCertificate) && self.clientCertificate)",
    "a user has either a password or a client certificate: set spec.password or spec.clientCertificate, not both"
))]
pub struct EtcdUserSpec {
    /// An EtcdCluster with `spec.auth`, in the namespace of the EtcdUser.
    pub etcd_cluster: ClusterReference,
    /// Name of the user in etcd. The default is the name of the EtcdUser. With `clientCertificate`, it is the common
    /// name of the certificate. The operator does not rename users, so do not change this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub user_name: Option<String>,
    /// Names of the EtcdRoles that the user has. They belong to the same EtcdCluster. The operator revokes all other
    /// roles of the user.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(length(max = 64), inner(length(min = 1, max = 253)))]
    pub roles: Vec<String>,
    /// The password. If the Secret changes, the operator changes the password in etcd within a minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<PasswordSource>,
    /// If true, the user has no password, and authenticates with a client certificate whose common name is the name of
    /// the user. The EtcdCluster needs TLS for clients.
    #[serde(default, skip_serializing_if = "is_false")]
    pub client_certificate: bool,
    /// If true, the operator takes over a user of this name that already exists in etcd, and replaces its roles and
    /// its password. If false, the operator reports such a user, and does not change it. A user with the role `root`
    /// is never taken over.
    #[serde(default, skip_serializing_if = "is_false")]
    pub adopt: bool,
    /// What happens to the user in etcd after the deletion of the EtcdUser: `Delete` (default) or `Retain`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deletion_policy: Option<AccessDeletionPolicy>,
}

/// A key of a Secret in the namespace of the EtcdUser.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PasswordSource {
    /// Name of the Secret.
    #[schemars(schema_with = "object_name")]
    pub secret: String,
    /// Key of the password in the Secret. The default is `password`.
    #[serde(default = "default_key")]
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

fn default_key() -> String {
    "password".to_owned()
}

/// Observed state of an EtcdUser.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdUserStatus {
    /// Generation of the spec that the operator has processed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The user in etcd that this EtcdUser owns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owned: Option<OwnedStatus>,
    /// The version of the Secret whose password etcd has accepted last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<PasswordStatus>,
    /// Time at which the operator last checked how the user authenticates. While authentication is disabled, the
    /// operator cannot check it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checked: Option<Time>,
    /// Conditions, one of each type.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// A version of a key of a Secret. It contains no part of the password.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PasswordStatus {
    /// Name of the Secret.
    #[serde(default)]
    pub secret: String,
    /// Key in the Secret.
    #[serde(default)]
    pub key: String,
    /// UID of the Secret.
    #[serde(default)]
    pub uid: String,
    /// resourceVersion of the Secret.
    #[serde(default)]
    pub resource_version: String,
}

impl EtcdUser {
    /// The name of the user in etcd.
    pub fn etcd_name(&self) -> &str {
        let own = self.metadata.name.as_deref().unwrap_or_default();
        self.spec.user_name.as_deref().unwrap_or(own)
    }
}
