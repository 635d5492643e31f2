//! Applies settings of the spec to running pods in place: labels and annotations at once, CPU and memory one member at
//! a time. `roll` handles changes that need a new pod.

use api::version::EtcdVersion;

use crate::plan::actions::{self, Builder};
use crate::plan::conflicts::Earlier;
use crate::plan::view::{MemberState, View};
use crate::plan::{Draft, SHORTLY, STEADY, versions};
use crate::reason::Reason;
use crate::snapshot::Pod;

/// Applies labels and annotations in any state of the cluster, because this restarts no container.
pub(super) fn metadata<'a>(build: Builder<'a>, view: &View) -> Draft<'a> {
    let mut draft = Draft::new(build);
    for (member, pod) in staying(view) {
        if let Some(patch) = &pod.difference.metadata {
            draft.say(format!(
                "change labels and annotations of the pod of {}",
                member.name
            ));
            draft.add(actions::change_metadata(&member.name, &pod.uid, patch));
        }
    }
    draft
}

/// Invariant 26: if a volume records another version or image than its pod has, records the version and the image of
/// the pod.
///
/// Invariant 30: when a member serves with its pod's version, removes the record of the version that served before.
pub(super) fn volume_versions<'a>(build: Builder<'a>, view: &View) -> Draft<'a> {
    let mut draft = Draft::new(build);
    let target = versions::course(build.desired, build.observed).target;
    for (member, pod) in staying(view) {
        let disk = member.disk.filter(|disk| !disk.terminating);
        let (Some(disk), Some(made_for)) = (disk, versions::made_for(pod)) else {
            continue;
        };
        let is_changed = target.as_ref().is_some_and(|target| *target != made_for);
        // The version in etcd's answer is checked too, because the container of a ready pod may still have the image
        // from before a change.
        let answer = build.observed.answer(&member.name);
        let runs = answer.and_then(|status| EtcdVersion::parse(&status.version).ok());
        let image = Some(pod.image.as_str()).filter(|image| image.contains('@'));
        // After an interrupted change, the PVC can record an image that never ran. The record is corrected only while
        // the pod has the image of the spec, because `roll` records the next image before it changes the pod.
        let wanted = build.desired.object.spec.image_for(&made_for);
        let is_stale = wanted.as_ref() == Some(&pod.image) && disk.image.as_deref() != image;
        let is_outdated = (disk.served.is_some() || is_stale) && runs.as_ref() == Some(&made_for);
        let version = made_for.to_string();
        if pod.ready && !is_changed && (disk.version.as_ref() != Some(&version) || is_outdated) {
            let on = (member.name.as_str(), disk.uid.as_str());
            draft.add(actions::note_version(on, (&version, image), None));
        }
    }
    draft
}

/// Resizes CPU and memory. A memory limit below the current usage kills the container, so the operator resizes one
/// member at a time, and only while the quorum would survive a restart (invariant 18). A member that does not serve is
/// resized at once, because too little memory may be the cause.
pub(super) fn resources<'a>(build: Builder<'a>, view: &View, earlier: &Earlier) -> Draft<'a> {
    let mut draft = Draft::new(build);
    for (member, pod) in staying(view) {
        if let Some(resizing) = &pod.difference.resizing {
            let reason = if resizing.deferred {
                Reason::ResizeDeferred
            } else {
                Reason::Resizing
            };
            let text = format!(
                "the node of {} has not applied the change of CPU and memory yet: {}",
                member.name, resizing.message
            );
            draft.wait(reason, text, STEADY);
        }
    }
    let differs = |(_, pod): &(&MemberState, &Pod)| pod.difference.resources.is_some();
    let mut all: Vec<(&MemberState, &Pod)> = staying(view).filter(differs).collect();
    all.sort_by_key(|(member, _)| {
        (
            member.serves(),
            member.votes(),
            Some(member.id()) == view.leader,
        )
    });
    let Some((member, pod)) = all.first() else {
        return draft;
    };
    // Invariant 24: a joining voter counts like a serving member, because the quorum may depend on it. A joining
    // learner only waits while other actions of the plan disturb members, because they may promote the learner.
    let counts = member.serves() || (member.is_joining() && member.votes());
    if (counts || member.is_joining()) && earlier.disturbs_members {
        return draft;
    }
    if counts && !may_disturb(view, member, &mut draft) {
        return draft;
    }
    if let Some(patch) = &pod.difference.resources {
        draft.say(format!("change CPU and memory of {}", member.name));
        draft.add(actions::resize_pod(&member.name, &pod.uid, patch));
    }
    draft
}

fn may_disturb(view: &View, next: &MemberState, draft: &mut Draft) -> bool {
    let busy = |(_, pod): &(&MemberState, &Pod)| {
        let resizing = pod.difference.resizing.as_ref();
        resizing.is_some_and(|resizing| !resizing.deferred)
    };
    if let Some((member, _)) = staying(view).find(busy) {
        let text = format!(
            "the operator changes CPU and memory of {} when {} has its new CPU and memory",
            next.name, member.name
        );
        draft.wait(Reason::Resizing, text, SHORTLY);
        return false;
    }
    if let Some(member) = view.voters().find(|member| !member.is_healthy()) {
        let text = format!(
            "the operator changes CPU and memory of {} when {} is healthy",
            next.name, member.name
        );
        draft.wait(Reason::VoterNotHealthy, text, STEADY);
        return false;
    }
    true
}

fn staying<'v, 'a>(view: &'v View<'a>) -> impl Iterator<Item = (&'v MemberState<'a>, &'a Pod)> {
    let members = view.members.iter();
    members.filter_map(|member| Some((member, member.pod.filter(|pod| pod.stays())?)))
}
