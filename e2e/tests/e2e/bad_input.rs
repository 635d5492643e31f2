//! What a user gets wrong: refused by the schema or said by a condition and an Event, and nothing else stops.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, restore_with};
use e2e::objects::{Kind, await_complete, await_object, condition, conditions_line, field};
use e2e::picture::Picture;
use e2e::{Keyspace, PATIENCE, Sandbox, scenario};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DynamicObject, ListParams};

use crate::backup_restore_s3::backup;
use crate::fixtures::cluster;
use crate::restore_in_place::{self, pods_of};
use crate::restore_sources::{CLAIM, on_claim};
use crate::restore_storage::left;

/// The schema refuses the manifest, with a message that says why.
async fn refused(sandbox: &Sandbox, manifest: &str, expected: &str) -> Result<()> {
    match sandbox.apply(manifest).await {
        Ok(printed) => anyhow::bail!("accepted: {printed}\n{manifest}"),
        Err(error) => {
            let text = format!("{error:#}");
            ensure!(text.contains(expected), "expected {expected:?} in: {text}");
            Ok(())
        }
    }
}

/// The object gets a condition with all the fragments, and a Warning Event.
async fn said(sandbox: &Sandbox, kind: Kind, name: &str, fragments: &[&str]) -> Result<()> {
    await_object(
        &sandbox.objects(kind),
        name,
        &format!("{fragments:?} in its conditions"),
        PATIENCE,
        |object| {
            let line = conditions_line(object);
            fragments.iter().all(|fragment| line.contains(fragment))
        },
    )
    .await?;
    warned(sandbox, kind, name).await
}

/// The EtcdBackup waits for this reason, which its message explains with all the fragments, and there is a Warning Event.
async fn waits(sandbox: &Sandbox, name: &str, reason: &str, fragments: &[&str]) -> Result<()> {
    let backups = sandbox.objects(Kind::EtcdBackup);
    let what = format!("Complete=False for {reason}, with {fragments:?}");
    await_object(&backups, name, &what, PATIENCE, |object| {
        condition(object, "Complete").is_some_and(|found| {
            let message = found["message"].as_str().unwrap_or_default();
            found["status"] == "False"
                && found["reason"] == reason
                && fragments.iter().all(|fragment| message.contains(fragment))
        })
    })
    .await?;
    warned(sandbox, Kind::EtcdBackup, name).await
}

async fn warned(sandbox: &Sandbox, kind: Kind, name: &str) -> Result<()> {
    e2e::until(
        &format!("a Warning Event about {name}"),
        PATIENCE,
        async || {
            let events = sandbox.events(kind, name).await?;
            Ok(if events.iter().any(|event| event.starts_with("Warning")) {
                e2e::wait::Look::Done(())
            } else {
                e2e::wait::Look::NotYet(format!("{events:?}"))
            })
        },
    )
    .await
}

const HEAD: &str = "apiVersion: etcd.database.coreos.com/v1beta2\n";

