//! Plans the next action of an EtcdRestore, and the state for its status.
//!
//! A plan is a pure function: it uses no client, no clock and no randomness. API objects record the progress of a
//! restore in this order:
//!
//! 1. the seed's name and the replaced cluster, in the status of the EtcdRestore,
//! 2. the EtcdCluster with the restore lock,
//! 3. the seed's Service, PersistentVolumeClaim and pod,
//! 4. the cluster ID and the revision of the verified seed, in the status of the EtcdRestore,
//! 5. the same cluster ID in the status of the EtcdCluster,
//! 6. the EtcdCluster without the restore lock.

use std::time::Duration;

use api::EtcdRestore;
use api::conditions::{self, ConditionType};
use api::problem;
use api::restore;
use k8s_openapi::jiff::Timestamp;

use crate::naming;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{
    Child, Cluster, ClusterFacts, Life, Pod, PodFacts, Serving, Snapshot, Source,
};

mod abandoned;
pub mod action;
mod backed_up;
pub mod choice;
pub mod dry_run;
pub mod effective;
mod ended;
pub mod expiry;
pub mod in_place;
pub mod joining;
pub mod missing_storage;
pub mod pod;
mod recorded_spec;
pub(crate) mod search;
pub mod target;
#[cfg(test)]
mod tests;
mod unfit;
pub mod write;

use action::POLL;
pub use action::{Action, Plan, PlanState};
pub(crate) use write::released;
pub use write::{Check, Object, Request};

/// Delay between reconciles while no member serves clients.
const OUTAGE_POLL: Duration = Duration::from_millis(200);
/// Minimum delay between reconciles while the seed's etcd starts. The watch event of the ready pod may arrive later
/// than etcd's first answer.
const SEED_START_POLL: Duration = Duration::from_millis(100);
/// Message while another pod has the seed's name. A pod on a lost node stays until its Node is deleted.
const NAME_TAKEN: &str = "waiting for the deletion of another pod with the seed's name; if the node of that pod is lost permanently, delete the Node";

/// Plans the next action.
pub fn plan(restore: &EtcdRestore, snapshot: &Snapshot) -> Plan {
    if let Some(plan) = final_plan(restore) {
        return plan;
    }
    if dry_run::is_dry_run(restore) && !dry_run::has_lock(restore, &snapshot.cluster) {
        return dry_run::report(restore, snapshot);
    }
    let is_aborted = in_place::is_aborted(restore);
    match &snapshot.cluster {
        // Invariant 1: while the EtcdCluster cannot be read, the restore waits.
        Cluster::Unknown(why) => {
            Plan::wait_for(format!("waiting until the EtcdCluster can be read: {why}"))
        }
        Cluster::Terminating | Cluster::Absent if is_aborted => remove_finalizer(),
        Cluster::Terminating => Plan::wait_for(format!(
            "waiting for the deletion of the existing EtcdCluster {}",
            naming::target(restore)
        )),
        Cluster::Absent => without_cluster(restore, snapshot),
        Cluster::Present(cluster) => match &cluster.lock {
            Some(lock) if *lock == naming::uid(restore) => with_lock(restore, cluster, snapshot),
            _ if is_aborted => remove_finalizer(),
            Some(_) => without_finalizer(restore, refuse_locked(restore)),
            None if is_restored(restore, cluster) => {
                handed_over(restore, cluster, &snapshot.serving)
            }
            None => without_finalizer(restore, in_place::begin(restore, cluster, snapshot)),
        },
    }
}

/// Plans the next action. The time `now` determines the expiry of the EtcdRestore, the duration of problems and the
/// age of backups.
pub fn plan_at(restore: &EtcdRestore, snapshot: &Snapshot, now: Timestamp) -> Plan {
    let plan = backed_up::hold(plan(restore, snapshot), restore, snapshot, now);
    let plan = expiry::expire(plan, restore, now);
    missing_storage::delay_abandonment(plan, restore, snapshot, now)
}

