//! Tests with hostile stores and hostile etcd members, which send long lists, large responses, or single bytes with
//! long pauses. While many objects of hostile tenants use these servers, the memory of each operator must stay small,
//! and the operators must still serve other tenants (ADR 24).
//!
//! The operators run as in their pods, with a real kube-apiserver. Each test takes 20 to 60 seconds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../store/tests/hostile/server.rs"]
#[allow(
    dead_code,
    reason = "only the tests of the crate `store` use the whole module"
)]
mod hostile;
#[path = "../../../etcd/tests/hostile/member.rs"]
#[allow(
    dead_code,
    reason = "only the tests of the crate `etcd` use the whole module"
)]
mod member;
mod members;
mod process;
#[path = "../../../runtime/tests/api_server/server.rs"]
mod server;
mod stores;

use std::time::{Duration, Instant};

use api::{EtcdBackup, EtcdCluster, EtcdRestore};
use etcd::testing::EtcdProcess;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Namespace, Secret};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::PostParams;
use kube::{Api, Client, CustomResourceExt, Resource};
use process::OperatorProcess;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use server::ApiServer;

/// Time limit of each wait for a condition.
const MAX_WAIT: Duration = Duration::from_secs(90);
const HONEST: &str = "honest";
/// The namespaces of the hostile tenants.
const TENANTS: [&str; 3] = ["hostile-a", "hostile-b", "hostile-c"];

/// Creates an object. Repeats the request until the API server has established the CRD.
async fn create<K>(api: &Api<K>, object: Value)
where
    K: Resource + Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    let object: K = serde_json::from_value(object).unwrap();
    let end = Instant::now() + MAX_WAIT;
    while let Err(error) = api.create(&PostParams::default(), &object).await {
        assert!(Instant::now() < end, "{error}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn create_in<K>(client: &Client, namespace: &str, object: Value)
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + Serialize
        + DeserializeOwned,
{
    create(&Api::<K>::namespaced(client.clone(), namespace), object).await;
}

/// An API server with the CRDs, and with a namespace and credentials for each tenant.
async fn prepared() -> (ApiServer, Client) {
    let server = ApiServer::start().await;
    let client = server.client();
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in [EtcdBackup::crd(), EtcdCluster::crd(), EtcdRestore::crd()] {
        create(&definitions, serde_json::to_value(definition).unwrap()).await;
    }
    let namespaces: Api<Namespace> = Api::all(client.clone());
    for tenant in TENANTS.into_iter().chain([HONEST]) {
        create(&namespaces, json!({ "metadata": { "name": tenant } })).await;
        let credentials = "[default]\naws_access_key_id=id\naws_secret_access_key=key\n";
        let secret = json!({
            "metadata": { "name": "aws" },
            "stringData": { "credentials": credentials, "config": "[default]\nregion=us-east-1\n" },
        });
        create_in::<Secret>(&client, tenant, secret).await;
    }
    (server, client)
}

/// Backs up an etcd of the honest tenant while the hostile tenants use the operator.
async fn backs_up_honest_tenant(operator: &OperatorProcess, client: &Client, source: &EtcdProcess) {
    let backup = json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
        "metadata": { "name": HONEST },
        "spec": {
            "etcdEndpoints": [source.client_url], "storageType": "Local",
            "local": { "path": "etcd/main" },
        },
    });
    create_in::<EtcdBackup>(client, HONEST, backup).await;
    let backups: Api<EtcdBackup> = Api::namespaced(client.clone(), HONEST);
    let succeeded = async || {
        let backup = backups.get(HONEST).await.unwrap();
        backup.status.is_some_and(|status| status.succeeded)
    };
    operator
        .until("the backup of another tenant", succeeded)
        .await;
}
