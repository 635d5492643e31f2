//! `EtcdMirror`: the continuous copy of keys from one etcd cluster to another.

mod check;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use check::validate;

use crate::backup::ClusterReference;
use crate::schema::{null_as_empty, object_name, readable_items};

/// Desired state of an EtcdMirror.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "etcd.database.coreos.com",
    version = "v1beta2",
    kind = "EtcdMirror",
    plural = "etcdmirrors",
    shortname = "etcdm",
    category = "etcds",
    namespaced,
    doc = "EtcdMirror describes the continuous copy of keys from one etcd cluster to another.",
    status = "EtcdMirrorStatus",
    derive = "PartialEq",
    printcolumn(
        name = "Source",
        type_ = "string",
        json_path = ".status.source",
        description = "Name of the source EtcdCluster, or host of the first endpoint"
    ),
    printcolumn(
        name = "Destination",
        type_ = "string",
        json_path = ".spec.destination.etcdCluster.name"
    ),
    printcolumn(
        name = "State",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        description = "Reason of the condition Ready: the progress or the problem"
    ),
    printcolumn(
        name = "Revision",
        type_ = "integer",
        json_path = ".status.sourceRevision",
        description = "Revision of the source that the destination contains"
    ),
    printcolumn(
        name = "Lag",
        type_ = "string",
        json_path = ".status.lag.text",
        description = "Revisions and seconds by which the destination is behind the source"
    ),
    printcolumn(
        name = "Prefix",
        type_ = "string",
        json_path = ".spec.source.prefix",
        priority = 1
    ),
    printcolumn(
        name = "Synced",
        type_ = "date",
        json_path = ".status.syncedTime",
        description = "The destination contains all earlier changes of the source",
        priority = 1
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct EtcdMirrorSpec {
    /// The cluster whose keys are copied.
    pub source: MirrorSource,
    /// The cluster to which the keys are copied. It cannot be changed.
    pub destination: MirrorDestination,
}

/// The source of a mirror.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "(has(self.etcdEndpoints) && self.etcdEndpoints.size() > 0) != has(self.etcdCluster)",
    "spec.source must name the cluster to copy: set either spec.source.etcdEndpoints with at least one URL or spec.source.etcdCluster.name"
))]
#[x_kube(validation = (
    "(has(self.prefix) ? self.prefix : '') == (has(oldSelf.prefix) ? oldSelf.prefix : '')",
    "spec.source.prefix cannot be changed: create another EtcdMirror"
))]
pub struct MirrorSource {
    /// Client URLs of the source. The operator uses one endpoint, and after a failure the next one. An EtcdMirror
    /// outside of the operator's namespace may name endpoints of an EtcdCluster in its own namespace. An administrator
    /// must grant all other endpoints.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(length(max = 32), inner(length(max = 2048)))]
    #[x_kube(validation = (
        "self.all(endpoint, endpoint.size() > 0)",
        "spec.source.etcdEndpoints must not contain an empty URL: use URLs such as http://example-client:2379"
    ))]
    pub etcd_endpoints: Vec<String>,
    /// The EtcdCluster to copy. The EtcdCluster determines the endpoints, the TLS settings and the credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd_cluster: Option<ClusterReference>,
    /// Name of the Secret with the client certificate for `etcdEndpoints`. Its keys are `etcd-client.crt`,
    /// `etcd-client.key` and `etcd-client-ca.crt`, or `tls.crt`, `tls.key` and `ca.crt`.
    #[serde(
        default,
        rename = "clientTLSSecret",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(schema_with = "object_name")]
    pub client_tls_secret: Option<String>,
    /// Name of the Secret with the keys `username` and `password` for `etcdEndpoints`. With this Secret, endpoints in
    /// other namespaces must be https URLs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name")]
    pub auth_secret: Option<String>,
    /// Only keys that begin with this text are copied. By default, all keys are copied. It cannot be changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub prefix: Option<String>,
}

