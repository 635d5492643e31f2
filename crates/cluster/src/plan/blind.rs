//! A formed cluster without a trustworthy member list: what may be done all the same, and what is left.
//!
//! Invariant 1: nothing is removed, added or deleted here.

use std::collections::BTreeSet;

use etcd::ClusterId;
use jiff::Timestamp;

use crate::observed::{Desired, Intent, Observed, Pod, Role};
use crate::plan::membership::current_version;
use crate::plan::quorum::quorum_of;
use crate::plan::view::{self, Data};
use crate::plan::{BLIND, Draft, SHORTLY, objects};
use crate::write::{Label, Order, Start, State, Write};

/// No trustworthy member list: nothing is removed, added or deleted (invariant 1). Pods go back on disks,
/// because a quorum of disks is a cluster (invariant 8).
pub(super) fn blind(
    (desired, observed, now): (&Desired, &Observed, Timestamp),
    intent: &Intent,
    cluster_id: ClusterId,
    why: &str,
    draft: &mut Draft,
) {
    own(observed, intent, cluster_id, draft);
    let initial: BTreeSet<String> = observed
        .pods
        .keys()
        .chain(observed.disks.keys())
        .cloned()
        .collect();
    for name in &initial {
        let (pod, disk) = (observed.pods.get(name), observed.disks.get(name));
        let kept = disk.is_some_and(|disk| !disk.terminating);
        if kept || pod.is_some_and(Pod::stays) {
            objects::serve(name, observed.services.get(name), true, draft);
        }
        if kept && pod.is_none() {
            let start = Start {
                member: name.clone(),
                state: State::OnDisk,
                initial: initial.clone(),
                role: Role::Voter,
                durable: true,
                version: current_version(desired, observed),
                token: intent.token.clone(),
                cluster_id: Some(cluster_id),
            };
            draft.say(format!("start {name} again on its disk"));
            draft.order(objects::pod_on_disk(observed.services.get(name), start));
        }
    }
    objects::troubles(observed, &initial, now, draft);
    outlook(observed, why, draft);
}

/// Whether there is a way back without the user.
fn outlook(observed: &Observed, why: &str, draft: &mut Draft) {
    let keeps = |name: &&String| {
        let (pod, disk) = (observed.pods.get(*name), observed.disks.get(*name));
        view::data(pod, disk, observed.services.get(*name), true) == Data::There
    };
    let voters = &observed.reported_voters;
    let left: Vec<&str> = voters.iter().filter(keeps).map(String::as_str).collect();
    let needed = quorum_of(voters.len());
    if voters.is_empty() || left.len() >= needed {
        let soon = observed
            .pods
            .values()
            .any(|pod| pod.addressed && !pod.terminating);
        let look_again = if soon { SHORTLY } else { BLIND };
        draft.wait(
            "NoQuorum",
            format!("no quorum of the members answers ({why}); nothing is changed until it does"),
            look_again,
        );
        return;
    }
    let names = if left.is_empty() {
        "none".to_owned()
    } else {
        left.join(", ")
    };
    let (left, all) = (left.len(), voters.len());
    draft.problem(
        "QuorumLost",
        format!(
            "the data of {left} of {all} voters is left ({names}) and a quorum needs {needed}: the cluster cannot \
             come back by itself; restore it from a backup with an EtcdRestore"
        ),
    );
}

/// Children that were left behind by a deleted object and carry this cluster's token become ours.
fn own(observed: &Observed, intent: &Intent, cluster_id: ClusterId, draft: &mut Draft) {
    let label = |name: &str, uid: &str| Label {
        member: name.to_owned(),
        uid: uid.to_owned(),
        role: None,
        token: intent.token.clone(),
        cluster_id: Some(cluster_id),
    };
    for (name, disk) in observed.disks.iter().filter(|(_, disk)| !disk.owned) {
        draft.order(Order::Writes(vec![Write::LabelDisk(label(
            name, &disk.uid,
        ))]));
    }
    for (name, pod) in observed.pods.iter().filter(|(_, pod)| !pod.owned) {
        draft.order(Order::Writes(vec![Write::LabelPod(label(name, &pod.uid))]));
    }
}
