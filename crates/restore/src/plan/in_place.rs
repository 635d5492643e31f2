//! Restore in place: the backup replaces the data of an existing cluster, whose EtcdCluster is kept.
//!
//! The seed is created next to the old members, which continue to serve. Its pod has no label of the cluster, so no
//! Service selects it. Only the operator connects to it, at the address of the pod.
//!
//! The cutover is one write of the new cluster ID and token to the status of the EtcdCluster. Before the cutover the
//! old cluster is complete and continues after every failure. After the cutover the new cluster continues, whose seed
//! has served the verified backup. Then the old members stop (invariant 9), and after that the seed gets its labels
//! (invariant 17).

use api::EtcdRestore;
use api::names::FINALIZER_CLAIM;
use api::problem;
use api::restore::ReplacesStatus;

pub use super::abandoned::{gives_up, is_deleted};
use super::choice;
use super::{
    Action, IN_THE_WAY, PROMPTLY, Plan, ended, joining, missing, prepare_seed, refuse,
    seed_is_recorded, unfit, verified,
};
use crate::naming;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{
    Another, Child, ClusterFacts, Former, FormerPod, Life, Pod, PodFacts, Serving, Snapshot, Source,
};

/// Whether the EtcdRestore has the finalizer, which delays its deletion until the lock is released.
pub fn is_held(restore: &EtcdRestore) -> bool {
    let finalizers = restore.metadata.finalizers.as_deref().unwrap_or_default();
    finalizers.iter().any(|one| one == FINALIZER_CLAIM)
}

/// The recorded cluster that is replaced; `None` for a new cluster.
pub fn replaces(restore: &EtcdRestore) -> Option<&ReplacesStatus> {
    restore.status.as_ref()?.replaces.as_ref()
}

/// Whether the cutover was made: the status of the EtcdCluster has the cluster ID of the seed.
pub fn has_turned(restore: &EtcdRestore, cluster: &ClusterFacts) -> bool {
    let ours = verified(restore).map(|(id, _)| id);
    ours.is_some_and(|id| cluster.is_cluster(id))
}

/// Plans the steps before the lock. All problems that can be detected early are reported here, before any change.
pub(super) fn begin(restore: &EtcdRestore, cluster: &ClusterFacts, snapshot: &Snapshot) -> Plan {
    if !restore.spec.overwrite {
        return refuse(restore);
    }
    // The seed was verified for another cluster. The EtcdCluster was created again, or the restored cluster lost its
    // quorum and was recovered as another one. It is not replaced a second time.
    if verified(restore).is_some() && !replaces(restore).is_some_and(|was| cluster.is_still(was)) {
        let name = naming::target(restore);
        let message = format!(
            "the EtcdCluster {name} is another cluster than the one this EtcdRestore was begun for: it was made anew \
             since, or became another one when its lost quorum was recovered, and is left as it is; to replace what it \
             holds by now create a new EtcdRestore with spec.overwrite: true"
        );
        return Plan::halt(Reason::ClusterExists, message);
    }
    if !cluster.problems.is_empty() {
        let message = format!("the EtcdCluster's {}", problem::summary(&cluster.problems));
        return Plan::stuck(Trouble::new(Reason::InvalidSpec, message));
    }
    if cluster.paused {
        let message =
            "the EtcdCluster's spec.paused is true: nothing of it is changed until it is false";
        return Plan::stuck(Trouble::new(Reason::Paused, message));
    }
    match &snapshot.source {
        Source::NotAsked => return Plan::wait_for("the backup to be looked at"),
        Source::Unavailable(trouble) => return Plan::trouble(trouble),
        Source::Ready(_) => {}
    }
    let there = ReplacesStatus {
        uid: cluster.uid.clone(),
        cluster_id: cluster.cluster_id.clone(),
    };
    // Invariant 10.
    if !seed_is_recorded(restore) || replaces(restore) != Some(&there) {
        let action = Action::RecordIntent {
            seed: naming::seed(restore),
            replaces: Some(there),
        };
        return Plan::act(action, "recording the seed member and what it replaces");
    }
    if let Some(plan) = choice::to_record(restore, snapshot, false) {
        return plan;
    }
    if !is_held(restore) {
        return Plan::act(Action::Guard(true), "guarding the claim with a finalizer");
    }
    Plan::act(Action::Claim, "claiming the EtcdCluster")
}

