//! Invalid objects are rejected by the schema, or reported by a condition and an Event. Invalid objects do not affect
//! other objects. `api_rules.rs` tests all rules of the schema.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, restore_with};
use e2e::objects::{
    Kind, await_complete, await_object, condition, conditions_line, field, has_condition,
};
use e2e::store_state::StoreState;
use e2e::{DEADLINE, Keyspace, Sandbox, cluster_scenario, scenario, step};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DynamicObject, ListParams};

use crate::backup_restore_s3::backup;
use crate::fixtures::{cluster, newest_version};
use crate::restore_in_place::{self, restarts_of};
use crate::restore_storage::seed_objects;

/// Ensures that the API server rejects the manifest, with this text in the message.
async fn ensure_rejected(sandbox: &Sandbox, manifest: &str, expected: &str) -> Result<()> {
    match sandbox.apply(manifest).await {
        Ok(printed) => anyhow::bail!("accepted: {printed}\n{manifest}"),
        Err(error) => {
            let text = format!("{error:#}");
            ensure!(text.contains(expected), "expected {expected:?} in: {text}");
            Ok(())
        }
    }
}

/// Waits until the conditions contain all fragments, and a Warning Event about the object exists.
async fn await_reported(
    sandbox: &Sandbox,
    kind: Kind,
    name: &str,
    fragments: &[&str],
) -> Result<()> {
    await_object(
        &sandbox.objects(kind),
        name,
        &format!("conditions with {fragments:?}"),
        DEADLINE,
        |object| {
            let line = conditions_line(object);
            fragments.iter().all(|fragment| line.contains(fragment))
        },
    )
    .await?;
    await_warning(sandbox, kind, name).await
}

/// Waits until the EtcdBackup has the condition Complete=False with this reason and all fragments in its message, and
/// for a Warning Event.
pub(crate) async fn await_waiting(
    sandbox: &Sandbox,
    name: &str,
    reason: &str,
    fragments: &[&str],
) -> Result<()> {
    let backups = sandbox.objects(Kind::EtcdBackup);
    let what = format!("Complete=False for {reason}, with {fragments:?}");
    await_object(&backups, name, &what, DEADLINE, |object| {
        condition(object, "Complete").is_some_and(|found| {
            let message = found["message"].as_str().unwrap_or_default();
            found["status"] == "False"
                && found["reason"] == reason
                && fragments.iter().all(|fragment| message.contains(fragment))
        })
    })
    .await?;
    await_warning(sandbox, Kind::EtcdBackup, name).await
}

async fn await_warning(sandbox: &Sandbox, kind: Kind, name: &str) -> Result<()> {
    e2e::until(
        &format!("a Warning Event about {name}"),
        DEADLINE,
        async || {
            let events = sandbox.events(kind, name).await?;
            Ok(if events.iter().any(|event| event.starts_with("Warning")) {
                e2e::wait::Poll::Done(())
            } else {
                e2e::wait::Poll::NotYet(format!("{events:?}"))
            })
        },
    )
    .await
}

const HEAD: &str = "apiVersion: etcd.database.coreos.com/v1beta2\n";

/// The manifest of an object with this `spec` in one line.
fn object(kind: Kind, name: &str, spec: &str) -> String {
    format!("{HEAD}kind: {kind:?}\nmetadata: {{name: {name}}}\nspec: {spec}\n")
}

