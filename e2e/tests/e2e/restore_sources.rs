//! From what a cluster comes back, and that all of it does: keys, versions, leases, revisions and etcd's own hash.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, backup_with, restore_with};
use e2e::metrics::Page;
use e2e::objects::{Kind, await_complete, await_object, field, has_condition};
use e2e::picture::Picture;
use e2e::wait::Look;
use e2e::{Keyspace, PATIENCE, Sandbox, scenario, until};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::{DynamicObject, ListParams};

use crate::all_pods_lost::same_members;
use crate::backup_restore_s3::backup;
use crate::backup_schedule::{fail_at, restarts};
use crate::fixtures::{DURABLE, cluster, cluster_with, newest_version, root};

const KEYS: usize = 200;

/// A cluster with something of everything in it, and a bucket.
pub(crate) async fn painted(
    sandbox: &Sandbox,
    manifest: &str,
    size: usize,
) -> Result<(Bucket, Keyspace)> {
    let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
    sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
    sandbox.apply(manifest).await?;
    sandbox.await_members("c", size).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.paint("painted/", KEYS).await?;
    Ok((bucket, keys))
}

/// Waits for the restore `name` of the cluster `cluster`, and compares.
pub(crate) async fn compare(
    sandbox: &Sandbox,
    name: &str,
    cluster: &str,
    before: &Picture,
) -> Result<DynamicObject> {
    let done = await_complete(&sandbox.objects(Kind::EtcdRestore), name, PATIENCE).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, cluster).await?;
    let after = Picture::at(&keys, before.revision).await?;
    before
        .is_of(&after)
        .with_context(|| format!("{cluster} restored by {name}"))?;
    ensure!(field(&done, "/status/restoredRevision").as_i64() == Some(before.revision));
    Ok(done)
}

fn location(object: &DynamicObject) -> String {
    let location = field(object, "/status/location").as_str();
    location.unwrap_or_default().to_owned()
}

/// The EtcdCluster is gone, and only the backup knows what it was.
#[tokio::test]
async fn backup_s3_and_restore_without_cluster_object_bring_everything_back() {
    scenario("restore_without_cluster_object", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        let (bucket, keys) = painted(sandbox, &manifest, 3).await?;
        let before = Picture::now(&keys).await?;
        let was = sandbox.await_members("c", 3).await?;
        sandbox
            .apply(&backup(sandbox, "first", &bucket.name, "etcd.backup")?)
            .await?;
        await_complete(&sandbox.objects(Kind::EtcdBackup), "first", PATIENCE).await?;
        let recorded = bucket.read("etcd.backup.manifest.json").await?;
        let recorded: serde_json::Value = serde_json::from_slice(&recorded)?;
        ensure!(
            recorded["hash"] == before.hash.0,
            "the manifest's hash: {recorded}"
        );
        keys.fill("later/", 10, |_| ()).await?;
        drop(keys);
        sandbox.delete_cluster("c").await?;

        let path = format!("{}/etcd.backup", bucket.name);
        let s3 = sandbox.env.s3()?;
        sandbox
            .apply(&restore_with(s3, "back", "{name: c}", &path, ""))
            .await?;
        let done = compare(sandbox, "back", "c", &before).await?;
        let (bytes, total) = ("/status/progress/bytes", "/status/progress/totalBytes");
        ensure!(
            field(&done, bytes).as_i64() > Some(0),
            "no progress was told"
        );
        ensure!(field(&done, bytes) == field(&done, total));
        is_told_and_measured(sandbox, &done).await?;
        let is = sandbox.await_members("c", 3).await?;
        ensure!(field(&is, "/spec") == field(&was, "/spec"));
        ensure!(field(&is, "/status/clusterID") != field(&was, "/status/clusterID"));
        seed_comes_back(sandbox, &done, &is, &before).await
    })
    .await;
}

