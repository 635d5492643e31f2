//! The Kubernetes objects of a member, and the actions that create and delete them.

use std::collections::BTreeSet;

use etcd::ClusterId;

use crate::action::Action;
use crate::plan::view::View;
use crate::plan::{Draft, Start, actions};
use crate::reason::Reason;
use crate::snapshot::{Observed, Service};

/// The names of all members with at least one object.
pub(super) fn all_names(observed: &Observed) -> BTreeSet<String> {
    let pods = observed.pods.keys();
    pods.chain(observed.disks.keys())
        .chain(observed.services.keys())
        .cloned()
        .collect()
}

/// True if etcd lists a member of this name, or if the pod of this name runs a listed member.
pub(super) fn is_listed(observed: &Observed, view: &View, name: &str) -> bool {
    if view.members.iter().any(|member| member.name == name) {
        return true;
    }
    let answer = observed.answer(name);
    let answer = answer.filter(|status| status.cluster_id == view.list.cluster_id);
    let mut members = view.list.members.iter();
    members.any(|one| one.name == name || answer.is_some_and(|it| it.member_id == one.id))
}

pub(super) fn another_cluster(observed: &Observed, name: &str) -> Option<ClusterId> {
    let pod = observed.pods.get(name).and_then(|pod| pod.cluster_id);
    let disk = observed.disks.get(name).and_then(|disk| disk.cluster_id);
    pod.or(disk).filter(|id| Some(*id) != observed.cluster_id)
}

/// True if the operator created the Service for a future member, which has no pod and no volume yet. False for a first
/// member, because an earlier pod may have used its name.
pub(super) fn is_reserved(observed: &Observed, name: &str) -> bool {
    let unused = !observed.pods.contains_key(name) && !observed.disks.contains_key(name);
    let service = observed.services.get(name);
    unused
        && !observed.is_first_member(name)
        && service.is_some_and(|service| !service.started && service.owned)
}

/// Creates or repairs the Service of an existing member. `open`: the Service may have endpoints.
pub(super) fn serve(name: &str, service: Option<&Service>, open: bool, draft: &mut Draft) {
    match service {
        None => {
            draft.say(format!("recreate the Service of {name}"));
            draft.add(Action {
                event: Some((Reason::MemberServiceCreated, "Create")),
                ..draft.build.create_service(name, true, false)
            });
        }
        Some(service) if service.drifted || !service.owned => {
            draft.say(format!("repair the Service of {name}"));
            draft.add(draft.build.repair_service(name, &service.uid));
        }
        Some(service) if service.closed && open => {
            draft.add(draft.build.open_service(name, &service.uid));
        }
        Some(_) => {}
    }
}

/// Renews the annotation `started` on the Service of a member that another operator process has begun to start. The
/// renewal changes the resourceVersion, so the other process can no longer remove the annotation. The annotation is
/// renewed only once, because each renewal triggers a reconcile.
pub(super) fn mark_again(name: &str, service: &Service, draft: &Draft) -> Option<Action> {
    (!service.renewed).then(|| draft.build.mark_service_again(name, service))
}

/// Starts a member: adds the actions `first`, then the creation of its PVC, if it has one, and of its pod.
pub(super) fn start(first: impl IntoIterator<Item = Action>, start: &Start, draft: &mut Draft) {
    let rest = draft.build.create_volume_and_pod(start);
    draft.try_chain(rest.map(|rest| first.into_iter().chain(rest).collect()));
}

/// Starts a member on an existing volume, after the actions `first`.
pub(super) fn start_on_disk(
    first: impl IntoIterator<Item = Action>,
    start: &Start,
    draft: &mut Draft,
) {
    let pod = draft.build.create_pod(start);
    draft.try_chain(pod.map(|pod| first.into_iter().chain([pod]).collect()));
}

/// Sets the annotation `started` on the member's Service, and then creates the pod on its existing volume.
pub(super) fn pod_on_disk(service: Option<&Service>, start: &Start, draft: &mut Draft) {
    let mark = service
        .filter(|service| !service.started)
        .map(|service| actions::mark_service(&start.member, service));
    start_on_disk(mark, start, draft);
}

/// Deletes all objects of this name, with the observed UIDs as preconditions.
pub(super) fn discard(name: &str, draft: &mut Draft) {
    let disk = draft
        .build
        .observed
        .disks
        .get(name)
        .filter(|disk| !disk.terminating);
    let disk = disk.map(|disk| actions::delete_volume(name, &disk.uid));
    discard_with(name, disk, draft);
}

/// Deletes all objects of this name except the PVC.
pub(super) fn discard_all_but_disk(name: &str, draft: &mut Draft) {
    discard_with(name, None, draft);
}

fn discard_with(name: &str, disk: Option<Action>, draft: &mut Draft) {
    let observed = draft.build.observed;
    let mut chain = Vec::new();
    if let Some(pod) = observed.pods.get(name)
        && !pod.terminating
    {
        chain.push(actions::delete_pod(name, &pod.uid));
    }
    chain.extend(disk);
    // The Service of a removed member stays as long as its pod exists, because the member needs its Service to connect
    // to other members and to learn that it was removed.
    if let Some(service) = observed.services.get(name)
        && !observed.pods.contains_key(name)
    {
        chain.push(actions::delete_service(name, &service.uid));
    }
    if !chain.is_empty() {
        draft.say(format!("delete the remaining objects of {name}"));
        draft.chain(chain);
    }
}
