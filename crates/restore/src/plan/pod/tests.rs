//! Tests of the pod of a seed.
#![allow(
    clippy::needless_pass_by_value,
    reason = "tests pass `json!` literals directly as arguments"
)]

use api::EtcdCluster;
use serde_json::{Value, json};

use super::*;

fn source(json: Value) -> StorageBlock {
    StorageBlock::S3(serde_json::from_value(json).unwrap())
}

fn built(cluster: Value, source: &StorageBlock) -> Value {
    built_as(cluster, source, false)
}

fn built_as(cluster: Value, source: &StorageBlock, in_place: bool) -> Value {
    built_with(cluster, source, in_place, None)
}

fn built_with(
    cluster: Value,
    source: &StorageBlock,
    in_place: bool,
    encryption_secret: Option<&str>,
) -> Value {
    built_up_to(cluster, source, (in_place, encryption_secret), None)
}

fn built_up_to(
    cluster: Value,
    source: &StorageBlock,
    (in_place, encryption_secret): (bool, Option<&str>),
    continuous: Option<&ChosenPoint>,
) -> Value {
    let mut cluster = EtcdCluster::new("main", serde_json::from_value(cluster).unwrap());
    cluster.metadata.uid = Some("cluster-uid".into());
    let seed = SeedStatus {
        member: "main-aaaaaaaaaa".into(),
        token: "restore-uid".into(),
    };
    let version = EtcdVersion::parse(&cluster.spec.version).unwrap();
    let members = Members::of(&cluster, "prod", &seed.token, None);
    let operator = OperatorImage {
        image: "localhost/etcd-operator:dev".into(),
        pull_policy: Some("IfNotPresent".into()),
    };
    let from = From {
        seed: &seed,
        version: &version,
        restore: "uid",
        source,
        sha256: None,
        encryption_secret,
        bump_revision: None,
        continuous,
        in_place,
    };
    serde_json::to_value(build(&members, &from, &operator)).unwrap()
}

#[test]
fn invariant_17_no_service_selects_seed_of_restore_in_place() {
    let strict = json!({ "pod": { "antiAffinity": true } });
    let pod = built_as(strict.clone(), &with_secret(), true);
    let labels = pod["metadata"]["labels"].as_object().unwrap();
    assert!(!labels.contains_key("app") && !labels.contains_key("etcd_cluster"));
    assert_eq!(labels["etcd.database.coreos.com/restore"], "uid");
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    let terms = &pod["spec"]["affinity"]["podAntiAffinity"][required];
    assert_eq!(*terms, json!([]));
    let pod = built(strict, &with_secret());
    assert_eq!(pod["metadata"]["labels"]["etcd_cluster"], "main");
    let terms = &pod["spec"]["affinity"]["podAntiAffinity"][required];
    assert_eq!(terms.as_array().unwrap().len(), 1);
}

fn with_secret() -> StorageBlock {
    source(
        json!({ "path": "b/k", "awsSecret": "aws", "endpoint": "http://s3:9000", "forcePathStyle": true }),
    )
}

/// Defect 6 of coreos/etcd-operator: its seeds downloaded the backup with an image of a third party, without a tag.
#[test]
fn seed_containers_use_operator_and_member_images() {
    let pod = built(
        json!({ "version": "3.6.16", "repository": "registry.local/etcd" }),
        &with_secret(),
    );
    let init = &pod["spec"]["initContainers"];
    assert_eq!(
        (&init[0]["name"], &init[0]["image"]),
        (&json!("fetch"), &json!("localhost/etcd-operator:dev"))
    );
    assert_eq!(init.as_array().unwrap().len(), 1);
    let etcd = &pod["spec"]["containers"][0];
    assert_eq!(
        (&etcd["name"], &etcd["image"]),
        (&json!("etcd"), &json!("registry.local/etcd:v3.6.16"))
    );
    assert_eq!(
        etcd["command"],
        json!(["/var/etcd-tools/etcd-restore-operator"])
    );
    assert_eq!(etcd["args"][3], json!("/usr/local/bin/etcd"));
}

#[test]
fn seed_has_pinned_image_of_spec() {
    let image = "registry.local/etcd@sha256:ab";
    let pod = built(
        json!({ "version": "3.6.16", "image": image }),
        &with_secret(),
    );
    assert_eq!(pod["spec"]["containers"][0]["image"], image);
}

