//! Restores of exact points from encrypted changes, before and after a change of the encryption key. The stored objects
//! reveal no data.

mod full {
    use std::collections::BTreeSet;
    use std::path::Path;

    use anyhow::{Context, Result, ensure};
    use e2e::bucket::Bucket;
    use e2e::leaks::scenario_without_leaks;
    use e2e::manifests::{backup_with, restore_with};
    use e2e::objects::{Kind, await_object, condition, field, has_condition, has_failed_for};
    use e2e::store_state::StoreState;
    use e2e::wait::{Poll, until};
    use e2e::{DEADLINE, Keyspace, Sandbox, step};
    use kube::api::DynamicObject;

    use crate::fixtures::{DURABLE, cluster_with, newest_version};
    use crate::restore_sources::{await_equal_restore, filled_cluster};

    /// A value of the cluster that must not occur in the store.
    const MARK: &str = "a recorded value that must not occur in the store";
    const OLD_KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    const NEW_KEY: &str = "QkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkI=";
    /// The ID of `OLD_KEY`.
    const OLD_ID: [u8; 8] = [0xa6, 0x2e, 0x0f, 0x77, 0x53, 0xa4, 0xdf, 0x18];
    /// The first bytes of an encrypted object. The ID of the encryption key follows them.
    const MAGIC: &[u8] = b"EtcdEnc1";

    #[tokio::test]
    async fn exact_points_are_restored_from_encrypted_changes() {
        scenario_without_leaks("continuous_restore_encrypted", async |sandbox| {
            let manifest = cluster_with(&sandbox.env, "c", 1, DURABLE)?;
            let (bucket, keys) = filled_cluster(sandbox, &manifest, 1).await?;
            sandbox.apply(&secret(&[("2026", OLD_KEY)])).await?;
            let path = record(sandbox, &bucket, "2026").await?;
            let early = write(sandbox, &keys, "early").await?;
            let missing = missing_key_is_reported(sandbox, &bucket);
            step("record while the new key is missing", missing).await?;
            let rotated = use_new_key(sandbox, &bucket, &keys);
            step("record with the new key", rotated).await?;
            let late = write(sandbox, &keys, "late").await?;
            let hidden = objects_reveal_no_data(&bucket);
            step("search the stored objects for a value", hidden).await?;
            let point = format!("{{revision: {}}}", early.revision);
            restore(sandbox, "early", &point, &early).await?;
            restore(sandbox, "late", "{latest: true}", &late).await?;
            let refused = refuses_restore_without_key(sandbox, &bucket, &path);
            step("restore by path without the keys", refused).await
        })
        .await;
    }

    fn secret(keys: &[(&str, &str)]) -> String {
        let entries = keys
            .iter()
            .map(|(name, key)| format!("  \"{name}\": {key}\n"));
        let entries: Vec<String> = entries.collect();
        format!(
            "apiVersion: v1\nkind: Secret\nmetadata: {{name: keys}}\nstringData:\n{}",
            entries.concat()
        )
    }

    async fn apply(sandbox: &Sandbox, bucket: &Bucket, key: &str) -> Result<()> {
        let path = format!("{}/etcd/hidden", bucket.name);
        let more = format!(
            "  continuous: {{flushInterval: 500ms}}\n  encryption: {{secret: keys, key: \"{key}\"}}\n"
        );
        let manifest = backup_with(sandbox.env.s3()?, "rec", "c", &path, &more);
        sandbox.apply(&manifest).await.map(drop)
    }

    async fn await_status(
        sandbox: &Sandbox,
        what: &str,
        holds: impl Fn(&DynamicObject) -> bool,
    ) -> Result<DynamicObject> {
        let backups = sandbox.objects(Kind::EtcdBackup);
        await_object(&backups, "rec", what, DEADLINE, holds).await
    }

    /// Starts to record the cluster, and waits until all changes are stored. Returns the directory of the recorded
    /// changes as BUCKET/PATH.
    async fn record(sandbox: &Sandbox, bucket: &Bucket, key: &str) -> Result<String> {
        apply(sandbox, bucket, key).await?;
        let what = "all changes are stored";
        let holds = |object: &DynamicObject| has_condition(object, "Recording", "True");
        let object = await_status(sandbox, what, holds).await?;
        let location = field(&object, "/status/continuous/location").as_str();
        let path = location.and_then(|location| location.strip_prefix("s3://"));
        let path = path.context("no location")?;
        Ok(path.trim_end_matches('/').to_owned())
    }

    /// Writes some keys, and waits until their revisions are in the store.
    async fn write(sandbox: &Sandbox, keys: &Keyspace, prefix: &str) -> Result<StoreState> {
        for index in 0..20 {
            let key = format!("{prefix}/{index}");
            keys.write(&key, format!("{MARK} {index}").into_bytes())
                .await?;
        }
        let state = StoreState::now(keys).await?;
        await_status(sandbox, "the last revision is stored", |object| {
            field(object, "/status/continuous/revision").as_i64() >= Some(state.revision)
        })
        .await?;
        Ok(state)
    }

