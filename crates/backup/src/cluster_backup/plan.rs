//! Plans the EtcdBackup that belongs to an EtcdCluster, and computes the cluster's `status.lastBackup`. Performs no
//! I/O.

use api::backup::{ClusterReference, EtcdBackupSpec};
use api::cluster::{ClusterBackup, LastBackup};
use api::names::{ANNOTATION_SCOPE, APP, LABEL_APP, LABEL_CLUSTER};
use api::{EtcdBackup, EtcdCluster};
use kube::{Resource, ResourceExt};
use runtime::Notice;
use runtime::apply::is_owned;

use crate::reason::Reason;

/// What to do with the EtcdBackup of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Action {
    /// No change, because the EtcdBackup is as desired or not needed.
    Nothing,
    /// Create or change the EtcdBackup.
    Apply(Box<EtcdBackup>),
    /// Delete the EtcdBackup, because `spec.backup` was removed.
    Delete(Box<EtcdBackup>),
    /// No change, because an EtcdBackup of another owner has the cluster's name.
    Taken,
}

/// Plans the change for an EtcdCluster. `existing` is the EtcdBackup with the cluster's name.
pub(super) fn plan(cluster: &EtcdCluster, existing: Option<&EtcdBackup>) -> Action {
    if cluster.meta().deletion_timestamp.is_some() {
        return Action::Nothing;
    }
    let uid = cluster.meta().uid.as_deref();
    let owned = |backup: &EtcdBackup| uid.is_some_and(|uid| is_owned(&backup.metadata, uid));
    match (&cluster.spec.backup, existing) {
        (None, Some(backup)) if owned(backup) && backup.meta().deletion_timestamp.is_none() => {
            Action::Delete(Box::new(backup.clone()))
        }
        (None, _) => Action::Nothing,
        (Some(_), Some(backup)) if !owned(backup) => Action::Taken,
        (Some(settings), existing) => {
            let desired = desired(cluster, settings);
            let same = existing.is_some_and(|backup| {
                backup.spec == desired.spec
                    && backup.annotations().get(ANNOTATION_SCOPE)
                        == desired.annotations().get(ANNOTATION_SCOPE)
            });
            if same {
                Action::Nothing
            } else {
                Action::Apply(Box::new(desired))
            }
        }
    }
}

fn desired(cluster: &EtcdCluster, settings: &ClusterBackup) -> EtcdBackup {
    let name = cluster.name_any();
    let mut policy = settings.backup_policy.clone();
    // A hibernated cluster has no running members, so its backups are suspended.
    policy.suspend |= settings.suspend || cluster.spec.hibernate;
    let spec = EtcdBackupSpec {
        etcd_endpoints: Vec::new(),
        etcd_cluster: Some(ClusterReference { name: name.clone() }),
        client_tls_secret: None,
        auth_secret: None,
        backup_policy: Some(policy),
        storage_type: settings.storage_type.clone(),
        s3: settings.s3.clone(),
        abs: settings.abs.clone(),
        gcs: settings.gcs.clone(),
        oss: settings.oss.clone(),
        pvc: settings.pvc.clone(),
        local: settings.local.clone(),
        compression: settings.compression.clone(),
        verification: settings.verification.clone(),
        ttl_seconds_after_finished: None,
        deletion_policy: None,
    };
    let mut backup = EtcdBackup::new(&name, spec);
    backup.metadata.namespace = cluster.namespace();
    backup.metadata.owner_references = cluster.controller_owner_ref(&()).map(|owner| vec![owner]);
    let labels = [(LABEL_APP, APP), (LABEL_CLUSTER, name.as_str())];
    backup.metadata.labels = Some(
        labels
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
    );
    let scope = cluster.annotations().get(ANNOTATION_SCOPE);
    backup.metadata.annotations =
        scope.map(|scope| [(ANNOTATION_SCOPE.to_owned(), scope.clone())].into());
    backup
}

/// The newest backup of the cluster, from the status of all EtcdBackups and the current status of the cluster.
pub(super) fn last_backup(cluster: &EtcdCluster, backups: &[&EtcdBackup]) -> Option<LastBackup> {
    let name = cluster.name_any();
    let of_cluster = backups.iter().filter(|backup| {
        let reference = backup.spec.etcd_cluster.as_ref();
        reference.is_some_and(|reference| reference.name == name)
    });
    let reported = of_cluster.filter_map(|backup| {
        let status = backup.status.as_ref()?;
        Some(LastBackup {
            name: backup.name_any(),
            time: Some(status.last_success_date.clone()?),
            revision: status.etcd_revision,
            location: status.location.clone(),
        })
    });
    let recorded = cluster
        .status
        .as_ref()
        .and_then(|status| status.last_backup.clone());
    reported
        .chain(recorded)
        .max_by_key(|last| last.time.as_ref().map(|time| time.0))
}

/// The Event for an EtcdBackup of another owner with the cluster's name.
pub(super) fn taken(cluster: &EtcdCluster) -> Notice {
    let name = cluster.name_any();
    Notice::warning(
        Reason::NameTaken.as_str(),
        "Backup",
        format!(
            "spec.backup is not in effect: an EtcdBackup {name} exists that does not belong to this EtcdCluster; \
             delete or rename it"
        ),
    )
}

