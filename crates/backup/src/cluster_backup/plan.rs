//! Plans the EtcdBackup that belongs to an EtcdCluster, and computes the cluster's `status.lastBackup` and
//! `status.backupForChanges`. Performs no I/O.

use api::backup::{ClusterReference, EtcdBackupSpec};
use api::cluster::{ClusterBackup, LastBackup};
use api::names::{ANNOTATION_BACKUP_REQUESTED, ANNOTATION_SCOPE, APP, LABEL_APP, LABEL_CLUSTER};
use api::{EtcdBackup, EtcdCluster};
use kube::{Resource, ResourceExt};
use runtime::Notice;
use runtime::apply::is_owned;

use crate::reason::Reason;

/// The planned change of the EtcdBackup with the name of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Action {
    /// No change: the EtcdBackup is as desired, or `spec.backup` is not set.
    Nothing,
    /// Create or change the EtcdBackup.
    Apply(Box<EtcdBackup>),
    /// Delete the EtcdBackup, because `spec.backup` was removed.
    Delete(Box<EtcdBackup>),
    /// No change: the cluster does not own the EtcdBackup with its name.
    Taken,
}

/// Plans the change for an EtcdCluster. `existing` is the EtcdBackup with the name of the EtcdCluster.
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
            let requested = desired.annotations().get(ANNOTATION_BACKUP_REQUESTED);
            let same = existing.is_some_and(|backup| {
                let annotations = backup.annotations();
                // If the EtcdCluster requests no backup, the annotation of an earlier request on the EtcdBackup is not
                // a difference.
                let has_request = requested.is_none()
                    || annotations.get(ANNOTATION_BACKUP_REQUESTED) == requested;
                backup.spec == desired.spec
                    && annotations.get(ANNOTATION_SCOPE)
                        == desired.annotations().get(ANNOTATION_SCOPE)
                    && has_request
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
        encryption: settings.encryption.clone(),
        verification: settings.verification.clone(),
        copy_to: settings.copy_to.clone(),
        continuous: None,
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
    let scope = cluster.annotations().get(ANNOTATION_SCOPE).cloned();
    let annotations = [
        (ANNOTATION_SCOPE, scope),
        (ANNOTATION_BACKUP_REQUESTED, requested(cluster)),
    ];
    let annotations = annotations.into_iter();
    let annotations = annotations.filter_map(|(key, value)| Some((key.to_owned(), value?)));
    backup.metadata.annotations = Some(annotations.collect());
    backup
}

/// The value of the annotation that requests a backup: the time since which a change of the cluster waits for a
/// backup. `None` if no change waits.
fn requested(cluster: &EtcdCluster) -> Option<String> {
    let status = cluster.status.as_ref()?;
    let (record, id) = (status.before_change.as_ref()?, status.cluster_id.as_ref()?);
    let waits = record.requests_backup(id);
    waits.then(|| record.start_time.0.to_string())
}

/// The newest of these backups: `status.lastBackup` of the cluster, and the backups in the status of its EtcdBackups.
pub(super) fn last_backup(cluster: &EtcdCluster, backups: &[&EtcdBackup]) -> Option<LastBackup> {
    let reported = of_cluster(cluster, backups).filter_map(newest);
    let recorded = cluster
        .status
        .as_ref()
        .and_then(|status| status.last_backup.clone());
    reported
        .chain(recorded)
        .max_by_key(|last| last.time.as_ref().map(|time| time.0))
}

/// The newest backup that satisfies `spec.backup.beforeChanges`. `None` if `beforeChanges` is empty.
///
/// Invariant 32: the backup has the cluster ID of this cluster. If the spec asks for verifications, a verification has
/// restored the backup.
pub(super) fn backup_for_changes(
    cluster: &EtcdCluster,
    backups: &[&EtcdBackup],
) -> Option<LastBackup> {
    let settings = cluster.spec.backup.as_ref();
    let settings = settings.filter(|settings| !settings.before_changes.is_empty())?;
    let id = cluster.status.as_ref()?.cluster_id.as_ref()?;
    let found = if settings.verification.is_some() {
        proven
    } else {
        newest
    };
    // An EtcdBackup that is being deleted is ignored, because its stored backups may be deleted too.
    let live = |backup: &&EtcdBackup| backup.meta().deletion_timestamp.is_none();
    of_cluster(cluster, backups)
        .filter(live)
        .filter_map(found)
        .filter(|backup| backup.cluster_id.as_ref() == Some(id))
        .max_by_key(|backup| backup.time.as_ref().map(|time| time.0))
}

/// The EtcdBackups that name this cluster.
fn of_cluster<'a>(
    cluster: &EtcdCluster,
    backups: &[&'a EtcdBackup],
) -> impl Iterator<Item = &'a EtcdBackup> {
    let name = cluster.name_any();
    backups.iter().copied().filter(move |backup| {
        let reference = backup.spec.etcd_cluster.as_ref();
        reference.is_some_and(|reference| reference.name == name)
    })
}

/// The newest complete backup of an EtcdBackup.
fn newest(backup: &EtcdBackup) -> Option<LastBackup> {
    let status = backup.status.as_ref()?;
    Some(LastBackup {
        name: backup.name_any(),
        time: Some(status.last_success_date.clone()?),
        revision: status.etcd_revision,
        location: status.location.clone(),
        cluster_id: status.cluster_id.clone(),
    })
}

