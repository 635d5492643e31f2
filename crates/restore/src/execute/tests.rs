//! Actions with a minimal API server: the requests after concurrent changes of another operator process, and the
//! errors.

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
use crate::snapshot::{Former, FormerPod, Objects, Observation, SeedObjects, Snapshot};

fn restore() -> EtcdRestore {
    let spec =
        json!({ "etcdCluster": { "name": "main" }, "backup": { "name": "b" }, "overwrite": true });
    let mut restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
    restore.metadata.namespace = Some("prod".into());
    restore.metadata.uid = Some("restore-uid".into());
    restore
}

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

fn seen() -> Observation {
    fn object<K: serde::de::DeserializeOwned>(uid: &str) -> Option<K> {
        let metadata = json!({ "name": "main-seed", "uid": uid, "resourceVersion": "7" });
        serde_json::from_value(json!({ "metadata": metadata })).ok()
    }
    Observation {
        snapshot: Snapshot::not_asked(),
        objects: Objects {
            cluster: Some(cluster(None)),
            effective: None,
            backup: Err(Trouble::new(Reason::BackupMissing, "the backup is gone")),
            image: Ok(OperatorImage {
                image: "operator:1".into(),
                pull_policy: None,
            }),
            seed: SeedObjects {
                pod: object::<Pod>("pod"),
                claim: object::<PersistentVolumeClaim>("claim"),
                service: object::<Service>("service"),
            },
        },
    }
}

/// An observation of a locked cluster.
fn claimed() -> Observation {
    let mut seen = seen();
    seen.objects.cluster = Some(cluster(Some("restore-uid")));
    seen
}

/// Carries out the action. Returns the writes and the outcome.
async fn made(
    seen: &Observation,
    action: &Action,
    answer: impl Fn(&str, usize) -> (u16, Value) + Send + Sync + 'static,
) -> (Vec<String>, Result<(), Error>) {
    made_for(&restore(), Duration::ZERO, (seen, action), answer).await
}

/// Carries out the action some time after the observation. A delayed write that cannot be undone is a failure, too.
async fn made_for(
    restore: &EtcdRestore,
    age: Duration,
    (seen, action): (&Observation, &Action),
    answer: impl Fn(&str, usize) -> (u16, Value) + Send + Sync + 'static,
) -> (Vec<String>, Result<(), Error>) {
    let (client, asked) = fake::server(answer);
    let context = ExecuteContext {
        client,
        undo: Undo::default(),
    };
    let since = Instant::now().checked_sub(age).unwrap();
    let mut became = match write(restore, seen, action, Timestamp::now()) {
        Ok(requests) => {
            let failpoint = action.failpoint();
            Box::pin(execute(&context, restore, failpoint, &requests, since)).await
        }
        Err(why) => Err(Error::Missing(why)),
    };
    context.undo.ended().await;
    if let Some(failure) = context.undo.failures.lock().unwrap().pop() {
        became = Err(failure);
    }
    let mut asked = asked.lock().unwrap().clone();
    asked.retain(|one| !one.starts_with("GET"));
    (asked, became)
}

/// Invariant 11: another operator process may have deleted the pod and created the next one on the same volume.
#[tokio::test]
async fn deletes_volume_only_with_observed_pod() {
    for (pod, next, deleted) in [(200, 404, 3), (404, 404, 3), (404, 200, 1), (409, 200, 1)] {
        let (asked, became) = made(
            &claimed(),
            &Action::DiscardSeed,
            move |what, _| match what {
                "GET etcdrestores" => (200, json!(restore())),
                "GET etcdclusters" => (200, json!(cluster(Some("restore-uid")))),
                "DELETE pods" => (pod, fake::success()),
                "GET pods" => (next, json!(Pod::default())),
                _ => (200, fake::success()),
            },
        )
        .await;
        became.unwrap();
        let all = [
            "DELETE pods",
            "DELETE persistentvolumeclaims",
            "DELETE services",
        ];
        assert_eq!(asked, all[..deleted], "{pod} {next}");
    }
}

