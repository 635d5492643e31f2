//! Continues a recovery: creates the seed with the survivor's data, and records the new cluster when the seed answers.

use std::fmt::Write as _;

use api::cluster::{RecoveryPhase, RecoveryStatus};
use etcd::ClusterId;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{cancel, write};
use crate::clock::age;
use crate::plan::evidence::{Evidence, Member};
use crate::plan::versions::current_version;
use crate::plan::view::{self, Data};
use crate::plan::{BLIND, Draft, SHORTLY, Start, State, actions, ended, member_objects};
use crate::reason::Reason;
use crate::snapshot::{Intent, Kept, Observed, Pod, Role, Seen};

/// Creates the seed. When the seed answers, records the new cluster.
pub(super) fn go_on(evidence: &Evidence, record: &RecoveryStatus, draft: &mut Draft) {
    let observed = draft.build.observed;
    let RecoveryStatus {
        survivor,
        revision,
        member,
        from_cluster_id,
        ..
    } = record;
    draft.problem(
        Reason::QuorumLost,
        format!(
            "cluster {from_cluster_id} is being recovered: {member} starts a new cluster with the data of {survivor} \
             at revision {revision}"
        ),
    );
    match &observed.recovery.seed {
        Some(Seen::Known(answer)) if keeps_data(observed, member) => {
            let (id, serves) = (answer.list.cluster_id, answer.status.revision);
            let alone = matches!(&answer.list.members[..], [one] if one.name == *member);
            let one = alone && answer.status.leader.is_some();
            if one && id.to_string() != *from_cluster_id && serves >= *revision {
                complete(record, (id, serves), draft);
                return;
            }
            let text = format!(
                "{member} answers for cluster {id} with {} members at revision {serves}, which does not match the \
                 data of {survivor}: the new cluster is not recorded",
                answer.list.members.len()
            );
            draft.problem(Reason::RecoveryFailed, text);
            draft.requeue = draft.requeue.min(BLIND);
            return;
        }
        Some(Seen::Known(_) | Seen::Unknown(_)) | None => {}
    }
    if give_up(evidence, record, draft) {
        return;
    }
    // If the volume of the seed is lost and the survivor still has its data, this recovery is canceled. The objects of
    // the seed stay, because its pod may still use the volume (invariant 9).
    let disk = observed.disks.get(member);
    if disk.is_some_and(|disk| disk.lost) && evidence.survives(survivor) {
        let why = format!("the volume of {member} was lost before the new cluster was recorded");
        abandon(record, &why, draft);
        return;
    }
    start(record, draft);
    let pod = observed.pods.get(member);
    let why = pod
        .and_then(|pod| pod.trouble.as_ref())
        .map(|trouble| format!(": {}", trouble.message()))
        .unwrap_or_default();
    let delay = if pod.is_some_and(|pod| pod.running) {
        SHORTLY
    } else {
        BLIND
    };
    let text = format!("{member} copies its data from {survivor}{why}");
    draft.wait(Reason::SeedStarting, text, delay);
}

/// True if the seed has its data, is not being deleted and has not lost its volume. If false, the recovery must not
/// complete: the survivor's data would be deleted, and the seed's data may be lost (invariant 9).
fn keeps_data(observed: &Observed, member: &str) -> bool {
    let (pod, disk) = (observed.pods.get(member), observed.disks.get(member));
    let kept = view::data(pod, disk, observed.services.get(member), true) == Data::There;
    kept && pod.is_some_and(Pod::stays) && !disk.is_some_and(|disk| disk.lost)
}

/// Before the seed runs, cancels the recovery if the survivor is lost, or if it does not answer and
/// `spec.recovery.after` has passed since the start of the recovery. If no survivor answers, the operator waits,
/// because the seed may have the last copy of the data.
fn give_up(evidence: &Evidence, record: &RecoveryStatus, draft: &mut Draft) -> bool {
    let (desired, observed, now) = draft.build.inputs();
    let survivor = evidence
        .members
        .iter()
        .find(|(name, _)| *name == record.survivor);
    let since = record.start_time.as_ref().map(|time| time.0);
    let overdue = since.is_some_and(|since| age(since, now) >= desired.recovery.after);
    let gives = match survivor {
        Some((_, Member::Survives(_) | Member::Led)) => true,
        Some((_, Member::Silent(_) | Member::Damaged(_))) => !overdue,
        None => false,
    };
    let runs = observed
        .pods
        .get(&record.member)
        .is_some_and(|pod| pod.running);
    if gives || runs {
        return false;
    }
    if evidence.most_advanced().is_none() {
        let text = format!(
            "{} no longer answers, and {} does not serve yet: if this does not change, restore a backup with an EtcdRestore",
            record.survivor, record.member
        );
        draft.problem(Reason::SurvivorLost, text);
        return false;
    }
    let why = format!(
        "{} was lost, or did not answer, before its data was copied",
        record.survivor
    );
    abandon(record, &why, draft);
    true
}

