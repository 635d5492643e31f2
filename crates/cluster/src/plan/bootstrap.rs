//! Plans until the cluster ID is recorded: records the first members and the token, starts the first members, or
//! abandons the bootstrap.
//!
//! Invariant 6: the operator starts a member with state `new` only within the recorded bootstrap, and only once on an
//! empty volume. Invariant 7: no bootstrap starts while a formed cluster may exist.

use std::collections::BTreeSet;

use etcd::{ClusterId, Members};
use jiff::Timestamp;

use crate::clock::age;
use crate::plan::actions::{self, Builder};
use crate::plan::disks::unfit_claim;
use crate::plan::quorum::quorum_of;
use crate::plan::view::{self, Data};
use crate::plan::{
    BLIND, Draft, NewNames, SOON, STEADY, Start, State, adoption, ended, member_objects, objects,
    retained, versions,
};
use crate::reason::Reason;
use crate::snapshot::{Cause, Desired, Intent, Kept, Observed, Pod, Role, Seen};

/// This long after the creation of a first member's pod, the Services select their pods, even if no etcd container
/// runs.
const CLOSED: jiff::SignedDuration = jiff::SignedDuration::from_secs(3);

/// Starts a bootstrap or, if the status has lost its record, records the existing cluster again.
pub(super) fn unrecorded<'a>(
    build: Builder<'a>,
    recorded: Option<ClusterId>,
    names: &mut NewNames,
) -> Draft<'a> {
    let (desired, observed, _) = build.inputs();
    if let Some(adoption) = adoption::adopt(build, recorded) {
        return adoption;
    }
    let mut draft = Draft::new(build);
    let mut traces = traces(observed);
    if traces.len() > 1 {
        // Invariant 36: a token that exists only on volumes of earlier clusters is ignored if another token exists.
        let is_newest = |(token, ..): &Trace| retained::may_be_newest(observed, token);
        if traces.iter().any(is_newest) {
            traces.retain(is_newest);
        }
    }
    if traces.iter().filter(|(.., found)| found.is_some()).count() == 1 {
        // If exactly one token has a cluster ID, the other tokens are ignored, because their clusters never formed.
        traces.retain(|(.., found)| found.is_some());
    }
    if recorded.is_none() {
        // Invariant 6: a token without a cluster ID identifies the cluster only if all first members have objects,
        // because a first member without objects may have run and lost its data. If such a token is ignored, a new
        // bootstrap loses no acknowledged write: clients are served only after the pods have a cluster ID.
        traces.retain(|(_, members, found)| {
            found.is_some() || members.iter().all(|name| view::is_known(observed, name))
        });
    }
    if let [(token, members, found)] = traces.as_slice() {
        let refusal = retained::refuses(build, token).filter(|_| recorded.is_none());
        if let Some(refusal) = refusal {
            return refusal;
        }
        // Invariant 7: the token on pods and PVCs proves an earlier bootstrap, so the operator records this bootstrap
        // again and starts no new bootstrap.
        draft.say(format!("record the cluster of members {}", join(members)));
        let cluster_id = recorded.or(*found);
        // A joined cluster was created by other software, so the operator records no first members.
        let joined = !observed.join.is_empty()
            && cluster_id.is_some_and(|id| adoption::token(observed, id) == *token);
        let intent = Intent {
            token: token.clone(),
            members: if joined {
                BTreeSet::new()
            } else {
                members.clone()
            },
        };
        draft.add(build.record_intent(&intent, cluster_id));
        return draft;
    }
    if !traces.is_empty() || recorded.is_some() {
        let found: BTreeSet<String> = traces
            .into_iter()
            .flat_map(|(_, members, _)| members)
            .collect();
        let what = if found.is_empty() {
            "no pod or PersistentVolumeClaim has a cluster token".to_owned()
        } else {
            format!("found objects of {}", join(&found))
        };
        let text = format!(
            "the status has no record of this cluster, and the existing objects do not identify it ({what}): restore the cluster from a backup with an EtcdRestore, or delete the objects that do not belong to this cluster"
        );
        draft.problem(Reason::IdentityUnknown, text);
        return draft;
    }
    if !observed.recovery.named_before.is_empty() {
        // Invariant 7: the status names members, so a cluster may have existed. The operator starts no bootstrap, even
        // if no object of these members exists.
        let text = format!(
            "the status names members ({}), but none of their objects exists: restore the cluster from a backup with \
             an EtcdRestore, or delete the EtcdCluster and create it again",
            join(&observed.recovery.named_before)
        );
        draft.problem(Reason::IdentityUnknown, text);
        return draft;
    }
    if !observed.strangers.is_empty() {
        // Invariant 7: pods with the labels of this cluster may be members of an existing cluster, even if another
        // object owns them.
        let text = format!(
            "these pods or PersistentVolumeClaims have the labels of this cluster, but do not belong to it: {}. The bootstrap starts when they are deleted",
            observed.strangers.join(", ")
        );
        draft.wait(Reason::StrangersPresent, text, BLIND);
        return draft;
    }
    if let Some(refused) = &desired.refused {
        draft.problem(Reason::NotYetInEffect, refused.clone());
        return draft;
    }
    if let Some(joining) = adoption::join(build, recorded) {
        return joining;
    }
    begin(names, &mut draft);
    draft
}

