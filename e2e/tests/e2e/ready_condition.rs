//! The conditions `Ready`, `Reconciling` and `Stalled` of EtcdClusters, EtcdBackups and EtcdRestores follow the rules of
//! kstatus, on which `kubectl wait`, Helm, Flux and Argo CD rely.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use e2e::objects::{Kind, condition, conditions_line, field};
use e2e::watch::watch_until;
use e2e::{DEADLINE, Sandbox, scenario, step};
use kube::ResourceExt;
use kube::api::{DynamicObject, ListParams, WatchEvent, WatchParams};
use serde_json::Value;
use tokio::task::JoinHandle;

use crate::backup_pvc::{BACKUP_PVC, pvc_backup};
use crate::fixtures::{DURABLE, cluster_with, newest_version};

/// Time limit of the whole test, for a busy machine.
const TEST: Duration = Duration::from_mins(30);

/// The status of an object as computed by kstatus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kstatus {
    Terminating,
    InProgress,
    Failed,
    Current,
}

/// Computes the status with the rules of kstatus: `Compute` and `checkGenericProperties` in pkg/kstatus/status of
/// https://github.com/kubernetes-sigs/cli-utils, commit 321951179c8f.
fn kstatus(object: &DynamicObject) -> Kstatus {
    if object.metadata.deletion_timestamp.is_some() {
        return Kstatus::Terminating;
    }
    let observed = field(object, "/status/observedGeneration").as_i64();
    if observed.is_some() && observed != object.metadata.generation {
        return Kstatus::InProgress;
    }
    let conditions = field(object, "/status/conditions").as_array();
    for condition in conditions.into_iter().flatten() {
        if condition["status"] == "True" && condition["type"] == "Reconciling" {
            return Kstatus::InProgress;
        }
        if condition["status"] == "True" && condition["type"] == "Stalled" {
            return Kstatus::Failed;
        }
    }
    Kstatus::Current
}

/// Checks one recorded state of an object. `before` is the previous recorded state of the same object.
fn check(object: &DynamicObject, before: Option<&DynamicObject>) -> Result<()> {
    let result = kstatus(object);
    let observed = field(object, "/status/observedGeneration").as_i64();
    // `observedGeneration` must exist, because kstatus considers a new object without this field current.
    ensure!(observed.is_some(), "status.observedGeneration is missing");
    if result == Kstatus::Terminating || observed != object.metadata.generation {
        return Ok(());
    }
    let ready = condition(object, "Ready").context("the condition Ready is missing")?;
    ensure!(
        ready["observedGeneration"].as_i64() == observed,
        "Ready belongs to another generation"
    );
    let holds = ready["status"] == "True";
    ensure!(
        holds == (result == Kstatus::Current),
        "kstatus computes {result:?}, and Ready is {}",
        ready["status"]
    );
    // By the convention of kstatus, `Reconciling` and `Stalled` exist only if they are True.
    let mut abnormal = Vec::new();
    for kind in ["Reconciling", "Stalled"] {
        let Some(found) = condition(object, kind) else {
            continue;
        };
        ensure!(found["status"] == "True", "{kind} is {}", found["status"]);
        for same in ["reason", "message", "observedGeneration"] {
            ensure!(
                found[same] == ready[same],
                "{kind} and Ready have another {same}"
            );
        }
        abnormal.push(kind);
    }
    ensure!(abnormal.len() == usize::from(!holds), "{abnormal:?}");
    for text in ["reason", "message"] {
        let text = ready[text].as_str();
        ensure!(
            text.is_some_and(|text| !text.is_empty()),
            "Ready has no reason or no message"
        );
    }
    let earlier = before.and_then(|before| condition(before, "Ready"));
    if let Some(earlier) = earlier {
        let same_status = earlier["status"] == ready["status"];
        let same_time = earlier["lastTransitionTime"] == ready["lastTransitionTime"];
        // A changed status may have the same transition time, because times have a resolution of one second.
        ensure!(
            same_time || !same_status,
            "the transition time of Ready changed without its status"
        );
    }
    Ok(())
}

/// All recorded states of the objects of one kind.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<DynamicObject>>>);

