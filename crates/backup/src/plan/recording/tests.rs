//! Tests of the plan for the agent.

use api::EtcdBackup;
use api::manifest::ManifestCluster;
use api::names::FINALIZER_STORED;
use api::storage::StorageBlock;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use member::OperatorImage;
use serde_json::{Value, json};

use super::*;
use crate::plan::{Action, Verdict, plan as plan_all};
use crate::recording::RecordOrder;
use crate::snapshot::Snapshot;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_764_000_000 + second).unwrap()
}

/// An EtcdBackup with this change. The operator has checked the agent 5 s before `at(0)`.
fn with(change: impl FnOnce(&mut Value)) -> EtcdBackup {
    let mut object = json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
        "metadata": { "name": "b", "namespace": "prod", "uid": "uid", "generation": 1 },
        "spec": { "etcdCluster": { "name": "main" }, "storageType": "S3",
                  "s3": { "path": "bucket/etcd/main", "awsSecret": "aws", "caSecret": "ca" }, "continuous": {} },
        "status": { "continuous": { "observedGeneration": 1, "checkTime": at(-5).to_string() } },
    });
    change(&mut object);
    serde_json::from_value(object).unwrap()
}

fn cluster(spec: &Value) -> ManifestCluster {
    ManifestCluster {
        name: "main".to_owned(),
        namespace: "prod".to_owned(),
        spec: serde_json::from_value(spec.clone()).unwrap(),
    }
}

fn target_of(backup: &EtcdBackup, cluster: Option<ManifestCluster>) -> AgentTarget {
    let spec = &backup.spec;
    let blocks = spec.blocks();
    let source = blocks.select(&spec.storage_type, "spec", "storageType");
    AgentTarget {
        endpoints: vec!["http://main-client.prod.svc:2379".to_owned()],
        cluster: cluster.map(Box::new),
        storage: StorageBlock::from(source.unwrap()),
        location: "s3://bucket/etcd/main.continuous/uid/".to_owned(),
        image: OperatorImage {
            image: "operator:1".to_owned(),
            pull_policy: None,
        },
        max_snapshot: 1 << 30,
    }
}

fn inputs(backup: &EtcdBackup, agent: AgentState) -> RecordingInputs {
    let target = target_of(backup, Some(cluster(&json!({ "size": 3 }))));
    RecordingInputs {
        agent,
        target: Some(Ok(target)),
    }
}

/// The Deployment that the plan applies.
fn applied(plan: &RecordingPlan) -> &Deployment {
    let RecordingStep::Apply(deployment) = &plan.step else {
        panic!("{plan:?}");
    };
    deployment
}

fn found(deployment: &Deployment, report: Option<AgentReport>) -> AgentState {
    AgentState::Found(Box::new(FoundAgent {
        deployment: deployment.clone(),
        report,
        problem: None,
    }))
}

fn reason(plan: &RecordingPlan) -> Reason {
    let RecordingVerdict::Waiting(trouble) = &plan.verdict else {
        panic!("{plan:?}");
    };
    trouble.reason
}

#[test]
fn invariant_10_status_records_agent_before_deployment_is_created() {
    // The status of `new` is empty, so this plan only records the agent. The next plan creates the Deployment.
    let new = with(|backup| backup["status"] = json!({}));
    let recorded = plan(&new, &inputs(&new, AgentState::Missing), at(0));
    assert_eq!(reason(&recorded), Reason::Pending);
    assert_eq!(recorded.step, RecordingStep::Nothing);
    let backup = with(|_| {});
    let first = plan(&backup, &inputs(&backup, AgentState::Missing), at(0));
    assert_eq!(reason(&first), Reason::Pending);
    let deployment = applied(&first);
    let running = found(deployment, Some(AgentReport::default()));
    let next = plan(&backup, &inputs(&backup, running.clone()), at(0));
    assert_eq!(next.step, RecordingStep::Nothing);
    assert!(matches!(next.verdict, RecordingVerdict::Reported { .. }));
    // A changed setting in `spec.continuous` changes the Deployment.
    let changed = with(|backup| backup["spec"]["continuous"] = json!({ "flushInterval": "2s" }));
    let next = plan(&changed, &inputs(&changed, running), at(0));
    assert!(matches!(next.step, RecordingStep::Apply(_)));
}

