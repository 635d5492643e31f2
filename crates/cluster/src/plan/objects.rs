//! Kubernetes objects that depend on the members: Services, the PodDisruptionBudget, labels, and the objects of removed
//! members.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use api::names::{client_service, disruption_budget, headless_service};
use etcd::ClusterId;
use jiff::Timestamp;

use crate::clock::age;
use crate::plan::actions::{self, Builder};
use crate::plan::quorum::quorum_of;
use crate::plan::recovery::{Leftover, leftover};
use crate::plan::view::{Data, View};
use crate::plan::{
    Draft, Label, STEADY, adoption, concurrent_join, joining, member_objects, retained,
};
use crate::reason::Reason;
use crate::snapshot::{Cause, Claim, Disk, Intent, Kept, Observed, Pod, Role, Trouble};

/// The operator reports a pod that has not started after this time. A large image takes some time to pull.
const SLOW: Duration = Duration::from_secs(20);
/// A pod without a node is a problem after this time. Until then, the cluster autoscaler may be adding a node.
const UNPLACED: Duration = Duration::from_mins(1);
/// Part of the scheduler's message about a pod whose PVC has no volume yet.
const UNBOUND: &str = "unbound immediate PersistentVolumeClaims";

/// Maintains the Services of the whole cluster. The client Service gets endpoints, so that clients can write, only
/// after the cluster ID is recorded in the status and on the pods and volumes.
pub(super) fn shared_services(build: Builder<'_>, open: bool) -> Draft<'_> {
    let observed = build.observed;
    let mut draft = Draft::new(build);
    match observed.shared.headless {
        Kept::AsMade(()) => {}
        Kept::Others => taken("Service", &headless_service(&observed.cluster), &mut draft),
        Kept::Missing | Kept::Drifted => draft.add(build.apply_headless_service()),
    }
    if observed.shared.client == Kept::Others {
        taken("Service", &client_service(&observed.cluster), &mut draft);
        return draft;
    }
    // While the operator adopts a cluster, an existing client Service stays unchanged, so that clients can use it.
    if adoption::is_under_way(observed) && observed.shared.client != Kept::Missing {
        return draft;
    }
    // Invariant 7: clients can write only after all pods and volumes have the cluster ID. If the status is lost later,
    // the IDs on these objects prove that a cluster existed.
    let open = open && (observed.shared.client == Kept::AsMade(true) || is_marked(observed));
    if observed.shared.client != Kept::AsMade(open) {
        if open {
            draft.say("apply the client Service with endpoints, so that clients can connect");
        }
        draft.add(build.apply_client_service(open));
    }
    draft
}

/// True if at least one pod or volume of this cluster exists, and all of them have the cluster ID.
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

/// Maintains the PodDisruptionBudget, so that a node drain leaves a quorum of the voters.
pub(super) fn budget<'a>(build: Builder<'a>, view: &View) -> Draft<'a> {
    let quorum = quorum_of(view.voters().count());
    let (wanted, kept) = (build.desired.budget, build.observed.shared.budget);
    let mut draft = Draft::new(build);
    match (wanted, kept) {
        (true, Kept::Others) => {
            let name = disruption_budget(&build.observed.cluster);
            taken("PodDisruptionBudget", &name, &mut draft);
        }
        (true, kept) if kept != Kept::AsMade(quorum) => draft.add(build.apply_budget(quorum)),
        (false, Kept::Drifted | Kept::AsMade(_)) => draft.add(build.delete_budget()),
        (true, _) | (false, Kept::Others | Kept::Missing) => {}
    }
    draft
}

/// Reports that an object of another owner has the name of an object that this cluster needs. Another cluster may need
/// that object: the client Service of `db` and the headless Service of `db-client` have the same name.
pub(super) fn taken(kind: &str, name: &str, draft: &mut Draft) {
    let text = format!(
        "{kind} {name} belongs to another owner and is not changed, so this cluster runs without it: delete it if it \
         is not needed"
    );
    draft.problem(Reason::NameTaken, text);
}

