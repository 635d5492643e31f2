//! The restore operator dies before every write of a restore, one process at each, and the last one finds enough to
//! come to the end: over a living cluster, with a backup that is no good, and of a cluster that is not there.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use e2e::manifests::{backup_with, restore_with};
use e2e::objects::{
    Kind, await_complete, await_object, conditions_line, field, has_condition, has_failed_for,
    ready_members,
};
use e2e::picture::Picture;
use e2e::wait::Look;
use e2e::{Keyspace, PATIENCE, Sandbox, scenario, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams};

use crate::fixtures::{cluster, root};
use crate::member_loss::await_one_volume_a_member;
use crate::restore_in_place::{
    CLAIM, Living, another_token, await_gone, await_replaced, living, living_on, over,
};
use crate::restore_sources::{compare, painted};

const OPERATOR: &str = "etcd-restore-operator";

/// Before this one the seed's pod ends for good.
const CLEAR: &str = "restore-before-clear-pod";

/// In the order in which they are come to, over a living cluster.
const IN_PLACE: &[&str] = &[
    "restore-before-record-intent",
    "restore-before-record-backup",
    "restore-before-guard",
    "restore-before-claim",
    "restore-before-create-service",
    "restore-before-create-volume-claim",
    "restore-before-create-pod",
    "restore-before-record-restored",
    "restore-before-record-formed",
    "restore-before-stop-former",
    CLEAR,
    "restore-before-join",
    "restore-before-release-claim",
    "restore-before-let-go",
    "restore-before-status",
];

/// With a backup that cannot be restored.
const GIVEN_UP: &[&str] = &[
    "restore-before-abandon",
    "restore-before-discard-seed",
    "restore-before-release-claim",
    "restore-before-let-go",
];

/// When the cluster that is there names the seed's as its own already.
const TURNED: &[&str] = &["restore-before-stop-former"];

/// With a seed that is lost when it is there and recorded in the EtcdRestore alone.
const ENDED: &[&str] = &["restore-before-record-formed", CLEAR];

/// Of a cluster that is not there; what is made for its seed is made in the same way as above.
const NEW: &[&str] = &[
    "restore-before-record-backup",
    "restore-before-create-cluster",
    "restore-before-guard",
    "restore-before-record-formed",
    "restore-before-release-claim",
    "restore-before-let-go",
    "restore-before-expire",
];

/// The operator's pod anew, with another environment. The one before stands at its point and gets no further.
async fn restart_with(sandbox: &Sandbox, variable: &str) -> Result<()> {
    let deployment = format!("deployment/{OPERATOR}");
    sandbox
        .kubectl(&["set", "env", &deployment, variable])
        .await?;
    // The dead process cannot give its lease back, and it takes its time to run out.
    let delete = ["delete", "lease", OPERATOR, "--ignore-not-found"];
    sandbox.kubectl(&delete).await.map(drop)
}

/// Waits until the operator has died at that point, and not of something else.
async fn dies(sandbox: &Sandbox, point: &str) -> Result<()> {
    let selector = format!("app.kubernetes.io/component={OPERATOR}");
    let selector = ListParams::default().labels(&selector);
    let told = format!("FAILPOINTS={point}=panic");
    let last_words = format!("failpoint {point} panic");
    until(
        &format!("the operator dies {point}"),
        PATIENCE,
        async || {
            let pods = sandbox.api::<Pod>().list(&selector).await?;
            let told: Vec<&Pod> = pods.iter().filter(|pod| is_told(pod, &told)).collect();
            let mut seen = format!("{} pods of it", told.len());
            for pod in told.into_iter().filter(|pod| has_died(pod)) {
                let name = pod.name_any();
                let log = sandbox.kubectl(&["logs", &name, "--previous"]).await?;
                if log.contains(&last_words) {
                    return Ok(Look::Done(()));
                }
                seen = format!("{name} died of something else: {log}");
            }
            Ok(Look::NotYet(seen))
        },
    )
    .await
}

