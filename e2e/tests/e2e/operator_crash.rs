//! The operator dies between the two halves of a step, at every boundary there is, and what it finds afterwards is
//! enough to go on from.
//!
//! A build with fail points ends the process before the write it is told (`FAILPOINTS`); the tests' image is one.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::metrics::Page;
use e2e::objects::{Kind, field, follower, leader, ready_members};
use e2e::wait::Look;
use e2e::{Keyspace, PATIENCE, Sandbox, Writer, cluster_scenario, until};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;

use crate::fixtures::{DURABLE, cluster, cluster_with, root};
use crate::nospace::await_writable;
use crate::storage_class_change::{claims_with, with_class};
use crate::upgrade::{await_version, change, manifest};
use crate::volume_growth::{ask_for, claims, requested};

/// From nothing to a cluster of three on volumes, in this order.
const BOOTSTRAP: &[&str] = &[
    "before-record-intent",
    "before-apply-headless",
    "before-create-service",
    "before-create-disk",
    "before-create-pod",
    "before-open-service",
    "before-record-cluster-id",
    "before-apply-budget",
    "before-label-disk",
    "before-label-pod",
    "before-apply-client",
];
/// One member more.
const GROWTH: &[&str] = &[
    "before-add-member",
    "before-mark-service",
    "before-promote-member",
];
/// The leader's volume is to be another.
const HANDOVER: &[&str] = &["before-move-leader"];
/// One member less.
const SHRINKING: &[&str] = &[
    "before-note-removal",
    "before-remove-member",
    "before-delete-pod",
    "before-delete-disk",
    "before-delete-service",
];
/// What is changed by hand, or asked for by the spec.
const REPAIR: &[&str] = &["before-repair-service"];
/// The spec of pods is changed, in what running ones take.
const SETTINGS: &[&str] = &["before-patch-metadata", "before-resize-pod"];
const NO_BUDGET: &[&str] = &["before-delete-budget"];
/// Members go to the next minor release, and back.
const VERSIONS: &[&str] = &[
    "before-note-version",
    "before-patch-image",
    "before-settle-image",
    "before-downgrade",
];
/// The database is full, and most of it is deleted.
const NO_SPACE: &[&str] = &[
    "before-compact",
    "before-record-defragmentation",
    "before-defragment",
    "before-disarm",
];
/// A larger volume is asked for.
const LARGER: &[&str] = &["before-grow-disk"];
/// A majority is lost for good.
const RECOVERY: &[&str] = &["before-record-recovery"];

/// How long nothing may be left to do before a point counts as passed by, when the operator has looked meanwhile: then
/// its cause is brought about again.
const SETTLED: Duration = Duration::from_secs(3);

/// The operator of a sandbox, made to die again and again.
pub(crate) struct Victim<'a> {
    pub(crate) sandbox: &'a Sandbox,
    pub(crate) crashes: usize,
}