impl Seen {
    /// Starts to record every change of the objects of this kind.
    async fn start(&self, sandbox: &Sandbox, kind: Kind) -> Result<JoinHandle<Result<()>>> {
        let api = sandbox.objects(kind);
        let list = api.list(&ListParams::default()).await?;
        let since = list.metadata.resource_version.unwrap_or_default();
        let seen = self.clone();
        Ok(tokio::spawn(async move {
            watch_until(&api, &WatchParams::default(), &since, TEST, |change| {
                if let WatchEvent::Added(object) | WatchEvent::Modified(object) = change {
                    seen.states().push(object);
                }
                None::<()>
            })
            .await
        }))
    }

    fn states(&self) -> std::sync::MutexGuard<'_, Vec<DynamicObject>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks all recorded states of the object `name`, and returns each kstatus result with the reason of `Ready`,
    /// such as `InProgress Pending`.
    fn verify(&self, name: &str) -> Result<BTreeSet<String>> {
        let states = self.states();
        let of_object: Vec<_> = states
            .iter()
            .filter(|state| state.name_any() == name)
            .collect();
        let mut found = BTreeSet::new();
        let mut before = None;
        for state in of_object {
            check(state, before).with_context(|| {
                let generation = state.metadata.generation;
                format!(
                    "{name}, generation {generation:?}: {}",
                    conditions_line(state)
                )
            })?;
            let ready = condition(state, "Ready");
            let reason = ready.map_or(&Value::Null, |ready| &ready["reason"]);
            let reason = reason.as_str().unwrap_or("-");
            found.insert(format!("{:?} {reason}", kstatus(state)));
            before = Some(state);
        }
        println!("{name}: {found:?}");
        Ok(found)
    }
}

/// Runs `kubectl wait` for a condition of the current generation.
async fn kubectl_wait(sandbox: &Sandbox, object: &str, condition: &str) -> Result<()> {
    let condition = format!("--for=condition={condition}");
    let timeout = format!("--timeout={}s", DEADLINE.as_secs());
    let words = ["wait", object, condition.as_str(), timeout.as_str()];
    sandbox.kubectl(&words).await.map(drop)
}

async fn patch(sandbox: &Sandbox, spec: &str) -> Result<()> {
    let patch = format!("{{\"spec\":{spec}}}");
    let words = ["patch", "etcdcluster", "c", "--type=merge", "-p", &patch];
    sandbox.kubectl(&words).await.map(drop)
}

/// Creates and scales a cluster, sets and corrects an unsupported version, pauses and resumes the cluster. Waits for
/// the expected condition after each change.
async fn walk_cluster(sandbox: &Sandbox) -> Result<()> {
    let object = "etcdcluster/c";
    let manifest = cluster_with(&sandbox.env, "c", 1, DURABLE)?;
    sandbox.apply(&manifest).await?;
    kubectl_wait(sandbox, object, "Ready").await?;
    patch(sandbox, "{\"size\":3}").await?;
    kubectl_wait(sandbox, object, "Ready").await?;
    sandbox.await_members("c", 3).await?;
    patch(sandbox, "{\"version\":\"3.99.0\"}").await?;
    kubectl_wait(sandbox, object, "Stalled").await?;
    let version = newest_version(&sandbox.env)?;
    patch(sandbox, &format!("{{\"version\":\"{version}\"}}")).await?;
    kubectl_wait(sandbox, object, "Ready").await?;
    patch(sandbox, "{\"paused\":true}").await?;
    kubectl_wait(sandbox, object, "Ready").await?;
    patch(sandbox, "{\"paused\":false}").await?;
    kubectl_wait(sandbox, object, "Ready").await
}