/// The destination of a mirror.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "self == oldSelf",
    "spec.destination cannot be changed: create another EtcdMirror"
))]
pub struct MirrorDestination {
    /// The EtcdCluster to which the keys are copied.
    pub etcd_cluster: ClusterReference,
    /// Text that replaces `source.prefix` in the copied keys. The default is `source.prefix`. At the start, the
    /// destination must not contain keys that begin with this text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    #[x_kube(validation = (
        "!self.startsWith('etcd.database.coreos.com/mirror/')",
        "spec.destination.prefix must not begin with etcd.database.coreos.com/mirror/, which contains the records of mirrors: choose another prefix"
    ))]
    pub prefix: Option<String>,
}

/// Observed state of an EtcdMirror.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdMirrorStatus {
    /// Generation of the spec that the status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Name of the source EtcdCluster, or host of the first endpoint. For display only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Cluster ID of the source, in hexadecimal without leading zeros.
    #[serde(
        default,
        rename = "sourceClusterID",
        skip_serializing_if = "Option::is_none"
    )]
    pub source_cluster_id: Option<String>,
    /// Revision of the source that the destination contains. During a copy of all keys, the revision of the copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_revision: Option<i64>,
    /// Time at which the operator last checked the mirror.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check_time: Option<Time>,
    /// The destination contains all changes of the source before this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub synced_time: Option<Time>,
    /// How far the destination is behind the source. Not set during a copy of all keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag: Option<MirrorLag>,
    /// The running or the last copy of all keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<MirrorCopy>,
    /// Number of transactions of the source that were applied in several parts, because they exceed a limit of the
    /// destination. The operator counts since its start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split_transactions: Option<i64>,
    /// Conditions, one of each type.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// How far the destination is behind the source.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MirrorLag {
    /// Number of revisions of the source that the destination did not contain at the last check.
    pub revisions: i64,
    /// Age of `syncedTime` at the last check, in seconds.
    pub seconds: i64,
    /// The lag as text, such as `12 revisions, 3s`. For display only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// A copy of all keys.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MirrorCopy {
    /// Why all keys are copied: `Initial`, `Compacted`, `SourceReplaced` or `OutOfOrder`.
    pub reason: String,
    /// Whether the copy is complete.
    #[serde(default)]
    pub complete: bool,
    /// Number of keys of the source that were compared with the destination. The operator counts since its start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared_keys: Option<i64>,
    /// Number of keys that were written to the destination. The operator counts since its start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written_keys: Option<i64>,
    /// Number of keys that were deleted in the destination, because the source does not have them. The operator counts
    /// since its start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deleted_keys: Option<i64>,
}

impl MirrorLag {
    /// Creates a lag with its text.
    pub fn new(revisions: i64, seconds: i64) -> Self {
        let duration = crate::display::duration(seconds);
        Self {
            revisions,
            seconds,
            text: Some(format!("{revisions} revisions, {duration}")),
        }
    }
}

impl EtcdMirrorSpec {
    /// The prefix of the copied keys in the source. Empty for all keys.
    pub fn source_prefix(&self) -> &str {
        self.source.prefix.as_deref().unwrap_or_default()
    }

    /// The prefix of the copied keys in the destination.
    pub fn destination_prefix(&self) -> &str {
        let own = self.destination.prefix.as_deref();
        own.unwrap_or_else(|| self.source_prefix())
    }

    /// The name of the source EtcdCluster, or the host of the first endpoint. The text contains no user and no password
    /// of a URL.
    pub fn source_text(&self) -> Option<String> {
        if let Some(cluster) = &self.source.etcd_cluster {
            return Some(cluster.name.clone());
        }
        crate::display::host(self.source.etcd_endpoints.first()?)
    }
}

impl EtcdMirror {
    /// The conditions in the status. Empty without a status.
    pub fn conditions(&self) -> &[Condition] {
        self.status
            .as_ref()
            .map_or(&[], |status| status.conditions.as_slice())
    }
}
