//! Restore in place: the backup replaces the data of an existing EtcdCluster.
//!
//! The seed is created while the old members serve. Its pod has no label of the cluster, so no Service selects it, and
//! only the operator connects to it.
//!
//! The cutover writes the new cluster ID and token to the status of the EtcdCluster. Before the cutover, the old
//! cluster continues after every failure. After the cutover, the new cluster continues, because its seed has served the
//! verified backup. Then the old members stop (invariant 9), and the seed's pod gets the labels of the cluster
//! (invariant 17).

use api::EtcdRestore;
use api::names::FINALIZER_CLAIM;
use api::problem;
use api::restore::ReplacesStatus;

pub use super::abandoned::{is_aborted, is_deleted};
use super::choice;
use super::{
    Action, NAME_TAKEN, OUTAGE_POLL, Plan, PlanState, ended, joining, missing, prepare_seed,
    refuse, search, seed_is_recorded, unfit, verified,
};
use crate::naming;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{
    Child, ClusterFacts, Life, OldMembers, OldPod, OtherBackup, Pod, PodFacts, Serving, Snapshot,
    Source,
};

/// True if the EtcdRestore has the finalizer, which delays its deletion until the lock is removed.
pub fn has_finalizer(restore: &EtcdRestore) -> bool {
    let finalizers = restore.metadata.finalizers.as_deref().unwrap_or_default();
    finalizers.iter().any(|one| one == FINALIZER_CLAIM)
}

/// The cluster whose data a restore in place replaces, from `status.replaces`. `None` for a restore into a new cluster.
pub fn replaces(restore: &EtcdRestore) -> Option<&ReplacesStatus> {
    restore.status.as_ref()?.replaces.as_ref()
}

/// True after the cutover: the status of the EtcdCluster contains the cluster ID of the seed.
pub fn has_cut_over(restore: &EtcdRestore, cluster: &ClusterFacts) -> bool {
    let restored = verified(restore).map(|(id, _)| id);
    restored.is_some_and(|id| cluster.is_cluster(id))
}

/// Plans the steps until the lock is set. Every problem that is visible without a change is reported before the first
/// write.
pub(super) fn begin(restore: &EtcdRestore, cluster: &ClusterFacts, snapshot: &Snapshot) -> Plan {
    if !restore.spec.overwrite {
        return refuse(restore);
    }
    // The EtcdCluster is neither the recorded old cluster nor the restored cluster: a user has created it again, or
    // its quorum was lost and recovered. Its data may be newer than the backup, so it is not replaced.
    if verified(restore).is_some() && !replaces(restore).is_some_and(|was| cluster.is_still(was)) {
        let name = naming::target(restore);
        let message = format!(
            "the EtcdCluster {name} has changed since this EtcdRestore started: a user created the EtcdCluster again, \
             or its lost quorum was recovered. The restore does not change the EtcdCluster. To replace its current \
             data, create a new EtcdRestore with spec.overwrite: true"
        );
        return Plan::halt(Reason::ClusterExists, message);
    }
    if !cluster.problems.is_empty() {
        let message = format!("the EtcdCluster's {}", problem::summary(&cluster.problems));
        return Plan::stuck(Trouble::new(Reason::InvalidSpec, message));
    }
    if cluster.paused {
        let message =
            "the EtcdCluster's spec.paused is true: set spec.paused to false to start the restore";
        return Plan::stuck(Trouble::new(Reason::Paused, message));
    }
    match &snapshot.source {
        Source::NotRead => return Plan::wait_for("waiting for the check of the backup"),
        Source::Unavailable(trouble) => return Plan::trouble(trouble),
        Source::Search(step) => return search::plan(step),
        Source::Ready(_) => {}
    }
    let existing = ReplacesStatus {
        uid: cluster.uid.clone(),
        cluster_id: cluster.cluster_id.clone(),
    };
    // Invariant 10: the names of the seed's objects and the cluster to replace are recorded before the lock is set.
    if !seed_is_recorded(restore) || replaces(restore) != Some(&existing) {
        let action = Action::RecordIntent {
            seed: naming::seed(restore),
            replaces: Some(existing),
        };
        return Plan::act(action, "recording the seed member and the replaced cluster");
    }
    if let Some(plan) = choice::to_record(restore, snapshot, false) {
        return plan;
    }
    if !has_finalizer(restore) {
        return set_finalizer();
    }
    Plan::act(Action::Lock, "locking the EtcdCluster")
}

