//! Makes the faults of a drill.

use anyhow::{Context, Result};
use e2e::drill::{Fault, SlowVolume};
use e2e::metrics::operator_pods;
use e2e::objects::{Kind, condition, follower, leader, node_of, ready_members};
use e2e::soak::dice::Dice;
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, Testbed, until};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use crate::fleet::{self, BILLING, Fleet, ORDERS, SCHEDULE, SESSIONS};

/// The number of large values that are written between two checks of the status.
const WRITES: usize = 8;
const LARGE_VALUE: usize = 64 << 10;

/// The operators whose pods should survive the loss of a node, the most important one first.
const OPERATORS: [&str; 3] = [
    "etcd-operator",
    "etcd-backup-operator",
    "etcd-restore-operator",
];

/// A fault that was made.
pub(crate) struct Effect {
    /// The affected object.
    pub(crate) victim: String,
    /// The volume to keep slow.
    pub(crate) slow: Option<SlowVolume>,
}

impl From<String> for Effect {
    fn from(victim: String) -> Self {
        Self { victim, slow: None }
    }
}

/// Makes a fault. Returns when its cause exists; alerts follow later.
pub(crate) async fn make(fault: Fault, fleet: &Fleet, dice: &mut Dice) -> Result<Effect> {
    let sandbox = &fleet.sandbox;
    Ok(match fault {
        Fault::DeadNode => {
            let node = victim_node(sandbox, dice).await?;
            Testbed::of(sandbox)?.kill_node(&node).await?;
            node.into()
        }
        Fault::FullDisk => fill(fleet).await?.into(),
        Fault::LostQuorum => lose_majority(sandbox).await?.into(),
        Fault::ExpiredCertificate => {
            sandbox.apply(&fleet.expired_secret()?).await?;
            BILLING.to_owned().into()
        }
        Fault::FailingBackup => {
            let path = r#"{"spec":{"s3":{"path":"drill-archive/sessions"}}}"#;
            patch(sandbox, "etcdbackup", SCHEDULE, path).await?.into()
        }
        Fault::SlowDisk => slow_leader(fleet).await?,
        Fault::BadImage => {
            let image = r#"{"spec":{"repository":"quay.io/coreos/etdc"}}"#;
            patch(sandbox, "etcdcluster", BILLING, image).await?.into()
        }
        Fault::WrongSecret => {
            let secret = fleet::password_secret("battery-horse-correct");
            sandbox.apply(&secret).await?;
            BILLING.to_owned().into()
        }
    })
}

async fn patch(sandbox: &Sandbox, kind: &str, name: &str, patch: &str) -> Result<String> {
    let words = ["patch", kind, name, "--type=merge", "-p", patch];
    sandbox.kubectl(&words).await?;
    Ok(name.to_owned())
}

/// Chooses a node. Avoids the nodes of the operators, because a failed node would stop them for five minutes. If all
/// nodes have operators, only the most important operator is kept.
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

/// Writes new keys until the operator reports that the database is full. Returns the name of the cluster.
async fn fill(fleet: &Fleet) -> Result<String> {
    let sandbox = &fleet.sandbox;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, SESSIONS).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let mut number = 0;
    until("the database is full", DEADLINE * 2, async || {
        for _ in 0..WRITES {
            number += 1;
            let key = format!("archive/{number}");
            // etcd rejects writes at the quota, and during a defragmentation.
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
    .await?;
    Ok(SESSIONS.to_owned())
}

/// Deletes the volumes and the pods of two members at the same time. Returns the names of these members.
async fn lose_majority(sandbox: &Sandbox) -> Result<String> {
    let object = sandbox.await_members(ORDERS, 3).await?;
    let survivor = follower(&object)?;
    let mut victims = ready_members(&object);
    victims.retain(|name| *name != survivor);
    let mut words = vec!["delete", "--wait=false", "--grace-period=0", "--force"];
    let objects: Vec<String> = ["pvc", "pod"]
        .iter()
        .flat_map(|kind| victims.iter().map(move |name| format!("{kind}/{name}")))
        .collect();
    words.extend(objects.iter().map(String::as_str));
    sandbox.kubectl(&words).await?;
    Ok(victims.join(" "))
}

/// Selects the volume of the leader. The process that serves the drill makes the volume slow, and keeps it slow when the
/// member restarts.
async fn slow_leader(fleet: &Fleet) -> Result<Effect> {
    let sandbox = &fleet.sandbox;
    let object = sandbox.await_members(SESSIONS, 3).await?;
    let claim = leader(&object)?;
    let found = sandbox.api::<PersistentVolumeClaim>().get(&claim).await?;
    let uid = found.metadata.uid.context("the PVC has no UID")?;
    Ok(Effect {
        victim: claim.clone(),
        slow: Some(SlowVolume { claim, uid }),
    })
}
