//! Clients of the three kinds of stores, for a test server at the given endpoint.

use http::HeaderValue;
use store::{
    AbsAccess, AbsCloud, AbsConfig, AbsStore, GcsAccess, GcsConfig, GcsStore, S3Access, S3Config,
    S3Keys, S3Store,
};

pub(crate) async fn s3(endpoint: &str) -> S3Store {
    let config = S3Config {
        bucket: "bucket".into(),
        endpoint: Some(endpoint.to_owned()),
        force_path_style: true,
        access: S3Access::Keys(S3Keys::new("id", "key")),
        ..S3Config::default()
    };
    S3Store::new(config).await.unwrap()
}

pub(crate) async fn google(endpoint: &str) -> GcsStore {
    let config = GcsConfig {
        bucket: "bucket".into(),
        endpoint: Some(endpoint.to_owned()),
        access: GcsAccess::Token(HeaderValue::from_static("Bearer token")),
    };
    GcsStore::new(config).await.unwrap()
}

pub(crate) fn azure(endpoint: &str) -> AbsStore {
    let config = AbsConfig {
        container: "bucket".into(),
        endpoint: Some(endpoint.to_owned()),
        access: AbsAccess::Key {
            account: "account".into(),
            key: "a2V5".into(),
            cloud: AbsCloud::Public,
        },
    };
    AbsStore::new(&config).unwrap()
}
