//! The restore operator crashes before writes of a restore. Each process crashes at a different failpoint, and the last
//! process completes the restore. `restore_interrupted.rs` calls these functions with [`CRASHES`].

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, field};
use e2e::store_state::StoreState;
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DynamicObject, ListParams};

use crate::fixtures::root;
use crate::restore_in_place::{RunningCluster, await_replaced, in_place_restore_from};
use crate::restore_sources::await_equal_restore;

const OPERATOR: &str = "etcd-restore-operator";

/// The failpoint before the operator deletes the failed pod of a seed. The test first makes this pod fail.
const CLEAR: &str = "restore-before-clear-pod";

/// The failpoints of a restore in place that do not need `--full`. The crashes leave, in this order: a seed without a
/// pod; a verified seed before the cutover; running old members after the cutover; a failed pod of the seed; a seed
/// that no Service selects. With `--full`, tests crash before every write.
pub(crate) const CRASHES: &[&str] = &[
    "restore-before-create-pod",
    "restore-before-record-formed",
    "restore-before-stop-former",
    CLEAR,
    "restore-before-join",
];

/// Failpoints of all writes of a restore in place, in the order in which the operator reaches them.
const IN_PLACE: &[&str] = &[
    "restore-before-record-intent",
    "restore-before-record-backup",
    "restore-before-guard",
    "restore-before-claim",
    "restore-before-create-service",
    "restore-before-create-volume-claim",
    "restore-before-create-pod",
    "restore-before-record-restored",
    "restore-before-record-formed",
    "restore-before-stop-former",
    CLEAR,
    "restore-before-join",
    "restore-before-release-claim",
    "restore-before-let-go",
    "restore-before-status",
];

/// Failpoints of all writes of a restore that fails.
const ABANDONED: &[&str] = &[
    "restore-before-abandon",
    "restore-before-discard-seed",
    "restore-before-release-claim",
    "restore-before-let-go",
];

/// Failpoints of the writes of a restore into a new cluster, except the writes that create the seed.
const NEW: &[&str] = &[
    "restore-before-record-backup",
    "restore-before-create-cluster",
    "restore-before-guard",
    "restore-before-record-formed",
    "restore-before-release-claim",
    "restore-before-let-go",
    "restore-before-expire",
];

/// The failpoint before the operator starts the pod that searches recorded changes on a PVC.
pub(crate) const SEARCH: &[&str] = &["restore-before-start-search"];

/// The failpoint before the operator deletes the pod of a search. No test reaches this failpoint, because the operator
/// deletes the pod only minutes later, to repeat the search. A crash changes nothing: the next process finds the pod.
const UNREACHED: &[&str] = &["restore-before-end-search"];

/// Sets or removes an environment variable of the operator, which restarts the operator. Deletes the Lease, because a
/// crashed process does not release it.
pub(crate) async fn restart_with_env(sandbox: &Sandbox, variable: &str) -> Result<()> {
    let deployment = format!("deployment/{OPERATOR}");
    sandbox
        .kubectl(&["set", "env", &deployment, variable])
        .await?;
    free_lease(sandbox).await
}

async fn free_lease(sandbox: &Sandbox) -> Result<()> {
    let delete = ["delete", "lease", OPERATOR, "--ignore-not-found"];
    sandbox.kubectl(&delete).await.map(drop)
}

/// Waits until the operator has crashed at this failpoint. A crash for another reason does not end the wait.
pub(crate) async fn await_crash(sandbox: &Sandbox, point: &str) -> Result<()> {
    let selector = format!("app.kubernetes.io/component={OPERATOR}");
    let selector = ListParams::default().labels(&selector);
    let variable = format!("FAILPOINTS={point}=panic");
    let expected_log = format!("failpoint {point} panic");
    until(
        &format!("the operator crashes {point}"),
        DEADLINE,
        async || {
            let pods = sandbox.api::<Pod>().list(&selector).await?;
            let started: Vec<&Pod> = pods
                .iter()
                .filter(|pod| has_variable(pod, &variable))
                .collect();
            let mut seen = format!("{} pods with the failpoint", started.len());
            for pod in started.into_iter().filter(|pod| has_crashed(pod)) {
                let name = pod.name_any();
                let log = sandbox.kubectl(&["logs", &name, "--previous"]).await?;
                if log.contains(&expected_log) {
                    return Ok(Poll::Done(()));
                }
                seen = format!("{name} crashed for another reason: {log}");
            }
            Ok(Poll::NotYet(seen))
        },
    )
    .await
}

fn has_variable(pod: &Pod, variable: &str) -> bool {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut variables = containers.flat_map(|container| container.env.iter().flatten());
    variables.any(|one| {
        let value = one.value.as_deref().unwrap_or_default();
        format!("{}={value}", one.name) == variable
    })
}

