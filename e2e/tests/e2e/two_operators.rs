//! Several cluster operators: two operators with different Leases act at the same time, a standby takes over, and a
//! newer release replaces an older release.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use e2e::metrics::operator_pods;
use e2e::objects::{field, follower};
use e2e::wait::Poll;
use e2e::watch::watch_until;
use e2e::{DEADLINE, Sandbox, Testbed, Writer, chart, cluster_scenario, step, until};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use kube::ResourceExt;
use kube::api::{ListParams, PostParams, WatchEvent, WatchParams};

use crate::fixtures::{DURABLE, cluster_with};
use crate::operator_upgrade::restarts_no_member;

const OPERATOR: &str = "etcd-operator";

pub(crate) fn holder(lease: &Lease) -> Option<String> {
    let holder = lease.spec.as_ref()?.holder_identity.clone();
    holder.filter(|name| !name.is_empty())
}

async fn leader(sandbox: &Sandbox) -> Result<Option<String>> {
    Ok(holder(&sandbox.api::<Lease>().get(OPERATOR).await?))
}

/// Waits until a pod other than `than` holds the Lease, and returns its name. Prints the time of the takeover, but does
/// not check this time, because it depends on the machine.
async fn await_another(sandbox: &Sandbox, than: &str, after: &str) -> Result<String> {
    let begun = Instant::now();
    let name = until("another pod is the leader", DEADLINE, async || {
        Ok(match leader(sandbox).await? {
            Some(name) if name != than => Poll::Done(name),
            other => Poll::NotYet(format!("{other:?}")),
        })
    })
    .await?;
    eprintln!("    takeover {:?} after {after}", begun.elapsed());
    Ok(name)
}

/// The time at which a Lease expires.
pub(crate) fn end(lease: &Lease) -> Result<Timestamp> {
    let spec = lease.spec.as_ref().context("an empty lease")?;
    let renewed = spec.renew_time.as_ref().context("never renewed")?.0;
    let seconds = spec.lease_duration_seconds.context("no duration")?;
    Ok(renewed + SignedDuration::from_secs(seconds.into()))
}

/// Watches the Lease until the pod `than` no longer holds it. Ensures that the Lease did not expire before. Returns the
/// next holder.
async fn next_holder(sandbox: &Sandbox, since: &Lease, than: &str) -> Result<Option<String>> {
    let only = WatchParams::default().fields(&format!("metadata.name={OPERATOR}"));
    let version = since.resource_version().unwrap_or_default();
    let leases = sandbox.api::<Lease>();
    let mut ends = end(since)?;
    let next = watch_until(&leases, &only, &version, DEADLINE, |change| {
        let WatchEvent::Modified(lease) = change else {
            return None;
        };
        if holder(&lease).as_deref() != Some(than) {
            // The time of the change in the API server is compared with the time `ends`, at which the Lease expires.
            // The test does not use its own time, because the watch may deliver the change much later.
            let written = lease
                .managed_fields()
                .iter()
                .filter_map(|one| one.time.as_ref());
            let written = written.map(|time| time.0).max();
            return Some((holder(&lease), written.is_some_and(|time| time < ends)));
        }
        ends = end(&lease).unwrap_or(ends);
        None
    });
    let (next, in_time) = next.await.context("the lease did not change")?;
    // If the Lease was cleared before it expired, its holder released it. If the Lease was cleared later, a standby
    // cleared it.
    ensure!(
        in_time,
        "the lease expired, because its holder did not release it"
    );
    Ok(next)
}

pub(crate) async fn await_ready_operators(sandbox: &Sandbox, count: usize) -> Result<Vec<Pod>> {
    until("every replica is ready", DEADLINE, async || {
        let pods = operator_pods(sandbox, OPERATOR).await?;
        let ready = |pod: &&Pod| {
            let conditions = pod.status.iter().flat_map(|status| &status.conditions);
            let mut conditions = conditions.flatten();
            conditions.any(|one| one.type_ == "Ready" && one.status == "True")
        };
        let ready = pods.iter().filter(ready).count();
        Ok(if ready == count && pods.len() == count {
            Poll::Done(pods)
        } else {
            Poll::NotYet(format!("{ready} of {} ready", pods.len()))
        })
    })
    .await
}

/// Waits until each member has one pod, one PVC and one Service, and the cluster has two more Services. No other pods,
/// PVCs or Services of the cluster may exist.
async fn await_no_leftovers(sandbox: &Sandbox, members: usize) -> Result<()> {
    until("no leftovers exist", DEADLINE, async || {
        let selector = ListParams::default().labels("etcd_cluster=c");
        let pods = sandbox.api::<Pod>().list(&selector).await?.items.len();
        let claims = sandbox.api::<PersistentVolumeClaim>();
        let claims = claims.list(&selector).await?.items.len();
        let services = sandbox.api::<Service>().list(&selector).await?.items.len();
        Ok(
            if (pods, claims, services) == (members, members, members + 2) {
                Poll::Done(())
            } else {
                Poll::NotYet(format!(
                    "{pods} pods, {claims} volumes, {services} Services"
                ))
            },
        )
    })
    .await
}

pub(crate) async fn crash(sandbox: &Sandbox, pod: &str) -> Result<()> {
    let pods = operator_pods(sandbox, OPERATOR).await?;
    let victim = pods.into_iter().find(|one| one.name_any() == pod);
    let victim = victim.with_context(|| format!("{pod} does not exist"))?;
    // The pod is deleted too. A restarted container would have the same pod name, and the pod name is the holder of the
    // Lease.
    let words = [
        "delete",
        "pod",
        pod,
        "--grace-period=0",
        "--force",
        "--wait=false",
    ];
    let testbed = Testbed::of(sandbox)?;
    let (killed, deleted) = tokio::join!(
        testbed.kill_containers(std::slice::from_ref(&victim)),
        sandbox.kubectl(&words)
    );
    killed?;
    deleted.map(drop)
}

