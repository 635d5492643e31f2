//! Tests with a real API server: concurrent creates, deletes with a UID precondition, server-side apply of a status by
//! two managers, the CRD, the lease, the leases of shards, and objects that cannot be parsed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod columns;
mod definition;
mod server;
mod shards;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::cluster::{BootstrapStatus, EtcdClusterStatus};
use api::{EtcdCluster, EtcdClusterSpec};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, ObjectMeta};
use kube::{Api, Client, CustomResourceExt, Resource, ResourceExt};
use prometheus_client::registry::Registry;
use runtime::admin::Readiness;
use runtime::apply::{self, Created, Deleted, Written};
use runtime::controller::{self, Controllers, Reconcile, Scope};
use runtime::lease::{self, Candidate};
use runtime::{Done, Failure, Notice, Operator, crd, marks};
use serde_json::json;
use server::ApiServer;
use tokio::task::JoinHandle;

const NAMESPACE: &str = "default";

async fn with_crd() -> (ApiServer, Client) {
    let server = ApiServer::start().await;
    let client = server.client();
    let scope = Scope::namespace(NAMESPACE);
    crd::ready(
        &client,
        &ApiResource::erase::<EtcdCluster>(&()),
        Some(&EtcdCluster::crd),
        &scope,
        &Readiness::default(),
    )
    .await;
    (server, client)
}

fn clusters(client: &Client) -> Api<EtcdCluster> {
    Api::namespaced(client.clone(), NAMESPACE)
}

async fn cluster(client: &Client, name: &str) -> EtcdCluster {
    let cluster = EtcdCluster::new(name, EtcdClusterSpec::default());
    match apply::create(&clusters(client), "test", &cluster)
        .await
        .unwrap()
    {
        Created::New(cluster) => cluster,
        Created::Exists => panic!("{name} existed before"),
    }
}