#[test]
fn agent_is_observed_only_when_its_check_is_due() {
    let backup = with(|_| {});
    // The last check of the agent was at second -5. While the condition `Recording` is missing, the next check is due 5
    // s later.
    assert_eq!(need(&backup, at(-1)), RecordingNeed::Nothing);
    assert_eq!(need(&backup, at(0)), RecordingNeed::AgentAndTarget);
    let waits = plan(&backup, &RecordingInputs::default(), at(-1));
    assert_eq!(waits.requeue, Some(Duration::from_secs(1)));
    let condition = json!({ "type": "Recording", "status": "True", "reason": "Recording", "message": "",
                            "lastTransitionTime": at(0).to_string() });
    let recording = with(|backup| backup["status"]["conditions"] = json!([condition]));
    assert_eq!(need(&recording, at(0)), RecordingNeed::Nothing);
    assert_eq!(need(&recording, at(10)), RecordingNeed::AgentAndTarget);
    let changed = with(|backup| backup["metadata"]["generation"] = json!(2));
    assert_eq!(need(&changed, at(-1)), RecordingNeed::AgentAndTarget);
    let refused = with(|backup| backup["spec"]["continuous"] = json!({ "flushInterval": "1h" }));
    assert_eq!(need(&refused, at(0)), RecordingNeed::Nothing);
    let without = with(|backup| {
        backup["spec"].as_object_mut().unwrap().remove("continuous");
        backup["status"] = json!({});
    });
    assert_eq!(need(&without, at(0)), RecordingNeed::Nothing);
}

#[test]
fn problem_of_agent_pod_is_reported_if_agent_has_no_report() {
    let backup = with(|_| {});
    let deployment = applied(&plan(&backup, &inputs(&backup, AgentState::Missing), at(0))).clone();
    let mut problem = FoundAgent {
        deployment: deployment.clone(),
        report: None,
        problem: Some(Trouble::new(Reason::ImageNotFound, "why")),
    };
    let state = AgentState::Found(Box::new(problem.clone()));
    assert_eq!(
        reason(&plan(&backup, &inputs(&backup, state), at(0))),
        Reason::ImageNotFound
    );
    // The agent has a report, so the plan uses the report although the EtcdCluster is missing.
    problem.report = Some(AgentReport::default());
    let missing = RecordingInputs {
        agent: AgentState::Found(Box::new(problem)),
        target: Some(Err(Trouble::new(Reason::ClusterMissing, "why"))),
    };
    let next = plan(&backup, &missing, at(0));
    assert!(matches!(
        next.verdict,
        RecordingVerdict::Reported { location: None, .. }
    ));
    assert_eq!(next.step, RecordingStep::Nothing);
    let without_agent = RecordingInputs {
        agent: AgentState::Missing,
        ..missing
    };
    let next = plan(&backup, &without_agent, at(0));
    assert_eq!(reason(&next), Reason::ClusterMissing);
    assert_eq!(next.step, RecordingStep::Nothing);
    let foreign = plan(&backup, &inputs(&backup, AgentState::Foreign), at(0));
    assert_eq!(reason(&foreign), Reason::NameTaken);
    assert_eq!(foreign.step, RecordingStep::Nothing);
}

