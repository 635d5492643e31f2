//! The end of a restore in place: the old members have stopped, the seed joins the cluster, the claim goes.
//!
//! From here on nothing of the seed is made again: clients may have found it, and what they wrote would be missing from
//! another one in silence. On a volume it comes back, also where its pod has ended for good: the cluster operator clears
//! that away. Where nothing is left of it, the cluster operator gets a cluster without data, which it never begins anew
//! (invariant 7), and the restore fails with the remedy.

use api::EtcdRestore;
use api::conditions::Reason;

use super::{Plan, Step, in_place, verified};
use crate::naming;
use crate::observed::{Child, Life, Observed, Pod, PodFacts, Trouble};

/// What is done when no old member is an endpoint any more.
pub(super) fn join(restore: &EtcdRestore, observed: &Observed, durable: bool) -> Plan {
    let seed = &observed.seed;
    let goes_on = match &seed.pod {
        Pod::Unknown(why) => {
            return Plan::wait_for(format!("an answer about the seed's pod: {why}"));
        }
        Pod::Present(pod) if pod.life == Life::Lives => {
            return if pod.joined {
                hand_over()
            } else {
                let waits = hold_back(restore, pod);
                waits.unwrap_or_else(|| Plan::step(Step::Join, "the seed joins the cluster"))
            };
        }
        Pod::Present(_) | Pod::Absent | Pod::InTheWay if !durable => false,
        Pod::Present(_) | Pod::Absent | Pod::InTheWay => match &seed.claim {
            Child::Unknown(why) => {
                return Plan::wait_for(format!("an answer about the seed's volume claim: {why}"));
            }
            Child::Present => true,
            Child::Absent | Child::InTheWay => false,
        },
    };
    if !goes_on && !in_place::gives_up(restore) {
        return lost(restore);
    }
    match &seed.pod {
        // So that Services and the cluster operator find it.
        Pod::Present(pod) if !pod.joined => Plan::step(Step::Join, "the seed joins the cluster"),
        _ => hand_over(),
    }
}

fn hand_over() -> Plan {
    Plan::step(Step::ReleaseClaim, "handing the cluster over")
}

/// Invariant 9: one that was made again while the old members stopped joins when it holds what was verified. A person who
/// deletes the restore takes what there is.
fn hold_back(restore: &EtcdRestore, pod: &PodFacts) -> Option<Plan> {
    let (_, recorded) = verified(restore).filter(|_| !in_place::gives_up(restore))?;
    match (pod.restored, &pod.trouble) {
        (Some(restored), _) if restored == recorded => None,
        (Some(restored), _) => Some(Plan::stuck(Trouble::new(
            Reason::SeedFailed,
            format!(
                "the seed was made again and holds revision {restored}, and what was verified is revision {recorded}; \
                 the old members have stopped, and nobody is served: delete this EtcdRestore to go on with what the \
                 seed holds, or to restore another backup after it, with a new EtcdRestore and spec.overwrite: true"
            ),
        ))),
        // What does not pass by itself is told as a failure, and goes on once it is put right.
        (None, Some(trouble)) => Some(Plan::trouble(trouble)),
        (None, None) => Some(Plan::wait_for(
            "the backup to be fetched and verified in the seed's pod",
        )),
    }
}

/// Invariant 10: that it failed is recorded before the claim goes.
fn lost(restore: &EtcdRestore) -> Plan {
    let member = naming::seed(restore).member;
    let message = format!(
        "the seed member {member} was lost after the old members had stopped, and what it held with it; the cluster has \
         no data: restore a backup over it with a new EtcdRestore and spec.overwrite: true"
    );
    let trouble = Trouble::new(Reason::SeedFailed, message.clone());
    Plan::step(Step::Abandon(trouble), &message)
}
