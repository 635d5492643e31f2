//! Stores behind TLS: whose certificate is taken, and what is said where it is not.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType, SerialNumber, SignatureAlgorithm,
};
use store::testing::{AzureServer, GoogleServer, S3Server, content, download, upload};
use store::{AbsConfig, AbsStore, Error, GcsConfig, GcsStore, S3Config, S3Store, Store};

struct Key(EcdsaKeyPair);

impl Key {
    fn new() -> Self {
        Self(EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING).unwrap())
    }

    fn pem(&self) -> String {
        let document = self.0.to_pkcs8v1().unwrap();
        pem::encode(&pem::Pem::new("PRIVATE KEY", document.as_ref()))
    }
}

impl PublicKeyData for Key {
    fn der_bytes(&self) -> &[u8] {
        self.0.public_key().as_ref()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

impl rcgen::SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let signature = self.0.sign(&SystemRandom::new(), message);
        Ok(signature.unwrap().as_ref().to_vec())
    }
}

fn parameters(name: &str) -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name.push(DnType::CommonName, name);
    // Without it the library wants a cryptographic backend of its own.
    parameters.serial_number = Some(SerialNumber::from(u64::from(rand::random::<u32>())));
    parameters.key_identifier_method = rcgen::KeyIdMethod::PreSpecified(name.as_bytes().to_vec());
    parameters
}

/// An authority's certificate; in the folder a certificate of it for 127.0.0.1, and its key.
fn authority(folder: &Path) -> String {
    let mut own = parameters("authority");
    own.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    own.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let key = Key::new();
    let certificate = own.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(own, key);
    let mut server = parameters("server");
    server
        .subject_alt_names
        .push(SanType::IpAddress("127.0.0.1".parse().unwrap()));
    let key = Key::new();
    let signed = server.signed_by(&key, &issuer).unwrap();
    std::fs::write(folder.join("server.crt"), signed.pem()).unwrap();
    std::fs::write(folder.join("server.key"), key.pem()).unwrap();
    certificate
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_that_is_not_trusted_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let ca = authority(folder.path());
    let certificate = folder.path().join("server.crt");
    let key = folder.path().join("server.key");
    let server = S3Server::start_with(
        &["bucket"],
        &[
            "--cert",
            certificate.to_str().unwrap(),
            "--key",
            key.to_str().unwrap(),
        ],
    );
    let plain = server.config("bucket");
    assert!(server.endpoint.starts_with("https://"));

    // Nobody knows the authority.
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

    // The authority is named, or nothing is checked.
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
