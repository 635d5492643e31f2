//! Kubernetes objects that follow the membership: Services, the disruption budget, labels, what is left over.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use api::names::{client_service, disruption_budget, headless_service};
use etcd::ClusterId;
use jiff::Timestamp;

use crate::observed::{
    Cause, Desired, Disk, Intent, Kept, Observed, Pod, Role, Seen, Service, Trouble,
};
use crate::plan::quorum::quorum_of;
use crate::plan::recovery::{Leftover, leftover};
use crate::plan::view::{Data, View};
use crate::plan::{Draft, STEADY, adoption, joining, together};
use crate::write::{Label, Order, Start, Write};

/// How long a pod may take to start before it is worth a word; a large image takes its time.
const SLOW: Duration = Duration::from_secs(20);
/// How long a pod may be without a node before that is a problem; a new node takes its time.
const UNPLACED: Duration = Duration::from_mins(1);

/// The Services of the whole cluster. Clients are let in once the cluster ID is recorded, in the status and on the pods
/// and disks: nothing can be acknowledged through the client Service before.
pub(super) fn shared_services(observed: &Observed, open: bool, draft: &mut Draft) {
    match observed.shared.headless {
        Kept::AsMade(()) => {}
        Kept::Others => taken("Service", &headless_service(&observed.cluster), draft),
        Kept::Missing | Kept::Drifted => draft.order(Order::Writes(vec![Write::ApplyHeadless])),
    }
    if observed.shared.client == Kept::Others {
        taken("Service", &client_service(&observed.cluster), draft);
        return;
    }
    // Clients of a cluster that is taken over go on through the Service as it is.
    if adoption::is_under_way(observed) && observed.shared.client != Kept::Missing {
        return;
    }
    // Invariant 7: whatever is lost from now on, status included, what is left tells that there was a cluster.
    let open = open && (observed.shared.client == Kept::AsMade(true) || is_marked(observed));
    if observed.shared.client != Kept::AsMade(open) {
        if open {
            draft.say("let clients in");
        }
        draft.order(Order::Writes(vec![Write::ApplyClient { open }]));
    }
}

/// Every pod and disk of this cluster carries its ID, and there are some.
fn is_marked(observed: &Observed) -> bool {
    let token = observed.intent.as_ref().map(|intent| &intent.token);
    let pods = observed.pods.values().filter(|pod| pod.stays());
    let pods = pods.map(|pod| (&pod.token, pod.cluster_id));
    let disks = observed.disks.values();
    let disks = disks.filter(|disk| !disk.terminating && !disk.is_evidence());
    let disks = disks.map(|disk| (&disk.token, disk.cluster_id));
    let mut ours = pods
        .chain(disks)
        .filter(|(of, _)| of.as_ref() == token)
        .peekable();
    ours.peek().is_some() && ours.all(|(_, cluster_id)| cluster_id == observed.cluster_id)
}

/// The disruption budget: as many voters as a quorum stay through a drain.
pub(super) fn budget(desired: &Desired, observed: &Observed, view: &View, draft: &mut Draft) {
    let quorum = quorum_of(view.voters().count());
    match observed.shared.budget {
        Kept::Others if desired.budget => {
            let name = disruption_budget(&observed.cluster);
            taken("PodDisruptionBudget", &name, draft);
        }
        Kept::Others => {}
        kept if desired.budget => {
            if kept != Kept::AsMade(quorum) {
                draft.order(Order::Writes(vec![Write::ApplyBudget { quorum }]));
            }
        }
        Kept::Missing => {}
        Kept::Drifted | Kept::AsMade(_) => {
            draft.order(Order::Writes(vec![Write::DeleteBudget]));
        }
    }
}

/// The name of one of the cluster's objects is in use. It is neither changed nor deleted: another cluster may live by
/// it, as the client Service of `db` and the headless one of `db-client` have one name.
fn taken(kind: &str, name: &str, draft: &mut Draft) {
    let text = format!(
        "{kind} {name} is somebody else's and is left alone: delete it if it is not wanted; this cluster goes on \
         without"
    );
    draft.problem("NameTaken", text);
}

