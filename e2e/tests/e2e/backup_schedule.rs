//! Backups that are made again and again: when, what is kept, and what is left when the operator dies on the way.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::kubectl;
use e2e::manifests::{aws_secret, backup_with, restore};
use e2e::objects::{
    Kind, await_complete, await_object, condition, conditions_line, field, has_condition,
};
use e2e::wait::{Look, until, until_allowed};
use e2e::{Keyspace, PATIENCE, Sandbox, scenario};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DynamicObject, ListParams};

use crate::fixtures::{cluster, cluster_with, root};

const MANIFEST: &str = ".manifest.json";
const OPERATOR: &str = "app.kubernetes.io/component=etcd-backup-operator";

/// A cluster of one member that serves, a bucket, and the Secret for it.
async fn prepared(sandbox: &Sandbox) -> Result<Bucket> {
    let s3 = sandbox.env.s3()?;
    let bucket = Bucket::create(s3, &sandbox.namespace).await?;
    sandbox.apply(&aws_secret(s3, "aws")).await?;
    sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
    sandbox.await_members("c", 1).await?;
    Ok(bucket)
}

fn location(object: &DynamicObject) -> String {
    field(object, "/status/location")
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

/// The next backup after the one at `before`, complete.
async fn next_after(sandbox: &Sandbox, name: &str, before: &str) -> Result<DynamicObject> {
    await_object(
        &sandbox.objects(Kind::EtcdBackup),
        name,
        "the next backup",
        PATIENCE,
        |object| has_condition(object, "Complete", "True") && location(object) != before,
    )
    .await
}

/// Waits until the bucket holds exactly these keys.
async fn await_keys(
    bucket: &Bucket,
    what: &str,
    holds: impl Fn(&[String]) -> bool,
) -> Result<Vec<String>> {
    until(what, PATIENCE, async || {
        let keys = bucket.keys().await?;
        Ok(if holds(&keys) {
            Look::Done(keys)
        } else {
            Look::NotYet(format!("{keys:?}"))
        })
    })
    .await
}

/// Waits until no upload is left unfinished.
async fn await_all_finished(bucket: &Bucket) -> Result<()> {
    until("nothing unfinished is left", PATIENCE, async || {
        Ok(match bucket.unfinished_uploads().await? {
            0 => Look::Done(()),
            left => Look::NotYet(format!("{left} uploads")),
        })
    })
    .await
}

/// The backups of `path` whose manifest is beside them; the names are those of v1beta2.
fn backups<'a>(keys: &'a [String], path: &str) -> Vec<&'a str> {
    let whole = keys
        .iter()
        .filter(|key| keys.contains(&format!("{key}{MANIFEST}")));
    whole
        .map(String::as_str)
        .filter(|key| key.starts_with(&format!("{path}_v")))
        .collect()
}

/// What the status says of the newest is what its manifest says.
async fn is_as_its_manifest_says(bucket: &Bucket, object: &DynamicObject) -> Result<()> {
    let newest = location(object);
    let key = newest
        .strip_prefix(&format!("s3://{}/", bucket.name))
        .context("in the bucket")?;
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
async fn backup_schedule_goes_on_across_restarts_and_retention_keeps_what_it_says() {
    scenario("backup_schedule", async |sandbox| {
        let bucket = prepared(sandbox).await?;
        // A sibling whose names begin alike, and one of the old operator's, which goes first.
        let siblings = [
            "etcd-prod_v9_2019-01-01-00:00:00",
            "etcd_v2_v9_2019-01-01-00:00:00",
            "etcd_vault",
        ];
        for key in siblings.into_iter().chain(["etcd_v9_2019-01-01-00:00:00"]) {
            bucket.write(key, b"somebody's".to_vec()).await?;
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
                // Nothing lives in the process: another one goes on.
                let by_label = ["delete", "pod", "-l", OPERATOR, "--now", "--wait=true"];
                sandbox.kubectl(&by_label).await?;
            }
        }
        ensure!(seen.len() == 5, "{seen:?}");
        let suspend = r#"{"spec":{"backupPolicy":{"suspend":true}}}"#;
        sandbox
            .kubectl(&[
                "patch",
                "etcdbackup",
                "again",
                "--type=merge",
                "-p",
                suspend,
            ])
            .await?;
        let resting = await_object(
            &sandbox.objects(Kind::EtcdBackup),
            "again",
            "suspended, with two backups kept",
            PATIENCE,
            |object| {
                condition(object, "Progressing").is_some_and(|found| found["reason"] == "Suspended")
                    && has_condition(object, "RetentionApplied", "True")
                    && field(object, "/status/backups/0/location")
                        == field(object, "/status/location")
                    // What it says of retention may be of the backup before.
                    && field(object, "/status/backups").as_array().map(Vec::len) == Some(2)
            },
        )
        .await?;
        let keys = await_keys(&bucket, "two backups and the siblings are left", |keys| {
            keys.len() == 4 + siblings.len()
        })
        .await?;
        ensure!(backups(&keys, "etcd").len() == 2, "{keys:?}");
        ensure!(
            siblings
                .iter()
                .all(|sibling| keys.contains(&(*sibling).to_owned())),
            "{keys:?}"
        );
        await_all_finished(&bucket).await?;
        let newest = location(&resting);
        is_as_its_manifest_says(&bucket, &resting).await?;
        // And the cluster tells of it.
        await_object(
            &sandbox.objects(Kind::EtcdCluster),
            "c",
            "lastBackup",
            PATIENCE,
            |object| *field(object, "/status/lastBackup/location") == newest,
        )
        .await?;
        Ok(())
    })
    .await;
}