#[tokio::test]
async fn concurrent_operators_and_failover_lose_no_writes() {
    cluster_scenario("two_operators", async |sandbox| {
        let writer = step("two operators act at the same time", both_act(sandbox)).await?;
        step(
            "two operators take over from each other",
            standby_takes_over(sandbox),
        )
        .await?;
        writer.await_more(10).await?;
        writer.finish("operator takeovers").await?;
        step("replace the operator", restarts_no_member(sandbox)).await
    })
    .await;
}

/// Crashes the leader in the middle of a change, and later stops the next leader gracefully. The standby must take over
/// each time.
async fn standby_takes_over(sandbox: &Sandbox) -> Result<()> {
    let two = [
        "--set",
        "crds.install=false",
        "--set",
        "backupOperator.enabled=false",
        "--set",
        "restoreOperator.enabled=false",
        "--set",
        "clusterOperator.replicas=2",
    ];
    chart::install(
        &sandbox.env,
        e2e::sandbox::RELEASE,
        &sandbox.namespace,
        &two,
    )
    .await?;
    await_ready_operators(sandbox, 2).await?;
    let before = sandbox.await_members("c", 3).await?;

    // The leader is killed while the cluster grows. The standby must continue after the Lease of the leader has
    // expired.
    sandbox.scale("c", 5).await?;
    until("a member is being added", DEADLINE, async || {
        Ok(match sandbox.member_pods("c").await?.len() {
            3 => Poll::NotYet("three pods".to_owned()),
            _ => Poll::Done(()),
        })
    })
    .await?;
    let first = leader(sandbox).await?.context("no leader")?;
    crash(sandbox, &first).await?;
    let second = await_another(sandbox, &first, "a crash").await?;
    let grown = sandbox.await_members("c", 5).await?;
    ensure!(field(&grown, "/status/clusterID") == field(&before, "/status/clusterID"));

    // The leader is deleted with a grace period, so it must release its Lease.
    await_ready_operators(sandbox, 2).await?;
    let lease = sandbox.api::<Lease>().get(OPERATOR).await?;
    ensure!(holder(&lease).as_ref() == Some(&second), "{lease:?}");
    sandbox
        .kubectl(&["delete", "pod", &second, "--wait=false"])
        .await?;
    let next = next_holder(sandbox, &lease, &second).await?;
    ensure!(
        next.is_none(),
        "the standby acquired the lease before the leader released it: {next:?}"
    );
    await_another(sandbox, &second, "a graceful shutdown").await?;
    sandbox.scale("c", 3).await?;
    sandbox.await_members("c", 3).await?;
    await_no_leftovers(sandbox, 3).await
}

/// Adds a second operator with its own Lease, so that two operators act at the same time. Without this second Lease,
/// two operators act at the same time only if a process is suspended for longer than its Lease is valid.
async fn add_another(sandbox: &Sandbox) -> Result<()> {
    let rights = "apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: another-lease}
rules:
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, create, patch]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: another-lease}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: another-lease}
subjects:
- {kind: ServiceAccount, name: etcd-operator}
";
    sandbox.apply(rights).await?;
    let deployments = sandbox.api::<Deployment>();
    let first = deployments.get(OPERATOR).await?;
    let mut another = Deployment {
        spec: first.spec,
        ..Deployment::default()
    };
    another.metadata.name = Some("another".to_owned());
    let spec = another.spec.as_mut().context("no spec")?;
    let labels = std::collections::BTreeMap::from([("is".to_owned(), "another".to_owned())]);
    spec.selector.match_labels = Some(labels.clone());
    let template = spec.template.metadata.get_or_insert_default();
    template.labels = Some(labels);
    let pod = spec.template.spec.as_mut().context("no pod")?;
    let arguments = pod.containers[0].args.get_or_insert_default();
    arguments.push("--lease-name=another".to_owned());
    deployments.create(&PostParams::default(), &another).await?;
    until("a second operator is a leader", DEADLINE, async || {
        let lease = sandbox.api::<Lease>().get_opt("another").await?;
        let holder = lease.and_then(|lease| lease.spec?.holder_identity);
        Ok(match holder {
            Some(_) => Poll::Done(()),
            None => Poll::NotYet("no holder".to_owned()),
        })
    })
    .await
}

/// Invariant 11: two operators with separate Leases form a cluster, replace members, and change the size of the
/// cluster. Returns a client that writes.
async fn both_act(sandbox: &Sandbox) -> Result<Writer> {
    add_another(sandbox).await?;
    sandbox
        .apply(&cluster_with(&sandbox.env, "c", 3, DURABLE)?)
        .await?;
    let before = sandbox.await_members("c", 3).await?;
    let writer = Writer::start(sandbox, "c").await?;
    for (from, size) in [(3, 5), (5, 3)] {
        let victim = follower(&sandbox.await_members("c", from).await?)?;
        sandbox.lose_pod("c", &victim).await?;
        sandbox.scale("c", size).await?;
        let after = sandbox.await_members("c", size).await?;
        ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
    }
    await_no_leftovers(sandbox, 3).await?;
    sandbox
        .kubectl(&["delete", "deployment", "another"])
        .await?;
    until("the second operator has stopped", DEADLINE, async || {
        let selector = ListParams::default().labels("is=another");
        let pods = sandbox.api::<Pod>().list(&selector).await?.items.len();
        Ok(if pods == 0 {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{pods} pods"))
        })
    })
    .await?;
    Ok(writer)
}