/// Owner, role and cluster ID on pods and disks follow what etcd says.
pub(super) fn labels(
    (view, now): (&View, Timestamp),
    intent: &Intent,
    cluster_id: ClusterId,
    draft: &mut Draft,
) {
    for seat in &view.seats {
        let role = match seat.pod.and_then(|pod| pod.role) {
            // Whether it has to be is said last (`aside`).
            Some(role @ Role::Busy { .. }) if seat.votes() => role,
            // Invariant 24.
            Some(Role::Learner) if joining::is_yet_to_serve(seat) => Role::Busy { since: now },
            _ if seat.votes() => Role::Voter,
            _ => Role::Learner,
        };
        let label = |uid: &str, role| Label {
            member: seat.name.clone(),
            uid: uid.to_owned(),
            role,
            token: intent.token.clone(),
            cluster_id: Some(cluster_id),
        };
        if let Some(pod) = seat.pod
            && pod.stays()
            && (!pod.owned
                || pod.token.as_ref() != Some(&intent.token)
                || pod.role != Some(role)
                || pod.cluster_id != Some(cluster_id))
        {
            draft.order(Order::Writes(vec![Write::LabelPod(label(
                &pod.uid,
                Some(role),
            ))]));
        }
        if let Some(disk) = seat.disk
            && !disk.terminating
            && (!disk.owned
                || disk.token.as_ref() != Some(&intent.token)
                || disk.cluster_id != Some(cluster_id))
        {
            draft.order(Order::Writes(vec![Write::LabelDisk(label(
                &disk.uid, None,
            ))]));
        }
    }
}