/// By the cluster's own spec, by cron, compressed; and the backup comes back.
#[tokio::test]
async fn backup_schedule_of_a_clusters_spec_goes_with_it_and_its_backups_stay() {
    scenario("cluster_backup", async |sandbox| {
        let s3 = sandbox.env.s3()?;
        let bucket = Bucket::create(s3, &sandbox.namespace).await?;
        sandbox.apply(&aws_secret(s3, "aws")).await?;
        let more = format!(
            "  backup:\n    storageType: S3\n    compression: zstd\n    backupPolicy: {{schedule: \"* * * * *\", maxBackups: 3}}\n    \
             s3: {{path: {}/etcd, awsSecret: aws, endpoint: \"{}\", forcePathStyle: true}}\n",
            bucket.name, s3.endpoint
        );
        sandbox.apply(&cluster_with(&sandbox.env, "c", 1, &more)?).await?;
        sandbox.await_members("c", 1).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        let written = keys.fill("kept/", 500, |_| ()).await?;
        let made = await_object(&sandbox.objects(Kind::EtcdBackup), "c", "a backup with all keys", PATIENCE, |object| {
            has_condition(object, "Complete", "True") && field(object, "/status/etcdRevision").as_i64() >= Some(written)
        })
        .await?;
        ensure!(made.metadata.owner_references.iter().flatten().any(|owner| owner.kind == "EtcdCluster"));
        await_object(&sandbox.objects(Kind::EtcdCluster), "c", "lastBackup", PATIENCE, |object| {
            field(object, "/status/lastBackup/revision").as_i64() >= Some(written)
        })
        .await?;
        drop(keys);
        sandbox.delete_cluster("c").await?;
        until("the EtcdBackup goes with its cluster", PATIENCE, async || {
            let left = sandbox.objects(Kind::EtcdBackup).list(&ListParams::default()).await?.items.len();
            Ok(if left == 0 { Look::Done(()) } else { Look::NotYet(format!("{left} left")) })
        })
        .await?;
        let stored = location(&made);
        let key = stored.strip_prefix("s3://").context("an S3 location")?;
        sandbox.apply(&restore(s3, "back", "c", key)).await?;
        await_complete(&sandbox.objects(Kind::EtcdRestore), "back", PATIENCE).await?;
        sandbox.await_members("c", 1).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        ensure!(keys.verify("kept/", 500).await? >= written);
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn ttl_removes_the_object_and_the_stored_backup_only_where_that_is_asked_for() {
    scenario("ttl", async |sandbox| {
        let bucket = prepared(sandbox).await?;
        let s3 = sandbox.env.s3()?;
        for (name, more) in [
            ("stays", "  ttlSecondsAfterFinished: 1\n"),
            (
                "goes",
                "  ttlSecondsAfterFinished: 1\n  deletionPolicy: Delete\n",
            ),
        ] {
            let path = format!("{}/{name}", bucket.name);
            sandbox
                .apply(&backup_with(s3, name, "c", &path, more))
                .await?;
        }
        until("both EtcdBackups are gone", PATIENCE, async || {
            let left = sandbox
                .objects(Kind::EtcdBackup)
                .list(&ListParams::default())
                .await?
                .items;
            let lines: Vec<String> = left.iter().map(conditions_line).collect();
            Ok(if left.is_empty() {
                Look::Done(())
            } else {
                Look::NotYet(lines.join("; "))
            })
        })
        .await?;
        let keys = bucket.keys().await?;
        ensure!(keys == ["stays", "stays.manifest.json"], "{keys:?}");
        Ok(())
    })
    .await;
}

/// The example's account may create EtcdBackups and nothing else; what its ConfigMap holds is accepted and made.
#[tokio::test]
async fn backup_cronjob_makes_backups_with_the_least_rights() {
    scenario("backup_cronjob", async |sandbox| {
        let bucket = prepared(sandbox).await?;
        let s3 = sandbox.env.s3()?;
        let example =
            std::fs::read_to_string(root().join("examples/example-etcd-backup-cronjob.yaml"))?;
        let ours = example
            .replace("name: example-etcd-cluster\n", "name: c\n")
            .replace(
                "my-bucket/etcd/example-nightly",
                &format!("{}/nightly", bucket.name),
            )
            .replace(
                "awsSecret: aws\n",
                &format!(
                    "awsSecret: aws\n        endpoint: \"{}\"\n        forcePathStyle: true\n",
                    s3.endpoint
                ),
            );
        sandbox.apply(&ours).await?;
        let account = format!(
            "--as=system:serviceaccount:{}:example-etcd-backup-cronjob",
            sandbox.namespace
        );
        let manifest = sandbox
            .kubectl(&[
                "get",
                "configmap",
                "example-etcd-backup-cronjob",
                "-o",
                "jsonpath={.data.backup\\.yaml}",
            ])
            .await?;
        let mut names = Vec::new();
        for _ in 0..2 {
            // What the job's container does, as the job's account.
            let create = [
                "-n",
                &sandbox.namespace,
                &account,
                "create",
                "-f",
                "-",
                "-o",
                "name",
            ];
            // The account may do so when the API server has heard of its rights.
            let created = until_allowed("the account may create a backup", PATIENCE, async || {
                let created = kubectl::run_with_input(&sandbox.env, &create, Some(&manifest));
                Ok(Look::Done(created.await?))
            })
            .await?;
            let name = created
                .trim()
                .rsplit_once('/')
                .context("a name")?
                .1
                .to_owned();
            await_complete(&sandbox.objects(Kind::EtcdBackup), &name, PATIENCE).await?;
            names.push(name);
        }
        ensure!(names[0] != names[1]);
        let keys = bucket.keys().await?;
        ensure!(keys == ["nightly", "nightly.manifest.json"], "{keys:?}");
        for refused in [
            vec!["get", "etcdbackups"],
            vec!["delete", "etcdbackup", names[0].as_str()],
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
    })
    .await;
}

/// How often the operator's container was started again.
pub(crate) async fn restarts(sandbox: &Sandbox) -> Result<i32> {
    let pods = sandbox
        .api::<Pod>()
        .list(&ListParams::default().labels(OPERATOR))
        .await?;
    let statuses = pods.items.iter().flat_map(|pod| pod.status.iter());
    let containers = statuses.flat_map(|status| status.container_statuses.iter().flatten());
    Ok(containers.map(|container| container.restart_count).sum())
}

pub(crate) async fn fail_at(sandbox: &Sandbox, point: Option<&str>) -> Result<()> {
    let variable = point.map_or("FAILPOINTS-".to_owned(), |point| {
        format!("FAILPOINTS={point}=panic")
    });
    let deployment = "deployment/etcd-backup-operator";
    sandbox
        .kubectl(&["set", "env", deployment, &variable])
        .await?;
    sandbox
        .kubectl(&["rollout", "status", deployment, "--timeout=300s"])
        .await?;
    sandbox.await_pods_of("etcd-backup-operator", 1).await
}

/// The operator dies between any two writes of a backup: what comes after makes one whole backup of it, and what was
/// complete is not made again.
#[tokio::test]
async fn operator_crash_backup_is_completed_or_adopted_by_the_next_process() {
    scenario("operator_crash_backup", async |sandbox| {
        let bucket = prepared(sandbox).await?;
        let s3 = sandbox.env.s3()?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        let mut expected = Vec::new();
        for (point, adopted) in [
            ("backup-before-commit", false),
            ("backup-before-manifest", false),
            ("backup-after-manifest", true),
        ] {
            fail_at(sandbox, Some(point)).await?;
            let before = keys.fill("before/", 10, |_| ()).await?;
            let policy = "  backupPolicy: {backupIntervalInSecond: 86400, maxBackups: 9}\n";
            let path = format!("{}/{point}", bucket.name);
            sandbox
                .apply(&backup_with(s3, point, "c", &path, policy))
                .await?;
            until("the operator dies", PATIENCE, async || {
                let count = restarts(sandbox).await?;
                Ok(if count > 0 {
                    Look::Done(())
                } else {
                    Look::NotYet("it lives".to_owned())
                })
            })
            .await?;
            let backups = sandbox.objects(Kind::EtcdBackup);
            let attempts = "/status/unfinishedAttempts";
            if !adopted {
                // Whoever comes after knows of those that have ended with their operator.
                let counted = field(&backups.get(point).await?, attempts).as_i64();
                ensure!(
                    counted.is_some_and(|count| count > 0),
                    "{point}: {counted:?}"
                );
            }
            // Written after: in the backup only if that was made again.
            keys.fill("after/", 10, |_| ()).await?;
            fail_at(sandbox, None).await?;
            let done = await_complete(&backups, point, PATIENCE).await?;
            ensure!(field(&done, attempts).is_null(), "{point}: {done:?}");
            let revision = field(&done, "/status/etcdRevision")
                .as_i64()
                .context("a revision")?;
            ensure!(
                (revision == before) == adopted,
                "{point}: revision {revision}, {before} before"
            );
            expected.push(location(&done));
        }
        let what = "each backup with its manifest, and nothing else";
        let stored = await_keys(&bucket, what, |keys| keys.len() == 2 * expected.len()).await?;
        for location in expected {
            let key = location
                .strip_prefix(&format!("s3://{}/", bucket.name))
                .context("in the bucket")?;
            ensure!(stored.contains(&key.to_owned()), "{key} of {stored:?}");
        }
        await_all_finished(&bucket).await
    })
    .await;
}
