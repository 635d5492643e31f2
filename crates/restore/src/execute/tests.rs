//! Executes actions against a fake API server, with errors and with concurrent changes by another operator process.

use std::time::Duration;

use api::EtcdCluster;
use api::names::ANNOTATION_RESTORE;
use api::restore::ChosenBackup;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use member::OperatorImage;
use serde_json::json;

use super::*;
use crate::fake;
use crate::plan::write::write;
use crate::plan::{Action, choice};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Objects, Observation, OldMembers, OldPod, SeedObjects, Snapshot};

fn cluster(claim: Option<&str>) -> EtcdCluster {
    let spec = json!({ "size": 3, "version": "3.6.16" });
    let mut cluster = EtcdCluster::new("main", serde_json::from_value(spec).unwrap());
    cluster.metadata.uid = Some("cluster-uid".into());
    cluster.metadata.resource_version = Some("7".into());
    if let Some(claim) = claim {
        let annotations = cluster.annotations_mut();
        annotations.insert(ANNOTATION_RESTORE.into(), claim.into());
    }
    cluster
}

fn observation() -> Observation {
    fn object<K: serde::de::DeserializeOwned>(uid: &str) -> Option<K> {
        let metadata = json!({ "name": "main-seed", "uid": uid, "resourceVersion": "7" });
        serde_json::from_value(json!({ "metadata": metadata })).ok()
    }
    Observation {
        snapshot: Snapshot::not_read(),
        objects: Objects {
            cluster: Some(cluster(None)),
            effective: None,
            backup: Err(Trouble::new(Reason::BackupMissing, "the backup is missing")),
            image: Ok(OperatorImage {
                image: "operator:1".into(),
                pull_policy: None,
            }),
            seed: SeedObjects {
                pod: object::<Pod>("pod"),
                pvc: object::<PersistentVolumeClaim>("claim"),
                service: object::<Service>("service"),
            },
        },
    }
}

/// An observation of a cluster with the lock of this restore.
fn locked() -> Observation {
    let mut observation = observation();
    observation.objects.cluster = Some(cluster(Some("restore-uid")));
    observation
}

/// Executes the action. Returns the result, and the sent requests except reads.
async fn executed(
    observation: &Observation,
    action: &Action,
    answer: impl Fn(&str, usize) -> (u16, Value) + Send + Sync + 'static,
) -> (Vec<String>, Result<(), Error>) {
    let restore = fake::restore_in_place();
    let all = executed_for(&restore, Duration::ZERO, (observation, action), answer);
    Box::pin(all).await
}

/// Executes the action with an observation of this age. The result is also an error if a late write cannot be undone.
async fn executed_for(
    restore: &EtcdRestore,
    age: Duration,
    (observation, action): (&Observation, &Action),
    answer: impl Fn(&str, usize) -> (u16, Value) + Send + Sync + 'static,
) -> (Vec<String>, Result<(), Error>) {
    let (client, requests) = fake::server(answer);
    let context = ExecuteContext {
        client,
        undo: Undo::default(),
    };
    let since = Instant::now().checked_sub(age).unwrap();
    let mut outcome = match write(restore, observation, action, Timestamp::now()) {
        Ok(requests) => {
            let failpoint = action.failpoint();
            Box::pin(execute(&context, restore, failpoint, &requests, since)).await
        }
        Err(why) => Err(Error::Missing(why)),
    };
    context.undo.join().await;
    if let Some(failure) = context.undo.failures.lock().unwrap().pop() {
        outcome = Err(failure);
    }
    let mut requests = requests.lock().unwrap().clone();
    requests.retain(|one| !one.starts_with("GET"));
    (requests, outcome)
}

