//! What can be said about an `EtcdCluster` without asking anybody: what is wrong with it, what is accepted
//! and has no effect yet, and what must not be ignored.

use std::collections::BTreeSet;

use super::flags::{flag_of_env, refused_argument, refused_variable};
use super::pod::PodPolicy;
use super::{
    BootstrapMode, EtcdCluster, EtcdClusterSpec, EtcdOptions, GeneratedTls, MAX_SIZE, MIN_SIZE,
    MemberAddress, RecoveryPolicy, TlsPolicy,
};
use crate::names::{is_reserved_annotation, is_reserved_label};
use crate::problem::{Problem, those_set};
use crate::storage::StorageType;
use crate::version::EtcdVersion;

/// The shortest life of a generated certificate: a third of it must be enough to renew it and bring it to the members.
const SHORTEST_CERTIFICATE: std::time::Duration = std::time::Duration::from_mins(3);

/// What is wrong with the object. The schema refuses all of it; objects stored before it existed may
/// still have it.
pub fn validate(cluster: &EtcdCluster) -> Vec<Problem> {
    let name = cluster.metadata.name.as_deref().unwrap_or_default();
    let mut problems = Vec::new();
    problems.extend(Problem::no_cluster_name("metadata.name", name));
    problems.extend(validate_spec(&cluster.spec));
    problems.extend(super::join::join_problem(cluster));
    problems
}

/// What is wrong with a spec, whoever holds it.
pub(crate) fn validate_spec(spec: &EtcdClusterSpec) -> Vec<Problem> {
    let mut problems = Vec::new();
    if !(MIN_SIZE..=MAX_SIZE).contains(&spec.size) {
        let remedy = format!("use {MIN_SIZE} to {MAX_SIZE}, 3 or 5 as a rule");
        problems.push(Problem::new(
            "spec.size",
            format!("is {}", spec.size),
            remedy,
        ));
    }
    if EtcdVersion::parse(&spec.version).is_err() {
        let problem = format!("is {:?}, which is no version", spec.version);
        problems.push(Problem::new(
            "spec.version",
            problem,
            "give major, minor and patch number, such as 3.7.3",
        ));
    }
    if let BootstrapMode::Unknown(text) = &spec.bootstrap {
        problems.push(Problem::unknown(
            "spec.bootstrap",
            text,
            BootstrapMode::KNOWN,
        ));
    }
    if let Some(MemberAddress::Unknown(text)) = &spec.member_address {
        problems.push(Problem::unknown(
            "spec.memberAddress",
            text,
            MemberAddress::KNOWN,
        ));
    }
    if spec.hibernate && !spec.is_durable() {
        problems.push(Problem::new(
            "spec.hibernate",
            "would lose the data of members without volumes",
            "set spec.pod.persistentVolumeClaimSpec or remove spec.hibernate",
        ));
    }
    problems.extend(tls_problems(spec));
    problems.extend(spec.pod.iter().flat_map(pod_problems));
    problems.extend(environment_problems(spec));
    let after = spec
        .member_replacement
        .as_ref()
        .and_then(|replacement| replacement.after.as_ref());
    problems.extend(Problem::no_duration("spec.memberReplacement.after", after));
    let keep = spec
        .member_replacement
        .as_ref()
        .and_then(|replacement| replacement.keep_volumes.as_ref());
    problems.extend(Problem::no_duration(
        "spec.memberReplacement.keepVolumes",
        keep,
    ));
    problems.extend(recovery_problems(spec));
    problems.extend(backup_problems(spec));
    problems
}

fn recovery_problems(spec: &EtcdClusterSpec) -> Vec<Problem> {
    let Some(recovery) = &spec.recovery else {
        return Vec::new();
    };
    let after = recovery.after.as_ref();
    let mut problems: Vec<Problem> = Problem::no_duration("spec.recovery.after", after)
        .into_iter()
        .collect();
    if let Some(RecoveryPolicy::Unknown(text)) = &recovery.policy {
        problems.push(Problem::unknown(
            "spec.recovery.policy",
            text,
            RecoveryPolicy::KNOWN,
        ));
    }
    problems
}

