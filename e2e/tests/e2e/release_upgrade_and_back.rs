//! The operators are upgraded from an earlier commit to this commit and rolled back, with the commands in
//! `docs/upgrades.md`. No member restarts, and the clusters serve clients all the time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, backup_with};
use e2e::metrics::Page;
use e2e::objects::{Kind, await_object, conditions_line, field, has_condition};
use e2e::sandbox::RELEASE;
use e2e::wait::Poll;
use e2e::watch::watch_until;
use e2e::{DEADLINE, Env, Sandbox, Writer, chart, kubectl, step, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, DynamicObject, ListParams, WatchEvent, WatchParams};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::backup_schedule::location;
use crate::fixtures::{DURABLE, cluster, cluster_with};
use crate::tls_generated::{GENERATED, client};
use crate::upgrade::WRITE_INTERVAL;

const CLUSTERS: [&str; 3] = ["plain", "disks", "secure"];
const OPERATORS: [&str; 3] = [
    "etcd-operator",
    "etcd-backup-operator",
    "etcd-restore-operator",
];
/// The scheduled EtcdBackup of the cluster with TLS.
const BACKUP: &str = "periodic";
/// A field that a later release could add. The test adds it to the CRDs.
const LATER: &str = "fieldOfLaterRelease";
/// Time limit for the watch of the conditions. The test ends earlier.
const WATCH_LIMIT: Duration = Duration::from_hours(1);

/// The UID of each pod, and the ID and restarts of each of its containers.
type Lives = BTreeMap<String, (String, Vec<(String, i32)>)>;

async fn lives(sandbox: &Sandbox) -> Result<Lives> {
    let mut all = Lives::new();
    for cluster in CLUSTERS {
        for pod in sandbox.member_pods(cluster).await? {
            let statuses = pod
                .status
                .as_ref()
                .and_then(|status| status.container_statuses.clone());
            let containers = statuses.into_iter().flatten().map(|container| {
                (
                    container.container_id.unwrap_or_default(),
                    container.restart_count,
                )
            });
            let life = (pod.uid().context("no UID")?, containers.collect());
            all.insert(pod.name_any(), life);
        }
    }
    ensure!(all.len() == 9, "{} members: {all:?}", all.len());
    Ok(all)
}

/// Records conditions that show that a cluster does not serve clients.
struct ConditionWatch {
    task: JoinHandle<()>,
    faults: Arc<Mutex<Vec<String>>>,
    /// True if a cluster must be `Ready` and not only `Available`. False while the test changes a spec, because `Ready`
    /// is then False for a moment.
    needs_ready: Arc<AtomicBool>,
}

impl ConditionWatch {
    fn start(sandbox: &Sandbox) -> Self {
        let faults = Arc::new(Mutex::new(Vec::new()));
        let needs_ready = Arc::new(AtomicBool::new(true));
        let clusters = sandbox.objects(Kind::EtcdCluster);
        let observed = observe(clusters, faults.clone(), needs_ready.clone());
        Self {
            task: tokio::spawn(observed),
            faults,
            needs_ready,
        }
    }

    fn require_ready(&self, required: bool) {
        self.needs_ready.store(required, Ordering::Relaxed);
    }

    fn ensure_none(&self, what: &str) -> Result<()> {
        ensure!(!self.task.is_finished(), "{what}: the watch has ended");
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(faults.is_empty(), "{what}: {faults:#?}");
        Ok(())
    }
}

impl Drop for ConditionWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Adds to `faults` each state in which a cluster is not `Available`, or is not `Ready` although `needs_ready` is true.
/// A change of a CRD ends the watch, so the function then starts a new watch. Never returns.
async fn observe(
    clusters: Api<DynamicObject>,
    faults: Arc<Mutex<Vec<String>>>,
    needs_ready: Arc<AtomicBool>,
) {
    let check = |object: &DynamicObject| {
        let ready = !needs_ready.load(Ordering::Relaxed) || has_condition(object, "Ready", "True");
        if !ready || !has_condition(object, "Available", "True") {
            let mut faults = faults.lock().unwrap_or_else(PoisonError::into_inner);
            faults.push(format!(
                "{}: {}",
                object.name_any(),
                conditions_line(object)
            ));
        }
    };
    loop {
        let Ok(list) = clusters.list(&ListParams::default()).await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        list.items.iter().for_each(check);
        let since = list.metadata.resource_version.unwrap_or_default();
        let seen = |change: WatchEvent<DynamicObject>| {
            if let WatchEvent::Added(object) | WatchEvent::Modified(object) = &change {
                check(object);
            }
            None::<()>
        };
        // The watch fails if the API server no longer has the changes since `since`. The loop then starts a new
        // watch.
        let params = WatchParams::default();
        drop(watch_until(&clusters, &params, &since, WATCH_LIMIT, seen).await);
    }
}

