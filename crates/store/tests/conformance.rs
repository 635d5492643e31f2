//! Runs the conformance test on every store.
#![allow(clippy::unwrap_used)]

use api::storage::{OssSource, StorageSource};
use store::testing::{
    ACCESS_KEY, AzureServer, GoogleServer, Leftovers, S3Server, SECRET_KEY, conforms,
};
use store::{AbsStore, Directories, GcsStore, LocalStore, S3Store, SecretData, Secrets, open};

#[tokio::test]
async fn directory_fulfills_store_contract() {
    let dir = tempfile::tempdir().unwrap();
    conforms(&LocalStore::new(dir.path()), Leftovers::Removable).await;
    let left: Vec<_> = std::fs::read_dir(dir.path().join("a/b")).unwrap().collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s3_fulfills_store_contract() {
    let server = S3Server::start(&["bucket"]);
    let store = S3Store::new(server.config("bucket")).await.unwrap();
    conforms(&store, Leftovers::Removable).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn google_fulfills_store_contract() {
    let server = GoogleServer::start(&["bucket"]);
    let store = GcsStore::new(server.config("bucket")).await.unwrap();
    conforms(&store, Leftovers::Expiring).await;
}

/// Small objects are written with Google's own client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn google_with_official_client_fulfills_store_contract() {
    let server = GoogleServer::start(&["bucket"]);
    let config = server.config("bucket");
    let store = GcsStore::with_trusted_endpoint(config).await.unwrap();
    conforms(&store, Leftovers::Expiring).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn azure_fulfills_store_contract() {
    let server = AzureServer::start(&["bucket"]);
    let store = AbsStore::new(&server.config("bucket")).unwrap();
    conforms(&store, Leftovers::Expiring).await;
}

/// The client of OSS uses the S3 endpoint and the Secret of v1beta2. The test server is not in the domain of OSS, so
/// the client puts the bucket into the path of the URL.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oss_fulfills_store_contract_over_s3_endpoint() {
    let server = S3Server::start(&["bucket"]);
    let source = OssSource {
        path: "bucket/key".to_owned(),
        oss_secret: Some("oss".to_owned()),
        endpoint: Some(server.endpoint.clone()),
    };
    let secret = SecretData::from([
        ("accessKeyID".to_owned(), ACCESS_KEY.as_bytes().to_vec()),
        ("accessKeySecret".to_owned(), SECRET_KEY.as_bytes().to_vec()),
    ]);
    let secrets = Secrets {
        credentials: Some(&secret),
        ca: None,
    };
    let source = StorageSource::Oss(&source);
    let target = open(&source, secrets, &Directories::default()).await;
    conforms(target.unwrap().store.as_ref(), Leftovers::Removable).await;
}
