//! Finds the other periodic EtcdBackups with the same path. Performs no I/O.
//!
//! Retention counts and deletes the backups of this EtcdBackup, and ignores the backups of other EtcdBackups. A backup
//! without an owner is counted by every EtcdBackup with its path. A backup has no owner if it has no manifest, or if
//! its EtcdBackup was deleted or moved to another path.

use api::EtcdBackup;
use api::storage::StorageSource;
use kube::Resource;
use runtime::controller::Guarded;

fn source_of(backup: &EtcdBackup) -> Option<StorageSource<'_>> {
    let blocks = backup.spec.blocks();
    let source = blocks.select(&backup.spec.storage_type, "spec", "storageType");
    source.ok()
}

/// True if `other` is another periodic EtcdBackup with the same path. Also true if this release cannot parse `other`,
/// because its path is then unknown.
///
/// Several namespaces may use the same bucket, so the caller checks the EtcdBackups of all namespaces. The function
/// ignores the endpoint in the spec, because a store may have several endpoints.
pub(super) fn shares_path(backup: &EtcdBackup, other: &Guarded<EtcdBackup>) -> bool {
    if other.meta().uid == backup.metadata.uid {
        return false;
    }
    let Some(own) = source_of(backup) else {
        return false;
    };
    let Ok(other) = &other.0 else { return true };
    if !other.spec.is_periodic() || other.spec.storage_type != backup.spec.storage_type {
        return false;
    }
    let Some(source) = source_of(other) else {
        return false;
    };
    let same_volume = match (&own, &source) {
        (StorageSource::Pvc(own), StorageSource::Pvc(claim)) => {
            other.metadata.namespace == backup.metadata.namespace
                && claim.claim_name == own.claim_name
        }
        _ => true,
    };
    same_volume && source.path() == own.path()
}

#[cfg(test)]
mod tests {
    use kube::ResourceExt;
    use serde_json::{Value, json};

    use super::*;

    fn backup(uid: &str, change: impl FnOnce(&mut Value)) -> EtcdBackup {
        let mut object = json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
            "metadata": { "name": uid, "namespace": "n", "uid": uid },
            "spec": { "etcdCluster": { "name": "c" }, "storageType": "S3", "s3": { "path": "bucket/etcd" },
                      "backupPolicy": { "schedule": "@daily" } },
        });
        change(&mut object);
        serde_json::from_value(object).unwrap()
    }

    /// The UIDs of the EtcdBackups with the path of `backup`.
    fn others(backup: &EtcdBackup, all: &[Guarded<EtcdBackup>]) -> Vec<String> {
        let others = all.iter().filter(|other| shares_path(backup, other));
        others.filter_map(ResourceExt::uid).collect()
    }

    #[test]
    fn other_periodic_etcdbackups_of_same_path_are_found() {
        let claim = |name: &str, namespace: &str| {
            let name = name.to_owned();
            let namespace = namespace.to_owned();
            move |object: &mut Value| {
                object["metadata"]["namespace"] = json!(namespace);
                object["spec"]["storageType"] = json!("PVC");
                object["spec"]["s3"] = Value::Null;
                object["spec"]["pvc"] = json!({ "claimName": name, "path": "etcd" });
            }
        };
        let all = [
            backup("same", |_| ()),
            backup("elsewhere", |object| {
                object["metadata"]["namespace"] = json!("m");
            }),
            backup("sibling", |object| {
                object["spec"]["s3"]["path"] = json!("bucket/etcd_v2");
            }),
            backup("once", |object| {
                object["spec"]["backupPolicy"] = Value::Null;
            }),
            backup("claim", claim("a", "n")),
            backup("other-claim", claim("b", "n")),
            backup("others-claim", claim("a", "m")),
        ];
        let all = all.map(|one| Guarded(Ok(one)));
        let found = |uid: &str, change: &dyn Fn(&mut Value)| {
            others(&backup(uid, |object| change(object)), &all)
        };
        assert_eq!(found("new", &|_| ()), ["same", "elsewhere"]);
        assert_eq!(found("same", &|_| ()), ["elsewhere"]);
        assert_eq!(found("new", &claim("a", "n")), ["claim"]);
        assert_eq!(found("new", &claim("c", "n")), Vec::<String>::new());
    }

    #[test]
    fn suspended_etcdbackup_shares_path_but_moved_etcdbackup_does_not() {
        let all = [
            backup("moved", |object| {
                object["spec"]["s3"]["path"] = json!("bucket/elsewhere");
                object["status"] = json!({ "succeeded": true, "location": "s3://bucket/etcd_v1_2026-01-01-00:00:00" });
            }),
            backup("suspended", |object| {
                object["spec"]["backupPolicy"]["suspend"] = json!(true);
            }),
        ];
        let all = all.map(|one| Guarded(Ok(one)));
        assert_eq!(others(&backup("new", |_| ()), &all), ["suspended"]);
    }

    #[test]
    fn unparsable_etcdbackup_counts_as_sharing_path() {
        let later = json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
            "metadata": { "name": "later", "namespace": "n", "uid": "later" },
            "spec": { "backupPolicy": "a word of a later release" },
        });
        let later: Guarded<EtcdBackup> = serde_json::from_value(later).unwrap();
        assert!(later.0.is_err());
        assert_eq!(others(&backup("new", |_| ()), &[later]), ["later"]);
    }
}