fn remove_finalizer() -> Plan {
    Plan::act(
        Action::SetFinalizer(false),
        "removing the finalizer of the EtcdRestore",
    )
}

/// Removes the finalizer of a rejected restore before the status reports the rejection. The restore has changed
/// nothing, so its deletion needs no operator.
fn without_finalizer(restore: &EtcdRestore, plan: Plan) -> Plan {
    match plan.state {
        PlanState::Halted(_) if in_place::has_finalizer(restore) => remove_finalizer(),
        _ => plan,
    }
}

/// The plan of a restore that has ended or is rejected. `None` if the restore continues, because the plan then needs
/// an observation.
pub fn final_plan(restore: &EtcdRestore) -> Option<Plan> {
    let status = restore.status.as_ref();
    let has_finalizer = in_place::has_finalizer(restore);
    if in_place::is_aborted(restore) && has_finalizer {
        return None;
    }
    if let Some(abandoned) = status.and_then(|status| status.abandoned.as_ref()) {
        let reason = Reason::parse(&abandoned.reason).unwrap_or(Reason::SeedFailed);
        return Some(Plan::halt(reason, abandoned.message.clone()));
    }
    if in_place::is_deleted(restore) {
        return Some(Plan::halt(
            Reason::Cancelled,
            "the EtcdRestore was deleted before the restore was complete",
        ));
    }
    if status.is_some_and(|status| status.succeeded) {
        return Some(Plan::complete());
    }
    // A rejection with the reason `ClusterExists` is final for this generation of the spec, even if a user deletes the
    // existing cluster.
    let generation = restore.metadata.generation;
    let refused = conditions::find(restore.conditions(), &ConditionType::Failed).filter(|failed| {
        failed.status == "True"
            && Reason::parse(&failed.reason) == Some(Reason::ClusterExists)
            && failed.observed_generation == generation
    });
    if let Some(refused) = refused {
        let refused = Plan::halt(Reason::ClusterExists, refused.message.clone());
        return Some(without_finalizer(restore, refused));
    }
    // A restore with a finalizer or a verified seed has started, and continues even if its spec has become invalid.
    if has_finalizer || is_verified(restore) {
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

/// True if the cluster ID is the ID of the seed that this restore has verified.
fn is_restored(restore: &EtcdRestore, cluster: &ClusterFacts) -> bool {
    let restored = verified(restore).map(|(id, _)| id);
    restored.is_some_and(|id| cluster.is_cluster(id))
}

/// True if the status records that the seed serves the verified backup.
pub fn is_verified(restore: &EtcdRestore) -> bool {
    verified(restore).is_some()
}

/// The cluster ID and the revision of the seed in the status.
fn verified(restore: &EtcdRestore) -> Option<(&str, i64)> {
    let status = restore.status.as_ref()?;
    Some((status.cluster_id.as_deref()?, status.restored_revision?))
}

/// Invariant 9: without `spec.overwrite`, an existing cluster is not changed.
fn refuse(restore: &EtcdRestore) -> Plan {
    let name = naming::target(restore);
    Plan::halt(
        Reason::ClusterExists,
        format!(
            "spec.etcdCluster.name: the EtcdCluster {name} exists; nothing was changed. Create a new EtcdRestore with \
             another cluster name, or with spec.overwrite: true, which replaces the data of that cluster"
        ),
    )
}

/// Invariant 9: a cluster with the lock of another restore is not changed.
fn refuse_locked(restore: &EtcdRestore) -> Plan {
    let name = naming::target(restore);
    let message = if is_verified(restore) {
        format!(
            "another EtcdRestore locked the EtcdCluster {name} before this EtcdRestore was complete: wait until the \
             other EtcdRestore has ended"
        )
    } else {
        format!(
            "spec.etcdCluster.name: another EtcdRestore is restoring the EtcdCluster {name}; nothing was changed. \
             Create a new EtcdRestore with another cluster name. To replace the restored data, create a new \
             EtcdRestore with spec.overwrite: true after the other EtcdRestore has ended"
        )
    };
    Plan::halt(Reason::ClusterExists, message)
}

fn without_cluster(restore: &EtcdRestore, snapshot: &Snapshot) -> Plan {
    if verified(restore).is_some() {
        let name = naming::target(restore);
        let message = format!(
            "the restored EtcdCluster {name} was deleted before the restore was complete; create a new EtcdRestore"
        );
        return Plan::halt(Reason::ClusterMissing, message);
    }
    // Invariant 10: before an object of the seed is created, the status records the names of these objects. The status
    // must not record a cluster to replace, because the EtcdCluster does not exist.
    if !seed_is_recorded(restore) || in_place::replaces(restore).is_some() {
        return record_intent(restore);
    }
    let spec = match &snapshot.source {
        Source::NotRead => return Plan::wait_for("waiting for the check of the backup"),
        Source::Unavailable(trouble) => return Plan::trouble(trouble),
        Source::Search(step) => return search::plan(step),
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

fn with_lock(restore: &EtcdRestore, cluster: &ClusterFacts, snapshot: &Snapshot) -> Plan {
    let in_place = in_place::replaces(restore).is_some();
    // After the cutover, the restore is completed even if the EtcdRestore is deleted. A restore that has created the
    // EtcdCluster only releases the lock: it creates no object of the seed again, because clients may have written to
    // the seed.
    if in_place::has_cut_over(restore, cluster) {
        return if in_place {
            in_place::replace(restore, snapshot, cluster.durable)
        } else {
            Plan::act(
                Action::ReleaseLock,
                "handing the cluster over to the cluster operator",
            )
        };
    }
    if in_place::is_aborted(restore) {
        // If the restore has created the EtcdCluster, only the finalizer is removed. Kubernetes deletes the
        // EtcdCluster, because the deleted EtcdRestore owns it.
        return if in_place {
            in_place::withdraw(snapshot)
        } else {
            remove_finalizer()
        };
    }
    if !seed_is_recorded(restore) {
        return record_intent(restore);
    }
    if let Source::Search(step) = &snapshot.source {
        return search::plan(step);
    }
    // Record the backup again if a user has deleted it from the status of the EtcdRestore.
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
                "the EtcdCluster's status has the cluster ID {recorded}, but the restored seed has a different \
                 cluster ID; delete the EtcdCluster and create a new EtcdRestore"
            ),
        ),
        (None, known) => with_finalizer(restore, prepare_seed(cluster, known, snapshot)),
    }
}

/// Sets the finalizer before the cutover to a new cluster, so that a deletion of the EtcdRestore waits until the
/// restore has released the lock. Before the cutover, a deletion of the EtcdRestore deletes the new cluster too.
fn with_finalizer(restore: &EtcdRestore, plan: Plan) -> Plan {
    if matches!(plan.action, Action::RecordFormed { .. }) && !in_place::has_finalizer(restore) {
        return Plan::act(
            Action::SetFinalizer(true),
            "setting the finalizer for the handover",
        );
    }
    plan
}

/// Creates the missing objects of the seed. No client can have written to the seed at this stage.
fn prepare_seed(cluster: &ClusterFacts, known: Option<(&str, i64)>, snapshot: &Snapshot) -> Plan {
    if !cluster.problems.is_empty() {
        let message = format!("the EtcdCluster's {}", problem::summary(&cluster.problems));
        return Plan::stuck(Trouble::new(Reason::InvalidSpec, message));
    }
    if let Some(plan) = missing(&snapshot.seed.service, "Service", Action::CreateService) {
        return plan;
    }
    if cluster.durable
        && let Some(plan) = missing(
            &snapshot.seed.pvc,
            "PersistentVolumeClaim",
            Action::CreatePvc,
        )
    {
        return plan;
    }
    match &snapshot.seed.pod {
        Pod::Unknown(why) => {
            Plan::wait_for(format!("waiting until the seed's pod can be read: {why}"))
        }
        Pod::NameTaken => Plan::wait_for(NAME_TAKEN),
        Pod::Absent => Plan::act(Action::CreatePod, "starting the seed member"),
        Pod::Present(pod) => await_seed(pod, known, &snapshot.serving),
    }
}

fn missing(child: &Child, kind: &str, create: Action) -> Option<Plan> {
    match child {
        Child::Present => None,
        Child::Absent => Some(Plan::act(create, &format!("creating the seed's {kind}"))),
        Child::NameTaken => Some(Plan::wait_for(format!(
            "waiting for the deletion of another {kind} with the seed's name"
        ))),
        Child::Unknown(why) => Some(Plan::wait_for(format!(
            "waiting until the seed's {kind} can be read: {why}"
        ))),
    }
}

fn await_seed(pod: &PodFacts, known: Option<(&str, i64)>, serving: &Serving) -> Plan {
    if pod.life != Life::Active {
        return ended::replace(pod);
    }
    if let Some(plan) = unfit::before_cutover(pod) {
        return plan;
    }
    if let Some(trouble) = &pod.trouble {
        return Plan::trouble(trouble);
    }
    // Invariant 9: an answer at the seed's address counts only after the pod has reported a verified backup. An earlier
    // answer may come from another pod with the same address.
    let Some(restored) = pod.restored else {
        return Plan::wait_for("waiting until the seed's pod has fetched and verified the backup");
    };
    match serving {
        Serving::NotRead => Plan::wait_for("waiting for the seed member to serve"),
        Serving::Unknown(why) => Plan {
            requeue: Some(seed_poll(pod)),
            ..Plan::wait_for(format!("waiting for the seed member to serve: {why}"))
        },
        Serving::Differs { expected, found } => Plan::stuck(Trouble::new(
            Reason::SeedFailed,
            format!(
                "etcd's hash of the seed's data is {found:08x}, but the manifest of the backup records {expected:08x}; \
                 restore another backup"
            ),
        )),
        Serving::Serves { revision, .. } if *revision < restored => Plan::stuck(Trouble::new(
            Reason::SeedFailed,
            format!(
                "the seed member serves revision {revision}, but the backup has revision {restored}; delete the \
                 EtcdCluster and create a new EtcdRestore"
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

/// The delay between reconciles until the seed's etcd serves. It grows with the size of the backup, because the
/// container of etcd first creates the data directory, at one or two seconds per GiB. A replay of recorded changes can
/// take hours.
fn seed_poll(pod: &PodFacts) -> Duration {
    if pod.replays {
        return POLL;
    }
    let gibibytes = pod.progress.map_or(0, |fetched| fetched.bytes >> 30);
    let factor = u32::try_from(gibibytes).unwrap_or(u32::MAX).max(1);
    SEED_START_POLL.saturating_mul(factor).min(POLL)
}

fn handed_over(restore: &EtcdRestore, cluster: &ClusterFacts, serving: &Serving) -> Plan {
    let restored = verified(restore).map_or(0, |(_, revision)| revision);
    if in_place::has_finalizer(restore) {
        return remove_finalizer();
    }
    if !cluster.available {
        return Plan::wait_for(
            "waiting for the cluster operator to report the cluster as Available",
        );
    }
    match serving {
        // `Differs` cannot occur here, because the hash is compared only before the cutover.
        Serving::NotRead | Serving::Differs { .. } => {
            Plan::wait_for("waiting for the cluster to serve")
        }
        Serving::Unknown(why) => Plan::wait_for(format!("waiting for the cluster to serve: {why}")),
        Serving::Serves { cluster_id, .. } if !cluster.is_cluster(cluster_id) => {
            Plan::wait_for(format!(
                "waiting for the restored cluster to serve: another cluster ({cluster_id}) answers at its address"
            ))
        }
        Serving::Serves { revision, .. } if *revision < restored => Plan::wait_for(format!(
            "waiting for an answer with revision {restored} or later: the cluster answered with revision {revision}"
        )),
        Serving::Serves { .. } => Plan::complete(),
    }
}