/// Invariant 11: another operator process may have created a new pod on the same volume.
#[tokio::test]
async fn seed_volume_used_by_another_pod_is_kept() {
    for (pod, next, deleted) in [(200, 404, 3), (404, 404, 3), (404, 200, 1), (409, 200, 1)] {
        let (requests, outcome) =
            executed(&locked(), &Action::DiscardSeed, move |what, _| match what {
                "GET etcdrestores" => (200, json!(fake::restore_in_place())),
                "GET etcdclusters" => (200, json!(cluster(Some("restore-uid")))),
                "DELETE pods" => (pod, fake::success()),
                "GET pods" => (next, json!(Pod::default())),
                _ => (200, fake::success()),
            })
            .await;
        outcome.unwrap();
        let all = [
            "DELETE pods",
            "DELETE persistentvolumeclaims",
            "DELETE services",
        ];
        assert_eq!(requests, all[..deleted], "{pod} {next}");
    }
}

#[tokio::test]
async fn seed_pod_is_kept_if_restore_was_deleted_or_changed() {
    let another = |edit: fn(&mut EtcdRestore)| {
        let mut restore = fake::restore_in_place();
        edit(&mut restore);
        (200, json!(restore))
    };
    let of_another_backup = another(|restore| {
        let source = json!({ "s3": { "path": "b/newer", "awsSecret": "aws" } });
        let chosen = choice::chosen_from(restore, serde_json::from_value(source).unwrap());
        restore.status.get_or_insert_default().backup = Some(chosen);
    });
    let created_again = another(|restore| restore.metadata.uid = Some("another-uid".into()));
    for (now, expected) in [
        ((404, Value::Null), "deleted"),
        (created_again, "deleted"),
        (of_another_backup, "another backup was recorded"),
    ] {
        let action = Action::ReplacePod("evicted".into());
        let (requests, outcome) = executed(&observation(), &action, move |_, _| now.clone()).await;
        let message = outcome.unwrap_err().trouble().message;
        assert!(message.contains(expected), "{message}");
        assert!(requests.is_empty(), "{requests:?}");
    }
}

/// Invariant 11: the finalizer was removed before the lock arrived at the API server, so no later reconcile would
/// remove the lock.
#[tokio::test]
async fn restore_lock_is_removed_if_finalizer_is_missing() {
    const PATCH: &str = "PATCH etcdclusters";
    // `first` is the response to the first PATCH, which sets the lock. 504 means a lost response: the API server
    // has set the lock, but the operator does not know this. The next three PATCHes are attempts to remove the lock,
    // and the first two fail.
    for first in [200, 504] {
        let (requests, outcome) =
            executed(&observation(), &Action::Lock, move |what, before| {
                match (what, before) {
                    ("GET etcdrestores", 0) => (503, Value::Null),
                    ("GET etcdrestores", _) => (404, Value::Null),
                    (PATCH, 0) => (first, json!(cluster(None))),
                    (PATCH, 1) => (409, Value::Null),
                    (PATCH, 2) => (500, Value::Null),
                    _ => (200, json!(cluster(Some("restore-uid")))),
                }
            })
            .await;
        assert_eq!(requests, [PATCH; 4]);
        assert_eq!(outcome.is_ok(), first == 200, "{outcome:?}");
    }
    // The API server rejects all five attempts to remove the lock.
    let (requests, outcome) = executed(&observation(), &Action::Lock, |what, before| {
        match (what, before) {
            ("GET etcdrestores", _) => (404, Value::Null),
            (PATCH, 1..) => (409, Value::Null),
            _ => (200, json!(cluster(Some("restore-uid")))),
        }
    })
    .await;
    assert_eq!(requests, [PATCH; 6]);
    outcome.unwrap_err();
    // The EtcdRestore has its finalizer, so no request removes the lock, whether the request to set the lock succeeds
    // (200) or fails with a conflict (409).
    let with_lock = |what: &str, code| match what {
        "GET etcdrestores" => {
            let mut restore = fake::restore_in_place();
            restore.metadata.finalizers = Some(vec![FINALIZER_CLAIM.into()]);
            (200, json!(restore))
        }
        PATCH => (code, json!(cluster(Some("restore-uid")))),
        _ => (200, json!(cluster(Some("restore-uid")))),
    };
    for code in [200, 409] {
        let (requests, outcome) = executed(&observation(), &Action::Lock, move |what, _| {
            with_lock(what, code)
        })
        .await;
        assert_eq!(requests, [PATCH]);
        assert_eq!(outcome.is_ok(), code == 200, "{outcome:?}");
    }
}