/// Updates the owner, the role and the cluster ID on pods and volumes, according to etcd's member list.
pub(super) fn labels<'a>(
    build: Builder<'a>,
    view: &View,
    (intent, cluster_id): (&Intent, ClusterId),
) -> Draft<'a> {
    let now = build.now;
    let mut draft = Draft::new(build);
    let retention = retained::notes(build.desired, view);
    for member in &view.members {
        let role = match member.pod.and_then(|pod| pod.role) {
            // A drained voter keeps its role here, because the module `drain` decides whether the voter becomes an
            // endpoint again.
            Some(role @ Role::Busy { .. }) if member.votes() => role,
            // Invariant 24: a member that does not serve clients yet stays out of the endpoints.
            Some(Role::Learner) if joining::is_yet_to_serve(member) => Role::Busy { since: now },
            _ if member.votes() => Role::Voter,
            _ => Role::Learner,
        };
        let label = |uid: &str, role, retention| Label {
            member: member.name.clone(),
            uid: uid.to_owned(),
            role,
            token: intent.token.clone(),
            cluster_id: Some(cluster_id),
            retention,
        };
        if let Some(pod) = member.pod
            && pod.stays()
            && (!pod.owned
                || pod.token.as_ref() != Some(&intent.token)
                || pod.role != Some(role)
                || pod.cluster_id != Some(cluster_id))
        {
            draft.add(build.label_pod(&label(&pod.uid, Some(role), None)));
        }
        if let Some(disk) = member.disk
            && !disk.terminating
            && (!disk.owned
                || disk.token.as_ref() != Some(&intent.token)
                || disk.cluster_id != Some(cluster_id)
                || disk.retention != retention)
        {
            let retention = (disk.retention != retention).then(|| retention.clone());
            draft.add(build.label_volume(&label(&disk.uid, None, retention)));
        }
    }
    draft
}

/// Maintains the Service of every listed member whose data exists.
pub(super) fn member_services<'a>(build: Builder<'a>, view: &View) -> Draft<'a> {
    let (_, observed, now) = build.inputs();
    let mut draft = Draft::new(build);
    for member in &view.members {
        if member.data == Data::There {
            let open = concurrent_join::may_be_reached((observed, now), view, member);
            let service = member.service;
            // Invariant 26: the Service of a member with a pod has the annotation `started`. The operator restores a
            // missing annotation.
            if let Some(service) = service.filter(|it| member.pod.is_some() && !it.started) {
                draft.add(actions::mark_service(&member.name, service));
                continue;
            }
            member_objects::serve(&member.name, service, open, &mut draft);
        }
    }
    draft
}

/// Deletes the pods, volumes and Services of members that etcd no longer lists. The operator creates these objects
/// after it has added the member to etcd, and reads the list last, so an unlisted member was removed (invariant 5).
pub(super) fn leftovers<'a>(
    build: Builder<'a>,
    view: &View,
    kept: &BTreeMap<&str, &Disk>,
) -> Draft<'a> {
    let (desired, observed, now) = build.inputs();
    let mut draft = Draft::new(build);
    for name in member_objects::all_names(observed) {
        if member_objects::is_reserved(observed, &name)
            || member_objects::is_listed(observed, view, &name)
        {
            continue;
        }
        // Invariant 25: the volume of a member that other software removed is kept as evidence, so only its pod and its
        // Service are deleted.
        if kept.contains_key(name.as_str()) {
            member_objects::discard_all_but_disk(&name, &mut draft);
            continue;
        }
        match leftover((desired, observed, now), view, &name) {
            Leftover::Ordinary => {}
            Leftover::Stays => continue,
            Leftover::KeepsDisk => {
                retained::mark_earlier(&name, &mut draft);
                member_objects::discard_all_but_disk(&name, &mut draft);
                continue;
            }
            Leftover::Goes => {
                member_objects::discard(&name, &mut draft);
                continue;
            }
        }
        // Invariant 7: the operator does not delete objects with the ID of another cluster.
        if let Some(other) = member_objects::another_cluster(observed, &name) {
            let text = format!(
                "the objects of {name} have the ID of cluster {other}, so the operator does not change them: delete them if they are not needed"
            );
            draft.problem(Reason::ForeignObjects, text);
            retained::mark_earlier(&name, &mut draft);
            continue;
        }
        if retained::is_outdated(desired, view) {
            member_objects::discard_all_but_disk(&name, &mut draft);
            continue;
        }
        member_objects::discard(&name, &mut draft);
    }
    draft
}

