//! Moves a cluster of coreos/etcd-operator with etcd 3.3 as in `docs/migration.md`: by adoption and upgrades, and by
//! backup and restore. etcd 3.3.27 is built from source.

use anyhow::{Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, backup, restore_with};
use e2e::objects::{Kind, await_complete, await_object, field, has_condition};
use e2e::store_state::StoreState;
use e2e::{DEADLINE, Keyspace, Sandbox, Writer, scenario, step};
use serde_json::json;

use crate::adopt_coreos::{Form, adopt_version};
use crate::fixtures::newest_version;

/// The version that `e2e/testbed/coreos-etcd-3.3` builds.
const VERSION: &str = "3.3.27";
/// Number of keys. With so many keys, the Raft log has more than 500 entries. The upgrade would then stop if the
/// operator used the applied index of Raft, which etcd 3.3 does not report.
const KEYS: usize = 600;

/// Sets the version, and waits until all members run it.
async fn upgrade(sandbox: &Sandbox, writer: &Writer, version: &str) -> Result<()> {
    let patch = json!({ "spec": { "version": version } }).to_string();
    let words = ["patch", "etcdcluster", "c", "--type=merge", "-p", &patch];
    sandbox.kubectl(&words).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let upgraded = |object: &kube::api::DynamicObject| {
        let details = field(object, "/status/memberDetails").as_array();
        let all = details.is_some_and(|all| all.iter().all(|one| one["version"] == version));
        all && field(object, "/status/currentVersion") == version
            && has_condition(object, "Upgrading", "False")
    };
    let what = format!("all members run {version}");
    await_object(&clusters, "c", &what, DEADLINE * 2, upgraded).await?;
    sandbox.await_members("c", 3).await?;
    writer.await_more(20).await
}

/// Backs up the cluster with etcd 3.3, and restores the backup into the newest etcd.
async fn restore_backup(sandbox: &Sandbox) -> Result<()> {
    let (env, s3) = (&sandbox.env, sandbox.env.s3()?);
    let bucket = Bucket::create(s3, &sandbox.namespace).await?;
    sandbox.apply(&aws_secret(s3, "aws")).await?;
    let path = format!("{}/old", bucket.name);
    let keys = Keyspace::of_cluster(env, &sandbox.namespace, "c").await?;
    keys.fill("kept/", KEYS, |_| ()).await?;
    sandbox.apply(&backup(s3, "old", "c", &path)).await?;
    let backups = sandbox.objects(Kind::EtcdBackup);
    let done = await_complete(&backups, "old", DEADLINE).await?;
    let revision = field(&done, "/status/etcdRevision").as_i64();
    let before = StoreState::at(&keys, revision.unwrap_or_default()).await?;
    drop(keys);

    let version = newest_version(env)?;
    let target = format!("{{name: new, template: {{spec: {{size: 1, version: \"{version}\"}}}}}}");
    let manifest = restore_with(s3, "new", &target, &path, "");
    sandbox.apply(&manifest).await?;
    let restores = sandbox.objects(Kind::EtcdRestore);
    let done = await_complete(&restores, "new", DEADLINE).await?;
    sandbox.await_members("new", 1).await?;
    ensure!(field(&done, "/status/restoredRevision").as_i64() == revision);
    let keys = Keyspace::of_cluster(env, &sandbox.namespace, "new").await?;
    keys.verify("kept/", KEYS).await?;
    before.ensure_same(&StoreState::at(&keys, before.revision).await?)
}

/// Runs only with `--full`, because the test takes more than a minute.
mod full {
    use super::*;

    #[tokio::test]
    async fn cluster_with_etcd_3_3_is_adopted_and_upgraded() {
        scenario("migrate_coreos_3_3", async |sandbox| {
            let adopted = adopt_version(sandbox, Form::Volumes, VERSION);
            let writer = step("adopt the cluster", adopted).await?;
            step("restore a backup", restore_backup(sandbox)).await?;
            for minor in ["3.4", "3.5"] {
                let version = sandbox.env.newest_of(minor)?;
                let upgraded = upgrade(sandbox, &writer, &version);
                step(&format!("upgrade to {version}"), upgraded).await?;
            }
            writer
                .finish("move of a cluster with etcd 3.3")
                .await
                .map(drop)
        })
        .await;
    }
}