/// Invariant 15: invalid objects in the API server do not delay other objects.
#[tokio::test]
async fn invalid_clusters_are_rejected_or_reported() {
    cluster_scenario("bad_cluster", async |sandbox| {
        let zero = object(Kind::EtcdCluster, "zero", "{size: 0}");
        ensure_rejected(sandbox, &zero, "size").await?;

        let version = newest_version(&sandbox.env)?;
        let unreal = "{size: 1, version: \"3.6.999\"}";
        // The operator must ignore the field `busyboxImage`, and report in a condition that it ignores this field.
        let later = format!("{{size: 1, version: \"{version}\", pod: {{busyboxImage: busybox}}}}");
        // The Secrets of this spec do not exist. The operator must start no member, because a member without the
        // Secrets would have no TLS.
        let secret = format!(
            "{{size: 1, version: \"{version}\", TLS: {{static: {{member: {{peerSecret: p, serverSecret: s}}, \
             operatorSecret: o}}}}}}"
        );
        let manifests = [
            ("unreal", unreal),
            ("later", later.as_str()),
            ("secret", secret.as_str()),
        ]
            .map(|(name, spec)| object(Kind::EtcdCluster, name, spec));
        sandbox.apply(&manifests.join("---\n")).await?;
        let kind = Kind::EtcdCluster;
        await_reported(sandbox, kind, "unreal", &["spec.version", "3.6.999"]).await?;
        await_reported(sandbox, kind, "secret", &["spec.TLS"]).await?;
        let clusters = sandbox.objects(kind);
        let what = "FieldsInEffect=False";
        await_object(&clusters, "later", what, DEADLINE, |object| {
            has_condition(object, "FieldsInEffect", "False")
                && conditions_line(object).contains("spec.pod.busyboxImage")
        })
        .await?;
        sandbox.await_members("later", 1).await?;
        ensure!(
            sandbox.member_pods("secret").await?.is_empty(),
            "a member runs without the requested encryption"
        );

        // The cluster `unreal` has a version without an image. The user corrects the version, as the message of the
        // condition recommends.
        sandbox.apply(&cluster(&sandbox.env, "unreal", 1)?).await?;
        sandbox.await_members("unreal", 1).await.map(drop)
    })
    .await;
}

#[tokio::test]
async fn invalid_backups_and_restores_are_rejected_or_reported() {
    scenario("bad_backup", async |sandbox| {
        let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
        let early = restores_of_nothing(sandbox, &bucket);
        step("restore from sources that do not exist", early).await?;

        sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
        sandbox.await_members("c", 1).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        keys.fill_mixed("mixed/", 20).await?;
        let backups = backups_wait_for_correction(sandbox, &bucket);
        step("back up with mistakes", backups).await?;
        let contradictory = contradictory_restores(sandbox, &bucket);
        step("restore into a new cluster with mistakes", contradictory).await?;
        let over = running_cluster_is_unchanged(sandbox, &bucket, &keys);
        step("restore over a cluster with mistakes", over).await?;
        no_restarts(sandbox).await
    })
    .await;
}

/// The API server rejects a restore with an unknown storage type. Restores from a missing backup or with a missing
/// Secret fail. No restore creates a cluster.
async fn restores_of_nothing(sandbox: &Sandbox, bucket: &Bucket) -> Result<()> {
    let s3 = sandbox.env.s3()?;
    sandbox.apply(&aws_secret(s3, "aws")).await?;
    let kind = Kind::EtcdRestore;
    let floppy = "{etcdCluster: {name: c}, backupStorageType: Floppy}";
    ensure_rejected(sandbox, &object(kind, "a", floppy), "backupStorageType").await?;
    let path = format!("{}/nothing-there", bucket.name);
    let absent = restore_with(s3, "absent", "{name: c}", &path, "");
    sandbox.apply(&absent).await?;
    let fragments = ["Failed=True(BackupMissing: ", "nothing-there"];
    await_reported(sandbox, kind, "absent", &fragments).await?;
    let path = format!("{}/etcd.backup", bucket.name);
    let secretless = restore_with(s3, "secretless", "{name: d}", &path, "");
    let secretless = secretless.replace("awsSecret: aws,", "awsSecret: no-such-secret,");
    sandbox.apply(&secretless).await?;
    let fragments = ["Failed=True(SecretMissing: ", "no-such-secret"];
    await_reported(sandbox, kind, "secretless", &fragments).await?;
    clusters_are(sandbox, 0).await
}

async fn clusters_are(sandbox: &Sandbox, count: usize) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let found = clusters.list(&ListParams::default()).await?.items.len();
    ensure!(
        found == count,
        "expected {count} clusters, found {found}: an invalid restore created a cluster"
    );
    Ok(())
}

