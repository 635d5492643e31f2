//! 200 clusters wait for a node. The operator reconciles all clusters, and a change of a user does not wait until the
//! operator has checked all other clusters.

/// 200 clusters would slow down other tests, so this test runs while no other test runs.
mod alone {
    mod full {
        use std::collections::BTreeMap;
        use std::time::Duration;

        use anyhow::{Context, Result, ensure};
        use e2e::metrics::{Page, operator_pods};
        use e2e::objects::{Kind, await_object, condition, field};
        use e2e::wait::Poll;
        use e2e::{DEADLINE, Env, Sandbox, Writer, cluster_scenario, step, until};
        use futures::stream::{self, StreamExt, TryStreamExt};
        use k8s_openapi::api::core::v1::Pod;
        use kube::ResourceExt;
        use kube::api::{DynamicObject, ListParams, Patch, PatchParams, PostParams};
        use serde_json::{Value, json};
        use tokio::time::sleep;

        use crate::fixtures::{cluster, newest_version};

        const OPERATOR: &str = "etcd-operator";
        /// Number of clusters whose pods no node accepts.
        const WAITING: usize = 200;
        /// The clusters whose members run.
        const RUNNING: [&str; 3] = ["r-a", "r-b", "r-c"];
        /// Number of waiting clusters that are changed, one after another.
        const CHANGES: usize = 20;
        /// Number of concurrent create requests.
        const CONCURRENCY: usize = 32;
        /// Time limit until all clusters are in a state that the test expects.
        const HERD_DEADLINE: Duration = Duration::from_mins(20);
        /// Pause between two lists of all clusters, because frequent lists would load the API server.
        const LIST_PAUSE: Duration = Duration::from_secs(2);
        /// A pod label that the test changes in the spec.
        const CHANGE: &str = "e2e-change";
        /// A label that no node has.
        const NO_NODE: &str = "e2e-no-such-node";

        fn waiting(index: usize) -> String {
            format!("w-{index:03}")
        }

        /// A cluster of one member whose pod no node accepts.
        fn waiting_cluster(env: &Env, index: usize) -> Result<DynamicObject> {
            Ok(serde_json::from_value(json!({
                "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
                "metadata": {"name": waiting(index)},
                "spec": {"size": 1, "version": newest_version(env)?, "pod": {"nodeSelector": {NO_NODE: "true"}}},
            }))?)
        }

        async fn create_waiting(sandbox: &Sandbox, index: usize) -> Result<()> {
            let object = waiting_cluster(&sandbox.env, index)?;
            let clusters = sandbox.objects(Kind::EtcdCluster);
            until("the cluster is created", DEADLINE, async || {
                match clusters.create(&PostParams::default(), &object).await {
                    // Status 409: an earlier attempt, whose response was lost, has created the cluster.
                    Err(kube::Error::Api(error)) if error.code == 409 => Ok(Poll::Done(())),
                    made => made.map(|_| Poll::Done(())).context("create a cluster"),
                }
            })
            .await
        }

        async fn patch(sandbox: &Sandbox, name: &str, spec: Value) -> Result<DynamicObject> {
            let (params, patch) = (PatchParams::default(), json!({ "spec": spec }));
            let clusters = sandbox.objects(Kind::EtcdCluster);
            let patched = clusters.patch(name, &params, &Patch::Merge(&patch)).await;
            patched.with_context(|| format!("change {name}"))
        }

        fn with_label(value: &str) -> Value {
            json!({ "pod": { "labels": { CHANGE: value } } })
        }

        fn is_processed(object: &DynamicObject) -> bool {
            let processed = field(object, "/status/observedGeneration").as_i64();
            processed.is_some() && processed == object.metadata.generation
        }

