//! The outcome of a reconcile: its errors, and the Events about changes and problems.

use std::time::Duration;

use api::cluster::EtcdClusterStatus;
use api::conditions::{ConditionType, find};
use api::problem::Chain;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use runtime::outcome::{Failure, Notice};

use crate::execute::{self, Acted};
use crate::observe;
use crate::plan::{Plan, STEADY};
use crate::reason::Reason;

/// The stage in which a reconcile failed, and the cause.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The observation failed.
    #[error("the cluster cannot be observed")]
    Observe(#[from] observe::Error),
    /// An action of the step failed.
    #[error("an action of the plan failed")]
    Act {
        /// The error of the failed action.
        #[source]
        source: execute::Error,
        /// Events for the successful actions of the step.
        told: Vec<Notice>,
    },
    /// Writing the status failed.
    #[error("the status was not written")]
    Status(#[from] runtime::apply::Error),
}

impl Failure for Error {
    fn reason(&self) -> &'static str {
        let reason = match self {
            Self::Observe(observe::Error::Read { source, .. }) => Reason::from(source),
            Self::Observe(observe::Error::Deadline) => Reason::ApiServerUnreachable,
            Self::Act { source, .. } => source.reason(),
            Self::Status(error) => Reason::from(error),
        };
        reason.as_str()
    }

    fn notices(&self) -> &[Notice] {
        match self {
            Self::Act { told, .. } => told,
            _ => &[],
        }
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            // The next reconcile starts after at most `STEADY`, because the back-off of one action must not delay other
            // work.
            Self::Act { source, .. } => source.held().map(|left| left.min(STEADY)),
            _ => None,
        }
    }
}

impl Acted {
    /// The failure that needs attention, with its causes. `None` if nothing failed, or if a retry resolves all errors.
    pub fn in_words(&self) -> Option<String> {
        self.failure().map(|error| Chain(error).to_string())
    }
}

/// The Events for the actions, the problems and the warnings of a reconcile.
pub fn notices(plan: &Plan, acted: &Acted) -> Vec<Notice> {
    let done = acted.done.iter().filter_map(|action| {
        let (reason, verb) = action.event?;
        Some(Notice::change(reason.as_str(), verb, action.text.clone()))
    });
    let refused = acted
        .failed
        .iter()
        .filter(|error| error.reason().is_from_etcd());
    let refused =
        refused.map(|error| Notice::normal(error.reason().as_str(), "Postpone", postponed(error)));
    let problems = plan
        .problems
        .iter()
        .map(|problem| Notice::warning(problem.reason.as_str(), "Plan", problem.message.clone()));
    let declined = plan
        .waiting_for
        .iter()
        .filter(|waiting| waiting.reason.warns_of_wait())
        .map(|waiting| Notice::warning(waiting.reason.as_str(), "Wait", waiting.message.clone()));
    done.chain(refused)
        .chain(declined)
        .chain(problems)
        .collect()
}

/// The Events for the changes from the status `before` to the status `after` of a cluster.
pub fn turns(before: &EtcdClusterStatus, after: &EtcdClusterStatus) -> Vec<Notice> {
    let mut notices = Vec::new();
    let mut turn = |reason: Reason, warning: bool, is: &Condition| {
        notices.push(Notice {
            warning,
            ..Notice::change(reason.as_str(), "Observe", is.message.clone())
        });
    };
    match turned(before, after, &ConditionType::Available) {
        Some(is) if is.status == "True" => turn(Reason::Available, false, is),
        Some(is) => turn(Reason::Unavailable, true, is),
        None => {}
    }
    match turned(before, after, &ConditionType::Degraded) {
        Some(is) if is.status != "True" => turn(Reason::Healthy, false, is),
        Some(is) if is.reason == Reason::MemberDown.as_str() => turn(Reason::MemberDown, true, is),
        // The function `notices` creates the Events for the other reasons of the condition Degraded.
        Some(_) | None => {}
    }
    let within = |status: &EtcdClusterStatus| {
        let certificates = status.certificates.as_ref();
        certificates.and_then(|one| one.expires_within.clone())
    };
    if let Some(certificates) = &after.certificates
        && within(after).is_some()
        && within(before) != within(after)
    {
        let key = certificates.key.as_deref().unwrap_or("the certificate");
        let remedy = if key.ends_with("ca.crt") {
            "replace the authority before this time; during the change, every Secret must contain both authorities"
        } else {
            "renew the certificate before this time"
        };
        let text = format!(
            "{key} in Secret {} is valid until {}: {remedy}",
            certificates.secret, certificates.not_after.0
        );
        notices.push(Notice::warning(
            Reason::CertificateExpiring.as_str(),
            "Observe",
            text,
        ));
    }
    if before.control_paused != after.control_paused {
        notices.push(if after.control_paused {
            let text =
                "spec.paused is true: the operator changes nothing until spec.paused is false";
            Notice::change(Reason::Paused.as_str(), "Pause", text)
        } else {
            Notice::change(
                Reason::Resumed.as_str(),
                "Resume",
                "spec.paused is false: the operator continues",
            )
        });
    }
    notices
}

/// Returns the condition of this kind if its status differs between `before` and `after`.
fn turned<'a>(
    before: &EtcdClusterStatus,
    after: &'a EtcdClusterStatus,
    kind: &ConditionType,
) -> Option<&'a Condition> {
    let was = find(&before.conditions, kind)?;
    let is = find(&after.conditions, kind)?;
    (was.status != is.status).then_some(is)
}

