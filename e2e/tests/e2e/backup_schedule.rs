//! Scheduled backups: their times, their retention, and the deletion of the EtcdBackup or of its cluster.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::kubectl;
use e2e::manifests::{aws_secret, backup_with, restore};
use e2e::objects::{
    Kind, await_complete, await_object, condition, conditions_line, field, has_condition,
};
use e2e::wait::{Poll, until};
use e2e::{DEADLINE, Keyspace, Sandbox, scenario, step};
use kube::ResourceExt;
use kube::api::{DynamicObject, ListParams};

use crate::fixtures::{cluster, cluster_with, root};

const MANIFEST: &str = ".manifest.json";
/// The name of the CronJob in `examples/example-etcd-backup-cronjob.yaml`. Its ServiceAccount has the same name.
const CRON_JOB: &str = "example-etcd-backup-cronjob";
pub(crate) const OPERATOR: &str = "app.kubernetes.io/component=etcd-backup-operator";
/// Objects of other software whose names resemble backups of the path `etcd`. Retention must not delete them.
const SIBLINGS: [&str; 3] = [
    "etcd-prod_v9_2019-01-01-00:00:00",
    "etcd_v2_v9_2019-01-01-00:00:00",
    "etcd_vault",
];
const KEYS: usize = 500;

/// Creates a bucket for one step of the test.
async fn bucket(sandbox: &Sandbox, step: &str) -> Result<Bucket> {
    let name = format!("{}-{step}", sandbox.namespace);
    Bucket::create(sandbox.env.s3()?, &name).await
}

/// Suspends or resumes an EtcdBackup.
pub(crate) async fn suspend(sandbox: &Sandbox, name: &str, suspended: bool) -> Result<()> {
    let patch = format!(r#"{{"spec":{{"backupPolicy":{{"suspend":{suspended}}}}}}}"#);
    let patch = ["patch", "etcdbackup", name, "--type=merge", "-p", &patch];
    sandbox.kubectl(&patch).await.map(drop)
}

pub(crate) fn location(object: &DynamicObject) -> String {
    field(object, "/status/location")
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

/// Waits for a complete backup at another location than `before`, and returns the EtcdBackup.
async fn next_after(sandbox: &Sandbox, name: &str, before: &str) -> Result<DynamicObject> {
    await_object(
        &sandbox.objects(Kind::EtcdBackup),
        name,
        "the next backup",
        DEADLINE,
        |object| has_condition(object, "Complete", "True") && location(object) != before,
    )
    .await
}

/// Waits until `holds` is true for the keys in the bucket, and returns the keys.
pub(crate) async fn await_keys(
    bucket: &Bucket,
    what: &str,
    holds: impl Fn(&[String]) -> bool,
) -> Result<Vec<String>> {
    until(what, DEADLINE, async || {
        let keys = bucket.keys().await?;
        Ok(if holds(&keys) {
            Poll::Done(keys)
        } else {
            Poll::NotYet(format!("{keys:?}"))
        })
    })
    .await
}

/// Waits until the bucket has no unfinished multipart upload.
pub(crate) async fn await_all_finished(bucket: &Bucket) -> Result<()> {
    until("no unfinished upload is left", DEADLINE, async || {
        Ok(match bucket.unfinished_uploads().await? {
            0 => Poll::Done(()),
            left => Poll::NotYet(format!("{left} uploads")),
        })
    })
    .await
}

/// The names of the backups of `path` that have a manifest. Names without the prefix `{path}_v` are skipped.
fn stored<'a>(keys: &'a [String], path: &str) -> Vec<&'a str> {
    let whole = keys
        .iter()
        .filter(|key| keys.contains(&format!("{key}{MANIFEST}")));
    whole
        .map(String::as_str)
        .filter(|key| key.starts_with(&format!("{path}_v")))
        .collect()
}