/// The clients, and the pods before the first upgrade.
struct Fleet<'a> {
    sandbox: &'a Sandbox,
    writers: Vec<Writer>,
    lives: Lives,
    watch: ConditionWatch,
}

/// Installs or upgrades to a release with the options in `docs/upgrades.md`.
async fn install(sandbox: &Sandbox, env: &Env, settings: &[&str]) -> Result<()> {
    let all = [&["--reset-then-reuse-values"], settings].concat();
    chart::install(env, RELEASE, &sandbox.namespace, &all)
        .await
        .map(drop)
}

/// Waits until all operators run the image of `env`, and the cluster operator has reconciled all clusters.
async fn await_operators(sandbox: &Sandbox, env: &Env) -> Result<()> {
    for operator in OPERATORS {
        let deployment = format!("deployment/{operator}");
        let rollout = ["rollout", "status", &deployment, "--timeout=300s"];
        sandbox.kubectl(&rollout).await?;
        sandbox.await_operator_pods(operator, 1).await?;
        let pods = e2e::metrics::operator_pods(sandbox, operator).await?;
        let image = |pod: &Pod| pod.spec.as_ref()?.containers.first()?.image.clone();
        let images: Vec<String> = pods.iter().filter_map(image).collect();
        ensure!(images == [env.image.clone()], "{operator}: {images:?}");
    }
    // `etcd_operator_cluster_has_quorum` exists for a cluster after the first reconcile of the cluster.
    until("all clusters are reconciled", DEADLINE, async || {
        let page = Page::of_operator(sandbox, OPERATORS[0]).await?;
        let sum = |cluster: &&str| {
            let labels = format!("cluster=\"{cluster}\"");
            page.sum("etcd_operator_cluster_has_quorum", &labels)
        };
        let missing = CLUSTERS.iter().filter(|cluster| sum(cluster) < 1.0);
        let missing: Vec<_> = missing.collect();
        Ok(if missing.is_empty() {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("no quorum reported for {missing:?}"))
        })
    })
    .await
}

impl<'a> Fleet<'a> {
    /// Installs the earlier release, and creates clusters, backups and clients.
    async fn begin(sandbox: &'a Sandbox, earlier: &Env, bucket: &Bucket) -> Result<Self> {
        install(sandbox, earlier, &[]).await?;
        sandbox.await_operators().await?;
        let (s3, env) = (sandbox.env.s3()?, &sandbox.env);
        let policy = "  backupPolicy: {backupIntervalInSecond: 10, maxBackups: 3}\n";
        let path = format!("{}/etcd", bucket.name);
        let manifests = [
            aws_secret(s3, "aws"),
            cluster(env, "plain", 3)?,
            cluster_with(env, "disks", 3, DURABLE)?,
            cluster_with(env, "secure", 3, GENERATED)?,
            backup_with(s3, BACKUP, "secure", &path, policy),
        ];
        sandbox.apply(&manifests.join("\n---\n")).await?;
        for cluster in CLUSTERS {
            sandbox.await_members(cluster, 3).await?;
        }
        await_operators(sandbox, earlier).await?;
        for cluster in CLUSTERS {
            await_ready(sandbox, cluster).await?;
        }
        let identity = client(sandbox, "secure").await?;
        let writers = vec![
            Writer::start_retrying(sandbox, "plain", WRITE_INTERVAL).await?,
            Writer::start_retrying(sandbox, "disks", WRITE_INTERVAL).await?,
            Writer::start_tls(sandbox, "secure", &identity).await?,
        ];
        next_backup(sandbox).await?;
        Ok(Self {
            lives: lives(sandbox).await?,
            watch: ConditionWatch::start(sandbox),
            sandbox,
            writers,
        })
    }