fn tls_problems(spec: &EtcdClusterSpec) -> Option<Problem> {
    let tls = spec.tls.as_ref()?;
    if let Some(generated) = &tls.generated {
        return generated_tls_problem(tls, generated);
    }
    match (tls.operator_secret(), tls.server_secret()) {
        (Some(_), None) => Some(Problem::new(
            "spec.TLS.static.operatorSecret",
            "is given without spec.TLS.static.member.serverSecret",
            "give both or neither",
        )),
        (None, Some(_)) => Some(Problem::new(
            "spec.TLS.static.member.serverSecret",
            "is given without spec.TLS.static.operatorSecret, which the operator needs to reach its own cluster",
            "give both or neither",
        )),
        _ => None,
    }
}

fn generated_tls_problem(tls: &TlsPolicy, generated: &GeneratedTls) -> Option<Problem> {
    if tls.static_.is_some() {
        return Some(Problem::new(
            "spec.TLS",
            "gives both static and generated certificates",
            "give static or generated",
        ));
    }
    let durations = [
        (
            "spec.TLS.generated.certificateDuration",
            &generated.certificate_duration,
        ),
        (
            "spec.TLS.generated.authorityDuration",
            &generated.authority_duration,
        ),
    ];
    for (field, text) in durations {
        let problem = Problem::no_duration(field, text.as_ref());
        if problem.is_some() {
            return problem;
        }
    }
    if generated.certificate_duration() < SHORTEST_CERTIFICATE {
        return Some(Problem::new(
            "spec.TLS.generated.certificateDuration",
            "is too short for a renewal in time",
            "give at least 3m, some weeks as a rule",
        ));
    }
    (generated.authority_duration() < generated.certificate_duration()).then(|| {
        Problem::new(
            "spec.TLS.generated.authorityDuration",
            "is shorter than spec.TLS.generated.certificateDuration, and no certificate outlives its authority",
            "give the authority a longer life than the certificates",
        )
    })
}

fn pod_problems(pod: &PodPolicy) -> Vec<Problem> {
    let mut problems = Vec::new();
    for key in pod.labels.keys().filter(|key| is_reserved_label(key)) {
        problems.push(Problem::new(
            "spec.pod.labels",
            format!("holds {key}, which is the operator's"),
            "choose another key",
        ));
    }
    for key in pod
        .annotations
        .keys()
        .filter(|key| is_reserved_annotation(key))
    {
        problems.push(Problem::new(
            "spec.pod.annotations",
            format!("holds {key}, which is the operator's"),
            "choose another key",
        ));
    }
    for argument in &pod.extra_args {
        if let Some(remedy) = refused_argument(argument) {
            problems.push(Problem::new(
                "spec.pod.extraArgs",
                format!("holds {argument:?}"),
                remedy,
            ));
        }
    }
    let claim = pod.persistent_volume_claim_spec.as_ref();
    let sized = claim.is_none_or(|claim| {
        let requests = claim
            .resources
            .as_ref()
            .and_then(|resources| resources.requests.as_ref());
        requests.is_some_and(|requests| requests.contains_key("storage"))
    });
    if !sized {
        problems.push(Problem::new(
            "spec.pod.persistentVolumeClaimSpec",
            "does not say how big the volume is",
            "set resources.requests.storage",
        ));
    }
    problems
}