fn has_crashed(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let containers = status.and_then(|status| status.container_statuses.as_ref());
    containers
        .into_iter()
        .flatten()
        .any(|container| container.restart_count > 0)
}

/// Makes the kubelet stop the pod of the seed permanently, as in an eviction.
pub(crate) async fn seed_fails_for_good(sandbox: &Sandbox, restore: &str) -> Result<()> {
    let restore = sandbox.objects(Kind::EtcdRestore).get(restore).await?;
    let seed = field(&restore, "/status/seed/member").as_str();
    let seed = seed.context("no seed is recorded")?;
    let deadline = r#"{"spec":{"activeDeadlineSeconds":1}}"#;
    let patch = ["patch", "pod", seed, "--type=merge", "-p", deadline];
    sandbox.kubectl(&patch).await?;
    let pods = sandbox.api::<Pod>();
    until("the seed's pod has failed", DEADLINE, async || {
        let status = pods.get(seed).await?.status.unwrap_or_default();
        let phase = status.phase.unwrap_or_default();
        Ok(if phase == "Failed" {
            Poll::Done(())
        } else {
            Poll::NotYet(phase)
        })
    })
    .await
}

pub(crate) async fn stop_operator(sandbox: &Sandbox) -> Result<()> {
    scale_operator(sandbox, "--replicas=0").await?;
    sandbox.await_operator_pods(OPERATOR, 0).await
}

pub(crate) async fn start_operator(sandbox: &Sandbox) -> Result<()> {
    scale_operator(sandbox, "--replicas=1").await
}

async fn scale_operator(sandbox: &Sandbox, replicas: &str) -> Result<()> {
    let deployment = format!("deployment/{OPERATOR}");
    let words = ["scale", &deployment, replicas];
    sandbox.kubectl(&words).await.map(drop)
}

/// Stops the restore operator, and starts it again with the same environment variables.
pub(crate) async fn restart_operator(sandbox: &Sandbox) -> Result<()> {
    stop_operator(sandbox).await?;
    free_lease(sandbox).await?;
    start_operator(sandbox).await
}

/// Restarts the operator with this failpoint, and waits until no other process exists.
pub(crate) async fn restart_with_failpoint(sandbox: &Sandbox, point: &str) -> Result<()> {
    restart_with_env(sandbox, &format!("FAILPOINTS={point}=panic")).await?;
    let deployment = format!("deployment/{OPERATOR}");
    let wait = ["rollout", "status", &deployment, "--timeout=300s"];
    sandbox.kubectl(&wait).await?;
    // The previous process does not have this failpoint, and could pass this point without a crash. The test therefore
    // waits until this process has stopped.
    sandbox.await_operator_pods(OPERATOR, 1).await
}

/// Applies an EtcdRestore, crashes the operator at each failpoint, and then starts the operator without a failpoint.
pub(crate) async fn crash_at_each(
    sandbox: &Sandbox,
    points: &[&str],
    restore: &str,
    manifest: &str,
) -> Result<()> {
    for (number, point) in points.iter().enumerate() {
        let variable = format!("FAILPOINTS={point}=panic");
        if number == 0 {
            restart_with_failpoint(sandbox, point).await?;
            sandbox.apply(manifest).await?;
        } else if *point == CLEAR {
            // The operator is stopped before the pod of the seed fails. A process with the previous failpoint could
            // pass the next failpoint without a crash.
            stop_operator(sandbox).await?;
            seed_fails_for_good(sandbox, restore).await?;
            restart_with_env(sandbox, &variable).await?;
            start_operator(sandbox).await?;
        } else {
            restart_with_env(sandbox, &variable).await?;
        }
        await_crash(sandbox, point).await?;
    }
    restart_with_env(sandbox, "FAILPOINTS-").await
}

/// Ensures that a restore in place completes after these crashes.
pub(crate) async fn completes_after_crashes(
    sandbox: &Sandbox,
    running: &RunningCluster,
    name: &str,
    crashes: &[&str],
) -> Result<()> {
    let before = sandbox.await_members("c", 3).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.fill("later/", 50, |_| ()).await?;
    drop(keys);
    let manifest = in_place_restore_from(sandbox, name, &running.bucket, "etcd.backup", "")?;
    crash_at_each(sandbox, crashes, name, &manifest).await?;
    let restored = await_equal_restore(sandbox, name, "c", &running.state).await?;
    await_replaced(sandbox, &restored).await?;
    let after = sandbox.await_members("c", 3).await?;
    is_replaced(sandbox, running, &before, &after).await
}

/// Ensures that the EtcdCluster is the same object, and that its new etcd cluster has exactly the keys of the backup.
pub(crate) async fn is_replaced(
    sandbox: &Sandbox,
    running: &RunningCluster,
    before: &DynamicObject,
    after: &DynamicObject,
) -> Result<()> {
    ensure!(after.metadata.uid == before.metadata.uid);
    ensure!(field(after, "/status/clusterID") != field(before, "/status/clusterID"));
    has_the_backup(sandbox, running).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.verify("later/", 0)
        .await
        .map(drop)
        .context("keys newer than the backup")
}