/// An aborted restore deletes all objects of its seed, even if they have changed. After a cutover by another operator
/// process, or without its lock, the restore deletes none of them (invariant 9).
#[tokio::test]
async fn aborted_restore_deletes_changed_seed_only_before_cutover_with_lock() {
    let mut aborted = fake::restore_in_place();
    aborted.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
    let all = [
        "DELETE pods",
        "DELETE persistentvolumeclaims",
        "DELETE services",
    ];
    for pod in [200, 404, 409] {
        let work = (&locked(), &Action::DiscardSeed);
        let (requests, outcome) =
            executed_for(&aborted, Duration::ZERO, work, move |what, _| match what {
                "GET etcdrestores" => (404, Value::Null),
                "GET etcdclusters" => (200, json!(cluster(Some("restore-uid")))),
                "GET pods" => (200, json!(Pod::default())),
                "DELETE pods" => (pod, fake::success()),
                _ => (200, fake::success()),
            })
            .await;
        outcome.unwrap();
        assert_eq!(requests, all, "{pod}");
    }
    let mut continuing = fake::restore_in_place();
    continuing.metadata.deletion_timestamp = None;
    for restore in [aborted, continuing] {
        for now in [
            json!(cut_over()),
            json!(cluster(None)),
            json!(cluster(Some("another-uid"))),
        ] {
            let (object, work) = (json!(restore), (&locked(), &Action::DiscardSeed));
            let answered = move |what: &str, _: usize| match what {
                "GET etcdrestores" => (200, object.clone()),
                "GET etcdclusters" => (200, json!(now)),
                _ => (200, fake::success()),
            };
            let (requests, outcome) = executed_for(&restore, Duration::ZERO, work, answered).await;
            outcome.unwrap_err();
            assert!(requests.is_empty(), "{requests:?}");
        }
    }
}

/// The EtcdCluster after the cutover.
fn cut_over() -> EtcdCluster {
    let mut cut_over = cluster(Some("restore-uid"));
    cut_over.status.get_or_insert_default().cluster_id = Some("ab".into());
    cut_over
}

/// Invariant 11: the operator process was suspended after the observation.
#[tokio::test]
async fn outdated_observation_causes_no_write() {
    let old_members = OldPod {
        name: "main-old".into(),
        uid: "old".into(),
        terminating: false,
        ready: true,
    };
    let mut observation = locked();
    observation.objects.backup = Ok(backup());
    observation.objects.cluster.as_mut().unwrap().spec.pod = volumes();
    for action in [
        Action::CreateService,
        Action::CreatePvc,
        Action::CreatePod,
        Action::ReplacePod("evicted".into()),
        Action::DiscardSeed,
        Action::StopOldMembers(vec![old_members]),
        Action::RecordFormed {
            cluster_id: "ab".into(),
        },
    ] {
        for (age, too_old) in [(0, false), (11, true)] {
            let age = Duration::from_secs(age);
            let answered = |what: &str, _: usize| match what {
                "GET etcdrestores" => (200, json!(fake::restore_in_place())),
                "GET etcdclusters" => (200, json!(cluster(Some("restore-uid")))),
                "GET pods" => (200, json!(observed_pod())),
                "PATCH etcdclusters/status" => (200, json!(cut_over())),
                "POST services" => (200, json!(Service::default())),
                "POST pods" => (200, json!(Pod::default())),
                "POST persistentvolumeclaims" => (200, json!(PersistentVolumeClaim::default())),
                _ => (200, fake::success()),
            };
            let (requests, outcome) = executed_for(
                &fake::restore_in_place(),
                age,
                (&observation, &action),
                answered,
            )
            .await;
            assert_eq!(
                matches!(outcome, Err(Error::TooOld)),
                too_old,
                "{action:?} {outcome:?}"
            );
            assert_eq!(requests.is_empty(), too_old, "{action:?} {requests:?}");
        }
    }
}

