//! The operator crashes before a write, and the next process continues.
//!
//! The image of the tests contains failpoints: the operator exits before the write that `FAILPOINTS` names. By default,
//! the tests crash the operator before writes in the middle of a change. With `--full`, they crash the operator before
//! every write. The model test of the cluster operator (`crates/cluster/tests/model`) crashes the operator between any
//! two writes.

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

/// Failpoints of a bootstrap. At the first failpoint, the operator has only recorded the names of the first members. At
/// the second, volumes and Services exist, but no pod. At the third, members run, but the cluster ID is not recorded.
const BOOTSTRAP: &[&str] = &[
    "before-apply-headless",
    "before-create-pod",
    "before-record-cluster-id",
];
/// Failpoints before the writes that add a member. At the first failpoint, the member is recorded, but not in etcd. At
/// the second, the member is a learner in etcd.
const GROW: &[&str] = &["before-add-member", "before-promote-member"];
/// Failpoints before the writes that remove a member. At the first failpoint, the removal is recorded, but the member
/// is in etcd. At the second, etcd has removed the member, but its pod exists. At the third, only its volume exists.
const SHRINK: &[&str] = &[
    "before-remove-member",
    "before-delete-pod",
    "before-delete-disk",
];
/// Failpoints of a downgrade. At the first failpoint, the downgrade is recorded, but etcd has not started it. At the
/// second, a member runs the target version, but its pod has the annotation of the change.
const DOWNGRADE: &[&str] = &["before-downgrade", "before-settle-image"];

/// The failpoints of the test in this file, which runs without `--full`.
const DEFAULT: [&[&str]; 4] = [BOOTSTRAP, GROW, SHRINK, DOWNGRADE];

/// If the operator is idle for this time, has reconciled each cluster, and has not crashed, the test triggers the write
/// at the failpoint again.
const IDLE_TIME: Duration = Duration::from_secs(3);

/// An operator that the test crashes several times.
pub(crate) struct CrashingOperator<'a> {
    pub(crate) sandbox: &'a Sandbox,
    pub(crate) crashes: usize,
}

