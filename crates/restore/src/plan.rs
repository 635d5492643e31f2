//! Plans one action and the state to report, from the EtcdRestore and the snapshot.
//!
//! Pure, synchronous and total: no client, no clock, no randomness. Every state between two steps is recognized from
//! the API alone, in this order:
//!
//! 1. the intent in the status of the restore,
//! 2. the EtcdCluster with the restore lock,
//! 3. the seed's Service, PersistentVolumeClaim and pod,
//! 4. the verified seed in the status of the restore,
//! 5. the cluster ID in the status of the cluster,
//! 6. the released lock.

use std::time::Duration;

use api::EtcdRestore;
use api::conditions::{self, ConditionType};
use api::problem;
use api::restore;
use k8s_openapi::jiff::Timestamp;
use store::progress::Moved;

use crate::naming;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{
    Child, Cluster, ClusterFacts, Life, Pod, PodFacts, Serving, Snapshot, Source,
};

mod abandoned;
pub mod action;
pub mod choice;
pub mod effective;
mod ended;
pub mod expiry;
pub mod in_place;
pub mod joining;
pub mod pod;
mod recorded_spec;
pub mod refused;
pub mod target;
#[cfg(test)]
mod tests;
mod unfit;
pub mod write;

use action::SOON;
pub use action::{Action, Outlook, Plan};
pub(crate) use write::released;
pub use write::{Check, Object, Request};

/// Interval of reconciles while no member serves clients.
const PROMPTLY: Duration = Duration::from_millis(200);
/// Shortest interval of reconciles while the seed's etcd starts, which emits no event.
const SHORTLY: Duration = Duration::from_millis(100);
/// Wait for the deletion of another pod with the seed's name. Its node may not answer.
const IN_THE_WAY: &str = "the pod that has the seed's name to be gone; if its node will never come back, delete the \
                          Node";

/// Plans the next action.
pub fn plan(restore: &EtcdRestore, snapshot: &Snapshot) -> Plan {
    if let Some(settled) = settled(restore) {
        return settled;
    }
    let gives_up = in_place::gives_up(restore);
    match &snapshot.cluster {
        // Invariant 1.
        Cluster::Unknown(why) => Plan::wait_for(format!("an answer about the EtcdCluster: {why}")),
        Cluster::Ending | Cluster::Absent if gives_up => let_go(),
        Cluster::Ending => Plan::wait_for("the old EtcdCluster of this name to be gone"),
        Cluster::Absent => without_cluster(restore, snapshot),
        Cluster::Present(cluster) => match &cluster.claim {
            Some(claim) if *claim == naming::uid(restore) => with_claim(restore, cluster, snapshot),
            _ if gives_up => let_go(),
            Some(_) => let_go_of_refused(restore, too_late(restore)),
            None if is_ours(restore, cluster) => handed_over(restore, cluster, &snapshot.serving),
            None => let_go_of_refused(restore, in_place::begin(restore, cluster, snapshot)),
        },
    }
}

/// Plans the next action at a time, which decides on expiry and on the duration of problems.
pub fn plan_at(restore: &EtcdRestore, snapshot: &Snapshot, now: Timestamp) -> Plan {
    let plan = expiry::expire(plan(restore, snapshot), restore, now);
    refused::lasting(plan, restore, snapshot, now)
}

/// Removes the finalizer of the EtcdRestore.
fn let_go() -> Plan {
    Plan::act(Action::Guard(false), "letting the EtcdRestore go")
}

/// Removes the finalizer of a halted restore first. A rejected restore has no cleanup, so it can be deleted even
/// without an operator.
fn let_go_of_refused(restore: &EtcdRestore, plan: Plan) -> Plan {
    match plan.outlook {
        Outlook::Halted(_) if in_place::is_held(restore) => let_go(),
        _ => plan,
    }
}

