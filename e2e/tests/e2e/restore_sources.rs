//! Restores from every kind of source. Each restored cluster has the keys, versions, leases, revisions and hash of its
//! backup.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, backup_with, restore_with};
use e2e::objects::{Kind, await_complete, await_object, field, has_condition};
use e2e::store_state::StoreState;
use e2e::{DEADLINE, Keyspace, Sandbox, scenario, step};
use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;

use crate::backup_schedule::{location, suspend};
use crate::concurrent_restores::{two_into_one_new_cluster, two_over_one_cluster};
use crate::fixtures::{DURABLE, cluster_with, newest_version, root};
use crate::restore_other_namespace::{other_namespace, save};

const API: &str = "apiVersion: etcd.database.coreos.com/v1beta2";
const KEYS: usize = 200;

/// Creates a bucket, and a cluster with leases, old versions of keys, and deleted keys.
pub(crate) async fn filled_cluster(
    sandbox: &Sandbox,
    manifest: &str,
    size: usize,
) -> Result<(Bucket, Keyspace)> {
    let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
    sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
    sandbox.apply(manifest).await?;
    sandbox.await_members("c", size).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.fill_mixed("mixed/", KEYS).await?;
    Ok((bucket, keys))
}

/// Waits until the restore is complete, and ensures that the cluster has the data `before`.
pub(crate) async fn await_equal_restore(
    sandbox: &Sandbox,
    name: &str,
    cluster: &str,
    before: &StoreState,
) -> Result<DynamicObject> {
    let done = await_complete(&sandbox.objects(Kind::EtcdRestore), name, DEADLINE).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, cluster).await?;
    let after = StoreState::at(&keys, before.revision).await?;
    before
        .ensure_same(&after)
        .with_context(|| format!("cluster {cluster}, restored by {name}"))?;
    ensure!(field(&done, "/status/restoredRevision").as_i64() == Some(before.revision));
    Ok(done)
}

/// The seconds between two times in the status of an object.
pub(crate) fn seconds_between(object: &DynamicObject, from: &str, to: &str) -> Result<i64> {
    let (from, to) = (time(object, from)?, time(object, to)?);
    Ok(to.duration_since(from).as_secs())
}

/// The time at a JSON pointer.
pub(crate) fn time(object: &DynamicObject, pointer: &str) -> Result<Timestamp> {
    let text = field(object, pointer)
        .as_str()
        .context(pointer.to_owned())?;
    text.parse().with_context(|| format!("{pointer}: {text}"))
}

/// A cluster `c` with one member and a volume, and its backups.
pub(crate) struct Sources {
    pub(crate) bucket: Bucket,
    pub(crate) keys: Keyspace,
    /// The first of two backups of the EtcdBackup `often`.
    pub(crate) early: Source,
    /// The second of two backups of the EtcdBackup `often`.
    pub(crate) late: Source,
    /// A time between the first and the second backup.
    between: String,
}

/// The path and the data of a backup.
pub(crate) struct Source {
    pub(crate) path: String,
    pub(crate) state: StoreState,
}

fn path(backup: &DynamicObject) -> Result<String> {
    let location = location(backup);
    let path = location.strip_prefix("s3://").context("no S3 location")?;
    Ok(path.to_owned())
}

#[tokio::test]
async fn complete_clusters_are_restored_from_every_source() {
    scenario("restore_sources", async |sandbox| {
        let sources = sources(sandbox).await?;
        let at_once = concurrent_sources(sandbox, &sources);
        step("restore several sources at once", at_once).await?;
        let other = other_namespace(sandbox, &sources);
        step("restore in another namespace", other).await?;
        let two = two_into_one_new_cluster(sandbox, &sources);
        step("restore two backups into one new cluster", two).await?;
        let two = two_over_one_cluster(sandbox, &sources);
        step("restore two backups over one cluster", two).await?;
        let old = old_etcd(sandbox, &sources.bucket);
        step("restore backups of etcd 3.2 and 3.3", old).await
    })
    .await;
}

