//! Parts of the spec that are applied to running pods in place: labels and annotations at once, CPU and memory one
//! member at a time. `roll` handles changes that need a new pod.

use crate::plan::conflicts::Earlier;
use crate::plan::view::{MemberState, View};
use crate::plan::{Draft, SHORTLY, STEADY, actions, versions};
use crate::reason::Reason;
use crate::snapshot::{Desired, Observed, Pod};

/// Applies labels and annotations. They restart nothing and have no precondition.
pub(super) fn metadata(view: &View, draft: &mut Draft) {
    for (seat, pod) in staying(view) {
        if let Some(patch) = &pod.difference.metadata {
            draft.say(format!(
                "change labels and annotations of the pod of {}",
                seat.name
            ));
            draft.add(actions::change_metadata(&seat.name, &pod.uid, patch));
        }
    }
}

/// Invariant 26: the version on a volume is that of the pod that has it mounted. During a version change, the volume
/// is written before the pod.
pub(super) fn volume_versions(
    (desired, observed): (&Desired, &Observed),
    view: &View,
    draft: &mut Draft,
) {
    let target = versions::course(desired, observed).target;
    for (seat, pod) in staying(view) {
        let disk = seat.disk.filter(|disk| !disk.terminating);
        let made_for = versions::made_for(pod);
        let is_changed = target.is_some() && made_for != target;
        let version = made_for.map(|version| version.to_string());
        if let (Some(disk), Some(version)) = (disk, version)
            && pod.ready
            && !is_changed
            && disk.version.as_ref() != Some(&version)
        {
            draft.add(actions::note_version(&seat.name, &disk.uid, &version));
        }
    }
}

/// Resizes CPU and memory. A resize normally restarts nothing, but a limit below the current usage ends the
/// container. So members are resized one at a time, and only while the quorum would survive such a restart (invariant
/// 18). A member that does not serve is resized at once: too little memory may be the cause.
pub(super) fn resources(view: &View, earlier: &Earlier, draft: &mut Draft) {
    for (seat, pod) in staying(view) {
        if let Some(resizing) = &pod.difference.resizing {
            let reason = if resizing.deferred {
                Reason::ResizeDeferred
            } else {
                Reason::Resizing
            };
            let text = format!(
                "the node of {} has not given it its CPU and memory yet: {}",
                seat.name, resizing.message
            );
            draft.wait(reason, text, STEADY);
        }
    }
    let differs = |(_, pod): &(&MemberState, &Pod)| pod.difference.resources.is_some();
    let mut all: Vec<(&MemberState, &Pod)> = staying(view).filter(differs).collect();
    all.sort_by_key(|(seat, _)| (seat.serves(), seat.votes(), Some(seat.id()) == view.leader));
    let Some((seat, pod)) = all.first() else {
        return;
    };
    // Invariant 24: the quorum may count on a member that follows and does not serve yet. A learner counts if it is
    // promoted in this step.
    let counts = seat.serves() || (seat.is_joining() && seat.votes());
    if (counts || seat.is_joining()) && earlier.disturbs_members {
        return;
    }
    if counts && !may_disturb(view, seat, draft) {
        return;
    }
    if let Some(patch) = &pod.difference.resources {
        draft.say(format!("change CPU and memory of {}", seat.name));
        draft.add(actions::resize_pod(&seat.name, &pod.uid, patch));
    }
}

fn may_disturb(view: &View, next: &MemberState, draft: &mut Draft) -> bool {
    let busy = |(_, pod): &(&MemberState, &Pod)| {
        let resizing = pod.difference.resizing.as_ref();
        resizing.is_some_and(|resizing| !resizing.deferred)
    };
    if let Some((seat, _)) = staying(view).find(busy) {
        let text = format!(
            "CPU and memory of {} are changed when {} has got its own",
            next.name, seat.name
        );
        draft.wait(Reason::Resizing, text, SHORTLY);
        return false;
    }
    if let Some(seat) = view.voters().find(|seat| !seat.is_healthy()) {
        let text = format!(
            "CPU and memory of {} are changed when {} is healthy",
            next.name, seat.name
        );
        draft.wait(Reason::VoterNotHealthy, text, STEADY);
        return false;
    }
    true
}

fn staying<'v, 'a>(view: &'v View<'a>) -> impl Iterator<Item = (&'v MemberState<'a>, &'a Pod)> {
    let seats = view.seats.iter();
    seats.filter_map(|seat| Some((seat, seat.pod.filter(|pod| pod.stays())?)))
}
