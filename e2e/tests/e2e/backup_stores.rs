//! A backup to each kind of store that is not S3, with the Secrets of v1beta2, under the chart's own rights.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::objects::{Kind, await_complete, field};
use e2e::picture::Picture;
use e2e::{Keyspace, PATIENCE, Sandbox, scenario};

use crate::fixtures::cluster;
use crate::restore_sources::compare;

fn variable(name: &str) -> Result<String> {
    std::env::var(name)
        .with_context(|| format!("{name} is not set: run the tests with `cargo xtask test`"))
}

/// Backs the cluster up, once plain and once compressed and numbered; every store tells the size it holds.
async fn backed_up(sandbox: &Sandbox, block: &str, scheme: &str) -> Result<()> {
    sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
    sandbox.await_members("c", 1).await?;
    for (name, more) in [
        ("once", String::new()),
        (
            "again",
            "  compression: zstd\n  backupPolicy: {backupIntervalInSecond: 86400, maxBackups: 2}\n"
                .to_owned(),
        ),
    ] {
        let manifest = format!(
            "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdBackup\nmetadata: {{name: {name}}}\nspec:\n  \
             etcdCluster: {{name: c}}\n{block}{more}"
        );
        sandbox
            .apply(&manifest.replace("PATH", &format!("{}/{name}", sandbox.namespace)))
            .await?;
        let done = await_complete(&sandbox.objects(Kind::EtcdBackup), name, PATIENCE).await?;
        let location = field(&done, "/status/location")
            .as_str()
            .unwrap_or_default()
            .to_owned();
        ensure!(location.starts_with(scheme), "{location}");
        ensure!(location.contains("_v") == (name == "again"), "{location}");
        ensure!(field(&done, "/status/size").as_i64() > Some(0));
    }
    Ok(())
}

/// The cluster is lost and comes back from the newest of its EtcdBackup.
async fn and_restored(sandbox: &Sandbox, block: &str, scheme: &str) -> Result<()> {
    sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
    sandbox.await_members("c", 1).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.paint("painted/", 60).await?;
    let before = Picture::now(&keys).await?;
    drop(keys);
    backed_up(sandbox, block, scheme).await?;
    sandbox.delete_cluster("c").await?;
    let restore = "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {name: back}\nspec:\n  \
                   etcdCluster: {name: c}\n  backup: {name: again}\n";
    sandbox.apply(restore).await?;
    compare(sandbox, "back", "c", &before).await?;
    sandbox.await_members("c", 1).await.map(drop)
}

#[tokio::test]
async fn backup_gcs_and_restore_gcs_with_a_token() {
    scenario("backup_gcs", async |sandbox| {
        sandbox
            .apply("apiVersion: v1\nkind: Secret\nmetadata: {name: gcp}\nstringData: {access-token: any}\n")
            .await?;
        let block = format!(
            "  storageType: GCS\n  gcs: {{path: {}/PATH, gcpSecret: gcp, endpoint: \"{}\"}}\n",
            variable("E2E_BUCKET")?,
            variable("E2E_GCS_ENDPOINT")?
        );
        and_restored(sandbox, &block, "gs://").await
    })
    .await;
}

#[tokio::test]
async fn backup_abs_and_restore_abs_with_an_account_key() {
    scenario("backup_abs", async |sandbox| {
        let secret = format!(
            "apiVersion: v1\nkind: Secret\nmetadata: {{name: abs}}\nstringData: {{storage-account: \"{}\", storage-key: \"{}\"}}\n",
            variable("E2E_ABS_ACCOUNT")?,
            variable("E2E_ABS_KEY")?
        );
        sandbox.apply(&secret).await?;
        let block = format!(
            "  storageType: ABS\n  abs: {{path: {}/PATH, absSecret: abs, endpoint: \"{}\"}}\n",
            variable("E2E_BUCKET")?,
            variable("E2E_ABS_ENDPOINT")?
        );
        and_restored(sandbox, &block, "abs://").await
    })
    .await;
}

/// Its S3 protocol, at an endpoint that is not OSS's own.
#[tokio::test]
async fn backup_oss_with_an_access_key_is_complete_and_restored() {
    scenario("backup_oss", async |sandbox| {
        let s3 = sandbox.env.s3()?;
        let secret = format!(
            "apiVersion: v1\nkind: Secret\nmetadata: {{name: oss}}\nstringData: {{accessKeyID: \"{}\", accessKeySecret: \"{}\"}}\n",
            s3.access_key, s3.secret_key
        );
        sandbox.apply(&secret).await?;
        let bucket = Bucket::create(s3, &sandbox.namespace).await?;
        let block = format!(
            "  storageType: OSS\n  oss: {{path: {}/PATH, ossSecret: oss, endpoint: \"{}\"}}\n",
            bucket.name, s3.endpoint
        );
        and_restored(sandbox, &block, "s3://").await
    })
    .await;
}

#[tokio::test]
async fn backup_local_lies_on_the_operators_volume() {
    scenario("backup_local", async |sandbox| {
        sandbox
            .install_operators_with(&["--set", "backups.localVolume.emptyDir.sizeLimit=64Mi"])
            .await?;
        let rollout = [
            "rollout",
            "status",
            "deployment/etcd-backup-operator",
            "--timeout=300s",
        ];
        sandbox.kubectl(&rollout).await?;
        backed_up(
            sandbox,
            "  storageType: Local\n  local: {path: PATH}\n",
            "file:///backups",
        )
        .await
    })
    .await;
}
