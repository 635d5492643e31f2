//! The conditions `Ready`, `Reconciling` and `Stalled`, with the conventions of kstatus (kubernetes-sigs/cli-utils).
//! `kubectl wait`, Helm, Flux and Argo CD read them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::conditions::{ConditionType, Finding, Reason, set};

/// Whether the state of the object matches its spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// The state matches the spec.
    Ready,
    /// The operator is working or waiting, and no user needs to act.
    Reconciling,
    /// The operator cannot continue until a user acts.
    Stalled,
}

/// Sets the condition `Ready`. Also sets `Reconciling` or `Stalled`, or removes them, because by the conventions of
/// kstatus they exist only while they are True.
pub fn set_readiness(
    conditions: &mut Vec<Condition>,
    readiness: Readiness,
    (reason, message): (Reason, &str),
    observed_generation: Option<i64>,
    now: &Time,
) {
    let present = match readiness {
        Readiness::Ready => None,
        Readiness::Reconciling => Some(ConditionType::Reconciling),
        Readiness::Stalled => Some(ConditionType::Stalled),
    };
    for kind in [ConditionType::Reconciling, ConditionType::Stalled] {
        if present.as_ref() != Some(&kind) {
            conditions.retain(|condition| condition.type_ != kind.as_str());
        }
    }
    let ready = Finding::new(
        ConditionType::Ready,
        readiness == Readiness::Ready,
        reason.clone(),
        message,
    );
    set(conditions, &ready, observed_generation, now);
    if let Some(kind) = present {
        let finding = Finding::new(kind, true, reason, message);
        set(conditions, &finding, observed_generation, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conditions::{find, is_true};

    fn at(seconds: i64) -> Time {
        Time(k8s_openapi::jiff::Timestamp::from_second(seconds).unwrap())
    }

    #[test]
    fn conditions_reconciling_and_stalled_exist_only_while_true() {
        let mut conditions = Vec::new();
        let mut report = |readiness, second| {
            let text = (Reason::InProgress, "x");
            set_readiness(&mut conditions, readiness, text, Some(1), &at(second));
            let names: Vec<_> = conditions.iter().map(|it| it.type_.clone()).collect();
            let since = find(&conditions, &ConditionType::Ready)
                .unwrap()
                .last_transition_time
                .clone();
            (
                names,
                is_true(&conditions, &ConditionType::Ready),
                since == at(second),
            )
        };
        let names = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
        let reconciling = report(Readiness::Reconciling, 1);
        assert_eq!(reconciling, (names(&["Ready", "Reconciling"]), false, true));
        let stalled = report(Readiness::Stalled, 2);
        assert_eq!(stalled, (names(&["Ready", "Stalled"]), false, false));
        assert_eq!(report(Readiness::Ready, 3), (names(&["Ready"]), true, true));
    }
}