/// Events tell what was done, and the operator's metrics how long it took and how much it was.
async fn is_told_and_measured(sandbox: &Sandbox, done: &DynamicObject) -> Result<()> {
    let name = done.name_any();
    for said in [
        "ClusterCreated",
        "SeedStarted",
        "SeedServes",
        "HandedOver",
        "RestoreComplete",
    ] {
        let words = ["Normal", said];
        let kind = Kind::EtcdRestore;
        sandbox.await_event(kind, &name, &words).await?;
    }
    let of_it = format!("namespace=\"{}\",name=\"{name}\"", sandbox.namespace);
    let bytes = field(done, "/status/progress/bytes").as_i64();
    let bytes = bytes.context("no progress was told")?;
    let took = seconds_between(done, "/status/startTime", "/status/completionTime")?;
    // Whole numbers, which a page prints as such.
    let expected = [
        ("size_bytes", bytes),
        ("progress_bytes", bytes),
        ("duration_seconds", took),
        ("throughput_bytes_per_second", bytes / took.max(1)),
        ("failed", 0),
    ];
    until("the restore is measured", PATIENCE, async || {
        let page = Page::of_operator(sandbox, "etcd-restore-operator").await?;
        // The sum of nothing is -0.
        let measured =
            |what: &str| page.sum(&format!("etcd_operator_restore_{what}"), &of_it) + 0.0;
        let found = expected.map(|(what, _)| (what, measured(what).to_string()));
        Ok(
            if found == expected.map(|(what, it)| (what, it.to_string())) {
                Look::Done(())
            } else {
                Look::NotYet(format!("{found:?}, and not {expected:?}"))
            },
        )
    })
    .await
}

/// From one time in an object to another.
pub(crate) fn seconds_between(object: &DynamicObject, from: &str, to: &str) -> Result<i64> {
    let (from, to) = (time(object, from)?, time(object, to)?);
    Ok(to.duration_since(from).as_secs())
}

/// A time in an object.
pub(crate) fn time(object: &DynamicObject, pointer: &str) -> Result<Timestamp> {
    let text = field(object, pointer)
        .as_str()
        .context(pointer.to_owned())?;
    text.parse().with_context(|| format!("{pointer}: {text}"))
}

/// The seed's pod is lost when the Secret is gone with which the backup was fetched: it is the member it was, with its
/// data. It alone is asked.
async fn seed_comes_back(
    sandbox: &Sandbox,
    done: &DynamicObject,
    cluster: &DynamicObject,
    before: &Picture,
) -> Result<()> {
    let seed = field(done, "/status/seed/member").as_str();
    let seed = seed.context("no seed is recorded")?;
    let pods = sandbox.api::<Pod>();
    let lost = pods.get(seed).await?.metadata.uid;
    sandbox.kubectl(&["delete", "secret", "aws"]).await?;
    sandbox.lose_pod("c", seed).await?;
    let is = sandbox.await_members("c", 3).await?;
    same_members(cluster, &is)?;
    ensure!(pods.get(seed).await?.metadata.uid != lost);
    let keys = Keyspace::of_pod(&sandbox.env, &sandbox.namespace, seed).await?;
    before.is_of(&Picture::at(&keys, before.revision).await?)
}

/// Of the operator before: the name tells path, revision and time, and nothing lies beside it.
#[tokio::test]
async fn restore_old_backup_by_its_name_and_with_a_template() {
    scenario("restore_old_backup", async |sandbox| {
        let (bucket, keys) = painted(sandbox, &cluster(&sandbox.env, "c", 1)?, 1).await?;
        let before = Picture::now(&keys).await?;
        let key = format!("etcd.backup_v{}_2019-03-01-12:00:00", before.revision);
        bucket.write(&key, keys.snapshot().await?).await?;
        let version = newest_version(&sandbox.env)?;
        let target =
            format!("{{name: d, template: {{spec: {{size: 1, version: \"{version}\"}}}}}}");
        let path = format!("{}/{key}", bucket.name);
        let s3 = sandbox.env.s3()?;
        sandbox
            .apply(&restore_with(s3, "back", &target, &path, ""))
            .await?;
        compare(sandbox, "back", "d", &before).await.map(drop)
    })
    .await;
}