fn begin(names: &mut NewNames, draft: &mut Draft) {
    let count = draft.build.desired.first;
    draft.say(format!("record the names of the first {count} members"));
    // Invariant 10: the operator records the token and the names of the members before it creates the first object.
    let intent = Intent {
        token: names.token(),
        members: (0..count).map(|_| names.member()).collect(),
    };
    draft.add(draft.build.record_intent(&intent, None));
}

/// Plans while the bootstrap is recorded, but the cluster ID is not.
pub(super) fn unformed<'a>(build: Builder<'a>, intent: &Intent, names: &mut NewNames) -> Draft<'a> {
    let (desired, observed, now) = build.inputs();
    let mut draft = Draft::new(build);
    if let Seen::Known(list) = &observed.members
        && answers_for(list, intent)
    {
        let cluster_id = list.cluster_id;
        draft.say(format!("record cluster ID {cluster_id}"));
        draft.add(build.record_cluster_id(cluster_id));
        draft.join(objects::shared_services(build, false));
        return draft;
    }
    if remember(intent, &mut draft) {
        return draft;
    }
    let first: Vec<(&String, Data)> = intent
        .members
        .iter()
        .map(|name| (name, first_data(observed, name)))
        .collect();
    let usable = |(name, data): &&(&String, Data)| {
        *data != Data::Gone && !is_unusable(desired, observed, name, now)
    };
    let left = first.iter().filter(usable).count();
    let quorum = quorum_of(intent.members.len());
    if let Some(why) = given_up(desired, observed, intent, left, quorum) {
        give_up(&why, names, &mut draft);
        return draft;
    }
    if let Some(refused) = &desired.refused {
        draft.problem(Reason::NotYetInEffect, refused.clone());
        return draft;
    }
    draft.join(objects::shared_services(build, false));
    let kept = observed.shared.budget;
    if desired.budget && kept != Kept::AsMade(quorum) && kept != Kept::Others {
        draft.add(build.apply_budget(quorum));
    }
    discard_others(intent, &mut draft);
    let open = may_reach_each_other(observed, intent, now);
    for (name, data) in &first {
        start_first((build, open), intent, name, *data, &mut draft);
    }
    waiting(intent, quorum, &mut draft);
    draft.join(objects::troubles(build, &intent.members));
    draft
}

/// True if the list contains a first member. Such a list comes from the recorded cluster, because the operator calls
/// only pods with the recorded token.
fn answers_for(list: &Members, intent: &Intent) -> bool {
    let names = list.members.iter().flat_map(|member| &member.peer_urls);
    names
        .filter_map(|url| api::names::member_of_url(url))
        .any(|name| intent.members.contains(name))
}

/// Looks for a cluster ID on pods and volumes. Records an ID of this bootstrap in the status again (invariant 7), and
/// reports the ID of another cluster as a problem. Returns true if an ID was found.
fn remember(intent: &Intent, draft: &mut Draft) -> bool {
    let observed = draft.build.observed;
    let pods = observed
        .pods
        .iter()
        .map(|(name, pod)| (name, &pod.token, pod.cluster_id));
    let disks = observed
        .disks
        .iter()
        .map(|(name, disk)| (name, &disk.token, disk.cluster_id));
    for (name, token, cluster_id) in pods.chain(disks) {
        let Some(cluster_id) = cluster_id else {
            continue;
        };
        if token.as_ref() == Some(&intent.token) {
            draft.say(format!("record cluster ID {cluster_id} found on {name}"));
            draft.add(draft.build.record_cluster_id(cluster_id));
            return true;
        }
        let text = format!(
            "{name} belongs to cluster {cluster_id}, but the status records another bootstrap: no member is started; \
             delete the pod and the PersistentVolumeClaim {name}, or delete the status of the EtcdCluster, so that the \
             operator identifies the cluster again"
        );
        draft.problem(Reason::IdentityUnknown, text);
        return true;
    }
    false
}

