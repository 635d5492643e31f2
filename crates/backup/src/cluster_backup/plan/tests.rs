//! Tests of the EtcdBackup that belongs to an EtcdCluster.

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
fn spec_backup_creates_etcdbackup_owned_by_cluster() {
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

/// An EtcdCluster whose deletion waits for a backup.
fn held(change: impl FnOnce(&mut Value)) -> EtcdCluster {
    cluster(|object| {
        object["metadata"]["deletionTimestamp"] = json!("2026-11-27T12:00:00Z");
        object["metadata"]["finalizers"] = json!([api::names::FINALIZER_BACKUP]);
        object["spec"]["deletionPolicy"] = json!("BackupThenDelete");
        object["status"] = json!({
            "clusterID": ID,
            "beforeChange": { "change": "Deletion", "clusterID": ID, "startTime": "2026-11-27T12:00:00Z" },
        });
        change(object);
    })
}

#[test]
fn invariant_41_etcdbackup_is_requested_while_deletion_waits() {
    let backup = created(&held(|_| ()));
    let annotations = backup.annotations();
    assert_eq!(
        annotations[ANNOTATION_BACKUP_REQUESTED],
        "2026-11-27T12:00:00Z"
    );
    let complete = stored(
        "main",
        &json!({ "succeeded": true, "clusterID": ID, "lastSuccessDate": "2026-11-27T12:01:00Z" }),
    );
    let found = backup_for_changes(&held(|_| ()), &[&complete]);
    assert!(
        found.is_some(),
        "the deletion must use the backup although `beforeChanges` is empty"
    );
    let foreground = held(|object| {
        object["metadata"]["finalizers"] =
            json!([api::names::FINALIZER_BACKUP, FINALIZER_FOREGROUND]);
    });
    assert_eq!(plan(&foreground, None), Action::Nothing);
    let backed_up =
        held(|object| object["status"]["beforeChange"]["backup"] = json!({ "name": "main" }));
    assert_eq!(plan(&backed_up, None), Action::Nothing);
}

#[test]
fn backup_request_reports_state_of_etcdbackup() {
    let cluster = held(|_| ());
    let message = |existing: Option<&EtcdBackup>| {
        let found = backup_request(&cluster, existing).unwrap();
        assert_eq!(found.start_time.0.to_string(), "2026-11-27T12:00:00Z");
        found.message
    };
    assert!(message(None).contains("does not exist"));
    let mut backup = created(&cluster);
    assert!(message(Some(&backup)).contains("no status"));
    let mut ready = |status: &str, text: &str| {
        let condition = json!({ "type": "Ready", "status": status, "reason": "x", "message": text,
            "lastTransitionTime": "2026-11-27T12:00:00Z" });
        let status = json!({ "succeeded": true, "lastSuccessDate": "2026-11-27T12:01:00Z",
            "conditions": [condition] });
        backup.status = Some(serde_json::from_value(status).unwrap());
        backup.spec.verification = Some(Box::default());
        message(Some(&backup))
    };
    assert_eq!(
        ready("False", "the store is unreachable"),
        "the store is unreachable"
    );
    assert!(ready("True", "the next backup is due").contains("not verified"));
    let mut unowned = backup.clone();
    unowned.metadata.owner_references = None;
    assert!(message(Some(&unowned)).contains("does not belong"));
    assert_eq!(backup_request(&self::cluster(|_| ()), None), None);
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
fn cluster_change_that_waits_for_backup_requests_one_backup() {
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
fn invariant_32_only_backup_with_current_cluster_id_counts_for_change() {
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
    let proof =
        json!({ "location": "s3://b/k", "clusterID": ID, "backupTime": "2026-11-27T02:00:00Z" });
    let proven = stored("main", &status(proof));
    let found = backup_for_changes(&verified, &[&proven]).unwrap();
    assert_eq!(found.location.as_deref(), Some("s3://b/k"));
    assert_eq!(found.time.unwrap().0.to_string(), "2026-11-27T02:00:00Z");
}