fn is_told(pod: &Pod, told: &str) -> bool {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut variables = containers.flat_map(|container| container.env.iter().flatten());
    variables.any(|one| {
        let value = one.value.as_deref().unwrap_or_default();
        format!("{}={value}", one.name) == told
    })
}

fn has_died(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let containers = status.and_then(|status| status.container_statuses.as_ref());
    containers
        .into_iter()
        .flatten()
        .any(|container| container.restart_count > 0)
}

/// The kubelet ends the pod, as it does one it evicts, and nobody starts a container of it again.
async fn seed_ends_for_good(sandbox: &Sandbox) -> Result<()> {
    let (pods, seeds) = (sandbox.api::<Pod>(), ListParams::default().labels(CLAIM));
    let seeds = pods.list(&seeds).await?.items;
    let [seed] = &seeds[..] else {
        bail!("{} seeds", seeds.len())
    };
    let name = seed.name_any();
    let deadline = r#"{"spec":{"activeDeadlineSeconds":1}}"#;
    let patch = ["patch", "pod", &name, "--type=merge", "-p", deadline];
    sandbox.kubectl(&patch).await?;
    until("the seed's pod has ended for good", PATIENCE, async || {
        let status = pods.get(&name).await?.status.unwrap_or_default();
        let phase = status.phase.unwrap_or_default();
        Ok(if phase == "Failed" {
            Look::Done(())
        } else {
            Look::NotYet(phase)
        })
    })
    .await
}

/// As [`dies_at_each`]; and the last operator lives.
async fn dies_at(sandbox: &Sandbox, points: &[&str], manifest: &str) -> Result<()> {
    dies_at_each(sandbox, points, manifest).await?;
    restart_with(sandbox, "FAILPOINTS-").await
}

/// Applies the manifest to an operator that dies at the first of the points, then at the next.
async fn dies_at_each(sandbox: &Sandbox, points: &[&str], manifest: &str) -> Result<()> {
    let deployment = format!("deployment/{OPERATOR}");
    for (number, point) in points.iter().enumerate() {
        let variable = format!("FAILPOINTS={point}=panic");
        if *point == CLEAR {
            // The one that stands at the point before would be started again, find another step to do, and do it.
            sandbox
                .kubectl(&["scale", &deployment, "--replicas=0"])
                .await?;
            sandbox.await_pods_of(OPERATOR, 0).await?;
            seed_ends_for_good(sandbox).await?;
            restart_with(sandbox, &variable).await?;
            sandbox
                .kubectl(&["scale", &deployment, "--replicas=1"])
                .await?;
        } else {
            restart_with(sandbox, &variable).await?;
        }
        if number == 0 {
            let wait = ["rollout", "status", &deployment, "--timeout=300s"];
            sandbox.kubectl(&wait).await?;
            // The one before, which lives, would take the lease again and make the first writes.
            sandbox.await_pods_of(OPERATOR, 1).await?;
            sandbox.apply(manifest).await?;
        }
        dies(sandbox, point).await?;
    }
    Ok(())
}