    /// Selects a key that the Secret does not contain. The agent continues to record with the old key. The condition
    /// `Recording` and an Event name the missing key.
    async fn missing_key_is_reported(sandbox: &Sandbox, bucket: &Bucket) -> Result<()> {
        apply(sandbox, bucket, "2027").await?;
        let what = "the message names the missing key";
        let object = await_status(sandbox, what, |object| {
            let found = condition(object, "Recording");
            let message = found.and_then(|found| found["message"].as_str());
            message.is_some_and(|message| message.contains("\"2027\""))
        })
        .await?;
        ensure!(
            has_condition(&object, "Recording", "True"),
            "the agent has stopped"
        );
        let words = ["Warning SecretMissing", "2027"];
        sandbox.await_event(Kind::EtcdBackup, "rec", &words).await
    }

    /// Adds the missing key to the Secret, and writes until a segment is encrypted with this key.
    async fn use_new_key(sandbox: &Sandbox, bucket: &Bucket, keys: &Keyspace) -> Result<()> {
        let both = secret(&[("2026", OLD_KEY), ("2027", NEW_KEY)]);
        sandbox.apply(&both).await?;
        until("a segment with the new key", DEADLINE, async || {
            keys.write("rotation", MARK.into()).await?;
            let found = key_ids(bucket).await?;
            Ok(if found.len() > 1 {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{found:?}"))
            })
        })
        .await?;
        let found = key_ids(bucket).await?;
        ensure!(found.contains(OLD_ID.as_slice()), "{found:?}");
        Ok(())
    }

    /// The names of all recorded objects.
    async fn recorded(bucket: &Bucket) -> Result<Vec<String>> {
        let listed = bucket.list("etcd/hidden.continuous/").await?;
        Ok(listed.into_iter().map(|(key, _)| key).collect())
    }

    /// The IDs of the keys with which the first and the last segment are encrypted.
    async fn key_ids(bucket: &Bucket) -> Result<BTreeSet<Vec<u8>>> {
        let mut segments = recorded(bucket).await?;
        segments.retain(|key| key.ends_with(".segment"));
        let (first, last) = (segments.first().cloned(), segments.last().cloned());
        let mut found = BTreeSet::new();
        for key in first.into_iter().chain(last) {
            let object = bucket.read(&key).await?;
            ensure!(object.starts_with(MAGIC), "{key} is not encrypted");
            let id = object.get(MAGIC.len()..MAGIC.len() + OLD_ID.len());
            found.insert(id.context("no ID of the key")?.to_vec());
        }
        Ok(found)
    }

    fn occurs(text: &str, bytes: &[u8]) -> bool {
        bytes
            .windows(text.len())
            .any(|window| window == text.as_bytes())
    }

    async fn objects_reveal_no_data(bucket: &Bucket) -> Result<()> {
        let all = recorded(bucket).await?;
        let has_snapshot = all.iter().any(|key| key.contains("/snapshots/"));
        ensure!(has_snapshot, "no snapshot in {all:?}");
        for key in all {
            let object = bucket.read(&key).await?;
            let is_encrypted = object.starts_with(MAGIC);
            let is_json = Path::new(&key).extension().is_some_and(|end| end == "json");
            ensure!(is_encrypted || is_json, "{key} is not encrypted");
            ensure!(!occurs(MARK, &object), "{key} contains the value");
        }
        Ok(())
    }

    /// The value of `etcdCluster` for a new cluster.
    fn target(sandbox: &Sandbox, name: &str) -> Result<String> {
        let version = newest_version(&sandbox.env)?;
        Ok(format!(
            "{{name: {name}, template: {{spec: {{size: 1, version: \"{version}\"}}}}}}"
        ))
    }

    /// Restores a point by the name of the EtcdBackup, and compares the restored cluster with `state`.
    async fn restore(sandbox: &Sandbox, name: &str, at: &str, state: &StoreState) -> Result<()> {
        let cluster = target(sandbox, name)?;
        let manifest = format!(
            "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {{name: {name}}}\nspec:\n  \
             etcdCluster: {cluster}\n  backup: {{name: rec}}\n  continuous: {{at: {at}}}\n"
        );
        sandbox.apply(&manifest).await?;
        await_equal_restore(sandbox, name, name, state).await?;
        sandbox.delete_cluster(name).await
    }

    /// A restore by path that names no Secret with keys fails. The message names the ID of a key with which a segment
    /// is encrypted.
    async fn refuses_restore_without_key(
        sandbox: &Sandbox,
        bucket: &Bucket,
        path: &str,
    ) -> Result<()> {
        let cluster = target(sandbox, "no-keys")?;
        let more = "  continuous: {at: {latest: true}}\n";
        let manifest = restore_with(sandbox.env.s3()?, "no-keys", &cluster, path, more);
        sandbox.apply(&manifest).await?;
        let restores = sandbox.objects(Kind::EtcdRestore);
        let object = await_object(&restores, "no-keys", "a rejection", DEADLINE, |object| {
            has_failed_for(object, "InvalidSpec")
        })
        .await?;
        let found = condition(&object, "Failed").context("no condition Failed")?;
        let message = found["message"].as_str().unwrap_or_default();
        let ids = key_ids(bucket).await?.into_iter();
        let ids = ids.filter_map(|id| id.try_into().ok().map(u64::from_be_bytes));
        let mut ids = ids.map(|id| format!("{id:016x}"));
        ensure!(ids.any(|id| message.contains(&id)), "{message}");
        Ok(())
    }
}