/// The plan that depends on the EtcdRestore alone: the restore has ended, or its spec is rejected. `None` if the plan
/// needs an observation.
pub fn settled(restore: &EtcdRestore) -> Option<Plan> {
    let status = restore.status.as_ref();
    let held = in_place::is_held(restore);
    if in_place::gives_up(restore) && held {
        return None;
    }
    if let Some(abandoned) = status.and_then(|status| status.abandoned.as_ref()) {
        let reason = Reason::parse(&abandoned.reason).unwrap_or(Reason::SeedFailed);
        return Some(Plan::halt(reason, abandoned.message.clone()));
    }
    if in_place::is_deleted(restore) {
        return Some(Plan::halt(
            Reason::Cancelled,
            "the EtcdRestore was deleted before it was done",
        ));
    }
    if status.is_some_and(|status| status.succeeded) {
        return Some(Plan::complete());
    }
    // A rejection is final for this spec. A later deletion of the existing cluster does not start the restore.
    let generation = restore.metadata.generation;
    let refused = conditions::find(restore.conditions(), &ConditionType::Failed).filter(|failed| {
        failed.status == "True"
            && Reason::parse(&failed.reason) == Some(Reason::ClusterExists)
            && failed.observed_generation == generation
    });
    if let Some(refused) = refused {
        let refused = Plan::halt(Reason::ClusterExists, refused.message.clone());
        return Some(let_go_of_refused(restore, refused));
    }
    // A restore with a finalizer or a verified seed continues from its records, regardless of the spec.
    if held || is_verified(restore) {
        return None;
    }
    let problems = restore::validate(restore);
    if !problems.is_empty() {
        return Some(Plan::halt(Reason::InvalidSpec, problem::summary(&problems)));
    }
    let dangerous = restore::unsafe_to_ignore(&restore.spec);
    if !dangerous.is_empty() {
        return Some(Plan::halt(
            Reason::NotSupported,
            problem::summary(&dangerous),
        ));
    }
    None
}

/// Whether the cluster was formed by the seed that this restore has verified.
fn is_ours(restore: &EtcdRestore, cluster: &ClusterFacts) -> bool {
    let restored = verified(restore).map(|(id, _)| id);
    restored.is_some_and(|id| cluster.is_cluster(id))
}

/// Whether it is recorded that the seed serves the backup.
pub fn is_verified(restore: &EtcdRestore) -> bool {
    verified(restore).is_some()
}

/// The recorded cluster ID and revision of the seed.
fn verified(restore: &EtcdRestore) -> Option<(&str, i64)> {
    let status = restore.status.as_ref()?;
    Some((status.cluster_id.as_deref()?, status.restored_revision?))
}

/// Invariant 9: an existing cluster is not changed without `spec.overwrite`.
fn refuse(restore: &EtcdRestore) -> Plan {
    let name = naming::target(restore);
    Plan::halt(
        Reason::ClusterExists,
        format!(
            "spec.etcdCluster.name: the EtcdCluster {name} exists; nothing was changed. Create a new EtcdRestore under \
             another name, or one with spec.overwrite: true, which replaces what that cluster holds"
        ),
    )
}

/// Invariant 9: a cluster that another restore has locked is not changed. The restore that holds the lock continues.
fn too_late(restore: &EtcdRestore) -> Plan {
    let name = naming::target(restore);
    let message = if is_verified(restore) {
        format!(
            "another EtcdRestore has begun to restore the EtcdCluster {name} before this one was complete, and goes on: \
             wait for its end"
        )
    } else {
        format!(
            "spec.etcdCluster.name: the EtcdCluster {name} is being restored by another EtcdRestore; nothing was changed. \
             Create a new EtcdRestore under another name; or, when that one has ended, one with spec.overwrite: true, \
             which replaces what that one has restored"
        )
    };
    Plan::halt(Reason::ClusterExists, message)
}