#[tokio::test]
async fn clock_difference_is_read_from_api_server() {
    let server = ApiServer::start().await;
    let client = server.client();
    // The test tries several times, because a busy machine may delay a single request.
    eventually("the difference of the clocks", async || {
        let clock = runtime::clock::difference(&client).await.unwrap();
        let clock = clock.expect("the response has a Date header");
        (clock.unsigned_abs() < Duration::from_secs(10)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn operator_creates_and_updates_crd_but_keeps_newer_crd() {
    let (_server, client) = with_crd().await;
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let name = EtcdCluster::crd().name_any();
    let first = definitions.get(&name).await.unwrap();
    assert!(
        first
            .annotations()
            .contains_key("etcd.database.coreos.com/release")
    );

    let ready = async |wanted: &CustomResourceDefinition| {
        let scope = Scope::Annotated;
        let kind = ApiResource::erase::<EtcdCluster>(&());
        let make = || wanted.clone();
        crd::ready(&client, &kind, Some(&make), &scope, &Readiness::default()).await;
        definitions.get(&name).await.unwrap()
    };
    // Unlike the installed CRD, this CRD has only one printer column, so the operator updates the installed CRD.
    let mut newer = EtcdCluster::crd();
    newer.spec.versions[0]
        .additional_printer_columns
        .get_or_insert_default()
        .truncate(1);
    let updated = ready(&newer).await;
    assert_eq!(
        updated.spec.versions[0]
            .additional_printer_columns
            .as_ref()
            .unwrap()
            .len(),
        1
    );

    // The operator leaves the CRD of a newer release unchanged.
    let release =
        json!({ "metadata": { "annotations": { "etcd.database.coreos.com/release": "99.0.0" } } });
    definitions
        .patch(&name, &PatchParams::default(), &Patch::Merge(&release))
        .await
        .unwrap();
    let kept = ready(&EtcdCluster::crd()).await;
    assert_eq!(
        kept.spec.versions[0]
            .additional_printer_columns
            .as_ref()
            .unwrap()
            .len(),
        1
    );
}

/// Invariant 11: of two concurrent writes, only one has an effect.
#[tokio::test]
async fn invariant_11_second_of_two_concurrent_writes_has_no_effect() {
    let (_server, client) = with_crd().await;
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let map = |value: &str| ConfigMap {
        metadata: ObjectMeta {
            name: Some("one".into()),
            ..ObjectMeta::default()
        },
        data: Some([("key".to_owned(), value.to_owned())].into()),
        ..ConfigMap::default()
    };
    let Created::New(first) = apply::create(&api, "test", &map("first")).await.unwrap() else {
        panic!("exists")
    };
    assert_eq!(
        apply::create(&api, "test", &map("second")).await.unwrap(),
        Created::Exists
    );
    assert_eq!(api.get("one").await.unwrap().data.unwrap()["key"], "first");

    assert_eq!(
        apply::delete(&api, &first, None).await.unwrap(),
        Deleted::Accepted
    );
    assert_eq!(
        apply::delete(&api, &first, None).await.unwrap(),
        Deleted::Gone
    );
    apply::create(&api, "test", &map("another")).await.unwrap();
    assert_eq!(
        apply::delete(&api, &first, None).await.unwrap(),
        Deleted::Changed
    );
    assert_eq!(
        api.get("one").await.unwrap().data.unwrap()["key"],
        "another"
    );

    let stale = api.get("one").await.unwrap();
    apply::apply(&api, "test", &map("changed")).await.unwrap();
    let lost = apply::annotate(&api, "test", &stale, "mark", Some("x"))
        .await
        .unwrap_err();
    assert_eq!(lost.reason(), "Conflict");
}

/// Invariant 10: the status fields of one operator stay when another operator writes its own part of the status.
#[tokio::test]
async fn operators_do_not_overwrite_each_others_status_fields() {
    let (_server, client) = with_crd().await;
    let (api, seen) = (clusters(&client), cluster(&client, "main").await);
    let formed = EtcdClusterStatus {
        cluster_id: Some("00000000000000ab".into()),
        bootstrap: Some(BootstrapStatus {
            token: "t".into(),
            members: vec!["main-a".into()],
        }),
        ..EtcdClusterStatus::default()
    };
    let written = apply::status_if_unchanged(&api, "etcd-restore-operator", &seen, None, &formed)
        .await
        .unwrap();
    assert_eq!(written, Written::Sent);

    let report = EtcdClusterStatus {
        size: Some(1),
        ..EtcdClusterStatus::default()
    };
    apply::status(&api, "etcd-operator", &seen, None, &report)
        .await
        .unwrap();
    let status = api.get("main").await.unwrap().status.unwrap();
    assert_eq!(
        (status.size, status.cluster_id, status.bootstrap),
        (Some(1), formed.cluster_id.clone(), formed.bootstrap.clone())
    );

    let same = apply::status(&api, "etcd-operator", &seen, Some(&report), &report)
        .await
        .unwrap();
    assert_eq!(same, Written::Same);
    // The object was changed after `seen` was read, so the API server rejects the write.
    let stale = apply::status_if_unchanged(&api, "etcd-restore-operator", &seen, None, &formed)
        .await
        .unwrap_err();
    assert_eq!(stale.reason(), "Conflict");
    // The EtcdCluster was deleted and created again under the same name. It must not get the status that was prepared
    // for the deleted object.
    api.delete("main", &DeleteParams::default()).await.unwrap();
    cluster(&client, "main").await;
    let other = apply::status_if_unchanged(&api, "etcd-restore-operator", &seen, None, &formed)
        .await
        .unwrap_err();
    assert_eq!(other.reason(), "Conflict");
    assert_eq!(api.get("main").await.unwrap().status, None);
}

#[tokio::test]
async fn standby_takes_over_released_lease_and_leader_stops_without_lease() {
    let server = ApiServer::start().await;
    let client = lease::client(server.config()).unwrap();
    let candidate = |identity: &str| Candidate {
        name: "etcd-operator".into(),
        namespace: NAMESPACE.into(),
        identity: identity.into(),
    };
    let first = lease::acquire(&client, candidate("one")).await;
    let second = lease::acquire(&client, candidate("two"));
    tokio::pin!(second);
    let waited = tokio::time::timeout(Duration::from_secs(5), &mut second).await;
    assert!(waited.is_err(), "two processes hold the lease");
    let leases: Api<k8s_openapi::api::coordination::v1::Lease> =
        Api::namespaced(client.clone(), NAMESPACE);
    first.release().await;
    // The Lease must have no holder, or the standby as holder, because the standby must not wait until the lease
    // expires.
    let released = leases.get("etcd-operator").await.unwrap().spec.unwrap();
    let holder = released.holder_identity.unwrap_or_default();
    assert!(holder.is_empty() || holder == "two", "{holder}");
    let taken = tokio::time::timeout(Duration::from_mins(1), &mut second).await;
    let second = taken.expect("the released lease is free");

    // A user sets another holder in the Lease, so the leader stops at its next renewal.
    let stolen = json!({ "spec": { "holderIdentity": "three" } });
    leases
        .patch(
            "etcd-operator",
            &PatchParams::default(),
            &Patch::Merge(&stolen),
        )
        .await
        .unwrap();
    let lost = tokio::time::timeout(Duration::from_mins(1), second.hold()).await;
    assert!(lost.is_ok(), "the leader must stop without its lease");
}

#[tokio::test]
async fn repeated_notice_increments_count_of_event() {
    let (_server, client) = with_crd().await;
    let object = cluster(&client, "main").await.object_ref(&());
    let report = operator(&client).report;
    let events: Api<Event> = Api::namespaced(client.clone(), NAMESPACE);
    let change = Notice::change("MemberStarted", "Start", "create the pod of main-a");
    for published in 1..=3 {
        report.publish(&object, &change);
        eventually("the published Event", async || {
            let events = events.list(&ListParams::default()).await.unwrap().items;
            let [event] = events.as_slice() else {
                return None;
            };
            assert_eq!(event.note.as_ref(), Some(&change.note));
            assert_eq!(event.regarding.as_ref(), Some(&object));
            let count = event.series.as_ref().map_or(1, |series| series.count);
            (count == published).then_some(())
        })
        .await;
    }
    // After a user has deleted the Event, the operator creates it again.
    let everything = (DeleteParams::default(), ListParams::default());
    events
        .delete_collection(&everything.0, &everything.1)
        .await
        .unwrap();
    report.publish(&object, &change);
    eventually("the Event, created again after its deletion", async || {
        let events = events.list(&ListParams::default()).await.unwrap().items;
        (events.len() == 1).then_some(())
    })
    .await;
}

#[derive(Debug, thiserror::Error)]
#[error("it always fails")]
struct AlwaysFails;

impl Failure for AlwaysFails {
    fn reason(&self) -> &'static str {
        "AlwaysFails"
    }
}

/// A reconciler that counts the reconciles of each object. Reconciles of the object `bad` always fail.
#[derive(Default)]
struct Counting {
    good: AtomicUsize,
    bad: AtomicUsize,
    others: Mutex<Vec<String>>,
}

impl Reconcile for Counting {
    type Object = EtcdCluster;
    type Error = AlwaysFails;

    async fn reconcile(&self, object: Arc<EtcdCluster>) -> Result<Done, AlwaysFails> {
        match object.name_any().as_str() {
            "good" => {
                self.good.fetch_add(1, Ordering::SeqCst);
                Ok(Done {
                    requeue: Some(Duration::from_millis(200)),
                    notices: vec![],
                })
            }
            "bad" => {
                self.bad.fetch_add(1, Ordering::SeqCst);
                Err(AlwaysFails)
            }
            other => {
                self.others.lock().unwrap().push(other.to_owned());
                Ok(Done::default())
            }
        }
    }
}

/// A reconciler of an operator that does not manage the objects.
struct Reading(Arc<Counting>);

impl Reconcile for Reading {
    type Object = EtcdCluster;
    type Error = AlwaysFails;
    const MANAGES: bool = false;

    async fn reconcile(&self, object: Arc<EtcdCluster>) -> Result<Done, AlwaysFails> {
        self.0.reconcile(object).await
    }
}

fn operator(client: &Client) -> Operator {
    operator_with(client, Scope::namespace(NAMESPACE), NAMESPACE)
}

fn operator_with(client: &Client, scope: Scope, namespace: &str) -> Operator {
    Operator::new(
        ("etcd-operator", "cluster"),
        (client.clone(), client.clone()),
        scope,
        (namespace.into(), "pod".into()),
        &mut Registry::default(),
    )
}

/// Removes the schema of the spec from the CRD, so that the API server accepts invalid objects.
async fn loosen(client: &Client) {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let anything = json!([{ "op": "replace", "path": "/spec/versions/0/schema/openAPIV3Schema/properties/spec",
        "value": { "type": "object", "x-kubernetes-preserve-unknown-fields": true } }]);
    let patch: Patch<()> = Patch::Json(serde_json::from_value(anything).unwrap());
    definitions
        .patch(
            &EtcdCluster::crd().name_any(),
            &PatchParams::default(),
            &patch,
        )
        .await
        .unwrap();
}

async fn store_unreadable(client: &Client) -> Api<DynamicObject> {
    let raw: Api<DynamicObject> = Api::namespaced_with(
        client.clone(),
        NAMESPACE,
        &ApiResource::erase::<EtcdCluster>(&()),
    );
    let object = json!({ "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
        "metadata": { "name": "unreadable" }, "spec": { "size": 3, "pod": "nonsense" } });
    let object: DynamicObject = serde_json::from_value(object).unwrap();
    // The request is repeated, because the API server uses the changed schema only after some time.
    let mut last = None;
    for _ in 0..300 {
        match raw.create(&PostParams::default(), &object).await {
            Ok(_) => return raw,
            Err(error) => last = Some(error),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    panic!("the API server still rejects the object: {last:?}");
}

async fn unreadable_condition(raw: &Api<DynamicObject>) -> Option<String> {
    let object = raw.get("unreadable").await.unwrap();
    let conditions = object.data["status"]["conditions"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let found = conditions
        .iter()
        .find(|condition| condition["type"] == marks::UNREADABLE)?;
    Some(found["message"].as_str().unwrap_or_default().to_owned())
}

async fn eventually<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..600 {
        if let Some(seen) = check().await {
            return seen;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("not true within 60 s: {what}");
}

fn start(operator: &Operator, counting: &Arc<Counting>) -> JoinHandle<()> {
    let controllers = Controllers::<EtcdCluster>::new(operator);
    let (operator, counting) = (operator.clone(), counting.clone());
    tokio::spawn(async move { controller::drive(&operator, controllers, counting).await })
}

/// Two operators manage the same object if one of them has the scope `All`. Each operator sets the condition `Managed`
/// once, so the condition of the operator that started last stays.
#[tokio::test]
async fn two_operators_stop_overwriting_each_others_managed_condition() {
    let (_server, client) = with_crd().await;
    cluster(&client, "good").await;
    let scopes = [
        (Scope::namespace(NAMESPACE), NAMESPACE),
        (Scope::All, "operators"),
    ];
    let clusters = clusters(&client);
    let managed = async || {
        let object = clusters.get("good").await.unwrap();
        let status = serde_json::to_value(&object.status).unwrap();
        let conditions = status["conditions"].as_array().cloned();
        let mut conditions = conditions.unwrap_or_default().into_iter();
        let found = conditions.find(|condition| condition["type"] == marks::MANAGED);
        (
            object.resource_version(),
            found.unwrap_or_default()["message"].to_string(),
        )
    };
    let mut started = Vec::new();
    for (scope, namespace) in scopes {
        let operator = operator_with(&client, scope, namespace);
        let counting = Arc::new(Counting::default());
        started.push((start(&operator, &counting), operator, counting));
        let own = format!("in namespace {namespace}\"");
        eventually("the report of the new operator", async || {
            managed().await.1.ends_with(&own).then_some(())
        })
        .await;
    }
    // An operator whose cached object is outdated must not replace the condition that a later operator has written.
    let (version, report) = managed().await;
    for (_, _, counting) in &started {
        let before = counting.good.load(Ordering::SeqCst);
        eventually("more reconciles of each operator", async || {
            (counting.good.load(Ordering::SeqCst) > before + 5).then_some(())
        })
        .await;
    }
    assert_eq!(managed().await, (version, report));
    for (running, operator, _) in started {
        operator.shutdown.cancel();
        running.await.unwrap();
    }
}

/// The backup operator reconciles EtcdClusters, but the cluster operator manages them.
#[tokio::test]
async fn operator_that_does_not_manage_object_writes_no_condition() {
    let (_server, client) = with_crd().await;
    loosen(&client).await;
    let raw = store_unreadable(&client).await;
    cluster(&client, "good").await;
    let (operator, counting) = (operator(&client), Arc::new(Counting::default()));
    let reading = Arc::new(Reading(counting.clone()));
    let controllers = Controllers::<EtcdCluster>::new(&operator);
    let driven = operator.clone();
    let running =
        tokio::spawn(async move { controller::drive(&driven, controllers, reading).await });
    // An operator that writes conditions writes them in its first reconcile, so five reconciles without a condition
    // are enough.
    eventually("five reconciles", async || {
        (counting.good.load(Ordering::SeqCst) > 5).then_some(())
    })
    .await;
    for name in ["good", "unreadable"] {
        let object = raw.get(name).await.unwrap();
        let conditions = &object.data["status"]["conditions"];
        assert!(conditions.is_null(), "{name}: {conditions}");
    }
    operator.shutdown.cancel();
    running.await.unwrap();
}

/// Invariant 15: an object that cannot be parsed delays no other object.
#[tokio::test]
async fn invariant_15_unparseable_object_does_not_block_others() {
    let (_server, client) = with_crd().await;
    loosen(&client).await;
    let raw = store_unreadable(&client).await;
    cluster(&client, "good").await;
    cluster(&client, "bad").await;

    let (operator, counting) = (operator(&client), Arc::new(Counting::default()));
    let running = start(&operator, &counting);

    let message = eventually("the condition of the unreadable object", async || {
        unreadable_condition(&raw).await
    })
    .await;
    assert!(
        message.contains("nonsense") && message.contains("is ignored"),
        "{message}"
    );
    eventually("the good object's reconciles", async || {
        (counting.good.load(Ordering::SeqCst) > 5).then_some(())
    })
    .await;
    // The object whose reconcile always fails is retried with growing pauses, so it does not get more reconciles than
    // the good object.
    eventually("the failing object's reconciles", async || {
        (counting.bad.load(Ordering::SeqCst) > 0).then_some(())
    })
    .await;
    let bad = counting.bad.load(Ordering::SeqCst);
    let good = counting.good.load(Ordering::SeqCst);
    assert!(
        bad <= good,
        "{bad} reconciles of the failing object, {good} of the good one"
    );

    // After the correction of the object `unreadable`, the object is reconciled, and its condition is removed.
    let correct = json!({ "spec": { "pod": null } });
    let correct = Patch::Merge(&correct);
    raw.patch("unreadable", &PatchParams::default(), &correct)
        .await
        .unwrap();
    eventually(
        "the removal of the condition from the corrected object",
        async || unreadable_condition(&raw).await.is_none().then_some(()),
    )
    .await;
    eventually("the reconcile of the corrected object", async || {
        let others = counting.others.lock().unwrap();
        others.contains(&"unreadable".to_owned()).then_some(())
    })
    .await;

    operator.shutdown.cancel();
    tokio::time::timeout(Duration::from_mins(1), running)
        .await
        .expect("the controller must end")
        .unwrap();
}
