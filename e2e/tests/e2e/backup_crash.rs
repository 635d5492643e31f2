//! The backup operator crashes during backups to S3 and to a PVC. The next process completes each interrupted backup,
//! and does not repeat complete backups. `backup_pvc.rs` calls these functions.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, backup_with};
use e2e::objects::{Kind, await_complete, field};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, step, until};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DynamicObject, ListParams};

use crate::backup_pvc::pvc_backup;
use crate::backup_schedule::{OPERATOR, await_all_finished, await_keys, location};

#[derive(Clone, Copy)]
struct Crash {
    /// The name of the failpoint and of the EtcdBackup.
    point: &'static str,
    /// True if a backup pod writes to a PVC. False if the operator writes to S3.
    to_pvc: bool,
    /// True if the stored backup was complete before the crash, so that the next process only updates the status.
    adopted: bool,
}

/// Backups to S3 and to a PVC alternate. After each crash, the next process completes the interrupted backup, and then
/// crashes during a backup to the other of these two destinations.
const CRASHES: [Crash; 5] = [
    Crash {
        point: "backup-before-commit",
        to_pvc: false,
        adopted: false,
    },
    Crash {
        point: "backup-before-create-pod",
        to_pvc: true,
        adopted: false,
    },
    Crash {
        point: "backup-before-manifest",
        to_pvc: false,
        adopted: false,
    },
    Crash {
        point: "backup-before-pod-removal",
        to_pvc: true,
        adopted: true,
    },
    Crash {
        point: "backup-after-manifest",
        to_pvc: false,
        adopted: true,
    },
];

/// The number of times that the operator's container has restarted.
async fn restarts(sandbox: &Sandbox) -> Result<i32> {
    let pods = sandbox
        .api::<Pod>()
        .list(&ListParams::default().labels(OPERATOR))
        .await?;
    let statuses = pods.items.iter().flat_map(|pod| pod.status.iter());
    let containers = statuses.flat_map(|status| status.container_statuses.iter().flatten());
    Ok(containers.map(|container| container.restart_count).sum())
}

/// Restarts the operator with this failpoint. `None` removes the failpoint.
async fn restart_with_failpoint(sandbox: &Sandbox, point: Option<&str>) -> Result<()> {
    let variable = point.map_or("FAILPOINTS-".to_owned(), |point| {
        format!("FAILPOINTS={point}=panic")
    });
    let deployment = "deployment/etcd-backup-operator";
    sandbox
        .kubectl(&["set", "env", deployment, &variable])
        .await?;
    sandbox
        .kubectl(&["rollout", "status", deployment, "--timeout=300s"])
        .await?;
    sandbox.await_operator_pods("etcd-backup-operator", 1).await
}

/// Crashes the operator at each failpoint. The cluster `c` and the PVC `backups` must exist.
pub(crate) async fn crashes_leave_complete_backups(
    sandbox: &Sandbox,
    keys: &Keyspace,
) -> Result<()> {
    let s3 = sandbox.env.s3()?;
    let bucket = Bucket::create(s3, &sandbox.namespace).await?;
    sandbox.apply(&aws_secret(s3, "aws")).await?;
    let mut stored = Vec::new();
    let mut last: Option<(Crash, i64)> = None;
    for crash in CRASHES {
        restart_with_failpoint(sandbox, Some(crash.point)).await?;
        if let Some((crash, revision_before)) = last {
            stored.push(completed(sandbox, crash, revision_before).await?);
        }
        let begun = crash_during_backup(sandbox, &bucket, keys, crash);
        let revision_before = step(crash.point, begun).await?;
        last = Some((crash, revision_before));
    }
    restart_with_failpoint(sandbox, None).await?;
    if let Some((crash, revision_before)) = last {
        stored.push(completed(sandbox, crash, revision_before).await?);
    }
    let here = format!("s3://{}/", bucket.name);
    let in_bucket = stored
        .iter()
        .filter_map(|location| location.strip_prefix(&here));
    let expected: Vec<&str> = in_bucket.collect();
    ensure!(expected.len() == 3, "{stored:?}");
    let what = "each backup has its manifest, and nothing else is stored";
    let keys = await_keys(&bucket, what, |keys| keys.len() == 2 * expected.len()).await?;
    for key in expected {
        ensure!(keys.iter().any(|one| one == key), "{key} of {keys:?}");
    }
    await_all_finished(&bucket).await
}

/// Starts a backup and waits for the crash of the operator, then writes more keys. Returns the revision before the
/// backup.
async fn crash_during_backup(
    sandbox: &Sandbox,
    bucket: &Bucket,
    keys: &Keyspace,
    crash: Crash,
) -> Result<i64> {
    let point = crash.point;
    let revision_before = keys.fill("before/", 10, |_| ()).await?;
    let manifest = if crash.to_pvc {
        pvc_backup(point, "")
    } else {
        let policy = "  backupPolicy: {backupIntervalInSecond: 86400, maxBackups: 9}\n";
        let path = format!("{}/{point}", bucket.name);
        backup_with(sandbox.env.s3()?, point, "c", &path, policy)
    };
    sandbox.apply(&manifest).await?;
    until("the operator crashes", DEADLINE, async || {
        Ok(match restarts(sandbox).await? {
            0 => Poll::NotYet("the operator has not crashed".to_owned()),
            _ => Poll::Done(()),
        })
    })
    .await?;
    if !crash.to_pvc && !crash.adopted {
        // `status.unfinishedAttempts` must count the attempt of the crashed process.
        let begun = sandbox.objects(Kind::EtcdBackup).get(point).await?;
        let counted = attempts(&begun).as_i64();
        ensure!(counted > Some(0), "{counted:?} attempts");
    }
    // The backup contains these keys only if the next process takes a new snapshot, because they are newer than the
    // snapshot of the crashed process.
    keys.fill("after/", 10, |_| ()).await?;
    Ok(revision_before)
}

fn attempts(backup: &DynamicObject) -> &serde_json::Value {
    field(backup, "/status/unfinishedAttempts")
}

/// Waits until the backup is complete, and returns its location.
async fn completed(sandbox: &Sandbox, crash: Crash, revision_before: i64) -> Result<String> {
    let point = crash.point;
    let backups = sandbox.objects(Kind::EtcdBackup);
    let done = await_complete(&backups, point, DEADLINE)
        .await
        .context(point)?;
    ensure!(attempts(&done).is_null(), "{point}: {done:?}");
    let revision = field(&done, "/status/etcdRevision").as_i64();
    ensure!(
        (revision == Some(revision_before)) == crash.adopted,
        "{point}: revision {revision:?}, {revision_before} before the crash"
    );
    Ok(location(&done))
}