fn without_cluster(restore: &EtcdRestore, snapshot: &Snapshot) -> Plan {
    if verified(restore).is_some() {
        let name = naming::target(restore);
        let message = format!(
            "the restored EtcdCluster {name} was deleted before it was complete; create a new EtcdRestore"
        );
        return Plan::halt(Reason::ClusterMissing, message);
    }
    // Invariant 10: the names are recorded before the objects are created.
    if !seed_is_recorded(restore) || in_place::replaces(restore).is_some() {
        return record_intent(restore);
    }
    let spec = match &snapshot.source {
        Source::NotAsked => return Plan::wait_for("the backup to be looked at"),
        Source::Unavailable(trouble) => return Plan::trouble(trouble),
        Source::Ready(spec) => spec.clone(),
    };
    choice::to_record(restore, snapshot, false)
        .unwrap_or_else(|| Plan::act(Action::CreateCluster(spec), "creating the EtcdCluster"))
}

fn record_intent(restore: &EtcdRestore) -> Plan {
    let action = Action::RecordIntent {
        seed: naming::seed(restore),
        replaces: None,
    };
    Plan::act(action, "recording the seed member")
}

fn seed_is_recorded(restore: &EtcdRestore) -> bool {
    let status = restore.status.as_ref();
    status.is_some_and(|status| status.seed.is_some())
}

fn with_claim(restore: &EtcdRestore, cluster: &ClusterFacts, snapshot: &Snapshot) -> Plan {
    let in_place = in_place::replaces(restore).is_some();
    // After the cutover only the handover remains, even for a deleted restore. In a new cluster nothing is created any
    // more, because clients may have written to the seed.
    if in_place::has_turned(restore, cluster) {
        return if in_place {
            in_place::replace(restore, snapshot, cluster.durable)
        } else {
            Plan::act(Action::ReleaseClaim, "handing the cluster over")
        };
    }
    if in_place::gives_up(restore) {
        // The restore owns a cluster that it has created, so garbage collection deletes the cluster.
        return if in_place {
            in_place::withdraw(snapshot)
        } else {
            let_go()
        };
    }
    if !seed_is_recorded(restore) {
        return record_intent(restore);
    }
    // A user may have removed the record from the status.
    if let Some(plan) = choice::to_record(restore, snapshot, true) {
        return plan;
    }
    if in_place {
        return in_place::prepare(restore, cluster, snapshot);
    }
    match (&cluster.cluster_id, verified(restore)) {
        (Some(recorded), _) => Plan::halt(
            Reason::SeedFailed,
            format!(
                "the EtcdCluster's status names the cluster ID {recorded}, which is not that of the restored seed; \
                 delete the EtcdCluster and create a new EtcdRestore"
            ),
        ),
        (None, known) => guarded(restore, prepare_seed(cluster, known, snapshot)),
    }
}

/// Sets the finalizer before the handover, which must not be interrupted by a deletion. Before that, a deletion of the
/// restore deletes its cluster too.
fn guarded(restore: &EtcdRestore, plan: Plan) -> Plan {
    if matches!(plan.action, Action::RecordFormed { .. }) && !in_place::is_held(restore) {
        return Plan::act(
            Action::Guard(true),
            "guarding the handover with a finalizer",
        );
    }
    plan
}

/// Creates the missing objects of the seed. No client can have written to the seed yet.
fn prepare_seed(cluster: &ClusterFacts, known: Option<(&str, i64)>, snapshot: &Snapshot) -> Plan {
    if !cluster.problems.is_empty() {
        let message = format!("the EtcdCluster's {}", problem::summary(&cluster.problems));
        return Plan::stuck(Trouble::new(Reason::InvalidSpec, message));
    }
    if let Some(plan) = missing(&snapshot.seed.service, "Service", Action::CreateService) {
        return plan;
    }
    if cluster.durable
        && let Some(plan) = missing(&snapshot.seed.claim, "volume claim", Action::CreateClaim)
    {
        return plan;
    }
    match &snapshot.seed.pod {
        Pod::Unknown(why) => Plan::wait_for(format!("an answer about the seed's pod: {why}")),
        Pod::InTheWay => Plan::wait_for(IN_THE_WAY),
        Pod::Absent => Plan::act(Action::CreatePod, "starting the seed member"),
        Pod::Present(pod) => await_seed(pod, known, &snapshot.serving),
    }
}