/// Ensures that the status has the revision and the SHA-256 in the manifest of the newest backup.
async fn status_matches_manifest(bucket: &Bucket, object: &DynamicObject) -> Result<()> {
    let newest = location(object);
    let key = newest
        .strip_prefix(&format!("s3://{}/", bucket.name))
        .context("not in the bucket")?;
    let manifest: serde_json::Value =
        serde_json::from_slice(&bucket.read(&format!("{key}{MANIFEST}")).await?)?;
    ensure!(
        manifest["revision"] == *field(object, "/status/etcdRevision"),
        "{manifest}"
    );
    ensure!(
        manifest["sha256"] == *field(object, "/status/sha256"),
        "{manifest}"
    );
    Ok(())
}

#[tokio::test]
async fn backup_schedules_survive_restarts_and_apply_retention() {
    scenario("backup_schedule", async |sandbox| {
        sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
        // The cluster `s` has a schedule in its spec. The test creates this cluster first, so that its backups are made
        // during the other steps.
        let own = bucket(sandbox, "own").await?;
        let scheduled = cluster_with_schedule(sandbox, &own)?;
        let plain = cluster(&sandbox.env, "c", 1)?;
        sandbox.apply(&[plain, scheduled].join("---\n")).await?;
        sandbox.await_members("c", 1).await?;
        sandbox.await_members("s", 1).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "s").await?;
        let written = keys.fill("kept/", KEYS, |_| ()).await?;
        drop(keys);
        step("apply retention", keeps_newest(sandbox)).await?;
        // The CronJob is created here, and its Jobs are checked in the last step, because Kubernetes takes up to a
        // minute to start the first Job.
        let jobs = step("create a CronJob", create_cron_job(sandbox)).await?;
        step("apply ttlSecondsAfterFinished", expires(sandbox)).await?;
        let returned = returns_from_own_backup(sandbox, written);
        step("use the schedule of an EtcdCluster", returned).await?;
        let what = "cronjob_runs: use the CronJob of the example";
        step(what, cron_job_runs(sandbox, &jobs)).await
    })
    .await;
}

/// Makes a backup every five seconds, and restarts the operator after the third backup.
async fn keeps_newest(sandbox: &Sandbox) -> Result<()> {
    let bucket = bucket(sandbox, "retention").await?;
    // The key `etcd_v9_...` has the form of a backup by coreos/etcd-operator, so retention must delete this object.
    for key in SIBLINGS.into_iter().chain(["etcd_v9_2019-01-01-00:00:00"]) {
        bucket.write(key, b"foreign".to_vec()).await?;
    }
    let policy = "  backupPolicy: {backupIntervalInSecond: 5, maxBackups: 2}\n";
    let s3 = sandbox.env.s3()?;
    let path = format!("{}/etcd", bucket.name);
    sandbox
        .apply(&backup_with(s3, "again", "c", &path, policy))
        .await?;
    let mut seen = BTreeSet::new();
    let mut last = String::new();
    for round in 0..5 {
        let done = next_after(sandbox, "again", &last).await?;
        last = location(&done);
        ensure!(last.contains("/etcd_v"), "{last}");
        ensure!(field(&done, "/status/succeeded") == true);
        seen.insert(last.clone());
        if round == 2 {
            // The new pod of the operator must continue the schedule.
            let by_label = ["delete", "pod", "-l", OPERATOR, "--now", "--wait=true"];
            sandbox.kubectl(&by_label).await?;
        }
    }
    ensure!(seen.len() == 5, "{seen:?}");
    suspend(sandbox, "again", true).await?;
    let backups = sandbox.objects(Kind::EtcdBackup);
    let what = "the EtcdBackup is suspended, and two backups are kept";
    let resting = await_object(&backups, "again", what, DEADLINE, |object| {
        condition(object, "Progressing").is_some_and(|found| found["reason"] == "Suspended")
            && has_condition(object, "RetentionApplied", "True")
            && field(object, "/status/backups/0/location") == field(object, "/status/location")
            // The number of backups is checked too, because the condition `RetentionApplied` may belong to the previous
            // backup.
            && field(object, "/status/backups").as_array().map(Vec::len) == Some(2)
    })
    .await?;
    let what = "two backups and the objects with similar names remain";
    let keys = await_keys(&bucket, what, |keys| keys.len() == 4 + SIBLINGS.len()).await?;
    ensure!(stored(&keys, "etcd").len() == 2, "{keys:?}");
    let is_there = |sibling: &&str| keys.iter().any(|key| key == sibling);
    ensure!(SIBLINGS.iter().all(is_there), "{keys:?}");
    await_all_finished(&bucket).await?;
    let newest = location(&resting);
    status_matches_manifest(&bucket, &resting).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, "c", "lastBackup", DEADLINE, |object| {
        *field(object, "/status/lastBackup/location") == newest
    })
    .await
    .map(drop)
}

