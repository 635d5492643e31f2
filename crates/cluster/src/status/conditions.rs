//! Computes the conditions of an EtcdCluster: the conditions of coreos/etcd-operator's API, and the usual conditions of
//! Kubernetes. Each condition is reported both when it is true and when it is false.

use api::cluster::{EtcdClusterStatus, LastError, MemberStatus, not_in_effect};
use api::conditions::{ConditionType, Finding, is_true, set};
use api::readiness::set_readiness;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::plan::{MemberState, View};
use crate::reason::Reason;
use crate::snapshot::{Kept, Observed, Pod};
use crate::status::readiness::{self, State};
use crate::status::{Report, advice, finding, history, version};
use crate::switch::TlsRollout;

/// The conditions, the state that the condition `Ready` reports, and the history of problems.
pub(super) fn conditions(
    report: &Report,
    (view, members): (Option<&View>, &[MemberStatus]),
    before: &EtcdClusterStatus,
    now: &Time,
) -> (Vec<Condition>, State, Vec<LastError>) {
    let degraded = degraded(report, view);
    let last_errors = history::last_errors(before, &degraded, now);
    let findings = [
        available(report, view),
        progressing(report),
        degraded,
        scaling(report, view, before),
        recovering(report, view, before),
        version::upgrading(report),
        fields_in_effect(report),
        advice::advisable(report, members, now.0),
    ];
    let mut conditions = before.conditions.clone();
    if report.hibernation().is_none() {
        // After a hibernation, the conditions with a hibernation reason are removed and set again, so that their
        // transition time does not count the hibernation as unavailable time.
        conditions.retain(|condition| !Reason::is_of_hibernation(condition));
    }
    let certificates = tls_ready(report);
    if certificates.is_none() {
        conditions.retain(|condition| condition.type_ != ConditionType::TlsReady.as_str());
    }
    let generation = report.cluster.metadata.generation;
    let state = readiness::state(report, &findings);
    let text = (state.reason.into(), state.message.as_str());
    set_readiness(&mut conditions, state.readiness, text, generation, now);
    for finding in findings.iter().chain(&certificates) {
        set(&mut conditions, finding, generation, now);
    }
    (conditions, state, last_errors)
}

/// True if this module writes the condition, so that a report may replace it.
pub(super) fn is_ours(condition: &Condition) -> bool {
    let ours = [
        ConditionType::Ready,
        ConditionType::Reconciling,
        ConditionType::Stalled,
        ConditionType::Available,
        ConditionType::Progressing,
        ConditionType::Degraded,
        ConditionType::Scaling,
        ConditionType::Recovering,
        ConditionType::Upgrading,
        ConditionType::FieldsInEffect,
        ConditionType::Advisable,
        ConditionType::TlsReady,
    ];
    ours.iter().any(|kind| kind.as_str() == condition.type_)
}

/// The condition about the certificates; `None` without TLS.
fn tls_ready(report: &Report) -> Option<Finding> {
    let (kind, tls) = (ConditionType::TlsReady, &report.observed.tls);
    let rollout = report.observed.tls_rollout.as_ref();
    if let Some(text) = rollout.and_then(TlsRollout::under_way)
        && tls.faults.is_empty()
    {
        return Some(finding(kind, false, Reason::Switching, text));
    }
    let from = tls.from.as_ref()?;
    Some(match tls.faults.first() {
        None => finding(kind, true, Reason::CertificatesHold, from.clone()),
        Some(first) => {
            let all: Vec<&str> = tls
                .faults
                .iter()
                .map(|fault| fault.message.as_str())
                .collect();
            finding(kind, false, first.code.into(), all.join("; "))
        }
    })
}

/// Computes the condition `Available`: true if etcd has answered a linearizable request for the member list, so that a
/// quorum serves, and if the client Service has endpoints.
fn available(report: &Report, view: Option<&View>) -> Finding {
    let kind = ConditionType::Available;
    let Some(cluster_id) = report.observed.cluster_id else {
        let text = "the cluster has not formed yet";
        return finding(kind, false, Reason::Bootstrapping, text);
    };
    if let Some((reason, text)) = report.hibernation() {
        return finding(kind, false, reason, text);
    }
    match (view, &report.observed.members) {
        (Some(view), _) => {
            let (healthy, voters) = (view.quorum().healthy(), view.quorum().voters());
            let text = format!("{healthy} of {voters} voters of cluster {cluster_id} are healthy");
            match shut(report.observed) {
                None => finding(kind, true, Reason::QuorumHealthy, text),
                Some(why) => {
                    let text = format!("{text}, but {why}");
                    finding(kind, false, Reason::NoEndpoint, text)
                }
            }
        }
        (None, crate::snapshot::Seen::Unknown(why)) => {
            let mut problems = report.plan.problems.iter();
            let lost = problems.find(|problem| problem.reason == Reason::QuorumLost);
            let text = lost.map_or_else(
                || format!("no quorum answers: {why}"),
                |problem| problem.message.clone(),
            );
            finding(kind, false, Reason::QuorumLost, text)
        }
        (None, _) => {
            let text = "the members belong to another cluster";
            finding(kind, false, Reason::ForeignCluster, text)
        }
    }
}

