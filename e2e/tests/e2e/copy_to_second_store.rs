//! Each backup is copied to a second store. If a copy fails, the backup is complete nevertheless, and the operator
//! repeats only the copy. A restore uses the copy if the first store cannot be read. This test runs only with `--full`,
//! because it takes more than a minute.

mod full {
    use anyhow::{Context, Result, ensure};
    use e2e::bucket::Bucket;
    use e2e::manifests::backup_with;
    use e2e::objects::{Kind, await_complete, await_object, condition, field, has_condition};
    use e2e::store_state::StoreState;
    use e2e::wait::Poll;
    use e2e::{DEADLINE, Sandbox, scenario, step, until};
    use kube::api::DynamicObject;

    use crate::fixtures::cluster;
    use crate::restore_sources::{await_equal_restore, filled_cluster};

    #[tokio::test]
    async fn backup_is_copied_to_second_store_and_restored_from_there() {
        scenario("copy_to_second_store", async |sandbox| {
            let manifest = cluster(&sandbox.env, "c", 1)?;
            let (first, keys) = filled_cluster(sandbox, &manifest, 1).await?;
            let before = StoreState::now(&keys).await?;
            let name = format!("{}-second", sandbox.namespace);
            let copied = missing_bucket_is_reported(sandbox, &first, &name);
            let second = step("copy after the bucket was created", copied).await?;
            let equal = copy_is_equal(&first, &second);
            step("compare both stores", equal).await?;
            let series = retention_is_separate(sandbox, &first, &second);
            step("retention of a series", series).await?;
            let restored = restores_fall_back(sandbox, &first, &before);
            step("restore from the copy", restored).await?;
            let deleted = deletion_removes_copies(sandbox, &second);
            step("delete the EtcdBackup", deleted).await
        })
        .await;
    }

    /// The lines under `spec` that copy backups to `path` in `bucket`. `more` contains further fields of `copyTo`.
    fn copy(sandbox: &Sandbox, bucket: &str, path: &str, more: &str) -> Result<String> {
        let endpoint = &sandbox.env.s3()?.endpoint;
        Ok(format!(
            "  copyTo:\n  - name: offsite\n    storageType: S3\n    {more}\n    s3: {{path: {bucket}/{path}, \
             awsSecret: aws, endpoint: \"{endpoint}\", forcePathStyle: true}}\n"
        ))
    }

    async fn await_copied(sandbox: &Sandbox, name: &str) -> Result<DynamicObject> {
        let backups = sandbox.objects(Kind::EtcdBackup);
        await_object(&backups, name, "Copied=True", DEADLINE, |object| {
            has_condition(object, "Copied", "True")
        })
        .await
    }

    /// The bucket of the second store does not exist at first. The backup in the first store is complete nevertheless.
    async fn missing_bucket_is_reported(
        sandbox: &Sandbox,
        first: &Bucket,
        second: &str,
    ) -> Result<Bucket> {
        let s3 = sandbox.env.s3()?;
        let more = copy(sandbox, second, "copies/b", "")?;
        let more = format!("{more}  deletionPolicy: Delete\n");
        let path = format!("{}/etcd/b", first.name);
        sandbox
            .apply(&backup_with(s3, "b", "c", &path, &more))
            .await?;
        let backups = sandbox.objects(Kind::EtcdBackup);
        let complete = await_complete(&backups, "b", DEADLINE).await?;
        let failed = await_object(&backups, "b", "Copied=False", DEADLINE, |object| {
            has_condition(object, "Copied", "False")
        })
        .await?;
        let found = condition(&failed, "Copied").context("no condition Copied")?;
        let message = found["message"].as_str().unwrap_or_default();
        ensure!(found["reason"] == "CopyFailed", "{found}");
        ensure!(
            message.contains("offsite") && message.contains(second),
            "{message}"
        );
        ensure!(field(&failed, "/status/succeeded") == true);
        let bucket = Bucket::create(s3, second).await?;
        let copied = await_copied(sandbox, "b").await?;
        // The retry of the copy must not have made the backup again, so these fields are unchanged.
        for pointer in [
            "/status/startTime",
            "/status/completionTime",
            "/status/sha256",
        ] {
            ensure!(
                field(&copied, pointer) == field(&complete, pointer),
                "{pointer}"
            );
        }
        let expected = format!("s3://{second}/copies/b");
        let location = field(&copied, "/status/copies/0/location");
        ensure!(*location == expected.as_str(), "{location}");
        Ok(bucket)
    }