        /// Changes a waiting cluster, and waits until its status shows that the operator has processed the change.
        async fn change_waiting(sandbox: &Sandbox, name: &str, value: &str) -> Result<()> {
            let changed = patch(sandbox, name, with_label(value)).await?;
            let clusters = sandbox.objects(Kind::EtcdCluster);
            let what = "the change is processed";
            await_object(&clusters, name, what, DEADLINE, |object| {
                is_processed(object) && object.metadata.generation >= changed.metadata.generation
            })
            .await
            .map(drop)
        }

        /// Changes a cluster with one running member, and waits until its pod has the new label.
        async fn change_running(sandbox: &Sandbox, name: &str, value: &str) -> Result<()> {
            patch(sandbox, name, with_label(value)).await?;
            let pods = sandbox.api::<Pod>();
            let selector = format!("etcd_cluster={name},{CHANGE}={value}");
            let selector = ListParams::default().labels(&selector);
            until("the pod has the new label", DEADLINE, async || {
                Ok(if pods.list(&selector).await?.items.is_empty() {
                    Poll::NotYet(format!("no pod of {name} has the label"))
                } else {
                    Poll::Done(())
                })
            })
            .await
        }

        /// Creates all waiting clusters at once. At the same time, one running cluster grows, and a second running
        /// cluster is changed.
        async fn herd_arrives(sandbox: &Sandbox) -> Result<()> {
            let created = stream::iter((0..WAITING).map(|index| create_waiting(sandbox, index)))
                .buffer_unordered(CONCURRENCY)
                .try_collect::<()>();
            let changed = async {
                sandbox.scale("r-a", 3).await?;
                change_running(sandbox, "r-b", "arrival").await?;
                sandbox.await_members("r-a", 3).await.map(drop)
            };
            let (created, changed) = tokio::join!(created, changed);
            created.and(changed)
        }

        fn is_reported(object: &DynamicObject) -> bool {
            let degraded = condition(object, "Degraded");
            is_processed(object)
                && degraded
                    .is_some_and(|it| it["status"] == "True" && it["reason"] == "Unschedulable")
        }

        /// Waits until the status of each waiting cluster reports that no node accepts its pod. Each of these clusters
        /// must then have exactly one pod.
        async fn all_are_reported(sandbox: &Sandbox) -> Result<()> {
            let clusters = sandbox.objects(Kind::EtcdCluster);
            until("each cluster reports its wait", HERD_DEADLINE, async || {
                let all = clusters.list(&ListParams::default()).await?;
                let reported = all.iter().filter(|object| is_reported(object)).count();
                if reported == WAITING {
                    return Ok(Poll::Done(()));
                }
                sleep(LIST_PAUSE).await;
                Ok(Poll::NotYet(format!("{reported} of {WAITING}")))
            })
            .await?;
            let of_members = ListParams::default().labels("app=etcd");
            let pods = sandbox.api::<Pod>().list(&of_members).await?;
            let mut counts = BTreeMap::<&str, usize>::new();
            for pod in &pods.items {
                let cluster = pod.labels().get("etcd_cluster");
                *counts
                    .entry(cluster.context("no label")?.as_str())
                    .or_default() += 1;
            }
            for index in 0..WAITING {
                let name = waiting(index);
                let count = counts.get(name.as_str()).copied().unwrap_or_default();
                ensure!(count == 1, "{name} has {count} pods");
            }
            Ok(())
        }

        /// The number of reconciles of all clusters since the start of the operator.
        async fn reconciles(sandbox: &Sandbox) -> Result<f64> {
            let page = Page::of_operator(sandbox, OPERATOR).await?;
            Ok(page.sum("etcd_operator_cluster_reconcile_duration_count", ""))
        }

        /// The operator checks each cluster periodically. If a change had to wait for these checks, the operator would
        /// reconcile every other cluster first. The test therefore counts the reconciles until a change is processed.
        /// The test uses the median, because on a busy machine many checks may run before a single change is processed.
        async fn changes_do_not_wait_for_checks(sandbox: &Sandbox) -> Result<()> {
            let mut counts = Vec::new();
            for nth in 0..CHANGES {
                let before = reconciles(sandbox).await?;
                let name = waiting(nth * WAITING / CHANGES);
                change_waiting(sandbox, &name, &format!("check-{nth}")).await?;
                counts.push(reconciles(sandbox).await? - before);
            }
            counts.sort_by(f64::total_cmp);
            eprintln!("    reconciles until a change is processed: {counts:?}");
            let (median, all) = (counts[CHANGES / 2], f64::from(u32::try_from(WAITING)?));
            ensure!(
                median < all,
                "the operator made {median} reconciles before it processed a change"
            );
            Ok(())
        }