    /// Waits until the operators manage all clusters, and changes the labels of all pods through the specs. An operator
    /// compares a pod with the spec before it changes labels. So when all pods have the label, the operator has
    /// compared each pod. No member may have restarted.
    async fn verify(&self, env: &Env, label: &str) -> Result<()> {
        let sandbox = self.sandbox;
        await_operators(sandbox, env).await?;
        self.watch.ensure_none(label)?;
        self.watch.require_ready(false);
        for cluster in CLUSTERS {
            let patch = json!({ "spec": { "pod": { "labels": { "step": label } } } }).to_string();
            let words = [
                "patch",
                "etcdcluster",
                cluster,
                "--type=merge",
                "-p",
                &patch,
            ];
            sandbox.kubectl(&words).await?;
        }
        for cluster in CLUSTERS {
            await_label(sandbox, cluster, label).await?;
            sandbox.await_members(cluster, 3).await?;
            await_ready(sandbox, cluster).await?;
        }
        next_backup(sandbox).await?;
        for writer in &self.writers {
            writer.await_more(20).await?;
        }
        let now = lives(sandbox).await?;
        ensure!(now == self.lives, "a member has restarted: {now:?}");
        self.watch.ensure_none(label)?;
        self.watch.require_ready(true);
        Ok(())
    }

    async fn finish(self) -> Result<()> {
        self.watch.ensure_none("end")?;
        for (writer, cluster) in self.writers.into_iter().zip(CLUSTERS) {
            writer.finish(cluster).await?;
        }
        Ok(())
    }
}

async fn await_ready(sandbox: &Sandbox, cluster: &str) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let is_ready = |object: &DynamicObject| has_condition(object, "Ready", "True");
    let ready = await_object(&clusters, cluster, "Ready", DEADLINE, is_ready).await;
    ready.map(drop)
}

async fn await_label(sandbox: &Sandbox, cluster: &str, label: &str) -> Result<()> {
    until("every pod has the label", DEADLINE, async || {
        let pods = sandbox.member_pods(cluster).await?;
        let has = |pod: &&Pod| pod.labels().get("step").is_some_and(|step| step == label);
        let count = pods.iter().filter(has).count();
        Ok(if count == 3 {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{count} of {} pods of {cluster}", pods.len()))
        })
    })
    .await
}

/// Waits for the next backup of the scheduled EtcdBackup.
async fn next_backup(sandbox: &Sandbox) -> Result<()> {
    let backups = sandbox.objects(Kind::EtcdBackup);
    let before = location(&backups.get(BACKUP).await?);
    let is_next = |object: &DynamicObject| {
        has_condition(object, "Complete", "True")
            && !location(object).is_empty()
            && location(object) != before
    };
    await_object(&backups, BACKUP, "the next backup", DEADLINE, is_next)
        .await
        .map(drop)
}

/// The versions of the CRDs, with their schemas.
async fn schemas(sandbox: &Sandbox) -> Result<String> {
    let words = ["get", "crd", "-o", "jsonpath={.items[*].spec.versions}"];
    sandbox.kubectl(&words).await
}

/// Adds the field of a later release to the CRDs. Uses Helm's field manager, because Helm's next upgrade would fail if
/// another manager had changed a CRD.
async fn install_crds_of_later_release(sandbox: &Sandbox) -> Result<()> {
    for kind in ["etcdclusters", "etcdbackups"] {
        let name = format!("{kind}.etcd.database.coreos.com");
        let found = sandbox
            .kubectl(&["get", "crd", &name, "-o", "json"])
            .await?;
        let mut crd: Value = serde_json::from_str(&found)?;
        for part in ["spec", "status"] {
            let path =
                format!("/spec/versions/0/schema/openAPIV3Schema/properties/{part}/properties");
            let properties = crd.pointer_mut(&path).context(path)?;
            properties[LATER] = json!({ "type": "string" });
        }
        let metadata = &crd["metadata"];
        let later = json!({
            "apiVersion": crd["apiVersion"], "kind": crd["kind"], "spec": crd["spec"],
            "metadata": { "name": name, "labels": metadata["labels"], "annotations": metadata["annotations"] },
        });
        let words = ["apply", "--server-side", "--force-conflicts"];
        let words = [&words[..], &["--field-manager=helm", "-f", "-"]].concat();
        kubectl::run_with_input(&sandbox.env, &words, Some(&later.to_string())).await?;
    }
    Ok(())
}

/// Sets the field of a later release in an EtcdCluster and in an EtcdBackup.
async fn use_field_of_later_release(sandbox: &Sandbox) -> Result<()> {
    for (kind, name) in [(Kind::EtcdCluster, "disks"), (Kind::EtcdBackup, BACKUP)] {
        // The change is repeated, because the API server drops the field until it uses the new schema.
        until("the field is stored", DEADLINE, async || {
            let resource = format!("{kind:?}").to_lowercase();
            for (part, more) in [
                ("spec", &["--field-manager=user"][..]),
                // The test writes the status with another field manager than the spec, as a later release may do.
                (
                    "status",
                    &["--subresource=status", "--field-manager=later-record"][..],
                ),
            ] {
                let patch = json!({ part: { LATER: "kept" } }).to_string();
                let words = ["patch", &resource, name, "--type=merge", "-p", &patch];
                sandbox.kubectl(&[&words[..], more].concat()).await?;
            }
            let object = sandbox.objects(kind).get(name).await?;
            Ok(match field_of_later_release(&object) {
                values if values == [json!("kept"), json!("kept")] => Poll::Done(()),
                values => Poll::NotYet(format!("{values:?}")),
            })
        })
        .await?;
    }
    Ok(())
}

