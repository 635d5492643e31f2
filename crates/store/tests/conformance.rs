//! Every store does the same.
#![allow(clippy::unwrap_used)]

use store::testing::{S3Server, conforms};
use store::{LocalStore, S3Store};

#[tokio::test]
async fn a_directory_conforms() {
    let dir = tempfile::tempdir().unwrap();
    conforms(&LocalStore::new(dir.path())).await;
    let left: Vec<_> = std::fs::read_dir(dir.path().join("a/b")).unwrap().collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s3_conforms() {
    let server = S3Server::start(&["bucket"]);
    conforms(&S3Store::new(server.config("bucket")).await.unwrap()).await;
}
