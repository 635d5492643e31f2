//! `EtcdRole`: a role of etcd's authentication.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use super::{AccessDeletionPolicy, OwnedStatus};
use crate::backup::ClusterReference;
use crate::schema::{is_false, null_as_empty, readable_items};
use crate::text::text_enum;

text_enum! {
    /// The access that a permission grants.
    PermissionAccess {
        /// Reading and watching keys.
        Read = "Read",
        /// Writing and deleting keys.
        Write = "Write",
        /// Reading, watching, writing and deleting keys.
        ReadWrite = "ReadWrite",
    }
}

/// Desired state of an EtcdRole.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "etcd.database.coreos.com",
    version = "v1beta2",
    kind = "EtcdRole",
    plural = "etcdroles",
    category = "etcds",
    namespaced,
    doc = "EtcdRole is a role of etcd's authentication: a set of permissions on keys.",
    status = "EtcdRoleStatus",
    derive = "PartialEq",
    printcolumn(
        name = "Cluster",
        type_ = "string",
        json_path = ".spec.etcdCluster.name"
    ),
    printcolumn(
        name = "Role",
        type_ = "string",
        json_path = ".status.owned.name",
        description = "Name of the role in etcd"
    ),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "Whether the role in etcd matches the spec"
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
    validation = Rule::new("(has(self.spec.roleName) ? self.spec.roleName : self.metadata.name) != 'root'")
        .message("the role root belongs to the operator: choose another name in spec.roleName")
)]
#[serde(rename_all = "camelCase")]
pub struct EtcdRoleSpec {
    /// An EtcdCluster with `spec.auth`, in the namespace of the EtcdRole.
    pub etcd_cluster: ClusterReference,
    /// Name of the role in etcd. The default is the name of the EtcdRole. The operator does not rename roles, so do
    /// not change this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub role_name: Option<String>,
    /// The permissions of the role. Without permissions, the role permits nothing.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(length(max = 128))]
    pub permissions: Vec<Permission>,
    /// If true, the operator takes over a role of this name that already exists in etcd, and replaces its permissions.
    /// If false, the operator reports such a role, and does not change it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub adopt: bool,
    /// What happens to the role in etcd after the deletion of the EtcdRole: `Delete` (default) or `Retain`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deletion_policy: Option<AccessDeletionPolicy>,
}

/// Access to one key, to all keys with a prefix, or to a range of keys. Exactly one of `key`, `prefix` and `fromKey` is
/// set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "(has(self.key) ? 1 : 0) + (has(self.prefix) ? 1 : 0) + (has(self.fromKey) ? 1 : 0) == 1",
    "a permission needs exactly one of key, prefix and fromKey: set one of them and remove the others"
))]
#[x_kube(validation = (
    "!has(self.rangeEnd) || (has(self.key) && self.key < self.rangeEnd)",
    "rangeEnd must be greater than key, which begins the range: set both in this order, or remove rangeEnd"
))]
pub struct Permission {
    /// `Read`, `Write` or `ReadWrite`.
    pub access: PermissionAccess,
    /// One key, or the first key of a range that ends before `rangeEnd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub key: Option<String>,
    /// End of the range that begins with `key`. The range does not contain this key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub range_end: Option<String>,
    /// All keys with this prefix. An empty prefix means all keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub prefix: Option<String>,
    /// This key and all greater keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub from_key: Option<String>,
}

impl Permission {
    /// The key and the range end as etcd stores them. A range end of one zero byte means all keys from `key` on, and an
    /// empty range end means one key. `None` if not exactly one of `key`, `prefix` and `fromKey` is set, or if
    /// `rangeEnd` is set without `key`.
    pub fn range(&self) -> Option<(Vec<u8>, Vec<u8>)> {
        match (&self.key, &self.prefix, &self.from_key, &self.range_end) {
            (Some(key), None, None, end) => {
                let end = end.as_deref().unwrap_or_default();
                Some((key.as_bytes().to_vec(), end.as_bytes().to_vec()))
            }
            (None, Some(prefix), None, None) => Some(prefix_range(prefix.as_bytes())),
            (None, None, Some(key), None) => Some((key.as_bytes().to_vec(), vec![0])),
            _ => None,
        }
    }
}

/// The range of all keys with this prefix, as etcd's client computes it. The range end is the prefix up to its last
/// byte below 0xff, with this byte incremented.
fn prefix_range(prefix: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < 0xff {
            end.push(last + 1);
            return (prefix.to_vec(), end);
        }
    }
    // No byte of the prefix is below 0xff, so the range has no upper bound. etcd expects a zero byte as the end of such
    // a range. For an empty prefix, the range starts at the first possible key, which is also a zero byte.
    let key = if prefix.is_empty() {
        vec![0]
    } else {
        prefix.to_vec()
    };
    (key, vec![0])
}

/// Observed state of an EtcdRole.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdRoleStatus {
    /// Generation of the spec that the operator has processed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The role in etcd that this EtcdRole owns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owned: Option<OwnedStatus>,
    /// Conditions, one of each type.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

impl EtcdRole {
    /// The name of the role in etcd.
    pub fn etcd_name(&self) -> &str {
        let own = self.metadata.name.as_deref().unwrap_or_default();
        self.spec.role_name.as_deref().unwrap_or(own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(permission: &str) -> Option<(Vec<u8>, Vec<u8>)> {
        let permission: Permission = serde_json::from_str(permission).unwrap();
        permission.range()
    }

    /// The expected values are those of `clientv3.GetPrefixRangeEnd` and `clientv3.WithFromKey` of etcd.
    #[test]
    fn permission_ranges_equal_ranges_of_etcdctl() {
        let bytes = |key: &[u8], end: &[u8]| Some((key.to_vec(), end.to_vec()));
        for (permission, expected) in [
            (r#"{"access":"Read","key":"a"}"#, bytes(b"a", b"")),
            (
                r#"{"access":"Read","key":"a","rangeEnd":"c"}"#,
                bytes(b"a", b"c"),
            ),
            (
                r#"{"access":"Read","prefix":"/app/"}"#,
                bytes(b"/app/", b"/app0"),
            ),
            (r#"{"access":"Read","prefix":""}"#, bytes(b"\0", b"\0")),
            (r#"{"access":"Read","fromKey":"m"}"#, bytes(b"m", b"\0")),
        ] {
            assert_eq!(range(permission), expected, "{permission}");
        }
        assert_eq!(prefix_range(b"a\xff"), (b"a\xff".to_vec(), b"b".to_vec()));
        assert_eq!(
            prefix_range(b"\xff\xff"),
            (b"\xff\xff".to_vec(), b"\0".to_vec())
        );
    }

    #[test]
    fn permission_without_exactly_one_selector_has_no_range() {
        for permission in [
            r#"{"access":"Read"}"#,
            r#"{"access":"Read","key":"a","prefix":"b"}"#,
            r#"{"access":"Read","prefix":"a","rangeEnd":"b"}"#,
            r#"{"access":"Read","fromKey":"a","rangeEnd":"b"}"#,
        ] {
            assert_eq!(range(permission), None, "{permission}");
        }
    }
}