/// Of the etcd that the operator before ran: 3.2 and 3.3 have written what is restored here. Into the newest etcd, which
/// grows to its size, and into the oldest that is supported.
#[tokio::test]
async fn restore_old_backup_of_etcd_3_2_and_of_3_3() {
    scenario("restore_old_backup_old_etcd", async |sandbox| {
        let s3 = sandbox.env.s3()?;
        let bucket = Bucket::create(s3, &sandbox.namespace).await?;
        sandbox.apply(&aws_secret(s3, "aws")).await?;
        let oldest = sandbox.env.etcd_versions.first().context("no versions")?;
        let newest = newest_version(&sandbox.env)?;
        let all = [("3.2.32", "b", &newest, 3), ("3.3.27", "d", oldest, 1)];
        for (old, cluster, version, size) in all {
            let key = format!("{cluster}/etcd.backup_v72_2019-03-01-12:00:00");
            let backup = old_etcd_made(&format!("etcd-{old}.db"))?;
            bucket.write(&key, backup).await?;
            let target = format!(
                "{{name: {cluster}, template: {{spec: {{size: {size}, version: \"{version}\"}}}}}}"
            );
            let path = format!("{}/{key}", bucket.name);
            sandbox
                .apply(&restore_with(s3, cluster, &target, &path, ""))
                .await?;
        }
        let restores = sandbox.objects(Kind::EtcdRestore);
        for (old, cluster, version, size) in all {
            let done = await_complete(&restores, cluster, PATIENCE).await?;
            let is = sandbox.await_members(cluster, size).await?;
            ensure!(field(&is, "/status/currentVersion") == version.as_str());
            let said = old_etcd_said(&format!("etcd-{old}.json"))?;
            let hashes = old_etcd_said(&format!("etcd-{old}.hash.json"))?;
            let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, cluster).await?;
            // What was there, and what was there before that.
            for (answer, revision) in [("all", 72), ("revision40", 40)] {
                let before = Picture::told(&said[answer], &said["leases"])?;
                let after = Picture::at(&keys, revision).await?;
                before
                    .has_the_keys_of(&after)
                    .with_context(|| format!("of {old} in etcd {version}, at {revision}"))?;
                // Of all that has happened since the compaction: whatever a client can still ask for.
                let told = &hashes[answer][0]["HashKV"];
                let told = (told["hash"].as_u64(), told["compact_revision"].as_i64());
                let found = (Some(after.hash.0.into()), Some(after.hash.1));
                ensure!(
                    found == told,
                    "hash {found:?} in etcd {version}, at {revision}, and of {old} it is {told:?}"
                );
            }
            ensure!(field(&done, "/status/restoredRevision") == 72);
            ensure!(keys.revision().await? == 72);
        }
        Ok(())
    })
    .await;
}

fn old_etcd_said(file: &str) -> Result<serde_json::Value> {
    serde_json::from_slice(&old_etcd_made(file)?).with_context(|| file.to_owned())
}

/// A file that etcd 3.2 or 3.3 made, or told.
fn old_etcd_made(file: &str) -> Result<Vec<u8>> {
    let path = root().join("e2e/fixtures/coreos").join(file);
    std::fs::read(&path).with_context(|| format!("read {}", path.display()))
}

/// The newest of a periodic backup, and the newest before a time.
#[tokio::test]
async fn restore_by_backup_name_takes_the_newest_or_the_newest_before_a_time() {
    scenario("restore_by_backup_name", async |sandbox| {
        let (bucket, keys) = painted(sandbox, &cluster(&sandbox.env, "c", 1)?, 1).await?;
        let early = Picture::now(&keys).await?;
        let path = format!("{}/etcd", bucket.name);
        let policy = "  backupPolicy: {backupIntervalInSecond: 8, maxBackups: 9}\n";
        let s3 = sandbox.env.s3()?;
        sandbox.apply(&backup_with(s3, "often", "c", &path, policy)).await?;
        let backups = sandbox.objects(Kind::EtcdBackup);
        let first = await_complete(&backups, "often", PATIENCE).await?;
        let between = field(&first, "/status/lastSuccessDate").as_str().map(str::to_owned);
        let between = between.context("no lastSuccessDate")?;
        keys.paint("more/", 20).await?;
        let late = Picture::now(&keys).await?;
        let what = "a backup of what was written later";
        await_object(&backups, "often", what, PATIENCE, |object| {
            has_condition(object, "Complete", "True")
                && field(object, "/status/etcdRevision").as_i64() == Some(late.revision)
                && field(object, "/status/backups/0/location") == field(object, "/status/location")
        })
        .await?;
        let suspend = r#"{"spec":{"backupPolicy":{"suspend":true}}}"#;
        sandbox
            .kubectl(&["patch", "etcdbackup", "often", "--type=merge", "-p", suspend])
            .await?;
        for (name, choice) in [
            ("newest", String::new()),
            ("before", format!(", before: \"{between}\"")),
        ] {
            let manifest = format!(
                "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {{name: {name}}}\nspec:\n  \
                 etcdCluster: {{name: {name}}}\n  backup: {{name: often{choice}}}\n"
            );
            sandbox.apply(&manifest).await?;
        }
        compare(sandbox, "newest", "newest", &late).await?;
        // Leases are those of now, and the second painting granted more of them.
        let restores = sandbox.objects(Kind::EtcdRestore);
        let done = await_complete(&restores, "before", PATIENCE).await?;
        ensure!(field(&done, "/status/restoredRevision").as_i64() == Some(early.revision));
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "before").await?;
        early.is_of(&Picture::at(&keys, early.revision).await?)
    })
    .await;
}

