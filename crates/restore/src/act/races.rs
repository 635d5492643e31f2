//! Steps against an API server of a few lines: what is sent when somebody else was quicker, and what is told.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Service};
use serde_json::Value;

use super::*;
use crate::fake;
use crate::observed::{Former, Observed};

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

fn seen() -> Seen {
    fn object<K: serde::de::DeserializeOwned>(uid: &str) -> Option<K> {
        let metadata = json!({ "name": "main-seed", "uid": uid, "resourceVersion": "7" });
        serde_json::from_value(json!({ "metadata": metadata })).ok()
    }
    Seen {
        observed: Observed::not_asked(),
        cluster: Some(cluster(None)),
        backup: Err(Trouble::new(Reason::BackupMissing, "the backup is gone")),
        children: Children {
            pod: object::<Pod>("pod"),
            claim: object::<PersistentVolumeClaim>("claim"),
            service: object::<Service>("service"),
        },
    }
}

/// Makes the step; returns what was asked, but for what was only read, and what became of it.
async fn made(
    seen: &Seen,
    step: &Step,
    answer: impl Fn(&str, usize) -> (u16, Value) + Send + Sync + 'static,
) -> (Vec<String>, Result<(), Error>) {
    let (client, asked) = fake::server(answer);
    let hands = Hands {
        client: &client,
        image: Err("no image".into()),
    };
    let became = Box::pin(act(&hands, &restore(), seen, step)).await;
    let mut asked = asked.lock().unwrap().clone();
    asked.retain(|one| !one.starts_with("GET"));
    (asked, became)
}

/// Invariant 11: another operator has removed it, and may have made the next one on the same volume.
#[tokio::test]
async fn what_a_pod_stood_on_goes_only_with_the_pod_that_was_seen() {
    for (pod, next, deleted) in [(200, 404, 3), (404, 404, 3), (404, 200, 1), (409, 200, 1)] {
        let (asked, became) = made(&seen(), &Step::DiscardSeed, move |what, _| match what {
            "GET etcdrestores" => (200, json!(restore())),
            "DELETE pods" => (pod, fake::success()),
            "GET pods" => (next, json!(Pod::default())),
            _ => (200, fake::success()),
        })
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
async fn nothing_of_a_seed_goes_because_of_an_etcd_restore_that_is_another_one_by_now() {
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
        let step = Step::ClearPod("evicted".into());
        let (asked, became) = made(&seen(), &step, move |_, _| now.clone()).await;
        let told = trouble(&became.unwrap_err()).message;
        assert!(told.contains(said), "{told}");
        assert!(asked.is_empty(), "{asked:?}");
    }
}

/// Invariant 11: the EtcdRestore was let go before the claim was written, and nobody else would take it away.
#[tokio::test]
async fn a_claim_that_nobody_holds_is_taken_back_over_errors_and_conflicts() {
    const PATCH: &str = "PATCH etcdclusters";
    // The claim itself is carried out, or nobody knows.
    for first in [200, 504] {
        let (asked, became) = made(&seen(), &Step::Claim, move |what, before| {
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
    // It stays refused.
    let (asked, became) = made(&seen(), &Step::Claim, |what, before| match (what, before) {
        ("GET etcdrestores", _) => (404, Value::Null),
        (PATCH, 1..) => (409, Value::Null),
        _ => (200, json!(cluster(Some("restore-uid")))),
    })
    .await;
    assert_eq!(asked, [PATCH; 6]);
    became.unwrap_err();
    // It is held, or was never made.
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
        let (asked, became) = made(&seen(), &Step::Claim, move |what, _| held(what, code)).await;
        assert_eq!(asked, [PATCH]);
        assert_eq!(became.is_ok(), code == 200, "{became:?}");
    }
}

#[tokio::test]
async fn a_pod_that_cannot_be_made_again_when_the_old_members_have_stopped_is_told_with_the_remedy()
{
    for (former, remedy) in [(Former::NotAsked, false), (Former::Known(Vec::new()), true)] {
        let mut seen = seen();
        seen.observed.former = former;
        let (asked, became) = made(&seen, &Step::CreatePod, |_, _| (200, fake::success())).await;
        assert!(asked.is_empty(), "{asked:?}");
        let told = trouble(&became.unwrap_err()).message;
        assert!(told.starts_with("the backup is gone"), "{told}");
        assert_eq!(told.contains("delete this EtcdRestore"), remedy, "{told}");
    }
}
