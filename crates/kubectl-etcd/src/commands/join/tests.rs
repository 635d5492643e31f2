//! Tests of `join`: the manifest of the new EtcdCluster, the progress of the move, and the end of the move.

use clap::Parser;

use super::*;
use crate::cli::{Cli, Command};
use crate::error::CODE_REFUSED;

const URL: &str = "http://etcd-0.etcd.prod.svc:2379";

fn args(line: &str) -> JoinArgs {
    let words = ["kubectl-etcd", "join", "new"].into_iter();
    let words = words.chain(line.split(' ').filter(|word| !word.is_empty()));
    match Cli::parse_from(words).command {
        Command::Join(args) => args,
        other => panic!("{other:?}"),
    }
}

fn built(line: &str) -> Result<EtcdCluster> {
    checked(&manifest(&args(line), "prod")?)
}

fn refusal(result: Result<EtcdCluster>) -> String {
    let error = result.unwrap_err();
    assert_eq!(error.exit_code(), CODE_REFUSED);
    format!("{error}: {}", error.remedy().unwrap())
}

/// An EtcdCluster that joins [`URL`] and has this status.
fn joining(mut status: Value) -> EtcdCluster {
    status["observedGeneration"] = json!(1);
    status["clusterID"] = json!("7f1c0d1f2a3b4c5d");
    serde_json::from_value(json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
        "metadata": { "name": "new", "generation": 1, "annotations": { ANNOTATION_JOIN: URL } },
        "spec": { "size": 3 }, "status": status
    }))
    .unwrap()
}

fn conditions(ready: &str) -> Value {
    let condition = |kind: &str, status: &str| {
        json!({ "type": kind, "status": status, "reason": "R", "message": "M",
            "lastTransitionTime": "2026-11-26T00:00:00Z" })
    };
    json!([condition("Ready", ready), condition("Available", "True")])
}

#[test]
fn join_options_are_applied_to_new_etcdcluster() {
    let line = format!(
        "--endpoints {URL},http://b:2379 --etcd-version 3.6.16 --storage 10Gi --storage-class fast"
    );
    let cluster = built(&line).unwrap();
    assert_eq!(
        cluster.annotations()[ANNOTATION_JOIN],
        format!("{URL},http://b:2379")
    );
    assert_eq!(cluster.namespace().as_deref(), Some("prod"));
    assert_eq!(
        (cluster.spec.size, cluster.spec.version.as_str()),
        (3, "3.6.16")
    );
    let pod = cluster.spec.pod.as_ref().unwrap();
    let claim = pod.persistent_volume_claim_spec.as_ref().unwrap();
    assert_eq!(claim.storage_class_name.as_deref(), Some("fast"));
    let text = effect(&cluster);
    assert!(
        text.contains("Service new-client") && !text.contains("warning"),
        "{text}"
    );
    let small = format!("--endpoints {URL} --etcd-version 3.6.16 --size 1");
    let text = effect(&built(&small).unwrap());
    assert_eq!(text.matches("warning").count(), 2, "{text}");
}

#[test]
fn join_manifest_keeps_settings_and_must_match_arguments() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("new.yaml");
    let line = format!("--file {}", file.display());
    let write = |metadata: &str| {
        let text = format!(
            "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdCluster\nmetadata: {metadata}\n\
             spec: {{version: 3.6.16, pod: {{labels: {{serves: app}}}}}}\n"
        );
        fs::write(&file, text).unwrap();
    };
    write("{name: new}");
    let cluster = built(&format!("{line} --endpoints {URL}")).unwrap();
    assert_eq!(cluster.spec.pod.unwrap().labels["serves"], "app");
    assert!(refusal(built(&line)).contains("--endpoints"));
    write(&format!(
        "{{name: new, annotations: {{{ANNOTATION_JOIN}: '{URL}'}}}}"
    ));
    assert_eq!(built(&line).unwrap().annotations()[ANNOTATION_JOIN], URL);
    write("{name: other}");
    assert!(
        refusal(built(&line))
            .contains("metadata.name in the file is other, but the command line has new")
    );
    write("{name: new, namespace: test}");
    assert!(refusal(built(&line)).contains("set -n"));
    fs::write(&file, "kind: Pod").unwrap();
    assert!(refusal(built(&line)).contains("contains no EtcdCluster"));
    fs::write(&file, "{").unwrap();
    assert!(refusal(built(&line)).contains("no manifest"));
    fs::remove_file(&file).unwrap();
    assert!(matches!(built(&line), Err(Error::File { .. })));
}

#[test]
fn join_that_operator_would_reject_is_refused() {
    for (line, part) in [
        (
            "--endpoints https://a:2379 --etcd-version 3.6.16",
            "http://",
        ),
        (
            "--endpoints http://a:2379 --etcd-version 3.3.27",
            "since 3.4",
        ),
        ("--endpoints http://a:2379", "--etcd-version"),
        ("--etcd-version 3.6.16", "--endpoints"),
    ] {
        let text = refusal(built(line));
        assert!(text.contains(part), "{line}: {text}");
    }
}

#[test]
fn join_resumes_only_if_cluster_already_joins_same_etcd() {
    let cluster = joining(json!({}));
    assert!(resumed(&cluster, &[]).unwrap().contains(URL));
    assert!(resumed(&cluster, &[URL.to_owned()]).is_ok());
    let error = resumed(&cluster, &["http://b:2379".to_owned()]).unwrap_err();
    assert!(error.to_string().contains(URL), "{error}");
    let bootstrapped = joining(json!({ "bootstrap": { "token": "t", "members": ["new-a"] } }));
    assert!(resumed(&bootstrapped, &[]).is_err());
    let mut paused = cluster.clone();
    paused.spec.paused = true;
    assert!(resumed(&paused, &[]).is_err());
    let mut other = cluster;
    other.metadata.annotations = None;
    assert!(resumed(&other, &[]).is_err());
}

#[test]
fn move_is_complete_only_after_old_members_are_removed() {
    let with = |old: &[&str], ready: &str| {
        let own = ["new-aaaaaaaaaa", "new-bbbbbbbbbb"];
        let own = own.map(|name| json!({ "name": name, "role": "Voter", "healthy": true }));
        let learner = json!({ "name": "new-cccccccccc", "role": "Learner", "healthy": true });
        let old = old
            .iter()
            .map(|name| json!({ "name": name, "role": "Voter", "healthy": true }));
        let all: Vec<Value> = own.into_iter().chain([learner]).chain(old).collect();
        joining(
            json!({ "state": "Scaling", "memberDetails": all, "conditions": conditions(ready) }),
        )
    };
    let moving = with(&["etcd-0", "etcd-1"], "False");
    let text = "2 of 3 new members vote, old members that remain in etcd: 2; Scaling";
    assert_eq!(look(&moving), Look::Waiting(text.into()));
    // The condition Ready is true, but an old member remains, so the move is not complete.
    assert!(matches!(look(&with(&["etcd-1"], "True")), Look::Waiting(_)));
    assert!(matches!(look(&with(&[], "True")), Look::Done(_)));

    let error = not_finished(&moving).unwrap();
    assert!(error.to_string().contains("etcd-0, etcd-1"), "{error}");
    assert!(not_finished(&with(&[], "True")).is_none());
    let mut stale = with(&[], "True");
    stale.metadata.generation = Some(2);
    assert!(not_finished(&stale).is_some());
    let mut lost = with(&[], "True");
    lost.status.as_mut().unwrap().conditions.clear();
    assert!(not_finished(&lost).is_some());
}