/// The manifest of the cluster `s`, which has a cron schedule and compression in its spec.
fn cluster_with_schedule(sandbox: &Sandbox, bucket: &Bucket) -> Result<String> {
    let s3 = sandbox.env.s3()?;
    let more = format!(
        "  backup:\n    storageType: S3\n    compression: zstd\n    backupPolicy: {{schedule: \"* * * * *\", maxBackups: 3}}\n    \
         s3: {{path: {}/etcd, awsSecret: aws, endpoint: \"{}\", forcePathStyle: true}}\n",
        bucket.name, s3.endpoint
    );
    cluster_with(&sandbox.env, "s", 1, &more)
}

/// Deletes the cluster. Kubernetes also deletes its EtcdBackup, but the stored backups stay, and a restore creates the
/// cluster again.
async fn returns_from_own_backup(sandbox: &Sandbox, written: i64) -> Result<()> {
    let backups = sandbox.objects(Kind::EtcdBackup);
    let what = "a backup of all keys is complete";
    let made = await_object(&backups, "s", what, DEADLINE, |object| {
        has_condition(object, "Complete", "True")
            && field(object, "/status/etcdRevision").as_i64() >= Some(written)
    })
    .await?;
    let mut owners = made.metadata.owner_references.iter().flatten();
    ensure!(owners.any(|owner| owner.kind == "EtcdCluster"));
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, "s", "lastBackup", DEADLINE, |object| {
        field(object, "/status/lastBackup/revision").as_i64() >= Some(written)
    })
    .await?;
    sandbox.delete_cluster("s").await?;
    await_deleted(sandbox, &["s"]).await?;
    let stored = location(&made);
    let key = stored.strip_prefix("s3://").context("no S3 location")?;
    let back = restore(sandbox.env.s3()?, "back", "s", key);
    sandbox.apply(&back).await?;
    await_complete(&sandbox.objects(Kind::EtcdRestore), "back", DEADLINE).await?;
    sandbox.await_members("s", 1).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "s").await?;
    ensure!(keys.verify("kept/", KEYS).await? >= written);
    Ok(())
}

/// Waits until the EtcdBackups with these names do not exist any more.
async fn await_deleted(sandbox: &Sandbox, names: &[&str]) -> Result<()> {
    let backups = sandbox.objects(Kind::EtcdBackup);
    until(&format!("{names:?} are deleted"), DEADLINE, async || {
        let mut left = Vec::new();
        for name in names {
            if let Some(object) = backups.get_opt(name).await? {
                left.push(conditions_line(&object));
            }
        }
        Ok(if left.is_empty() {
            Poll::Done(())
        } else {
            Poll::NotYet(left.join("; "))
        })
    })
    .await
}

