//! The end of a restore in place, after the old members have stopped: the seed joins the cluster, and the lock is
//! removed.
//!
//! The seed joins the Services when it serves the verified backup. Clients may then write to it, so its volume is never
//! created again, because this would lose the writes. A lost pod is created again on the volume. It restores the backup
//! only if the volume is empty.
//!
//! If the pod and the volume of the seed are both lost, the restore fails. The cluster then has no data, and the
//! cluster operator never bootstraps it again (invariant 7).

use api::EtcdRestore;

use super::abandoned::is_aborted;
use super::{Action, NAME_TAKEN, OUTAGE_POLL, Plan, ended, missing, unfit, verified};
use crate::naming;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Child, Life, OtherBackup, Pod, PodFacts, Seed, Serving, Snapshot};

/// The remedy if the old members have stopped, and the seed does not serve the verified backup.
const REMEDY: &str = "the old members have stopped, and no member serves clients: delete this EtcdRestore to continue with the data of the seed. To restore another backup, create a new EtcdRestore with spec.overwrite: true";

pub(super) fn join(restore: &EtcdRestore, snapshot: &Snapshot, durable: bool) -> Plan {
    let seed = &snapshot.seed;
    match &seed.pod {
        Pod::Unknown(why) => {
            Plan::wait_for(format!("waiting until the seed's pod can be read: {why}"))
        }
        Pod::Present(pod) if pod.life == Life::Active && !pod.joined => {
            let wait = reason_to_wait(restore, (pod, durable), snapshot);
            wait.unwrap_or_else(|| Plan::act(Action::Join, "the seed joins the cluster"))
        }
        Pod::Present(pod) if pod.life == Life::Active => hand_over(),
        // If a user deletes the EtcdRestore, or the restore is abandoned, the cluster continues with the current data
        // of the seed.
        Pod::Present(_) | Pod::Absent | Pod::NameTaken if is_aborted(restore) => {
            match &seed.pod {
                // `Join` adds the labels with which Services and the cluster operator select the pod.
                Pod::Present(pod) if !pod.joined => {
                    Plan::act(Action::Join, "the seed joins the cluster")
                }
                _ => hand_over(),
            }
        }
        Pod::Present(_) | Pod::Absent | Pod::NameTaken if !durable => lost(restore),
        Pod::Present(_) | Pod::Absent | Pod::NameTaken => match &seed.pvc {
            Child::Unknown(why) => Plan::wait_for(format!(
                "waiting until the seed's PersistentVolumeClaim can be read: {why}"
            )),
            Child::Absent | Child::NameTaken => lost(restore),
            Child::Present => on_volume(seed),
        },
    }
}

/// Creates the pod again on the volume of the seed. The cluster operator cannot create this pod: if the volume is
/// empty, the pod must restore the backup, and pods of the cluster operator do not restore backups.
fn on_volume(seed: &Seed) -> Plan {
    match &seed.pod {
        // The volume of a seed that has joined contains the verified backup, so the cluster operator can replace the
        // pod.
        Pod::Present(pod) if pod.joined => hand_over(),
        Pod::Present(pod) => ended::replace(pod),
        Pod::NameTaken => Plan::wait_for(NAME_TAKEN),
        Pod::Absent | Pod::Unknown(_) => {
            let service = missing(&seed.service, "Service", Action::CreateService);
            service.unwrap_or_else(|| {
                Plan::act(Action::CreatePod, "starting the seed member on its volume")
            })
        }
    }
}

fn hand_over() -> Plan {
    Plan::act(
        Action::ReleaseLock,
        "handing the cluster over to the cluster operator",
    )
}