/// An EtcdBackup with a mistake waits for its correction, while a valid EtcdBackup completes.
async fn backups_wait_for_correction(sandbox: &Sandbox, bucket: &Bucket) -> Result<()> {
    let s3 = sandbox.env.s3()?;
    let kind = Kind::EtcdBackup;
    let periodic = "{etcdCluster: {name: c}, storageType: S3, s3: {path: b/k}, \
                    backupPolicy: {backupIntervalInSecond: -1}}";
    let periodic = object(kind, "a", periodic);
    ensure_rejected(sandbox, &periodic, "backupIntervalInSecond").await?;

    // This EtcdBackup has three mistakes, which the test corrects one by one: the Secret does not exist, then lacks a
    // key, and then has wrong credentials.
    let secret = backup(sandbox, "secret", &bucket.name, "one")?;
    let secret = secret.replace("awsSecret: aws,", "awsSecret: keys,");
    sandbox.apply(&secret).await?;
    let missing = ["spec.s3.awsSecret", "no Secret keys"];
    await_waiting(sandbox, "secret", "SecretMissing", &missing).await?;
    let half = "apiVersion: v1\nkind: Secret\nmetadata: {name: keys}\nstringData: {config: \"[default]\"}\n";
    sandbox.apply(half).await?;
    let lacking = ["spec.s3.awsSecret", "credentials"];
    await_waiting(sandbox, "secret", "SecretMissing", &lacking).await?;
    let mut wrong = s3.clone();
    "wrong".clone_into(&mut wrong.secret_key);
    sandbox.apply(&aws_secret(&wrong, "keys")).await?;
    let denied = ["spec.s3.awsSecret", "access denied"];
    await_waiting(sandbox, "secret", "AccessDenied", &denied).await?;
    ensure_backups(bucket, &[]).await?;
    sandbox.apply(&aws_secret(s3, "keys")).await?;
    let backups = sandbox.objects(kind);
    await_complete(&backups, "secret", DEADLINE).await?;
    ensure_backups(bucket, &["one"]).await?;

    let unreachable_backup = format!(
        "{{etcdEndpoints: [\"http://no-such-host.{}.svc:2379\"], storageType: S3, s3: {{path: {}/two, awsSecret: aws, \
         endpoint: \"{}\", forcePathStyle: true}}}}",
        sandbox.namespace, bucket.name, s3.endpoint
    );
    let all = [
        backup(sandbox, "bucket", "no-such-bucket-anywhere", "one")?,
        object(kind, "unreachable", &unreachable_backup),
        backup(sandbox, "good", &bucket.name, "good")?,
    ];
    sandbox.apply(&all.join("---\n")).await?;
    let missing = ["no-such-bucket-anywhere", "does not exist"];
    await_waiting(sandbox, "bucket", "BucketMissing", &missing).await?;
    let unreachable = ["spec.etcdEndpoints", "no-such-host"];
    await_waiting(sandbox, "unreachable", "EtcdUnreachable", &unreachable).await?;
    await_complete(&backups, "good", DEADLINE).await?;
    // The EtcdBackups `bucket` and `unreachable` wait, so they must have stored nothing.
    ensure_backups(bucket, &["good", "one"]).await
}

/// Ensures that the bucket contains exactly these backups and their manifests, and no unfinished upload.
async fn ensure_backups(bucket: &Bucket, backups: &[&str]) -> Result<()> {
    let pairs = backups
        .iter()
        .flat_map(|key| [(*key).to_owned(), format!("{key}.manifest.json")]);
    let (expected, found) = (pairs.collect::<Vec<_>>(), bucket.keys().await?);
    ensure!(found == expected, "{found:?}, expected {expected:?}");
    let begun = bucket.unfinished_uploads().await?;
    ensure!(begun == 0, "{begun} uploads are unfinished");
    Ok(())
}

/// A restore fails and creates no cluster if the manifest of the backup contradicts the stored backup or the template
/// of the EtcdRestore.
async fn contradictory_restores(sandbox: &Sandbox, bucket: &Bucket) -> Result<()> {
    let s3 = sandbox.env.s3()?;
    let path = format!("{}/good", bucket.name);
    // The template of `older` names an older etcd version than the manifest of the backup. The older etcd could not
    // read the backup.
    let newest = newest_version(&sandbox.env)?;
    let oldest = sandbox.env.etcd_versions.first().context("no versions")?;
    let older = format!("{{name: d, template: {{spec: {{size: 1, version: \"{oldest}\"}}}}}}");
    let older = restore_with(s3, "older", &older, &path, "");

    // The backup `cut` is truncated. The operator must notice the missing bytes before it creates a cluster.
    let mut cut = bucket.read("good").await?;
    cut.truncate(cut.len() / 2);
    bucket.write("cut", cut).await?;
    let manifest = bucket.read("good.manifest.json").await?;
    bucket.write("cut.manifest.json", manifest).await?;
    let path_of_cut = format!("{}/cut", bucket.name);
    let cut = restore_with(s3, "cut", "{name: d}", &path_of_cut, "");

    let kind = Kind::EtcdRestore;
    sandbox.apply(&older).await?;
    let fragments = ["Failed=True(InvalidSpec: ", &newest, oldest, "version"];
    await_reported(sandbox, kind, "older", &fragments).await?;
    sandbox.apply(&cut).await?;
    let fragments = ["Failed=True(SnapshotUnreadable: ", "truncated"];
    await_reported(sandbox, kind, "cut", &fragments).await?;
    clusters_are(sandbox, 1).await
}

