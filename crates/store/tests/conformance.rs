//! Every store does the same.
#![allow(clippy::unwrap_used)]

use store::testing::{AzureServer, GoogleServer, Leftovers, S3Server, conforms};
use store::{AbsStore, GcsStore, LocalStore, S3Store};

#[tokio::test]
async fn a_directory_conforms() {
    let dir = tempfile::tempdir().unwrap();
    conforms(&LocalStore::new(dir.path()), Leftovers::Removable).await;
    let left: Vec<_> = std::fs::read_dir(dir.path().join("a/b")).unwrap().collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s3_conforms() {
    let server = S3Server::start(&["bucket"]);
    let store = S3Store::new(server.config("bucket")).await.unwrap();
    conforms(&store, Leftovers::Removable).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn google_conforms() {
    let server = GoogleServer::start(&["bucket"]);
    let store = GcsStore::new(server.config("bucket")).await.unwrap();
    conforms(&store, Leftovers::Expiring).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn azure_conforms() {
    let server = AzureServer::start(&["bucket"]);
    let store = AbsStore::new(&server.config("bucket")).unwrap();
    conforms(&store, Leftovers::Expiring).await;
}