async fn sources(sandbox: &Sandbox) -> Result<Sources> {
    let manifest = cluster_with(&sandbox.env, "c", 1, DURABLE)?;
    let (bucket, keys) = filled_cluster(sandbox, &manifest, 1).await?;
    let early = StoreState::now(&keys).await?;
    let policy = "  backupPolicy: {backupIntervalInSecond: 8, maxBackups: 9}\n";
    let s3 = sandbox.env.s3()?;
    let often = backup_with(s3, "often", "c", &format!("{}/etcd", bucket.name), policy);
    sandbox.apply(&often).await?;
    let backups = sandbox.objects(Kind::EtcdBackup);
    let first = await_complete(&backups, "often", DEADLINE).await?;
    let between = field(&first, "/status/lastSuccessDate").as_str();
    let between = between.context("no lastSuccessDate")?.to_owned();
    keys.delete("mixed/0001").await?;
    keys.fill_mixed("more/", 30).await?;
    let late = StoreState::now(&keys).await?;
    let what = "a backup with the later keys";
    let second = await_object(&backups, "often", what, DEADLINE, |object| {
        has_condition(object, "Complete", "True")
            && field(object, "/status/etcdRevision").as_i64() == Some(late.revision)
            && field(object, "/status/backups/0/location") == field(object, "/status/location")
    })
    .await?;
    suspend(sandbox, "often", true).await?;
    Ok(Sources {
        early: Source {
            path: path(&first)?,
            state: early,
        },
        late: Source {
            path: path(&second)?,
            state: late,
        },
        bucket,
        keys,
        between,
    })
}

/// Restores by path, by the name of an EtcdBackup, by name and time, and from a manual snapshot, all at the same time.
/// Each restore creates a new cluster, and the original cluster does not change.
async fn concurrent_sources(sandbox: &Sandbox, sources: &Sources) -> Result<()> {
    let (bucket, keys) = (&sources.bucket, &sources.keys);
    let (early, late) = (&sources.early, &sources.late);
    bucket
        .write("by-hand.db", save(sandbox, keys).await?)
        .await?;
    let s3 = sandbox.env.s3()?;
    let version = newest_version(&sandbox.env)?;
    let template = format!("{{name: e, template: {{spec: {{size: 1, version: \"{version}\"}}}}}}");
    let by_hand = format!("{}/by-hand.db", bucket.name);
    let by_name = |name: &str, more: &str| {
        format!(
            "{API}\nkind: EtcdRestore\nmetadata: {{name: {name}}}\nspec:\n  etcdCluster: {{name: {name}}}\n  \
             backup: {{name: often{more}}}\n"
        )
    };
    let before = format!(", before: \"{}\"", sources.between);
    // The EtcdRestore `c` creates the cluster `d`, to show that the two names may differ.
    let all = [
        restore_with(s3, "c", "{name: d}", &late.path, ""),
        by_name("newest", ""),
        by_name("before", &before),
        restore_with(s3, "by-hand", &template, &by_hand, ""),
    ];
    sandbox.apply(&all.join("---\n")).await?;
    let made = [
        ("c", "d", &late.state),
        ("newest", "newest", &late.state),
        ("before", "before", &early.state),
        ("by-hand", "e", &late.state),
    ];
    let mut ids = vec![format!("{:x}", keys.cluster_id().await?)];
    let mut times = Vec::new();
    for (name, cluster, state) in made {
        let done = await_equal_restore(sandbox, name, cluster, state).await?;
        let is = sandbox.await_members(cluster, 1).await?;
        let id = field(&done, "/status/clusterID").as_str();
        let id = id.context("no cluster ID")?;
        ensure!(field(&is, "/status/clusterID") == id, "{cluster}");
        ids.push(id.to_owned());
        let at = |pointer| time(&done, pointer);
        times.push((at("/status/startTime")?, at("/status/completionTime")?));
        let own = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, cluster).await?;
        own.fill(&format!("{cluster}/"), 5, |_| ()).await?;
    }
    // Each cluster must have its own keys, and no keys of another cluster.
    for (_, cluster, _) in made {
        let own = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, cluster).await?;
        for (_, other, _) in made {
            let count = if other == cluster { 5 } else { 0 };
            own.verify(&format!("{other}/"), count).await?;
        }
    }
    ids.sort();
    ids.dedup();
    ensure!(ids.len() == 5, "{ids:?}");
    // Every restore must start before the first restore ends, because restores must not wait for each other.
    let last = times.iter().map(|(start, _)| start).max();
    let first = times.iter().map(|(_, end)| end).min();
    ensure!(
        last <= first,
        "the restores did not run concurrently: {times:?}"
    );
    late.state.ensure_same(&StoreState::now(keys).await?)?;
    let delete = ["delete", "etcdcluster", "d", "newest", "before", "e"];
    sandbox
        .kubectl(&[&delete[..], &["--wait=false"]].concat())
        .await
        .map(drop)
}

