//! Tests of observations with a fake API server or without a server.
#![allow(
    clippy::needless_pass_by_value,
    reason = "tests pass `json!` literals directly as arguments"
)]

use api::EtcdBackup;
use api::cluster::EtcdClusterSpec;
use api::manifest::BackupManifest;
use api::storage::StorageBlock;
use k8s_openapi::api::core::v1::Pod as KubePod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

use super::backup::newest_of;
use super::members::{child, old_pods};
use super::*;
use crate::fake;
use crate::plan::target::{check_version, cluster_to_create};
use crate::snapshot::{Child, OldMembers, takes_name};

mod clocks;
mod copies;
mod keys;
mod points;
mod requests;
mod searches;

/// Observes a restore with this API server and this etcd.
async fn observe_once(client: &Client, etcd: &dyn Etcd, restore: &EtcdRestore) -> Observation {
    let context = ObserveContext {
        client,
        etcd,
        grants: &Grants::default(),
        reads: &fake::reads(),
        image: &fake::image(client),
        fault: None,
    };
    Box::pin(observe(&context, restore)).await
}

fn restore(template: Value) -> EtcdRestore {
    let spec = json!({ "etcdCluster": { "name": "main", "template": template }, "backup": { "name": "b" } });
    EtcdRestore::new("again", serde_json::from_value(spec).unwrap())
}

fn manifest(version: &str, spec: Value) -> BackupManifest {
    serde_json::from_value(json!({
        "formatVersion": 1, "etcdVersion": version, "clusterID": "ab", "revision": 7, "size": 1, "sha256": "",
        "compression": "none", "createdAt": "2026-01-01T00:00:00Z",
        "cluster": { "name": "old", "namespace": "prod", "spec": spec },
    }))
    .unwrap()
}

fn refused(restore: &EtcdRestore, manifest: Option<&BackupManifest>) -> Trouble {
    cluster_to_create(restore, manifest).unwrap_err()
}

#[test]
fn template_overrides_spec_of_manifest() {
    let recorded = manifest("3.6.16", json!({ "size": 5, "version": "3.6.16" }));
    let templated = restore(json!({ "spec": { "size": 1, "version": "3.6.16" } }));
    assert_eq!(
        cluster_to_create(&templated, Some(&recorded)).unwrap().size,
        1
    );
    assert_eq!(
        cluster_to_create(&restore(Value::Null), Some(&recorded))
            .unwrap()
            .size,
        5
    );
}

#[test]
fn backup_without_manifest_requires_template() {
    let trouble = refused(&restore(Value::Null), None);
    assert_eq!(trouble.reason, Reason::InvalidSpec);
    assert!(trouble.message.contains("spec.etcdCluster.template"));
    assert!(cluster_to_create(&restore(json!({ "spec": { "size": 3 } })), None).is_ok());
}

#[test]
fn etcd_version_older_than_backup_is_rejected() {
    let recorded = manifest("3.6.16", json!({}));
    let trouble = refused(
        &restore(json!({ "spec": { "version": "3.5.35" } })),
        Some(&recorded),
    );
    assert!(
        trouble.message.contains("3.5.35") && trouble.message.contains("3.6.16"),
        "{}",
        trouble.message
    );
    assert!(
        cluster_to_create(
            &restore(json!({ "spec": { "version": "3.6.1" } })),
            Some(&recorded)
        )
        .is_ok()
    );
}

/// A backup of a cluster with TLS must not create a cluster without TLS by default.
#[test]
fn new_cluster_keeps_tls_of_manifest() {
    let tls = json!({ "TLS": { "static": { "operatorSecret": "o", "member": { "serverSecret": "s", "peerSecret": "p" } } } });
    let spec = cluster_to_create(&restore(Value::Null), Some(&manifest("3.6.16", tls))).unwrap();
    assert!(spec.tls.unwrap().encrypts_peers());
}

#[test]
fn invalid_spec_of_manifest_is_rejected() {
    let trouble = refused(
        &restore(Value::Null),
        Some(&manifest("3.6.16", json!({ "size": 9 }))),
    );
    assert_eq!(trouble.reason, Reason::InvalidSpec);
    assert!(trouble.message.contains("spec.size"), "{}", trouble.message);
}

/// An earlier release of the operator accepted this variable, so a manifest may contain it.
#[test]
fn spec_of_manifest_with_forbidden_etcd_flag_is_rejected() {
    let env = json!([{ "name": "ETCD_FORCE_NEW_CLUSTER", "value": "true" }]);
    let recorded = manifest("3.6.16", json!({ "pod": { "etcdEnv": env } }));
    let trouble = refused(&restore(Value::Null), Some(&recorded));
    assert_eq!(trouble.reason, Reason::InvalidSpec);
    for words in [
        "spec.pod.etcdEnv",
        "ETCD_FORCE_NEW_CLUSTER",
        "or set spec.etcdCluster.template",
    ] {
        assert!(trouble.message.contains(words), "{}", trouble.message);
    }
}