#[test]
fn continuous_status_is_cleared_only_after_agent_has_ended() {
    let on = with(|_| {});
    let deployment = applied(&plan(&on, &inputs(&on, AgentState::Missing), at(0))).clone();
    let off = with(|backup| {
        backup["spec"].as_object_mut().unwrap().remove("continuous");
    });
    assert_eq!(need(&off, at(0)), RecordingNeed::Agent);
    let state = |agent| RecordingInputs {
        agent,
        target: None,
    };
    let stops = plan(&off, &state(found(&deployment, None)), at(0));
    assert!(matches!(stops.step, RecordingStep::Delete(_)));
    assert_eq!(stops.verdict, RecordingVerdict::Unchanged);
    let waits = plan(&off, &state(AgentState::Stopping), at(0));
    assert_eq!(waits.verdict, RecordingVerdict::Unchanged);
    assert!(waits.requeue.is_some());
    let ended = plan(&off, &state(AgentState::Missing), at(0));
    assert_eq!(ended.verdict, RecordingVerdict::Off);
}

#[test]
fn agent_of_hibernated_cluster_is_deleted() {
    let backup = with(|_| {});
    let deployment = applied(&plan(&backup, &inputs(&backup, AgentState::Missing), at(0))).clone();
    let spec = json!({ "size": 3, "hibernate": true });
    let hibernated = |agent| RecordingInputs {
        agent,
        target: Some(Ok(target_of(&backup, Some(cluster(&spec))))),
    };
    let next = plan(&backup, &hibernated(found(&deployment, None)), at(0));
    assert!(matches!(next.step, RecordingStep::Delete(_)));
    assert_eq!(reason(&next), Reason::Hibernated);
    let next = plan(&backup, &hibernated(AgentState::Missing), at(0));
    assert_eq!(next.step, RecordingStep::Nothing);
}

/// Invariant 13: the agent ends before the removal of its objects, because a running agent could write further objects
/// after the removal.
#[test]
fn invariant_13_agent_ends_before_its_objects_are_removed() {
    let deleted = |policy: &str| {
        let mut backup = with(|backup| {
            backup["spec"]["deletionPolicy"] = json!(policy);
            backup["metadata"]["finalizers"] = json!([FINALIZER_STORED]);
        });
        backup.metadata.deletion_timestamp = Some(Time(at(0)));
        backup
    };
    let backup = deleted("Delete");
    assert_eq!(need(&backup, at(0)), RecordingNeed::Agent);
    let snapshot = |agent| Snapshot {
        recording: RecordingInputs {
            agent,
            target: None,
        },
        ..Snapshot::default()
    };
    let running = found(&Deployment::default(), None);
    for agent in [
        running,
        AgentState::Stopping,
        AgentState::NotRead,
        AgentState::Unknown("why".to_owned()),
    ] {
        let next = plan_all(&backup, &snapshot(agent), at(0));
        assert_eq!(next.action, Action::Nothing);
        assert!(next.requeue.is_some());
    }
    // The pod of an agent on a lost node does not end. After two minutes, the status reports that this pod blocks the
    // deletion.
    for (seconds, blocked) in [(120, false), (121, true)] {
        let next = plan_all(&backup, &snapshot(AgentState::Stopping), at(seconds));
        assert_eq!(next.action, Action::Nothing);
        let is_blocked = matches!(next.verdict, Verdict::DeletionBlocked(_));
        assert_eq!(is_blocked, blocked);
    }
    let next = plan_all(&backup, &snapshot(AgentState::Missing), at(0));
    assert_eq!(next.action, Action::RemoveAll);
    // With `deletionPolicy: Retain`, the stored objects stay, and Kubernetes deletes the Deployment, so the agent is
    // not observed.
    assert_eq!(need(&deleted("Retain"), at(0)), RecordingNeed::Nothing);
}

#[test]
fn finalizer_is_set_before_the_agent_is_created() {
    let backup = with(|backup| {
        backup["spec"]["deletionPolicy"] = json!("Delete");
        backup["status"] = json!({});
    });
    let snapshot = Snapshot {
        recording: inputs(&backup, AgentState::Missing),
        ..Snapshot::default()
    };
    let next = plan_all(&backup, &snapshot, at(0));
    assert_eq!(next.action, Action::SetFinalizer(true));
    assert_eq!(next.recording.step, RecordingStep::Nothing);
}

