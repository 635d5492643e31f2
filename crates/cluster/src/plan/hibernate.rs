//! Hibernation: the cluster has no pods, but keeps its volumes, its Services and the identities of its members. It
//! resumes like a cluster whose pods were all deleted, so no data is lost (invariant 8).

use crate::plan::actions::{self, Builder};
use crate::plan::{Draft, STEADY, blind, objects, recovery};
use crate::reason::Reason;
use crate::snapshot::Disk;

/// Stops the members, or keeps them stopped. Returns true if the cluster hibernates now.
pub(super) fn hibernate(build: Builder<'_>) -> (Draft<'_>, bool) {
    let (desired, observed, _) = build.inputs();
    let mut draft = Draft::new(build);
    if !desired.hibernate {
        return (draft, false);
    }
    let Some(intent) = &observed.intent else {
        // Objects without a recorded bootstrap show that the status is lost. The operator first identifies the cluster
        // from these objects, without starting a member. It hibernates the cluster later.
        if !observed.pods.is_empty() || !observed.disks.is_empty() || observed.cluster_id.is_some()
        {
            return (draft, false);
        }
        let text =
            "spec.hibernate is true: the operator creates the cluster when spec.hibernate is false";
        draft.wait(Reason::Hibernated, text, STEADY);
        return (draft, true);
    };
    // The operator stops no member before a bootstrap or a recovery in progress is complete.
    if observed.cluster_id.is_none() || observed.recovery.in_progress().is_some() {
        return (draft, false);
    }
    // Invariant 9: the operator stops a member only if its data is on a volume that stays.
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
            "spec.hibernate is true, but these members would lose their data, because they have no volume or a volume that is being deleted: {}. The operator first replaces these members by members with volumes, and then stops all members",
            at_risk.join(", ")
        );
        draft.problem(Reason::HibernationRefused, text);
        return (draft, false);
    }
    // A cluster without a usable volume is not hibernated, because it could not resume.
    let serves_again = |disk: &Disk| disk.stays() && !disk.is_evidence();
    if !observed.disks.values().any(serves_again) {
        return (draft, false);
    }
    // Invariant 35: retained PVCs must have no owner. `own` removes owners that an earlier deletion policy required.
    if desired.object.spec.retains_volumes() {
        draft.join(blind::own(build, intent, observed.cluster_id));
    }
    let open = recovery::lets_clients_in(observed, intent);
    draft.join(objects::shared_services(build, open));
    // The operator stops all members at once. To stop them one after another would be no safer, because the last
    // members never have a quorum.
    for (member, pod) in observed.pods.iter().filter(|(_, pod)| !pod.terminating) {
        draft.say(format!("stop {member}"));
        draft.add(actions::delete_pod(member, &pod.uid));
    }
    if observed.pods.is_empty() {
        let text = "spec.hibernate is true: no member runs, and the volumes are kept; the same cluster starts again when spec.hibernate is false";
        draft.wait(Reason::Hibernated, text, STEADY);
    } else {
        let text = "spec.hibernate is true: the members are being stopped";
        draft.wait(Reason::Hibernating, text, STEADY);
    }
    (draft, true)
}
