//! Builds the view of a cluster from its objects and the responses of its members.

use api::cluster::MemberRole;
use api::conditions::{ConditionType, find, is_true};
use api::names;
use api::{EtcdBackup, EtcdCluster};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;

use super::{BackupView, CertificateView, ClusterView, MemberView, Problem, ScheduleView, Source};
use crate::live::LiveMember;
use crate::members;

/// The result of querying the members.
#[derive(Clone, Debug)]
pub enum LiveAnswer {
    /// The plugin did not query the members.
    NotAsked,
    /// The query failed. The text is the reason.
    Failed(String),
    /// The members that responded. The text contains etcdctl's errors about members that did not respond.
    Answers(Vec<LiveMember>, Option<String>),
}

/// The objects and responses from which [`view`] builds a view.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The EtcdCluster.
    pub cluster: &'a EtcdCluster,
    /// The pods of the cluster's members.
    pub pods: &'a [Pod],
    /// All EtcdBackups in the namespace of the cluster.
    pub backups: &'a [EtcdBackup],
    /// The result of querying the members.
    pub live: &'a LiveAnswer,
}

/// Builds the view of one cluster.
pub fn view(inputs: Inputs<'_>) -> ClusterView {
    let cluster = inputs.cluster;
    let status = cluster.status.clone().unwrap_or_default();
    let conditions = cluster.conditions();
    let (live, source, source_problem) = match inputs.live {
        LiveAnswer::NotAsked => (&[][..], Source::Status, None),
        LiveAnswer::Failed(why) => (&[][..], Source::Status, Some(why.clone())),
        LiveAnswer::Answers(answers, problem) if !answers.is_empty() => {
            (answers.as_slice(), Source::Members, problem.clone())
        }
        LiveAnswer::Answers(_, problem) => {
            let why = problem
                .clone()
                .unwrap_or_else(|| "no member answered".into());
            (&[][..], Source::Status, Some(why))
        }
    };
    let members = all_members(inputs, live);
    let from_members = members.iter().filter(|member| member.healthy).count();
    let from_status = status
        .healthy_members
        .and_then(|count| usize::try_from(count).ok());
    let healthy = if source == Source::Members {
        from_members
    } else {
        from_status.unwrap_or(from_members)
    };
    let leader = members
        .iter()
        .find(|member| member.role.as_deref() == Some(MemberRole::Leader.as_str()))
        .map(|member| member.name.clone())
        .or(status.leader);
    let newest = members.iter().filter_map(|member| member.revision).max();
    let quota = live.iter().find_map(|answer| answer.quota);
    ClusterView {
        namespace: cluster.namespace().unwrap_or_default(),
        name: cluster.name_any(),
        state: status.state.unwrap_or_else(|| "Unknown".to_owned()),
        ready: is_true(conditions, &ConditionType::Ready),
        available: is_true(conditions, &ConditionType::Available),
        up_to_date: status.observed_generation == cluster.metadata.generation,
        cluster_id: status.cluster_id,
        desired_members: cluster.spec.size,
        healthy_members: healthy,
        leader,
        version: status.current_version,
        desired_version: cluster.spec.version.trim_start_matches('v').to_owned(),
        source,
        source_problem,
        members,
        quota_bytes: quota.unwrap_or_else(|| size(cluster.spec.quota_bytes())),
        alarms: status
            .alarms
            .iter()
            .map(|alarm| format!("{} on {}", alarm.kind, alarm.member))
            .collect(),
        certificate: status.certificates.map(|certificate| CertificateView {
            secret: certificate.secret,
            key: certificate.key,
            not_after: certificate.not_after.0,
            expires_within: certificate.expires_within,
        }),
        last_backup: status.last_backup.map(|backup| BackupView {
            behind: behind(newest, backup.revision),
            name: backup.name,
            time: backup.time.map(|time| time.0),
            revision: backup.revision,
            location: backup.location,
        }),
        backups: schedules(cluster, inputs.backups),
        next_step: status.next_step,
        waiting_for: status.waiting_for,
        problems: problems(conditions),
    }
}

fn size(bytes: i64) -> u64 {
    u64::try_from(bytes).unwrap_or_default()
}

fn behind(newest: Option<u64>, backup: Option<i64>) -> Option<i64> {
    let newest = i64::try_from(newest?).ok()?;
    Some((newest - backup?).max(0))
}

/// The members in the status, and one member for each pod of a member that the status does not contain, sorted by name.
fn all_members(inputs: Inputs<'_>, live: &[LiveMember]) -> Vec<MemberView> {
    let mut members: Vec<MemberView> = Vec::new();
    let status = inputs.cluster.status.as_ref();
    for known in status
        .map(|status| &status.member_details)
        .into_iter()
        .flatten()
    {
        members.push(MemberView {
            name: known.name.clone(),
            id: known.id.clone(),
            role: known.role.as_ref().map(ToString::to_string),
            healthy: known.healthy,
            version: known.version.clone(),
            lag: known.revision_lag.map(size),
            db_size: known.db_size.map(size),
            db_size_in_use: known.db_size_in_use.map(size),
            node: known.node.clone(),
            pod: "Missing".to_owned(),
            ..MemberView::default()
        });
    }
    for pod in inputs.pods {
        let name = pod.name_any();
        if !members.iter().any(|member| member.name == name) {
            members.push(MemberView {
                name: name.clone(),
                ..MemberView::default()
            });
        }
        let Some(member) = members.iter_mut().find(|member| member.name == name) else {
            continue;
        };
        member.pod = pod_state(pod);
        member.restarts = members::container(pod).map_or(0, |status| status.restart_count);
        member.node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        let answer = live.iter().find(|answer| answers_for(answer, member, pod));
        if let Some(answer) = answer {
            take(member, answer, live);
        } else if !live.is_empty() {
            member.healthy = false;
        }
    }
    members.sort_by(|a, b| a.name.cmp(&b.name));
    members
}