/// More objects than a page lists, siblings among them.
#[tokio::test]
async fn retention_pages_and_retention_siblings_in_one_bucket() {
    scenario("retention_pages", async |sandbox| {
        let (bucket, keys) = painted(sandbox, &cluster(&sandbox.env, "c", 1)?, 1).await?;
        drop(keys);
        let siblings = [
            "etcd-prod_v9_2019-01-01-00:00:00",
            "etcd_v2_v9_2019-01-01-00:00:00",
            "etcd_vault",
        ];
        let old = (0..1100).map(|number| {
            format!(
                "etcd_v{number}_2019-01-{:02}-{:02}:{:02}:00",
                1 + number / 600,
                number / 60 % 24,
                number % 60
            )
        });
        let all: Vec<String> = old.chain(siblings.map(str::to_owned)).collect();
        let writes = all.iter().map(|key| bucket.write(key, b"old".to_vec()));
        let writes = stream::iter(writes).buffer_unordered(16);
        writes.try_collect::<Vec<()>>().await?;
        let policy = "  backupPolicy: {backupIntervalInSecond: 86400, maxBackups: 3}\n";
        let s3 = sandbox.env.s3()?;
        let path = format!("{}/etcd", bucket.name);
        sandbox
            .apply(&backup_with(s3, "again", "c", &path, policy))
            .await?;
        let backups = sandbox.objects(Kind::EtcdBackup);
        let kept = await_object(&backups, "again", "old ones removed", PATIENCE, |object| {
            has_condition(object, "RetentionApplied", "True")
                && field(object, "/status/backups/0/location") == field(object, "/status/location")
        })
        .await?;
        let left = bucket.keys().await?;
        // The new one, its manifest, the two newest old ones, and what is nobody's business here.
        ensure!(
            left.len() == 4 + siblings.len(),
            "{} left: {left:?}",
            left.len()
        );
        ensure!(
            siblings
                .iter()
                .all(|sibling| left.iter().any(|key| key == sibling)),
            "{left:?}"
        );
        ensure!(
            left.iter()
                .any(|key| location(&kept).ends_with(key.as_str())),
            "{left:?}"
        );
        Ok(())
    })
    .await;
}

pub(crate) const CLAIM: &str = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: backups}\nspec:\n  \
                     accessModes: [ReadWriteOnce]\n  resources: {requests: {storage: 64Mi}}\n";

pub(crate) fn on_claim(name: &str, more: &str) -> String {
    format!(
        "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdBackup\nmetadata: {{name: {name}}}\nspec:\n  \
         etcdCluster: {{name: c}}\n  storageType: PVC\n  pvc: {{claimName: backups, path: etcd/{name}}}\n{more}"
    )
}

/// Pods beside claims, which end with their work.
async fn await_no_pods(sandbox: &Sandbox) -> Result<()> {
    let ours = ListParams::default().labels("app.kubernetes.io/name=etcd-backup");
    e2e::until("no pod is left beside the claim", PATIENCE, async || {
        let pods = sandbox.api::<Pod>().list(&ours).await?.items;
        Ok(if pods.is_empty() {
            e2e::wait::Look::Done(())
        } else {
            e2e::wait::Look::NotYet(format!("{} pods", pods.len()))
        })
    })
    .await
}