/// Restores two backups of coreos/etcd-operator, from etcd 3.2 and 3.3. The backup of etcd 3.2 is restored into the
/// newest etcd with three members, and the backup of etcd 3.3 into the oldest etcd whose image the nodes have.
async fn old_etcd(sandbox: &Sandbox, bucket: &Bucket) -> Result<()> {
    let s3 = sandbox.env.s3()?;
    let oldest = sandbox.env.etcd_versions.first().context("no versions")?;
    let newest = newest_version(&sandbox.env)?;
    let all = [
        ("3.2.32", "old-a", &newest, 3),
        ("3.3.27", "old-b", oldest, 1),
    ];
    for (old, cluster, version, size) in all {
        let key = format!("{cluster}/etcd.backup_v72_2019-03-01-12:00:00");
        let backup = old_etcd_file(&format!("etcd-{old}.db"))?;
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
        let done = await_complete(&restores, cluster, DEADLINE).await?;
        let is = sandbox.await_members(cluster, size).await?;
        ensure!(field(&is, "/status/currentVersion") == version.as_str());
        let output = old_etcd_json(&format!("etcd-{old}.json"))?;
        let hashes = old_etcd_json(&format!("etcd-{old}.hash.json"))?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, cluster).await?;
        // The keys at the newest revision (72) and at revision 40 must equal the recorded output of etcdctl.
        for (answer, revision) in [("all", 72), ("revision40", 40)] {
            let before = StoreState::from_etcdctl(&output[answer], &output["leases"])?;
            let after = StoreState::at(&keys, revision).await?;
            before.ensure_same_keys(&after).with_context(|| {
                format!("backup of etcd {old} in etcd {version}, revision {revision}")
            })?;
            // An equal hash shows that the restore has kept the history, because the hash covers all changes since
            // the compaction.
            let recorded = &hashes[answer][0]["HashKV"];
            let expected = (
                recorded["hash"].as_u64(),
                recorded["compact_revision"].as_i64(),
            );
            let found = (Some(after.hash.0.into()), Some(after.hash.1));
            ensure!(
                found == expected,
                "at revision {revision}, etcd {version} has the hash {found:?}, but etcd {old} has {expected:?}"
            );
        }
        ensure!(field(&done, "/status/restoredRevision") == 72);
        ensure!(keys.revision().await? == 72);
    }
    Ok(())
}

fn old_etcd_json(file: &str) -> Result<serde_json::Value> {
    serde_json::from_slice(&old_etcd_file(file)?).with_context(|| file.to_owned())
}

/// A file that etcd 3.2 or 3.3 has written.
fn old_etcd_file(file: &str) -> Result<Vec<u8>> {
    let path = root().join("e2e/fixtures/coreos").join(file);
    std::fs::read(&path).with_context(|| format!("read {}", path.display()))
}