fn answers_for(answer: &LiveMember, member: &MemberView, pod: &Pod) -> bool {
    member.id.as_deref() == Some(answer.id.as_str())
        || members::client_url(pod) == Some(answer.endpoint.as_str())
        || names::member_of_url(&answer.endpoint) == Some(member.name.as_str())
}

/// Replaces the values from the status with the values that the member has reported.
fn take(member: &mut MemberView, answer: &LiveMember, all: &[LiveMember]) {
    let newest = all.iter().map(|one| one.revision).max().unwrap_or_default();
    let role = if answer.is_learner {
        MemberRole::Learner
    } else if answer.leader == answer.id && !answer.id.is_empty() {
        MemberRole::Leader
    } else {
        MemberRole::Voter
    };
    member.id = Some(answer.id.clone());
    member.role = Some(role.to_string());
    // A member without a leader counts as unhealthy, because it cannot serve linearizable reads.
    member.healthy = !answer.leader.is_empty();
    member.version = Some(answer.version.clone());
    member.term = Some(answer.term);
    member.revision = Some(answer.revision);
    member.lag = Some(newest - answer.revision);
    member.raft_index = Some(answer.raft_index);
    member.db_size = Some(answer.db_size);
    member.db_size_in_use = Some(answer.db_in_use);
    member.errors.clone_from(&answer.errors);
}

/// `Running`, `NotReady`, `Terminating`, or why the etcd container does not run.
fn pod_state(pod: &Pod) -> String {
    if pod.metadata.deletion_timestamp.is_some() {
        return "Terminating".to_owned();
    }
    if members::is_ready(pod) {
        return "Running".to_owned();
    }
    let state = members::container(pod).and_then(|status| status.state.as_ref());
    let waiting = state.and_then(|state| state.waiting.as_ref()?.reason.clone());
    let ended = state.and_then(|state| state.terminated.as_ref()?.reason.clone());
    let phase = pod.status.as_ref().and_then(|status| status.phase.clone());
    if members::is_running(pod) {
        return "NotReady".to_owned();
    }
    waiting
        .or(ended)
        .or(phase)
        .unwrap_or_else(|| "Unknown".to_owned())
}

/// One view for each EtcdBackup that names the cluster.
fn schedules(cluster: &EtcdCluster, backups: &[EtcdBackup]) -> Vec<ScheduleView> {
    let name = cluster.name_any();
    let own = backups.iter().filter(|backup| {
        let target = backup.spec.etcd_cluster.as_ref();
        target.is_some_and(|target| target.name == name)
    });
    own.map(|backup| {
        let conditions = backup.conditions();
        let complete = find(conditions, &ConditionType::Complete);
        let next = find(conditions, &ConditionType::Progressing);
        let status = backup.status.as_ref();
        ScheduleView {
            name: backup.name_any(),
            periodic: backup.spec.is_periodic(),
            state: complete.map_or_else(|| "Unknown".to_owned(), |one| one.reason.clone()),
            verified: status.is_some_and(|status| status.succeeded && status.sha256.is_some()),
            last_success: status
                .and_then(|status| status.last_success_date.as_ref())
                .map(|time| time.0),
            next: next
                .map(|one| one.message.clone())
                .filter(|text| !text.is_empty()),
        }
    })
    .collect()
}

/// The conditions that report a problem or advice, in the order of `WATCHED`.
pub(crate) fn problems(conditions: &[Condition]) -> Vec<Problem> {
    /// For each condition type: the status that reports a problem or advice, and whether the condition is only advice.
    const WATCHED: [(&str, &str, bool); 9] = [
        ("Stalled", "True", false),
        ("Degraded", "True", false),
        ("Available", "False", false),
        ("TLSReady", "False", false),
        ("Managed", "False", false),
        ("Unreadable", "True", false),
        ("FieldsInEffect", "False", true),
        ("Advisable", "False", true),
        ("Upgrading", "False", false),
    ];
    /// A condition with one of these reasons reports no problem, whatever its status is.
    const NOT_REFUSED: [&str; 2] = ["AsDesired", "Pending"];
    let mut found: Vec<Problem> = Vec::new();
    for (kind, bad, advice) in WATCHED {
        let all = conditions
            .iter()
            .filter(|one| one.type_ == kind && one.status == bad);
        for condition in all {
            let is_quiet = kind == "Upgrading" && condition.reason != "VersionRefused";
            let is_quiet = is_quiet || NOT_REFUSED.contains(&condition.reason.as_str());
            // A message that is already in `found` is skipped, because `Stalled` and `Degraded` usually have the same
            // message.
            let is_known = found.iter().any(|one| one.message == condition.message);
            if !is_quiet && !is_known {
                found.push(Problem {
                    condition: condition.type_.clone(),
                    reason: condition.reason.clone(),
                    message: condition.message.clone(),
                    advice,
                });
            }
        }
    }
    found
}

#[cfg(test)]
mod tests;