#[tokio::test]
async fn keeps_seed_if_restore_has_changed() {
    let another = |edit: fn(&mut EtcdRestore)| {
        let mut restore = restore();
        edit(&mut restore);
        (200, json!(restore))
    };
    let of_another_backup = another(|restore| {
        let source = json!({ "s3": { "path": "b/newer", "awsSecret": "aws" } });
        let chosen = choice::at(restore, serde_json::from_value(source).unwrap());
        restore.status.get_or_insert_default().backup = Some(chosen);
    });
    let made_anew = another(|restore| restore.metadata.uid = Some("another-uid".into()));
    for (now, said) in [
        ((404, Value::Null), "gone"),
        (made_anew, "gone"),
        (of_another_backup, "another backup was recorded"),
    ] {
        let action = Action::ClearPod("evicted".into());
        let (asked, became) = made(&seen(), &action, move |_, _| now.clone()).await;
        let told = became.unwrap_err().trouble().message;
        assert!(told.contains(said), "{told}");
        assert!(asked.is_empty(), "{asked:?}");
    }
}

/// Invariant 11: the finalizer was removed before the lock was set, so no later reconcile would remove the lock.
#[tokio::test]
async fn removes_lock_without_finalizer_despite_errors() {
    const PATCH: &str = "PATCH etcdclusters";
    // The lock is set, or its answer is lost.
    for first in [200, 504] {
        let (asked, became) = made(&seen(), &Action::Claim, move |what, before| {
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
        assert_eq!(asked, [PATCH; 4]);
        assert_eq!(became.is_ok(), first == 200, "{became:?}");
    }
    // Every attempt to remove the lock is rejected.
    let (asked, became) = made(&seen(), &Action::Claim, |what, before| {
        match (what, before) {
            ("GET etcdrestores", _) => (404, Value::Null),
            (PATCH, 1..) => (409, Value::Null),
            _ => (200, json!(cluster(Some("restore-uid")))),
        }
    })
    .await;
    assert_eq!(asked, [PATCH; 6]);
    became.unwrap_err();
    // The EtcdRestore has its finalizer, or the lock was never set.
    let held = |what: &str, code| match what {
        "GET etcdrestores" => {
            let mut restore = restore();
            restore.metadata.finalizers = Some(vec![FINALIZER_CLAIM.into()]);
            (200, json!(restore))
        }
        PATCH => (code, json!(cluster(Some("restore-uid")))),
        _ => (200, json!(cluster(Some("restore-uid")))),
    };
    for code in [200, 409] {
        let (asked, became) = made(&seen(), &Action::Claim, move |what, _| held(what, code)).await;
        assert_eq!(asked, [PATCH]);
        assert_eq!(became.is_ok(), code == 200, "{became:?}");
    }
}

/// An aborted restore deletes all objects of the seed by UID, regardless of the record and of changes of the pod. Only
/// a cutover by another operator process prevents the deletion (invariant 9).
#[tokio::test]
async fn aborted_restore_deletes_changed_seed() {
    let mut given_up = restore();
    given_up.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
    let all = [
        "DELETE pods",
        "DELETE persistentvolumeclaims",
        "DELETE services",
    ];
    for pod in [200, 404, 409] {
        let work = (&claimed(), &Action::DiscardSeed);
        let (asked, became) =
            made_for(&given_up, Duration::ZERO, work, move |what, _| match what {
                "GET etcdrestores" => (404, Value::Null),
                "GET etcdclusters" => (200, json!(cluster(Some("restore-uid")))),
                "GET pods" => (200, json!(Pod::default())),
                "DELETE pods" => (pod, fake::success()),
                _ => (200, fake::success()),
            })
            .await;
        became.unwrap();
        assert_eq!(asked, all, "{pod}");
    }
    let mut goes_on = restore();
    goes_on.metadata.deletion_timestamp = None;
    for restore in [given_up, goes_on] {
        for now in [turned(), cluster(None), cluster(Some("another-uid"))] {
            let (there, work) = (json!(restore), (&claimed(), &Action::DiscardSeed));
            let answered = move |what: &str, _: usize| match what {
                "GET etcdrestores" => (200, there.clone()),
                "GET etcdclusters" => (200, json!(now)),
                _ => (200, fake::success()),
            };
            let (asked, became) = made_for(&restore, Duration::ZERO, work, answered).await;
            became.unwrap_err();
            assert!(asked.is_empty(), "{asked:?}");
        }
    }
}

/// The cluster after the cutover.
fn turned() -> EtcdCluster {
    let mut turned = cluster(Some("restore-uid"));
    turned.status.get_or_insert_default().cluster_id = Some("ab".into());
    turned
}

/// Invariant 11: the operator process was suspended after the observation.
#[tokio::test]
async fn sends_nothing_after_old_observation() {
    let former = FormerPod {
        name: "main-old".into(),
        uid: "old".into(),
        terminating: false,
        ready: true,
    };
    let mut seen = claimed();
    seen.objects.backup = Ok(backup());
    seen.objects.cluster.as_mut().unwrap().spec.pod = volumes();
    for action in [
        Action::CreateService,
        Action::CreateClaim,
        Action::CreatePod,
        Action::ClearPod("evicted".into()),
        Action::DiscardSeed,
        Action::StopFormer(vec![former]),
        Action::RecordFormed {
            cluster_id: "ab".into(),
        },
    ] {
        for (age, late) in [(0, false), (11, true)] {
            let age = Duration::from_secs(age);
            let answered = |what: &str, _: usize| match what {
                "GET etcdrestores" => (200, json!(restore())),
                "GET etcdclusters" => (200, json!(cluster(Some("restore-uid")))),
                "GET pods" => (200, json!(seen_pod())),
                "PATCH etcdclusters/status" => (200, json!(turned())),
                "POST services" => (200, json!(Service::default())),
                "POST pods" => (200, json!(Pod::default())),
                "POST persistentvolumeclaims" => (200, json!(PersistentVolumeClaim::default())),
                _ => (200, fake::success()),
            };
            let (asked, became) = made_for(&restore(), age, (&seen, &action), answered).await;
            assert_eq!(
                matches!(became, Err(Error::TooOld)),
                late,
                "{action:?} {became:?}"
            );
            assert_eq!(asked.is_empty(), late, "{action:?} {asked:?}");
        }
    }
}

/// Invariant 11: another operator process has created the EtcdCluster and finished the restore, and a user has deleted
/// the EtcdCluster.
#[tokio::test]
async fn creates_cluster_only_for_unchanged_restore() {
    let version = |uid: &str, version: &str| {
        let mut restore = restore();
        restore.metadata.uid = Some(uid.into());
        restore.metadata.resource_version = Some(version.into());
        restore
    };
    let read = version("restore-uid", "7");
    let action = Action::CreateCluster(Box::default());
    // A read of the store may take longer than the ten seconds.
    for age in [0, 30].map(Duration::from_secs) {
        let cases = vec![
            (Some(version("restore-uid", "7")), None),
            (Some(version("restore-uid", "8")), Some("has changed")),
            (Some(version("another-uid", "7")), Some("has changed")),
            (None, Some("or is gone")),
        ];
        for (now, said) in cases {
            let answered = move |what: &str, _: usize| match (what, &now) {
                ("GET etcdrestores", Some(now)) => (200, json!(now)),
                ("GET etcdrestores", None) => (404, Value::Null),
                _ => (201, json!(cluster(Some("restore-uid")))),
            };
            let (asked, became) = made_for(&read, age, (&seen(), &action), answered).await;
            let made: &[&str] = if said.is_none() {
                &["POST etcdclusters"]
            } else {
                &[]
            };
            assert_eq!(asked, made, "{said:?}");
            let told = became.err().map(|error| error.trouble().message);
            assert_eq!(told.is_some(), said.is_some(), "{told:?}");
            assert!(told.unwrap_or_default().contains(said.unwrap_or_default()));
        }
    }
    // The operator process was suspended after the check.
    for (age, posted) in [(0, 1), (11, 0)] {
        let (client, asked) = fake::server(|_, _| (201, json!(cluster(Some("restore-uid")))));
        let context = ExecuteContext {
            client,
            undo: Undo::default(),
        };
        let request = Request::Create(Object::Cluster(Box::new(cluster(None))));
        let since = Instant::now().checked_sub(Duration::from_secs(age));
        let became = context.send(&read, &request, since.unwrap()).await;
        assert_eq!(
            matches!(became, Err(Error::TooOld)),
            posted == 0,
            "{became:?}"
        );
        assert_eq!(asked.lock().unwrap().len(), posted);
    }
}

/// Invariants 9 and 11: the seed was lost, or deleted by another operator process.
#[tokio::test]
async fn no_cutover_to_changed_seed() {
    let mut another = seen_pod();
    another.metadata.uid = Some("another".into());
    let mut going = seen_pod();
    going.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
    going.metadata.resource_version = Some("8".into());
    for now in [None, Some(another), Some(going)] {
        for action in [
            Action::RecordFormed {
                cluster_id: "ab".into(),
            },
            Action::StopFormer(Vec::new()),
        ] {
            let now = now.clone();
            let (asked, became) = made(&claimed(), &action, move |_, _| match &now {
                Some(pod) => (200, json!(pod)),
                None => (404, Value::Null),
            })
            .await;
            let told = became.unwrap_err().trouble().message;
            assert!(told.contains("seed's pod has gone, or changed"), "{told}");
            assert!(asked.is_empty(), "{asked:?}");
        }
    }
}

fn backup() -> ChosenBackup {
    let source = json!({ "s3": { "path": "b/k", "awsSecret": "aws" } });
    choice::at(&restore(), serde_json::from_value(source).unwrap())
}

/// Invariant 11: a delayed pod would replace a member, to which clients have written, by the state of the backup.
#[tokio::test]
async fn deletes_seed_pod_created_after_handover() {
    const CREATED: &str = "POST pods";
    let mut made_anew = cluster(Some("restore-uid"));
    made_anew.metadata.uid = Some("another-uid".into());
    let mut seen = claimed();
    seen.objects.backup = Ok(backup());
    let all = vec![
        (Some(cluster(Some("restore-uid"))), true),
        (Some(cluster(None)), false),
        (Some(cluster(Some("another-uid"))), false),
        (Some(turned()), false),
        (Some(made_anew), false),
        (None, false),
    ];
    for (now, stays) in all {
        // The first reads of the EtcdCluster may fail.
        for fails in [0, 2] {
            let now = now.clone();
            let (asked, became) = made(&seen, &Action::CreatePod, move |what, before| match what {
                CREATED => (201, json!(seen_pod())),
                "GET etcdclusters" if before < fails => (503, Value::Null),
                "GET etcdclusters" => match &now {
                    Some(cluster) => (200, json!(cluster)),
                    None => (404, Value::Null),
                },
                _ => (200, fake::success()),
            })
            .await;
            let expected: &[&str] = if stays {
                &[CREATED]
            } else {
                &[CREATED, "DELETE pods"]
            };
            assert_eq!(asked, expected);
            became.unwrap();
        }
    }
    // The pod of another operator process is not deleted.
    let (asked, became) = made(&seen, &Action::CreatePod, |what, _| match what {
        CREATED => (409, Value::Null),
        _ => (200, json!(cluster(None))),
    })
    .await;
    assert_eq!(asked, [CREATED]);
    became.unwrap_err();
}

fn volumes() -> Option<api::cluster::PodPolicy> {
    let claim = json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } });
    serde_json::from_value(json!({ "persistentVolumeClaimSpec": claim })).ok()
}