/// What etcd would read from its environment and is not the user's to set, or stands in `spec.etcd`. Values are not
/// reported.
fn environment_problems(spec: &EtcdClusterSpec) -> Vec<Problem> {
    let options = spec.etcd.as_ref().map(EtcdOptions::given);
    let options = options.unwrap_or_default();
    let variables = spec.pod.iter().flat_map(|pod| &pod.etcd_env);
    let names: BTreeSet<&str> = variables.map(|variable| variable.name.as_str()).collect();
    let mut problems = Vec::new();
    for name in names {
        let Some(flag) = flag_of_env(name) else {
            continue;
        };
        let field = "spec.pod.etcdEnv";
        let typed = options.iter().find(|(typed, _)| *typed == flag);
        if let Some(remedy) = refused_variable(name) {
            let problem = format!("holds {name}, which sets etcd's flag --{flag}");
            problems.push(Problem::new(field, problem, remedy));
        } else if let Some((_, option)) = typed {
            let problem = format!("holds {name} beside spec.etcd.{option}");
            problems.push(Problem::new(field, problem, "remove the variable"));
        }
    }
    problems
}

fn backup_problems(spec: &EtcdClusterSpec) -> Vec<Problem> {
    let Some(backup) = &spec.backup else {
        return Vec::new();
    };
    let mut problems = backup
        .blocks()
        .problems(&backup.storage_type, "spec.backup", "storageType");
    problems.extend(backup.backup_policy.problems("spec.backup.backupPolicy"));
    problems
}

/// The fields of a spec that are accepted and have no effect in this release.
pub fn not_in_effect(spec: &EtcdClusterSpec) -> Vec<String> {
    let Some(pod) = &spec.pod else {
        return Vec::new();
    };
    let timeout = pod.dns_timeout_in_second.unwrap_or_default();
    let image = pod.busybox_image.as_deref().unwrap_or_default();
    those_set([
        (timeout != 0, "spec.pod.DNSTimeoutInSecond"),
        (!image.is_empty(), "spec.pod.busyboxImage"),
    ])
}

/// The fields of a spec that have no effect in this release and that it would be dangerous to ignore: the
/// operator starts nothing while one is set.
pub fn unsafe_to_ignore(spec: &EtcdClusterSpec) -> Vec<Problem> {
    // None in this release: every field that must not be ignored is in effect.
    let _ = spec;
    Vec::new()
}

