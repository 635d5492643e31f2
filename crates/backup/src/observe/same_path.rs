//! Finds the other periodic EtcdBackups that store backups or copies at the same path. Performs no I/O.
//!
//! Retention counts and deletes the backups of this EtcdBackup, and ignores the backups of other EtcdBackups. A backup
//! without an owner is counted by every EtcdBackup with its path. A backup has no owner if it has no manifest, or if
//! its EtcdBackup was deleted or moved to another path.

use api::EtcdBackup;
use api::storage::StorageSource;
use kube::Resource;
use runtime::controller::Guarded;

/// The stores to which an EtcdBackup writes: the first store and the stores of its copies.
fn sources_of(backup: &EtcdBackup) -> impl Iterator<Item = StorageSource<'_>> {
    let spec = &backup.spec;
    let first = spec
        .blocks()
        .select(&spec.storage_type, "spec", "storageType");
    let copies = spec.copy_to.iter().filter_map(|copy| {
        let blocks = copy.blocks();
        let source = blocks.select(&copy.storage_type, "spec.copyTo", "storageType");
        source.ok()
    });
    first.ok().into_iter().chain(copies)
}

/// True if `other` is another periodic EtcdBackup that writes to `own`, a store of `backup`. Also true if this release
/// cannot parse `other`, because the paths of `other` are unknown in this case.
///
/// Several namespaces may use the same bucket, so the caller checks the EtcdBackups of all namespaces. The function
/// ignores the endpoint of the store in the spec, because a store may have several endpoints.
pub(super) fn writes_to(
    backup: &EtcdBackup,
    own: &StorageSource<'_>,
    other: &Guarded<EtcdBackup>,
) -> bool {
    if other.meta().uid == backup.metadata.uid {
        return false;
    }
    let Ok(other) = &other.0 else { return true };
    if !other.spec.is_periodic() {
        return false;
    }
    sources_of(other).any(|source| {
        let same_store = match (own, &source) {
            (StorageSource::Pvc(own), StorageSource::Pvc(claim)) => {
                other.metadata.namespace == backup.metadata.namespace
                    && claim.claim_name == own.claim_name
            }
            _ => source.block() == own.block(),
        };
        same_store && source.path() == own.path()
    })
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

    /// The UIDs of the EtcdBackups that write to the first store of `backup`.
    fn others(backup: &EtcdBackup, all: &[Guarded<EtcdBackup>]) -> Vec<String> {
        let own = sources_of(backup).next().unwrap();
        let others = all.iter().filter(|other| writes_to(backup, &own, other));
        others.filter_map(ResourceExt::uid).collect()
    }

    #[test]
    fn other_periodic_etcdbackups_with_same_path_are_found() {
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

    /// Invariant 13: an EtcdBackup must not delete the copies that another EtcdBackup stores at its path.
    #[test]
    fn copies_of_other_etcdbackup_at_same_path_are_found() {
        let copy = |path: &str| {
            let copy = json!([{ "name": "second", "storageType": "S3", "s3": { "path": path } }]);
            backup("copies", |object| {
                object["spec"]["s3"]["path"] = json!("first/etcd");
                object["spec"]["copyTo"] = copy;
            })
        };
        let all = [Guarded(Ok(copy("bucket/etcd")))];
        assert_eq!(others(&backup("new", |_| ()), &all), ["copies"]);
        let all = [Guarded(Ok(copy("bucket/etcd_v2")))];
        assert_eq!(others(&backup("new", |_| ()), &all), Vec::<String>::new());
        // `own` has a copy at the path of the first store of `new`, so both EtcdBackups write to this path.
        let own = copy("bucket/etcd");
        let to = sources_of(&own).nth(1).unwrap();
        assert!(writes_to(&own, &to, &Guarded(Ok(backup("new", |_| ())))));
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