/// An invalid restore in place is reported, and does not change the running cluster.
async fn running_cluster_is_unchanged(
    sandbox: &Sandbox,
    bucket: &Bucket,
    keys: &Keyspace,
) -> Result<()> {
    let running = sandbox.await_members("c", 1).await?;
    // The manifest of the backup `newer` names a newer etcd version than the version of the running cluster. The older
    // etcd of the cluster could not read such a backup.
    let manifest = bucket.read("good.manifest.json").await?;
    let mut manifest: serde_json::Value = serde_json::from_slice(&manifest)?;
    ensure!(manifest["etcdVersion"].is_string(), "{manifest}");
    manifest["etcdVersion"] = "3.99.0".into();
    let manifest = serde_json::to_vec(&manifest)?;
    bucket.write("newer.manifest.json", manifest).await?;
    let good = bucket.read("good").await?;
    bucket.write("newer", good).await?;
    keys.fill_mixed("later/", 20).await?;
    let (pods, before) = (restarts_of(sandbox).await?, StoreState::now(keys).await?);

    let unreadable = ["Failed=True(SnapshotUnreadable: ", "truncated"];
    let newer = ["Failed=True(InvalidSpec: ", "3.99.0", "spec.version"];
    let secretless = [
        "Failed=True(SecretMissing: ",
        "spec.s3.awsSecret",
        "no-such-secret",
    ];
    for (name, backup, secret, fragments) in [
        ("over-cut", "cut", "aws", unreadable.as_slice()),
        ("over-newer", "newer", "aws", &newer),
        ("over-secretless", "good", "no-such-secret", &secretless),
    ] {
        let path = format!("{}/{backup}", bucket.name);
        let overwrite = "  overwrite: true\n";
        let s3 = sandbox.env.s3()?;
        let manifest = restore_with(s3, name, "{name: c}", &path, overwrite);
        let secret = format!("awsSecret: {secret},");
        let manifest = manifest.replace("awsSecret: aws,", &secret);
        sandbox.apply(&manifest).await?;
        await_reported(sandbox, Kind::EtcdRestore, name, fragments).await?;
        ensure_unchanged(sandbox, &running).await.context(name)?;
    }
    let now = restarts_of(sandbox).await?;
    ensure!(now == pods, "pods {now:?}, before {pods:?}");
    before.ensure_same(&StoreState::now(keys).await?)
}

/// Ensures that the cluster has not changed, and has neither a restore lock nor objects of a seed.
async fn ensure_unchanged(sandbox: &Sandbox, before: &DynamicObject) -> Result<()> {
    let is = sandbox.await_members("c", 1).await?;
    let claimed = is
        .annotations()
        .contains_key(restore_in_place::RESTORE_LOCK);
    ensure!(!claimed, "the cluster has a restore lock");
    for part in ["/spec", "/status/clusterID", "/status/memberDetails/0/id"] {
        ensure!(field(&is, part) == field(before, part), "{part} changed");
    }
    let left = seed_objects(sandbox, "c").await?;
    ensure!(left.is_empty(), "objects of a seed exist: {left:?}");
    Ok(())
}

/// Ensures that no operator has crashed.
pub(crate) async fn no_restarts(sandbox: &Sandbox) -> Result<()> {
    let operators = ListParams::default().labels("app.kubernetes.io/name=etcd-operator");
    let pods = sandbox.api::<Pod>().list(&operators).await?;
    ensure!(pods.items.len() == 3, "{} operator pods", pods.items.len());
    for pod in pods {
        let restarts = crate::all_pods_lost::restarts(&pod);
        if restarts == 0 {
            continue;
        }
        // An exit without a crash is allowed: an operator that cannot renew its Lease exits.
        let name = pod.metadata.name.unwrap_or_default();
        let last = sandbox.kubectl(&["logs", &name, "--previous"]).await?;
        ensure!(
            restarts == 1 && last.contains("no longer the leader"),
            "{name} restarted {restarts} times: {last}"
        );
    }
    Ok(())
}
