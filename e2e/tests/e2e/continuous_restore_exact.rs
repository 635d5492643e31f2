//! Restores of exact points from recorded changes: by the name of the EtcdBackup, and in place by path. Each restored
//! cluster has the keys, versions, leases, revisions and hash that the recorded cluster had at the point.

mod full {
    use std::time::Duration;

    use anyhow::{Context, Result, ensure};
    use e2e::manifests::{backup_with, restore_with};
    use e2e::objects::{Kind, await_object, field, has_condition, has_failed_for};
    use e2e::store_state::StoreState;
    use e2e::{DEADLINE, Keyspace, Sandbox, scenario, step};
    use k8s_openapi::jiff::Timestamp;
    use kube::api::DynamicObject;

    use crate::fixtures::{DURABLE, cluster_with, newest_version};
    use crate::restore_sources::{await_equal_restore, filled_cluster};

    /// Number of revisions at which a restored cluster is compared with the recorded cluster.
    const POINTS: usize = 20;

    /// The recorded history of a cluster.
    struct History {
        keys: Keyspace,
        /// The directory of the recorded changes, as BUCKET/PATH.
        path: String,
        /// The state at `early_time`.
        early: StoreState,
        /// A time after `early` and before the next change.
        early_time: String,
        /// States at different revisions, in the order of the revisions.
        states: Vec<StoreState>,
    }

    #[tokio::test]
    async fn exact_points_are_restored_from_recorded_changes() {
        scenario("continuous_restore_exact", async |sandbox| {
            let history = record(sandbox).await?;
            let latest = latest_by_name(sandbox, &history);
            step("restore the latest revision by name", latest).await?;
            let time = dry_run_and_restore_of_time(sandbox, &history);
            step("find the revision of a time, and restore it", time).await?;
            let refused = refuses_future_time(sandbox);
            step("refuse a time that is not recorded", refused).await?;
            let in_place = in_place_by_path(sandbox, &history);
            step("restore an early revision in place by path", in_place).await
        })
        .await;
    }

    async fn record(sandbox: &Sandbox) -> Result<History> {
        let manifest = cluster_with(&sandbox.env, "c", 1, DURABLE)?;
        let (bucket, keys) = filled_cluster(sandbox, &manifest, 1).await?;
        let path = format!("{}/etcd/exact", bucket.name);
        let more = "  continuous: {flushInterval: 500ms}\n";
        let manifest = backup_with(sandbox.env.s3()?, "rec", "c", &path, more);
        sandbox.apply(&manifest).await?;
        let object = await_status(sandbox, "all changes are stored", |object| {
            has_condition(object, "Recording", "True")
        })
        .await?;
        let location = field(&object, "/status/continuous/location").as_str();
        let path = location.and_then(|location| location.strip_prefix("s3://"));
        let path = path.context("no location")?.trim_end_matches('/');
        for index in 0..30 {
            let key = format!("early/{index:03}");
            keys.write(&key, vec![b'e'; 100 * index]).await?;
        }
        let early = StoreState::now(&keys).await?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let early_time = Timestamp::now().to_string();
        tokio::time::sleep(Duration::from_secs(2)).await;
        keys.write("recorded", b"first".to_vec()).await?;
        let mut states = vec![StoreState::now(&keys).await?];
        while states.len() < POINTS {
            for index in 0..=states.len() {
                let key = format!("late/{:02}", (index * 7) % 13);
                keys.write(&key, format!("{index}").into_bytes()).await?;
            }
            if states.len() % 5 == 0 {
                keys.delete("late/0").await?;
            }
            states.push(StoreState::now(&keys).await?);
        }
        let last = states.last().map(|state| state.revision);
        await_status(sandbox, "the last revision is stored", |object| {
            field(object, "/status/continuous/revision").as_i64() >= last
        })
        .await?;
        Ok(History {
            keys,
            path: path.to_owned(),
            early,
            early_time,
            states,
        })
    }

    async fn await_status(
        sandbox: &Sandbox,
        what: &str,
        holds: impl Fn(&DynamicObject) -> bool,
    ) -> Result<DynamicObject> {
        let backups = sandbox.objects(Kind::EtcdBackup);
        await_object(&backups, "rec", what, DEADLINE, holds).await
    }