/// Returns a plan if the seed must not join yet, and `None` if it may join. A seed that was created again joins only
/// when it serves the verified backup (invariant 9). After the deletion of the EtcdRestore, the seed joins with its
/// current data.
fn reason_to_wait(
    restore: &EtcdRestore,
    (pod, durable): (&PodFacts, bool),
    snapshot: &Snapshot,
) -> Option<Plan> {
    let (cluster, recorded) = verified(restore).filter(|_| !is_aborted(restore))?;
    match (pod.restored, &pod.other_backup) {
        (_, Some(OtherBackup::Contains(backup))) => {
            return Some(differs(&format!("contains the backup {backup}")));
        }
        (Some(restored), _) if restored != recorded => {
            return Some(differs(&format!(
                "has revision {restored}, but the verified seed had revision {recorded}"
            )));
        }
        (Some(_), _) => {}
        (None, _) => {
            if let Some(wait) = without_report(pod, durable, &snapshot.seed.pvc) {
                return Some(wait);
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
                    "serves revision {revision} with the cluster ID {cluster_id}, but the verified seed had revision \
                     {recorded} and the cluster ID {cluster}"
                ))
            })
        }
        Serving::NotRead | Serving::Differs { .. } => {
            Some(starting(pod, "waiting for the seed member to serve"))
        }
        Serving::Unknown(why) => Some(starting(
            pod,
            &format!("waiting for the seed member to serve: {why}"),
        )),
    }
}

/// Does the same as [`reason_to_wait`] for a pod that has not reported which backup it contains: its container `fetch`
/// has not ended, or the termination message of this container is lost.
fn without_report(pod: &PodFacts, durable: bool, pvc: &Child) -> Option<Plan> {
    let replacement = unfit::pod_replacement(pod).filter(|_| durable);
    match (replacement, pvc) {
        // The pod is replaced, because the next pod reports the data on the volume.
        (Some(replacement), Child::Present) => return Some(replacement),
        // Invariant 1: while the PersistentVolumeClaim cannot be read, the pod is not replaced.
        (Some(_), Child::Unknown(why)) => {
            let answer =
                format!("waiting until the seed's PersistentVolumeClaim can be read: {why}");
            return Some(Plan::wait_for(answer));
        }
        // If the PersistentVolumeClaim is missing or is being deleted, the pod has the only copy of the data, so the
        // pod is not replaced.
        (Some(_), Child::Absent | Child::NameTaken) | (None, _) => {}
    }
    // A pod with `--sha256` checks the backup that it fetches, but not an existing data directory on a volume.
    // Therefore the argument proves that the data is the recorded backup only if the pod has no volume.
    match (pod.report_lost, pod.checks_sha256 && !durable) {
        (true, true) => None,
        (true, false) => Some(stuck(
            "the data of the seed is unknown: the container fetch of the seed's pod succeeded, but the termination \
             message of this container is lost",
        )),
        (false, _) => {
            let verification = "waiting until the seed's pod has fetched and verified the backup";
            Some(starting(pod, verification))
        }
    }
}

/// Waits for the seed while no member serves clients. If the pod has a problem, or has been starting for some time,
/// the message contains the remedy.
fn starting(pod: &PodFacts, what: &str) -> Plan {
    if let Some(trouble) = &pod.trouble {
        return Plan::trouble(&Trouble {
            message: with_remedy(&trouble.message),
            ..trouble.clone()
        });
    }
    if pod.recent {
        let mut plan = Plan::wait_for(what);
        plan.requeue = Some(OUTAGE_POLL);
        return plan;
    }
    Plan::wait_for(with_remedy(what))
}

/// Adds the remedy to a problem if the old members have stopped, because no member then serves clients.
pub fn with_remedy_if_stopped(snapshot: &Snapshot, why: &str) -> String {
    if snapshot.old_members.have_stopped() {
        with_remedy(why)
    } else {
        why.to_owned()
    }
}

fn with_remedy(what: &str) -> String {
    format!("{what}; {REMEDY}")
}

fn differs(how: &str) -> Plan {
    stuck(&format!("the seed was created again and {how}"))
}

fn stuck(what: &str) -> Plan {
    Plan::stuck(Trouble::new(Reason::SeedFailed, with_remedy(what)))
}

/// Records that the restore has failed, because the pod and the data of the seed are lost. The next plan removes the
/// lock (invariant 10).
fn lost(restore: &EtcdRestore) -> Plan {
    let member = naming::seed(restore).member;
    let message = format!(
        "the seed member {member} and its data were lost after the old members had stopped; the cluster has no data: \
         restore a backup with a new EtcdRestore and spec.overwrite: true"
    );
    let trouble = Trouble::new(Reason::SeedFailed, message.clone());
    Plan::act(Action::Abandon(trouble), &message)
}
