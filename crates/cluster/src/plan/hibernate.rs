//! Hibernation: no pods, while volumes, Services and the members' identities stay.
//!
//! Hibernation loses nothing: the cluster returns like a cluster whose pods were all deleted (invariant 8). A
//! hibernating cluster reports no lost quorum and is not recovered.

use api::cluster::RecoveryPhase;

use crate::plan::actions::{self, Builder};
use crate::plan::{Draft, STEADY, objects, recovery};
use crate::reason::Reason;
use crate::snapshot::Disk;

/// Stops the members, or leaves them stopped. Also returns `false` if the cluster does not hibernate, or not yet.
pub(super) fn hibernate(build: Builder<'_>) -> (Draft<'_>, bool) {
    let (desired, observed, _) = build.inputs();
    let mut draft = Draft::new(build);
    if !desired.hibernate {
        return (draft, false);
    }
    let Some(intent) = &observed.intent else {
        // A cluster that lost its status is identified first; that starts nothing.
        if !observed.pods.is_empty() || !observed.disks.is_empty() || observed.cluster_id.is_some()
        {
            return (draft, false);
        }
        let text = "spec.hibernate is true: the cluster is created when it is false";
        draft.wait(Reason::Hibernated, text, STEADY);
        return (draft, true);
    };
    // A bootstrap or recovery in progress finishes first.
    let recovers = observed.recovery.record.as_ref();
    if observed.cluster_id.is_none()
        || recovers.is_some_and(|record| record.phase == RecoveryPhase::InProgress)
    {
        return (draft, false);
    }
    // Invariant 9: only members whose data is on a volume that stays are stopped.
    let at_risk: Vec<&str> = observed
        .pods
        .iter()
        .filter(|(name, pod)| {
            let disk = observed.disks.get(*name);
            !(pod.durable && disk.is_some_and(Disk::stays))
        })
        .filter(|(_, pod)| pod.stays())
        .map(|(name, _)| name.as_str())
        .collect();
    if !at_risk.is_empty() {
        let text = format!(
            "spec.hibernate is true, but these members would lose their data because they have no lasting volume: \
             {}; they are stopped after members with volumes have replaced them",
            at_risk.join(", ")
        );
        draft.problem(Reason::HibernationRefused, text);
        return (draft, false);
    }
    // Without a volume there is no data to return to: this is a lost quorum and is reported as one.
    let serves_again = |disk: &Disk| disk.stays() && !disk.is_evidence();
    if !observed.disks.values().any(serves_again) {
        return (draft, false);
    }
    let open = recovery::lets_clients_in(observed, intent);
    draft.join(objects::shared_services(build, open));
    // All members stop together: the rest would have no quorum anyway.
    for (member, pod) in observed.pods.iter().filter(|(_, pod)| !pod.terminating) {
        draft.say(format!("stop {member}"));
        draft.add(actions::delete_pod(member, &pod.uid));
    }
    if observed.pods.is_empty() {
        let text = "spec.hibernate is true: no member runs, and the volumes are kept; the same cluster starts again \
         when it is false";
        draft.wait(Reason::Hibernated, text, STEADY);
    } else {
        let text = "spec.hibernate is true: the members are being stopped";
        draft.wait(Reason::Hibernating, text, STEADY);
    }
    (draft, true)
}