impl CrashingOperator<'_> {
    /// Crashes the operator at each failpoint in `points`. `cause` triggers the write before which the operator
    /// crashes. Each new process continues where the crashed process stopped.
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
                ensure!(times <= points.len(), "the operator never reaches {point}");
                cause(times).await.with_context(context)?;
                times += 1;
            }
            self.crashes += 1;
        }
        Ok(())
    }

    /// Waits until the operator has crashed at the failpoint, or is idle as the leader. Returns true after a crash.
    async fn crashed_or_idle(&self, point: &str) -> Result<bool> {
        let mut idle: Option<(Instant, f64)> = None;
        until(
            &format!("the operator crashes {point}"),
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
                    return Ok(Poll::NotYet("idle".to_owned()));
                };
                let (clusters, reconciles) = self.reconciles(&pod).await?;
                // Each cluster must have been reconciled since `trigger_reconciles`. Otherwise its status may be older
                // than this call.
                Ok(
                    if since.elapsed() > IDLE_TIME && reconciles >= before + clusters {
                        Poll::Done(false)
                    } else {
                        Poll::NotYet(format!("idle; {} reconciles since", reconciles - before))
                    },
                )
            },
        )
        .await
    }

    /// The number of clusters, and the number of reconciles that the operator has completed.
    async fn reconciles(&self, pod: &Pod) -> Result<(f64, f64)> {
        let clusters = self.sandbox.objects(Kind::EtcdCluster);
        let clusters = clusters.list(&ListParams::default()).await?.items.len();
        let page = Page::of_pod(self.sandbox, &pod.name_any()).await?;
        let reconciles = page.sum("etcd_operator_cluster_reconcile_duration_count", "");
        Ok((f64::from(u32::try_from(clusters)?), reconciles))
    }

    /// Triggers a reconcile of every cluster.
    async fn trigger_reconciles(&self) -> Result<()> {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
        let trigger = format!("e2e/trigger={}", now.as_millis());
        let annotate = ["annotate", "etcdcluster", "--all", "--overwrite", &trigger];
        self.sandbox.kubectl(&annotate).await.map(drop)
    }

    /// The name of the pod that holds the Lease.
    async fn holder(&self) -> Result<Option<String>> {
        let lease = self.sandbox.api::<Lease>().get_opt("etcd-operator").await?;
        Ok(lease.and_then(|lease| lease.spec?.holder_identity))
    }

    /// Waits until the pod of the newest process holds the Lease, so that this process makes the next change. Also
    /// returns if the process has crashed.
    async fn await_leadership(&self) -> Result<()> {
        until(
            "the new process is the leader or has crashed",
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
            return Ok(Some(format!("{holder:?} is the leader")));
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

    /// Starts an operator with this failpoint, in a separate pod with the pod template of the Deployment. A rollout of
    /// the Deployment would take longer, and its pod would crash again and again.
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

    /// Deletes the crashed pod and its Lease. A crashed process does not release its Lease, which would expire only
    /// after 20 s.
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

    /// The pod of the newest operator process.
    async fn pod(&self) -> Result<Pod> {
        let pods = self.sandbox.api::<Pod>();
        Ok(pods.get(&process(self.crashes)).await?)
    }

    /// Starts the operator without a failpoint, and returns the number of crashes.
    pub(crate) async fn run_without_failpoints(self) -> Result<usize> {
        self.remove_dead_process().await?;
        let start = ["scale", "deployment/etcd-operator", "--replicas=1"];
        self.sandbox.kubectl(&start).await?;
        self.sandbox.await_operators().await?;
        Ok(self.crashes)
    }
}

/// The name of the pod with the process of this number.
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

/// Waits until the cluster has exactly `size` members, with one pod each.
pub(crate) async fn await_desired_members(
    sandbox: &Sandbox,
    name: &str,
    size: usize,
) -> Result<()> {
    sandbox.await_members(name, size).await?;
    let selector = ListParams::default().labels(&format!("etcd_cluster={name}"));
    let clusters = sandbox.objects(Kind::EtcdCluster);
    until("one pod for each member", DEADLINE, async || {
        // Each poll reads the status again, because the restarted operator may not have updated the status.
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

/// Each process continues the work of a crashed process. Each step starts after the previous step is complete.
#[tokio::test]
async fn operator_crashes_between_writes_lose_no_data() {
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
        // The operator must not have created a second set of members, or kept the volume of a removed member.
        await_one_volume_per_member(sandbox, &members).await?;
        writer.await_more(10).await?;
        writer.finish("crashes of the operator").await.map(drop)
    })
    .await;
}

/// Crashes the operator at each failpoint, and then starts it without a failpoint.
async fn crashes(
    sandbox: &Sandbox,
    points: &[&str],
    cause: impl AsyncFn(usize) -> Result<()>,
) -> Result<()> {
    let mut operator = CrashingOperator {
        sandbox,
        crashes: 0,
    };
    operator.crash_at_each(points, cause).await?;
    ensure!(operator.run_without_failpoints().await? == points.len());
    Ok(())
}

/// Crashes the operator while clusters form, and returns the names of the clusters except `c`. Creates a new cluster if
/// all existing clusters have passed the failpoint.
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

/// Downgrades the cluster, and returns the version in its spec after all crashes.
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

/// The tests, including those with `--full`, must use exactly the failpoints in the operator's source code.
#[test]
fn crash_tests_include_every_failpoint_of_cluster_operator() {
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
        crate::before_upgrade::CRASHES,
        crate::cert_manager::CRASHES,
        crate::deletion_backup::CRASHES,
        crate::tls_switch::CRASHES,
        crate::quorum_loss::CRASHES,
    ]));
    assert_eq!(points, crashed_at);
    let by_default = owned(&DEFAULT);
    assert!(by_default.is_subset(&owned(&full::POINTS)));
}
