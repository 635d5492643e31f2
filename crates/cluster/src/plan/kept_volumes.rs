//! Volumes of members that other software removed from etcd. The operator keeps these volumes as evidence.
//!
//! Invariant 25: before the operator removes a member from etcd, it records the removal on the member's PVC. If etcd's
//! list lacks a member, and its PVC has no such record, other software removed the member: `--force-new-cluster`,
//! `etcdctl member remove`, or a manual restore. The volume may contain the only copy of acknowledged writes, so the
//! operator keeps the PVC and starts no pod on it.
//!
//! The operator deletes the PVC when the cluster has its full size, is healthy, its members have the same data, and
//! `spec.memberReplacement.keepVolumes` has passed. If other software removed a majority of the voters, only a person
//! may delete the PVCs.

use std::collections::BTreeMap;

use jiff::Timestamp;

use crate::clock::age;
use crate::plan::actions::{Builder, note_removal};
use crate::plan::compared::holds_the_same;
use crate::plan::conflicts::Earlier;
use crate::plan::quorum::quorum_of;
use crate::plan::view::View;
use crate::plan::{Draft, member_objects};
use crate::reason::Reason;
use crate::snapshot::{Desired, Disk, Observed, Removal};

/// The PVCs of members that other software removed from etcd, by member.
pub(super) fn find<'a>(observed: &'a Observed, view: &View) -> BTreeMap<&'a str, &'a Disk> {
    let token = observed.intent.as_ref().map(|intent| &intent.token);
    let of_this_cluster = |disk: &Disk| {
        let same_id = disk.cluster_id.is_none() || disk.cluster_id == observed.cluster_id;
        same_id && (disk.token.is_none() || disk.token.as_ref() == token)
    };
    let keeps = |disk: &Disk| match disk.removal {
        Some(Removal::ByOperator) => false,
        Some(Removal::ByOthers { majority: true, .. }) => true,
        Some(Removal::ByOthers { .. }) | None => of_this_cluster(disk),
    };
    let disks = observed.disks.iter();
    disks
        .filter(|(_, disk)| !disk.terminating && keeps(disk))
        .filter(|(name, _)| !member_objects::is_listed(observed, view, name))
        .map(|(name, disk)| (name.as_str(), disk))
        .collect()
}

/// Annotates and reports the kept PVCs. Deletes them when the conditions in the module documentation are met.
pub(super) fn settle<'a>(
    build: Builder<'a>,
    view: &View,
    kept: &BTreeMap<&str, &Disk>,
) -> Draft<'a> {
    let (desired, observed, now) = build.inputs();
    let mut draft = Draft::new(build);
    if kept.is_empty() {
        return draft;
    }
    let majority = kept.len() >= quorum_of(kept.len() + view.voters().count());
    let mut waiting = Vec::new();
    let mut decided_by_person = Vec::new();
    for (name, disk) in kept {
        let (since, was_majority) = match disk.removal {
            Some(Removal::ByOthers { since, majority }) => (since, majority),
            _ => (now, false),
        };
        let majority = majority || was_majority;
        let removal = Some(Removal::ByOthers { since, majority });
        if disk.removal != removal {
            draft.say(format!("keep the volume of {name}"));
            draft.add(note_removal(name, disk, removal));
        }
        if majority {
            decided_by_person.push(*name);
        } else {
            waiting.push((*name, since));
        }
    }
    if !decided_by_person.is_empty() {
        draft.problem(Reason::VolumesKept, by_person(observed, &decided_by_person));
    }
    let is_over = |since: &Timestamp| age(*since, now) >= desired.keep_volumes;
    let (over, early): (Vec<_>, Vec<_>) =
        waiting.into_iter().partition(|(_, since)| is_over(since));
    if !early.is_empty() {
        draft.problem(Reason::VolumesKept, until(desired, observed, &early));
    }
    if over.is_empty() {
        return draft;
    }
    // Invariant 9: a kept volume is deleted only if the cluster is complete and all members have the same data.
    if view.is_complete(desired.size) && holds_the_same(view, &mut draft) {
        for (name, _) in over {
            member_objects::discard(name, &mut draft);
        }
    } else {
        draft.problem(Reason::VolumesKept, until(desired, observed, &over));
    }
    draft
}

/// If a member is still in etcd's list and stays, deletes the record of its removal on its PVC.
pub(super) fn clear<'a>(build: Builder<'a>, view: &View, earlier: &Earlier) -> Draft<'a> {
    let mut draft = Draft::new(build);
    let shrinks = view.staying().count() > build.desired.size;
    if shrinks || !earlier.removed.is_empty() {
        return draft;
    }
    for member in view.staying() {
        if let Some(disk) = member
            .disk
            .filter(|disk| disk.removal.is_some() && !disk.terminating)
        {
            draft.add(note_removal(&member.name, disk, None));
        }
    }
    draft
}

fn until(desired: &Desired, observed: &Observed, kept: &[(&str, Timestamp)]) -> String {
    let names: Vec<&str> = kept.iter().map(|(name, _)| *name).collect();
    let from = kept.iter().map(|(_, since)| *since).max();
    let until = from.and_then(|since| since.checked_add(desired.keep_volumes).ok());
    let until = until.map_or_else(String::new, |until| format!(", not before {until}"));
    format!(
        "other software or a person removed {} from the member list of EtcdCluster {}. The operator deletes the PersistentVolumeClaims of these members when all {} members are healthy and have the same data{until}. To delete them now: kubectl delete pvc {}",
        names.join(", "),
        observed.cluster,
        desired.size,
        names.join(" ")
    )
}

fn by_person(observed: &Observed, names: &[&str]) -> String {
    format!(
        "other software or a person removed a majority of the voters from the member list of EtcdCluster {}: {}. Their volumes may contain the only copy of acknowledged writes, so the operator keeps the PersistentVolumeClaims until you \
         delete them. Check the cluster's data. If data is missing, restore a backup or one of these volumes \
         (docs/recovery.md). Then: kubectl delete pvc {}",
        observed.cluster,
        names.join(", "),
        names.join(" ")
    )
}