#[tokio::test]
async fn clusters_that_cannot_work_are_refused_or_explained() {
    scenario("bad_cluster", async |sandbox| {
        let spec = |name: &str, spec: &str| {
            format!("{HEAD}kind: EtcdCluster\nmetadata: {{name: {name}}}\nspec: {spec}\n")
        };
        refused(sandbox, &spec("zero", "{size: 0}"), "size").await?;
        refused(sandbox, &spec("nine", "{size: 9}"), "size").await?;
        let long = "a-name-that-is-longer-than-the-fifty-two-characters-allowed";
        refused(sandbox, &spec(long, "{size: 3}"), "52").await?;
        refused(
            sandbox,
            &spec("version", "{size: 3, version: latest}"),
            "version",
        )
        .await?;

        // A version of which there is no image: said, and mended by setting one that exists.
        sandbox
            .apply(&spec("unreal", "{size: 1, version: \"3.6.999\"}"))
            .await?;
        said(
            sandbox,
            Kind::EtcdCluster,
            "unreal",
            &["spec.version", "3.6.999"],
        )
        .await?;

        // The others go on all the while.
        sandbox.apply(&cluster(&sandbox.env, "good", 3)?).await?;
        sandbox.await_members("good", 3).await?;
        sandbox.apply(&cluster(&sandbox.env, "unreal", 1)?).await?;
        sandbox.await_members("unreal", 1).await?;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn backups_that_cannot_work_are_refused_or_explained() {
    scenario("bad_backup", async |sandbox| {
        let s3 = sandbox.env.s3()?.clone();
        let bucket = Bucket::create(&s3, &sandbox.namespace).await?;
        let spec = |name: &str, spec: &str| format!("{HEAD}kind: EtcdBackup\nmetadata: {{name: {name}}}\nspec: {spec}\n");
        refused(sandbox, &spec("a", "{etcdEndpoints: [\"http://c-client:2379\"], storageType: Floppy}"), "storageType")
            .await?;
        refused(sandbox, &spec("a", "{etcdEndpoints: [], storageType: S3, s3: {path: b/k, awsSecret: aws}}"), "etcdEndpoints")
            .await?;
        refused(sandbox, &spec("a", "{etcdEndpoints: [\"http://c-client:2379\"], storageType: S3}"), "s3").await?;
        let periodic = "{etcdCluster: {name: c}, storageType: S3, s3: {path: b/k}, backupPolicy: {backupIntervalInSecond: -1}}";
        refused(sandbox, &spec("a", periodic), "backupIntervalInSecond").await?;

        sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
        sandbox.await_members("c", 1).await?;

        // The Secret is missing, then lacks a key, then names a wrong identity, then is right: the same object ends well.
        sandbox.apply(&backup(sandbox, "secret", &bucket.name, "one")?).await?;
        waits(sandbox, "secret", "SecretMissing", &["spec.s3.awsSecret", "no Secret aws"]).await?;
        sandbox.apply("apiVersion: v1\nkind: Secret\nmetadata: {name: aws}\nstringData: {config: \"[default]\"}\n").await?;
        waits(sandbox, "secret", "SecretMissing", &["spec.s3.awsSecret", "credentials"]).await?;
        let mut wrong = s3.clone();
        wrong.secret_key = "wrong".to_owned();
        sandbox.apply(&aws_secret(&wrong, "aws")).await?;
        waits(sandbox, "secret", "AccessDenied", &["spec.s3.awsSecret", "access denied"]).await?;
        holds(&bucket, &[]).await?;
        sandbox.apply(&aws_secret(&s3, "aws")).await?;
        await_complete(&sandbox.objects(Kind::EtcdBackup), "secret", PATIENCE).await?;
        holds(&bucket, &["one"]).await?;

        sandbox.apply(&backup(sandbox, "bucket", "no-such-bucket-anywhere", "one")?).await?;
        waits(sandbox, "bucket", "BucketMissing", &["no-such-bucket-anywhere", "does not exist"]).await?;
        let nobody = format!(
            "{{etcdEndpoints: [\"http://nobody.{}.svc:2379\"], storageType: S3, s3: {{path: {}/two, awsSecret: aws, \
             endpoint: \"{}\", forcePathStyle: true}}}}",
            sandbox.namespace, bucket.name, s3.endpoint
        );
        sandbox.apply(&spec("nobody", &nobody)).await?;
        waits(sandbox, "nobody", "EtcdUnreachable", &["spec.etcdEndpoints", "nobody"]).await?;

        // The operator is up and others go on.
        sandbox.apply(&backup(sandbox, "good", &bucket.name, "good")?).await?;
        await_complete(&sandbox.objects(Kind::EtcdBackup), "good", PATIENCE).await?;
        // Of those that cannot work nothing is there.
        holds(&bucket, &["good", "one"]).await?;
        no_restarts(sandbox).await
    })
    .await;
}

/// These backups lie in the bucket, each with its manifest, and nothing else.
async fn holds(bucket: &Bucket, backups: &[&str]) -> Result<()> {
    let pairs = backups
        .iter()
        .flat_map(|key| [(*key).to_owned(), format!("{key}.manifest.json")]);
    let (expected, found) = (pairs.collect::<Vec<_>>(), bucket.keys().await?);
    ensure!(found == expected, "{found:?}, and not {expected:?}");
    let begun = bucket.unfinished_uploads().await?;
    ensure!(begun == 0, "{begun} uploads were begun and not ended");
    Ok(())
}

/// It is made when the claim is there, and goes without one.
#[tokio::test]
async fn backup_pvc_missing_claim_is_named_and_waited_for() {
    scenario("bad_claim", async |sandbox| {
        sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
        sandbox.await_members("c", 1).await?;
        let stays = on_claim("first", "  deletionPolicy: Delete\n");
        sandbox.apply(&stays).await?;
        let said = [
            "spec.pvc.claimName",
            "no PersistentVolumeClaim backups",
            "create it",
        ];
        waits(sandbox, "first", "BucketMissing", &said).await?;
        let beside = ListParams::default().labels("app.kubernetes.io/name=etcd-backup");
        let pods = sandbox.api::<Pod>().list(&beside).await?.items;
        ensure!(pods.is_empty(), "a pod waits for a claim that is not there");

        // Nothing is held back for what no claim can hold.
        sandbox.kubectl(&["delete", "etcdbackup", "first"]).await?;
        sandbox.apply(&on_claim("second", "")).await?;
        waits(sandbox, "second", "BucketMissing", &said).await?;
        sandbox.apply(CLAIM).await?;
        await_complete(&sandbox.objects(Kind::EtcdBackup), "second", PATIENCE).await?;
        no_restarts(sandbox).await
    })
    .await;
}

#[tokio::test]
async fn restores_that_cannot_work_are_refused_or_explained() {
    scenario("bad_restore", async |sandbox| {
        let s3 = sandbox.env.s3()?.clone();
        let bucket = Bucket::create(&s3, &sandbox.namespace).await?;
        sandbox.apply(&aws_secret(&s3, "aws")).await?;
        let spec = |name: &str, spec: &str| {
            format!("{HEAD}kind: EtcdRestore\nmetadata: {{name: {name}}}\nspec: {spec}\n")
        };
        refused(
            sandbox,
            &spec("a", "{etcdCluster: {name: c}, backupStorageType: Floppy}"),
            "backupStorageType",
        )
        .await?;
        let source = |path: &str, secret: &str| {
            format!(
                "s3: {{path: {path}, awsSecret: {secret}, endpoint: \"{}\", forcePathStyle: true}}",
                s3.endpoint
            )
        };
        let absent = format!(
            "{{etcdCluster: {{name: c}}, backupStorageType: S3, {}}}",
            source(&format!("{}/nothing-there", bucket.name), "aws")
        );
        sandbox.apply(&spec("absent", &absent)).await?;
        let said_of_it = ["Failed=True(BackupMissing: ", "nothing-there"];
        said(sandbox, Kind::EtcdRestore, "absent", &said_of_it).await?;
        let secretless = format!(
            "{{etcdCluster: {{name: d}}, backupStorageType: S3, {}}}",
            source(&format!("{}/etcd.backup", bucket.name), "no-such-secret")
        );
        sandbox.apply(&spec("secretless", &secretless)).await?;
        said(
            sandbox,
            Kind::EtcdRestore,
            "secretless",
            &["Failed=True(SecretMissing: ", "no-such-secret"],
        )
        .await?;
        let clusters = sandbox
            .objects(Kind::EtcdCluster)
            .list(&ListParams::default())
            .await?;
        ensure!(
            clusters.items.is_empty(),
            "a restore that cannot work has made a cluster"
        );
        contradictory_restores(sandbox, &bucket).await?;
        no_restarts(sandbox).await
    })
    .await;
}

/// A backup that is there, and what does not fit it; and no storage for the seed.
async fn contradictory_restores(sandbox: &Sandbox, bucket: &Bucket) -> Result<()> {
    let s3 = sandbox.env.s3()?;
    sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
    let living = sandbox.await_members("c", 1).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.paint("painted/", 20).await?;
    sandbox
        .apply(&backup(sandbox, "first", &bucket.name, "etcd.backup")?)
        .await?;
    await_complete(&sandbox.objects(Kind::EtcdBackup), "first", PATIENCE).await?;
    let path = format!("{}/etcd.backup", bucket.name);

    // A template of a release that cannot read what the manifest says.
    let newest = crate::fixtures::newest_version(&sandbox.env)?;
    let oldest = sandbox
        .env
        .etcd_versions
        .first()
        .cloned()
        .unwrap_or_default();
    let template = |more: &str| format!("{{name: d, template: {{spec: {{size: 1{more}}}}}}}");
    let older = template(&format!(", version: \"{oldest}\""));
    sandbox
        .apply(&restore_with(s3, "older", &older, &path, ""))
        .await?;
    said(
        sandbox,
        Kind::EtcdRestore,
        "older",
        &["Failed=True(InvalidSpec: ", &newest, &oldest, "version"],
    )
    .await?;

    // Cut off, which is seen before a cluster is made for it.
    let mut cut = bucket.read("etcd.backup").await?;
    cut.truncate(cut.len() / 2);
    bucket.write("cut", cut).await?;
    bucket
        .write(
            "cut.manifest.json",
            bucket.read("etcd.backup.manifest.json").await?,
        )
        .await?;
    let path_of_cut = format!("{}/cut", bucket.name);
    sandbox
        .apply(&restore_with(s3, "cut", "{name: d}", &path_of_cut, ""))
        .await?;
    said(
        sandbox,
        Kind::EtcdRestore,
        "cut",
        &["Failed=True(SnapshotUnreadable: ", "cut off"],
    )
    .await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let clusters = clusters.list(&ListParams::default()).await?;
    ensure!(
        clusters.items.len() == 1,
        "a restore that cannot work has made a cluster"
    );

    leave_the_living_cluster_alone(sandbox, bucket, &keys, &living).await?;

    // No storage for the seed: it is said with the class, and waited for.
    let nowhere = ", pod: {persistentVolumeClaimSpec: {storageClassName: nowhere, accessModes: [ReadWriteOnce], \
                   resources: {requests: {storage: 64Mi}}}}";
    let nowhere = template(&format!(", version: \"{newest}\"{nowhere}"));
    sandbox
        .apply(&restore_with(s3, "nowhere", &nowhere, &path, ""))
        .await?;
    said(
        sandbox,
        Kind::EtcdRestore,
        "nowhere",
        &["Failed=True(StorageMissing: ", "StorageClass nowhere"],
    )
    .await
}

/// Over a cluster that lives it is said as well what is wrong, and nothing is touched.
async fn leave_the_living_cluster_alone(
    sandbox: &Sandbox,
    bucket: &Bucket,
    keys: &Keyspace,
    living: &DynamicObject,
) -> Result<()> {
    // Of a release that this cluster's etcd cannot read, by its manifest.
    let manifest = bucket.read("etcd.backup.manifest.json").await?;
    let mut manifest: serde_json::Value = serde_json::from_slice(&manifest)?;
    ensure!(manifest["etcdVersion"].is_string(), "{manifest}");
    manifest["etcdVersion"] = "3.99.0".into();
    let manifest = serde_json::to_vec(&manifest)?;
    bucket.write("newer.manifest.json", manifest).await?;
    let good = bucket.read("etcd.backup").await?;
    bucket.write("newer", good).await?;
    keys.paint("later/", 20).await?;
    let (pods, before) = (pods_of(sandbox).await?, Picture::now(keys).await?);

    let unreadable = ["Failed=True(SnapshotUnreadable: ", "cut off"];
    let newer = ["Failed=True(InvalidSpec: ", "3.99.0", "spec.version"];
    let secretless = ["Failed=True(SecretMissing: ", "spec.s3.awsSecret", "nobody"];
    for (name, backup, secret, fragments) in [
        ("over-cut", "cut", "aws", unreadable.as_slice()),
        ("over-newer", "newer", "aws", &newer),
        ("over-secretless", "etcd.backup", "nobody", &secretless),
    ] {
        let path = format!("{}/{backup}", bucket.name);
        let overwrite = "  overwrite: true\n";
        let s3 = sandbox.env.s3()?;
        let manifest = restore_with(s3, name, "{name: c}", &path, overwrite);
        let secret = format!("awsSecret: {secret},");
        let manifest = manifest.replace("awsSecret: aws,", &secret);
        sandbox.apply(&manifest).await?;
        said(sandbox, Kind::EtcdRestore, name, fragments).await?;
        is_as_it_was(sandbox, living).await.context(name)?;
    }
    let now = pods_of(sandbox).await?;
    ensure!(now == pods, "pods {now:?}, and there were {pods:?}");
    before.is_of(&Picture::now(keys).await?)
}

/// Nobody has claimed it, it is the cluster that it was, and there is nothing of a seed.
async fn is_as_it_was(sandbox: &Sandbox, before: &DynamicObject) -> Result<()> {
    let is = sandbox.await_members("c", 1).await?;
    let claimed = is.annotations().contains_key(restore_in_place::CLAIM);
    ensure!(!claimed, "it was claimed");
    for part in ["/spec", "/status/clusterID", "/status/memberDetails/0/id"] {
        ensure!(field(&is, part) == field(before, part), "{part} changed");
    }
    let left = left(sandbox, "c").await?;
    ensure!(left.is_empty(), "there is a seed: {left:?}");
    Ok(())
}

/// Invariant 15: a stored object that cannot be parsed stops nobody else's work.
#[tokio::test]
async fn fields_that_are_not_in_effect_are_named() {
    scenario("not_in_effect", async |sandbox| {
        let version = crate::fixtures::newest_version(&sandbox.env)?;
        let manifest = format!(
            "{HEAD}kind: EtcdCluster\nmetadata: {{name: later}}\nspec:\n  size: 1\n  version: \"{version}\"\n  \
             pod: {{busyboxImage: busybox}}\n"
        );
        sandbox.apply(&manifest).await?;
        await_object(&sandbox.objects(Kind::EtcdCluster), "later", "FieldsInEffect=False", PATIENCE, |object| {
            e2e::objects::has_condition(object, "FieldsInEffect", "False")
                && conditions_line(object).contains("spec.pod.busyboxImage")
        })
        .await?;
        sandbox.await_members("later", 1).await?;

        // Without encryption where encryption was asked for: never.
        let manifest = format!(
            "{HEAD}kind: EtcdCluster\nmetadata: {{name: secret}}\nspec:\n  size: 1\n  version: \"{version}\"\n  TLS:\n    \
             static:\n      member: {{peerSecret: p, serverSecret: s}}\n      operatorSecret: o\n"
        );
        sandbox.apply(&manifest).await?;
        said(sandbox, Kind::EtcdCluster, "secret", &["spec.TLS"]).await?;
        ensure!(sandbox.member_pods("secret").await?.is_empty(), "a member runs without the encryption asked for");
        Ok(())
    })
    .await;
}

/// The operators have not crashed.
async fn no_restarts(sandbox: &Sandbox) -> Result<()> {
    let operators = ListParams::default().labels("app.kubernetes.io/name=etcd-operator");
    let pods = sandbox.api::<Pod>().list(&operators).await?;
    ensure!(pods.items.len() == 3, "{} operator pods", pods.items.len());
    for pod in pods {
        let restarts = crate::all_pods_lost::restarts(&pod);
        if restarts == 0 {
            continue;
        }
        // One that could not renew its lease ends by itself.
        let name = pod.metadata.name.unwrap_or_default();
        let last = sandbox.kubectl(&["logs", &name, "--previous"]).await?;
        ensure!(
            restarts == 1 && last.contains("no longer the leader"),
            "{name} restarted {restarts} times: {last}"
        );
    }
    Ok(())
}