fn set_finalizer() -> Plan {
    Plan::act(
        Action::SetFinalizer(true),
        "setting the finalizer for the restore lock",
    )
}

/// Prepares the seed while the old members serve. If the seed has a problem that a user must correct, the restore is
/// abandoned.
pub(super) fn prepare(restore: &EtcdRestore, cluster: &ClusterFacts, snapshot: &Snapshot) -> Plan {
    let before = replaces(restore).and_then(|before| before.cluster_id.as_ref());
    let same = before.map_or(cluster.cluster_id.is_none(), |was| cluster.is_cluster(was));
    if !same {
        let message = "the cluster ID in the EtcdCluster's status has changed since the start of the restore: to replace its current data, create a new EtcdRestore with spec.overwrite: true";
        return abandon(&Trouble::new(Reason::SeedFailed, message));
    }
    // Invariant 11: the restore may hold the lock although its finalizer is missing. A suspended operator process,
    // which had observed the lock of another restore, may have removed the finalizer after this lock was set.
    if !has_finalizer(restore) {
        return set_finalizer();
    }
    let plan = prepare_seed(cluster, verified(restore), snapshot);
    // Invariant 9: the cutover waits until the seed is ready. The old members stop only after the seed is ready, so
    // after a cutover to a seed that never becomes ready, both clusters would remain.
    let is_ready = matches!(&snapshot.seed.pod, Pod::Present(pod) if pod.verified);
    if matches!(plan.action, Action::RecordFormed { .. }) && !is_ready {
        return Plan::wait_for("waiting for the seed member to be ready");
    }
    match plan.state {
        PlanState::Stuck(trouble) | PlanState::Halted(trouble) => abandon(&trouble),
        _ => plan,
    }
}

/// Records that the restore is abandoned, before the objects of the seed are deleted (invariant 10).
pub(super) fn abandon(trouble: &Trouble) -> Plan {
    let message = &trouble.message;
    let trouble = Trouble::new(
        trouble.reason,
        format!("{message}; the existing cluster is unchanged"),
    );
    let mut plan = Plan::act(Action::Abandon(trouble), "");
    plan.state = PlanState::Working(Trouble::new(
        Reason::InProgress,
        format!("abandoning the restore; the existing cluster is unchanged: {message}"),
    ));
    plan
}

/// Deletes the seed of a restore that was aborted before the cutover, and then removes the lock. The old members
/// continue to serve clients.
pub(super) fn withdraw(snapshot: &Snapshot) -> Plan {
    let seed = &snapshot.seed;
    let unknown = match (&seed.pod, &seed.pvc, &seed.service) {
        (Pod::Unknown(why), _, _) | (_, Child::Unknown(why), _) | (_, _, Child::Unknown(why)) => {
            Some(why)
        }
        _ => None,
    };
    if let Some(why) = unknown {
        return Plan::wait_for(format!(
            "waiting until the seed's objects can be read: {why}"
        ));
    }
    let seed_exists = matches!(seed.pod, Pod::Present(_))
        || seed.pvc == Child::Present
        || seed.service == Child::Present;
    if seed_exists {
        return Plan::act(Action::DiscardSeed, "deleting the seed member");
    }
    Plan::act(
        Action::ReleaseLock,
        "releasing the lock of the unchanged cluster",
    )
}

/// Plans the steps after the cutover: the old members stop, the seed joins the cluster, and the lock is removed.
pub(super) fn replace(restore: &EtcdRestore, snapshot: &Snapshot, durable: bool) -> Plan {
    let pods = match &snapshot.old_members {
        OldMembers::NotRead => return Plan::wait_for("waiting for the list of the old members"),
        OldMembers::Unknown(why) => {
            return Plan::wait_for(format!("waiting until the old members can be read: {why}"));
        }
        OldMembers::Known(pods) => pods,
    };
    let running: Vec<_> = pods
        .iter()
        .filter(|pod| !pod.terminating)
        .cloned()
        .collect();
    if !running.is_empty() {
        return stop(snapshot, durable, verified(restore), running);
    }
    // Invariant 17: the plan waits only for terminating pods that are ready. A terminating pod that is not ready
    // receives no requests through a Service, and its node may be lost.
    let ready: Vec<&str> = pods
        .iter()
        .filter(|pod| pod.ready)
        .map(|pod| pod.name.as_str())
        .collect();
    if !ready.is_empty() {
        let mut plan = Plan::wait_for(format!(
            "waiting for the old members to stop: {}",
            ready.join(", ")
        ));
        plan.requeue = Some(OUTAGE_POLL);
        return plan;
    }
    joining::join(restore, snapshot, durable)
}

