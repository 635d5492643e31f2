//! The operator crashes between two writes, and the next process goes on from the state that it finds.
//!
//! A build with fail points ends the process before the write that `FAILPOINTS` names; the image of the tests has them. A
//! default run crashes at the writes after which etcd or Kubernetes holds half of a change. `full` crashes before every
//! write, and the model between any two.

mod full;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::metrics::Page;
use e2e::objects::{Kind, field, ready_members};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, Writer, cluster_scenario, step, until};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{EnvVar, Pod};
use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::json;

use crate::fixtures::{DURABLE, root};
use crate::member_loss::await_one_volume_per_member;
use crate::upgrade::{await_version, change, manifest};

const OPERATOR: &str = "etcd-operator";

/// The intent is recorded; volumes and Services exist; the members serve and their cluster ID is not recorded.
const BOOTSTRAP: &[&str] = &[
    "before-apply-headless",
    "before-create-pod",
    "before-record-cluster-id",
];
/// One member more: etcd does not know the member; the member is a learner.
const GROW: &[&str] = &["before-add-member", "before-promote-member"];
/// One member less: etcd still has the member; etcd removed the member, whose pod runs; a volume is left.
const SHRINK: &[&str] = &[
    "before-remove-member",
    "before-delete-pod",
    "before-delete-disk",
];
/// A downgrade: etcd does not know of it; a member runs the other version, and its pod carries the record of the change.
const DOWNGRADE: &[&str] = &["before-downgrade", "before-settle-image"];

/// The crashes of a default run, without those of other files.
const DEFAULT: [&[&str]; 4] = [BOOTSTRAP, GROW, SHRINK, DOWNGRADE];

/// How long nothing may be left to do before a point counts as passed by, when the operator has looked meanwhile: then
/// its cause is brought about again.
const IDLE_TIME: Duration = Duration::from_secs(3);

/// The operator of a sandbox, made to die again and again.
pub(crate) struct CrashingOperator<'a> {
    pub(crate) sandbox: &'a Sandbox,
    pub(crate) crashes: usize,
}