/// Prepares the seed next to the old members, which serve. The restore holds the lock. A problem that does not pass
/// ends the restore.
pub(super) fn prepare(restore: &EtcdRestore, cluster: &ClusterFacts, snapshot: &Snapshot) -> Plan {
    let before = replaces(restore).and_then(|before| before.cluster_id.as_ref());
    let same = before.map_or(cluster.cluster_id.is_none(), |was| cluster.is_cluster(was));
    if !same {
        let message =
            "the EtcdCluster's status names another cluster ID than when the restore began";
        return abandon(&Trouble::new(Reason::SeedFailed, message));
    }
    // Invariant 11: an operator process that was suspended may have removed the finalizer late, while another restore
    // held the lock.
    if !is_held(restore) {
        return Plan::act(Action::Guard(true), "guarding the claim with a finalizer");
    }
    let plan = prepare_seed(cluster, verified(restore), snapshot);
    // Invariant 9: after the cutover the old members stop only for a ready seed. If the seed answered but never became
    // ready, both clusters would remain.
    let is_ready = matches!(&snapshot.seed.pod, Pod::Present(pod) if pod.verified);
    if matches!(plan.action, Action::RecordFormed { .. }) && !is_ready {
        return Plan::wait_for("the seed member to be ready");
    }
    match plan.outlook {
        super::Outlook::Stuck(trouble) | super::Outlook::Halted(trouble) => abandon(&trouble),
        _ => plan,
    }
}

/// Records that the restore is abandoned, before any object of the seed is deleted (invariant 10).
pub(super) fn abandon(trouble: &Trouble) -> Plan {
    let message = &trouble.message;
    let trouble = Trouble::new(
        trouble.reason,
        format!("{message}; the cluster that was there is left as it was"),
    );
    let mut plan = Plan::act(Action::Abandon(trouble), "");
    plan.outlook = super::Outlook::Working(Trouble::new(
        Reason::InProgress,
        format!("giving up, the cluster stays as it is: {message}"),
    ));
    plan
}

/// Deletes the seed of a restore that was aborted before the cutover, and then releases the lock. The cluster operator
/// continues with the old members.
pub(super) fn withdraw(snapshot: &Snapshot) -> Plan {
    let seed = &snapshot.seed;
    let unknown = match (&seed.pod, &seed.claim, &seed.service) {
        (Pod::Unknown(why), _, _) | (_, Child::Unknown(why), _) | (_, _, Child::Unknown(why)) => {
            Some(why)
        }
        _ => None,
    };
    if let Some(why) = unknown {
        return Plan::wait_for(format!("an answer about the seed's objects: {why}"));
    }
    let left = matches!(seed.pod, Pod::Present(_))
        || seed.claim == Child::Present
        || seed.service == Child::Present;
    if left {
        return Plan::act(Action::DiscardSeed, "removing the seed member");
    }
    Plan::act(Action::ReleaseClaim, "handing the cluster back as it was")
}

/// Plans the steps after the cutover: the old members stop, the seed joins the cluster, the lock is released.
pub(super) fn replace(restore: &EtcdRestore, snapshot: &Snapshot, durable: bool) -> Plan {
    let pods = match &snapshot.former {
        Former::NotAsked => return Plan::wait_for("the old members to be looked at"),
        Former::Unknown(why) => {
            return Plan::wait_for(format!("an answer about the old members: {why}"));
        }
        Former::Known(pods) => pods,
    };
    let running: Vec<_> = pods
        .iter()
        .filter(|pod| !pod.terminating)
        .cloned()
        .collect();
    if !running.is_empty() {
        return stop(snapshot, durable, verified(restore), running);
    }
    // Invariant 17: a terminating pod that is not ready is no endpoint, even if its node keeps it for long.
    let ready: Vec<&str> = pods
        .iter()
        .filter(|pod| pod.ready)
        .map(|pod| pod.name.as_str())
        .collect();
    if !ready.is_empty() {
        let mut plan = Plan::wait_for(format!("the old members to stop: {}", ready.join(", ")));
        plan.requeue = Some(PROMPTLY);
        return plan;
    }
    joining::join(restore, snapshot, durable)
}