/// The Service of every member in the list, as long as the member has anything that needs it.
pub(super) fn member_services(
    (observed, now): (&Observed, Timestamp),
    view: &View,
    draft: &mut Draft,
) {
    for seat in &view.seats {
        if seat.data == Data::There {
            let open = together::may_be_reached((observed, now), view, seat);
            let service = observed.services.get(&seat.name);
            // Invariant 26: the mark on the Service of a pod that exists.
            if let Some(service) = service.filter(|it| seat.pod.is_some() && !it.started) {
                draft.order(Order::Writes(vec![mark(&seat.name, service)]));
                continue;
            }
            serve(&seat.name, observed.services.get(&seat.name), open, draft);
        }
    }
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
            draft.order(Order::Writes(vec![write]));
        }
        Some(service) if service.drifted || !service.owned => {
            draft.say(format!("repair the Service of {name}"));
            draft.order(Order::Writes(vec![Write::RepairService {
                member: name.to_owned(),
                uid: service.uid.clone(),
            }]));
        }
        Some(service) if service.closed && open => {
            draft.order(Order::Writes(vec![Write::OpenService {
                member: name.to_owned(),
                uid: service.uid.clone(),
            }]));
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
pub(super) fn pod_on_disk(service: Option<&Service>, start: Start) -> Order {
    let mark = service
        .filter(|service| !service.started)
        .map(|service| mark(&start.member, service));
    Order::Writes(mark.into_iter().chain([Write::CreatePod(start)]).collect())
}

/// Every name a member's object has.
pub(super) fn all_names(observed: &Observed) -> BTreeSet<String> {
    let pods = observed.pods.keys();
    pods.chain(observed.disks.keys())
        .chain(observed.services.keys())
        .cloned()
        .collect()
}

/// Pods, disks and Services of members that are not in the list any more. The list was read after them, so
/// nothing here belongs to a member that has just been added (invariant 5).
pub(super) fn leftovers(
    (desired, observed, now): (&Desired, &Observed, Timestamp),
    view: &View,
    kept: &BTreeMap<&str, &Disk>,
    draft: &mut Draft,
) {
    for name in all_names(observed) {
        if is_reserved(observed, &name) || is_listed(observed, view, &name) {
            continue;
        }
        // Invariant 25.
        if kept.contains_key(name.as_str()) {
            discard_all_but_disk(observed, &name, draft);
            continue;
        }
        match leftover((desired, observed, now), view, &name) {
            Leftover::Ordinary => {}
            Leftover::Stays => continue,
            Leftover::KeepsDisk => {
                discard_all_but_disk(observed, &name, draft);
                continue;
            }
            Leftover::Goes => {
                discard(observed, &name, draft);
                continue;
            }
        }
        // Invariant 7: what carries the ID of another cluster is not ours to delete.
        if let Some(other) = another_cluster(observed, &name) {
            let text = format!(
                "{name} carries the ID of cluster {other} and is left alone; delete it if it is not wanted"
            );
            draft.problem("ForeignObjects", text);
            continue;
        }
        discard(observed, &name, draft);
    }
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
fn discard_all_but_disk(observed: &Observed, name: &str, draft: &mut Draft) {
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
        draft.order(Order::Writes(writes));
    }
}

/// Pods that do not run, and why: each is named, none stops anything else. What is said of several is said once.
pub(super) fn troubles(
    observed: &Observed,
    members: &BTreeSet<String>,
    now: Timestamp,
    draft: &mut Draft,
) {
    let mut said: BTreeMap<(Kind, String), Vec<&str>> = BTreeMap::new();
    let ours = observed
        .pods
        .iter()
        .filter(|(name, pod)| members.contains(*name) && pod.stays());
    for (name, pod) in ours {
        if let Some(what) = trouble(pod, now) {
            said.entry(what).or_default().push(name);
        }
    }
    for ((kind, text), names) in said {
        let message = format!("{}: {text}", names.join(", "));
        match kind {
            Kind::Image => draft.problem("ImageNotAvailable", message),
            Kind::Slow => draft.problem("PodNotStarting", message),
            Kind::Memory => draft.problem("OutOfMemory", message),
            Kind::Failing => draft.problem("ContainerFailing", message),
            Kind::Unschedulable => draft.wait("Unschedulable", message, STEADY),
            Kind::Unplaced => {
                draft.wait("Unschedulable", message.clone(), STEADY);
                draft.problem("Unschedulable", message);
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Image,
    Slow,
    Memory,
    Failing,
    Unschedulable,
    Unplaced,
}

fn trouble(pod: &Pod, now: Timestamp) -> Option<(Kind, String)> {
    let image = &pod.image;
    match &pod.trouble {
        Some(Trouble::Image(text)) => {
            let text = format!(
                "image {image} cannot be had, correct spec.version or spec.repository ({text})"
            );
            Some((Kind::Image, text))
        }
        Some(Trouble::Unschedulable(text)) => {
            // A node may be on its way.
            let kind = if age(pod.created, now) > UNPLACED {
                Kind::Unplaced
            } else {
                Kind::Unschedulable
            };
            Some((
                kind,
                format!("no node takes the pod, add one or correct spec.pod: {text}"),
            ))
        }
        Some(Trouble::Failing(_))
            if pod
                .ending
                .as_ref()
                .is_some_and(|end| end.cause == Cause::Memory) =>
        {
            let text = "etcd took more memory than its limit allows and was ended, raise spec.pod.resources.limits.memory";
            Some((Kind::Memory, text.to_owned()))
        }
        Some(Trouble::Failing(text)) => Some((Kind::Failing, text.clone())),
        None if !pod.running && pod.node.is_some() && age(pod.created, now) > SLOW => {
            let text = format!(
                "the container has not started for more than {} s; if image {image} does not exist, correct \
                 spec.version or spec.repository",
                SLOW.as_secs()
            );
            Some((Kind::Slow, text))
        }
        None => None,
    }
}

/// Whether the pod's etcd may answer at any moment, so that asking often is worth it.
pub(super) fn is_about_to_answer(pod: &Pod, now: Timestamp) -> bool {
    pod.addressed && pod.trouble.is_none() && age(pod.created, now) < SLOW
}

/// How long ago something was.
pub(super) fn age(since: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(since)).unwrap_or_default()
}