/// Whether a restore can reach this kind of store in this release.
pub(crate) fn store_in_effect(storage_type: &StorageType) -> bool {
    *storage_type != StorageType::Local
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{MemberTls, Recovery, StaticTls};
    use crate::duration::DurationText;
    use crate::problem::fields;

    fn cluster(spec: EtcdClusterSpec) -> EtcdCluster {
        EtcdCluster::new("main", spec)
    }

    #[test]
    fn the_default_spec_has_no_problem_and_is_all_in_effect() {
        let spec = EtcdClusterSpec::default();
        assert_eq!(validate(&cluster(spec.clone())), []);
        assert_eq!(not_in_effect(&spec), Vec::<String>::new());
        assert_eq!(unsafe_to_ignore(&spec), []);
    }

    #[test]
    fn every_problem_of_a_stored_object_is_named() {
        let spec = EtcdClusterSpec {
            size: 9,
            version: "latest".into(),
            hibernate: true,
            bootstrap: BootstrapMode::from("Slow"),
            pod: Some(PodPolicy {
                labels: [("app".to_owned(), "x".to_owned())].into(),
                extra_args: vec!["--data-dir=/x".into()],
                ..PodPolicy::default()
            }),
            recovery: Some(Recovery {
                policy: Some(RecoveryPolicy::from("Perhaps")),
                after: Some(DurationText("soon".into())),
            }),
            ..EtcdClusterSpec::default()
        };
        let problems = validate(&EtcdCluster::new("1main", spec));
        assert_eq!(
            fields(&problems),
            [
                "metadata.name",
                "spec.size",
                "spec.version",
                "spec.bootstrap",
                "spec.hibernate",
                "spec.pod.labels",
                "spec.pod.extraArgs",
                "spec.recovery.after",
                "spec.recovery.policy"
            ]
        );
        assert!(problems.iter().all(|problem| !problem.remedy.is_empty()));
    }

    fn with_variables(names: &[&str], etcd: &str) -> EtcdCluster {
        let variable = |name: &&str| serde_json::json!({ "name": name, "value": "secret" });
        let variables: Vec<_> = names.iter().map(variable).collect();
        let etcd: serde_json::Value = serde_json::from_str(etcd).unwrap();
        let spec = serde_json::json!({ "pod": { "etcdEnv": variables }, "etcd": etcd });
        cluster(serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn names_variables_of_owned_flags_once_and_without_values() {
        let stored = with_variables(
            &[
                "ETCD_LOG_LEVEL",
                "ETCD_WAL_DIR",
                "ETCD_FORCE_NEW_CLUSTER",
                "ETCD_WAL_DIR",
            ],
            "{}",
        );
        let problems: Vec<String> = validate(&stored).iter().map(Problem::to_string).collect();
        assert_eq!(
            problems,
            [
                "spec.pod.etcdEnv holds ETCD_FORCE_NEW_CLUSTER, which sets etcd's flag --force-new-cluster: remove the \
                 variable, whose flag is the operator's",
                "spec.pod.etcdEnv holds ETCD_WAL_DIR, which sets etcd's flag --wal-dir: remove the variable, whose flag \
                 is the operator's",
            ]
        );
    }

    #[test]
    fn refuses_a_variable_whatever_its_value_comes_from() {
        let text = r#"{"pod":{"etcdEnv":[
            {"name":"ETCD_DATA_DIR"},
            {"name":"ETCD_NAME","valueFrom":{"fieldRef":{"fieldPath":"metadata.name"}}},
            {"name":"ETCD_INITIAL_CLUSTER_STATE","value":""}]}}"#;
        let problems = validate(&cluster(serde_json::from_str(text).unwrap()));
        assert_eq!(fields(&problems), ["spec.pod.etcdEnv"; 3]);
    }

    /// Manifests of v1beta2 have no other way to set these.
    #[test]
    fn refuses_variables_of_options_only_beside_their_field() {
        for (flag, (name, etcd)) in super::super::TYPED_FLAGS.iter().zip([
            (
                "ETCD_QUOTA_BACKEND_BYTES",
                r#"{"quotaBackendBytes":4294967296}"#,
            ),
            (
                "ETCD_AUTO_COMPACTION_MODE",
                r#"{"autoCompactionMode":"periodic"}"#,
            ),
            (
                "ETCD_AUTO_COMPACTION_RETENTION",
                r#"{"autoCompactionRetention":"1"}"#,
            ),
            (
                "ETCD_HEARTBEAT_INTERVAL",
                r#"{"heartbeatInterval":"200ms"}"#,
            ),
            ("ETCD_ELECTION_TIMEOUT", r#"{"electionTimeout":"2s"}"#),
            ("ETCD_SNAPSHOT_COUNT", r#"{"snapshotCount":5000}"#),
            ("ETCD_MAX_REQUEST_BYTES", r#"{"maxRequestBytes":2097152}"#),
        ]) {
            assert_eq!(flag_of_env(name).as_deref(), Some(*flag));
            assert_eq!(validate(&with_variables(&[name], "{}")), []);
            assert_eq!(validate(&with_variables(&["ETCD_LOG_LEVEL"], etcd)), []);
            let problems = validate(&with_variables(&[name], etcd));
            assert_eq!(fields(&problems), ["spec.pod.etcdEnv"], "{name}");
            assert!(problems[0].problem.contains("spec.etcd."), "{problems:?}");
        }
    }

    #[test]
    fn variables_of_other_containers_are_the_users() {
        let text = r#"{"pod":{
            "sidecars":[{"name":"a","env":[{"name":"ETCD_NAME","value":"x"}]}],
            "initContainers":[{"name":"b","env":[{"name":"ETCD_DATA_DIR","value":"x"}]}]}}"#;
        let stored = cluster(serde_json::from_str(text).unwrap());
        assert_eq!(validate(&stored), []);
    }

    #[test]
    fn what_a_release_does_and_does_not_do_is_told_apart() {
        let spec = |text: &str| -> EtcdClusterSpec { serde_json::from_str(text).unwrap() };
        for text in [
            r#"{"bootstrap":"Seed"}"#,
            r#"{"memberAddress":"Pod"}"#,
            r#"{"memberReplacement":{"after":"5m"}}"#,
            r#"{"recovery":{"policy":"Manual"}}"#,
            r#"{"recovery":{"policy":"Automatic","after":"5m"}}"#,
            r#"{"etcd":{"snapshotCount":1000}}"#,
            r#"{"services":{"client":{"type":"NodePort"}}}"#,
            r#"{"hibernate":true}"#,
            r#"{"auth":{"secret":"root","enabled":true}}"#,
            r#"{"networkPolicy":{}}"#,
            r#"{"upkeep":{"defragmentation":{"freePercent":50}}}"#,
        ] {
            assert_eq!(not_in_effect(&spec(text)), Vec::<String>::new(), "{text}");
        }
        let text = r#"{"pod":{"busyboxImage":"busybox"}}"#;
        assert_eq!(not_in_effect(&spec(text)), ["spec.pod.busyboxImage"]);
    }

    #[test]
    fn operator_and_server_secret_go_together() {
        let tls = |server: Option<&str>, operator: Option<&str>| EtcdClusterSpec {
            tls: Some(TlsPolicy {
                static_: Some(StaticTls {
                    member: Some(MemberTls {
                        peer_secret: None,
                        server_secret: server.map(str::to_owned),
                        ..MemberTls::default()
                    }),
                    operator_secret: operator.map(str::to_owned),
                }),
                ..TlsPolicy::default()
            }),
            ..EtcdClusterSpec::default()
        };
        assert_eq!(
            fields(&validate(&cluster(tls(Some("a"), None)))),
            ["spec.TLS.static.member.serverSecret"]
        );
        assert_eq!(
            fields(&validate(&cluster(tls(None, Some("a"))))),
            ["spec.TLS.static.operatorSecret"]
        );
        assert_eq!(validate(&cluster(tls(Some("a"), Some("b")))), []);
        assert_eq!(validate(&cluster(tls(None, None))), []);
    }

    #[test]
    fn certificates_come_from_one_place_and_last_long_enough_to_be_renewed() {
        let generated = |text: &str| EtcdClusterSpec {
            tls: serde_json::from_str(text).unwrap(),
            ..EtcdClusterSpec::default()
        };
        let fine = generated(r#"{"generated":{"certificateDuration":"3m"}}"#);
        assert_eq!(validate(&cluster(fine.clone())), []);
        assert_eq!(unsafe_to_ignore(&fine), []);
        for (text, field) in [
            (r#"{"generated":{},"static":{}}"#, "spec.TLS"),
            (
                r#"{"generated":{"certificateDuration":"2m"}}"#,
                "spec.TLS.generated.certificateDuration",
            ),
            (
                r#"{"generated":{"authorityDuration":"1h"}}"#,
                "spec.TLS.generated.authorityDuration",
            ),
            (
                r#"{"generated":{"authorityDuration":"soon"}}"#,
                "spec.TLS.generated.authorityDuration",
            ),
        ] {
            assert_eq!(fields(&validate(&cluster(generated(text)))), [field]);
        }
    }

    #[test]
    fn what_v1beta2_wrote_for_nothing_is_not_reported() {
        let pod: PodPolicy = serde_json::from_str(
            r#"{"ClusterDomain":"","DNSTimeoutInSecond":0,"busyboxImage":"","labels":null}"#,
        )
        .unwrap();
        let spec = EtcdClusterSpec {
            pod: Some(pod),
            ..EtcdClusterSpec::default()
        };
        assert_eq!(not_in_effect(&spec), Vec::<String>::new());
    }
}