    async fn copy_is_equal(first: &Bucket, second: &Bucket) -> Result<()> {
        let (object, copy) = (first.read("etcd/b").await?, second.read("copies/b").await?);
        ensure!(object == copy, "{} and {} bytes", object.len(), copy.len());
        let manifest = second.read("copies/b.manifest.json").await?;
        let manifest: serde_json::Value = serde_json::from_slice(&manifest)?;
        let original = first.read("etcd/b.manifest.json").await?;
        let original: serde_json::Value = serde_json::from_slice(&original)?;
        for field in ["sha256", "revision", "backupUID", "createdAt"] {
            ensure!(manifest[field] == original[field], "{field}: {manifest}");
        }
        Ok(())
    }

    /// The number of backups whose keys start with this prefix.
    fn count(keys: &[String], prefix: &str) -> usize {
        let objects = keys.iter().filter(|key| key.starts_with(prefix));
        objects
            .filter(|key| !key.ends_with(".manifest.json"))
            .count()
    }

    /// The first store keeps all backups of a series, and the second store keeps only the newest copy.
    async fn retention_is_separate(
        sandbox: &Sandbox,
        first: &Bucket,
        second: &Bucket,
    ) -> Result<()> {
        let policy = "  backupPolicy: {backupIntervalInSecond: 5}\n";
        let more = copy(sandbox, &second.name, "copies/series", "maxBackups: 1")?;
        let path = format!("{}/etcd/series", first.name);
        let manifest = backup_with(
            sandbox.env.s3()?,
            "series",
            "c",
            &path,
            &format!("{policy}{more}"),
        );
        sandbox.apply(&manifest).await?;
        until("three backups and one copy", DEADLINE, async || {
            let stored = count(&first.keys().await?, "etcd/series_v");
            let copies = count(&second.keys().await?, "copies/series_v");
            Ok(if stored >= 3 && copies == 1 {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{stored} backups, {copies} copies"))
            })
        })
        .await?;
        sandbox
            .kubectl(&["delete", "etcdbackup", "series"])
            .await
            .map(drop)
    }

    async fn patch_endpoint(sandbox: &Sandbox, endpoint: &str) -> Result<()> {
        let patch = format!("{{\"spec\":{{\"s3\":{{\"endpoint\":\"{endpoint}\"}}}}}}");
        let words = ["patch", "etcdbackup", "b", "--type=merge", "-p", &patch];
        sandbox.kubectl(&words).await.map(drop)
    }

    /// Restores the backup twice from its copy: while the first store is unreachable, and after another writer has
    /// replaced the object in the first store.
    async fn restores_fall_back(
        sandbox: &Sandbox,
        first: &Bucket,
        before: &StoreState,
    ) -> Result<()> {
        patch_endpoint(sandbox, "http://127.0.0.1:1").await?;
        is_restored_from_copy(sandbox, "unreachable", before).await?;
        patch_endpoint(sandbox, &sandbox.env.s3()?.endpoint).await?;
        first.write("etcd/b", b"other".to_vec()).await?;
        is_restored_from_copy(sandbox, "replaced", before).await
    }

    async fn is_restored_from_copy(
        sandbox: &Sandbox,
        name: &str,
        before: &StoreState,
    ) -> Result<()> {
        let restore = format!(
            "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {{name: {name}}}\nspec:\n  \
             etcdCluster: {{name: {name}}}\n  backup: {{name: b}}\n"
        );
        sandbox.apply(&restore).await?;
        let done = await_equal_restore(sandbox, name, name, before).await?;
        let copy = field(&done, "/status/backup/copy");
        ensure!(copy["name"] == "offsite", "{copy}");
        let complete = condition(&done, "Complete").context("no condition Complete")?;
        let message = complete["message"].as_str().unwrap_or_default();
        ensure!(message.contains("copy offsite"), "{message}");
        sandbox.delete_cluster(name).await
    }

    async fn deletion_removes_copies(sandbox: &Sandbox, second: &Bucket) -> Result<()> {
        sandbox.kubectl(&["delete", "etcdbackup", "b"]).await?;
        let left = second.keys().await?;
        let copies: Vec<&String> = left
            .iter()
            .filter(|key| key.starts_with("copies/b"))
            .collect();
        ensure!(copies.is_empty(), "{copies:?}");
        // The copies of the deleted EtcdBackup `series` must stay, because its deletionPolicy is Retain.
        ensure!(
            left.iter().any(|key| key.starts_with("copies/series_v")),
            "{left:?}"
        );
        Ok(())
    }
}