pub(crate) async fn has_the_backup(sandbox: &Sandbox, running: &RunningCluster) -> Result<()> {
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    let is = StoreState::at(&keys, running.state.revision).await?;
    running.state.ensure_same(&is)
}

/// Apart from [`UNREACHED`], the tests must use exactly the failpoints in the operator's source code.
#[test]
fn crash_tests_include_every_failpoint_of_restore_operator() {
    let mut points = BTreeSet::new();
    for file in ["plan/action.rs", "execute.rs"] {
        let path = root().join("crates/restore/src").join(file);
        let source = std::fs::read_to_string(path).unwrap_or_default();
        let named = source.split('"').filter(|word| {
            let is_name = word
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte == b'-');
            is_name && word.starts_with("restore-before-") && *word != "restore-before-nothing"
        });
        points.extend(named.map(str::to_owned));
    }
    let crashed_at = [IN_PLACE, ABANDONED, NEW, SEARCH, UNREACHED].concat();
    let crashed_at: BTreeSet<String> = crashed_at.into_iter().map(str::to_owned).collect();
    assert_eq!(points, crashed_at);
    assert!(CRASHES.iter().all(|point| IN_PLACE.contains(point)));
}

/// These tests run only with `--full`. Without `--full`, the model test of the restore operator covers these crashes.
mod full {
    use anyhow::{Result, ensure};
    use e2e::manifests::restore_with;
    use e2e::objects::{Kind, await_object, conditions_line, field, has_condition, has_failed_for};
    use e2e::store_state::StoreState;
    use e2e::{DEADLINE, Keyspace, Sandbox, scenario};

    use super::{ABANDONED, IN_PLACE, NEW, completes_after_crashes, crash_at_each};
    use crate::restore_in_place::{
        RESTORE_LOCK, RunningCluster, await_restore_deleted, cluster_with_backup, in_place_restore,
    };

    #[tokio::test]
    async fn restore_completes_after_crash_before_every_write() {
        scenario("restore_crash_all", async |sandbox| {
            let running = cluster_with_backup(sandbox).await?;
            completes_after_crashes(sandbox, &running, "over", IN_PLACE).await
        })
        .await;
    }

    #[tokio::test]
    async fn failing_and_new_cluster_restores_resume_after_crashes() {
        scenario("restore_crash_new", async |sandbox| {
            let running = cluster_with_backup(sandbox).await?;
            gives_up(sandbox, &running).await?;
            creates_new_cluster(sandbox, &running).await
        })
        .await;
    }

    async fn gives_up(sandbox: &Sandbox, running: &RunningCluster) -> Result<()> {
        let good = running.bucket.read("etcd.backup").await?;
        let mut bad = good.clone();
        let middle = bad.len() / 2;
        bad[middle] ^= 0xff;
        running.bucket.write("etcd.backup", bad).await?;
        let manifest = in_place_restore(sandbox, &running.bucket, "")?;
        crash_at_each(sandbox, ABANDONED, "over", &manifest).await?;
        let restores = sandbox.objects(Kind::EtcdRestore);
        let failed = |object: &_| field(object, "/status/phase") == "Failed";
        let failed = await_object(&restores, "over", "phase Failed", DEADLINE, failed).await?;
        let text = conditions_line(&failed);
        ensure!(has_failed_for(&failed, "SnapshotUnreadable"), "{text}");
        let after = sandbox.await_members("c", 3).await?;
        ensure!(field(&after, "/status/clusterID") == field(&running.before, "/status/clusterID"));
        let annotations = after.metadata.annotations.unwrap_or_default();
        ensure!(!annotations.contains_key(RESTORE_LOCK));
        running.keys.verify("later/", 50).await?;
        let is = StoreState::at(&running.keys, running.state.revision).await?;
        running.state.ensure_same(&is)?;
        running.bucket.write("etcd.backup", good).await
    }

    async fn creates_new_cluster(sandbox: &Sandbox, running: &RunningCluster) -> Result<()> {
        let path = format!("{}/etcd.backup", running.bucket.name);
        let more = "  ttlSecondsAfterFinished: 1\n";
        let manifest = restore_with(sandbox.env.s3()?, "new", "{name: d}", &path, more);
        crash_at_each(sandbox, NEW, "new", &manifest).await?;
        await_restore_deleted(sandbox, "new").await?;
        let made = sandbox.await_members("d", 3).await?;
        ensure!(has_condition(&made, "Available", "True"));
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "d").await?;
        let after = StoreState::at(&keys, running.state.revision).await?;
        running.state.ensure_same(&after)
    }
}