impl Victim<'_> {
    /// Goes through the points in their order: the operator dies at each, while `cause` brings it there. What was
    /// left behind at one point is taken up by a process that dies at the next.
    pub(crate) async fn dies_at(
        &mut self,
        points: &[&str],
        cause: impl AsyncFn(usize) -> Result<()>,
    ) -> Result<()> {
        let mut times = 0;
        for point in points {
            let context = || format!("{point} of {points:?}");
            self.restart_with(&format!("FAILPOINTS={point}=panic"))
                .await?;
            if times == 0 {
                self.leads().await?;
            }
            while times == 0 || !self.crashed_or_settled(point).await.with_context(context)? {
                ensure!(times <= points.len(), "{point} is never reached");
                cause(times).await.with_context(context)?;
                times += 1;
            }
            self.crashes += 1;
        }
        Ok(())
    }

    /// Waits until the operator has died at the point (true), or until it leads and there is nothing to do (false).
    async fn crashed_or_settled(&self, point: &str) -> Result<bool> {
        let mut settled: Option<(Instant, f64)> = None;
        until(
            &format!("the operator dies {point}"),
            PATIENCE,
            async || {
                let pod = self.pod().await?;
                if has_crashed(&pod) {
                    return Ok(Look::Done(true));
                }
                let waits = self.what_is_left_to_do(&pod).await?;
                if let Some(waits) = waits {
                    settled = None;
                    return Ok(Look::NotYet(waits));
                }
                let Some((since, before)) = settled else {
                    self.look_again().await?;
                    let (_, looks) = self.looks(&pod).await?;
                    settled = Some((Instant::now(), looks));
                    return Ok(Look::NotYet("settled".to_owned()));
                };
                let (clusters, looks) = self.looks(&pod).await?;
                // A status may be of before the cause: the operator looks at every cluster once more.
                Ok(if since.elapsed() > SETTLED && looks >= before + clusters {
                    Look::Done(false)
                } else {
                    Look::NotYet(format!("settled; {} looks since", looks - before))
                })
            },
        )
        .await
    }

    /// How many clusters there are, and how often a pod has looked at one and come to the end.
    async fn looks(&self, pod: &Pod) -> Result<(f64, f64)> {
        let clusters = self.sandbox.objects(Kind::EtcdCluster);
        let clusters = clusters.list(&ListParams::default()).await?.items.len();
        let page = Page::of_pod(self.sandbox, &pod.name_any()).await?;
        let looks = page.sum("etcd_operator_cluster_reconcile_duration_count", "");
        Ok((f64::from(u32::try_from(clusters)?), looks))
    }

    /// Gives the operator a reason to look at every cluster at once.
    async fn look_again(&self) -> Result<()> {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
        let look = format!("e2e/look={}", now.as_millis());
        let annotate = ["annotate", "etcdcluster", "--all", "--overwrite", &look];
        self.sandbox.kubectl(&annotate).await.map(drop)
    }

    /// The pod that leads.
    async fn holder(&self) -> Result<Option<String>> {
        let lease = self.sandbox.api::<Lease>().get_opt("etcd-operator").await?;
        Ok(lease.and_then(|lease| lease.spec?.holder_identity))
    }

    /// Waits until the newest pod leads: what is brought about now, it sees.
    async fn leads(&self) -> Result<()> {
        until(
            "the new process leads, or died already",
            PATIENCE,
            async || {
                let (pod, holder) = (self.pod().await?, self.holder().await?);
                Ok(if holder == pod.metadata.name || has_crashed(&pod) {
                    Look::Done(())
                } else {
                    Look::NotYet(format!("{holder:?}"))
                })
            },
        )
        .await
    }

    async fn what_is_left_to_do(&self, pod: &Pod) -> Result<Option<String>> {
        let holder = self.holder().await?;
        if holder != pod.metadata.name {
            return Ok(Some(format!("{holder:?} leads")));
        }
        let clusters = self.sandbox.objects(Kind::EtcdCluster);
        for object in clusters.list(&ListParams::default()).await? {
            let size = field(&object, "/spec/size").as_u64().unwrap_or_default();
            let done = ready_members(&object).len() as u64 == size
                && field(&object, "/status/size") == size
                && field(&object, "/status/observedGeneration").as_i64()
                    == object.metadata.generation
                && e2e::objects::has_condition(&object, "Progressing", "False");
            if !done {
                return Ok(Some(e2e::objects::conditions_line(&object)));
            }
        }
        Ok(None)
    }

    /// The operator's pods anew, with another environment.
    async fn restart_with(&self, variable: &str) -> Result<()> {
        let set = ["set", "env", "deployment/etcd-operator", variable];
        self.sandbox.kubectl(&set).await?;
        let wait = [
            "rollout",
            "status",
            "deployment/etcd-operator",
            "--timeout=300s",
        ];
        self.sandbox.kubectl(&wait).await?;
        // The dead process cannot give its lease back, and it takes 20 s to run out.
        let delete = ["delete", "lease", "etcd-operator", "--ignore-not-found"];
        self.sandbox.kubectl(&delete).await.map(drop)
    }

    /// The operator's newest pod.
    async fn pod(&self) -> Result<Pod> {
        let selector = ListParams::default().labels("app.kubernetes.io/component=etcd-operator");
        let pods = self.sandbox.api::<Pod>().list(&selector).await?;
        pods.into_iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none())
            .max_by_key(|pod| pod.metadata.creation_timestamp.clone().map(|time| time.0))
            .context("the operator has no pod")
    }

    /// Lets the operator live.
    pub(crate) async fn lives_on(self) -> Result<usize> {
        self.restart_with("FAILPOINTS-").await?;
        Ok(self.crashes)
    }
}

