//! Reports a version change: the condition `Upgrading`, and the target version of the members.

use api::conditions::{ConditionType, Finding};
use api::version::EtcdVersion;

use crate::plan::{Course, course};
use crate::reason::Reason;
use crate::status::{Report, finding};

struct Progress {
    target: EtcdVersion,
    /// Number of members that report the target version.
    done: usize,
    /// Number of all members with a pod.
    of: usize,
}

/// The progress of a version change; `None` if no member changes its version.
fn progress(report: &Report) -> Option<Progress> {
    report.observed.cluster_id?;
    let observed = report.observed;
    let target = course(report.desired, observed).target?;
    let token = observed.intent.as_ref().map(|intent| &intent.token);
    let ours = observed
        .pods
        .iter()
        .filter(|(_, pod)| pod.token.as_ref() == token);
    let (mut done, mut of, mut under_way) = (0, 0, false);
    for (name, pod) in ours {
        let parse = |text: &String| EtcdVersion::parse(text).ok();
        let answer = observed.answer(name);
        let answered = answer.and_then(|status| parse(&status.version));
        let made_for = pod.version.as_ref().and_then(parse);
        let is_target = |version: &EtcdVersion| *version == target;
        of += 1;
        done += usize::from(answered.as_ref().is_some_and(is_target));
        let differs = made_for.is_some_and(|made| !is_target(&made));
        under_way |= differs || pod.changed.is_some() || answered.is_some_and(|it| !is_target(&it));
    }
    under_way.then_some(Progress { target, done, of })
}

pub(super) fn target(report: &Report) -> Option<String> {
    progress(report).map(|progress| progress.target.to_string())
}

pub(super) fn upgrading(report: &Report) -> Finding {
    let kind = ConditionType::Upgrading;
    let formed = report.observed.cluster_id.is_some();
    let course = course(report.desired, report.observed);
    if let Course {
        refused: Some(why), ..
    } = course
        && formed
    {
        return finding(kind, false, Reason::VersionRefused, why);
    }
    let Some(Progress { target, done, of }) = progress(report) else {
        let text = "the version is not being changed";
        return finding(kind, false, Reason::AsDesired, text);
    };
    let text = format!("{done} of {of} members run etcd {target}");
    let mut problems = report.plan.problems.iter();
    let stops = [Reason::UpgradeStopped, Reason::VersionMismatch];
    match problems.find(|problem| stops.contains(&problem.reason)) {
        Some(stopped) => {
            let text = format!("{text}; {}", stopped.message);
            finding(kind, true, stopped.reason, text)
        }
        None => finding(kind, true, Reason::InProgress, text),
    }
}