impl CrashingOperator<'_> {
    /// Goes through the points in their order: the operator dies at each, while `cause` brings it there. What was
    /// left behind at one point is taken up by a process that dies at the next.
    pub(crate) async fn crash_at_each(
        &mut self,
        points: &[&str],
        cause: impl AsyncFn(usize) -> Result<()>,
    ) -> Result<()> {
        let mut times = 0;
        for point in points {
            let context = || format!("{point} of {points:?}");
            self.starts_with(point).await.with_context(context)?;
            if times == 0 {
                self.await_leadership().await?;
            }
            while times == 0 || !self.crashed_or_idle(point).await.with_context(context)? {
                ensure!(times <= points.len(), "{point} is never reached");
                cause(times).await.with_context(context)?;
                times += 1;
            }
            self.crashes += 1;
        }
        Ok(())
    }

    /// Waits until the operator has died at the point (true), or until it leads and there is nothing to do (false).
    async fn crashed_or_idle(&self, point: &str) -> Result<bool> {
        let mut idle: Option<(Instant, f64)> = None;
        until(
            &format!("the operator dies {point}"),
            DEADLINE,
            async || {
                let pod = self.pod().await?;
                if has_crashed(&pod) {
                    return Ok(Poll::Done(true));
                }
                let waits = self.pending_work(&pod).await?;
                if let Some(waits) = waits {
                    idle = None;
                    return Ok(Poll::NotYet(waits));
                }
                let Some((since, before)) = idle else {
                    self.trigger_reconciles().await?;
                    let (_, reconciles) = self.reconciles(&pod).await?;
                    idle = Some((Instant::now(), reconciles));
                    return Ok(Poll::NotYet("settled".to_owned()));
                };
                let (clusters, reconciles) = self.reconciles(&pod).await?;
                // A status may be of before the cause: the operator looks at every cluster once more.
                Ok(
                    if since.elapsed() > IDLE_TIME && reconciles >= before + clusters {
                        Poll::Done(false)
                    } else {
                        Poll::NotYet(format!("settled; {} looks since", reconciles - before))
                    },
                )
            },
        )
        .await
    }

    /// How many clusters there are, and how often a pod has looked at one and come to the end.
    async fn reconciles(&self, pod: &Pod) -> Result<(f64, f64)> {
        let clusters = self.sandbox.objects(Kind::EtcdCluster);
        let clusters = clusters.list(&ListParams::default()).await?.items.len();
        let page = Page::of_pod(self.sandbox, &pod.name_any()).await?;
        let reconciles = page.sum("etcd_operator_cluster_reconcile_duration_count", "");
        Ok((f64::from(u32::try_from(clusters)?), reconciles))
    }

    /// Gives the operator a reason to look at every cluster at once.
    async fn trigger_reconciles(&self) -> Result<()> {
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
    async fn await_leadership(&self) -> Result<()> {
        until(
            "the new process leads, or died already",
            DEADLINE,
            async || {
                let (pod, holder) = (self.pod().await?, self.holder().await?);
                Ok(if holder == pod.metadata.name || has_crashed(&pod) {
                    Poll::Done(())
                } else {
                    Poll::NotYet(format!("{holder:?}"))
                })
            },
        )
        .await
    }

    async fn pending_work(&self, pod: &Pod) -> Result<Option<String>> {
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

    /// Starts a process that dies at the point, in a pod of its own from the Deployment's template. A rollout of the
    /// Deployment takes several times as long, and its pod would start again and die again.
    async fn starts_with(&self, point: &str) -> Result<()> {
        if self.crashes == 0 {
            let stop = ["scale", "deployment/etcd-operator", "--replicas=0"];
            self.sandbox.kubectl(&stop).await?;
            self.sandbox.await_operator_pods(OPERATOR, 0).await?;
        }
        self.remove_dead_process().await?;
        let deployment = self.sandbox.api::<Deployment>().get(OPERATOR).await?;
        let template = deployment.spec.context("no spec")?.template;
        let mut pod = Pod {
            metadata: template.metadata.unwrap_or_default(),
            spec: template.spec,
            status: None,
        };
        let name = process(self.crashes);
        pod.metadata.name = Some(name.clone());
        let spec = pod.spec.as_mut().context("no pod")?;
        spec.restart_policy = Some("Never".to_owned());
        let operator = spec.containers.first_mut().context("no container")?;
        operator.env.get_or_insert_default().push(EnvVar {
            name: "FAILPOINTS".to_owned(),
            value: Some(format!("{point}=panic")),
            ..EnvVar::default()
        });
        let pods = self.sandbox.api::<Pod>();
        let params = PatchParams::apply("e2e");
        pods.patch(&name, &params, &Patch::Apply(&pod)).await?;
        Ok(())
    }

    /// Deletes the pod of the process before, and the lease: a dead process does not release it, and it expires after 20 s.
    async fn remove_dead_process(&self) -> Result<()> {
        let last = self.crashes.checked_sub(1).map(process);
        let last = last.map(|name| format!("pod/{name}"));
        let mut delete = vec![
            "delete",
            "--ignore-not-found",
            "--grace-period=0",
            "--force",
            "lease/etcd-operator",
        ];
        delete.extend(last.as_deref());
        self.sandbox.kubectl(&delete).await.map(drop)
    }

    /// The pod of the process that dies next.
    async fn pod(&self) -> Result<Pod> {
        let pods = self.sandbox.api::<Pod>();
        Ok(pods.get(&process(self.crashes)).await?)
    }

    /// Starts the operator without a fail point, and returns the number of crashes.
    pub(crate) async fn run_without_failpoints(self) -> Result<usize> {
        self.remove_dead_process().await?;
        let start = ["scale", "deployment/etcd-operator", "--replicas=1"];
        self.sandbox.kubectl(&start).await?;
        self.sandbox.await_operators().await?;
        Ok(self.crashes)
    }
}

/// The name of a process' pod.
fn process(number: usize) -> String {
    format!("{OPERATOR}-crash-{number}")
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
pub(crate) async fn await_desired_members(
    sandbox: &Sandbox,
    name: &str,
    size: usize,
) -> Result<()> {
    sandbox.await_members(name, size).await?;
    let selector = ListParams::default().labels(&format!("etcd_cluster={name}"));
    let clusters = sandbox.objects(Kind::EtcdCluster);
    until("a pod for each member and no other", DEADLINE, async || {
        // Each time anew: an operator that has just come back may not have told yet who they are by now.
        let mut members = ready_members(&clusters.get(name).await?);
        members.sort();
        let pods = sandbox.api::<Pod>().list(&selector).await?.into_iter();
        let mut pods: Vec<String> = pods.filter_map(|pod| pod.metadata.name).collect();
        pods.sort();
        Ok(if pods == members && members.len() == size {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("pods {pods:?}, members {members:?}"))
        })
    })
    .await
}

/// Every process takes over what the one before left behind. A step begins when the one before is complete.
#[tokio::test]
async fn operator_crashes_between_writes_lose_nothing() {
    cluster_scenario("operator_crash", async |sandbox| {
        let size = Cell::new(3);
        let others = step("crash while members form", forms(sandbox)).await?;
        let before = sandbox.await_members("c", size.get()).await?;
        let writer = Writer::start(sandbox, "c").await?;
        let joined = crashes(sandbox, GROW, async |_| {
            size.set(size.get() + 1);
            sandbox.scale("c", size.get()).await
        });
        step("crash while a member joins", joined).await?;
        sandbox.await_members("c", size.get()).await?;
        let removed = crashes(sandbox, SHRINK, async |_| {
            size.set(size.get() - 1);
            sandbox.scale("c", size.get()).await
        });
        step("crash while a member is removed", removed).await?;
        sandbox.await_members("c", size.get()).await?;
        let version = step("crash during a downgrade", downgrades(sandbox)).await?;

        let after = await_version(sandbox, "c", size.get(), &version).await?;
        ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
        await_desired_members(sandbox, "c", size.get()).await?;
        let mut members = ready_members(&after);
        for name in others {
            await_desired_members(sandbox, &name, 3).await?;
            members.extend(ready_members(&sandbox.await_members(&name, 3).await?));
        }
        // No second set of members was made, and nothing of the removed one is left.
        await_one_volume_per_member(sandbox, &members).await?;
        writer.await_more(10).await?;
        writer.finish("an operator that crashes").await.map(drop)
    })
    .await;
}

/// Crashes the operator at each point, and starts it again without a fail point.
async fn crashes(
    sandbox: &Sandbox,
    points: &[&str],
    cause: impl AsyncFn(usize) -> Result<()>,
) -> Result<()> {
    let mut victim = CrashingOperator {
        sandbox,
        crashes: 0,
    };
    victim.crash_at_each(points, cause).await?;
    ensure!(victim.run_without_failpoints().await? == points.len());
    Ok(())
}

/// Returns the clusters beside `c`: each is created when a write had come before the process began.
async fn forms(sandbox: &Sandbox) -> Result<Vec<String>> {
    let version = sandbox.env.newest_of("3.6")?;
    let others = RefCell::new(Vec::new());
    crashes(sandbox, BOOTSTRAP, async |number| {
        let name = if number == 0 {
            "c".to_owned()
        } else {
            format!("c{number}")
        };
        let cluster = manifest(&name, 3, &version, DURABLE);
        if number > 0 {
            others.borrow_mut().push(name);
        }
        sandbox.apply(&cluster).await.map(drop)
    })
    .await?;
    Ok(others.into_inner())
}

/// Returns the version that the spec has in the end.
async fn downgrades(sandbox: &Sandbox) -> Result<String> {
    let (old, new) = (sandbox.env.newest_of("3.5")?, sandbox.env.newest_of("3.6")?);
    let version = Cell::new(&new);
    crashes(sandbox, DOWNGRADE, async |times| {
        version.set(if times % 2 == 0 { &old } else { &new });
        change(sandbox, "c", json!({ "version": version.get() })).await
    })
    .await?;
    Ok(version.get().clone())
}

/// The tests, with those of `--full`, crash the operator before each of its writes.
#[test]
fn operator_crashes_cover_every_write() {
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
    let owned = |points: &[&[&str]]| -> BTreeSet<String> {
        points.concat().into_iter().map(str::to_owned).collect()
    };
    let mut crashed_at = owned(&full::POINTS);
    crashed_at.extend(owned(&crate::crash_access::POINTS));
    crashed_at.extend(owned(&[
        crate::tls_switch::CRASHES,
        crate::quorum_loss::CRASHES,
    ]));
    assert_eq!(points, crashed_at);
    let by_default = owned(&DEFAULT);
    assert!(by_default.is_subset(&owned(&full::POINTS)));
}