/// The text of a rejection by etcd. The name of the member that answered is left out: with it, the answer of each
/// member would cause a separate Event.
fn postponed(error: &execute::Error) -> String {
    match error {
        execute::Error::Etcd {
            what,
            source: etcd::Error::Unavailable(text),
        } => {
            format!(
                "cannot {what} yet: {}",
                text.rsplit(": ").next().unwrap_or_default()
            )
        }
        other => Chain(other).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::action::Step;
    use crate::plan::Explanation;
    use crate::plan::tests::scene::Scene;
    use api::conditions::{Finding, set};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    fn plan(waiting_for: Vec<Explanation>, problems: Vec<Explanation>) -> Plan {
        Plan {
            step: Step::default(),
            asks: None,
            next: None,
            waiting_for,
            problems,
            requeue: std::time::Duration::ZERO,
        }
    }

    fn reasons(notices: &[Notice]) -> Vec<(&'static str, bool)> {
        let told = |notice: &Notice| (notice.reason, notice.warning);
        notices.iter().map(told).collect()
    }

    #[test]
    fn events_report_changes_problems_and_rejections() {
        let (scene, unformed) = (Scene::formed(&["a"]), Scene::nothing(1));
        let acted = Acted {
            done: vec![
                unformed.build().apply_headless_service(),
                scene.build().create_service("db-a", true, true),
                scene.build().apply_headless_service(),
                scene.build().add_member("db-a", true),
                scene.build().open_service("db-a", "u"),
            ],
            failed: vec![execute::Error::Etcd {
                what: "promote db-a".into(),
                source: etcd::Error::Unavailable("http://x: not in sync".into()),
            }],
        };
        let waits = vec![
            Explanation::new(Reason::QuorumAtRisk, "two of three are down"),
            Explanation::new(Reason::LearnerCatchingUp, "db-b is behind"),
        ];
        let plan = plan(
            waits,
            vec![Explanation::new(Reason::ImageNotAvailable, "no image")],
        );
        let notices = notices(&plan, &acted);
        let told = reasons(&notices);
        for expected in [
            ("HeadlessServiceApplied", false),
            ("MemberAdded", false),
            ("QuorumAtRisk", true),
            ("ImageNotAvailable", true),
        ] {
            assert!(told.contains(&expected), "{expected:?} in {told:?}");
        }
        assert_eq!(
            told.len(),
            5,
            "the objects of a new cluster and of a new member must have no separate Event: {told:?}"
        );
        assert!(notices.iter().any(|one| one.note.contains("not in sync")));
    }

    /// The reconcile must not wait for the whole back-off: other members may need work, and changes in etcd trigger no
    /// reconcile.
    #[test]
    fn reconcile_delay_after_rejected_start_is_at_most_ten_seconds() {
        let again = |left: Duration| {
            let source = execute::Error::Held {
                reason: Reason::Forbidden,
                said: "exceeded quota".into(),
                left,
            };
            let told = Vec::new();
            Error::Act { source, told }.retry_after()
        };
        let (short, long) = (Duration::from_secs(2), Duration::from_mins(2));
        assert_eq!((again(short), again(long)), (Some(short), Some(STEADY)));
        let source = execute::Error::TooOld;
        let told = Vec::new();
        assert_eq!(Error::Act { source, told }.retry_after(), None);
    }

    #[test]
    fn member_failure_and_recovery_become_events() {
        let status = |degraded: bool, reason: &str| {
            let mut conditions = Vec::new();
            let finding = Finding::new(ConditionType::Degraded, degraded, reason.into(), "why");
            let now = Time(jiff::Timestamp::UNIX_EPOCH);
            set(&mut conditions, &finding, None, &now);
            EtcdClusterStatus {
                conditions,
                ..EtcdClusterStatus::default()
            }
        };
        let well = || status(false, "AsDesired");
        let told = |before, after| reasons(&turns(&before, &after));
        assert_eq!(
            told(well(), status(true, "MemberDown")),
            [("MemberDown", true)]
        );
        assert_eq!(
            told(status(true, "MemberDown"), well()),
            [("Healthy", false)]
        );
        assert_eq!(told(well(), status(true, "ImageNotAvailable")), []);
    }

    #[test]
    fn changes_of_cluster_state_become_events() {
        let status = |available: bool, paused: bool| {
            let mut conditions = Vec::new();
            let kind = ConditionType::Available;
            let finding = Finding::new(kind, available, "QuorumLost".into(), "why");
            let now = Time(jiff::Timestamp::UNIX_EPOCH);
            set(&mut conditions, &finding, None, &now);
            EtcdClusterStatus {
                conditions,
                control_paused: paused,
                ..EtcdClusterStatus::default()
            }
        };
        let told = |before, after| reasons(&turns(&before, &after));
        assert_eq!(
            told(status(true, false), status(false, false)),
            [("Unavailable", true)]
        );
        assert_eq!(
            told(status(false, false), status(true, false)),
            [("Available", false)]
        );
        assert_eq!(
            told(status(true, false), status(true, true)),
            [("Paused", false)]
        );
        assert_eq!(
            told(status(true, true), status(true, false)),
            [("Resumed", false)]
        );
        assert_eq!(told(status(true, false), status(true, false)), []);
        // A cluster whose earlier status is empty gets no Event about its availability.
        assert_eq!(told(EtcdClusterStatus::default(), status(false, false)), []);
    }
}
