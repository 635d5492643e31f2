//! Volumes that outlive their EtcdCluster: `spec.deletionPolicy: RetainVolumes`
//! ([ADR 39](../../../../docs/adr/0039-retained-volumes.md)).
//!
//! Invariant 35: a retained PVC has no owner, so garbage collection never deletes it. The volumes stay even if a person
//! deletes the EtcdCluster while no operator runs. The PVC has all records that a later EtcdCluster of the same name
//! needs: the token, the cluster ID, the version, the voters and the TLS settings.
//!
//! Invariant 36: a later EtcdCluster continues only the newest cluster, and only with the volumes of a quorum.

use std::collections::BTreeSet;

use api::names::ANNOTATION_VOTERS;

use crate::action::Action;
use crate::plan::actions::{Builder, note_removal};
use crate::plan::quorum::quorum_of;
use crate::plan::view::View;
use crate::plan::{BLIND, Draft};
use crate::reason::Reason;
use crate::snapshot::{Desired, Disk, Observed, Removal, RetentionNotes};

/// The records that the PVCs of the members must have. Empty if the spec does not retain volumes.
pub(super) fn notes(desired: &Desired, view: &View) -> RetentionNotes {
    let spec = &desired.object.spec;
    if !spec.retains_volumes() {
        return RetentionNotes::default();
    }
    RetentionNotes {
        voters: view.voters().map(|member| member.name.clone()).collect(),
        tls: serde_json::to_string(&spec.tls).ok(),
    }
}

/// True if a PVC of a member has outdated records. While true, the operator deletes no volume: the records could name a
/// removed voter whose volume is deleted, and a later EtcdCluster would not start without this voter.
pub(super) fn is_outdated(desired: &Desired, view: &View) -> bool {
    let notes = notes(desired, view);
    let mut disks = view.members.iter().filter_map(|member| member.disk);
    disks.any(|disk| !disk.terminating && disk.retention != notes)
}

/// Invariant 36: records on the PVC of an earlier cluster that no member may start on it. The cluster before a recovery
/// or a restore is an earlier cluster. The rules for the deletion of the PVC do not change.
pub(super) fn mark_earlier(name: &str, draft: &mut Draft) {
    let (desired, observed, now) = draft.build.inputs();
    let Some(disk) = observed.disks.get(name) else {
        return;
    };
    let token = observed.intent.as_ref().map(|intent| &intent.token);
    let is_earlier = disk.token.as_ref() != token
        && disk
            .cluster_id
            .is_some_and(|id| Some(id) != observed.cluster_id);
    let retains = desired.object.spec.retains_volumes();
    if !retains || !is_earlier || disk.terminating || disk.is_evidence() {
        return;
    }
    let removal = Removal::ByOthers {
        since: now,
        majority: false,
    };
    draft.add(Action {
        text: format!(
            "record on the PersistentVolumeClaim of {name} that it belongs to an earlier cluster"
        ),
        event: None,
        ..note_removal(name, disk, Some(removal))
    });
}

/// Invariant 36: true if a pod or a usable PVC has this token, so that it may be the token of the newest cluster.
pub(super) fn may_be_newest(observed: &Observed, token: &str) -> bool {
    let pods = observed.pods.values().map(|pod| &pod.token);
    let disks = observed.disks.values().filter(|disk| !disk.is_evidence());
    let mut tokens = pods.chain(disks.map(|disk| &disk.token));
    tokens.any(|of| of.as_deref().unwrap_or_default() == token)
}

/// Returns a draft with the obstacle if no member of this cluster may start on its retained volume; otherwise `None`.
/// While a pod of the cluster exists, the cluster was not deleted, so nothing is refused.
pub(super) fn refuses<'a>(build: Builder<'a>, token: &str) -> Option<Draft<'a>> {
    let observed = build.observed;
    let of_token = |disk: &&Disk| disk.token.as_deref() == Some(token);
    let mut disks = observed.disks.values().filter(of_token).peekable();
    if !observed.pods.is_empty() || disks.peek().is_none() {
        return None;
    }
    let mut draft = Draft::new(build);
    let is_pod = |other: &&String| other.starts_with("pod ");
    let old = observed.strangers.iter().filter(is_pod);
    let old: Vec<&str> = old.map(String::as_str).collect();
    if !old.is_empty() {
        // The members wait, because their new pods need the names of the pods that the deleted EtcdCluster has left.
        let text = format!(
            "these pods have the labels of this cluster, but do not belong to it: {}. The members start on the \
             retained volumes when these pods are deleted",
            old.join(", ")
        );
        draft.wait(Reason::StrangersPresent, text, BLIND);
        return Some(draft);
    }
    let lists = disks.map(|disk| &disk.retention.voters);
    let lists: BTreeSet<&BTreeSet<String>> = lists.filter(|voters| !voters.is_empty()).collect();
    let is_usable = |name: &&String| {
        let disk = observed.disks.get(*name).filter(of_token);
        disk.is_some_and(|disk| disk.stays() && !disk.is_evidence())
    };
    let is_enough = |voters: &&BTreeSet<String>| {
        voters.iter().filter(is_usable).count() >= quorum_of(voters.len())
    };
    // The voter lists on the PVCs can differ after an interrupted change. The members start if one list has enough
    // volumes, because etcd serves only with a quorum of the voters in its list.
    if lists.is_empty() || lists.iter().any(is_enough) {
        return None;
    }
    let voters: BTreeSet<&String> = lists.into_iter().flatten().collect();
    let lost = voters.into_iter().filter(|name| !is_usable(name));
    let lost: Vec<&str> = lost.map(String::as_str).collect();
    let left: Vec<&str> = observed.disks.keys().map(String::as_str).collect();
    let (lost, left) = (lost.join(", "), left.join(" "));
    let text = format!(
        "no member starts, because fewer volumes exist than a quorum needs. These voters have no usable volume: \
         {lost}. Restore their PersistentVolumeClaims. Or restore the cluster from a backup with an EtcdRestore, and \
         then run kubectl delete pvc {left}. If these voters were removed from etcd before the EtcdCluster was \
         deleted, run kubectl annotate pvc {left} {ANNOTATION_VOTERS}-"
    );
    draft.problem(Reason::IdentityUnknown, text);
    Some(draft)
}