/// Invariant 14: credentials are files that only one container mounts. They are not in environment variables or
/// arguments.
#[test]
fn credentials_are_mounted_only_in_fetch_container() {
    let pod = built(json!({}), &with_secret());
    let mounts = |container: &Value| {
        let all = container["volumeMounts"].as_array().unwrap();
        all.iter()
            .filter(|mount| mount["name"] == "restore-secret")
            .count()
    };
    let spec = &pod["spec"];
    assert_eq!(mounts(&spec["initContainers"][0]), 1);
    assert_eq!(mounts(&spec["containers"][0]), 0);
    let volumes = spec["volumes"].as_array().unwrap();
    let secret = volumes
        .iter()
        .find(|volume| volume["name"] == "restore-secret")
        .unwrap();
    assert_eq!(
        secret["secret"],
        json!({ "secretName": "aws", "optional": true, "defaultMode": 0o440 })
    );
    for container in spec["initContainers"].as_array().unwrap() {
        assert_eq!(container["env"], Value::Null);
    }
}

/// Invariant 14: only the container that fetches the backup mounts the keys.
#[test]
fn encryption_keys_are_mounted_only_in_fetch_container() {
    let pod = built_with(json!({}), &with_secret(), false, Some("keys"));
    let spec = &pod["spec"];
    let mounts = |container: &Value| {
        let all = container["volumeMounts"].as_array().unwrap();
        let keys = all
            .iter()
            .filter(|mount| mount["name"] == "restore-encryption");
        keys.count()
    };
    assert_eq!(mounts(&spec["initContainers"][0]), 1);
    assert_eq!(mounts(&spec["containers"][0]), 0);
    let volumes = spec["volumes"].as_array().unwrap();
    let secret = volumes
        .iter()
        .find(|volume| volume["name"] == "restore-encryption")
        .unwrap();
    assert_eq!(
        secret["secret"],
        json!({ "secretName": "keys", "optional": true, "defaultMode": 0o440 })
    );
    assert!(
        !built(json!({}), &with_secret())
            .to_string()
            .contains("encryption")
    );
}

#[test]
fn seed_with_ambient_identity_mounts_no_secret() {
    for source in [
        source(json!({ "path": "b/k" })),
        source(json!({ "path": "b/k", "awsSecret": "" })),
    ] {
        let pod = built(json!({}), &source);
        assert!(!pod.to_string().contains("restore-secret"));
        assert!(!pod.to_string().contains("--secret"));
    }
}

#[test]
fn fetch_container_gets_path_of_ca_secret() {
    let pod = built(
        json!({}),
        &source(json!({ "path": "b/k", "caSecret": "ca" })),
    );
    let arguments = pod["spec"]["initContainers"][0]["args"].to_string();
    assert!(arguments.contains("--ca=/run/restore/ca"));
}

/// If the restored data is missing, etcd must not start as an empty cluster.
#[test]
fn invariant_6_seed_never_starts_with_state_new() {
    let arguments = built(json!({}), &with_secret())["spec"]["containers"][0]["args"].to_string();
    assert!(
        arguments.contains("--initial-cluster-state=existing"),
        "{arguments}"
    );
    assert!(!arguments.contains("--initial-cluster-state=new"));
}

#[test]
fn seed_uses_etcdctl_or_etcdutl_by_etcd_version() {
    for (version, tool) in [
        ("3.4.23", "/usr/local/bin/etcdctl"),
        ("3.5.35", "/usr/local/bin/etcdutl"),
    ] {
        let pod = built(json!({ "version": version }), &with_secret());
        let settings = pod["spec"]["containers"][0]["args"][2].as_str().unwrap();
        let settings: Value = serde_json::from_str(settings).unwrap();
        assert_eq!(settings["tool"], tool);
    }
}

/// Defect 7 of coreos/etcd-operator: its seeds always used an `emptyDir`.
#[test]
fn seed_uses_volumes_of_cluster() {
    let claim = json!({ "pod": { "persistentVolumeClaimSpec": { "resources": { "requests": { "storage": "1Gi" } } } } });
    let pod = built(claim, &with_secret());
    let volume = &pod["spec"]["volumes"][0];
    assert_eq!(
        volume["persistentVolumeClaim"]["claimName"],
        "main-aaaaaaaaaa"
    );
}