#[tokio::test]
async fn operator_crash_restore_comes_to_the_end_from_before_every_write() {
    scenario("operator_crash_restore", async |sandbox| {
        let living = living(sandbox, 3).await?;
        drop(living.keys);
        let manifest = over(sandbox, &living.bucket, "")?;
        dies_at(sandbox, IN_PLACE, &manifest).await?;
        compare(sandbox, "over", "c", &living.picture).await?;

        let after = sandbox.await_members("c", 3).await?;
        ensure!(after.metadata.uid == living.before.metadata.uid);
        ensure!(field(&after, "/status/clusterID") != field(&living.before, "/status/clusterID"));
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        keys.verify("later/", 0)
            .await
            .context("keys newer than the backup")?;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn operator_crash_restore_gives_up_or_makes_a_new_cluster_all_the_same() {
    scenario("operator_crash_restore_new", async |sandbox| {
        let living = living(sandbox, 1).await?;
        gives_up(sandbox, &living).await?;
        makes_a_new_cluster(sandbox, &living).await
    })
    .await;
}

/// From the turn on it is the seed's cluster that goes on, also for who has changed their mind.
#[tokio::test]
async fn restore_deleted_midway_after_the_turn_leaves_the_restored_cluster() {
    scenario("restore_deleted_late", async |sandbox| {
        let living = living(sandbox, 1).await?;
        drop(living.keys);
        let manifest = over(sandbox, &living.bucket, "")?;
        dies_at_each(sandbox, TURNED, &manifest).await?;
        let restores = sandbox.objects(Kind::EtcdRestore);
        let begun = restores.get("over").await?;
        restores.delete("over", &DeleteParams::default()).await?;
        restart_with(sandbox, "FAILPOINTS-").await?;
        await_gone(sandbox, "over").await?;

        await_replaced(sandbox, &begun).await?;
        let after = sandbox.await_members("c", 1).await?;
        ensure!(after.metadata.uid == living.before.metadata.uid);
        ensure!(field(&after, "/status/clusterID") != field(&living.before, "/status/clusterID"));
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        let is = Picture::at(&keys, living.picture.revision).await?;
        living.picture.is_of(&is)?;
        keys.verify("later/", 0)
            .await
            .context("keys newer than the backup")?;
        await_one_volume_a_member(sandbox, &ready_members(&after)).await
    })
    .await;
}

/// Pods, volumes and Services with the name of a cluster, but for the two that are the cluster's own.
async fn all_of(sandbox: &Sandbox, cluster: &str) -> Result<Vec<String>> {
    let all = ListParams::default();
    let pods = sandbox.api::<Pod>().list(&all).await?;
    let mut there: Vec<_> = pods.iter().map(|it| ("Pod", it.name_any())).collect();
    let volumes = sandbox.api::<PersistentVolumeClaim>().list(&all).await?;
    there.extend(volumes.iter().map(|it| ("volume", it.name_any())));
    let services = sandbox.api::<Service>().list(&all).await?;
    there.extend(services.iter().map(|it| ("Service", it.name_any())));
    let (of_it, client) = (format!("{cluster}-"), format!("{cluster}-client"));
    there.retain(|(_, name)| name.starts_with(&of_it) && *name != client);
    Ok(there
        .into_iter()
        .map(|(kind, name)| format!("{kind} {name}"))
        .collect())
}

/// What was being made goes with it, and can be made once more under the same names.
#[tokio::test]
async fn restore_deleted_midway_takes_the_cluster_along_that_was_being_made() {
    scenario("restore_deleted_new", async |sandbox| {
        let living = living(sandbox, 1).await?;
        let path = format!("{}/etcd.backup", living.bucket.name);
        let manifest = restore_with(sandbox.env.s3()?, "new", "{name: d}", &path, "");
        dies_at_each(sandbox, &["restore-before-record-formed"], &manifest).await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        let begun = clusters.get("d").await?;
        let there = all_of(sandbox, "d").await?;
        ensure!(
            there.len() == 3,
            "a seed, its volume and Service: {there:?}"
        );
        let restores = sandbox.objects(Kind::EtcdRestore);
        restores.delete("new", &DeleteParams::default()).await?;
        restart_with(sandbox, "FAILPOINTS-").await?;
        await_gone(sandbox, "new").await?;
        until("nothing is left of it", PATIENCE, async || {
            let cluster = clusters.get_opt("d").await?.is_some();
            let left = all_of(sandbox, "d").await?;
            Ok(if cluster || !left.is_empty() {
                Look::NotYet(format!("the EtcdCluster: {cluster}, {left:?}"))
            } else {
                Look::Done(())
            })
        })
        .await?;
        living.keys.verify("later/", 50).await?;

        sandbox.apply(&manifest).await?;
        compare(sandbox, "new", "d", &living.picture).await?;
        let made = sandbox.await_members("d", 1).await?;
        ensure!(
            made.metadata.uid != begun.metadata.uid,
            "it was not made anew"
        );
        let is = Picture::at(&living.keys, living.picture.revision).await?;
        living.picture.is_of(&is)
    })
    .await;
}

/// Without a volume its data is gone with it. The cluster that is there serves all along.
#[tokio::test]
async fn restore_seed_ended_for_good_is_made_again_beside_the_cluster_that_serves() {
    scenario("restore_seed_ended", async |sandbox| {
        let living = living_on(sandbox, 1, "").await?;
        let manifest = over(sandbox, &living.bucket, "")?;
        dies_at_each(sandbox, ENDED, &manifest).await?;
        living.keys.verify("later/", 50).await?;
        drop(living.keys);
        restart_with(sandbox, "FAILPOINTS-").await?;
        compare(sandbox, "over", "c", &living.picture).await?;
        let after = sandbox.await_members("c", 1).await?;
        ensure!(field(&after, "/status/clusterID") != field(&living.before, "/status/clusterID"));
        // What the seed was started with is recorded for the cluster it became.
        let token = field(&after, "/status/bootstrap/token");
        ensure!(token.is_string() && token == field(&after, "/status/TLS/token"));
        another_token(&living.before, &after)
    })
    .await;
}

/// The newest backup of an EtcdBackup is recorded when the restore begins with it. A newer one that is complete when the
/// seed has to be made again, by an operator that was started since, is not taken.
#[tokio::test]
async fn restore_lost_seed_is_made_of_the_recorded_backup_and_not_of_a_newer_one() {
    scenario("restore_recorded_backup", async |sandbox| {
        let (bucket, keys) = painted(sandbox, &cluster(&sandbox.env, "c", 1)?, 1).await?;
        let early = Picture::now(&keys).await?;
        let policy = "  backupPolicy: {backupIntervalInSecond: 5, maxBackups: 99}\n";
        let (s3, path) = (sandbox.env.s3()?, format!("{}/etcd", bucket.name));
        let often = backup_with(s3, "often", "c", &path, policy);
        sandbox.apply(&often).await?;
        let backups = sandbox.objects(Kind::EtcdBackup);
        await_complete(&backups, "often", PATIENCE).await?;
        suspend(sandbox, true).await?;
        let manifest = "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {name: back}\n\
                        spec:\n  etcdCluster: {name: d}\n  backup: {name: often}\n";
        dies_at_each(sandbox, &["restore-before-record-formed"], manifest).await?;
        let restores = sandbox.objects(Kind::EtcdRestore);
        let what = "the seed to be verified";
        let begun = await_object(&restores, "back", what, PATIENCE, |object| {
            field(object, "/status/restoredRevision").as_i64() == Some(early.revision)
        })
        .await?;
        let recorded = field(&begun, "/status/backup/location").clone();
        let deployment = format!("deployment/{OPERATOR}");
        let stop = ["scale", &deployment, "--replicas=0"];
        sandbox.kubectl(&stop).await?;
        sandbox.await_pods_of(OPERATOR, 0).await?;

        keys.paint("more/", 20).await?;
        let late = keys.revision().await?;
        suspend(sandbox, false).await?;
        await_object(&backups, "often", "a newer backup", PATIENCE, |object| {
            has_condition(object, "Complete", "True")
                && field(object, "/status/etcdRevision").as_i64() >= Some(late)
                && *field(object, "/status/location") != recorded
        })
        .await?;
        suspend(sandbox, true).await?;
        seed_ends_for_good(sandbox).await?;
        restart_with(sandbox, "FAILPOINTS-").await?;
        sandbox
            .kubectl(&["scale", &deployment, "--replicas=1"])
            .await?;
        // Leases are those of now, and the second painting granted more of them.
        let done = await_complete(&restores, "back", PATIENCE).await?;
        ensure!(field(&done, "/status/restoredRevision").as_i64() == Some(early.revision));
        ensure!(field(&done, "/status/backup") == field(&begun, "/status/backup"));
        ensure!(field(&done, "/status/backup/etcdBackup") == "often");
        ensure!(field(&done, "/status/backup/etcdRevision").as_i64() == Some(early.revision));
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "d").await?;
        early.is_of(&Picture::at(&keys, early.revision).await?)
    })
    .await;
}

async fn suspend(sandbox: &Sandbox, suspended: bool) -> Result<()> {
    let patch = format!(r#"{{"spec":{{"backupPolicy":{{"suspend":{suspended}}}}}}}"#);
    let patch = ["patch", "etcdbackup", "often", "--type=merge", "-p", &patch];
    sandbox.kubectl(&patch).await.map(drop)
}

async fn gives_up(sandbox: &Sandbox, living: &Living) -> Result<()> {
    let good = living.bucket.read("etcd.backup").await?;
    let mut bad = good.clone();
    let middle = bad.len() / 2;
    bad[middle] ^= 0xff;
    living.bucket.write("etcd.backup", bad).await?;
    let manifest = over(sandbox, &living.bucket, "")?;
    dies_at(sandbox, GIVEN_UP, &manifest).await?;
    let restores = sandbox.objects(Kind::EtcdRestore);
    let failed = |object: &_| field(object, "/status/phase") == "Failed";
    let failed = await_object(&restores, "over", "a failure for good", PATIENCE, failed).await?;
    let text = conditions_line(&failed);
    ensure!(has_failed_for(&failed, "SnapshotUnreadable"), "{text}");
    let after = sandbox.await_members("c", 1).await?;
    ensure!(field(&after, "/status/clusterID") == field(&living.before, "/status/clusterID"));
    let annotations = after.metadata.annotations.unwrap_or_default();
    ensure!(!annotations.contains_key("etcd.database.coreos.com/restore"));
    living.keys.verify("later/", 50).await?;
    let is = Picture::at(&living.keys, living.picture.revision).await?;
    living.picture.is_of(&is)?;
    living.bucket.write("etcd.backup", good).await
}

async fn makes_a_new_cluster(sandbox: &Sandbox, living: &Living) -> Result<()> {
    let path = format!("{}/etcd.backup", living.bucket.name);
    let more = "  ttlSecondsAfterFinished: 1\n";
    let manifest = restore_with(sandbox.env.s3()?, "new", "{name: d}", &path, more);
    dies_at(sandbox, NEW, &manifest).await?;
    await_gone(sandbox, "new").await?;
    let made = sandbox.await_members("d", 1).await?;
    ensure!(has_condition(&made, "Available", "True"));
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "d").await?;
    let after = Picture::at(&keys, living.picture.revision).await?;
    living.picture.is_of(&after)
}

/// What the operator can be interrupted at is what the tests above interrupt it at.
#[test]
fn every_write_of_a_restore_is_crashed_at() {
    let mut points = BTreeSet::new();
    for file in ["act.rs", "controller.rs"] {
        let path = root().join("crates/restore/src").join(file);
        let source = std::fs::read_to_string(path).unwrap_or_default();
        let named = source.split('"').filter(|word| {
            let is_name = word
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte == b'-');
            is_name && word.starts_with("restore-before-") && *word != "restore-before-nothing"
        });
        points.extend(named.map(str::to_owned));
    }
    let crashed_at = [IN_PLACE, ENDED, GIVEN_UP, NEW].concat();
    let crashed_at: BTreeSet<String> = crashed_at.into_iter().map(str::to_owned).collect();
    assert_eq!(points, crashed_at);
}
