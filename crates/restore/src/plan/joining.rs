//! The end of a restore in place: the old members have stopped, the seed joins the cluster, the claim goes.
//!
//! The seed joins when it serves what was verified. From here on its volume is not made again: clients may have found it,
//! and what they wrote would be missing from another one in silence. On a volume that is there its pod is made again, as
//! often as it must be: it finds what was made there, or it makes it, where the volume is one that was made anew while the
//! old members still ran. Where nothing is left of the seed, the cluster operator gets a cluster without data, which it
//! never begins anew (invariant 7), and the restore fails with the remedy.

use api::EtcdRestore;

use super::abandoned::gives_up;
use super::{Action, IN_THE_WAY, PROMPTLY, Plan, ended, missing, unfit, verified};
use crate::naming;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Another, Child, Life, Pod, PodFacts, Seed, Serving, Snapshot};

/// What a person can do when the seed does not come to serve what was verified, and the old members have stopped.
const REMEDY: &str = "the old members have stopped, and nobody is served: delete this EtcdRestore to go on with what the \
                      seed holds, or to restore another backup after it, with a new EtcdRestore and spec.overwrite: true";

/// What is done when no old member is an endpoint any more.
pub(super) fn join(restore: &EtcdRestore, snapshot: &Snapshot, durable: bool) -> Plan {
    let seed = &snapshot.seed;
    match &seed.pod {
        Pod::Unknown(why) => Plan::wait_for(format!("an answer about the seed's pod: {why}")),
        Pod::Present(pod) if pod.life == Life::Lives && !pod.joined => {
            let waits = hold_back(restore, (pod, durable), snapshot);
            waits.unwrap_or_else(|| Plan::act(Action::Join, "the seed joins the cluster"))
        }
        Pod::Present(pod) if pod.life == Life::Lives => hand_over(),
        // A person who deletes the restore takes what there is.
        Pod::Present(_) | Pod::Absent | Pod::InTheWay if gives_up(restore) => {
            match &seed.pod {
                // So that Services and the cluster operator find it.
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

/// Nobody says that there is anything on the volume but a pod of the seed: the cluster operator's would find that etcd
/// does not start, for ever.
fn on_its_volume(seed: &Seed) -> Plan {
    match &seed.pod {
        // It joined with what was verified, and that is on its volume: the cluster operator clears the pod away.
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

/// Invariant 9: one that was made again, before the old members stopped or on its volume since, joins when it serves what
/// was verified. A person who deletes the restore takes what there is.
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

/// Of one that does not say what it holds.
fn untold(pod: &PodFacts, durable: bool, claim: &Child) -> Option<Plan> {
    let another = unfit::another_pod(pod).filter(|_| durable);
    match (another, claim) {
        // On a volume the next pod says what is there.
        (Some(another), Child::Present) => return Some(another),
        // Invariant 1.
        (Some(_), Child::Unknown(why)) => {
            let what = format!("an answer about the seed's volume claim: {why}");
            return Some(Plan::wait_for(what));
        }
        // In a pod it is the only one there is, and on a volume whose claim is being deleted: that goes with the pod.
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

/// Nobody is served meanwhile. What does not pass by itself is told as a failure, and goes on once it is put right; also
/// what should pass may last, and then a person decides.
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

/// What keeps a step from being made, as far as somebody has to know more of it by now.
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

/// Invariant 10: that it failed is recorded before the claim goes.
fn lost(restore: &EtcdRestore) -> Plan {
    let member = naming::seed(restore).member;
    let message = format!(
        "the seed member {member} was lost after the old members had stopped, and what it held with it; the cluster has \
         no data: restore a backup over it with a new EtcdRestore and spec.overwrite: true"
    );
    let trouble = Trouble::new(Reason::SeedFailed, message.clone());
    Plan::act(Action::Abandon(trouble), &message)
}
