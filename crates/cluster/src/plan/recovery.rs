//! Recovery from a lost quorum. A new cluster starts with the data of the most advanced survivor.
//!
//! Before the operator creates an object, it records the survivor, the new member and the token in the status
//! (invariant 10). All objects of the old cluster stay unchanged until the new cluster answers and is recorded
//! (invariant 9). If the quorum returns, the operator cancels the recovery.
//!
//! Invariant 16: clients never reach two clusters. The client Service has no endpoints from the record of the recovery
//! until the deletion of the old pods.

mod given_up;
mod leftover;
mod under_way;

use std::fmt::Write as _;

use api::cluster::{RecoveryApproval, RecoveryPhase, RecoveryStatus};
use api::command::annotate;
use api::names::ANNOTATION_RECOVER;
use etcd::{ClusterId, Status};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::clock::age;
use crate::plan::actions::Builder;
use crate::plan::evidence::{Evidence, Member};
use crate::plan::quorum::quorum_of;
use crate::plan::{BLIND, Draft, NewNames, SHORTLY, backed_up, replaced};
use crate::reason::Reason;
use crate::snapshot::{Desired, Intent, Observed, Pod};

pub(super) use leftover::{Leftover, leftover};

/// The annotation by which the user approves a recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Approval<'a> {
    None,
    Given,
    /// The approval was set before the quorum was lost.
    Stale,
    /// The approval names another cluster.
    Wrong(&'a str),
}

fn approval(observed: &Observed, cluster_id: ClusterId) -> Approval<'_> {
    let Some(text) = observed.recovery.approval.as_deref() else {
        return Approval::None;
    };
    if !names(text, cluster_id) {
        // An annotation with the former cluster ID is not wrong: it approved the recovery that created this cluster,
        // and has no further effect.
        let spent = observed.recovery.former();
        let spent = spent.and_then(|record| record.from_cluster_id.parse().ok());
        match spent.filter(|former| names(text, *former)) {
            Some(_) => Approval::None,
            None => Approval::Wrong(text),
        }
    } else if observed.recovery.stale_approval.is_some() {
        Approval::Stale
    } else {
        Approval::Given
    }
}

fn names(text: &str, cluster_id: ClusterId) -> bool {
    text.parse() == Ok(cluster_id)
}

/// True if the client Service may have endpoints. Invariant 16: it has none while a recovery is in progress, or while
/// a pod of the former cluster could be an endpoint.
pub(super) fn lets_clients_in(observed: &Observed, intent: &Intent) -> bool {
    if observed.recovery.in_progress().is_some() || replaced::may_serve(observed) {
        return false;
    }
    if observed.recovery.record.is_none() {
        return true;
    }
    // True for pods of the cluster before the recovery, and for seeds of abandoned recoveries.
    let other = |pod: &Pod| pod.token.is_some() && pod.token.as_ref() != Some(&intent.token);
    // A terminating pod that is not ready does not count: it is no endpoint of the client Service, although its
    // deletion may take long.
    let counts = |pod: &&Pod| other(pod) && (pod.ready || !pod.terminating);
    !observed.pods.values().any(|pod| counts(&pod))
}

/// Called while a quorum answers. Cancels a recovery in progress, and records the current approval as stale, so that it
/// does not approve a recovery after a later loss.
pub(super) fn settle(build: Builder<'_>, cluster_id: ClusterId) -> Draft<'_> {
    let (_, observed, now) = build.inputs();
    let mut draft = Draft::new(build);
    let given = observed.recovery.approval.as_ref();
    let stale = given.filter(|text| names(text, cluster_id)).cloned();
    let mut record = observed.recovery.record.clone();
    if let Some(recovery) = record
        .as_mut()
        .filter(|record| record.phase == RecoveryPhase::InProgress)
    {
        let why = "a quorum of the members answers again: the recovery was canceled before it changed a member or its data";
        cancel(recovery, why, now);
        draft.say("cancel the recovery: a quorum answers again");
    } else if stale == observed.recovery.stale_approval {
        return draft;
    }
    write(record.as_ref(), stale.as_ref(), &mut draft);
    draft
}

fn cancel(recovery: &mut RecoveryStatus, why: &str, now: Timestamp) {
    recovery.phase = RecoveryPhase::Cancelled;
    recovery.completion_time = Some(Time(now));
    recovery.message = Some(why.to_owned());
}

fn write(recovery: Option<&RecoveryStatus>, stale_approval: Option<&String>, draft: &mut Draft) {
    draft.add(draft.build.record_recovery(recovery, stale_approval, None));
}

/// Called while no quorum answers. Reports which members have their data, and what happens next: a recovery, or a
/// decision of the user.
pub(super) fn without_quorum<'a>(
    build: Builder<'a>,
    (intent, cluster_id): (&Intent, ClusterId),
    why: &str,
    names: &mut NewNames,
) -> Draft<'a> {
    let (desired, observed, now) = build.inputs();
    let mut draft = Draft::new(build);
    if observed.recovery.approval.is_none() && observed.recovery.stale_approval.is_some() {
        // The user has removed the stale approval, so the operator deletes its record from the status. The next
        // approval is then accepted.
        write(observed.recovery.record.as_ref(), None, &mut draft);
    }
    let evidence = Evidence::new(observed, intent, cluster_id);
    if let Some(record) = observed.recovery.in_progress() {
        under_way::go_on(&evidence, record, &mut draft);
        return draft;
    }
    let approval = approval(observed, cluster_id);
    let scene = Scene {
        desired,
        observed,
        now,
        cluster_id,
        evidence: &evidence,
        stops: given_up::stop(&evidence, &mut draft),
    };
    let begins = if evidence.is_lost {
        scene.lost(approval, &mut draft)
    } else {
        scene.silent(approval, why, &mut draft)
    };
    // Invariant 32: if the spec requires a recent backup before a recovery, the recovery waits for this backup.
    if let Some((survivor, by)) = begins.filter(|_| !scene.stops)
        && backed_up::may_recover(&mut draft)
    {
        scene.begin(intent, survivor, by, names, &mut draft);
    }
    refuse(approval, cluster_id, &mut draft);
    draft
}

