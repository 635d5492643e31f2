//! Finds the other periodic EtcdBackups with the same path. Performs no I/O.
//!
//! Each EtcdBackup applies its retention rules to the backups whose manifest names it, and ignores the backups of the
//! other EtcdBackups. A backup has no owner if it has no manifest, or if its EtcdBackup was deleted or moved to another
//! path. Every EtcdBackup with that path applies its rules to a backup without an owner.

use std::collections::BTreeSet;

use api::EtcdBackup;
use api::storage::StorageSource;
use kube::ResourceExt;
use runtime::controller::Guarded;

/// The type of the store, the path, and the PersistentVolumeClaim if there is one. Endpoints are not compared, because
/// one store may have several endpoints.
fn path_of(backup: &EtcdBackup) -> Option<(&'static str, String, String)> {
    let spec = &backup.spec;
    let blocks = spec.blocks();
    let source = blocks
        .select(&spec.storage_type, "spec", "storageType")
        .ok()?;
    let volume = match &source {
        StorageSource::Pvc(pvc) => {
            format!(
                "{}/{}",
                backup.namespace().unwrap_or_default(),
                pvc.claim_name
            )
        }
        _ => String::new(),
    };
    Some((source.block(), volume, source.path().to_owned()))
}

/// The UIDs of the other periodic EtcdBackups with the same path. EtcdBackups that this release cannot parse are
/// included, because they may have that path.
pub(super) fn others<'a>(
    backup: &EtcdBackup,
    all: impl Iterator<Item = &'a Guarded<EtcdBackup>>,
) -> BTreeSet<String> {
    let Some(own_path) = path_of(backup) else {
        return BTreeSet::new();
    };
    all.filter(|other| other.uid() != backup.uid())
        .filter(|other| {
            other.0.as_ref().map_or(true, |other| {
                other.spec.is_periodic() && path_of(other).as_ref() == Some(&own_path)
            })
        })
        .filter_map(ResourceExt::uid)
        .collect()
}

#[cfg(test)]
mod tests {
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
        let found = |uid: &str, change: &dyn Fn(&mut Value)| -> Vec<String> {
            others(&backup(uid, |object| change(object)), all.iter())
                .into_iter()
                .collect()
        };
        assert_eq!(found("new", &|_| ()), ["elsewhere", "same"]);
        assert_eq!(found("same", &|_| ()), ["elsewhere"]);
        assert_eq!(found("new", &claim("a", "n")), ["claim"]);
        assert_eq!(found("new", &claim("c", "n")), Vec::<String>::new());
    }

    #[test]
    fn same_path_includes_suspended_but_not_moved_etcdbackups() {
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
        let found = others(&backup("new", |_| ()), all.iter());
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["suspended"]);
    }

    #[test]
    fn same_path_includes_etcdbackup_that_cannot_be_parsed() {
        let later = json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
            "metadata": { "name": "later", "namespace": "n", "uid": "later" },
            "spec": { "backupPolicy": "a word of a later release" },
        });
        let later: Guarded<EtcdBackup> = serde_json::from_value(later).unwrap();
        assert!(later.0.is_err());
        let found = others(&backup("new", |_| ()), std::iter::once(&later));
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["later"]);
    }
}