fn first_data(observed: &Observed, name: &str) -> Data {
    let (pod, disk) = (observed.pods.get(name), observed.disks.get(name));
    let service = observed.services.get(name);
    match view::data(pod, disk, service, false) {
        // If the Service, the pod and the PVC are all missing, the member was never created, because the operator
        // creates the Service first.
        Data::Gone if service.is_none() && pod.is_none() && disk.is_none() => Data::NeverMade,
        data => data,
    }
}

/// True if the member cannot start, for one of three reasons: its data is damaged; its volume was lost before a pod
/// mounted it; the node of its pod or volume has been lost for `spec.memberReplacement.after`. The bootstrap may then
/// be abandoned without a loss of data, because etcd has acknowledged no write.
fn is_unusable(desired: &Desired, observed: &Observed, name: &str, now: Timestamp) -> bool {
    let Some(pod) = observed.pods.get(name) else {
        return false;
    };
    let lost = pod.lost_since;
    let ending = pod.ending.as_ref().filter(|_| pod.restarts > 1);
    let damaged = ending.is_some_and(|ending| matches!(ending.cause, Cause::Data(_)));
    let bare = observed.disks.get(name).is_some_and(|disk| disk.lost) && !pod.running;
    let now = observed.clock.earlier(now);
    damaged || bare || lost.is_some_and(|since| age(since, now) >= desired.replace_after)
}

/// Why the operator abandons this bootstrap; `None` if the bootstrap continues.
fn given_up(
    desired: &Desired,
    observed: &Observed,
    intent: &Intent,
    left: usize,
    quorum: usize,
) -> Option<String> {
    if left < quorum {
        let all = intent.members.len();
        return Some(format!(
            "{left} of the {all} first members have a usable volume, too few to form a cluster"
        ));
    }
    let running = first_pods(observed, intent).filter(|pod| pod.running);
    if running.count() >= quorum {
        return None; // The first members form the cluster now. The operator applies changes of the spec afterwards.
    }
    let outdated = |pod: &Pod| {
        pod.image != desired.image
            || pod.spec_hash.as_ref() != Some(&desired.spec_hash)
            || pod.difference.resources.is_some()
    };
    if first_pods(observed, intent).any(outdated) || has_unfit_claim(desired, observed, intent) {
        return Some("the spec changed after the first members were created".to_owned());
    }
    let (size, first) = (desired.first, intent.members.len());
    (size != first).then(|| {
        format!("the spec now requests {size} members, but the bootstrap has {first} members")
    })
}

/// True if a PVC of a first member has no volume yet, and cannot be changed to match the spec. Its StorageClass may not
/// exist, and Kubernetes does not allow another class for an existing PVC.
fn has_unfit_claim(desired: &Desired, observed: &Observed, intent: &Intent) -> bool {
    let Some(wanted) = &desired.claim else {
        return false;
    };
    let first = intent.members.iter();
    first
        .filter_map(|name| observed.disks.get(name))
        .any(|disk| disk.claim.capacity.is_none() && unfit_claim(&disk.claim, wanted).is_some())
}

fn give_up(why: &str, names: &mut NewNames, draft: &mut Draft) {
    let text = format!("{why}: the bootstrap starts again with new member names");
    draft.wait(Reason::BootstrapAbandoned, text, SOON);
    if let Some(refused) = &draft.build.desired.refused {
        draft.problem(Reason::NotYetInEffect, refused.clone());
        return;
    }
    begin(names, draft);
}

/// Deletes the remains of an abandoned bootstrap: its pods and PVCs have the token of that bootstrap. Objects without a
/// token were created by other software and may serve clients, so they are kept (invariant 7).
fn discard_others(intent: &Intent, draft: &mut Draft) {
    let observed = draft.build.observed;
    for name in member_objects::all_names(observed) {
        if intent.members.contains(&name) {
            continue;
        }
        let pod = observed.pods.get(&name).map(|pod| &pod.token);
        let disk = observed.disks.get(&name).map(|disk| &disk.token);
        if pod.into_iter().chain(disk).any(Option::is_none) {
            let text = format!(
                "the objects of {name} were not created by this operator and are not changed: delete them if they are not needed"
            );
            draft.problem(Reason::ForeignObjects, text);
            continue;
        }
        member_objects::discard(&name, draft);
    }
}