/// The survivor from which the recovery starts, and who approved the recovery.
type Beginning<'a> = ((&'a str, &'a Status), RecoveryApproval);

fn refuse(approval: Approval, cluster_id: ClusterId, draft: &mut Draft) {
    match approval {
        Approval::Wrong(text) => draft.problem(
            Reason::RecoveryRefused,
            format!(
                "the annotation {ANNOTATION_RECOVER} names cluster {text:?}, but this is cluster {cluster_id}: no recovery starts; set the annotation to {cluster_id} to approve a recovery"
            ),
        ),
        Approval::Stale => draft.problem(
            Reason::RecoveryRefused,
            format!(
                "the annotation {ANNOTATION_RECOVER} was set before the quorum was lost: remove it and set it again \
                 to approve the recovery"
            ),
        ),
        Approval::None | Approval::Given => {}
    }
}

struct Scene<'a> {
    desired: &'a Desired,
    observed: &'a Observed,
    now: Timestamp,
    cluster_id: ClusterId,
    evidence: &'a Evidence,
    /// True if this plan stops the seed of the previous recovery.
    stops: bool,
}

impl<'a> Scene<'a> {
    /// True if the quorum has been lost for longer than the time in `spec.recovery.after`.
    fn is_overdue(&self) -> bool {
        let since = self.observed.recovery.unavailable_since;
        since.is_some_and(|since| age(since, self.now) >= self.desired.recovery.after)
    }