fn seen_pod() -> Pod {
    seen().objects.seed.pod.unwrap()
}

/// Without a volume a seed's pod has the only copy of its data. Old members stop only for a seed that serves.
#[tokio::test]
async fn deletes_seed_pod_created_after_old_members_stopped() {
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
        let mut there = turned();
        there.spec.pod = durable.then(volumes).unwrap_or_default();
        let mut seen = claimed();
        seen.objects.cluster = Some(there.clone());
        seen.objects.backup = Ok(backup());
        seen.snapshot.former = Former::Known(Vec::new());
        let (asked, became) = made(&seen, &Action::CreatePod, move |what, before| match what {
            "POST pods" => (201, json!(seen_pod())),
            "GET etcdclusters" => (200, json!(there)),
            "GET pods" if before == 0 => (503, Value::Null),
            "GET pods" => (200, old(left)),
            _ => (200, fake::success()),
        })
        .await;
        assert_eq!(asked.len(), if stays { 1 } else { 2 }, "{asked:?}");
        became.unwrap();
    }
}

#[tokio::test]
async fn reports_remedy_if_seed_pod_cannot_be_recreated() {
    for (former, remedy) in [(Former::NotAsked, false), (Former::Known(Vec::new()), true)] {
        let mut seen = seen();
        seen.snapshot.former = former;
        let (asked, became) = made(&seen, &Action::CreatePod, |_, _| (200, fake::success())).await;
        assert!(asked.is_empty(), "{asked:?}");
        let told = became.unwrap_err().trouble().message;
        assert!(told.starts_with("the backup is gone"), "{told}");
        assert_eq!(told.contains("delete this EtcdRestore"), remedy, "{told}");
    }
}
