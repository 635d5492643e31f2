//! The problems for which a spec is rejected. Pure.

use api::EtcdBackup;
use api::problem::{Problem, summary};

use super::schedule::{self, Schedule};
use crate::reason::{Reason, Trouble};

/// The problem of a rejected spec; `None` if the spec is accepted.
pub fn refusal(backup: &EtcdBackup) -> Option<Trouble> {
    let mut problems = api::backup::validate(backup);
    if let Some(Err(problem)) = backup.spec.backup_policy.as_ref().map(Schedule::of) {
        problems.push(in_policy(&problem));
    }
    let endpoints = &backup.spec.etcd_endpoints;
    let mut urls = endpoints.iter();
    // Invariant 20: without a CA certificate the operator cannot verify the members.
    if urls.any(|url| url.starts_with("https://")) && backup.spec.client_tls_secret().is_none() {
        problems.push(Problem::new(
            "spec.etcdEndpoints",
            "names an https URL, but no CA certificate to verify it",
            "name a Secret in spec.clientTLSSecret",
        ));
    }
    if !problems.is_empty() {
        return Some(Trouble::new(Reason::InvalidSpec, summary(&problems)));
    }
    let problems = api::backup::unsafe_to_ignore(&backup.spec);
    (!problems.is_empty()).then(|| Trouble::new(Reason::NotSupported, summary(&problems)))
}

fn in_policy(problem: &schedule::Problem) -> Problem {
    match problem {
        schedule::Problem::Schedule { text, why } => Problem::new(
            "spec.backupPolicy.schedule",
            format!("is {text:?}, which cannot be read ({why})"),
            "write five cron fields such as 0 3 * * *, or @daily",
        ),
        schedule::Problem::TimeZone { name } => Problem::new(
            "spec.backupPolicy.timeZone",
            format!("is {name:?}, which is not known"),
            "use a name such as Europe/Berlin",
        ),
    }
}
