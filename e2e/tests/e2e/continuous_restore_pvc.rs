//! Restores of exact points from changes on a PersistentVolumeClaim: a dry run during which the operator crashes, a
//! restore into a new cluster, and a restore in place by path. A restore of a point that is not recorded fails.

mod full {
    use anyhow::{Context, Result, ensure};
    use e2e::objects::{Kind, await_object, condition, field, has_condition, has_failed_for};
    use e2e::store_state::StoreState;
    use e2e::{DEADLINE, Keyspace, Sandbox, scenario, step};
    use kube::api::DynamicObject;

    use crate::backup_pvc::{BACKUP_PVC, pvc_backup};
    use crate::fixtures::{DURABLE, cluster_with, newest_version};
    use crate::restore_crash::{SEARCH, crash_at_each};
    use crate::restore_sources::await_equal_restore;

    const KEYS: usize = 200;

    #[tokio::test]
    async fn exact_points_are_restored_from_changes_on_pvc() {
        scenario("continuous_restore_pvc", async |sandbox| {
            let manifest = cluster_with(&sandbox.env, "c", 1, DURABLE)?;
            sandbox.apply(&manifest).await?;
            sandbox.await_members("c", 1).await?;
            let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
            keys.fill_mixed("mixed/", KEYS).await?;
            let path = record(sandbox).await?;
            let early = write(sandbox, &keys, "early").await?;
            write(sandbox, &keys, "late").await?;
            let new = dry_run_and_restore(sandbox, &early);
            step("restore a revision into a new cluster", new).await?;
            let refused = refuses_future_revision(sandbox, early.revision + 1_000_000);
            step("refuse a revision that is not recorded", refused).await?;
            let in_place = in_place_by_path(sandbox, &path, &early);
            step("restore the revision in place by path", in_place).await
        })
        .await;
    }

    async fn await_status(
        sandbox: &Sandbox,
        what: &str,
        holds: impl Fn(&DynamicObject) -> bool,
    ) -> Result<DynamicObject> {
        let backups = sandbox.objects(Kind::EtcdBackup);
        await_object(&backups, "rec", what, DEADLINE, holds).await
    }

    /// Starts to record the cluster on the PVC, and waits until all changes are stored. Returns the path of the changes
    /// on the volume.
    async fn record(sandbox: &Sandbox) -> Result<String> {
        let backup = pvc_backup("rec", "  continuous: {flushInterval: 500ms}\n");
        sandbox.apply(&format!("{BACKUP_PVC}---\n{backup}")).await?;
        let object = await_status(sandbox, "all changes are stored", |object| {
            has_condition(object, "Recording", "True")
        })
        .await?;
        let location = field(&object, "/status/continuous/location").as_str();
        let path = location.and_then(|location| location.strip_prefix("pvc://backups/"));
        let path = path.context("no location")?;
        Ok(path.trim_end_matches('/').to_owned())
    }

    /// Writes and deletes keys, and waits until their revisions are on the PVC.
    async fn write(sandbox: &Sandbox, keys: &Keyspace, prefix: &str) -> Result<StoreState> {
        for index in 0..20 {
            let key = format!("{prefix}/{index:02}");
            keys.write(&key, vec![b'v'; 50 * index]).await?;
        }
        keys.delete(&format!("{prefix}/1")).await?;
        let state = StoreState::now(keys).await?;
        await_status(sandbox, "the last revision is stored", |object| {
            field(object, "/status/continuous/revision").as_i64() >= Some(state.revision)
        })
        .await?;
        Ok(state)
    }

    /// The manifest of an EtcdRestore into a new cluster. The cluster has the name of the EtcdRestore.
    fn restore(sandbox: &Sandbox, name: &str, continuous: &str) -> Result<String> {
        let version = newest_version(&sandbox.env)?;
        Ok(format!(
            "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {{name: {name}}}\nspec:\n  \
             etcdCluster: {{name: {name}, template: {{spec: {{size: 1, version: \"{version}\"}}}}}}\n  \
             backup: {{name: rec}}\n  continuous: {continuous}\n"
        ))
    }

    async fn dry_run_and_restore(sandbox: &Sandbox, early: &StoreState) -> Result<()> {
        let block = |dry_run: bool| {
            let revision = early.revision;
            format!("{{at: {{revision: {revision}}}, dryRun: {dry_run}}}")
        };
        let manifest = restore(sandbox, "again", &block(true))?;
        crash_at_each(sandbox, SEARCH, "again", &manifest).await?;
        let restores = sandbox.objects(Kind::EtcdRestore);
        let found = await_object(&restores, "again", "the point", DEADLINE, |object| {
            field(object, "/status/conditions")
                .as_array()
                .is_some_and(|all| all.iter().any(|one| one["reason"] == "DryRun"))
        })
        .await?;
        let revision = field(&found, "/status/backup/continuous/revision").as_i64();
        ensure!(revision == Some(early.revision), "{revision:?}");
        let clusters = sandbox.objects(Kind::EtcdCluster);
        ensure!(clusters.get_opt("again").await?.is_none());
        let manifest = restore(sandbox, "again", &block(false))?;
        sandbox.apply(&manifest).await?;
        await_equal_restore(sandbox, "again", "again", early).await?;
        sandbox.delete_cluster("again").await
    }

    async fn refuses_future_revision(sandbox: &Sandbox, revision: i64) -> Result<()> {
        let block = format!("{{at: {{revision: {revision}}}}}");
        let manifest = restore(sandbox, "future", &block)?;
        sandbox.apply(&manifest).await?;
        let restores = sandbox.objects(Kind::EtcdRestore);
        let object = await_object(&restores, "future", "a rejection", DEADLINE, |object| {
            has_failed_for(object, "PointNotRecorded")
        })
        .await?;
        let found = condition(&object, "Failed").context("no condition Failed")?;
        let message = found["message"].as_str().unwrap_or_default();
        ensure!(message.contains("latest: true"), "{message}");
        sandbox
            .kubectl(&["delete", "etcdrestore", "future"])
            .await?;
        Ok(())
    }

    async fn in_place_by_path(sandbox: &Sandbox, path: &str, early: &StoreState) -> Result<()> {
        let revision = early.revision;
        let manifest = format!(
            "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {{name: back}}\nspec:\n  \
             etcdCluster: {{name: c}}\n  backupStorageType: PVC\n  pvc: {{claimName: backups, path: {path}}}\n  \
             overwrite: true\n  continuous: {{at: {{revision: {revision}}}}}\n"
        );
        sandbox.apply(&manifest).await?;
        await_equal_restore(sandbox, "back", "c", early).await?;
        Ok(())
    }
}