fn has_crashed(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let containers = status.and_then(|status| status.container_statuses.as_ref());
    containers.into_iter().flatten().any(|container| {
        let ended = |state: Option<&k8s_openapi::api::core::v1::ContainerState>| {
            state.is_some_and(|state| state.terminated.is_some())
        };
        ended(container.state.as_ref()) || ended(container.last_state.as_ref())
    })
}

/// Names and number of members are those that were asked for; nothing was made twice.
pub(crate) async fn is_as_asked_for(sandbox: &Sandbox, name: &str, size: usize) -> Result<()> {
    sandbox.await_members(name, size).await?;
    let selector = ListParams::default().labels(&format!("etcd_cluster={name}"));
    let clusters = sandbox.objects(Kind::EtcdCluster);
    until("a pod for each member and no other", PATIENCE, async || {
        // Each time anew: an operator that has just come back may not have told yet who they are by now.
        let mut members = ready_members(&clusters.get(name).await?);
        members.sort();
        let pods = sandbox.api::<Pod>().list(&selector).await?.into_iter();
        let mut pods: Vec<String> = pods.filter_map(|pod| pod.metadata.name).collect();
        pods.sort();
        Ok(if pods == members && members.len() == size {
            Look::Done(())
        } else {
            Look::NotYet(format!("pods {pods:?}, members {members:?}"))
        })
    })
    .await
}