fn missing(child: &Child, what: &str, create: Action) -> Option<Plan> {
    match child {
        Child::Present => None,
        Child::Absent => Some(Plan::act(create, &format!("creating the seed's {what}"))),
        Child::InTheWay => Some(Plan::wait_for(format!(
            "an older {what} of the seed's name to be gone"
        ))),
        Child::Unknown(why) => Some(Plan::wait_for(format!(
            "an answer about the seed's {what}: {why}"
        ))),
    }
}

fn await_seed(pod: &PodFacts, known: Option<(&str, i64)>, serving: &Serving) -> Plan {
    if pod.life != Life::Lives {
        return ended::clear(pod);
    }
    if let Some(plan) = unfit::before_the_turn(pod) {
        return plan;
    }
    if let Some(trouble) = &pod.trouble {
        return Plan::trouble(trouble);
    }
    // Invariant 9: an answer at the seed's address counts only after the backup was verified.
    let Some(restored) = pod.restored else {
        return Plan::wait_for("the backup to be fetched and verified in the seed's pod");
    };
    match serving {
        Serving::NotAsked => Plan::wait_for("the seed member to serve"),
        Serving::Unknown(why) => Plan {
            requeue: Some(between_looks(pod.moved)),
            ..Plan::wait_for(format!("the seed member to serve: {why}"))
        },
        Serving::Differs { expected, found } => Plan::stuck(Trouble::new(
            Reason::SeedFailed,
            format!(
                "the seed member serves keys with the hash {found:08x}, and the backup's manifest says {expected:08x}; \
                 restore another backup"
            ),
        )),
        Serving::Serves { revision, .. } if *revision < restored => Plan::stuck(Trouble::new(
            Reason::SeedFailed,
            format!(
                "the seed member serves revision {revision}, but the backup holds {restored}; delete the EtcdCluster \
                 and create a new EtcdRestore"
            ),
        )),
        Serving::Serves { cluster_id, .. } if is_known(known, cluster_id, restored) => {
            let cluster_id = cluster_id.clone();
            Plan::act(
                Action::RecordFormed { cluster_id },
                "recording the cluster ID",
            )
        }
        Serving::Serves { cluster_id, .. } => {
            let action = Action::RecordRestored {
                cluster_id: cluster_id.clone(),
                revision: restored,
                sha256: pod.sha256.clone(),
            };
            Plan::act(action, "the seed member serves")
        }
    }
}

fn is_known(known: Option<(&str, i64)>, cluster: &str, revision: i64) -> bool {
    known.is_some_and(|(id, at)| id == cluster && at == revision)
}

/// The interval of reconciles until the seed's etcd serves. The data directory is created before etcd starts, which
/// takes one or two seconds for each GiB.
fn between_looks(fetched: Option<Moved>) -> Duration {
    let gibibytes = fetched.map_or(0, |moved| moved.bytes >> 30);
    let factor = u32::try_from(gibibytes).unwrap_or(u32::MAX).max(1);
    SHORTLY.saturating_mul(factor).min(SOON)
}

fn handed_over(restore: &EtcdRestore, cluster: &ClusterFacts, serving: &Serving) -> Plan {
    let restored = verified(restore).map_or(0, |(_, revision)| revision);
    if in_place::is_held(restore) {
        return let_go();
    }
    if !cluster.available {
        return Plan::wait_for("the cluster operator to report the cluster as Available");
    }
    match serving {
        // The hash is compared only before the cutover.
        Serving::NotAsked | Serving::Differs { .. } => Plan::wait_for("the cluster to serve"),
        Serving::Unknown(why) => Plan::wait_for(format!("the cluster to serve: {why}")),
        Serving::Serves { cluster_id, .. } if !cluster.is_cluster(cluster_id) => Plan::wait_for(
            format!("the cluster to serve: another cluster ({cluster_id}) answers at its address"),
        ),
        Serving::Serves { revision, .. } if *revision < restored => Plan::wait_for(format!(
            "a member that has reached revision {restored}: one at {revision} answered"
        )),
        Serving::Serves { .. } => Plan::complete(),
    }
}