/// Why clients cannot connect through the client Service although a quorum serves; `None` if they can. If they cannot,
/// the condition Available is false, because clients connect to this Service as soon as it is true.
fn shut(observed: &Observed) -> Option<&'static str> {
    match observed.shared.client {
        Kept::Missing => return Some("the client Service does not exist yet"),
        Kept::Others => return Some("the client Service belongs to another owner"),
        Kept::AsMade(false) => return Some("the client Service has no endpoints yet"),
        Kept::Drifted | Kept::AsMade(true) => {}
    }
    // The endpoints of a Service are its selected pods that are ready. A terminating pod that is ready counts too,
    // because Kubernetes uses terminating pods if no other pod is ready.
    let token = observed.intent.as_ref().map(|intent| &intent.token);
    let is_endpoint = |pod: &Pod| pod.ready && !pod.failed && pod.token.as_ref() == token;
    let leads = observed.pods.values().any(is_endpoint);
    (!leads).then_some("no pod is ready, so the client Service has no endpoints")
}

fn progressing(report: &Report) -> Finding {
    let kind = ConditionType::Progressing;
    let plan = report.plan;
    if let Some((reason, text)) = report.hibernation() {
        return finding(kind, reason == Reason::Hibernating, reason, text);
    }
    if report.desired.paused {
        let text = "spec.paused is true: the operator changes nothing";
        return finding(kind, false, Reason::Paused, text);
    }
    if report.observed.claimed_by.is_some() {
        let text = "an EtcdRestore prepares this cluster";
        return finding(kind, true, Reason::Restoring, text);
    }
    if let Some(next) = &plan.next {
        return finding(kind, true, Reason::InProgress, next.clone());
    }
    match (plan.waiting_for.first(), plan.problems.first()) {
        (Some(waiting), _) => finding(kind, true, waiting.reason, waiting.message.clone()),
        (None, Some(problem)) => finding(kind, false, problem.reason, problem.message.clone()),
        (None, None) => {
            let text = "the cluster matches the spec";
            finding(kind, false, Reason::AsDesired, text)
        }
    }
}

fn degraded(report: &Report, view: Option<&View>) -> Finding {
    let kind = ConditionType::Degraded;
    if let Some(problem) = report.plan.problems.first() {
        let all = report.plan.problems.iter();
        let all: Vec<&str> = all.map(|problem| problem.message.as_str()).collect();
        return finding(kind, true, problem.reason, all.join("; "));
    }
    if let Some(text) = &report.failure {
        return finding(kind, true, Reason::StepFailed, text.clone());
    }
    let awake = report.hibernation().is_none();
    if awake && report.observed.cluster_id.is_some() && report.observed.claimed_by.is_none() {
        let Some(view) = view else {
            let text = "no quorum of the members answers";
            return finding(kind, true, Reason::QuorumLost, text);
        };
        let down = view.voters().filter(|member| member.is_down());
        let down: Vec<&str> = down.map(|member| member.name.as_str()).collect();
        if !down.is_empty() {
            let text = format!("these voters are not healthy: {}", down.join(", "));
            return finding(kind, true, Reason::MemberDown, text);
        }
    }
    finding(kind, false, Reason::AsDesired, "no problem is known")
}

fn scaling(report: &Report, view: Option<&View>, before: &EtcdClusterStatus) -> Finding {
    let kind = ConditionType::Scaling;
    let size = report.desired.size;
    let Some(view) = view.filter(|_| report.observed.cluster_id.is_some()) else {
        let text = "no members are being added or removed";
        return finding(kind, false, Reason::AsDesired, text);
    };
    let members = view.members.len();
    let replaces = is_true(&before.conditions, &ConditionType::Recovering)
        || view.voters().any(MemberState::is_down);
    let text = format!("{members} members exist, spec.size is {size}");
    if members > size {
        return finding(kind, true, Reason::RemovingMembers, text);
    }
    let voters = view.voters().count();
    if voters < size && !replaces {
        let text = format!("{voters} members are voters, spec.size is {size}");
        return finding(kind, true, Reason::AddingMembers, text);
    }
    finding(kind, false, Reason::AsDesired, text)
}

/// Computes the condition `Recovering`: true from the loss of a member until the desired number of voters is healthy
/// again.
fn recovering(report: &Report, view: Option<&View>, before: &EtcdClusterStatus) -> Finding {
    let kind = ConditionType::Recovering;
    let awake = report.hibernation().is_none();
    if !awake || report.observed.cluster_id.is_none() || report.observed.claimed_by.is_some() {
        return finding(kind, false, Reason::AsDesired, "no member is missing");
    }
    let Some(view) = view else {
        return finding(kind, true, Reason::QuorumLost, "no quorum answers");
    };
    if let Some(member) = view
        .voters()
        .find(|member| member.is_lost() || member.leaves())
    {
        let text = format!("{} is being replaced: {}", member.name, member.why());
        return finding(kind, true, Reason::ReplacingMember, text);
    }
    if let Some(member) = view.voters().find(|member| member.is_down()) {
        let text = format!("{} is not healthy", member.name);
        return finding(kind, true, Reason::MemberDown, text);
    }
    let missing = view.voters().count() < report.desired.size;
    if missing && is_true(&before.conditions, &kind) {
        let text = "a lost member is being replaced";
        return finding(kind, true, Reason::ReplacingMember, text);
    }
    finding(kind, false, Reason::AsDesired, "no member is missing")
}

fn fields_in_effect(report: &Report) -> Finding {
    let kind = ConditionType::FieldsInEffect;
    let without: Vec<String> = not_in_effect(&report.cluster.spec);
    if without.is_empty() {
        let text = "every field of the spec is in effect";
        return finding(kind, true, Reason::AllInEffect, text);
    }
    let text = format!(
        "these fields of the spec have no effect in this release: {}",
        without.join(", ")
    );
    finding(kind, false, Reason::NotYetInEffect, text)
}
