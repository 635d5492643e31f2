//! Selects the changes of EtcdClusters that trigger reconciles of EtcdRoles and EtcdUsers.
//!
//! The status of an EtcdCluster changes often, for example the size of its database. Without this selection, each
//! change would cause a read from etcd for every role and user.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, PoisonError};

use api::EtcdCluster;
use api::conditions::{ConditionType, is_true};
use api::names::ANNOTATION_RESTORE;
use kube::ResourceExt;
use runtime::controller::Guarded;
use serde_json::Value;

/// Hashes of the object in the last watch event of each EtcdCluster, by the UID of the EtcdCluster.
#[derive(Default)]
pub(crate) struct ClusterChanges {
    last: Mutex<HashMap<String, Hashes>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Hashes {
    /// Hash of the whole object without its resourceVersion.
    whole: u64,
    /// Hash of the fields on which roles and users depend.
    relevant: u64,
}

impl ClusterChanges {
    /// Whether the event about the EtcdCluster must trigger reconciles.
    ///
    /// The object in a deletion event equals the object in the previous event, except for its resourceVersion. An event
    /// with an equal object is therefore relevant.
    pub(crate) fn is_relevant(&self, event: &Guarded<EtcdCluster>) -> bool {
        let Ok(cluster) = &event.0 else {
            return true;
        };
        let hashes = Hashes {
            whole: whole(cluster),
            relevant: relevant(cluster),
        };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let uid = cluster.uid().unwrap_or_default();
        match last.insert(uid.clone(), hashes) {
            Some(before) if before == hashes => {
                last.remove(&uid);
                true
            }
            Some(before) => before.relevant != hashes.relevant,
            None => true,
        }
    }
}

fn whole(cluster: &EtcdCluster) -> u64 {
    let mut value = serde_json::to_value(cluster).unwrap_or_default();
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("resourceVersion");
    }
    hash(&value.to_string())
}

fn relevant(cluster: &EtcdCluster) -> u64 {
    let status = cluster.status.as_ref();
    hash(&(
        cluster.metadata.generation,
        cluster.metadata.deletion_timestamp.is_some(),
        cluster.annotations().get(ANNOTATION_RESTORE),
        status.map(|status| (&status.cluster_id, &status.current_version)),
        is_true(cluster.conditions(), &ConditionType::Available),
    ))
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(version: &str, change: &Value) -> Guarded<EtcdCluster> {
        let mut object = json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "main", "namespace": "prod", "uid": "1", "generation": 1,
                          "resourceVersion": version },
            "spec": { "size": 3 }, "status": { "clusterID": "aa", "size": 1 },
        });
        for (pointer, value) in change.as_object().unwrap() {
            let (parent, field) = pointer.rsplit_once('/').unwrap();
            object.pointer_mut(parent).unwrap()[field] = value.clone();
        }
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn only_relevant_changes_of_etcdcluster_trigger_reconcile() {
        let changes = ClusterChanges::default();
        let size = json!({ "/status/size": 3 });
        let spec = json!({ "/status/size": 3, "/metadata/generation": 2 });
        let restored = json!({ "/status/clusterID": "bb" });
        for (version, change, expected) in [
            ("1", &json!({}), true),
            ("2", &size, false),
            ("3", &spec, true),
            ("4", &restored, true),
            // The deletion event: the object differs from the object in the previous event only in its resourceVersion.
            ("5", &restored, true),
            // An EtcdCluster that is created again after its deletion.
            ("6", &json!({}), true),
        ] {
            let is_relevant = changes.is_relevant(&event(version, change));
            assert_eq!(is_relevant, expected, "{version}");
        }
    }
}
