//! Backups to GCS, ABS, OSS and a local volume, and restores from all of these except the local volume. S3 has its own
//! tests. The Secrets have the format of v1beta2.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::objects::{Kind, await_complete, field};
use e2e::sandbox::bare_scenario;
use e2e::store_state::StoreState;
use e2e::{DEADLINE, Keyspace, Sandbox, step};

use crate::fixtures::cluster;
use crate::restore_sources::await_equal_restore;

const API: &str = "apiVersion: etcd.database.coreos.com/v1beta2";
/// The ends of the names of two EtcdBackups for each store, and their additional lines under `spec`. `once` stores its
/// backup under its path. `again` has a policy, so its key contains the path and the revision. The backup of `again` is
/// compressed.
const POLICIES: [(&str, &str); 2] = [
    ("once", ""),
    (
        "again",
        "  compression: zstd\n  backupPolicy: {backupIntervalInSecond: 86400, maxBackups: 2}\n",
    ),
];

struct Store {
    name: &'static str,
    /// Lines under `spec` of an EtcdBackup. `PATH` is a placeholder for the path.
    block: String,
    /// The prefix of `status.location`.
    scheme: &'static str,
    /// True if the restore operator can read from the store.
    restores: bool,
}

fn variable(name: &str) -> Result<String> {
    std::env::var(name)
        .with_context(|| format!("{name} is not set: run the tests with `cargo xtask test`"))
}

/// All stores except S3. OSS uses the protocol of S3, so its endpoint is the S3 server of the testbed.
fn stores(sandbox: &Sandbox, bucket: &Bucket) -> Result<[Store; 4]> {
    let shared = variable("E2E_BUCKET")?;
    let gcs = format!(
        "  storageType: GCS\n  gcs: {{path: {shared}/PATH, gcpSecret: gcp, endpoint: \"{}\"}}\n",
        variable("E2E_GCS_ENDPOINT")?
    );
    let abs = format!(
        "  storageType: ABS\n  abs: {{path: {shared}/PATH, absSecret: abs, endpoint: \"{}\"}}\n",
        variable("E2E_ABS_ENDPOINT")?
    );
    let oss = format!(
        "  storageType: OSS\n  oss: {{path: {}/PATH, ossSecret: oss, endpoint: \"{}\"}}\n",
        bucket.name,
        sandbox.env.s3()?.endpoint
    );
    let local = String::from("  storageType: Local\n  local: {path: PATH}\n");
    let of = |name, block, scheme, restores| Store {
        name,
        block,
        scheme,
        restores,
    };
    Ok([
        of("gcs", gcs, "gs://", true),
        of("abs", abs, "abs://", true),
        of("oss", oss, "s3://", true),
        of("local", local, "file:///backups", false),
    ])
}

fn secrets(sandbox: &Sandbox) -> Result<String> {
    let s3 = sandbox.env.s3()?;
    let abs = format!(
        "storage-account: \"{}\", storage-key: \"{}\"",
        variable("E2E_ABS_ACCOUNT")?,
        variable("E2E_ABS_KEY")?
    );
    let oss = format!(
        "accessKeyID: \"{}\", accessKeySecret: \"{}\"",
        s3.access_key, s3.secret_key
    );
    // The Secret contains the URL of the testbed's server as `endpoint`, because the operator sends access tokens only
    // to Google or to this endpoint.
    let gcp = format!(
        "access-token: any, endpoint: \"{}\"",
        variable("E2E_GCS_ENDPOINT")?
    );
    let secrets = [("gcp", gcp), ("abs", abs), ("oss", oss)].map(|(name, data)| {
        format!(
            "apiVersion: v1\nkind: Secret\nmetadata: {{name: {name}}}\nstringData: {{{data}}}\n"
        )
    });
    Ok(secrets.join("---\n"))
}

#[tokio::test]
async fn gcs_abs_and_oss_backups_are_saved_and_restored() {
    bare_scenario("backup_stores", async |sandbox| {
        let local = "backups.localVolume.emptyDir.sizeLimit=64Mi";
        sandbox.install_operators_with(&["--set", local]).await?;
        sandbox.apply(&secrets(sandbox)?).await?;
        sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
        sandbox.await_members("c", 1).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        keys.fill_mixed("mixed/", 60).await?;
        let before = StoreState::now(&keys).await?;
        let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
        let stores = stores(sandbox, &bucket)?;
        step("back up to every store", back_up_to_all(sandbox, &stores)).await?;
        // These keys are newer than the backups, so no restored cluster may contain them.
        keys.fill("later/", 10, |_| ()).await?;
        let restored = are_restored(sandbox, &stores, &before);
        step("restore from every readable store", restored).await
    })
    .await;
}

/// Backs up the cluster to all stores concurrently, and ensures that each status has the location and the size of the
/// backup.
async fn back_up_to_all(sandbox: &Sandbox, stores: &[Store]) -> Result<()> {
    let mut manifests = Vec::new();
    for store in stores {
        for (kind, policy) in POLICIES {
            let name = format!("{}-{kind}", store.name);
            let path = format!("{}/{name}", sandbox.namespace);
            let block = store.block.replace("PATH", &path);
            manifests.push(format!(
                "{API}\nkind: EtcdBackup\nmetadata: {{name: {name}}}\nspec:\n  etcdCluster: {{name: c}}\n{block}{policy}"
            ));
        }
    }
    sandbox.apply(&manifests.join("---\n")).await?;
    let backups = sandbox.objects(Kind::EtcdBackup);
    for store in stores {
        for (kind, _) in POLICIES {
            let name = format!("{}-{kind}", store.name);
            let done = await_complete(&backups, &name, DEADLINE).await?;
            let location = field(&done, "/status/location").as_str();
            let location = location.with_context(|| format!("{name} has no location"))?;
            ensure!(location.starts_with(store.scheme), "{location}");
            ensure!(location.contains("_v") == (kind == "again"), "{location}");
            let size = field(&done, "/status/size").as_i64();
            ensure!(size > Some(0), "{name}: size {size:?}");
        }
    }
    Ok(())
}

/// Restores the backup of the EtcdBackup `{store}-again` of each readable store, all concurrently. Each new cluster has
/// the name of its store.
async fn are_restored(sandbox: &Sandbox, stores: &[Store], before: &StoreState) -> Result<()> {
    let readable = || stores.iter().filter(|store| store.restores);
    let manifests = readable().map(|Store { name, .. }| {
        format!(
            "{API}\nkind: EtcdRestore\nmetadata: {{name: {name}}}\nspec:\n  etcdCluster: {{name: {name}}}\n  \
             backup: {{name: {name}-again}}\n"
        )
    });
    let manifests: Vec<String> = manifests.collect();
    sandbox.apply(&manifests.join("---\n")).await?;
    for store in readable() {
        await_equal_restore(sandbox, store.name, store.name, before).await?;
        sandbox.await_members(store.name, 1).await?;
    }
    Ok(())
}