fn pod_of(backup: &EtcdBackup, cluster: Option<ManifestCluster>) -> Value {
    let inputs = RecordingInputs {
        agent: AgentState::Missing,
        target: Some(Ok(target_of(backup, cluster))),
    };
    let plan = plan(backup, &inputs, at(0));
    serde_json::to_value(applied(&plan)).unwrap()
}

fn secrets(deployment: &Value) -> Vec<String> {
    let volumes = deployment["spec"]["template"]["spec"]["volumes"].as_array();
    let names = volumes.unwrap().iter();
    let names = names.filter_map(|volume| volume["secret"]["secretName"].as_str());
    names.map(str::to_owned).collect()
}

#[test]
fn agent_that_does_not_encrypt_is_stopped_if_spec_key_is_missing() {
    let plain = with(|_| {});
    let encrypted = with(|backup| backup["spec"]["encryption"] = json!({ "secret": "keys" }));
    for (running, stops) in [(&plain, true), (&encrypted, false)] {
        let missing = inputs(running, AgentState::Missing);
        let deployment = applied(&plan(running, &missing, at(0))).clone();
        let known = RecordingInputs {
            agent: found(&deployment, Some(AgentReport::default())),
            target: Some(Err(Trouble::new(Reason::SecretMissing, "no Secret keys"))),
        };
        let next = plan(&encrypted, &known, at(0));
        if stops {
            assert_eq!(reason(&next), Reason::SecretMissing);
            assert_eq!(next.step, RecordingStep::Delete(Box::new(deployment)));
        } else {
            assert!(matches!(next.verdict, RecordingVerdict::Reported { .. }));
            assert_eq!(next.step, RecordingStep::Nothing);
        }
    }
}

#[test]
fn missing_new_encryption_key_is_reported_while_agent_uses_old_key() {
    let old = with(|backup| backup["spec"]["encryption"] = json!({ "secret": "keys" }));
    let missing = inputs(&old, AgentState::Missing);
    let deployment = applied(&plan(&old, &missing, at(0))).clone();
    let rotated = with(|backup| {
        backup["spec"]["encryption"] = json!({ "secret": "keys", "key": "2027" });
    });
    let obstacle_of = |target| {
        let known = RecordingInputs {
            agent: found(&deployment, Some(AgentReport::default())),
            target: Some(target),
        };
        match plan(&rotated, &known, at(0)).verdict {
            RecordingVerdict::Reported { obstacle, .. } => obstacle,
            other => panic!("{other:?}"),
        }
    };
    let trouble = Trouble::new(Reason::SecretMissing, "the Secret has no entry 2027");
    assert_eq!(obstacle_of(Err(trouble.clone())), Some(trouble));
    let temporary = Trouble::new(Reason::StepFailed, "no answer from the API server");
    assert_eq!(obstacle_of(Err(temporary)), None);
    assert_eq!(obstacle_of(Ok(target_of(&rotated, None))), None);
}

