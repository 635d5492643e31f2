//! Tests: the validation of an EtcdCluster.

use super::*;
use crate::cluster::{MemberTls, Recovery, StaticTls, TlsPolicy};
use crate::duration::DurationText;
use crate::problem::fields;

fn cluster(spec: EtcdClusterSpec) -> EtcdCluster {
    EtcdCluster::new("main", spec)
}

#[test]
fn default_etcdcluster_spec_is_valid() {
    let spec = EtcdClusterSpec::default();
    assert_eq!(validate(&cluster(spec.clone())), []);
    assert_eq!(not_in_effect(&spec), Vec::<String>::new());
    assert_eq!(unsafe_to_ignore(&spec), []);
}

#[test]
fn each_invalid_field_of_stored_etcdcluster_is_reported() {
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
            keep_volumes: Some(DurationText("long".into())),
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
            "spec.recovery.keepVolumes",
            "spec.recovery.policy"
        ]
    );
    assert!(problems.iter().all(|problem| !problem.remedy.is_empty()));
}

#[test]
fn retain_volumes_requires_persistent_volume_claim_spec() {
    let problems = |text: &str| validate(&cluster(serde_json::from_str(text).unwrap()));
    let field = ["spec.deletionPolicy"];
    let bare = problems(r#"{"deletionPolicy":"RetainVolumes"}"#);
    assert_eq!(fields(&bare), field);
    let unknown = problems(r#"{"deletionPolicy":"Keep"}"#);
    assert_eq!(fields(&unknown), field);
    assert!(unknown[0].remedy.contains("RetainVolumes"), "{unknown:?}");
    assert_eq!(problems(r#"{"deletionPolicy":"Delete"}"#), []);
    let durable = r#"{"deletionPolicy":"RetainVolumes","pod":{"persistentVolumeClaimSpec":{
        "resources":{"requests":{"storage":"1Gi"}}}}}"#;
    assert_eq!(problems(durable), []);
}

#[test]
fn backup_then_delete_requires_spec_backup() {
    let problems = |text: &str| validate(&cluster(serde_json::from_str(text).unwrap()));
    let bare = problems(r#"{"deletionPolicy":"BackupThenDelete"}"#);
    assert_eq!(fields(&bare), ["spec.deletionPolicy"]);
    let complete = r#"{"deletionPolicy":"BackupThenDelete","backup":{"storageType":"S3",
        "s3":{"path":"b/k"},"backupPolicy":{"schedule":"@daily"}}}"#;
    assert_eq!(problems(complete), []);
}