#[tokio::test]
async fn an_operator_that_dies_at_every_step_of_a_bootstrap_makes_one_cluster() {
    cluster_scenario("crash_bootstrap", async |sandbox| {
        let mut victim = Victim {
            sandbox,
            crashes: 0,
        };
        let made = std::cell::RefCell::new(Vec::new());
        victim
            .dies_at(BOOTSTRAP, async |number| {
                let name = format!("c{number}");
                let manifest = cluster_with(&sandbox.env, &name, 3, DURABLE)?;
                made.borrow_mut().push(name);
                sandbox.apply(&manifest).await.map(drop)
            })
            .await?;
        ensure!(victim.lives_on().await? == BOOTSTRAP.len());
        for name in made.into_inner() {
            is_as_asked_for(sandbox, &name, 3).await?;
            let writer = Writer::start(sandbox, &name).await?;
            writer.finish("a bootstrap with crashes").await?;
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn an_operator_that_dies_while_members_come_and_go_loses_nothing() {
    cluster_scenario("crash_members", async |sandbox| {
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, DURABLE)?)
            .await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        let mut victim = Victim {
            sandbox,
            crashes: 0,
        };
        let size = std::cell::Cell::new(3);
        victim
            .dies_at(GROWTH, async |_| {
                size.set(size.get() + 1);
                sandbox.scale("c", size.get()).await
            })
            .await?;
        victim
            .dies_at(HANDOVER, async |_| {
                let leader = leader(&sandbox.await_members("c", size.get()).await?)?;
                let delete = ["delete", "pvc", &leader, "--wait=false"];
                sandbox.kubectl(&delete).await.map(drop)
            })
            .await?;
        victim
            .dies_at(SHRINKING, async |_| {
                size.set(size.get() - 1);
                sandbox.scale("c", size.get()).await
            })
            .await?;
        let points = GROWTH.len() + HANDOVER.len() + SHRINKING.len();
        ensure!(victim.lives_on().await? == points);
        is_as_asked_for(sandbox, "c", size.get()).await?;
        let after = sandbox.await_members("c", size.get()).await?;
        ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
        writer.await_more(10).await?;
        writer
            .finish("crashes while members come and go")
            .await
            .map(drop)
    })
    .await;
}

#[tokio::test]
async fn an_operator_that_dies_while_it_repairs_and_recovers_goes_on() {
    cluster_scenario("crash_repair", async |sandbox| {
        // Kubernetes changes no class of service in place, so there is a request from the beginning.
        let more = format!("{DURABLE}    resources: {{requests: {{cpu: 10m}}}}\n");
        let durable = cluster_with(&sandbox.env, "d", 3, &more)?;
        sandbox.apply(&durable).await?;
        sandbox.apply(&cluster(&sandbox.env, "r", 3)?).await?;
        let before = sandbox.await_members("d", 3).await?;
        let lost = sandbox.await_members("r", 3).await?;
        let writer = Writer::start(sandbox, "d").await?;
        let mut victim = Victim {
            sandbox,
            crashes: 0,
        };
        victim
            .dies_at(REPAIR, async |_| {
                let patch = r#"{"spec":{"publishNotReadyAddresses":false}}"#;
                let member = ready_members(&before).remove(0);
                sandbox
                    .kubectl(&["patch", "service", &member, "-p", patch])
                    .await
                    .map(drop)
            })
            .await?;
        victim
            .dies_at(SETTINGS, async |times| {
                let (round, cpu) = (times.to_string(), format!("{}m", 20 + times));
                let pod = serde_json::json!({ "labels": { "round": round }, "resources": { "requests": { "cpu": cpu } } });
                let patch = serde_json::json!({ "spec": { "pod": pod } }).to_string();
                let args = ["patch", "etcdcluster", "d", "--type=merge", "-p", &patch];
                sandbox.kubectl(&args).await.map(drop)
            })
            .await?;
        victim
            .dies_at(NO_BUDGET, async |_| {
                let patch = r#"{"spec":{"podDisruptionBudget":{"enabled":false}}}"#;
                let args = ["patch", "etcdcluster", "d", "--type=merge", "-p", patch];
                sandbox.kubectl(&args).await.map(drop)
            })
            .await?;
        victim
            .dies_at(RECOVERY, async |_| {
                let survivor = follower(&lost)?;
                let mut gone = ready_members(&lost);
                gone.retain(|name| *name != survivor);
                let args = [
                    "delete",
                    "pod",
                    "--force",
                    "--grace-period=0",
                    "--ignore-not-found",
                    &gone[0],
                    &gone[1],
                ];
                sandbox.kubectl(&args).await?;
                let id = field(&lost, "/status/clusterID")
                    .as_str()
                    .unwrap_or_default();
                let approval = format!("etcd.database.coreos.com/recover={id}");
                let args = ["annotate", "etcdcluster", "r", &approval, "--overwrite"];
                sandbox.kubectl(&args).await.map(drop)
            })
            .await?;
        ensure!(victim.lives_on().await? == 3 + SETTINGS.len());
        is_as_asked_for(sandbox, "d", 3).await?;
        is_as_asked_for(sandbox, "r", 3).await?;
        let after = sandbox.await_members("d", 3).await?;
        crate::all_pods_lost::same_members(&before, &after)?;
        let recovered = sandbox.await_members("r", 3).await?;
        ensure!(field(&recovered, "/status/recovery/phase") == "Complete");
        writer.await_more(10).await?;
        writer.finish("crashes while repairing").await.map(drop)
    })
    .await;
}

#[tokio::test]
async fn an_operator_that_dies_while_it_changes_versions_goes_on() {
    cluster_scenario("crash_versions", async |sandbox| {
        let (old, new) = (sandbox.env.newest_of("3.5")?, sandbox.env.newest_of("3.6")?);
        sandbox.apply(&manifest("c", 3, &old, DURABLE)).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        let mut victim = Victim {
            sandbox,
            crashes: 0,
        };
        let wanted = std::cell::Cell::new(&old);
        victim
            .dies_at(VERSIONS, async |times| {
                wanted.set(if times % 2 == 0 { &new } else { &old });
                let spec = serde_json::json!({ "version": wanted.get() });
                change(sandbox, "c", spec).await
            })
            .await?;
        ensure!(victim.lives_on().await? == VERSIONS.len());
        let after = await_version(sandbox, "c", 3, wanted.get()).await?;
        crate::all_pods_lost::same_members(&before, &after)?;
        is_as_asked_for(sandbox, "c", 3).await?;
        writer.await_more(10).await?;
        writer
            .finish("crashes while versions change")
            .await
            .map(drop)
    })
    .await;
}

#[tokio::test]
async fn an_operator_that_dies_while_it_makes_room_goes_on() {
    cluster_scenario("crash_no_space", async |sandbox| {
        let small =
            "  etcd: {quotaBackendBytes: 25165824}\n  upkeep: {noSpace: {keepRevisions: 0}}\n";
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, small)?)
            .await?;
        let before = sandbox.await_members("c", 3).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        keys.fill("kept/", 100, |_| {}).await?;
        let mut victim = Victim {
            sandbox,
            crashes: 0,
        };
        victim
            .dies_at(NO_SPACE, async |times| {
                let mut number = 0;
                while let Ok(()) = keys
                    .write(&format!("big/{times}/{number}"), vec![7; 1 << 20])
                    .await
                {
                    number += 1;
                }
                keys.delete("big/").await.map(drop)
            })
            .await?;
        ensure!(victim.lives_on().await? == NO_SPACE.len());
        await_writable(&keys).await?;
        keys.verify("kept/", 100).await?;
        crate::all_pods_lost::same_members(&before, &sandbox.await_members("c", 3).await?)
    })
    .await;
}