/// Stops the old members if the verified seed exists (invariant 9). A missing seed is created again, because no client
/// has written to it yet. The new seed gets the same cluster ID, because etcd computes the ID from the member's name
/// and the cluster token.
fn stop(
    snapshot: &Snapshot,
    durable: bool,
    known: Option<(&str, i64)>,
    running: Vec<OldPod>,
) -> Plan {
    if let Some(plan) = missing(&snapshot.seed.service, "Service", Action::CreateService) {
        return plan;
    }
    if durable
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
        // Services select a pod that has joined, so clients may have written to it. If this pod is replaced, these
        // writes are lost unless they are on a volume (`durable`).
        Pod::Present(pod) if pod.life != Life::Active && (durable || !pod.joined) => {
            ended::replace(pod)
        }
        Pod::Present(pod) => {
            // Invariant 17: Services select a seed that has joined, so the old members must stop even if the seed's pod
            // reports a problem.
            let serves = pod.joined && pod.life == Life::Active;
            let trouble = pod.trouble.as_ref().filter(|_| !serves);
            let unfit = unfit::pod_replacement(pod).filter(|_| !pod.joined);
            match (unfit, trouble, pod.verified || pod.joined) {
                (Some(plan), _, _) => plan,

                (None, Some(trouble), _) => Plan::trouble(trouble),
                (None, None, false) => Plan::wait_for(
                    "waiting until the seed's pod has verified its data directory again",
                ),
                (None, None, true) => stop_for(pod, known, &snapshot.serving, running),
            }
        }
    }
}

/// Stops the old members if the seed serves the verified backup (invariant 9). A seed that was created again after the
/// verification may have another backup or another cluster ID. The old members then continue, and no client has used
/// the seed yet.
fn stop_for(
    pod: &PodFacts,
    known: Option<(&str, i64)>,
    serving: &Serving,
    running: Vec<OldPod>,
) -> Plan {
    let Some((cluster, recorded)) = known else {
        return Plan::wait_for(
            "waiting until the status of the EtcdRestore contains the cluster ID and the revision of the seed",
        );
    };
    let (id, serves) = match serving {
        Serving::Serves {
            cluster_id,
            revision,
        } => (cluster_id, *revision),
        Serving::NotRead => return Plan::wait_for("waiting for the seed member to serve"),
        Serving::Unknown(why) => {
            return Plan::wait_for(format!("waiting for the seed member to serve: {why}"));
        }
        Serving::Differs { expected, found } => {
            return Plan::wait_for(format!(
                "waiting to stop the old members: etcd's hash of the seed's data is {found:08x}, but the manifest of \
                 the backup records {expected:08x}; delete the seed's pod and PersistentVolumeClaim, so that the \
                 operator creates the seed again from the backup"
            ));
        }
    };
    let same = id == cluster;
    let other = matches!(pod.other_backup, Some(OtherBackup::Contains(_)));
    let verified = !other && same && serves >= recorded && pod.restored == Some(recorded);
    // A seed that has joined was verified before. Its revision may be higher than the revision of the backup, because
    // clients may have written to the seed.
    if !verified && !pod.joined {
        let restored = pod.restored.unwrap_or_default();
        let backup = match &pod.other_backup {
            Some(OtherBackup::Contains(backup) | OtherBackup::Fetches(backup)) => {
                format!(" (backup {backup})")
            }
            None => String::new(),
        };
        return Plan::stuck(Trouble::new(
            Reason::SeedFailed,
            format!(
                "the seed was created again and has revision {restored} and cluster ID {id}{backup}, but the verified \
                 seed had revision {recorded} and cluster ID {cluster}. The old members keep their data. If the backup \
                 at the location in status.backup was replaced, put the verified backup back. If status.backup is \
                 empty, name the backup by its storage block or with spec.backup.before. If a change of the \
                 EtcdCluster's spec has changed the addresses of members, undo this change. Then delete the seed's \
                 pod and PersistentVolumeClaim"
            ),
        ));
    }
    let mut plan = Plan::act(Action::StopOldMembers(running), "stopping the old members");
    plan.requeue = Some(OUTAGE_POLL);
    plan
}
