//! Injects the faults of a drill.

use anyhow::{Context, Result};
use e2e::drill::{Fault, SlowVolume};
use e2e::metrics::operator_pods;
use e2e::objects::{Kind, condition, follower, leader, node_of, ready_members};
use e2e::soak::dice::Dice;
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, Testbed, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};

use crate::fleet::{self, BILLING, Fleet, ORDERS, SCHEDULE, SESSIONS};

/// The number of large values to write before the next check of the status.
const WRITES: usize = 8;
const LARGE_VALUE: usize = 64 << 10;
/// The limit of writes per second for a slow disk. A sync of etcd's write-ahead log then takes about 0.2 s.
pub(crate) const SLOW_WRITES: u32 = 10;

/// The operators' Deployments, the most important first. The fault `DeadNode` avoids the nodes of the first Deployments
/// in this list, if possible.
const OPERATORS: [&str; 3] = [
    "etcd-operator",
    "etcd-backup-operator",
    "etcd-restore-operator",
];

/// Chooses the objects or the node that the fault affects. Two names are separated by a space.
pub(crate) async fn victim(fault: Fault, fleet: &Fleet, dice: &mut Dice) -> Result<String> {
    let sandbox = &fleet.sandbox;
    Ok(match fault {
        Fault::DeadNode => victim_node(sandbox, dice).await?,
        Fault::LostQuorum => majority(sandbox).await?,
        // The victim is the PVC of the leader. A PVC has the name of its member.
        Fault::SlowDisk => leader(&sandbox.await_members(SESSIONS, 3).await?)?,
        Fault::FullDisk => SESSIONS.to_owned(),
        Fault::FailingBackup => SCHEDULE.to_owned(),
        Fault::ExpiredCertificate | Fault::BadImage | Fault::WrongSecret => BILLING.to_owned(),
    })
}

/// Injects a fault. For [`Fault::FullDisk`], waits until the database has reached its quota. Alerts fire later. If a
/// call was interrupted, a second call with the same victim completes the fault. Returns the slow volume for
/// [`Fault::SlowDisk`], and `None` for all other faults.
pub(crate) async fn make(fault: Fault, victim: &str, fleet: &Fleet) -> Result<Option<SlowVolume>> {
    let sandbox = &fleet.sandbox;
    match fault {
        Fault::DeadNode => Testbed::of(sandbox)?.kill_node(victim).await?,
        Fault::FullDisk => fill(fleet).await?,
        Fault::LostQuorum => delete_members(sandbox, victim).await?,
        Fault::ExpiredCertificate => {
            sandbox.apply(&fleet.expired_secret()?).await?;
        }
        Fault::FailingBackup => {
            let path = r#"{"spec":{"s3":{"path":"drill-archive/sessions"}}}"#;
            patch(sandbox, "etcdbackup", victim, path).await?;
        }
        Fault::SlowDisk => {
            let slow = slow_down(sandbox, victim).await;
            return slow.map(Some).with_context(|| {
                format!(
                    "cannot slow down the disk of {victim}: if this member was replaced, start a new drill"
                )
            });
        }
        Fault::BadImage => {
            let image = r#"{"spec":{"repository":"quay.io/coreos/etdc"}}"#;
            patch(sandbox, "etcdcluster", victim, image).await?;
        }
        Fault::WrongSecret => {
            let secret = fleet::password_secret("battery-horse-correct");
            sandbox.apply(&secret).await?;
        }
    }
    Ok(None)
}

async fn patch(sandbox: &Sandbox, kind: &str, name: &str, patch: &str) -> Result<()> {
    let words = ["patch", kind, name, "--type=merge", "-p", patch];
    sandbox.kubectl(&words).await.map(drop)
}

/// Chooses a node, if possible without operators, because Kubernetes replaces the pods of a failed node only after
/// five minutes. If every node runs an operator, avoids the nodes of the first operators in [`OPERATORS`].
async fn victim_node(sandbox: &Sandbox, dice: &mut Dice) -> Result<String> {
    let mut nodes = sandbox.env.nodes.clone();
    for operator in OPERATORS {
        let mut left = nodes.clone();
        for pod in operator_pods(sandbox, operator).await? {
            left.retain(|node| node != node_of(&pod));
        }
        if !left.is_empty() {
            nodes = left;
        }
    }
    let index = usize::try_from(dice.below(nodes.len() as u64))?;
    nodes
        .get(index)
        .cloned()
        .context("the testbed has no nodes")
}

/// Writes keys until the operator reports that the database has reached its quota.
async fn fill(fleet: &Fleet) -> Result<()> {
    let sandbox = &fleet.sandbox;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, SESSIONS).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let mut number = 0;
    until("the database is full", DEADLINE * 2, async || {
        for _ in 0..WRITES {
            number += 1;
            let key = format!("archive/{number}");
            // A write fails when the database has reached its quota, or during a defragmentation.
            if keys.write(&key, vec![7; LARGE_VALUE]).await.is_err() {
                break;
            }
        }
        let object = clusters.get(SESSIONS).await?;
        let full = condition(&object, "Degraded").is_some_and(|found| {
            let message = found["message"].as_str().unwrap_or_default();
            found["reason"] == "NoSpace" && message.contains("quotaBackendBytes")
        });
        Ok(if full {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{number} writes"))
        })
    })
    .await
}

/// The names of two members: the leader and one follower.
async fn majority(sandbox: &Sandbox) -> Result<String> {
    let object = sandbox.await_members(ORDERS, 3).await?;
    let survivor = follower(&object)?;
    let mut victims = ready_members(&object);
    victims.retain(|name| *name != survivor);
    Ok(victims.join(" "))
}

/// Deletes the PVCs and the pods of these members at the same time.
async fn delete_members(sandbox: &Sandbox, members: &str) -> Result<()> {
    let mut words = vec!["delete", "--wait=false", "--grace-period=0", "--force"];
    words.push("--ignore-not-found");
    let objects: Vec<String> = ["pvc", "pod"]
        .iter()
        .flat_map(|kind| members.split(' ').map(move |name| format!("{kind}/{name}")))
        .collect();
    words.extend(objects.iter().map(String::as_str));
    sandbox.kubectl(&words).await.map(drop)
}

/// Limits the writes to a member's volume. After a restart of the member, the background process of the drill sets the
/// limit again.
async fn slow_down(sandbox: &Sandbox, claim: &str) -> Result<SlowVolume> {
    let found = sandbox.api::<PersistentVolumeClaim>().get(claim).await?;
    let uid = found.metadata.uid.context("the PVC has no UID")?;
    let pod = sandbox.api::<Pod>().get(claim).await?;
    let directory = sandbox.volume_directory(claim).await?;
    let testbed = Testbed::of(sandbox)?;
    let limited = testbed.limit_writes(&pod, &directory, SLOW_WRITES).await;
    limited.context(
        "this machine cannot make a disk slow (docs/contributing/testing.md#the-faults-of-the-drill): start the drill \
         again with another --seed, and stop before this fault",
    )?;
    let claim = claim.to_owned();
    Ok(SlowVolume { claim, uid })
}