/// The newest verified backup of an EtcdBackup.
fn proven(backup: &EtcdBackup) -> Option<LastBackup> {
    let verified = backup.status.as_ref()?.last_verified.as_ref()?;
    Some(LastBackup {
        name: backup.name_any(),
        time: Some(verified.backup_time.clone()?),
        revision: verified.etcd_revision,
        location: Some(verified.location.clone()),
        cluster_id: verified.cluster_id.clone(),
    })
}

/// The Event that reports that another owner has created an EtcdBackup with the cluster's name.
pub(super) fn taken(cluster: &EtcdCluster) -> Notice {
    let name = cluster.name_any();
    Notice::warning(
        Reason::NameTaken.as_str(),
        "Backup",
        format!(
            "spec.backup is not in effect, because an EtcdBackup {name} exists and does not belong to this \
             EtcdCluster: delete it, or create it again with another name"
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
                "encryption": { "secret": "keys", "key": "2026" },
                "copyTo": [{ "name": "second", "storageType": "GCS", "gcs": { "path": "other/main" } }],
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
            ("/spec/backup/encryption/key", json!("2027")),
            ("/spec/backup/copyTo/0/gcs/path", json!("other/moved")),
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
        // The owner of `former` is an earlier EtcdCluster of the same name, with another UID.
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
        // The EtcdBackup `new` was deleted, and only `old` exists. `status.lastBackup` of the cluster keeps the backup
        // of `new`.
        cluster.status = Some(EtcdClusterStatus {
            last_backup: Some(last.clone()),
            ..EtcdClusterStatus::default()
        });
        assert_eq!(last_backup(&cluster, &[&all[0]]), Some(last));
        assert_eq!(last_backup(&self::cluster(|_| ()), &[&all[3]]), None);
    }

    const ID: &str = "ab";

    fn waiting(change: impl FnOnce(&mut Value)) -> EtcdCluster {
        cluster(|object| {
            object["spec"]["backup"]["beforeChanges"] = json!(["Upgrade"]);
            object["status"] = json!({
                "clusterID": ID,
                "beforeChange": { "change": "Upgrade", "clusterID": ID, "startTime": "2026-11-27T12:00:00Z" },
            });
            change(object);
        })
    }

    #[test]
    fn change_that_waits_for_backup_requests_one_backup() {
        let asked = |cluster: &EtcdCluster| {
            let annotations = created(cluster).metadata.annotations.unwrap_or_default();
            annotations.get(ANNOTATION_BACKUP_REQUESTED).cloned()
        };
        let requested = waiting(|_| ());
        assert_eq!(asked(&requested).as_deref(), Some("2026-11-27T12:00:00Z"));
        let backup = created(&requested);
        assert_eq!(plan(&requested, Some(&backup)), Action::Nothing);
        let earlier = created(&cluster(|_| ()));
        assert!(matches!(plan(&requested, Some(&earlier)), Action::Apply(_)));
        for (field, value) in [
            ("backup", json!({ "name": "main" })),
            ("waived", json!(true)),
            ("completionTime", json!("2026-11-27T12:00:00Z")),
            ("clusterID", json!("cd")),
        ] {
            let ended = waiting(|object| object["status"]["beforeChange"][field] = value);
            assert_eq!(asked(&ended), None, "{field}");
            assert_eq!(plan(&ended, Some(&backup)), Action::Nothing, "{field}");
        }
    }

    fn stored(name: &str, status: &Value) -> EtcdBackup {
        serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2",
            "kind": "EtcdBackup",
            "metadata": { "name": name, "namespace": "prod" },
            "spec": { "etcdCluster": { "name": "main" }, "storageType": "S3", "s3": { "path": "b/k" } },
            "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn invariant_32_only_backup_of_this_cluster_id_counts() {
        let complete = |name: &str, id: &str, hour: u8| {
            let date = format!("2026-11-27T{hour:02}:00:00Z");
            stored(
                name,
                &json!({ "succeeded": true, "clusterID": id, "lastSuccessDate": date }),
            )
        };
        let all = [
            complete("old", ID, 1),
            complete("new", ID, 2),
            complete("former", "cd", 3),
        ];
        let all: Vec<&EtcdBackup> = all.iter().collect();
        let found = backup_for_changes(&waiting(|_| ()), &all).unwrap();
        assert_eq!(
            (found.name.as_str(), found.cluster_id.as_deref()),
            ("new", Some(ID))
        );
        assert_eq!(backup_for_changes(&cluster(|_| ()), &all), None);
        let mut deleted = all[1].clone();
        deleted.metadata.deletion_timestamp =
            deleted.status.as_ref().unwrap().last_success_date.clone();
        assert_eq!(backup_for_changes(&waiting(|_| ()), &[&deleted]), None);
    }

    #[test]
    fn invariant_32_unverified_backup_does_not_count_if_spec_has_verification() {
        let verified = waiting(|object| object["spec"]["backup"]["verification"] = json!({}));
        let status = |proven: Value| {
            json!({ "succeeded": true, "clusterID": ID, "lastSuccessDate": "2026-11-27T03:00:00Z",
                    "lastVerified": proven })
        };
        let unproven = stored("main", &status(Value::Null));
        assert_eq!(backup_for_changes(&verified, &[&unproven]), None);
        let proof = json!({ "location": "s3://b/k", "clusterID": ID, "backupTime": "2026-11-27T02:00:00Z" });
        let proven = stored("main", &status(proof));
        let found = backup_for_changes(&verified, &[&proven]).unwrap();
        assert_eq!(found.location.as_deref(), Some("s3://b/k"));
        assert_eq!(found.time.unwrap().0.to_string(), "2026-11-27T02:00:00Z");
    }
}
