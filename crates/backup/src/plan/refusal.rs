//! Checks the spec of an EtcdBackup. Performs no I/O.

use api::EtcdBackup;
use api::problem::{Problem, summary};
use kube::ResourceExt;
use runtime::members;
use runtime::schedule::Schedule as Cron;

use super::schedule::Schedule;
use crate::reason::{Reason, Trouble};

/// The problem for which the operator rejects the spec, or `None` if it accepts the spec.
pub fn refusal(backup: &EtcdBackup) -> Option<Trouble> {
    let mut problems = api::backup::validate(backup);
    if let Some(Err(problem)) = backup.spec.backup_policy.as_ref().map(Schedule::of) {
        problems.push(in_block("spec.backupPolicy", &problem));
    }
    problems.extend(verification_times(backup));
    let endpoints = &backup.spec.etcd_endpoints;
    let mut urls = endpoints.iter();
    // Invariant 20: without a CA certificate, the operator cannot verify the members, so https URLs are rejected.
    if urls.any(|url| url.starts_with("https://")) && backup.spec.client_tls_secret().is_none() {
        problems.push(Problem::new(
            "spec.etcdEndpoints",
            "has an https URL, but the spec names no CA certificate to verify the server",
            "name a Secret in spec.clientTLSSecret",
        ));
    }
    problems.extend(exposed_password(backup));
    if !problems.is_empty() {
        return Some(Trouble::new(Reason::InvalidSpec, summary(&problems)));
    }
    let problems = api::backup::unsafe_to_ignore(&backup.spec);
    (!problems.is_empty()).then(|| Trouble::new(Reason::NotSupported, summary(&problems)))
}

/// The problems of the schedule and of the window of verifications.
fn verification_times(backup: &EtcdBackup) -> Vec<Problem> {
    let Some(verification) = &backup.spec.verification else {
        return Vec::new();
    };
    let mut problems = Vec::new();
    if let Some(text) = &verification.schedule
        && let Err(problem) = Cron::parse(text, verification.time_zone.as_deref())
    {
        problems.push(in_block("spec.verification", &problem));
    }
    if let Some(window) = &verification.window
        && let Err(problem) = Cron::parse(&window.schedule, window.time_zone.as_deref())
    {
        problems.push(in_block("spec.verification.window", &problem));
    }
    problems
}

/// The problem of a spec that would send a password without TLS to another namespace.
fn exposed_password(backup: &EtcdBackup) -> Option<Problem> {
    backup.spec.auth_secret.as_ref()?;
    let namespace = backup.namespace().unwrap_or_default();
    let exposed = members::exposed(&backup.spec.etcd_endpoints, &namespace)?;
    Some(Problem::new(
        "spec.authSecret",
        format!(
            "would send a password without TLS to {exposed}, which is outside of this namespace"
        ),
        "set an https URL in spec.etcdEndpoints, and set spec.clientTLSSecret. Or name a Service of this namespace, \
         such as http://example-client:2379",
    ))
}

/// Converts the problem of a schedule. `block` is the JSON path of the object with the fields `schedule` and
/// `timeZone`.
fn in_block(block: &str, problem: &runtime::schedule::Problem) -> Problem {
    match problem {
        runtime::schedule::Problem::Schedule { text, why } => Problem::new(
            format!("{block}.schedule"),
            format!("is {text:?}, which is not a valid schedule ({why})"),
            "write five cron fields such as 0 3 * * *, or @daily",
        ),
        runtime::schedule::Problem::TimeZone { name } => Problem::new(
            format!("{block}.timeZone"),
            format!("is {name:?}, which is not known"),
            "use a name such as Europe/Berlin",
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(endpoint: &str, secret: Option<&str>) -> Option<String> {
        let backup: EtcdBackup = serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2",
            "kind": "EtcdBackup",
            "metadata": { "name": "b", "namespace": "prod" },
            "spec": {
                "etcdEndpoints": ["http://main-client:2379", endpoint], "clientTLSSecret": "tls", "authSecret": secret,
                "storageType": "S3", "s3": { "path": "bucket/key" },
            },
        }))
        .unwrap();
        refusal(&backup).map(|trouble| trouble.message)
    }

    #[test]
    fn verification_window_that_never_opens_is_rejected() {
        let refused = |window: serde_json::Value| {
            let backup: EtcdBackup = serde_json::from_value(json!({
                "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup", "metadata": { "name": "b" },
                "spec": { "etcdCluster": { "name": "c" }, "storageType": "S3", "s3": { "path": "bucket/key" },
                          "verification": { "window": window } },
            }))
            .unwrap();
            refusal(&backup).map(|trouble| trouble.message)
        };
        assert_eq!(
            refused(json!({ "schedule": "0 22 * * SAT", "duration": "6h" })),
            None
        );
        for (schedule, zone, field) in [
            ("0 22 30 2 *", "Etc/UTC", "schedule"),
            ("0 25 * * *", "Etc/UTC", "schedule"),
            ("0 22 * * *", "Mars/Olympus", "timeZone"),
        ] {
            let window = json!({ "schedule": schedule, "timeZone": zone, "duration": "6h" });
            let message = refused(window).unwrap_or_default();
            let field = format!("spec.verification.window.{field}");
            assert!(message.contains(&field), "{schedule} {zone}: {message}");
        }
    }

    #[test]
    fn spec_auth_secret_without_tls_is_rejected_outside_of_namespace() {
        for endpoint in [
            "http://attacker.example:2379",
            "http://203.0.113.7:2379",
            "http://[2001:db8::7]:2379",
            "http://main-client.other.svc:2379",
            "http://main-client.prod.svc.attacker.example:2379",
            "http://main-client.prod:2379",
            "http://main-client.prod.svc@attacker.example:2379",
            "http://attacker.example#.prod.svc:2379",
            "http://attacker.example/a.prod.svc",
            "http://localhost:2379",
            "attacker.example:2379",
            "HTTPS://attacker.example:2379",
        ] {
            let message = refused(endpoint, Some("root")).unwrap_or_default();
            for part in ["spec.authSecret", endpoint, "spec.clientTLSSecret"] {
                assert!(message.contains(part), "{endpoint}: {message}");
            }
            assert_eq!(refused(endpoint, None), None, "{endpoint}");
        }
        for endpoint in [
            "https://attacker.example:2379",
            "http://main-client.prod.svc:2379",
            "http://main-client.prod.svc.cluster.local:2379/",
            "http://main-abc.main.prod.svc:2379",
            "main-client:2379",
        ] {
            assert_eq!(refused(endpoint, Some("root")), None, "{endpoint}");
        }
    }
}
