//! Backups to a PersistentVolumeClaim (PVC): the backup pod, retention, and restores.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Result, ensure};
use e2e::objects::{Kind, await_complete, await_object, conditions_line, field, has_condition};
use e2e::store_state::StoreState;
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, scenario, step, until};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;

use crate::backup_crash::crashes_leave_complete_backups;
use crate::backup_schedule::{location, suspend};
use crate::bad_input::{await_waiting, no_restarts};
use crate::fixtures::{DURABLE, cluster_with, newest_version};
use crate::restore_sources::await_equal_restore;

const KEYS: usize = 200;

pub(crate) const BACKUP_PVC: &str = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: backups}\nspec:\n  \
                     accessModes: [ReadWriteOnce]\n  resources: {requests: {storage: 64Mi}}\n";

pub(crate) fn pvc_backup(name: &str, more: &str) -> String {
    format!(
        "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdBackup\nmetadata: {{name: {name}}}\nspec:\n  \
         etcdCluster: {{name: c}}\n  storageType: PVC\n  pvc: {{claimName: backups, path: etcd/{name}}}\n{more}"
    )
}

fn backup_pod_selector() -> ListParams {
    ListParams::default().labels("app.kubernetes.io/name=etcd-backup")
}

/// Waits until no backup pod exists. The operator deletes each backup pod when its work is complete.
async fn await_no_pods(sandbox: &Sandbox) -> Result<()> {
    let ours = backup_pod_selector();
    until("no backup pod is left", DEADLINE, async || {
        let pods = sandbox.api::<Pod>().list(&ours).await?.items;
        Ok(if pods.is_empty() {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{} pods", pods.len()))
        })
    })
    .await
}

#[tokio::test]
async fn pvc_backups_follow_retention_and_are_restored() {
    scenario("backup_pvc", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        sandbox.apply(&manifest).await?;
        sandbox.await_members("c", 3).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        keys.fill_mixed("mixed/", KEYS).await?;
        step("name a missing PVC", waits_for_pvc(sandbox)).await?;
        let crashes = crashes_leave_complete_backups(sandbox, &keys);
        step("crash the operator", crashes).await?;
        await_no_pods(sandbox).await?;
        begin_stuck_pvc_backup(sandbox).await?;
        let retention = apply_retention(sandbox, &keys);
        step("apply retention", retention).await?;
        let restored = are_restored(sandbox, keys);
        step("restore in place and by name", restored).await
    })
    .await;
}

/// An EtcdBackup waits for a missing PVC. While the EtcdBackup waits, a user can delete it.
async fn waits_for_pvc(sandbox: &Sandbox) -> Result<()> {
    let first = pvc_backup("first", "  deletionPolicy: Delete\n");
    sandbox.apply(&first).await?;
    let message = [
        "spec.pvc.claimName",
        "no PersistentVolumeClaim backups",
        "create it",
    ];
    await_waiting(sandbox, "first", "BucketMissing", &message).await?;
    let pods = sandbox.api::<Pod>().list(&backup_pod_selector()).await?;
    ensure!(
        pods.items.is_empty(),
        "a backup pod was created, although its PVC does not exist"
    );

    // Without the PVC, no backup was stored, so the deletion of the EtcdBackup must not wait for the PVC.
    sandbox.kubectl(&["delete", "etcdbackup", "first"]).await?;
    sandbox.apply(&pvc_backup("second", "")).await?;
    await_waiting(sandbox, "second", "BucketMissing", &message).await?;
    sandbox.apply(BACKUP_PVC).await?;
    let backups = sandbox.objects(Kind::EtcdBackup);
    await_complete(&backups, "second", DEADLINE).await?;
    no_restarts(sandbox).await
}

/// The name of a PersistentVolume that the kubelet cannot mount.
fn unmountable(sandbox: &Sandbox) -> String {
    format!("{}-stuck", sandbox.namespace)
}

/// Creates an EtcdBackup whose backup pod is scheduled but cannot start, because the directory of its volume does not
/// exist.
async fn begin_stuck_pvc_backup(sandbox: &Sandbox) -> Result<()> {
    let (namespace, volume) = (&sandbox.namespace, unmountable(sandbox));
    let bound = format!("  storageClassName: \"\"\n  volumeName: {volume}\n");
    let volume = format!(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {volume}}}\nspec:\n  accessModes: [ReadWriteOnce]\n  \
         capacity: {{storage: 64Mi}}\n  hostPath: {{path: /nonexistent/{volume}, type: Directory}}\n  \
         storageClassName: \"\"\n  claimRef: {{namespace: {namespace}, name: stuck}}\n"
    );
    let claim = BACKUP_PVC.replace("{name: backups}", "{name: stuck}");
    let policy = "  backupPolicy: {timeoutInSecond: 0}\n";
    let backup = pvc_backup("stuck", policy).replace("claimName: backups", "claimName: stuck");
    let all = [volume, claim + &bound, backup];
    sandbox.apply(&all.join("---\n")).await.map(drop)
}