#[test]
fn invariant_14_agent_mounts_only_the_secrets_that_it_needs() {
    let secured = cluster(&json!({
        "size": 3, "TLS": { "static": { "member": { "serverSecret": "server" }, "operatorSecret": "operator" } },
        "auth": { "secret": "root" },
    }));
    let backup = with(|_| {});
    let deployment = pod_of(&backup, Some(secured));
    assert_eq!(secrets(&deployment), ["aws", "ca", "operator", "root"]);
    let endpoints = with(|backup| {
        let spec = backup["spec"].as_object_mut().unwrap();
        spec.remove("etcdCluster");
        spec.insert(
            "etcdEndpoints".to_owned(),
            json!(["https://etcd.prod.svc:2379"]),
        );
        spec.insert("clientTLSSecret".to_owned(), json!("client"));
    });
    assert_eq!(secrets(&pod_of(&endpoints, None)), ["aws", "ca", "client"]);
    let encrypted = with(|backup| {
        backup["spec"]["encryption"] = json!({ "secret": "keys", "key": "2027" });
    });
    let encrypted = pod_of(&encrypted, Some(cluster(&json!({ "size": 3 }))));
    assert_eq!(secrets(&encrypted), ["aws", "ca", "keys"]);
    let container = &encrypted["spec"]["template"]["spec"]["containers"][0];
    let mounts = container["volumeMounts"].as_array().unwrap();
    let mut mounts = mounts.iter();
    let mount = mounts.find(|mount| mount["mountPath"] == "/run/backup/encryption");
    assert_eq!(mount.unwrap()["readOnly"], true);
    // An agent of an older release does not know this argument. It ends with an error, and does not record without
    // encryption.
    assert_eq!(container["args"][2], "--keys=/run/backup/encryption");
    let spec = &deployment["spec"]["template"]["spec"];
    assert_eq!(spec["automountServiceAccountToken"], false);
    assert_eq!(spec["securityContext"]["runAsNonRoot"], true);
    let container = &spec["containers"][0];
    assert_eq!(
        container["securityContext"]["allowPrivilegeEscalation"],
        false
    );
    assert!(container.get("env").is_none(), "{container}");
}

#[test]
fn one_agent_runs_at_a_time_with_the_settings_of_the_spec() {
    let backup = with(|backup| {
        backup["spec"]["continuous"] = json!({
            "flushInterval": "500ms", "maxBaseAge": "1h", "maxBaseBytes": 2_000_000, "retentionWindow": "48h",
            "spoolLimitBytes": 1000, "serviceAccountName": "writer",
        });
    });
    let deployment = pod_of(&backup, Some(cluster(&json!({ "size": 3 }))));
    assert_eq!(deployment["spec"]["replicas"], 1);
    assert_eq!(
        deployment["spec"]["strategy"],
        json!({ "type": "Recreate" })
    );
    assert_eq!(deployment["metadata"]["ownerReferences"][0]["uid"], "uid");
    let selector = &deployment["spec"]["selector"]["matchLabels"];
    let labels = &deployment["spec"]["template"]["metadata"]["labels"];
    assert_eq!(
        *selector,
        json!({ "etcd.database.coreos.com/backup-uid": "uid" })
    );
    assert_eq!(labels["app.kubernetes.io/name"], "etcd-backup");
    let spec = &deployment["spec"]["template"]["spec"];
    assert_eq!(spec["serviceAccountName"], "writer");
    let argument = spec["containers"][0]["args"][1].as_str().unwrap();
    let order = argument.strip_prefix("--order=").unwrap();
    let order: RecordOrder = serde_json::from_str(order).unwrap();
    assert_eq!((order.flush_millis, order.base_seconds), (500, 3_600));
    assert_eq!(
        (order.base_bytes, order.window_seconds),
        (2_000_000, 172_800)
    );
    assert_eq!((order.spool_bytes, order.uid.as_str()), (1_000, "uid"));
    assert_eq!(spec["volumes"][0]["emptyDir"]["sizeLimit"], "134218728");
    // If the storage type is PVC, the agent also mounts the volume of the EtcdBackup.
    let on_volume = with(|backup| {
        let spec = backup["spec"].as_object_mut().unwrap();
        spec.remove("s3");
        spec.insert("storageType".to_owned(), json!("PVC"));
        spec.insert(
            "pvc".to_owned(),
            json!({ "claimName": "backups", "path": "etcd/main" }),
        );
    });
    let deployment = pod_of(&on_volume, None);
    let volumes = &deployment["spec"]["template"]["spec"]["volumes"];
    assert_eq!(volumes[1]["persistentVolumeClaim"]["claimName"], "backups");
    assert_eq!(secrets(&deployment), Vec::<String>::new());
}
