//! Computes the conditions `Ready`, `Reconciling` and `Stalled`, and `status.state`, from the plan and the other
//! conditions.

use api::conditions::{ConditionStatus, ConditionType, Finding};
use api::readiness::Readiness;

use crate::action::{Action, EtcdCall, Request};
use crate::plan::{Plan, current_version};
use crate::reason::Reason;
use crate::status::{Report, version};

/// The readiness of the cluster, with the reason and the message.
pub(super) struct State {
    pub(super) readiness: Readiness,
    pub(super) reason: Reason,
    pub(super) message: String,
}

impl State {
    fn new(readiness: Readiness, reason: Reason, message: impl Into<String>) -> Self {
        Self {
            readiness,
            reason,
            message: message.into(),
        }
    }

    /// The text of `status.state`: the reason and, during a version change, both versions.
    pub(super) fn text(&self, report: &Report) -> String {
        let word = self.reason.as_str();
        match version::target(report) {
            Some(target) if self.reason == Reason::Upgrading => {
                let running = current_version(report.desired, report.observed);
                format!("{word} {running}→{target}")
            }
            _ => word.to_owned(),
        }
    }
}

/// Computes the state: the first `if` that applies decides. `findings` are the other conditions of this report.
pub(super) fn state(report: &Report, findings: &[Finding]) -> State {
    let found = |kind: ConditionType| findings.iter().find(|finding| finding.kind == kind);
    let holds =
        |kind: ConditionType| found(kind).filter(|finding| finding.status == ConditionStatus::True);
    let message = |kind: ConditionType| {
        found(kind).map_or_else(String::new, |finding| finding.message.clone())
    };
    let working = |reason: Reason, message: String| {
        let readiness = if needs_user(report.plan) {
            Readiness::Stalled
        } else {
            Readiness::Reconciling
        };
        State::new(readiness, reason, message)
    };
    let available = holds(ConditionType::Available).is_some();
    if let Some((reason, text)) = report.hibernation() {
        let hibernates = reason == Reason::Hibernated;
        let readiness = if hibernates {
            Readiness::Ready
        } else {
            Readiness::Reconciling
        };
        return State::new(readiness, reason, text);
    }
    if let Some(invalid) = &report.desired.invalid {
        return State::new(Readiness::Stalled, Reason::InvalidSpec, invalid.clone());
    }
    if report.desired.paused {
        let readiness = if available {
            Readiness::Ready
        } else {
            Readiness::Stalled
        };
        return State::new(
            readiness,
            Reason::Paused,
            message(ConditionType::Progressing),
        );
    }
    if report.observed.claimed_by.is_some() {
        let text = message(ConditionType::Progressing);
        return State::new(Readiness::Reconciling, Reason::Restoring, text);
    }
    if let Some(problem) = report.plan.problems.first() {
        return working(problem.reason, message(ConditionType::Degraded));
    }
    if !available {
        let reason =
            found(ConditionType::Available).and_then(|it| Reason::parse(it.reason.as_str()));
        let reason = reason.unwrap_or(Reason::QuorumLost);
        return working(reason, message(ConditionType::Available));
    }
    let steps = [
        (ConditionType::Upgrading, Reason::Upgrading),
        (ConditionType::Recovering, Reason::Recovering),
        (ConditionType::Scaling, Reason::Scaling),
        (ConditionType::Degraded, Reason::StepFailed),
    ];
    for (kind, reason) in steps {
        if let Some(finding) = holds(kind) {
            return working(reason, finding.message.clone());
        }
    }
    if let Some(finding) = holds(ConditionType::Progressing)
        && !is_upkeep(report.plan)
    {
        return working(Reason::Updating, finding.message.clone());
    }
    let text = format!(
        "{}, and the cluster matches the spec",
        message(ConditionType::Available)
    );
    State::new(Readiness::Ready, Reason::Ready, text)
}

/// True if the operator has a problem to report, and can neither do anything nor wait for anything.
pub(super) fn needs_user(plan: &Plan) -> bool {
    plan.step.is_empty() && plan.waiting_for.is_empty() && !plan.problems.is_empty()
}

/// True if the operator only compacts or defragments. The cluster then stays `Ready`.
fn is_upkeep(plan: &Plan) -> bool {
    let waits = plan.waiting_for.iter().all(|it| it.reason.is_upkeep());
    let changes = plan.step.change.iter().flat_map(|change| &change.chain);
    let mut actions = plan.step.chains.iter().flatten().chain(changes);
    waits && actions.all(is_upkeep_call)
}

fn is_upkeep_call(action: &Action) -> bool {
    use EtcdCall::{Compact, Defragment};
    matches!(
        &action.request,
        Request::Etcd(Defragment { .. } | Compact { .. })
    )
}
