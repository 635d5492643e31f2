//! The objects of one member: which there are, and the writes that make and delete them.

use std::collections::BTreeSet;

use etcd::ClusterId;

use crate::plan::Draft;
use crate::plan::view::View;
use crate::snapshot::{Observed, Seen, Service};
use crate::write::{Start, Write};

/// Every name a member's object has.
pub(super) fn all_names(observed: &Observed) -> BTreeSet<String> {
    let pods = observed.pods.keys();
    pods.chain(observed.disks.keys())
        .chain(observed.services.keys())
        .cloned()
        .collect()
}

/// Whether etcd lists a member of this name, or the pod's etcd answers as one, whatever its peer URLs are.
pub(super) fn is_listed(observed: &Observed, view: &View, name: &str) -> bool {
    if view.seats.iter().any(|seat| seat.name == name) {
        return true;
    }
    let answer = observed.statuses.get(name).and_then(Seen::known);
    let answer = answer.filter(|status| status.cluster_id == view.list.cluster_id);
    let mut members = view.list.members.iter();
    members.any(|one| one.name == name || answer.is_some_and(|it| it.member_id == one.id))
}

pub(super) fn another_cluster(observed: &Observed, name: &str) -> Option<ClusterId> {
    let pod = observed.pods.get(name).and_then(|pod| pod.cluster_id);
    let disk = observed.disks.get(name).and_then(|disk| disk.cluster_id);
    pod.or(disk).filter(|id| Some(*id) != observed.cluster_id)
}

/// A Service made for a member to come: no mark, no pod, no disk, and not a first member's, whose name was used.
pub(super) fn is_reserved(observed: &Observed, name: &str) -> bool {
    if observed
        .intent
        .as_ref()
        .is_some_and(|intent| intent.members.contains(name))
    {
        return false;
    }
    let unused = !observed.pods.contains_key(name) && !observed.disks.contains_key(name);
    unused
        && observed
            .services
            .get(name)
            .is_some_and(|service| !service.started && service.owned)
}

/// Makes or repairs the Service of a member that is there; `open`: it is to have endpoints.
pub(super) fn serve(name: &str, service: Option<&Service>, open: bool, draft: &mut Draft) {
    match service {
        None => {
            draft.say(format!("make the Service of {name} again"));
            let write = Write::CreateService {
                member: name.to_owned(),
                started: true,
                closed: false,
            };
            draft.write(write);
        }
        Some(service) if service.drifted || !service.owned => {
            draft.say(format!("repair the Service of {name}"));
            draft.write(Write::RepairService {
                member: name.to_owned(),
                uid: service.uid.clone(),
            });
        }
        Some(service) if service.closed && open => {
            draft.write(Write::OpenService {
                member: name.to_owned(),
                uid: service.uid.clone(),
            });
        }
        Some(_) => {}
    }
}

/// The mark that from now on a pod may have been made.
pub(super) fn mark(name: &str, service: &Service) -> Write {
    let over = Some(service.resource_version.clone());
    Write::MarkService {
        member: name.to_owned(),
        started: true,
        over,
    }
}

/// The mark once more, before a member is started whose start somebody else has begun and may mean to take back.
/// Once: each is a change, which would be looked at at once where what follows it is refused.
pub(super) fn mark_again(name: &str, service: &Service) -> Option<Write> {
    (!service.renewed).then(|| Write::RenewMark {
        member: name.to_owned(),
        over: service.resource_version.clone(),
    })
}

/// The last two writes of a start: the disk, where there is one, then the pod.
pub(super) fn disk_and_pod(start: Start) -> Vec<Write> {
    if start.durable {
        vec![Write::CreateDisk(start.clone()), Write::CreatePod(start)]
    } else {
        vec![Write::CreatePod(start)]
    }
}

/// A pod on a disk that is there. The mark is set before it, as before every pod.
pub(super) fn pod_on_disk(service: Option<&Service>, start: Start) -> Vec<Write> {
    let mark = service
        .filter(|service| !service.started)
        .map(|service| mark(&start.member, service));
    mark.into_iter().chain([Write::CreatePod(start)]).collect()
}

/// Deletes what there is under this name: exactly the objects that were seen.
pub(super) fn discard(observed: &Observed, name: &str, draft: &mut Draft) {
    let disk = observed.disks.get(name).filter(|disk| !disk.terminating);
    let disk = disk.map(|disk| Write::DeleteDisk {
        member: name.to_owned(),
        uid: disk.uid.clone(),
    });
    discard_with(observed, name, disk, draft);
}

/// The same without its disk.
pub(super) fn discard_all_but_disk(observed: &Observed, name: &str, draft: &mut Draft) {
    discard_with(observed, name, None, draft);
}

fn discard_with(observed: &Observed, name: &str, disk: Option<Write>, draft: &mut Draft) {
    let mut writes = Vec::new();
    if let Some(pod) = observed.pods.get(name)
        && !pod.terminating
    {
        writes.push(Write::DeletePod {
            member: name.to_owned(),
            uid: pod.uid.clone(),
        });
    }
    writes.extend(disk);
    // The name stays resolvable as long as the pod does: a removed member still hears that it was removed.
    if let Some(service) = observed.services.get(name)
        && !observed.pods.contains_key(name)
    {
        writes.push(Write::DeleteService {
            member: name.to_owned(),
            uid: service.uid.clone(),
        });
    }
    if !writes.is_empty() {
        draft.say(format!("delete what is left of {name}"));
        draft.chain(writes);
    }
}
