//! Tests of outdated CRDs. If the CRD does not contain a field of the status, the API server rejects the whole status,
//! and the operator reports the problem in fields that the CRD contains. Other tests use the CRD of
//! coreos/etcd-operator or of a later release.

use std::process::Command;

use api::EtcdRestore;
use api::restore::{ChosenBackup, EtcdRestoreStatus, SeedStatus};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinitionVersion;
use serde_json::Value;

use super::*;

/// The CRD of EtcdRestore without the status field at the path `without`, as in an earlier release.
fn older_crd(without: &[&str]) -> CustomResourceDefinition {
    let mut definition = serde_json::to_value(EtcdRestore::crd()).unwrap();
    let schema = &mut definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let (field, above) = without.split_last().unwrap();
    let mut at = &mut schema["properties"]["status"]["properties"];
    for one in above {
        at = &mut at[*one]["properties"];
    }
    let removed = at.as_object_mut().and_then(|fields| fields.remove(*field));
    assert!(removed.is_some_and(|field: Value| field.is_object()));
    serde_json::from_value(definition).unwrap()
}

fn chosen() -> ChosenBackup {
    let chosen = json!({
        "location": "s3://b/k", "bumpRevision": 0, "generation": 1, "source": { "s3": { "path": "b/k" } },
    });
    serde_json::from_value(chosen).unwrap()
}

async fn assert_rejected_without(without: &[&str], field: &str) {
    let server = ApiServer::start().await;
    let client = server.client();
    let scope = Scope::namespace(NAMESPACE);
    let kind = ApiResource::erase::<EtcdRestore>(&());
    let older = older_crd(without);
    let make = || older.clone();
    crd::ready(&client, &kind, Some(&make), &scope, &Readiness::default()).await;
    let api: Api<EtcdRestore> = Api::namespaced(client.clone(), NAMESPACE);
    let spec = json!({ "etcdCluster": { "name": "main" }, "backup": { "name": "b" } });
    let restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
    let Created::New(restore) = apply::create(&api, "test", &restore).await.unwrap() else {
        panic!("exists")
    };
    let known = EtcdRestoreStatus {
        seed: Some(SeedStatus::default()),
        ..EtcdRestoreStatus::default()
    };
    let status = EtcdRestoreStatus {
        backup: Some(chosen()),
        ..known.clone()
    };
    let error = apply::status_if_unchanged(&api, "operator", &restore, None, &status)
        .await
        .unwrap_err();
    assert_eq!(error.reason(), apply::DEFINITION_OUTDATED, "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains(field) && text.contains("docs/install.md"),
        "{text}"
    );
    assert_eq!(api.get("again").await.unwrap().status, None);
    // The API server accepts a status with only known fields for the same object.
    apply::status_if_unchanged(&api, "operator", &restore, None, &known)
        .await
        .unwrap();
    assert_eq!(api.get("again").await.unwrap().status, Some(known));
}

#[tokio::test]
async fn outdated_crd_error_contains_field_and_remedy() {
    let whole = assert_rejected_without(&["backup"], ".status.backup");
    Box::pin(whole).await;
    let part = assert_rejected_without(&["backup", "bumpRevision"], ".status.backup.bumpRevision");
    Box::pin(part).await;
}

/// The CRD of EtcdCluster without the rule for `spec.pod.etcdEnv`.
fn crd_without_rule_of_variables() -> CustomResourceDefinition {
    let mut definition = serde_json::to_value(EtcdCluster::crd()).unwrap();
    let schema = &mut definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let field = &mut schema["properties"]["spec"]["properties"]["pod"]["properties"]["etcdEnv"];
    let rules = field.as_object_mut().unwrap();
    assert!(rules.remove("x-kubernetes-validations").is_some());
    serde_json::from_value(definition).unwrap()
}

