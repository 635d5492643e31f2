//! Plans for a formed cluster without a trustworthy member list.
//!
//! Invariant 1: this module neither adds nor removes a member. It deletes only two kinds of pods: failed pods whose
//! data is on a volume, and the seed of a canceled recovery, which is not a member of this cluster.

use std::collections::BTreeSet;

use etcd::ClusterId;

use crate::plan::actions::Builder;
use crate::plan::{
    BLIND, Draft, Label, NewNames, Start, State, adoption, auth, ended, member_objects, objects,
    recovery, roll, second, versions,
};
use crate::reason::Reason;
use crate::snapshot::{Disk, Intent, Observed, Pod, Role};

/// Plans without a trustworthy member list. Recreates pods on their volumes, because a quorum of volumes is enough for
/// a cluster (invariant 8).
pub(super) fn blind<'a>(
    build: Builder<'a>,
    identity: (&Intent, ClusterId),
    why: &str,
    names: &mut NewNames,
) -> Draft<'a> {
    let (desired, observed, _) = build.inputs();
    let (intent, cluster_id) = identity;
    let mut draft = Draft::new(build);
    draft.join(own(build, intent, Some(cluster_id)));
    let all = observed.pods.keys().chain(observed.disks.keys());
    let initial: BTreeSet<String> = all
        .filter(|name| is_ours(observed, intent, name))
        .cloned()
        .collect();
    let (starts, added) = second::start_added(build, identity);
    draft.join(starts);
    for name in &initial {
        let (pod, disk) = (observed.pods.get(name), observed.disks.get(name));
        let kept = disk.is_some_and(Disk::stays);
        if kept || pod.is_some_and(Pod::stays) {
            member_objects::serve(name, observed.services.get(name), true, &mut draft);
        }
        if kept && pod.is_none() && !added.contains(name) {
            let start = Start {
                member: name.clone(),
                state: State::OnDisk,
                initial: initial.clone(),
                role: Role::Voter,
                durable: true,
                version: versions::noted(desired, observed, disk),
                token: intent.token.clone(),
                cluster_id: Some(cluster_id),
            };
            draft.say(format!("restart {name} on its volume"));
            member_objects::pod_on_disk(observed.services.get(name), &start, &mut draft);
        }
    }
    draft.join(ended::clear(build, &initial));
    draft.join(roll::in_the_dark(build, intent));
    draft.join(objects::troubles(build, &initial));
    // No recovery starts if members reject the operator's login, or if external members may form the quorum.
    if let Some(end) = auth::refused(build).or_else(|| adoption::is_joining(build, why)) {
        draft.join(end);
        return draft;
    }
    if !added.is_empty() && observed.recovery.in_progress().is_none() {
        let text = format!(
            "no quorum of the members answers ({why}); the operator starts members that were added to etcd's list but have not run yet"
        );
        draft.wait(Reason::NoQuorum, text, BLIND);
        return draft;
    }
    draft.join(second::without_volume(build, identity));
    draft.join(recovery::without_quorum(build, identity, why, names));
    draft
}

/// Invariant 7: an object with the ID of another cluster, or with another token, is neither adopted nor started. After
/// a recovery, the volumes of the old cluster have another token.
///
/// Invariant 25: the volume of a member that other software removed from etcd is not adopted, and no pod starts on it.
fn is_ours(observed: &Observed, intent: &Intent, name: &str) -> bool {
    if observed.disks.get(name).is_some_and(Disk::is_evidence) {
        return false;
    }
    let pod = observed.pods.get(name).and_then(|pod| pod.token.as_ref());
    let disk = observed
        .disks
        .get(name)
        .and_then(|disk| disk.token.as_ref());
    let token = pod.or(disk);
    member_objects::another_cluster(observed, name).is_none()
        && token.is_none_or(|token| *token == intent.token)
}

/// Adopts the objects that a deleted EtcdCluster has left, if they have the token of this cluster.
pub(super) fn own<'a>(
    build: Builder<'a>,
    intent: &Intent,
    cluster_id: Option<ClusterId>,
) -> Draft<'a> {
    let observed = build.observed;
    let mut draft = Draft::new(build);
    let label = |name: &str, uid: &str| Label {
        member: name.to_owned(),
        uid: uid.to_owned(),
        role: None,
        token: intent.token.clone(),
        cluster_id,
        retention: None,
    };
    let orphan = |name: &String, owned: bool| !owned && is_ours(observed, intent, name);
    let disks = observed.disks.iter();
    for (name, disk) in disks.filter(|(name, disk)| orphan(name, disk.owned)) {
        draft.add(build.label_volume(&label(name, &disk.uid)));
    }
    let pods = observed.pods.iter();
    for (name, pod) in pods.filter(|(name, pod)| orphan(name, pod.owned)) {
        draft.add(build.label_pod(&label(name, &pod.uid)));
    }
    draft
}
