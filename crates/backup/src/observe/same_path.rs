//! The other EtcdBackups that write numbered backups to the same path. Pure.
//!
//! Each applies its own rules: what a neighbour has stored, as its manifest says, neither counts nor goes. What an
//! EtcdBackup has stored that is gone or has moved to another path, and what has no manifest, belongs to whoever is there.

use std::collections::BTreeSet;

use api::EtcdBackup;
use api::storage::StorageSource;
use kube::ResourceExt;
use runtime::controller::Guarded;

/// A path as the names of backups begin, and what it lies in. Two endpoints may be one store.
fn place(backup: &EtcdBackup) -> Option<(&'static str, String, String)> {
    let spec = &backup.spec;
    let blocks = spec.blocks();
    let source = blocks
        .select(&spec.storage_type, "spec", "storageType")
        .ok()?;
    let within = match &source {
        StorageSource::Pvc(pvc) => {
            format!(
                "{}/{}",
                backup.namespace().unwrap_or_default(),
                pvc.claim_name
            )
        }
        _ => String::new(),
    };
    Some((source.block(), within, source.path().to_owned()))
}

/// The UIDs of those that make backups again and again at the same place. One that this release cannot read may.
pub(super) fn others<'a>(
    backup: &EtcdBackup,
    all: impl Iterator<Item = &'a Guarded<EtcdBackup>>,
) -> BTreeSet<String> {
    let Some(here) = place(backup) else {
        return BTreeSet::new();
    };
    all.filter(|other| other.uid() != backup.uid())
        .filter(|other| {
            other.0.as_ref().map_or(true, |other| {
                other.spec.is_periodic() && place(other).as_ref() == Some(&here)
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
    fn others_are_those_that_number_their_backups_at_the_same_path() {
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
    fn one_that_has_moved_is_no_neighbour_and_one_that_is_suspended_is() {
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
    fn one_that_cannot_be_read_exists_and_may_be_a_neighbour() {
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