/// The EtcdBackup `stuck` reports the mount error of the kubelet. Deleting the EtcdBackup also deletes the backup pod.
async fn stuck_pvc_backup_is_reported(sandbox: &Sandbox) -> Result<()> {
    let message = ["spec.pvc.claimName", "FailedMount"];
    await_waiting(sandbox, "stuck", "PodNotStarting", &message).await?;
    let volume = unmountable(sandbox);
    for (kind, name) in [
        ("etcdbackup", "stuck"),
        ("pvc", "stuck"),
        ("pv", volume.as_str()),
    ] {
        sandbox.kubectl(&["delete", kind, name]).await?;
    }
    await_no_pods(sandbox).await
}

/// Makes a compressed backup, then scheduled backups with retention. During this time, another EtcdBackup waits for an
/// unbound PVC.
async fn apply_retention(sandbox: &Sandbox, keys: &Keyspace) -> Result<()> {
    let before = StoreState::now(keys).await?;
    // The PVC `none` is never bound, so the backup pod of the EtcdBackup `nowhere` is never scheduled. The operator
    // reports the unscheduled pod after a minute. Other backups must run during this minute.
    let unbound = BACKUP_PVC.replace("{name: backups}", "{name: none}");
    let unbound = unbound.replace("spec:\n", "spec:\n  storageClassName: nowhere\n");
    let nowhere = pvc_backup("nowhere", "  backupPolicy: {timeoutInSecond: 120}\n");
    let nowhere = nowhere.replace("claimName: backups", "claimName: none");
    let once = pvc_backup("once", "  compression: zstd\n");
    sandbox
        .apply(&[unbound, nowhere, once].join("---\n"))
        .await?;
    let backups = sandbox.objects(Kind::EtcdBackup);
    let done = await_complete(&backups, "once", DEADLINE).await?;
    let stored = location(&done);
    ensure!(stored == "pvc://backups/etcd/once", "{stored}");
    ensure!(field(&done, "/status/etcdRevision").as_i64() == Some(before.revision));
    let often = "  backupPolicy: {backupIntervalInSecond: 4, maxBackups: 2}\n";
    sandbox.apply(&pvc_backup("often", often)).await?;
    let mut seen = BTreeSet::new();
    while seen.len() < 3 {
        // When the test sees the first location, one or two backups exist. At each later location, exactly two exist,
        // because of `maxBackups`. If a deletion fails, `status.backups` lists three until a retry, so the test polls.
        let most = if seen.is_empty() { 1..=2 } else { 2..=2 };
        let what = "the next backup is complete and old ones are deleted";
        let next = await_object(&backups, "often", what, DEADLINE, |object| {
            let kept = field(object, "/status/backups").as_array();
            has_condition(object, "Complete", "True")
                && field(object, "/status/backups/0/location") == field(object, "/status/location")
                && !seen.contains(&location(object))
                && most.contains(&kept.map_or(0, Vec::len))
        })
        .await?;
        seen.insert(location(&next));
    }
    suspend(sandbox, "often", true).await?;
    let longer = DEADLINE + Duration::from_mins(1);
    let failed = await_object(&backups, "nowhere", "a failure", longer, |object| {
        has_condition(object, "Failed", "True")
    })
    .await?;
    let message = conditions_line(&failed);
    ensure!(message.contains("spec.pvc.claimName"), "{message}");
    let stuck = stuck_pvc_backup_is_reported(sandbox);
    step("report a volume that cannot be mounted", stuck).await
}

/// Restores one backup in place by its path, and one into a new cluster by the name of its EtcdBackup.
async fn are_restored(sandbox: &Sandbox, keys: Keyspace) -> Result<()> {
    let before = StoreState::now(&keys).await?;
    sandbox.apply(&pvc_backup("last", "")).await?;
    await_complete(&sandbox.objects(Kind::EtcdBackup), "last", DEADLINE).await?;
    keys.fill("later/", 10, |_| ()).await?;
    drop(keys);
    let over = "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {name: over}\nspec:\n  \
                etcdCluster: {name: c}\n  overwrite: true\n  backupStorageType: PVC\n  \
                pvc: {claimName: backups, path: etcd/last}\n";
    sandbox.apply(over).await?;
    await_equal_restore(sandbox, "over", "c", &before).await?;
    sandbox.await_members("c", 3).await?;
    sandbox.delete_cluster("c").await?;

    let version = newest_version(&sandbox.env)?;
    let back = format!(
        "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {{name: back}}\nspec:\n  \
         etcdCluster: {{name: d, template: {{spec: {{size: 1, version: \"{version}\", pod: {{persistentVolumeClaimSpec: \
         {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 64Mi}}}}}}}}}}}}}}\n  backup: {{name: last}}\n"
    );
    sandbox.apply(&back).await?;
    await_equal_restore(sandbox, "back", "d", &before)
        .await
        .map(drop)
}
