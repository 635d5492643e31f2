//! The backup operator dies between any two writes of a backup, to S3 and beside a claim. The next process makes one whole
//! backup of it, and does not repeat a complete one. A part of the test of backups on a claim.

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

/// Where the operator dies.
#[derive(Clone, Copy)]
struct Crash {
    /// The fail point, which is the name of the EtcdBackup, too.
    point: &'static str,
    /// Whether the backup is made by a pod beside a claim; else by the operator, to S3.
    to_pvc: bool,
    /// Whether the next process finds the backup whole.
    adopted: bool,
}

/// Both kinds in turn: a process that dies in the one kind completes a backup of the other.
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

/// How often the operator's container was restarted.
async fn restarts(sandbox: &Sandbox) -> Result<i32> {
    let pods = sandbox
        .api::<Pod>()
        .list(&ListParams::default().labels(OPERATOR))
        .await?;
    let statuses = pods.items.iter().flat_map(|pod| pod.status.iter());
    let containers = statuses.flat_map(|status| status.container_statuses.iter().flatten());
    Ok(containers.map(|container| container.restart_count).sum())
}

/// Replaces the operator's process by one that dies at this point.
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

/// A cluster `c` and a claim `backups` exist.
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
    let what = "each backup with its manifest, and nothing else";
    let keys = await_keys(&bucket, what, |keys| keys.len() == 2 * expected.len()).await?;
    for key in expected {
        ensure!(keys.iter().any(|one| one == key), "{key} of {keys:?}");
    }
    await_all_finished(&bucket).await
}

/// Begins a backup, in which the operator dies. Returns the revision of the keys that were there; others are written
/// afterwards.
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
    until("the operator dies", DEADLINE, async || {
        Ok(match restarts(sandbox).await? {
            0 => Poll::NotYet("it lives".to_owned()),
            _ => Poll::Done(()),
        })
    })
    .await?;
    if !crash.to_pvc && !crash.adopted {
        // The next process knows of the attempts that ended with their operator.
        let begun = sandbox.objects(Kind::EtcdBackup).get(point).await?;
        let counted = attempts(&begun).as_i64();
        ensure!(counted > Some(0), "{counted:?} attempts");
    }
    // In the backup only if that is made again.
    keys.fill("after/", 10, |_| ()).await?;
    Ok(revision_before)
}

fn attempts(backup: &DynamicObject) -> &serde_json::Value {
    field(backup, "/status/unfinishedAttempts")
}

/// Waits until the backup is complete; returns its location.
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
        "{point}: revision {revision:?}, {revision_before} before"
    );
    Ok(location(&done))
}