/// An object was stored before the rule existed. The operator can write the status of the object, and a user can
/// correct the spec.
#[tokio::test]
async fn status_is_written_for_stored_object_that_violates_new_rule() {
    let server = ApiServer::start().await;
    let client = server.client();
    let scope = Scope::namespace(NAMESPACE);
    let kind = ApiResource::erase::<EtcdCluster>(&());
    let ready = Readiness::default();
    let older = crd_without_rule_of_variables();
    let make = || older.clone();
    crd::ready(&client, &kind, Some(&make), &scope, &ready).await;
    let api = clusters(&client);
    let with = |name: &str, value: &str| json!({ "pod": { "etcdEnv": [{ "name": name, "value": value }] } });
    let spec = serde_json::from_value(with("ETCD_FORCE_NEW_CLUSTER", "true")).unwrap();
    let created = apply::create(&api, "test", &EtcdCluster::new("db", spec)).await;
    assert!(matches!(created.unwrap(), Created::New(_)));

    crd::ready(&client, &kind, Some(&EtcdCluster::crd), &scope, &ready).await;
    let patch = async |spec: serde_json::Value| {
        let patch = Patch::Merge(json!({ "spec": spec }));
        api.patch("db", &PatchParams::default(), &patch).await
    };
    // The API server enforces the new rule only some time after the update of the CRD. Each attempt writes another
    // value, because the API server does not check an unchanged value.
    let mut attempt = 0;
    eventually("the API server enforces the new rule", async || {
        attempt += 1;
        let error = patch(with("ETCD_WAL_DIR", &format!("/wal-{attempt}"))).await;
        let error = error.err()?.to_string();
        let names_remedy =
            error.contains("spec.pod.etcdEnv") && error.contains("remove that variable");
        assert!(names_remedy, "{error}");
        Some(())
    })
    .await;

    let stored = api.get("db").await.unwrap();
    let status = EtcdClusterStatus {
        reason: Some("spec.pod.etcdEnv".to_owned()),
        ..EtcdClusterStatus::default()
    };
    apply::status_if_unchanged(&api, "operator", &stored, None, &status)
        .await
        .unwrap();
    let reported = api.get("db").await.unwrap();
    assert_eq!(reported.status, Some(status));
    patch(json!({ "size": 5 })).await.unwrap();
    patch(with("ETCD_LOG_LEVEL", "true")).await.unwrap();
}

/// The CRD of EtcdCluster with additional fields, as in a later release.
fn newer_crd() -> CustomResourceDefinition {
    let mut definition = serde_json::to_value(EtcdCluster::crd()).unwrap();
    let schema = &mut definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    for (part, field) in [
        ("spec", "laterField"),
        ("status", "laterRecord"),
        ("status", "laterReport"),
    ] {
        schema["properties"][part]["properties"][field] = json!({ "type": "string" });
    }
    serde_json::from_value(definition).unwrap()
}

/// After a rollback of the operators, the CRDs and the objects may have fields of a later release.
#[tokio::test]
async fn operator_keeps_fields_of_later_release_from_other_managers() {
    let server = ApiServer::start().await;
    let client = server.client();
    let scope = Scope::namespace(NAMESPACE);
    let kind = ApiResource::erase::<EtcdCluster>(&());
    let ready = Readiness::default();
    crd::ready(&client, &kind, Some(&newer_crd), &scope, &ready).await;
    let (api, raw) = (
        clusters(&client),
        Api::<DynamicObject>::namespaced_with(client.clone(), NAMESPACE, &kind),
    );
    let object = |part: &str, value: Value| {
        let (version, kind) = (&kind.api_version, &kind.kind);
        json!({ "apiVersion": version, "kind": kind, "metadata": { "name": "db" }, part: value })
    };
    let spec = object("spec", json!({ "size": 3, "laterField": "kept" }));
    let params = PatchParams::apply("user");
    raw.patch("db", &params, &Patch::Apply(&spec))
        .await
        .unwrap();
    for (manager, field) in [("later-record", "laterRecord"), ("operator", "laterReport")] {
        let status = object("status", json!({ field: "kept" }));
        let params = PatchParams::apply(manager);
        let patch = Patch::Apply(&status);
        raw.patch_status("db", &params, &patch).await.unwrap();
    }

    let seen = api.get("db").await.unwrap();
    let marked = apply::annotate(&api, "operator", &seen, "mark", Some("x"));
    marked.await.unwrap();
    let seen = api.get("db").await.unwrap();
    let status = EtcdClusterStatus {
        size: Some(3),
        ..EtcdClusterStatus::default()
    };
    apply::status_if_unchanged(&api, "operator", &seen, None, &status)
        .await
        .unwrap();
    let now = raw.get("db").await.unwrap();
    assert_eq!(now.data["spec"]["laterField"], "kept");
    // `laterRecord` stays, because another field manager wrote it. `laterReport` is removed, because the field manager
    // of the operator wrote it, and now writes its whole status without this unknown field.
    let expected = json!({ "size": 3, "laterRecord": "kept" });
    assert_eq!(now.data["status"], expected);
}