#[tokio::test]
async fn an_operator_that_dies_before_it_grows_a_volume_goes_on() {
    cluster_scenario("crash_larger", async |sandbox| {
        with_class(sandbox, "larger", true, async |class| {
            let manifest = cluster_with(&sandbox.env, "c", 1, &claims_with(class, "64Mi"))?;
            sandbox.apply(&manifest).await?;
            sandbox.await_members("c", 1).await?;
            let mut victim = Victim {
                sandbox,
                crashes: 0,
            };
            victim
                .dies_at(LARGER, async |_| ask_for(sandbox, "128Mi").await)
                .await?;
            ensure!(victim.lives_on().await? == LARGER.len());
            until("a larger volume is asked for", PATIENCE, async || {
                let asked: Vec<String> = claims(sandbox).await?.iter().map(requested).collect();
                Ok(if asked == ["128Mi"] {
                    Look::Done(())
                } else {
                    Look::NotYet(format!("{asked:?}"))
                })
            })
            .await
        })
        .await
    })
    .await;
}

/// What the operator can be interrupted at is what the tests above, and those of certificates and of who gets in,
/// interrupt it at.
#[test]
fn every_boundary_between_two_writes_is_crashed_at() {
    let mut points: BTreeSet<String> = BTreeSet::new();
    let mut directories = vec![root().join("crates/cluster/src")];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                directories.push(path);
                continue;
            }
            let source = std::fs::read_to_string(path).unwrap_or_default();
            let words = source.split('"').filter(|word| word.starts_with("before-"));
            points.extend(words.map(str::to_owned));
        }
    }
    let stories = [
        BOOTSTRAP,
        GROWTH,
        HANDOVER,
        SHRINKING,
        REPAIR,
        SETTINGS,
        NO_BUDGET,
        VERSIONS,
        NO_SPACE,
        LARGER,
        RECOVERY,
        crate::tls_switch::CRASHES,
    ];
    let here: BTreeSet<String> = stories.concat().into_iter().map(str::to_owned).collect();
    let elsewhere = crate::crash_access::POINTS.concat().into_iter();
    let crashed_at: BTreeSet<String> = elsewhere.map(str::to_owned).chain(here).collect();
    assert_eq!(points, crashed_at);
}