fn backup(status: Value) -> EtcdBackup {
    serde_json::from_value(json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup", "metadata": { "name": "nightly" },
        "spec": { "etcdEndpoints": ["http://a:2379"], "storageType": "S3",
                  "s3": { "path": "b/k", "awsSecret": "aws", "endpoint": "http://s3" } },
        "status": status,
    }))
    .unwrap()
}

#[test]
fn newest_backup_of_etcdbackup_is_found_only_at_its_current_path() {
    let (place, _) = newest_of(
        &backup(json!({ "succeeded": true, "location": "s3://b/k_v7_2026-01-01-00:00:00" })),
        None,
    )
    .unwrap();
    let StorageBlock::S3(place) = place else {
        panic!("{place:?}")
    };
    assert_eq!(place.path, "b/k_v7_2026-01-01-00:00:00");
    assert_eq!(place.aws_secret.as_deref(), Some("aws"));
    // A backup is not found if its location does not match the path in the current spec of the EtcdBackup.
    for elsewhere in ["s3://b/other", "s3://b/k_v7", "s3://c/k"] {
        let moved = backup(json!({ "succeeded": true, "location": elsewhere }));
        assert_eq!(
            newest_of(&moved, None).unwrap_err().reason,
            Reason::BackupMissing,
            "{elsewhere}"
        );
    }
    assert_eq!(
        newest_of(&backup(json!({})), None).unwrap_err().reason,
        Reason::BackupMissing
    );
}

#[test]
fn newest_backup_is_found_on_pvc_but_not_in_local_directory() {
    let found = |kind: &str, block: Value, location: &str| {
        let mut spec = json!({ "storageType": kind });
        spec[kind.to_lowercase()] = block;
        let mut backup = EtcdBackup::new("b", serde_json::from_value(spec).unwrap());
        let status = json!({ "succeeded": true, "location": location });
        backup.status = Some(serde_json::from_value(status).unwrap());
        newest_of(&backup, None).map(|(block, _)| block.source().path().to_owned())
    };
    let claim = json!({ "claimName": "backups", "path": "etcd/main" });
    let numbered = "etcd/main_v7_2026-01-01-00:00:00";
    for path in ["etcd/main", numbered] {
        let place = found("PVC", claim.clone(), &format!("pvc://backups/{path}"));
        assert_eq!(place.unwrap(), path);
    }
    let elsewhere = found("PVC", claim, "pvc://others/etcd/main").unwrap_err();
    assert_eq!(elsewhere.reason, Reason::BackupMissing);
    let local = found(
        "Local",
        json!({ "path": "etcd/main" }),
        "file:///backups/etcd/main",
    );
    let trouble = local.unwrap_err();
    assert_eq!(trouble.reason, Reason::NotSupported);
    assert!(
        trouble.message.contains("copy the backup"),
        "{}",
        trouble.message
    );
}

#[test]
fn newest_backup_before_given_time_is_found() {
    let kept = |day: u8| {
        json!({ "location": format!("s3://b/k_v{day}_2026-01-0{day}-00:00:00"),
                "completionTime": format!("2026-01-0{day}T00:00:00Z") })
    };
    let listed = backup(json!({ "location": "s3://b/k_v3_2026-01-03-00:00:00",
        "backups": [kept(3), kept(2), kept(1)] }));
    let found = |before: &str| {
        let before: Time = serde_json::from_value(json!(before)).unwrap();
        newest_of(&listed, Some(&before)).map(|(block, _)| block.source().path().to_owned())
    };
    assert_eq!(
        found("2026-01-02T12:00:00Z").unwrap(),
        "b/k_v2_2026-01-02-00:00:00"
    );
    assert_eq!(
        found("2026-01-02T00:00:00Z").unwrap(),
        "b/k_v2_2026-01-02-00:00:00"
    );
    let trouble = found("2025-12-31T00:00:00Z").unwrap_err();
    assert_eq!(trouble.reason, Reason::BackupMissing);
    assert!(
        trouble.message.contains("spec.backup.before"),
        "{}",
        trouble.message
    );
}

#[test]
fn object_of_earlier_cluster_occupies_seed_name() {
    let pod = |owner: &str, deleted: Value| -> KubePod {
        serde_json::from_value(
            json!({ "metadata": { "name": "x", "deletionTimestamp": deleted, "ownerReferences": [
            { "apiVersion": "v", "kind": "EtcdCluster", "name": "main", "uid": owner }] } }),
        )
        .unwrap()
    };
    assert!(!takes_name(&pod("new", Value::Null), "new"));
    assert!(takes_name(&pod("old", Value::Null), "new"));
    assert!(takes_name(
        &pod("new", json!("2026-01-01T00:00:00Z")),
        "new"
    ));
    assert_eq!(
        child::<KubePod>(Err("timeout".into()), "new", &mut None),
        Child::Unknown("timeout".into())
    );
}