/// A stored backup is deleted with its EtcdBackup only if `deletionPolicy` is Delete. A finalizer of
/// coreos/etcd-operator does not delay the deletion of an EtcdBackup.
async fn expires(sandbox: &Sandbox) -> Result<()> {
    let bucket = bucket(sandbox, "ttl").await?;
    let s3 = sandbox.env.s3()?;
    let ttl = "  ttlSecondsAfterFinished: 1\n";
    let delete = format!("{ttl}  deletionPolicy: Delete\n");
    let manifests = [("kept", ttl), ("expired", delete.as_str())].map(|(name, more)| {
        let path = format!("{}/{name}", bucket.name);
        let manifest = backup_with(s3, name, "c", &path, more);
        let metadata = "metadata: {finalizers: [backup-operator-periodic], ";
        manifest.replacen("metadata: {", metadata, 1)
    });
    sandbox.apply(&manifests.join("---\n")).await?;
    await_deleted(sandbox, &["kept", "expired"]).await?;
    let keys = bucket.keys().await?;
    ensure!(keys == ["kept", "kept.manifest.json"], "{keys:?}");
    Ok(())
}

/// Creates the CronJob of the example, but with a schedule of every minute. Returns the bucket of its backups.
async fn create_cron_job(sandbox: &Sandbox) -> Result<Bucket> {
    let bucket = bucket(sandbox, "cronjob").await?;
    let s3 = sandbox.env.s3()?;
    let mut example =
        std::fs::read_to_string(root().join("examples/example-etcd-backup-cronjob.yaml"))?;
    let path = format!("{}/nightly", bucket.name);
    let store = format!(
        "awsSecret: aws\n        endpoint: \"{}\"\n        forcePathStyle: true\n",
        s3.endpoint
    );
    for (from, to) in [
        ("name: example-etcd-cluster\n", "name: c\n"),
        ("my-bucket/etcd/example-nightly", path.as_str()),
        ("awsSecret: aws\n", store.as_str()),
        ("localhost/etcd-operator:0.1.0", sandbox.env.image.as_str()),
        ("\"0 3 * * *\"", "\"* * * * *\""),
    ] {
        ensure!(
            example.contains(from),
            "the example does not contain {from}"
        );
        example = example.replace(from, to);
    }
    sandbox.apply(&example).await?;
    Ok(bucket)
}

/// Waits until the CronJob has created an EtcdBackup, then suspends the CronJob. Returns the names of all EtcdBackups
/// that the CronJob has created.
async fn scheduled_runs(sandbox: &Sandbox) -> Result<Vec<String>> {
    let backups = sandbox.objects(Kind::EtcdBackup);
    let prefix = format!("{CRON_JOB}-");
    let runs = async || -> Result<Vec<String>> {
        let all = backups.list(&ListParams::default()).await?;
        let names = all.iter().map(ResourceExt::name_any);
        Ok(names.filter(|name| name.starts_with(&prefix)).collect())
    };
    until(
        "the CronJob has created an EtcdBackup",
        DEADLINE,
        async || {
            Ok(if runs().await?.is_empty() {
                Poll::NotYet(sandbox.kubectl(&["get", "cronjobs,jobs"]).await?)
            } else {
                Poll::Done(())
            })
        },
    )
    .await?;
    let suspend = r#"{"spec":{"suspend":true}}"#;
    let suspend = ["patch", "cronjob", CRON_JOB, "--type=merge", "-p", suspend];
    sandbox.kubectl(&suspend).await?;
    await_jobs(sandbox).await?;
    runs().await
}

/// Waits until all Jobs are complete.
async fn await_jobs(sandbox: &Sandbox) -> Result<()> {
    let complete = "--for=condition=Complete";
    let words = ["wait", "job", "--all", complete, "--timeout=60s"];
    sandbox.kubectl(&words).await.map(drop)
}

