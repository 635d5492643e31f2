//! Makes the planned changes, and waits until the cluster matches its spec.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::manifests::{backup, restore_with};
use e2e::objects::{
    Kind, await_complete, await_object, condition, conditions_line, field, has_condition, is_ready,
    leader, ready_members,
};
use e2e::soak::{Change, Desired, Snapshot, read_pairs};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::ResourceExt;
use kube::api::{DynamicObject, ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::CLUSTER;
use crate::story::Story;

/// Time limit for a backup. A fault can happen during the backup.
const BACKUP_TIMEOUT: Duration = Duration::from_mins(3);
/// Time limit until the cluster matches its spec. A change of the version with a fault during the change takes
/// longest.
const SETTLE_TIMEOUT: Duration = Duration::from_mins(6);

/// The manifest of the cluster before the first change.
pub(crate) fn cluster(desired: &Desired) -> String {
    let (size, version) = (desired.size, &desired.version);
    format!(
        "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdCluster\nmetadata: {{name: {CLUSTER}}}\nspec:\n  \
         size: {size}\n  version: \"{version}\"\n  memberReplacement: {{after: 20s}}\n  pod:\n    \
         persistentVolumeClaimSpec:\n      accessModes: [ReadWriteOnce]\n      \
         resources: {{requests: {{storage: 64Mi}}}}\n"
    )
}

/// Starts a change without waiting for its end.
pub(crate) async fn begin(change: &Change, number: usize, sandbox: &Sandbox) -> Result<()> {
    let spec = match change {
        Change::Size(size) => json!({ "size": size }),
        Change::Version(version) => json!({ "version": version }),
        Change::SnapshotCount(count) => json!({ "etcd": { "snapshotCount": count } }),
        Change::Tls(true) => json!({ "TLS": { "generated": {}, "acceptPlaintext": true } }),
        // TLS can be switched off, because `Tls(true)` has set `acceptPlaintext`. The operator switches TLS of a
        // running cluster only with this option.
        Change::Tls(false) => json!({ "TLS": Value::Null }),
        Change::Backup { .. } => return begin_backup(&backup_name(number), sandbox).await,
    };
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let patch = Patch::Merge(json!({ "spec": spec }));
    let params = PatchParams::default();
    let set = clusters.patch(CLUSTER, &params, &patch).await;
    set.with_context(|| format!("set {spec}")).map(drop)
}

fn backup_name(number: usize) -> String {
    format!("backup-{number}")
}

/// The path of the backup `name`. The bucket has the name of the namespace.
fn path(sandbox: &Sandbox, name: &str) -> String {
    format!("{}/{name}", sandbox.namespace)
}

async fn begin_backup(name: &str, sandbox: &Sandbox) -> Result<()> {
    let s3 = sandbox.env.s3()?;
    let manifest = backup(s3, name, CLUSTER, &path(sandbox, name));
    sandbox.apply(&manifest).await.map(drop)
}

/// Waits until the cluster matches its spec, no work is pending, and all deleted objects are removed.
///
/// The status can be outdated after a fault, so this function also compares pods and volumes. If this wait ended too
/// early, the next step could destroy a second volume before the operator has replaced the first.
pub(crate) async fn settle(desired: &Desired, deleted: &[String], sandbox: &Sandbox) -> Result<()> {
    let what = format!("the cluster matches its spec: {desired:?}");
    until(&what, SETTLE_TIMEOUT, async || {
        let object = sandbox.objects(Kind::EtcdCluster).get(CLUSTER).await?;
        if !is_reported(desired, &object) {
            return Ok(Poll::NotYet(conditions_line(&object)));
        }
        let mut ready = ready_members(&object);
        ready.sort();
        let selector = ListParams::default().labels(&format!("app=etcd,etcd_cluster={CLUSTER}"));
        let pods = sandbox.api::<Pod>().list(&selector).await?;
        let selector = ListParams::default().labels(&format!("etcd_cluster={CLUSTER}"));
        let volumes = sandbox
            .api::<PersistentVolumeClaim>()
            .list(&selector)
            .await?;
        let pods_are_ready = pods.iter().all(is_ready);
        let pods = names_without(deleted, &pods.items);
        let volumes = names_without(deleted, &volumes.items);
        Ok(if pods_are_ready && pods == ready && volumes == ready {
            Poll::Done(())
        } else {
            Poll::NotYet(format!(
                "ready members {ready:?}, pods {pods:?}, volumes {volumes:?}"
            ))
        })
    })
    .await
}

/// The sorted names of the objects. An object that is terminating, or whose UID is in `deleted`, appears as `-`.
fn names_without<K: ResourceExt>(deleted: &[String], objects: &[K]) -> Vec<String> {
    let mut names: Vec<String> = objects
        .iter()
        .map(|object| {
            let uid = object.uid().unwrap_or_default();
            if deleted.contains(&uid) || object.meta().deletion_timestamp.is_some() {
                "-".to_owned()
            } else {
                object.name_any()
            }
        })
        .collect();
    names.sort();
    names
}

/// True if the status reports the desired state and no pending work.
fn is_reported(desired: &Desired, object: &DynamicObject) -> bool {
    let Desired { size, version, tls } = desired;
    let details = field(object, "/status/memberDetails").as_array();
    let healthy = details.into_iter().flatten().filter(|one| {
        one["version"] == version.as_str() && one["healthy"] == true && one["role"] != "Learner"
    });
    let upgrades = condition(object, "Upgrading").is_some_and(|it| it["status"] != "False");
    let peers = field(object, "/status/TLS/peers");
    let peers_are_desired = if *tls {
        peers == "Tls" && has_condition(object, "TLSReady", "True")
    } else {
        peers == "Plain" || peers.is_null()
    };
    healthy.count() == *size
        && !upgrades
        && peers_are_desired
        && leader(object).is_ok()
        && field(object, "/status/observedGeneration").as_i64() == object.metadata.generation
        && has_condition(object, "Available", "True")
        && has_condition(object, "Progressing", "False")
        && has_condition(object, "Degraded", "False")
}

/// Waits until a planned backup has ended, and restores this backup if `change` plans a restore. If the backup fails
/// because of a fault, the EtcdBackup must report the failure, and a second backup must complete.
pub(crate) async fn end(
    change: &Change,
    number: usize,
    sandbox: &Sandbox,
    story: &Story,
) -> Result<Option<Snapshot>> {
    let Change::Backup { restore } = change else {
        return Ok(None);
    };
    let backups = sandbox.objects(Kind::EtcdBackup);
    let mut name = backup_name(number);
    let ended = await_object(&backups, &name, "the end", BACKUP_TIMEOUT, |object| {
        has_condition(object, "Complete", "True") || has_condition(object, "Failed", "True")
    })
    .await?;
    if has_condition(&ended, "Failed", "True") {
        story.tell(&format!(
            "  {name} reports a failure: {}",
            conditions_line(&ended)
        ));
        name = format!("{name}-again");
        begin_backup(&name, sandbox).await?;
        await_complete(&backups, &name, BACKUP_TIMEOUT).await?;
    }
    story.tell(&format!("  {name} is complete"));
    if !restore {
        return Ok(None);
    }
    let snapshot = restored(number, &path(sandbox, &name), sandbox).await?;
    story.tell(&format!(
        "  {} has {} keys at revision {}",
        snapshot.name,
        snapshot.pairs.len(),
        snapshot.revision
    ));
    Ok(Some(snapshot))
}

/// Restores a backup into a new cluster with one member, reads all its keys, and deletes the cluster.
async fn restored(number: usize, path: &str, sandbox: &Sandbox) -> Result<Snapshot> {
    let name = format!("restored-{number}");
    let s3 = sandbox.env.s3()?;
    let cluster = sandbox.objects(Kind::EtcdCluster).get(CLUSTER).await?;
    let version = field(&cluster, "/spec/version").as_str();
    let version = version.context("the cluster has no spec.version")?;
    let target =
        format!("{{name: {name}, template: {{spec: {{size: 1, version: \"{version}\"}}}}}}");
    sandbox
        .apply(&restore_with(s3, &name, &target, path, ""))
        .await?;
    let restores = sandbox.objects(Kind::EtcdRestore);
    await_complete(&restores, &name, DEADLINE).await?;
    sandbox.await_members(&name, 1).await?;
    let (revision, pairs) = until(
        "the keys of the restored cluster are read",
        DEADLINE,
        async || {
            let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, &name).await?;
            read_pairs(&keys).await.map(Poll::Done)
        },
    )
    .await?;
    ensure!(!pairs.is_empty(), "the restored cluster {name} has no keys");
    sandbox.delete_cluster(&name).await?;
    Ok(Snapshot {
        name,
        revision,
        pairs,
    })
}
