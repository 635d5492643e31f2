//! The end of a restore in place: the old members have stopped, the seed joins the cluster, and the lock is released.
//!
//! The seed joins when it serves the verified backup. From then on its volume is not created again, because clients may
//! have written to it, and their writes would be lost silently. Its pod is created again on an existing volume as often
//! as needed. It finds the data there, or restores the backup if the volume was created again while the old members
//! ran.
//!
//! If nothing of the seed is left, the restore fails with the remedy. The cluster operator then gets a cluster without
//! data, which it never bootstraps again (invariant 7).

use api::EtcdRestore;

use super::abandoned::gives_up;
use super::{Action, IN_THE_WAY, PROMPTLY, Plan, ended, missing, unfit, verified};
use crate::naming;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Another, Child, Life, Pod, PodFacts, Seed, Serving, Snapshot};

/// The remedy if the seed does not serve the verified backup and the old members have stopped.
const REMEDY: &str = "the old members have stopped, and nobody is served: delete this EtcdRestore to go on with what the \
                      seed holds, or to restore another backup after it, with a new EtcdRestore and spec.overwrite: true";

/// Plans the steps after the last old member has left the endpoints.
pub(super) fn join(restore: &EtcdRestore, snapshot: &Snapshot, durable: bool) -> Plan {
    let seed = &snapshot.seed;
    match &seed.pod {
        Pod::Unknown(why) => Plan::wait_for(format!("an answer about the seed's pod: {why}")),
        Pod::Present(pod) if pod.life == Life::Lives && !pod.joined => {
            let waits = hold_back(restore, (pod, durable), snapshot);
            waits.unwrap_or_else(|| Plan::act(Action::Join, "the seed joins the cluster"))
        }
        Pod::Present(pod) if pod.life == Life::Lives => hand_over(),
        // A user who deletes the restore accepts the current data of the seed.
        Pod::Present(_) | Pod::Absent | Pod::InTheWay if gives_up(restore) => {
            match &seed.pod {
                // The labels let Services and the cluster operator select the pod.
                Pod::Present(pod) if !pod.joined => {
                    Plan::act(Action::Join, "the seed joins the cluster")
                }
                _ => hand_over(),
            }
        }
        Pod::Present(_) | Pod::Absent | Pod::InTheWay if !durable => lost(restore),
        Pod::Present(_) | Pod::Absent | Pod::InTheWay => match &seed.claim {
            Child::Unknown(why) => {
                Plan::wait_for(format!("an answer about the seed's volume claim: {why}"))
            }
            Child::Absent | Child::InTheWay => lost(restore),
            Child::Present => on_its_volume(seed),
        },
    }
}

/// Creates the pod again on the volume of the seed. Only the seed's own pod verifies the data there. A member's pod of
/// the cluster operator would fail indefinitely on an empty volume.
fn on_its_volume(seed: &Seed) -> Plan {
    match &seed.pod {
        // A joined seed has served the verified backup, which is on its volume. The cluster operator replaces the pod.
        Pod::Present(pod) if pod.joined => hand_over(),
        Pod::Present(pod) => ended::clear(pod),
        Pod::InTheWay => Plan::wait_for(IN_THE_WAY),
        Pod::Absent | Pod::Unknown(_) => {
            let service = missing(&seed.service, "Service", Action::CreateService);
            service.unwrap_or_else(|| {
                Plan::act(Action::CreatePod, "starting the seed member on its volume")
            })
        }
    }
}

fn hand_over() -> Plan {
    Plan::act(Action::ReleaseClaim, "handing the cluster over")
}