/// Each Job creates one EtcdBackup, which completes. The CronJob creates some Jobs, and the test creates one, as a user
/// does. The ServiceAccount of the CronJob may only create EtcdBackups.
async fn cron_job_runs(sandbox: &Sandbox, bucket: &Bucket) -> Result<()> {
    let backups = sandbox.objects(Kind::EtcdBackup);
    let mut names = step("await a scheduled run", scheduled_runs(sandbox)).await?;
    let from = format!("--from=cronjob/{CRON_JOB}");
    sandbox.kubectl(&["create", "job", "run-1", &from]).await?;
    await_jobs(sandbox).await?;
    // The Job `run-1` creates an EtcdBackup with the same name.
    names.push("run-1".to_owned());
    for name in &names {
        await_complete(&backups, name, DEADLINE).await?;
    }
    let keys = bucket.keys().await?;
    ensure!(keys == ["nightly", "nightly.manifest.json"], "{keys:?}");
    let account = format!(
        "--as=system:serviceaccount:{}:{CRON_JOB}",
        sandbox.namespace
    );
    for refused in [
        vec!["get", "etcdbackups"],
        vec!["delete", "etcdbackup", "run-1"],
        vec!["get", "secrets"],
        vec!["get", "etcdclusters"],
    ] {
        let mut arguments = vec!["-n", sandbox.namespace.as_str(), account.as_str()];
        arguments.extend(&refused);
        let answer = kubectl::run(&sandbox.env, &arguments).await;
        let error = answer
            .err()
            .with_context(|| format!("{refused:?} was allowed"))?;
        ensure!(format!("{error:#}").contains("Forbidden"), "{error:#}");
    }
    Ok(())
}

/// Retention in a bucket whose listing has several pages. Runs only with `--full`. Without `--full`, the test
/// `retention_handles_more_than_thousand_objects` of the backup operator covers such a bucket with a real S3 server.
mod full {
    use anyhow::ensure;
    use e2e::manifests::{aws_secret, backup_with};
    use e2e::objects::{Kind, await_object, field, has_condition};
    use e2e::{DEADLINE, scenario};
    use futures::{StreamExt, TryStreamExt, stream};

    use super::{SIBLINGS, bucket, location};
    use crate::fixtures::cluster;

    #[tokio::test]
    async fn retention_deletes_backups_beyond_first_list_page() {
        scenario("retention_pages", async |sandbox| {
            let s3 = sandbox.env.s3()?;
            sandbox.apply(&aws_secret(s3, "aws")).await?;
            sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
            sandbox.await_members("c", 1).await?;
            let bucket = bucket(sandbox, "pages").await?;
            let old = (0..1100).map(|number| {
                format!(
                    "etcd_v{number}_2019-01-{:02}-{:02}:{:02}:00",
                    1 + number / 600,
                    number / 60 % 24,
                    number % 60
                )
            });
            let all: Vec<String> = old.chain(SIBLINGS.map(str::to_owned)).collect();
            let writes = all.iter().map(|key| bucket.write(key, b"old".to_vec()));
            let writes = stream::iter(writes).buffer_unordered(16);
            writes.try_collect::<Vec<()>>().await?;
            let policy = "  backupPolicy: {backupIntervalInSecond: 86400, maxBackups: 3}\n";
            let path = format!("{}/etcd", bucket.name);
            sandbox
                .apply(&backup_with(s3, "again", "c", &path, policy))
                .await?;
            let backups = sandbox.objects(Kind::EtcdBackup);
            let kept = await_object(
                &backups,
                "again",
                "old backups are deleted",
                DEADLINE,
                |object| {
                    has_condition(object, "RetentionApplied", "True")
                        && field(object, "/status/backups/0/location")
                            == field(object, "/status/location")
                },
            )
            .await?;
            let left = bucket.keys().await?;
            // The bucket must contain the new backup with its manifest, two old backups (without manifests) that
            // retention keeps, and the objects of other software.
            let count = left.len();
            ensure!(count == 4 + SIBLINGS.len(), "{count} left: {left:?}");
            let is_left = |sibling: &&str| left.iter().any(|key| key == sibling);
            ensure!(SIBLINGS.iter().all(is_left), "{left:?}");
            let newest = location(&kept);
            ensure!(
                left.iter().any(|key| newest.ends_with(key.as_str())),
                "{left:?}"
            );
            Ok(())
        })
        .await;
    }
}