/// True if the Services of the first members may have endpoints.
///
/// At its start, a first member asks every other member, for one second each, whether the cluster was bootstrapped
/// before. A member that is starting accepts the connection but does not answer. Without endpoints, the connection is
/// refused at once. A running member has finished these requests, so the Services may have endpoints.
///
/// After [`CLOSED`], the Services select their pods even if no etcd container runs yet, so that the bootstrap
/// does not depend on one pod.
fn may_reach_each_other(observed: &Observed, intent: &Intent, now: Timestamp) -> bool {
    let mut pods = first_pods(observed, intent);
    pods.any(|pod| pod.running || pod.restarts > 0 || now.duration_since(pod.created) > CLOSED)
}

fn first_pods<'a>(observed: &'a Observed, intent: &Intent) -> impl Iterator<Item = &'a Pod> {
    let first = intent.members.iter();
    first.filter_map(|name| observed.pods.get(name))
}

fn start_first<'a>(
    (build, open): (Builder<'a>, bool),
    intent: &Intent,
    name: &str,
    data: Data,
    draft: &mut Draft<'a>,
) {
    let (desired, observed, _) = build.inputs();
    let service = observed.services.get(name);
    let start = Start {
        member: name.to_owned(),
        state: State::New,
        initial: intent.members.clone(),
        role: Role::Voter,
        durable: desired.durable || observed.disks.contains_key(name),
        // If a volume exists, the member starts with the version that last used the volume.
        version: match observed.disks.get(name) {
            Some(disk) => versions::noted(desired, observed, Some(disk)),
            None => desired.version.clone(),
        },
        token: intent.token.clone(),
        cluster_id: None,
    };
    match data {
        Data::NeverMade => {
            let closed = !open && intent.members.len() > 1;
            let announces = match service {
                None => build.create_service(name, true, closed),
                Some(service) => actions::mark_service(name, service),
            };
            draft.say(format!("start first member {name}"));
            member_objects::start([announces], &start, draft);
        }
        Data::There => {
            member_objects::serve(name, service, open, draft);
            draft.join(ended::clear(build, [&name.to_owned()]));
            if !observed.pods.contains_key(name) {
                draft.say(format!("start first member {name} on its volume"));
                member_objects::pod_on_disk(service, &start, draft);
            }
        }
        // Invariant 6: the member may have voted before it lost its data, so it never starts again under this name.
        Data::Gone | Data::Elsewhere => {
            let text = format!(
                "{name} lost its volume before the cluster was formed; it is replaced after the cluster has formed"
            );
            draft.wait(Reason::FirstMemberLost, text, STEADY);
        }
    }
}

fn waiting(intent: &Intent, quorum: usize, draft: &mut Draft) {
    let (_, observed, now) = draft.build.inputs();
    let soon = first_pods(observed, intent).filter(|pod| objects::is_about_to_answer(pod, now));
    let soon = soon.count();
    let delay = if soon >= quorum { SOON } else { BLIND };
    let first = intent.members.len();
    // The text omits the number of running members, because each new number would cause a write of the status.
    let text = format!("the cluster forms when {quorum} of its {first} first members run");
    draft.wait(Reason::Bootstrapping, text, delay);
}

/// The first members of the cluster with this token, as its pods and volumes name them.
pub(super) fn first_members(observed: &Observed, token: &str) -> BTreeSet<String> {
    let traces = traces(observed).into_iter();
    let of_token = traces.filter(|(found, ..)| found == token);
    of_token.flat_map(|(_, members, _)| members).collect()
}

/// A token found on pods and PVCs, the members that these objects name, and the cluster ID if an object records it.
type Trace = (String, BTreeSet<String>, Option<ClusterId>);

fn traces(observed: &Observed) -> Vec<Trace> {
    // Each pod and PVC of a first member names all first members, so the result includes members without objects.
    let named = |name: &String, initial: &BTreeSet<String>| {
        let all = std::iter::once(name).chain(initial);
        all.cloned().collect::<BTreeSet<String>>()
    };
    let pods = observed.pods.iter();
    let pods = pods.map(|(name, pod)| (&pod.token, named(name, &pod.initial), pod.cluster_id));
    let disks = observed.disks.iter();
    let disks =
        disks.map(|(name, disk)| (&disk.token, named(name, &disk.initial), disk.cluster_id));
    let mut found: Vec<Trace> = Vec::new();
    for (token, names, cluster_id) in pods.chain(disks) {
        let token = token.clone().unwrap_or_default();
        match found.iter_mut().find(|(known, ..)| *known == token) {
            Some((_, members, id)) => {
                members.extend(names);
                *id = id.or(cluster_id);
            }
            None => found.push((token, names, cluster_id)),
        }
    }
    found
}

fn join(names: &BTreeSet<String>) -> String {
    names
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(", ")
}