fn field_of_later_release(object: &DynamicObject) -> [Value; 2] {
    ["spec", "status"].map(|part| field(object, &format!("/{part}/{LATER}")).clone())
}

/// After the rollback, the earlier operators write the status and metadata of both objects. The earlier operators must
/// keep the field that they do not know.
async fn field_of_later_release_is_kept(sandbox: &Sandbox) -> Result<()> {
    for (kind, name) in [(Kind::EtcdCluster, "disks"), (Kind::EtcdBackup, BACKUP)] {
        let object = sandbox.objects(kind).get(name).await?;
        let values = field_of_later_release(&object);
        ensure!(
            values == [json!("kept"), json!("kept")],
            "{name}: {values:?}"
        );
    }
    Ok(())
}

async fn upgrade_and_roll_back(sandbox: &Sandbox) -> Result<()> {
    let (earlier, this) = (sandbox.env.of_previous()?, &sandbox.env);
    let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
    sandbox.delete_crds().await?;
    let begun = Fleet::begin(sandbox, &earlier, &bucket);
    let fleet = step("create clusters with the earlier release", begun).await?;
    let before = schemas(sandbox).await?;

    step("upgrade", async {
        install(sandbox, this, &[]).await?;
        fleet.verify(this, "upgraded").await
    })
    .await?;
    let after = schemas(sandbox).await?;
    step("roll back with Helm", async {
        let rollback = ["rollback", RELEASE, "-n", &sandbox.namespace];
        chart::helm(this, &rollback).await?;
        ensure!(schemas(sandbox).await? == before, "the CRDs differ");
        fleet.verify(&earlier, "rolled-back").await
    })
    .await?;
    step("upgrade again", async {
        install(sandbox, this, &[]).await?;
        ensure!(schemas(sandbox).await? == after, "the CRDs differ");
        fleet.verify(this, "upgraded-again").await
    })
    .await?;
    step("roll back and keep the CRDs", async {
        // `Ready` may be False for a moment, because the new field changes the spec.
        fleet.watch.require_ready(false);
        install_crds_of_later_release(sandbox).await?;
        use_field_of_later_release(sandbox).await?;
        let with_field = schemas(sandbox).await?;
        install(sandbox, &earlier, &["--set", "crds.install=false"]).await?;
        fleet.verify(&earlier, "newer-crds").await?;
        ensure!(schemas(sandbox).await? == with_field, "the CRDs differ");
        field_of_later_release_is_kept(sandbox).await
    })
    .await?;
    step("upgrade with the CRDs", async {
        // The CRDs of this release lack the field, so the API server no longer returns it.
        install(sandbox, this, &["--set", "crds.install=true"]).await?;
        ensure!(schemas(sandbox).await? == after, "the CRDs differ");
        fleet.verify(this, "upgraded-at-last").await
    })
    .await?;
    fleet.finish().await
}

/// Tests in a module `previous` run only with `--previous COMMIT`, which builds the image of an earlier commit. No
/// other test runs at the same time, because this test replaces the CRDs.
mod previous {
    use e2e::sandbox::{RELEASE, bare_scenario};
    use e2e::{chart, step};

    use super::upgrade_and_roll_back;

    #[tokio::test]
    async fn operator_upgrade_and_rollback_restart_no_member() {
        bare_scenario("release_upgrade_and_back", async |sandbox| {
            let outcome = upgrade_and_roll_back(sandbox).await;
            if outcome.is_err() {
                sandbox.print_state().await;
            }
            let repaired = step("restore the CRDs", async {
                // The CRDs are restored even if this test has failed, because other tests need them. A failed test may
                // leave no release, so `helm uninstall` ignores a missing release.
                let uninstall = ["uninstall", RELEASE, "-n", &sandbox.namespace];
                let uninstall = [&uninstall[..], &["--ignore-not-found", "--wait"]].concat();
                let uninstalled = chart::helm(&sandbox.env, &uninstall).await;
                let replaced = sandbox.replace_crds().await;
                uninstalled.and(replaced)
            });
            let repaired = repaired.await;
            outcome.and(repaired)
        })
        .await;
    }
}