/// The CRD that coreos/etcd-operator v0.9.4 created with `apiextensions.k8s.io/v1beta1`: without a schema, and with
/// `preserveUnknownFields`. A current API server cannot create such a CRD, but may have stored one.
fn crd_of_old_operator() -> Value {
    let names = json!({ "plural": "etcdclusters", "singular": "etcdcluster", "shortNames": ["etcd"],
        "kind": "EtcdCluster", "listKind": "EtcdClusterList" });
    let holds = |kind: &str| {
        json!({ "type": kind, "status": "True", "reason": "InitialNamesAccepted",
        "message": "", "lastTransitionTime": "2019-01-01T00:00:00Z" })
    };
    json!({
        "apiVersion": "apiextensions.k8s.io/v1beta1",
        "kind": "CustomResourceDefinition",
        "metadata": { "name": "etcdclusters.etcd.database.coreos.com", "generation": 1,
            "uid": "5c6ab9dd-0d5b-4b5f-8d5e-0f8f1f6a0001", "creationTimestamp": "2019-01-01T00:00:00Z" },
        "spec": { "group": "etcd.database.coreos.com", "version": "v1beta2", "names": names, "scope": "Namespaced",
            "versions": [{ "name": "v1beta2", "served": true, "storage": true }],
            "conversion": { "strategy": "None" }, "preserveUnknownFields": true },
        "status": { "acceptedNames": names, "storedVersions": ["v1beta2"],
            "conditions": [holds("NamesAccepted"), holds("Established")] },
    })
}

fn put(server: &ApiServer, key: &str, value: &Value) {
    let etcdctl = etcd::testing::Programs::find("3.6")
        .etcd
        .with_file_name("etcdctl");
    let value = value.to_string();
    let args = ["--endpoints", &server.etcd.client_url, "put", key, &value];
    let put = Command::new(etcdctl).args(args).output().unwrap();
    assert!(put.status.success(), "{put:?}");
}

#[tokio::test]
async fn crd_of_coreos_operator_is_updated_and_objects_are_kept() {
    let server = ApiServer::start().await;
    let client = server.client();
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let name = EtcdCluster::crd().name_any();
    put(
        &server,
        &format!("/registry/apiextensions.k8s.io/customresourcedefinitions/{name}"),
        &crd_of_old_operator(),
    );
    let old = eventually("the CRD of the old release", async || {
        definitions.get_opt(&name).await.unwrap()
    })
    .await;
    assert_eq!(old.spec.preserve_unknown_fields, Some(true));
    let kind = ApiResource::erase::<EtcdCluster>(&());
    let objects: Api<DynamicObject> = Api::namespaced_with(client.clone(), NAMESPACE, &kind);
    let mut object = DynamicObject::new("db", &kind).data(json!({
        "spec": { "size": 3, "version": "3.4.23" }, "status": { "phase": "Running", "size": 3, "controlPaused": false } }));
    object.types = Some(kube::core::TypeMeta {
        api_version: kind.api_version.clone(),
        kind: kind.kind.clone(),
    });
    let made = eventually("an object", async || {
        objects.create(&PostParams::default(), &object).await.ok()
    })
    .await;

    let scope = Scope::namespace(NAMESPACE);
    crd::ready(
        &client,
        &kind,
        Some(&EtcdCluster::crd),
        &scope,
        &Readiness::default(),
    )
    .await;
    let now = definitions.get(&name).await.unwrap();
    assert_ne!(now.spec.preserve_unknown_fields, Some(true));
    let has_schema = |version: &CustomResourceDefinitionVersion| version.schema.is_some();
    assert!(now.spec.versions.iter().all(has_schema));
    let kept = clusters(&client).get("db").await.unwrap();
    assert_eq!(kept.uid(), made.uid());
    assert_eq!((kept.spec.size, kept.spec.version.as_str()), (3, "3.4.23"));
}