/// Creates EtcdBackups that wait for a PVC, succeed, follow a schedule, or fail. Waits for the expected condition of
/// each.
async fn walk_backups(sandbox: &Sandbox) -> Result<()> {
    let late = pvc_backup("late", "  backupPolicy: {timeoutInSecond: 1}\n");
    sandbox.apply(&pvc_backup("once", "")).await?;
    sandbox.apply(&late).await?;
    kubectl_wait(sandbox, "etcdbackup/once", "Reconciling").await?;
    kubectl_wait(sandbox, "etcdbackup/late", "Stalled").await?;
    sandbox.apply(BACKUP_PVC).await?;
    kubectl_wait(sandbox, "etcdbackup/once", "Ready").await?;
    let hourly = pvc_backup("hourly", "  backupPolicy: {backupIntervalInSecond: 3600}\n");
    sandbox.apply(&hourly).await?;
    kubectl_wait(sandbox, "etcdbackup/hourly", "Complete").await?;
    kubectl_wait(sandbox, "etcdbackup/hourly", "Ready").await
}

/// Creates a restore into a new cluster, and a restore that fails because its cluster exists. Waits for the expected
/// condition of each.
async fn walk_restores(sandbox: &Sandbox) -> Result<()> {
    let version = newest_version(&sandbox.env)?;
    let restore = |name: &str, cluster: &str| {
        format!(
            "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {{name: {name}}}\nspec:\n  \
             etcdCluster: {{name: {cluster}, template: {{spec: {{size: 1, version: \"{version}\", pod: \
             {{persistentVolumeClaimSpec: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: \
             64Mi}}}}}}}}}}}}}}\n  backup: {{name: once}}\n"
        )
    };
    sandbox.apply(&restore("new", "d")).await?;
    kubectl_wait(sandbox, "etcdrestore/new", "Ready").await?;
    kubectl_wait(sandbox, "etcdcluster/d", "Ready").await?;
    sandbox.apply(&restore("refused", "c")).await?;
    kubectl_wait(sandbox, "etcdrestore/refused", "Stalled").await
}

fn expect(found: &BTreeSet<String>, states: &[&str]) -> Result<()> {
    for state in states {
        ensure!(
            found.contains(*state),
            "{state:?} was not observed: {found:?}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn conditions_follow_kstatus_in_every_state() {
    scenario("ready_condition", async |sandbox| {
        let (clusters, backups, restores) = (Seen::default(), Seen::default(), Seen::default());
        let watches = [
            clusters.start(sandbox, Kind::EtcdCluster).await?,
            backups.start(sandbox, Kind::EtcdBackup).await?,
            restores.start(sandbox, Kind::EtcdRestore).await?,
        ];
        step("cluster", walk_cluster(sandbox)).await?;
        step("backups", walk_backups(sandbox)).await?;
        step("restores", walk_restores(sandbox)).await?;
        patch(sandbox, "{\"hibernate\":true}").await?;
        let hibernated = [
            "wait",
            "etcdcluster/c",
            "--for=jsonpath={.status.state}=Hibernated",
        ];
        let timeout = format!("--timeout={}s", DEADLINE.as_secs());
        let hibernated = [&hibernated[..], &[timeout.as_str()]].concat();
        sandbox.kubectl(&hibernated).await?;
        kubectl_wait(sandbox, "etcdcluster/c", "Ready").await?;
        for watch in watches {
            if watch.is_finished() {
                bail!("a watch ended: {:?}", watch.await?);
            }
            watch.abort();
        }
        let cluster = [
            "InProgress -",
            "InProgress Bootstrapping",
            "InProgress Scaling",
            "Current Ready",
            "Failed VersionRefused",
            "Current Paused",
            "InProgress Hibernating",
            "Current Hibernated",
        ];
        expect(&clusters.verify("c")?, &cluster)?;
        expect(
            &clusters.verify("d")?,
            &["InProgress Restoring", "Current Ready"],
        )?;
        expect(
            &backups.verify("once")?,
            &[
                "InProgress -",
                "InProgress BucketMissing",
                "Current Succeeded",
            ],
        )?;
        expect(&backups.verify("late")?, &["Failed DeadlineExceeded"])?;
        expect(&backups.verify("hourly")?, &["Current Scheduled"])?;
        expect(
            &restores.verify("new")?,
            &["InProgress -", "InProgress InProgress", "Current Succeeded"],
        )?;
        expect(&restores.verify("refused")?, &["Failed ClusterExists"])
    })
    .await;
}