/// Reports why pods do not run. Equal reports of several pods are combined.
pub(super) fn troubles<'a>(build: Builder<'a>, members: &BTreeSet<String>) -> Draft<'a> {
    let (desired, observed, now) = build.inputs();
    let field = match &desired.object.spec.image {
        Some(_) => "spec.image",
        None => "spec.repository",
    };
    let mut draft = Draft::new(build);
    let mut said: BTreeMap<(Kind, String), Vec<&str>> = BTreeMap::new();
    let ours = observed
        .pods
        .iter()
        .filter(|(name, pod)| members.contains(*name) && pod.stays());
    for (name, pod) in ours {
        let claim = observed.disks.get(name).map(|disk| &disk.claim);
        if let Some(what) = trouble(pod, claim, field, now) {
            said.entry(what).or_default().push(name);
        }
    }
    for ((kind, text), names) in said {
        let message = format!("{}: {text}", names.join(", "));
        match kind {
            Kind::Image => draft.problem(Reason::ImageNotAvailable, message),
            Kind::Slow => draft.problem(Reason::PodNotStarting, message),
            Kind::Memory => draft.problem(Reason::OutOfMemory, message),
            Kind::Failing => draft.problem(Reason::ContainerFailing, message),
            Kind::Unschedulable => draft.wait(Reason::Unschedulable, message, STEADY),
            Kind::Unplaced | Kind::Unbound => {
                let reason = if kind == Kind::Unbound {
                    Reason::StorageMissing
                } else {
                    Reason::Unschedulable
                };
                draft.wait(Reason::Unschedulable, message.clone(), STEADY);
                draft.problem(reason, message);
            }
        }
    }
    draft
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Image,
    Slow,
    Memory,
    Failing,
    Unschedulable,
    Unplaced,
    Unbound,
}

/// `field`: the field of the spec that names the image.
fn trouble(
    pod: &Pod,
    claim: Option<&Claim>,
    field: &str,
    now: Timestamp,
) -> Option<(Kind, String)> {
    let image = &pod.image;
    match &pod.trouble {
        Some(Trouble::Image(text)) => Some((Kind::Image, member::pull_problem(image, field, text))),
        Some(Trouble::Unschedulable(text)) => {
            let unbound = claim.filter(|claim| claim.capacity.is_none() && text.contains(UNBOUND));
            let (kind, problem) = unbound.map_or_else(
                || {
                    let problem = "no node accepts the pod: add a node or correct spec.pod";
                    (Kind::Unplaced, problem.to_owned())
                },
                |claim| (Kind::Unbound, no_volume(claim)),
            );
            let is_late = age(pod.created, now) > UNPLACED;
            let kind = if is_late { kind } else { Kind::Unschedulable };
            Some((kind, format!("{problem} ({text})")))
        }
        Some(Trouble::Failing(_))
            if pod
                .ending
                .as_ref()
                .is_some_and(|end| end.cause == Cause::Memory) =>
        {
            let text = "etcd exceeded its memory limit and was killed: increase spec.pod.resources.limits.memory";
            Some((Kind::Memory, text.to_owned()))
        }
        Some(Trouble::Failing(text)) => Some((Kind::Failing, text.clone())),
        None if !pod.running && pod.node.is_some() && age(pod.created, now) > SLOW => {
            let text = format!(
                "the container has not started within {} s: if image {image} does not exist, correct spec.version or \
                 {field}",
                SLOW.as_secs()
            );
            Some((Kind::Slow, text))
        }
        None => None,
    }
}

/// The problem of a PVC without a volume. The operator has no permission to read StorageClasses, so the text names
/// possible causes.
fn no_volume(claim: &Claim) -> String {
    const FIELD: &str = "spec.pod.persistentVolumeClaimSpec.storageClassName";
    let Some(class) = &claim.class else {
        return format!(
            "the PersistentVolumeClaim has no StorageClass: set {FIELD}, or mark a default StorageClass"
        );
    };
    format!(
        "the PersistentVolumeClaim has no volume: if StorageClass {class} does not exist (kubectl get storageclass), set {FIELD} to an existing class; otherwise check the provisioner of the class"
    )
}

/// True if the pod's etcd may answer at any moment, so that frequent requests are useful.
pub(super) fn is_about_to_answer(pod: &Pod, now: Timestamp) -> bool {
    pod.addressed && pod.trouble.is_none() && age(pod.created, now) < SLOW
}