#[test]
fn observation_contains_restore_lock_and_cluster_id() {
    let cluster: EtcdCluster = serde_json::from_value(json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
        "metadata": { "name": "main", "uid": "cluster-uid", "annotations": { "etcd.database.coreos.com/restore": "u" } },
        "spec": { "size": 3, "version": "3.6.16" },
        "status": { "clusterID": "ab", "conditions": [{ "type": "Available", "status": "True", "reason": "R",
                    "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" }] },
    }))
    .unwrap();
    let expected = ClusterFacts {
        uid: "cluster-uid".into(),
        paused: false,
        lock: Some("u".into()),
        cluster_id: Some("ab".into()),
        available: true,
        durable: false,
        problems: vec![],
        max_backup_age: None,
        needed_backup: String::new(),
        backup: None,
        unavailable_since: None,
    };
    assert_eq!(facts(&cluster), expected);
}

fn bumping(version: &str) -> EtcdRestore {
    let mut restore = restore(json!({ "spec": { "version": version } }));
    restore.spec.bump_revision = Some(1_000_000_000);
    restore.spec.mark_compacted = true;
    restore
}

#[test]
fn bump_revision_is_rejected_before_etcd_3_6() {
    for version in ["3.4.37", "3.5.35"] {
        let trouble = refused(&bumping(version), None);
        assert_eq!(trouble.reason, Reason::NotSupported);
        assert!(trouble.message.contains(version), "{}", trouble.message);
    }
    assert!(cluster_to_create(&bumping("3.6.16"), None).is_ok());
}

#[test]
fn backup_of_newer_etcd_version_than_cluster_is_rejected() {
    let spec = |version: &str| EtcdClusterSpec {
        version: version.to_owned(),
        ..EtcdClusterSpec::default()
    };
    let (restore, recorded) = (restore(Value::Null), manifest("3.6.16", json!({})));
    let trouble = check_version(&restore, &spec("3.5.35"), Some(&recorded)).unwrap_err();
    assert_eq!(trouble.reason, Reason::InvalidSpec);
    assert!(check_version(&restore, &spec("3.7.0"), Some(&recorded)).is_ok());
}

/// Invariant 9: old members are the pods of this EtcdCluster with another token than the seed.
#[test]
fn old_members_are_found_by_owner_and_token() {
    let pod = |name: &str, owner: &str, token: Value, ready: &str| -> KubePod {
        serde_json::from_value(json!({
            "metadata": { "name": name, "uid": format!("uid-{name}"),
                "annotations": { "etcd.database.coreos.com/cluster-token": token },
                "ownerReferences": [{ "apiVersion": "v", "kind": "EtcdCluster", "name": "main", "uid": owner }] },
            "status": { "conditions": [{ "type": "Ready", "status": ready }] },
        }))
        .unwrap()
    };
    let pods = [
        pod("old", "u", json!("before"), "True"),
        pod("older", "u", json!(""), "False"),
        pod("seed", "u", json!("restore-1"), "True"),
        pod("foreign", "another", json!("before"), "True"),
    ];
    let old_members = old_pods(&pods, "u", "restore-1");
    let found: Vec<_> = old_members
        .iter()
        .map(|pod| (pod.name.as_str(), pod.ready))
        .collect();
    assert_eq!(found, [("old", true), ("older", false)]);
}

/// The delay between two pods of a seed grows with the duration of the restore, to protect nodes without free
/// resources. While no member serves, the delay is the minimum.
#[test]
fn seed_pod_is_replaced_sooner_while_no_member_serves() {
    let ago = |seconds: i64| {
        let then = k8s_openapi::jiff::Timestamp::now().as_second() - seconds;
        k8s_openapi::jiff::Timestamp::from_second(then)
            .unwrap()
            .to_string()
    };
    let object = |seconds: i64| {
        json!({ "metadata": {
            "name": "main-seed", "creationTimestamp": ago(seconds),
            "ownerReferences": [{ "apiVersion": "g/v1", "kind": "EtcdCluster", "name": "main", "uid": "owner" }],
        } })
    };
    let mut cluster = EtcdCluster::new("main", EtcdClusterSpec::default());
    cluster.metadata.uid = Some("owner".into());
    let is_recent = |created: i64, old_members: &OldMembers| {
        let named = members::NamedObjects {
            service: Ok(serde_json::from_value(object(3_600)).unwrap()),
            pvc: Ok(None),
            pod: Ok(serde_json::from_value(object(created)).unwrap()),
        };
        let seed = members::seed(named, &cluster, old_members, &mut SeedObjects::default());
        let Pod::Present(pod) = seed.pod else {
            panic!("{seed:?}")
        };
        pod.recent
    };
    let member = |ready| crate::snapshot::OldPod {
        name: "main-a".into(),
        uid: "a".into(),
        terminating: true,
        ready,
    };
    let served = OldMembers::Known(vec![member(true)]);
    let over = OldMembers::Known(vec![member(false)]);
    for old_members in [
        &OldMembers::NotRead,
        &OldMembers::Unknown("timeout".into()),
        &served,
    ] {
        assert!(is_recent(60, old_members), "{old_members:?}");
    }
    for old_members in [&OldMembers::Known(Vec::new()), &over] {
        assert!(!is_recent(60, old_members), "{old_members:?}");
        assert!(is_recent(1, old_members), "{old_members:?}");
    }
}
