//! Injects the planned faults.

use std::time::Duration;

use anyhow::{Context, Result};
use e2e::metrics::operator_pods;
use e2e::objects::{Kind, await_object, members, node_of};
use e2e::soak::Fault;
use e2e::{DEADLINE, Sandbox, Testbed};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::ResourceExt;
use tokio::time::sleep;

use crate::CLUSTER;
use crate::story::Story;

/// The Deployments of the operators. `Fault::KillOperator` contains an index into this list.
const OPERATORS: [&str; 3] = [
    "etcd-operator",
    "etcd-backup-operator",
    "etcd-restore-operator",
];

/// Injects a fault. A stopped node or API server is started again before this function returns. Returns the UIDs of the
/// objects that the fault deletes.
pub(crate) async fn inject(
    fault: Fault,
    sandbox: &Sandbox,
    testbed: &Testbed<'_>,
    story: &Story,
) -> Result<Vec<String>> {
    let mut deleted = Vec::new();
    match fault {
        Fault::DeletePods {
            count,
            pick,
            graceful,
        } => {
            let victims = victims(sandbox, count, pick).await?;
            let names: Vec<String> = victims.iter().map(ResourceExt::name_any).collect();
            story.tell(&format!("  fault: {fault}: {}", names.join(" ")));
            let how = if graceful { "--wait=false" } else { "--now" };
            let mut words = vec!["delete", "pod", "--ignore-not-found", "--wait=false", how];
            words.extend(names.iter().map(String::as_str));
            deleted.extend(victims.iter().filter_map(ResourceExt::uid));
            sandbox.kubectl(&words).await?;
        }
        Fault::KillContainers { count, pick } => {
            let victims = victims(sandbox, count, pick).await?;
            kill(testbed, &victims, &fault, story).await;
        }
        Fault::LoseVolume { pick } => {
            let victims = victims(sandbox, 1, pick).await?;
            let victim = victims.first().context("no pod")?;
            let name = victim.name_any();
            let volume = sandbox
                .api::<PersistentVolumeClaim>()
                .get_opt(&name)
                .await?;
            deleted.extend(
                victim
                    .uid()
                    .into_iter()
                    .chain(volume.and_then(|it| it.uid())),
            );
            story.tell(&format!("  fault: {fault}: {name}"));
            // kubectl does not wait for the deletion of the PVC, because Kubernetes keeps the PVC until its pod has
            // stopped, and the pod is deleted next.
            for (kind, how) in [("pvc", "--wait=false"), ("pod", "--now")] {
                let words = [
                    "delete",
                    kind,
                    &name,
                    "--ignore-not-found",
                    "--wait=false",
                    how,
                ];
                sandbox.kubectl(&words).await?;
            }
        }
        Fault::StopNode { pick, seconds } => {
            let nodes = testbed.nodes();
            let node = nodes.get(pick % nodes.len().max(1)).context("no node")?;
            story.tell(&format!("  fault: {fault}: {node}"));
            testbed.kill_node(node).await?;
            sleep(Duration::from_secs(seconds)).await;
            testbed.start_node(node).await?;
            story.tell(&format!("  {node} is started again"));
        }
        Fault::LoseNode { pick } => {
            let Some(victim) = only_member_of_a_node(sandbox, testbed, pick).await? else {
                story.tell(
                    "  no fault: no node runs exactly one member without the cluster operator",
                );
                return Ok(deleted);
            };
            let (node, member) = (node_of(&victim), victim.name_any());
            story.tell(&format!("  fault: {fault}: {node} with {member}"));
            deleted.extend(victim.uid());
            testbed.kill_node(node).await?;
            await_replaced(sandbox, &member).await?;
            testbed.start_node(node).await?;
            story.tell(&format!(
                "  {member} is replaced, and {node} is started again"
            ));
        }
        Fault::KillOperator { which } => {
            let operator = OPERATORS.get(which).copied().unwrap_or(OPERATORS[0]);
            let pods = operator_pods(sandbox, operator).await?;
            kill(testbed, &pods, &fault, story).await;
        }
        Fault::StopApiServer { seconds } => {
            story.tell(&format!("  fault: {fault}"));
            testbed.stop_daemon("kube-apiserver").await?;
            sleep(Duration::from_secs(seconds)).await;
            testbed.start_daemon("kube-apiserver").await?;
            story.tell("  the API server is started again");
        }
    }
    Ok(deleted)
}

/// A member that is alone on its node, so that the other members keep a quorum if the node fails. The node does not
/// run the cluster operator, because Kubernetes takes minutes to replace a pod of a failed node.
async fn only_member_of_a_node(
    sandbox: &Sandbox,
    testbed: &Testbed<'_>,
    pick: usize,
) -> Result<Option<Pod>> {
    let operators = operator_pods(sandbox, OPERATORS[0]).await?;
    let pods = sandbox.member_pods(CLUSTER).await?;
    let mut nodes = testbed.nodes();
    nodes.retain(|node| operators.iter().all(|pod| node_of(pod) != node));
    let first = pick % nodes.len().max(1);
    nodes.rotate_left(first);
    let alone = nodes.iter().find_map(|node| {
        let mut here = pods.iter().filter(|pod| node_of(pod) == node);
        here.next().filter(|_| here.next().is_none())
    });
    Ok(alone.cloned())
}

/// Waits until the status does not list the member any more.
async fn await_replaced(sandbox: &Sandbox, member: &str) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = format!("member {member} of the lost node is replaced");
    let replaced = await_object(&clusters, CLUSTER, &what, DEADLINE, |object| {
        members(object).iter().all(|(name, _)| name != member)
    });
    replaced.await.map(drop)
}

/// The pods of `count` members, for a fault: the pod that `pick` selects, and the pods that follow it in the order of
/// names.
async fn victims(sandbox: &Sandbox, count: usize, pick: usize) -> Result<Vec<Pod>> {
    let mut pods = sandbox.member_pods(CLUSTER).await?;
    pods.sort_by_key(ResourceExt::name_any);
    let first = pick % pods.len().max(1);
    pods.rotate_left(first);
    pods.truncate(count);
    Ok(pods)
}

/// Kills the running containers of the pods. During a change, a pod may have no running container.
async fn kill(testbed: &Testbed<'_>, pods: &[Pod], fault: &Fault, story: &Story) {
    let running: Vec<Pod> = pods.iter().filter(|pod| runs(pod)).cloned().collect();
    let names: Vec<String> = running.iter().map(ResourceExt::name_any).collect();
    story.tell(&format!("  fault: {fault}: {}", names.join(" ")));
    if let Err(error) = testbed.kill_containers(&running).await {
        // The error is only logged, because the container may have stopped before the signal was sent.
        story.tell(&format!("  a container was not killed: {error:#}"));
    }
}

fn runs(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let containers = status.and_then(|status| status.container_statuses.as_ref());
    let mut containers = containers.into_iter().flatten().peekable();
    containers.peek().is_some()
        && containers.all(|container| {
            let state = container.state.as_ref();
            state.is_some_and(|state| state.running.is_some())
        })
}