#[test]
fn backup_pvc_is_mounted_only_in_fetch_container() {
    let place = json!({ "claimName": "backups", "path": "etcd/main" });
    let place = StorageBlock::Pvc(serde_json::from_value(place).unwrap());
    let pod = built(json!({ "version": "3.6.16" }), &place);
    let mounted = |container: &Value| {
        let mounts = container["volumeMounts"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        mounts
            .into_iter()
            .find(|mount| mount["name"] == "restore-claim")
    };
    let fetch = &pod["spec"]["initContainers"][0];
    assert_eq!(mounted(fetch).unwrap()["readOnly"], true);
    let arguments = fetch["args"].to_string();
    assert!(
        arguments.contains("--claim=/run/restore/claim"),
        "{arguments}"
    );
    assert!(arguments.contains("--etcd-version=3.6.16"), "{arguments}");
    assert_eq!(mounted(&pod["spec"]["containers"][0]), None);
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    let volume = volumes
        .iter()
        .find(|volume| volume["name"] == "restore-claim");
    assert_eq!(
        volume.unwrap()["persistentVolumeClaim"]["claimName"],
        "backups"
    );
}

#[test]
fn init_containers_of_user_run_after_fetch() {
    let pod = built(
        json!({ "pod": { "initContainers": [{ "name": "own", "image": "a" }] } }),
        &with_secret(),
    );
    let init = pod["spec"]["initContainers"].as_array().unwrap();
    let names: Vec<_> = init
        .iter()
        .map(|container| container["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["fetch", "own"]);
}

#[test]
fn fetch_container_is_restricted() {
    let pod = built(json!({}), &with_secret());
    for container in pod["spec"]["initContainers"].as_array().unwrap() {
        assert_eq!(
            container["securityContext"]["allowPrivilegeEscalation"],
            false
        );
        assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
        assert_eq!(
            container["securityContext"]["capabilities"]["drop"],
            json!(["ALL"])
        );
    }
}

/// Parses the arguments of the first container in the list `container` of the pod's spec, as the seed's program does.
fn parsed(pod: &Value, container: &str) -> crate::seed::Command {
    use clap::Parser;
    #[derive(Parser)]
    struct Program {
        #[command(subcommand)]
        command: Seed,
    }
    #[derive(clap::Subcommand)]
    enum Seed {
        #[command(subcommand)]
        Seed(crate::seed::Command),
    }
    let arguments = pod["spec"][container][0]["args"].as_array().unwrap();
    let arguments = arguments
        .iter()
        .map(|argument| argument.as_str().unwrap().to_owned());
    let arguments = std::iter::once("program".to_owned()).chain(arguments);
    let Seed::Seed(command) = Program::parse_from(arguments).command;
    command
}

#[test]
fn seed_of_restore_to_point_gets_base_and_revision() {
    let point: ChosenPoint = serde_json::from_value(json!({
        "revision": 17, "time": "2026-11-28T01:02:03.000004Z", "base": "10-ab", "baseRevision": 10,
        "baseTime": "2026-11-28T00:00:00.000000Z", "clusterID": "ab", "segments": 2, "segmentBytes": 300,
        "prefix": "etcd/main.continuous/uid/",
    }))
    .unwrap();
    let cluster = json!({ "version": "3.6.16" });
    let pod = built_up_to(cluster.clone(), &with_secret(), (false, None), Some(&point));
    let crate::seed::Command::Fetch(fetch) = parsed(&pod, "initContainers") else {
        panic!("the command is not fetch")
    };
    assert_eq!(
        fetch.replay.replay_prefix.as_deref(),
        Some("etcd/main.continuous/uid/")
    );
    assert_eq!(fetch.replay.replay_base.as_deref(), Some("10-ab"));
    assert_eq!(fetch.replay.replay_revision, Some(17));
    let crate::seed::Command::Start(start) = parsed(&pod, "containers") else {
        panic!("the command is not start")
    };
    let replay = start.settings.replay.unwrap();
    assert_eq!((replay.base.as_str(), replay.revision), ("10-ab", 17));
    // Without a point in time, the seed replays no changes.
    let pod = built_up_to(cluster, &with_secret(), (false, None), None);
    let crate::seed::Command::Start(start) = parsed(&pod, "containers") else {
        panic!("the command is not start")
    };
    assert_eq!(start.settings.replay, None);
}

#[test]
fn seed_program_parses_arguments_of_built_pod() {
    let pod = built_with(
        json!({ "version": "3.6.16" }),
        &with_secret(),
        false,
        Some("keys"),
    );
    let crate::seed::Command::Fetch(fetch) = parsed(&pod, "initContainers") else {
        panic!("the command is not fetch")
    };
    assert_eq!(fetch.source, Some(with_secret()));
    assert_eq!(fetch.encryption_secret.as_deref(), Some("keys"));
    let directory = fetch.encryption_keys.unwrap();
    let mounts = pod["spec"]["initContainers"][0]["volumeMounts"].as_array();
    let is_mounted = |mount: &Value| mount["mountPath"] == directory.to_str().unwrap();
    assert!(mounts.unwrap().iter().any(is_mounted));
    let crate::seed::Command::Start(start) = parsed(&pod, "containers") else {
        panic!("the command is not start")
    };
    assert_eq!(
        start.settings.peer_url,
        "http://main-aaaaaaaaaa.prod.svc:2380"
    );
    let etcd = &pod["spec"]["containers"][0]["args"].as_array().unwrap()[3..];
    assert_eq!(start.etcd.len(), etcd.len());
    assert!(
        etcd.iter()
            .zip(&start.etcd)
            .all(|(one, other)| one == other.to_str().unwrap())
    );
}