/// Invariant 11: another operator process may have completed the restore, and a user may have deleted the EtcdCluster
/// since.
#[tokio::test]
async fn cluster_is_created_only_for_unchanged_restore() {
    let version = |uid: &str, version: &str| {
        let mut restore = fake::restore_in_place();
        restore.metadata.uid = Some(uid.into());
        restore.metadata.resource_version = Some(version.into());
        restore
    };
    let read = version("restore-uid", "7");
    let action = Action::CreateCluster(Box::default());
    // `age` is the age of the observation, which is more than ten seconds if the reads from a backup store were slow.
    // The age does not prevent the creation of the EtcdCluster, but a changed or deleted EtcdRestore does.
    for age in [0, 30].map(Duration::from_secs) {
        let cases = vec![
            (Some(version("restore-uid", "7")), None),
            (Some(version("restore-uid", "8")), Some("was changed")),
            (Some(version("another-uid", "7")), Some("was changed")),
            (None, Some("or deleted")),
        ];
        for (now, expected) in cases {
            let answered = move |what: &str, _: usize| match (what, &now) {
                ("GET etcdrestores", Some(now)) => (200, json!(now)),
                ("GET etcdrestores", None) => (404, Value::Null),
                _ => (201, json!(cluster(Some("restore-uid")))),
            };
            let (requests, outcome) =
                executed_for(&read, age, (&observation(), &action), answered).await;
            let created: &[&str] = if expected.is_none() {
                &["POST etcdclusters"]
            } else {
                &[]
            };
            assert_eq!(requests, created, "{expected:?}");
            let message = outcome.err().map(|error| error.trouble().message);
            assert_eq!(message.is_some(), expected.is_some(), "{message:?}");
            let message = message.unwrap_or_default();
            assert!(message.contains(expected.unwrap_or_default()));
        }
    }
    // The process is suspended for `age` seconds after it has read the unchanged EtcdRestore. If `age` is more than ten
    // seconds, the process creates no EtcdCluster.
    for (age, posted) in [(0, 1), (11, 0)] {
        let (client, requests) = fake::server(|_, _| (201, json!(cluster(Some("restore-uid")))));
        let context = ExecuteContext {
            client,
            undo: Undo::default(),
        };
        let request = Request::Create(Object::Cluster(Box::new(cluster(None))));
        let since = Instant::now().checked_sub(Duration::from_secs(age));
        let outcome = context.send(&read, &request, since.unwrap()).await;
        assert_eq!(
            matches!(outcome, Err(Error::TooOld)),
            posted == 0,
            "{outcome:?}"
        );
        assert_eq!(requests.lock().unwrap().len(), posted);
    }
}

/// Invariants 9 and 11: since the observation, the seed's pod was deleted, was created again, or has begun to
/// terminate.
#[tokio::test]
async fn no_cutover_is_made_if_seed_pod_has_changed() {
    let mut another = observed_pod();
    another.metadata.uid = Some("another".into());
    let mut terminating = observed_pod();
    terminating.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
    terminating.metadata.resource_version = Some("8".into());
    for now in [None, Some(another), Some(terminating)] {
        for action in [
            Action::RecordFormed {
                cluster_id: "ab".into(),
            },
            Action::StopOldMembers(Vec::new()),
        ] {
            let now = now.clone();
            let (requests, outcome) = executed(&locked(), &action, move |_, _| match &now {
                Some(pod) => (200, json!(pod)),
                None => (404, Value::Null),
            })
            .await;
            let message = outcome.unwrap_err().trouble().message;
            let expected = "seed's pod was changed or deleted";
            assert!(message.contains(expected), "{message}");
            assert!(requests.is_empty(), "{requests:?}");
        }
    }
}

fn backup() -> ChosenBackup {
    let source = json!({ "s3": { "path": "b/k", "awsSecret": "aws" } });
    choice::chosen_from(
        &fake::restore_in_place(),
        serde_json::from_value(source).unwrap(),
    )
}

