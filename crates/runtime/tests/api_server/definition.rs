//! An operator that is newer than the definition of its objects: what it has to record is in a field that the API server
//! does not know. It takes nothing of such a status, so what is wrong is told in what it knows.

use api::EtcdRestore;
use api::restore::{ChosenBackup, EtcdRestoreStatus, SeedStatus};
use serde_json::Value;

use super::*;

/// The definition of an earlier release.
fn older(without: &[&str]) -> CustomResourceDefinition {
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

async fn refused_by(without: &[&str], field: &str) {
    let server = ApiServer::start().await;
    let client = server.client();
    let scope = Scope::Namespace(NAMESPACE.into());
    let kind = ApiResource::erase::<EtcdRestore>(&());
    let older = older(without);
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
    // Nothing was lost of the object, and what the definition knows is taken.
    apply::status_if_unchanged(&api, "operator", &restore, None, &known)
        .await
        .unwrap();
    assert_eq!(api.get("again").await.unwrap().status, Some(known));
}

#[tokio::test]
async fn a_status_that_an_older_definition_does_not_know_is_refused_whole_and_told_with_the_remedy()
{
    refused_by(&["backup"], ".status.backup").await;
    refused_by(&["backup", "bumpRevision"], ".status.backup.bumpRevision").await;
}