    /// Decides whether a recovery starts while no quorum answers, but the data of a quorum may exist. Unless a person
    /// approves a recovery, the operator waits for the members.
    fn silent(&self, approval: Approval, why: &str, draft: &mut Draft) -> Option<Beginning<'a>> {
        let soon = self
            .observed
            .pods
            .values()
            .any(|pod| pod.addressed && !pod.terminating);
        let mut text = format!(
            "no quorum of the members answers ({why}); the operator changes nothing until a quorum answers"
        );
        let survivor = self.evidence.most_advanced();
        if let Some((survivor, status)) = survivor.filter(|_| self.evidence.is_silent) {
            if approval == Approval::Given && self.is_overdue() {
                return Some(((survivor, status), RecoveryApproval::Annotation));
            }
            if approval == Approval::Given {
                let after = self.desired.recovery.after.as_secs();
                let _ = write!(
                    text,
                    "; the recovery is approved and starts after {after} s without a quorum"
                );
            } else if self.is_overdue() {
                let _ = write!(
                    text,
                    ". If {} are lost permanently, continue with the data of {survivor} at revision {}: {}",
                    self.evidence.absent().join(", "),
                    status.revision,
                    self.how()
                );
            }
        }
        let delay = if soon { SHORTLY } else { BLIND };
        draft.wait(Reason::NoQuorum, text, delay);
        None
    }

    /// Decides whether a recovery starts after the data of a majority is lost, so that the quorum cannot return.
    /// Returns the survivor and the approval if the recovery may begin.
    fn lost(&self, approval: Approval, draft: &mut Draft) -> Option<Beginning<'a>> {
        let text = self.what_is_left();
        let Some(survivor) = self.evidence.most_advanced() else {
            let answers = if self.evidence.members.is_empty() {
                "restore the cluster from a backup with an EtcdRestore".to_owned()
            } else {
                draft.requeue = draft.requeue.min(BLIND);
                "a recovery needs the data of one surviving member, but none answers: repair one of these members, \
                 or restore the cluster from a backup with an EtcdRestore"
                    .to_owned()
            };
            draft.problem(Reason::QuorumLost, format!("{text}; {answers}"));
            return None;
        };
        let (remedy, by) = self.decide(approval);
        draft.problem(Reason::QuorumLost, format!("{text}; {remedy}"));
        if by.is_none() {
            draft.requeue = draft.requeue.min(BLIND);
        }
        by.map(|by| (survivor, by))
    }

    /// The text about the next step, and the kind of approval if the recovery may start.
    fn decide(&self, approval: Approval) -> (String, Option<RecoveryApproval>) {
        let silent = self.evidence.silent();
        let after = self.desired.recovery.after.as_secs();
        if approval == Approval::Given {
            // The approved recovery waits for silent members and for members with a lost volume, because these members
            // could return with newer data.
            let bare = self.evidence.without_volume(self.observed);
            let bare = bare.into_iter().map(|name| {
                (
                    name,
                    "the volume of the member is lost: restore its PersistentVolume or delete its \
                     PersistentVolumeClaim",
                )
            });
            let awaited: Vec<_> = silent.into_iter().chain(bare).collect();
            if !awaited.is_empty() && !self.is_overdue() {
                let text = format!(
                    "the recovery is approved and waits, up to {after} s, for {}",
                    said(&awaited)
                );
                return (text, None);
            }
            return (
                "the recovery is approved".to_owned(),
                Some(RecoveryApproval::Annotation),
            );
        }
        if !self.desired.recovery.automatic {
            return (self.how(), None);
        }
        let why = if !self.evidence.is_lost_for_sure {
            "waits until no object of the lost members exists in Kubernetes: a pod that is being deleted and an \
             external member may still run, and a lost volume may be restored"
                .to_owned()
        } else if !silent.is_empty() {
            format!("waits for {}", said(&silent))
        } else if !self.is_overdue() {
            format!("starts after {after} s without a quorum")
        } else {
            return (
                "spec.recovery.policy allows the recovery to start".to_owned(),
                Some(RecoveryApproval::Policy),
            );
        };
        (
            format!(
                "the automatic recovery {why}. To recover earlier, {}",
                self.how()
            ),
            None,
        )
    }

    fn how(&self) -> String {
        let (object, id) = (&self.desired.object.metadata, self.cluster_id.to_string());
        let approve = annotate("etcdcluster", object, ANNOTATION_RECOVER, &id);
        format!(
            "run {approve} to start a new cluster with the data of the most advanced survivor (writes that only other members had are lost), or restore a backup with an EtcdRestore"
        )
    }

    fn what_is_left(&self) -> String {
        let Self {
            cluster_id,
            evidence,
            ..
        } = self;
        let all = evidence.voters.len();
        let left: Vec<String> = evidence
            .members
            .iter()
            .filter(|(name, _)| evidence.voters.contains(name))
            .map(|(name, member)| match member {
                Member::Survives(status) => format!("{name} at revision {}", status.revision),
                Member::Led => name.clone(),
                Member::Silent(why) => format!("{name}, which does not answer: {why}"),
                Member::Damaged(why) => format!("{name}, which is damaged: {why}"),
            })
            .collect();
        let (count, needed) = (left.len(), quorum_of(all));
        let left = if left.is_empty() {
            "none".to_owned()
        } else {
            left.join("; ")
        };
        let mut text = format!(
            "{count} of {all} voters of cluster {cluster_id} still have their data ({left}), and a quorum needs {needed}: the quorum cannot return without help"
        );
        let bare = evidence.without_volume(self.observed);
        if !bare.is_empty() {
            let _ = write!(
                text,
                "; the PersistentVolumeClaims of {} exist, but their PersistentVolumes do not: restore the PersistentVolumes \
                 if possible, and the members start on them",
                bare.join(", ")
            );
        }
        let size = self.desired.size;
        if size != all {
            let _ = write!(text, "; spec.size is {size}");
        }
        let _ = match &self.observed.recovery.last_backup {
            Some(backup) => write!(text, "; the last backup is {backup}"),
            None => write!(text, "; no backup is known"),
        };
        text
    }

    /// Records the decision for a recovery. Invariant 10: the operator creates no object before this record.
    fn begin(
        &self,
        intent: &Intent,
        (survivor, status): (&str, &Status),
        approved_by: RecoveryApproval,
        names: &mut NewNames,
        draft: &mut Draft,
    ) {
        let evidence = self.evidence;
        let silent = evidence.silent();
        let recovery = RecoveryStatus {
            phase: RecoveryPhase::InProgress,
            approved_by,
            from_cluster_id: self.cluster_id.to_string(),
            from_token: intent.token.clone(),
            survivor: survivor.to_owned(),
            revision: status.revision,
            lost_members: evidence.lost(),
            silent_members: silent.iter().map(|(name, _)| (*name).to_owned()).collect(),
            member: names.member(),
            token: names.token(),
            to_cluster_id: None,
            start_time: Some(Time(self.now)),
            completion_time: None,
            message: None,
        };
        draft.say(format!(
            "record that a recovery starts with the data of {survivor} at revision {}",
            status.revision
        ));
        let stale = self.observed.recovery.stale_approval.as_ref();
        write(Some(&recovery), stale, draft);
    }
}

fn said(silent: &[(&str, &str)]) -> String {
    let each = silent.iter().map(|(name, why)| format!("{name} ({why})"));
    each.collect::<Vec<_>>().join(", ")
}
