//! `spec.deletionPolicy: BackupThenDelete` ([ADR 41](../../../../docs/adr/0041-backup-before-deletion.md)).
//!
//! Invariant 41: the deletion of the EtcdCluster deletes its data only after a backup of this data, or after a user has
//! waived the backup. Until then, a finalizer holds the deletion, and the PVCs have no owner (invariant 35): if the
//! garbage collector deletes the pods too early, it deletes no volume. After the backup or the waiver, the policy in
//! effect is `Delete` (`plan/effective.rs`): the PVCs get their owner, and then the operator removes the finalizer.

use api::cluster::ClusterChange;
use api::names::{FINALIZER_BACKUP, FINALIZER_FOREGROUND};

use crate::plan::actions::{self, Builder};
use crate::plan::conflicts::Earlier;
use crate::plan::{BLIND, Draft, STEADY, backed_up, blind};
use crate::reason::Reason;
use crate::snapshot::{Desired, Disk, Observed, Pod};

fn has(desired: &Desired, finalizer: &str) -> bool {
    let mut finalizers = desired.object.metadata.finalizers.iter().flatten();
    finalizers.any(|one| one == finalizer)
}

/// Sets the finalizer while the policy needs it, and removes it otherwise. Waits until the plan is empty, because the
/// write changes the resourceVersion of the EtcdCluster, which is the precondition of status records.
pub(super) fn guard(draft: &mut Draft) {
    let desired = draft.build.desired;
    let needed = desired.object.spec.backs_up_before_deletion();
    if needed != has(desired, FINALIZER_BACKUP) && Earlier::of(draft).is_idle {
        let text = "change the finalizer, because spec.deletionPolicy has changed";
        draft.add(actions::set_finalizer(needed, text, None));
    }
}

/// Plans for an EtcdCluster that is being deleted. Returns true if the other phases must keep the members running,
/// because the backup needs them.
pub(super) fn hold(build: Builder<'_>) -> (Draft<'_>, bool) {
    let (desired, observed, _) = build.inputs();
    let mut draft = Draft::new(build);
    if !has(desired, FINALIZER_BACKUP) {
        let text =
            "the EtcdCluster is being deleted; garbage collection deletes the objects that it owns";
        draft.wait(Reason::Deleting, text, STEADY);
        return (draft, false);
    }
    if let Some(why) = nothing_to_back_up(desired, observed) {
        release(why, &mut draft);
        return (draft, false);
    }
    if desired.object.spec.backs_up_before_deletion() {
        let deletes_pods = has(desired, FINALIZER_FOREGROUND);
        if deletes_pods {
            let text = "the foreground deletion deletes the pods first. The operator then starts the members again on \
                        their volumes for the backup";
            draft.wait(Reason::Deleting, text, BLIND);
        }
        if observed.cluster_id.is_none() {
            let text = "the deletion waits until the operator has identified the cluster of the existing pods and \
                        volumes. To continue without a backup, set spec.deletionPolicy to Delete";
            draft.wait(Reason::Deleting, text, STEADY);
            return (draft, !deletes_pods);
        }
        if !backed_up::is_backed_up(&ClusterChange::Deletion, "the deletion", &mut draft) {
            let heals = !deletes_pods && draft.chains.is_empty();
            return (draft, heals);
        }
    }
    // Before the deletion continues, the owner reference of each PVC must match the deletion policy in effect.
    if let Some(intent) = &observed.intent {
        draft.join(blind::own(build, intent, observed.cluster_id));
    }
    if draft.chains.is_empty() {
        release("the data needs no further backup", &mut draft);
    }
    (draft, false)
}

/// Why the deletion destroys no data that a backup could contain. `None` if it destroys data.
///
/// If the namespace is being deleted, the namespace controller deletes all pods and PVCs, and the operator can create
/// no pods. When none of them is left, this function returns a reason, so that the EtcdCluster is deleted.
fn nothing_to_back_up(desired: &Desired, observed: &Observed) -> Option<&'static str> {
    if !observed.pods.values().any(Pod::stays) && !observed.disks.values().any(Disk::stays) {
        return Some("no pod and no volume of a member is left");
    }
    let pods = observed.pods.values().map(|pod| pod.owned);
    let services = observed.services.values().map(|service| service.owned);
    let mut owned = pods.chain(services).peekable();
    // The garbage collector first removes the owner references of all dependents, and then the finalizer `orphan`.
    // Without the finalizer, dependents without owners thus still show the policy.
    let is_orphaned = owned.peek().is_some() && owned.all(|owned| !owned);
    let stay = "with propagation policy Orphan, the pods and volumes stay";
    (has(desired, "orphan") || is_orphaned).then_some(stay)
}

fn release(why: &str, draft: &mut Draft) {
    let text = format!("continue the deletion: {why}");
    let event = Some((Reason::DeletionContinues, "Delete"));
    draft.add(actions::set_finalizer(false, &text, event));
}