        /// The operator is restarted. The new process must reconcile all clusters, and process changes meanwhile.
        async fn operator_restarts(sandbox: &Sandbox) -> Result<()> {
            let old = operator_pods(sandbox, OPERATOR).await?;
            let old = old.first().context("the operator has no pod")?.name_any();
            sandbox
                .kubectl(&["delete", "pod", &old, "--wait=false"])
                .await?;
            change_running(sandbox, "r-c", "restart").await?;
            change_waiting(sandbox, &waiting(WAITING / 2), "restart").await?;
            let all = WAITING + RUNNING.len();
            let what = "the new process has reconciled all clusters";
            until(what, HERD_DEADLINE, async || {
                let pods = operator_pods(sandbox, OPERATOR).await?;
                let pod = pods.first().context("the operator has no pod")?.name_any();
                let page = Page::of_pod(sandbox, &pod).await?;
                let known = page.series("etcd_operator_cluster_desired_members");
                let known = known.count();
                if pod != old && known == all {
                    return Ok(Poll::Done(()));
                }
                sleep(LIST_PAUSE).await;
                Ok(Poll::NotYet(format!("{known} of {all} in {pod}")))
            })
            .await
        }

        /// Some users correct their specs. The members of these clusters start while all other waiting clusters wait
        /// for a node.
        async fn some_are_corrected(sandbox: &Sandbox) -> Result<()> {
            let corrected = [0, WAITING / 2, WAITING - 1].map(waiting);
            for name in &corrected {
                let spec = json!({ "pod": { "nodeSelector": null } });
                patch(sandbox, name, spec).await?;
            }
            for name in &corrected {
                sandbox.await_members(name, 1).await?;
            }
            Ok(())
        }

        /// Deletes all clusters, so that their deletion does not slow down the next test.
        async fn all_are_deleted(sandbox: &Sandbox) -> Result<()> {
            let words = ["delete", "etcdclusters", "--all", "--wait=false"];
            sandbox.kubectl(&words).await?;
            let pods = sandbox.api::<Pod>();
            let of_members = ListParams::default().labels("app=etcd");
            until("all pods are deleted", HERD_DEADLINE, async || {
                let left = pods.list(&of_members).await?.items.len();
                if left == 0 {
                    return Ok(Poll::Done(()));
                }
                sleep(LIST_PAUSE).await;
                Ok(Poll::NotYet(format!("{left} pods")))
            })
            .await
        }

        #[tokio::test]
        async fn changes_take_effect_among_two_hundred_waiting_clusters() {
            cluster_scenario("thundering_herd", async |sandbox| {
                for name in RUNNING {
                    sandbox.apply(&cluster(&sandbox.env, name, 1)?).await?;
                }
                for name in RUNNING {
                    sandbox.await_members(name, 1).await?;
                }
                let writer = Writer::start(sandbox, "r-a").await?;
                step("200 clusters are created at once", herd_arrives(sandbox)).await?;
                step("all clusters are reconciled", all_are_reported(sandbox)).await?;
                let changes = changes_do_not_wait_for_checks(sandbox);
                step("waiting clusters are changed", changes).await?;
                step("the operator is restarted", operator_restarts(sandbox)).await?;
                step("some specs are corrected", some_are_corrected(sandbox)).await?;
                writer.await_more(10).await?;
                writer.finish("200 clusters waited for a node").await?;
                step("all clusters are deleted", all_are_deleted(sandbox)).await
            })
            .await;
        }
    }
}