/// The reason to wait with the join, if any. Invariant 9: a seed that was created again joins only when it serves the
/// verified backup. A user who deletes the restore accepts the current data of the seed.
fn hold_back(
    restore: &EtcdRestore,
    (pod, durable): (&PodFacts, bool),
    snapshot: &Snapshot,
) -> Option<Plan> {
    let (cluster, recorded) = verified(restore).filter(|_| !gives_up(restore))?;
    match (pod.restored, &pod.another) {
        (_, Some(Another::Holds(what))) => return Some(differs(&format!("is of {what}"))),
        (Some(restored), _) if restored != recorded => {
            return Some(differs(&format!(
                "holds revision {restored}, and what was verified is revision {recorded}"
            )));
        }
        (Some(_), _) => {}
        (None, _) => {
            if let Some(waits) = untold(pod, durable, &snapshot.seed.claim) {
                return Some(waits);
            }
        }
    }
    match &snapshot.serving {
        Serving::Serves {
            cluster_id,
            revision,
        } => {
            let same = cluster_id == cluster && *revision >= recorded;
            (!same).then(|| {
                differs(&format!(
                    "serves revision {revision} as cluster {cluster_id}, and what was verified is revision {recorded} as \
                     cluster {cluster}"
                ))
            })
        }
        Serving::NotAsked | Serving::Differs { .. } => {
            Some(starting(pod, "the seed member to serve"))
        }
        Serving::Unknown(why) => Some(starting(pod, &format!("the seed member to serve: {why}"))),
    }
}

/// The reason to wait for a seed without a report.
fn untold(pod: &PodFacts, durable: bool, claim: &Child) -> Option<Plan> {
    let another = unfit::another_pod(pod).filter(|_| durable);
    match (another, claim) {
        // The next pod on the volume reports its data.
        (Some(another), Child::Present) => return Some(another),
        // Invariant 1.
        (Some(_), Child::Unknown(why)) => {
            let what = format!("an answer about the seed's volume claim: {why}");
            return Some(Plan::wait_for(what));
        }
        // Without a volume the pod has the only copy. A PersistentVolumeClaim that is being deleted is lost with the
        // pod.
        (Some(_), Child::Absent | Child::InTheWay) | (None, _) => {}
    }
    match (pod.silent, pod.vouched) {
        (true, true) => None,
        (true, false) => {
            let what = "holds cannot be read: its container fetch ended well, and its termination message is lost";
            Some(stuck(&format!("what the seed {what}")))
        }
        (false, _) => {
            let what = "the backup to be fetched and verified in the seed's pod";
            Some(starting(pod, what))
        }
    }
}

/// Waits for a seed while no member serves clients. A problem that does not pass is reported as a failure. A problem
/// that should pass is reported with the remedy if it lasts, so a user can decide.
fn starting(pod: &PodFacts, what: &str) -> Plan {
    if let Some(trouble) = &pod.trouble {
        return Plan::trouble(&Trouble {
            message: with_remedy(&trouble.message),
            ..trouble.clone()
        });
    }
    if pod.young {
        let mut plan = Plan::wait_for(what);
        plan.requeue = Some(PROMPTLY);
        return plan;
    }
    Plan::wait_for(with_remedy(what))
}

/// Adds the remedy to a problem if the old members have stopped.
pub fn told(snapshot: &Snapshot, why: &str) -> String {
    if snapshot.former.have_stopped() {
        with_remedy(why)
    } else {
        why.to_owned()
    }
}

fn with_remedy(what: &str) -> String {
    format!("{what}; {REMEDY}")
}

fn differs(how: &str) -> Plan {
    stuck(&format!("the seed was made again and {how}"))
}

fn stuck(what: &str) -> Plan {
    Plan::stuck(Trouble::new(Reason::SeedFailed, with_remedy(what)))
}

/// Records the failure before the lock is released (invariant 10).
fn lost(restore: &EtcdRestore) -> Plan {
    let member = naming::seed(restore).member;
    let message = format!(
        "the seed member {member} was lost after the old members had stopped, and what it held with it; the cluster has \
         no data: restore a backup over it with a new EtcdRestore and spec.overwrite: true"
    );
    let trouble = Trouble::new(Reason::SeedFailed, message.clone());
    Plan::act(Action::Abandon(trouble), &message)
}