#[test]
fn image_needs_digest_and_excludes_repository() {
    let problems = |more: &str| {
        let spec: EtcdClusterSpec = serde_json::from_str(&format!("{{{more}}}")).unwrap();
        fields(&validate(&cluster(spec))).join(" ")
    };
    let digest = "0123456789abcdef".repeat(4);
    for name in ["etcd", "registry.local:5000/a/etcd:v3.6.16"] {
        let image = format!(r#""image":"{name}@sha256:{digest}""#);
        assert_eq!(problems(&image), "", "{name}");
        let both = format!(r#"{image},"repository":"registry.local/etcd""#);
        assert_eq!(problems(&both), "spec.image", "{name}");
    }
    let upper = digest.to_uppercase();
    for image in [
        "registry.local/etcd:v3.6.16".to_owned(),
        "registry.local/etcd@sha256:0123".to_owned(),
        format!("@sha256:{digest}"),
        format!("a b@sha256:{digest}"),
        format!("etcd@sha256:{upper}"),
        format!("etcd@sha256:{digest}@sha256:{digest}"),
    ] {
        assert_eq!(
            problems(&format!(r#""image":"{image}""#)),
            "spec.image",
            "{image}"
        );
    }
}

#[test]
fn spec_image_is_used_only_for_spec_version() {
    let version = |text: &str| EtcdVersion::parse(text).unwrap();
    let spec = EtcdClusterSpec {
        version: "v3.6.16".into(),
        image: Some("registry.local/etcd@sha256:ab".into()),
        ..EtcdClusterSpec::default()
    };
    let pinned = Some("registry.local/etcd@sha256:ab".to_owned());
    assert_eq!(spec.image_for(&version("3.6.16")), pinned);
    assert_eq!(spec.image_for(&version("3.5.35")), None);
    assert_eq!(
        spec.image_of(&version("3.5.35")),
        "quay.io/coreos/etcd:v3.5.35"
    );
    let tagged = EtcdClusterSpec::default();
    let other = tagged.image_for(&version("3.5.35"));
    assert_eq!(other.as_deref(), Some("quay.io/coreos/etcd:v3.5.35"));
}

#[test]
fn invalid_before_changes_and_max_age_are_rejected() {
    let problems = |more: &str| {
        let text = format!(
            r#"{{"backup":{{"storageType":"S3","s3":{{"path":"b/k"}},"backupPolicy":{{"schedule":"@daily"}},{more}}}}}"#
        );
        validate(&cluster(serde_json::from_str(&text).unwrap()))
    };
    let all =
        r#""beforeChanges":["Upgrade","Recovery","Restore","Shrink"],"beforeChangesMaxAge":"15m""#;
    assert_eq!(problems(all), []);
    let unknown = problems(r#""beforeChanges":["Upgrade","Reboot"]"#);
    assert_eq!(fields(&unknown), ["spec.backup.beforeChanges"]);
    assert!(unknown[0].remedy.contains("Shrink"), "{unknown:?}");
    let deletion = problems(r#""beforeChanges":["Deletion"]"#);
    assert_eq!(fields(&deletion), ["spec.backup.beforeChanges"]);
    let field = ["spec.backup.beforeChangesMaxAge"];
    let text = r#""beforeChanges":["Upgrade"],"beforeChangesMaxAge":"1d""#;
    assert_eq!(fields(&problems(text)), field);
    assert_eq!(fields(&problems(r#""beforeChangesMaxAge":"1h""#)), field);
}

fn with_variables(names: &[&str], etcd: &str) -> EtcdCluster {
    let variable = |name: &&str| serde_json::json!({ "name": name, "value": "secret" });
    let variables: Vec<_> = names.iter().map(variable).collect();
    let etcd: serde_json::Value = serde_json::from_str(etcd).unwrap();
    let spec = serde_json::json!({ "pod": { "etcdEnv": variables }, "etcd": etcd });
    cluster(serde_json::from_value(spec).unwrap())
}

#[test]
fn reserved_variable_is_reported_once_without_its_value() {
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
            "spec.pod.etcdEnv has the variable ETCD_FORCE_NEW_CLUSTER, which sets etcd's flag --force-new-cluster: remove the \
             variable, because the operator sets the flag",
            "spec.pod.etcdEnv has the variable ETCD_WAL_DIR, which sets etcd's flag --wal-dir: remove the variable, \
             because the operator sets the flag",
        ]
    );
}

#[test]
fn reserved_variable_is_rejected_with_any_value_source() {
    let text = r#"{"pod":{"etcdEnv":[
            {"name":"ETCD_DATA_DIR"},
            {"name":"ETCD_NAME","valueFrom":{"fieldRef":{"fieldPath":"metadata.name"}}},
            {"name":"ETCD_INITIAL_CLUSTER_STATE","value":""}]}}"#;
    let problems = validate(&cluster(serde_json::from_str(text).unwrap()));
    assert_eq!(fields(&problems), ["spec.pod.etcdEnv"; 3]);
}

/// Manifests of coreos/etcd-operator set these options with variables, because its spec has no fields for the options.
/// A variable is rejected only together with the field.
#[test]
fn environment_variable_is_rejected_if_spec_sets_same_option() {
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
        ("ETCD_MAX_TXN_OPS", r#"{"maxTxnOps":1024}"#),
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
fn sidecars_may_set_any_environment_variable() {
    let text = r#"{"pod":{
            "sidecars":[{"name":"a","env":[{"name":"ETCD_NAME","value":"x"}]}],
            "initContainers":[{"name":"b","env":[{"name":"ETCD_DATA_DIR","value":"x"}]}]}}"#;
    let stored = cluster(serde_json::from_str(text).unwrap());
    assert_eq!(validate(&stored), []);
}

#[test]
fn only_spec_fields_without_effect_are_reported() {
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
fn operator_tls_secret_and_server_tls_secret_require_each_other() {
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
fn tls_with_two_certificate_sources_or_short_validity_is_rejected() {
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
            r#"{"static":{},"certManager":{"issuerRef":{"name":"ca"}}}"#,
            "spec.TLS",
        ),
        (
            r#"{"certManager":{"issuerRef":{"name":"ca"},"duration":"1m"}}"#,
            "spec.TLS.certManager.duration",
        ),
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
fn empty_spec_fields_of_v1beta2_objects_are_ignored() {
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
