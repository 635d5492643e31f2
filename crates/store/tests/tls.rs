//! A TLS connection to a store succeeds if the client trusts the certificate, or does not verify it. If the client does
//! not trust the certificate, the connection fails, and the error of a store names the remedy.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use store::testing::{AzureServer, GoogleServer, S3Server, content, download, upload};
use store::{AbsConfig, AbsStore, Error, GcsConfig, GcsStore, S3Config, S3Store, Store};

/// Creates a CA and returns its certificate. Writes a server certificate for 127.0.0.1 and its key into the directory.
fn authority(folder: &Path) -> String {
    let mut own = CertificateParams::default();
    own.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    own.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let key = KeyPair::generate().unwrap();
    let certificate = own.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(own, key);
    let server = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let key = KeyPair::generate().unwrap();
    let signed = server.signed_by(&key, &issuer).unwrap();
    std::fs::write(folder.join("server.crt"), signed.pem()).unwrap();
    std::fs::write(folder.join("server.key"), key.serialize_pem()).unwrap();
    certificate
}

/// An S3 server with the certificate that [`authority`] has written.
fn s3_server(folder: &Path) -> S3Server {
    let certificate = folder.join("server.crt");
    let key = folder.join("server.key");
    S3Server::start_with(
        &["bucket"],
        &[
            "--cert",
            certificate.to_str().unwrap(),
            "--key",
            key.to_str().unwrap(),
        ],
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_certificate_must_be_trusted_unless_verification_is_off() {
    let folder = tempfile::tempdir().unwrap();
    let ca = authority(folder.path());
    let server = s3_server(folder.path());
    let plain = server.config("bucket");
    assert!(server.endpoint.starts_with("https://"));

    // `other` is a CA that has not signed the certificate of `server`.
    let other = authority(tempfile::tempdir().unwrap().path());
    let stores: Vec<(&str, Box<dyn Store>)> = vec![
        ("S3", Box::new(S3Store::new(plain.clone()).await.unwrap())),
        (
            "S3 with another CA",
            Box::new(
                S3Store::new(S3Config {
                    ca: Some(other.into_bytes()),
                    ..plain.clone()
                })
                .await
                .unwrap(),
            ),
        ),
        (
            "Google",
            Box::new(
                GcsStore::new(GcsConfig {
                    endpoint: Some(server.endpoint.clone()),
                    ..GoogleServer::start(&[]).config("bucket")
                })
                .await
                .unwrap(),
            ),
        ),
        (
            "Azure",
            Box::new(
                AbsStore::new(&AbsConfig {
                    endpoint: Some(server.endpoint.clone()),
                    ..AzureServer::start(&["bucket"]).config("bucket")
                })
                .unwrap(),
            ),
        ),
    ];
    for (name, store) in stores {
        for size in [10, 20 << 20] {
            let error = upload(store.as_ref(), "key", &content(size), 1 << 20)
                .await
                .unwrap_err();
            assert!(matches!(error, Error::Certificate(_)), "{name}: {error:?}");
            assert!(error.to_string().contains("set caSecret"), "{error}");
        }
    }

    // The connection succeeds if the client trusts the CA of the server, or if the client does not verify
    // certificates.
    for config in [
        S3Config {
            ca: Some(ca.into_bytes()),
            ..plain.clone()
        },
        S3Config {
            insecure_skip_verify: true,
            ..plain.clone()
        },
    ] {
        let store = S3Store::new(config).await.unwrap();
        let content = content(20 << 20);
        upload(&store, "key", &content, 1 << 20).await.unwrap();
        assert!(download(&store, "key").await.unwrap() == content);
        store.delete("key").await.unwrap();
        assert_eq!(store.head("key").await.unwrap(), None);
        assert!(store.get("key").await.is_err());
    }
}

/// The server that issues credentials for the pod's own identity has an untrusted certificate. The test runs in a child
/// process, because it needs other environment variables.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_identity_request_verifies_server_certificate() {
    const URL: &str = "AWS_CONTAINER_CREDENTIALS_FULL_URI";
    if std::env::var_os(URL).is_some() {
        return assert_identity_is_verified().await;
    }
    let folder = tempfile::tempdir().unwrap();
    authority(folder.path());
    let server = s3_server(folder.path());
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "pod_identity_request_verifies_server_certificate",
            "--nocapture",
        ])
        .env(URL, format!("{}/identity", server.endpoint))
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .env_remove("AWS_ACCESS_KEY_ID")
        .env_remove("AWS_PROFILE")
        .env("AWS_CONFIG_FILE", "/dev/null")
        .env("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{output}");
    assert!(output.contains("1 passed"), "{output}");
}

async fn assert_identity_is_verified() {
    let config = S3Config {
        bucket: "bucket".to_owned(),
        endpoint: Some("http://127.0.0.1:1".to_owned()),
        insecure_skip_verify: true,
        ..S3Config::default()
    };
    let error = S3Store::new(config).await.unwrap().list("key").await;
    let text = error.unwrap_err().to_string();
    assert!(text.to_lowercase().contains("certificate"), "{text}");
}