#[cfg(test)]
mod tests {
    use api::cluster::EtcdClusterStatus;
    use serde_json::{Value, json};

    use super::*;

    fn cluster(change: impl FnOnce(&mut Value)) -> EtcdCluster {
        let mut object = json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2",
            "kind": "EtcdCluster",
            "metadata": { "name": "main", "namespace": "prod", "uid": "1" },
            "spec": { "backup": {
                "backupPolicy": { "schedule": "@hourly", "maxBackups": 3 },
                "storageType": "S3",
                "s3": { "path": "bucket/main", "awsSecret": "aws" },
                "compression": "zstd",
            }},
        });
        change(&mut object);
        serde_json::from_value(object).unwrap()
    }

    fn created(cluster: &EtcdCluster) -> EtcdBackup {
        match plan(cluster, None) {
            Action::Apply(backup) => *backup,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn cluster_spec_creates_etcdbackup_owned_by_cluster() {
        let cluster = cluster(|object| {
            object["metadata"]["annotations"] = json!({ ANNOTATION_SCOPE: "clusterwide" });
        });
        let backup = created(&cluster);
        assert_eq!(backup.name_any(), "main");
        assert_eq!(backup.owner_references()[0].uid, "1");
        assert_eq!(backup.annotations()[ANNOTATION_SCOPE], "clusterwide");
        assert_eq!(backup.spec.etcd_cluster.as_ref().unwrap().name, "main");
        assert_eq!(
            backup.spec.deletion_policy, None,
            "stored backups outlive the cluster"
        );
        assert_eq!(api::backup::validate(&backup), []);
        assert_eq!(plan(&cluster, Some(&backup)), Action::Nothing);
    }

    #[test]
    fn etcdbackup_follows_cluster_spec_and_is_suspended_in_hibernation() {
        let backup = created(&cluster(|_| ()));
        for (field, value) in [
            ("/spec/backup/backupPolicy/maxBackups", json!(9)),
            ("/spec/backup/s3/path", json!("bucket/other")),
        ] {
            let changed = cluster(|object| *object.pointer_mut(field).unwrap() = value);
            assert!(
                matches!(plan(&changed, Some(&backup)), Action::Apply(_)),
                "{field}"
            );
        }
        for field in ["suspend", "hibernate"] {
            let suspended = cluster(|object| match field {
                "suspend" => object["spec"]["backup"]["suspend"] = json!(true),
                _ => object["spec"]["hibernate"] = json!(true),
            });
            let policy = created(&suspended).spec.backup_policy.unwrap();
            assert!(policy.suspend, "{field}");
        }
    }

    #[test]
    fn only_etcdbackup_owned_by_cluster_is_deleted() {
        let backup = created(&cluster(|_| ()));
        let without = cluster(|object| object["spec"] = json!({}));
        assert!(matches!(plan(&without, Some(&backup)), Action::Delete(_)));
        let mut unowned = backup.clone();
        unowned.metadata.owner_references = None;
        assert_eq!(plan(&without, Some(&unowned)), Action::Nothing);
        assert_eq!(plan(&cluster(|_| ()), Some(&unowned)), Action::Taken);
        // The name is also taken if the owner of the EtcdBackup is a former EtcdCluster of the same name.
        let mut former = backup;
        former.metadata.owner_references.as_mut().unwrap()[0].uid = "0".to_owned();
        assert_eq!(plan(&cluster(|_| ()), Some(&former)), Action::Taken);
        let deleted = cluster(|object| {
            object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        });
        assert_eq!(plan(&deleted, None), Action::Nothing);
    }

    #[test]
    fn cluster_status_reports_newest_backup_of_all_its_etcdbackups() {
        let backup = |name: &str, of: &str, date: Option<&str>| -> EtcdBackup {
            serde_json::from_value(json!({
                "apiVersion": "etcd.database.coreos.com/v1beta2",
                "kind": "EtcdBackup",
                "metadata": { "name": name, "namespace": "prod" },
                "spec": { "etcdCluster": { "name": of }, "storageType": "S3", "s3": { "path": "b/k" } },
                "status": { "succeeded": true, "lastSuccessDate": date, "etcdRevision": 7, "location": "s3://b/k" },
            }))
            .unwrap()
        };
        let all = [
            backup("old", "main", Some("2026-01-01T00:00:00Z")),
            backup("new", "main", Some("2026-01-02T00:00:00Z")),
            backup("never", "main", None),
            backup("other", "another", Some("2026-01-03T00:00:00Z")),
        ];
        let mut cluster = cluster(|_| ());
        let last = last_backup(&cluster, &all.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!((last.name.as_str(), last.revision), ("new", Some(7)));
        // After the EtcdBackup was deleted, the record in the cluster's status stays.
        cluster.status = Some(EtcdClusterStatus {
            last_backup: Some(last.clone()),
            ..EtcdClusterStatus::default()
        });
        assert_eq!(last_backup(&cluster, &[&all[0]]), Some(last));
        assert_eq!(last_backup(&self::cluster(|_| ()), &[&all[3]]), None);
    }
}
