//! Volumes of members that other software removed from etcd: kept as evidence, not deleted as leftovers.
//!
//! Invariant 25: before the operator asks etcd to remove a member, it records the removal on the PVC. A PVC without
//! that note whose member is missing from etcd's list was removed by `--force-new-cluster`, `etcdctl member remove`
//! or a manual restore. That volume may hold the only copy of acknowledged writes, so the operator annotates, reports
//! and keeps the PVC, and starts nothing on it.
//!
//! The PVC is deleted when the cluster has its full size, is healthy, its data were compared, and
//! `spec.memberReplacement.keepVolumes` has passed. If a majority of the voters was missing, only a person deletes
//! it.

use std::collections::BTreeMap;

use jiff::Timestamp;

use crate::plan::Draft;
use crate::plan::actions::{Builder, note_removal};
use crate::plan::age::age;
use crate::plan::compared::holds_the_same;
use crate::plan::conflicts::Earlier;
use crate::plan::member_objects;
use crate::plan::quorum::quorum_of;
use crate::plan::view::View;
use crate::reason::Reason;
use crate::snapshot::{Desired, Disk, Observed, Removal};

/// The PVCs of members that other software removed, by member.
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

/// Annotates, reports and eventually deletes the PVCs.
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
    // Invariant 9.
    if view.is_complete(desired.size) && holds_the_same(view, &mut draft) {
        for (name, _) in over {
            member_objects::discard(name, &mut draft);
        }
    } else {
        draft.problem(Reason::VolumesKept, until(desired, observed, &over));
    }
    draft
}

/// Removes the note from the PVC of a member that etcd lists and that stays.
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
        "someone other than the operator removed {} from etcd's member list; the volume claims are kept and are deleted \
         when all {} members are healthy and hold the same data{until}; to delete them now: kubectl delete pvc {} \
         (EtcdCluster {})",
        names.join(", "),
        desired.size,
        names.join(" "),
        observed.cluster
    )
}

fn by_person(observed: &Observed, names: &[&str]) -> String {
    format!(
        "a majority of the voters is missing from etcd's member list and the operator did not remove them: {}; \
         acknowledged writes may be on their volumes alone, so the volume claims are kept until you delete them; check \
         the cluster's data, restore a backup or one of these volumes if it is incomplete, then: kubectl delete pvc {} \
         (EtcdCluster {}; docs/recovery.md)",
        names.join(", "),
        names.join(" "),
        observed.cluster
    )
}