/// Stops the old members while the verified seed exists (invariant 9). No client can have written to the seed yet, so a
/// lost seed is created again. Its cluster ID is derived from its name and token, so it forms the same cluster.
fn stop(
    snapshot: &Snapshot,
    durable: bool,
    known: Option<(&str, i64)>,
    running: Vec<FormerPod>,
) -> Plan {
    if let Some(plan) = missing(&snapshot.seed.service, "Service", Action::CreateService) {
        return plan;
    }
    if durable
        && let Some(plan) = missing(&snapshot.seed.claim, "volume claim", Action::CreateClaim)
    {
        return plan;
    }
    match &snapshot.seed.pod {
        Pod::Unknown(why) => Plan::wait_for(format!("an answer about the seed's pod: {why}")),
        Pod::InTheWay => Plan::wait_for(IN_THE_WAY),
        Pod::Absent => Plan::act(Action::CreatePod, "starting the seed member"),
        // With the labels of the cluster, clients may have written to the seed. Their writes are on its volume, or
        // lost.
        Pod::Present(pod) if pod.life != Life::Lives && (durable || !pod.joined) => {
            ended::clear(pod)
        }
        Pod::Present(pod) => {
            // Invariant 17: clients reach a joined seed, so an old member that appears late stops regardless of the
            // problems of the seed.
            let serves = pod.joined && pod.life == Life::Lives;
            let trouble = pod.trouble.as_ref().filter(|_| !serves);
            let unfit = unfit::another_pod(pod).filter(|_| !pod.joined);
            match (unfit, trouble, pod.verified || pod.joined) {
                (Some(plan), _, _) => plan,
                // A problem that does not pass is reported as a failure. The restore continues after its correction.
                (None, Some(trouble), _) => Plan::trouble(trouble),
                (None, None, false) => {
                    Plan::wait_for("the seed's data directory to be verified again")
                }
                (None, None, true) => stop_for(pod, known, &snapshot.serving, running),
            }
        }
    }
}

/// Stops the old members if the seed serves the verified backup (invariant 9). A seed that was created again may
/// contain another backup from the same location. If the settings of its address were changed, the seed may also be
/// another cluster. Only the operator has checked the seed so far.
fn stop_for(
    pod: &PodFacts,
    known: Option<(&str, i64)>,
    serving: &Serving,
    running: Vec<FormerPod>,
) -> Plan {
    let Some((cluster, recorded)) = known else {
        return Plan::wait_for("the seed to be recorded");
    };
    let (id, serves) = match serving {
        Serving::Serves {
            cluster_id,
            revision,
        } => (cluster_id, *revision),
        Serving::NotAsked => return Plan::wait_for("the seed member to serve"),
        Serving::Unknown(why) => {
            return Plan::wait_for(format!("the seed member to serve: {why}"));
        }
        Serving::Differs { expected, found } => {
            return Plan::wait_for(format!(
                "a seed whose keys have the hash {expected:08x}, and not {found:08x}"
            ));
        }
    };
    let same = id == cluster;
    let other = matches!(pod.another, Some(Another::Holds(_)));
    let verified = !other && same && serves >= recorded && pod.restored == Some(recorded);
    // A joined seed has served the verified backup, and clients may have written to it since.
    if !verified && !pod.joined {
        let restored = pod.restored.unwrap_or_default();
        let of = match &pod.another {
            Some(Another::Holds(what) | Another::Fetches(what)) => format!(" (of {what})"),
            None => String::new(),
        };
        return Plan::stuck(Trouble::new(
            Reason::SeedFailed,
            format!(
                "the seed was made again and holds revision {restored} as cluster {id}{of}, and what was verified is \
                 revision {recorded} as cluster {cluster}: the old members keep what they have; put that backup back to \
                 the place in status.backup (where there is none: name it again, by its place or with \
                 spec.backup.before beside spec.backup.name), or undo what was changed of the EtcdCluster's addresses, \
                 and delete the seed's pod and its volume claim"
            ),
        ));
    }
    let mut plan = Plan::act(Action::StopFormer(running), "stopping the old members");
    plan.requeue = Some(PROMPTLY);
    plan
}