/// Invariant 11: a pod that is created too late would start a member with the data of the backup, although clients
/// have written to this member.
#[tokio::test]
async fn seed_pod_created_after_handover_is_deleted() {
    const CREATED: &str = "POST pods";
    let mut created_again = cluster(Some("restore-uid"));
    created_again.metadata.uid = Some("another-uid".into());
    let mut observation = locked();
    observation.objects.backup = Ok(backup());
    let all = vec![
        (Some(cluster(Some("restore-uid"))), true),
        (Some(cluster(None)), false),
        (Some(cluster(Some("another-uid"))), false),
        (Some(cut_over()), false),
        (Some(created_again), false),
        (None, false),
    ];
    for (now, stays) in all {
        // After the creation of the pod, the operator reads the EtcdCluster until a read succeeds. The first `fails`
        // reads fail.
        for fails in [0, 2] {
            let now = now.clone();
            let (requests, outcome) = Box::pin(executed(
                &observation,
                &Action::CreatePod,
                move |what, before| match what {
                    CREATED => (201, json!(observed_pod())),
                    "GET etcdclusters" if before < fails => (503, Value::Null),
                    "GET etcdclusters" => match &now {
                        Some(cluster) => (200, json!(cluster)),
                        None => (404, Value::Null),
                    },
                    _ => (200, fake::success()),
                },
            ))
            .await;
            let expected: &[&str] = if stays {
                &[CREATED]
            } else {
                &[CREATED, "DELETE pods"]
            };
            assert_eq!(requests, expected);
            outcome.unwrap();
        }
    }
    // 409 means that another operator process has created the pod, so this process does not delete it.
    let (requests, outcome) = executed(&observation, &Action::CreatePod, |what, _| match what {
        CREATED => (409, Value::Null),
        _ => (200, json!(cluster(None))),
    })
    .await;
    assert_eq!(requests, [CREATED]);
    outcome.unwrap_err();
}

fn volumes() -> Option<api::cluster::PodPolicy> {
    let claim = json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } });
    serde_json::from_value(json!({ "persistentVolumeClaimSpec": claim })).ok()
}

fn observed_pod() -> Pod {
    observation().objects.seed.pod.unwrap()
}

/// No old member is left, so clients may have written to an earlier pod of the seed. A new pod without a volume does
/// not contain these writes.
#[tokio::test]
async fn seed_pod_without_volume_is_deleted_if_no_old_member_is_left() {
    let old = |left: bool| {
        let metadata = json!({ "name": "main-old", "uid": "old", "labels": {} });
        let pods = if left {
            vec![json!({ "metadata": metadata })]
        } else {
            Vec::new()
        };
        json!({ "kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": pods })
    };
    for (durable, left, stays) in [
        (false, true, true),
        (false, false, false),
        (true, false, true),
    ] {
        let mut existing = cut_over();
        existing.spec.pod = durable.then(volumes).unwrap_or_default();
        let mut observation = locked();
        observation.objects.cluster = Some(existing.clone());
        observation.objects.backup = Ok(backup());
        observation.snapshot.old_members = OldMembers::Known(Vec::new());
        let (requests, outcome) = Box::pin(executed(
            &observation,
            &Action::CreatePod,
            move |what, before| match what {
                "POST pods" => (201, json!(observed_pod())),
                "GET etcdclusters" => (200, json!(existing)),
                "GET pods" if before == 0 => (503, Value::Null),
                "GET pods" => (200, old(left)),
                _ => (200, fake::success()),
            },
        ))
        .await;
        assert_eq!(requests.len(), if stays { 1 } else { 2 }, "{requests:?}");
        outcome.unwrap();
    }
}

#[tokio::test]
async fn seed_pod_that_cannot_be_recreated_is_reported_with_remedy() {
    for (old_members, remedy) in [
        (OldMembers::NotRead, false),
        (OldMembers::Known(Vec::new()), true),
    ] {
        let mut observation = observation();
        observation.snapshot.old_members = old_members;
        let (requests, outcome) = executed(&observation, &Action::CreatePod, |_, _| {
            (200, fake::success())
        })
        .await;
        assert!(requests.is_empty(), "{requests:?}");
        let message = outcome.unwrap_err().trouble().message;
        assert!(message.starts_with("the backup is missing"), "{message}");
        let has_remedy = message.contains("delete this EtcdRestore");
        assert_eq!(has_remedy, remedy, "{message}");
    }
}
