//! Deliberate mistakes that change a whole plan.

use cluster::plan::{Start, State, View};
use cluster::snapshot::{Desired, Intent, Observed, Role};

use crate::writes::{Chain, Plan, Write};

pub(super) fn is_out(role: Role) -> bool {
    matches!(role, Role::Busy { .. })
}

pub(super) fn planned_removal(planned: &Plan) -> bool {
    let change = planned.step.change.as_ref();
    change.is_some_and(|change| {
        change
            .chain
            .iter()
            .any(|write| matches!(write, Write::Remove { .. }))
    })
}

pub(super) fn promote_all(view: &View, planned: &mut Plan) {
    if let Some(change) = &mut planned.step.change
        && matches!(change.chain[..], [Write::Promote { .. }])
    {
        let learners = view.learners().filter(|member| member.serves());
        change.chain = learners
            .map(|member| Write::Promote {
                member: member.name.clone(),
                id: member.id(),
            })
            .collect();
    }
}

pub(super) fn delete_disk_first(observed: &Observed, planned: &mut Plan) {
    let removed = planned.step.change.iter().flat_map(|change| &change.chain);
    let disks = removed.filter_map(|write| {
        let Write::Remove { member, .. } = write else {
            return None;
        };
        let uid = observed.disks.get(member)?.uid.clone();
        Some(vec![Write::DeleteDisk {
            member: member.clone(),
            uid,
        }])
    });
    let disks: Vec<Chain> = disks.collect();
    planned.step.chains.extend(disks);
}

pub(super) fn delete_blindly(observed: &Observed, planned: &mut Plan) {
    if observed.members.known().is_some() || observed.cluster_id.is_none() {
        return;
    }
    let running = |name: &String| observed.pods.get(name).is_some_and(|pod| pod.running);
    for (name, disk) in observed.disks.iter().filter(|(name, _)| !running(name)) {
        let (member, uid) = (name.clone(), disk.uid.clone());
        planned
            .step
            .chains
            .push(vec![Write::DeleteDisk { member, uid }]);
    }
    for (name, pod) in observed.pods.iter().filter(|(name, _)| !running(name)) {
        let (member, uid) = (name.clone(), pod.uid.clone());
        planned
            .step
            .chains
            .push(vec![Write::DeletePod { member, uid }]);
    }
}

pub(super) fn restart_first(desired: &Desired, observed: &Observed, planned: &mut Plan) {
    let Some(intent) = observed
        .intent
        .as_ref()
        .filter(|_| observed.cluster_id.is_none())
    else {
        return;
    };
    for name in intent
        .members
        .iter()
        .filter(|name| !observed.pods.contains_key(*name))
    {
        let Write::CreatePod(start) = first_pod(intent, name) else {
            return;
        };
        let start = Start {
            durable: desired.durable,
            ..start
        };
        let mut writes = vec![Write::CreatePod(start.clone())];
        if start.durable && !observed.disks.contains_key(name) {
            writes.insert(0, Write::CreateDisk(start));
        }
        planned.step.chains.push(writes);
    }
}

pub(super) fn first_pod(intent: &Intent, name: &str) -> Write {
    Write::CreatePod(Start {
        member: name.to_owned(),
        state: State::New,
        initial: intent.members.clone(),
        role: Role::Voter,
        durable: false,
        version: "3.6.16".to_owned(),
        token: intent.token.clone(),
        cluster_id: None,
    })
}