/// Cancels the recovery. The next recovery starts a seed with another name.
fn abandon(record: &RecoveryStatus, why: &str, draft: &mut Draft) {
    let (_, observed, now) = draft.build.inputs();
    let mut given_up = record.clone();
    cancel(&mut given_up, why, now);
    draft.say(format!("cancel the recovery: {why}"));
    let stale = observed.recovery.stale_approval.as_ref();
    write(Some(&given_up), stale, draft);
}

fn start(record: &RecoveryStatus, draft: &mut Draft) {
    let (desired, observed, _) = draft.build.inputs();
    let name = &record.member;
    let start = Start {
        member: name.clone(),
        state: State::FromSurvivor,
        initial: [name.clone()].into(),
        role: Role::Voter,
        durable: desired.durable || observed.disks.contains_key(name),
        version: current_version(desired, observed),
        token: record.token.clone(),
        cluster_id: None,
    };
    let service = observed.services.get(name);
    let disk = observed.disks.contains_key(name);
    if let Some(pod) = observed.pods.get(name) {
        // The operator may delete a failed seed pod and copy the data again, because the survivor keeps its data until
        // the new cluster is recorded.
        if ended::has_ended(pod) {
            ended::delete(name, pod, draft);
            return;
        }
        member_objects::serve(name, service, true, draft);
        return;
    }
    // Invariant 16: the client Service must have no endpoints before the seed becomes ready. A person or other software
    // may have changed the Service, so the plan writes it again.
    let closes = observed.shared.client != Kept::Others;
    let closes = closes.then(|| draft.build.apply_client_service(false));
    let mark = match service {
        None => Some(draft.build.create_service(name, true, false)),
        Some(service) if !service.started => Some(actions::mark_service(name, service)),
        // Invariant 6: another operator process may have set the annotation `started`. `mark_again` renews the
        // annotation, so that the other process cannot remove it later.
        Some(service) if !disk => member_objects::mark_again(name, service, draft),
        Some(_) => None,
    };
    draft.say(format!("start {name} with the data of {}", record.survivor));
    let first = closes.into_iter().chain(mark);
    if disk {
        member_objects::start_on_disk(first, &start, draft);
    } else {
        member_objects::start(first, &start, draft);
    }
}

/// Completes the recovery: the seed serves the data of the survivor. One write records the new cluster and the end of
/// the old cluster.
fn complete(record: &RecoveryStatus, (id, serves): (ClusterId, i64), draft: &mut Draft) {
    let RecoveryStatus {
        survivor,
        revision,
        from_cluster_id,
        lost_members,
        silent_members,
        ..
    } = record;
    let mut lost = lost_members.join(", ");
    if !silent_members.is_empty() {
        let separator = if lost.is_empty() { "" } else { "; " };
        let _ = write!(
            lost,
            "{separator}{} did not answer",
            silent_members.join(", ")
        );
    }
    let message = format!(
        "cluster {from_cluster_id} lost its quorum (lost: {lost}); cluster {id} continues with the data of \
         {survivor} at revision {revision} and serves revision {serves}. Writes that the lost members acknowledged \
         after revision {revision} may be missing"
    );
    let recovery = RecoveryStatus {
        phase: RecoveryPhase::Complete,
        to_cluster_id: Some(id.to_string()),
        completion_time: Some(Time(draft.build.now)),
        message: Some(message),
        ..record.clone()
    };
    let intent = Intent {
        token: record.token.clone(),
        members: [record.member.clone()].into(),
    };
    draft.say(format!("record cluster {id} in place of {from_cluster_id}"));
    let formed = Some((&intent, id));
    draft.add(draft.build.record_recovery(Some(&recovery), None, formed));
}