    /// The value of `etcdCluster` for a new cluster.
    fn target(sandbox: &Sandbox, name: &str) -> Result<String> {
        let version = newest_version(&sandbox.env)?;
        Ok(format!(
            "{{name: {name}, template: {{spec: {{size: 1, version: \"{version}\"}}}}}}"
        ))
    }

    /// The manifest of an EtcdRestore that names the EtcdBackup. `continuous` is the value of `spec.continuous`.
    fn by_name(name: &str, cluster: &str, continuous: &str) -> String {
        format!(
            "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {{name: {name}}}\nspec:\n  \
             etcdCluster: {cluster}\n  backup: {{name: rec}}\n  continuous: {continuous}\n"
        )
    }

    /// Restores the latest point by the name of the EtcdBackup. The restored cluster has all revisions after the base,
    /// so the test compares it with each of `history.states`.
    async fn latest_by_name(sandbox: &Sandbox, history: &History) -> Result<()> {
        let cluster = target(sandbox, "latest")?;
        let manifest = by_name("latest", &cluster, "{at: {latest: true}}");
        sandbox.apply(&manifest).await?;
        let last = history.states.last().context("no state")?;
        let done = await_equal_restore(sandbox, "latest", "latest", last).await?;
        let point = field(&done, "/status/backup/continuous");
        ensure!(point["revision"].as_i64() == Some(last.revision), "{point}");
        ensure!(point["segments"].as_i64() > Some(0), "{point}");
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "latest").await?;
        for state in &history.states {
            let restored = StoreState::at(&keys, state.revision).await?;
            state.ensure_same(&restored)?;
        }
        Ok(())
    }

    async fn dry_run_and_restore_of_time(sandbox: &Sandbox, history: &History) -> Result<()> {
        let cluster = target(sandbox, "at-time")?;
        let block = |dry_run: bool| {
            let time = &history.early_time;
            format!("{{at: {{time: \"{time}\"}}, dryRun: {dry_run}}}")
        };
        let manifest = by_name("at-time", &cluster, &block(true));
        sandbox.apply(&manifest).await?;
        let restores = sandbox.objects(Kind::EtcdRestore);
        let found = await_object(&restores, "at-time", "the point", DEADLINE, |object| {
            field(object, "/status/conditions")
                .as_array()
                .is_some_and(|all| all.iter().any(|one| one["reason"] == "DryRun"))
        })
        .await?;
        let revision = field(&found, "/status/backup/continuous/revision").as_i64();
        ensure!(revision == Some(history.early.revision), "{revision:?}");
        ensure!(field(&found, "/status/seed").is_null());
        let clusters = sandbox.objects(Kind::EtcdCluster);
        ensure!(clusters.get_opt("at-time").await?.is_none());
        let manifest = by_name("at-time", &cluster, &block(false));
        sandbox.apply(&manifest).await?;
        await_equal_restore(sandbox, "at-time", "at-time", &history.early).await?;
        Ok(())
    }

    async fn refuses_future_time(sandbox: &Sandbox) -> Result<()> {
        let cluster = target(sandbox, "future")?;
        let block = "{at: {time: \"2100-01-01T00:00:00Z\"}}";
        sandbox.apply(&by_name("future", &cluster, block)).await?;
        let restores = sandbox.objects(Kind::EtcdRestore);
        await_object(&restores, "future", "a rejection", DEADLINE, |object| {
            has_failed_for(object, "PointNotRecorded")
        })
        .await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        ensure!(clusters.get_opt("future").await?.is_none());
        Ok(())
    }

    async fn in_place_by_path(sandbox: &Sandbox, history: &History) -> Result<()> {
        let before = history.keys.cluster_id().await?;
        let revision = history.early.revision;
        let more = format!("  overwrite: true\n  continuous: {{at: {{revision: {revision}}}}}\n");
        let s3 = sandbox.env.s3()?;
        let manifest = restore_with(s3, "back", "{name: c}", &history.path, &more);
        sandbox.apply(&manifest).await?;
        await_equal_restore(sandbox, "back", "c", &history.early).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        ensure!(keys.cluster_id().await? != before);
        Ok(())
    }
}
