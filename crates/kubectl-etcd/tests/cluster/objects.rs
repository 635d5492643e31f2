//! Tests of the commands for backups, restores, Events and logs, and of `report`.

use std::io::Read;

use api::backup::DeletionPolicy;
use api::{EtcdBackup, EtcdRestore};
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::fixture::{Ended, Fixture, MEMBERS, condition, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn backup_command_uses_store_of_periodic_backup_and_waits() {
    let fixture = Fixture::start().await;
    fixture.create_cluster().await;
    fixture
        .run("backup main --yes")
        .fails(3, &["no EtcdBackup of cluster main exists", "--s3"]);
    fixture.create_series().await;
    let shown = fixture.run("backup main --dry-run").ok();
    assert!(
        shown.contains("path: b/k-manual-") && shown.contains("nothing was changed"),
        "{shown}"
    );

    let running = fixture.spawn("backup main --name now --yes --wait --timeout 1m");
    let backups: Api<EtcdBackup> = fixture.api();
    eventually("the EtcdBackup", async || {
        backups.get_opt("now").await.unwrap().is_some()
    })
    .await;
    let made = backups.get("now").await.unwrap();
    assert!(!made.spec.is_periodic());
    assert_eq!(made.spec.deletion_policy, Some(DeletionPolicy::Retain));
    let status = json!({ "status": { "succeeded": true, "etcdRevision": 7, "size": 2048, "location": "s3://b/k-manual",
        "completionTime": "2026-11-26T00:00:00Z", "conditions": [condition("Complete", "True", "Succeeded")] } });
    backups
        .patch_status("now", &PatchParams::default(), &Patch::Merge(&status))
        .await
        .unwrap();
    let text = Ended::from(running.wait_with_output().unwrap()).ok();
    assert!(
        text.contains("complete and verified: revision 7, 2.0 KiB"),
        "{text}"
    );

    fixture
        .run("backup main --name now --yes")
        .fails(1, &["cannot create etcdbackup/now in namespace prod"]);
    // The API server accepts the EtcdBackups for a PVC and for S3, but rejects an S3 path without a key.
    fixture
        .run("backup main --pvc claim/etcd/main --name pvc --yes")
        .ok();
    fixture.run("backup main --s3 b/k2 --aws-secret aws --endpoint http://s3:9000 --zstd --name s3 --yes").ok();
    fixture
        .run("backup main --s3 b/ --name bad --yes")
        .fails(1, &["cannot create etcdbackup/bad", "what to do"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn restore_command_shows_loss_and_creates_etcdrestore() {
    let fixture = Fixture::start().await;
    fixture.create_cluster().await;
    fixture.create_series().await;
    fixture
        .run("restore main --from nightly --yes")
        .fails(3, &["cluster main exists", "--overwrite"]);
    fixture
        .run("restore main --from nothing --yes")
        .fails(1, &["etcdbackup/nothing"]);
    let line = "restore main --from nightly --overwrite --keep-old-data 24h --bump-revision 1000 --name again";
    let shown = fixture.run(line);
    assert!(
        shown
            .out
            .contains("lost: all writes to cluster main since the backup"),
        "{shown:?}"
    );
    shown.fails(3, &["add --yes"]);
    fixture.run(&format!("{line} --yes")).ok();
    let restores: Api<EtcdRestore> = fixture.api();
    let made = restores.get("again").await.unwrap();
    assert!(made.spec.overwrite && made.spec.mark_compacted);
    assert_eq!(made.spec.backup.unwrap().name, "nightly");

    let failed = json!({ "status": { "phase": "Failed", "conditions": [condition("Failed", "True", "BackupMissing")] } });
    let running =
        fixture.spawn("restore copy --from nightly --name copy --yes --wait --timeout 1m");
    eventually("the EtcdRestore", async || {
        restores.get_opt("copy").await.unwrap().is_some()
    })
    .await;
    restores
        .patch_status("copy", &PatchParams::default(), &Patch::Merge(&failed))
        .await
        .unwrap();
    Ended::from(running.wait_with_output().unwrap())
        .fails(5, &["BackupMissing: message of Failed"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn verify_command_lists_backups_and_rehearses_restore() {
    let fixture = Fixture::start().await;
    fixture.create_cluster().await;
    fixture.create_series().await;
    let text = fixture.run("verify nightly").ok();
    assert!(
        text.contains("checksum matches") && text.contains("s3://b/k_v100"),
        "{text}"
    );

    let running = fixture.spawn("verify nightly --rehearse --yes --timeout 1m");
    let restores: Api<EtcdRestore> = fixture.api();
    let all = ListParams::default();
    eventually("the rehearsal", async || {
        restores.list(&all).await.unwrap().items.len() == 1
    })
    .await;
    let made = restores.list(&all).await.unwrap().items.remove(0);
    let name = made.name_any();
    let template = made.spec.etcd_cluster.template.unwrap().spec;
    assert_eq!((template.size, template.version.as_str()), (1, "3.5.35"));
    // No restore operator runs, so the test itself creates the restored cluster.
    fixture
        .create::<api::EtcdCluster>(
            json!({ "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": name }, "spec": template }),
        )
        .await;
    let done = json!({ "status": { "succeeded": true, "restoredRevision": 100 } });
    restores
        .patch_status(&name, &PatchParams::default(), &Patch::Merge(&done))
        .await
        .unwrap();
    let text = Ended::from(running.wait_with_output().unwrap()).ok();
    assert!(
        text.contains("the backup is usable: the restored cluster served revision 100"),
        "{text}"
    );
    let clusters: Api<api::EtcdCluster> = fixture.api();
    assert_eq!(clusters.list(&all).await.unwrap().items.len(), 1);
    assert!(restores.list(&all).await.unwrap().items.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_cluster_and_its_objects_are_listed() {
    let fixture = Fixture::start().await;
    fixture.create_cluster().await;
    fixture.create_event("a", "EtcdCluster", "main").await;
    fixture.create_event("b", "Pod", MEMBERS[0]).await;
    fixture.create_event("c", "Pod", "other-aaaaaaaaaa").await;
    let text = fixture.run("events main --warnings").ok();
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(text.contains(&format!("Pod/{}", MEMBERS[0])), "{text}");
    let none = fixture.run("events other").ok();
    assert!(none.contains("other-aaaaaaaaaa"), "{none}");
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_log_is_reported_with_pod_and_cause() {
    let fixture = Fixture::start().await;
    fixture.create_cluster().await;
    fixture.run("logs main").fails(
        3,
        &[
            &format!("cannot get the log of pod/{}", MEMBERS[0]),
            "no log of cluster main",
        ],
    );
    fixture
        .run("logs nothing")
        .fails(1, &["etcdcluster/nothing"]);
    fixture.run("logs main --operators").fails(
        1,
        &[
            "app.kubernetes.io/name=etcd-operator",
            "install the operators",
        ],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn report_command_omits_secrets_and_lists_missing_files() {
    let fixture = Fixture::start().await;
    fixture.create_cluster().await;
    fixture.create_series().await;
    fixture.create_event("a", "EtcdCluster", "main").await;
    fixture
        .create::<Secret>(json!({ "metadata": { "name": "main-root", "labels": { "app": "etcd", "etcd_cluster": "main" } },
            "stringData": { "password": "hunter2" } }))
        .await;
    fixture.run("report main --file report.tar.gz").ok();
    let file = std::fs::File::open(fixture.folder.path().join("report.tar.gz")).unwrap();
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(file));
    let mut names = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        let name = entry.path().unwrap().display().to_string();
        // The Secret and the variable X_PASSWORD of the pods contain the password, and the bundle must not contain
        // it.
        assert!(
            !text.contains("hunter2") && !text.contains("aHVudGVyMg"),
            "{name}: {text}"
        );
        if name.ends_with("pods.yaml") {
            assert!(
                text.contains("X_PASSWORD") && text.contains("REMOVED"),
                "{text}"
            );
        }
        if name.ends_with("missing.txt") {
            assert!(text.contains(&format!("logs/{}.log", MEMBERS[0])), "{text}");
        }
        names.push(name);
    }
    for name in [
        "etcdcluster.yaml",
        "etcdbackups.yaml",
        "pods.yaml",
        "status.txt",
        "events.txt",
        "missing.txt",
    ] {
        assert!(
            names.contains(&format!("etcd-report/{name}")),
            "{name}: {names:?}"
        );
    }
    fixture
        .run("report main --file report.tar.gz")
        .fails(1, &["report.tar.gz"]);
}