/// One backup, many with retention, and a claim that is not there.
#[tokio::test]
async fn backup_pvc_lies_on_the_claim_and_old_ones_go() {
    scenario("backup_pvc", async |sandbox| {
        let (_bucket, keys) = painted(sandbox, &cluster(&sandbox.env, "c", 1)?, 1).await?;
        let before = Picture::now(&keys).await?;
        sandbox.apply(CLAIM).await?;
        sandbox
            .apply(&on_claim("once", "  compression: zstd\n"))
            .await?;
        let backups = sandbox.objects(Kind::EtcdBackup);
        let done = await_complete(&backups, "once", PATIENCE).await?;
        ensure!(
            location(&done) == "pvc://backups/etcd/once",
            "{}",
            location(&done)
        );
        ensure!(field(&done, "/status/etcdRevision").as_i64() == Some(before.revision));
        // It has its time while others are made: of a pod that is not placed it is said after a minute.
        let unbound = CLAIM.replace("{name: backups}", "{name: none}");
        let unbound = unbound.replace("spec:\n", "spec:\n  storageClassName: nowhere\n");
        sandbox.apply(&unbound).await?;
        let gone = on_claim("nowhere", "  backupPolicy: {timeoutInSecond: 120}\n");
        sandbox
            .apply(&gone.replace("claimName: backups", "claimName: none"))
            .await?;
        let often = "  backupPolicy: {backupIntervalInSecond: 4, maxBackups: 2}\n";
        sandbox.apply(&on_claim("often", often)).await?;
        let mut seen = std::collections::BTreeSet::new();
        while seen.len() < 4 {
            // A look may come too late for one of them, and what could not be removed is removed the next time.
            let most = if seen.is_empty() { 1..=2 } else { 2..=2 };
            let next = await_object(
                &backups,
                "often",
                "the next, and old ones removed",
                PATIENCE,
                |object| {
                    let kept = field(object, "/status/backups").as_array();
                    has_condition(object, "Complete", "True")
                        && field(object, "/status/backups/0/location")
                            == field(object, "/status/location")
                        && !seen.contains(&location(object))
                        && most.contains(&kept.map_or(0, Vec::len))
                },
            )
            .await?;
            seen.insert(location(&next));
        }
        let suspend = r#"{"spec":{"backupPolicy":{"suspend":true}}}"#;
        sandbox
            .kubectl(&[
                "patch",
                "etcdbackup",
                "often",
                "--type=merge",
                "-p",
                suspend,
            ])
            .await?;
        let failed = await_object(
            &backups,
            "nowhere",
            "a failure",
            PATIENCE + Duration::from_mins(1),
            |object| has_condition(object, "Failed", "True"),
        )
        .await?;
        let said = e2e::objects::conditions_line(&failed);
        ensure!(said.contains("spec.pvc.claimName"), "{said}");
        await_no_pods(sandbox).await
    })
    .await;
}

/// The operator dies before it makes the pod, and before it removes it: the next one makes it, or takes what it reports.
#[tokio::test]
async fn backup_pvc_is_adopted_by_the_operator_that_comes_after() {
    scenario("backup_pvc_crash", async |sandbox| {
        let (_bucket, keys) = painted(sandbox, &cluster(&sandbox.env, "c", 1)?, 1).await?;
        sandbox.apply(CLAIM).await?;
        for (point, adopted) in [
            ("backup-before-create-pod", false),
            ("backup-before-pod-removal", true),
        ] {
            fail_at(sandbox, Some(point)).await?;
            let before = keys.revision().await?;
            sandbox.apply(&on_claim(point, "")).await?;
            e2e::until("the operator dies", PATIENCE, async || {
                Ok(match restarts(sandbox).await? {
                    0 => e2e::wait::Look::NotYet("it lives".to_owned()),
                    _ => e2e::wait::Look::Done(()),
                })
            })
            .await?;
            // Written after: in the backup only if that was made again.
            keys.paint("after/", 3).await?;
            fail_at(sandbox, None).await?;
            let backups = sandbox.objects(Kind::EtcdBackup);
            let done = await_complete(&backups, point, PATIENCE).await?;
            let revision = field(&done, "/status/etcdRevision").as_i64();
            ensure!(
                (revision == Some(before)) == adopted,
                "{point}: {revision:?}, {before} before"
            );
        }
        await_no_pods(sandbox).await
    })
    .await;
}

/// Into members with volumes of their own, by the name of the EtcdBackup; and over the cluster that lives.
#[tokio::test]
async fn restore_pvc_brings_everything_back_and_goes_in_place() {
    scenario("restore_pvc", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        let (_bucket, keys) = painted(sandbox, &manifest, 3).await?;
        let before = Picture::now(&keys).await?;
        sandbox.apply(CLAIM).await?;
        sandbox.apply(&on_claim("once", "")).await?;
        await_complete(&sandbox.objects(Kind::EtcdBackup), "once", PATIENCE).await?;
        keys.fill("later/", 10, |_| ()).await?;
        drop(keys);
        let over = "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {name: over}\nspec:\n  \
                    etcdCluster: {name: c}\n  overwrite: true\n  backupStorageType: PVC\n  \
                    pvc: {claimName: backups, path: etcd/once}\n";
        sandbox.apply(over).await?;
        compare(sandbox, "over", "c", &before).await?;
        sandbox.await_members("c", 3).await?;
        sandbox.delete_cluster("c").await?;

        let version = newest_version(&sandbox.env)?;
        let again = format!(
            "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {{name: back}}\nspec:\n  \
             etcdCluster: {{name: d, template: {{spec: {{size: 1, version: \"{version}\", pod: {{persistentVolumeClaimSpec: \
             {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 64Mi}}}}}}}}}}}}}}\n  backup: {{name: once}}\n"
        );
        sandbox.apply(&again).await?;
        compare(sandbox, "back", "d", &before).await.map(drop)
    })
    .await;
}
