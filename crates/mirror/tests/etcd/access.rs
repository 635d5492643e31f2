//! A source with TLS and authentication.

use std::time::Duration;

use bytes::Bytes;
use etcd::testing::{EtcdProcess, Programs, Start};
use etcd::{Access, Credentials, Etcd, EtcdClient, Operation, TlsAccess};
use etcd_client::{Certificate, Client, ConnectOptions, Permission, TlsOptions};
use mirror::ends::End;
use mirror::progress::State;
use mirror::reason::Reason;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use crate::lab::{Lab, keys_below, until};

/// Starts an etcd whose certificate a new authority has signed. Returns the certificate of the authority.
async fn etcd_with_tls(directory: &TempDir) -> (EtcdProcess, String) {
    let mut own = CertificateParams::default();
    own.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let authority = own.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(own, key);
    let key = KeyPair::generate().unwrap();
    let server = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let server = server.signed_by(&key, &issuer).unwrap();
    let file = |name: &str, content: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.display().to_string()
    };
    let (certificate, key) = (
        file("server.crt", &server.pem()),
        file("server.key", &key.serialize_pem()),
    );
    let start = Start {
        flags: vec![
            "--bcrypt-cost=4".to_owned(),
            format!("--cert-file={certificate}"),
            format!("--key-file={key}"),
        ],
        ..Start::default()
    };
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &start).await;
    (etcd, authority)
}

fn access(authority: &str, user: Option<(&str, &str)>) -> Access {
    Access {
        tls: Some(TlsAccess {
            ca: authority.as_bytes().to_vec(),
            identity: None,
            user: None,
        }),
        credentials: user.map(|(user, password)| Credentials {
            user: user.to_owned(),
            password: password.to_owned(),
            former: Vec::new(),
        }),
    }
}

/// Creates a user who may only read the keys below `k/`, and turns authentication on.
async fn restrict_access(url: &str, authority: &str) {
    let tls = TlsOptions::new().ca_certificate(Certificate::from_pem(authority));
    let options = ConnectOptions::new().with_tls(tls);
    let mut client = Client::connect([url], Some(options)).await.unwrap();
    client.role_add("reader").await.unwrap();
    let permission = Permission::read("k/").with_prefix();
    let granted = client.role_grant_permission("reader", permission).await;
    granted.unwrap();
    client.user_add("mirror", "secret", None).await.unwrap();
    client.user_grant_role("mirror", "reader").await.unwrap();
    let root = EtcdClient::new(access(authority, Some(("root", "root"))));
    root.enable_auth(&[url.to_owned()]).await.unwrap();
}

fn put(key: &'static str) -> Operation {
    Operation::Put {
        key: Bytes::from_static(key.as_bytes()),
        value: Bytes::from_static(b"x"),
    }
}

#[tokio::test]
async fn mirror_needs_only_read_access_to_its_prefix() {
    let directory = tempfile::tempdir().unwrap();
    let (source, authority) = etcd_with_tls(&directory).await;
    let url = source.client_url.clone();
    let lab = Lab::new("3.6", "3.6").await;
    restrict_access(&url, &authority).await;
    let root = EtcdClient::new(access(&authority, Some(("root", "root"))));
    let operations = [put("k/1"), put("hidden")];
    root.commit(&url, &[], &operations).await.unwrap();
    let end = |password: &str| End {
        endpoints: vec![url.clone()],
        access: access(&authority, Some(("mirror", password))),
        cluster_id: None,
    };
    let pair = ("k/", "copy/");
    let denied = lab.mirror_from(end("wrong"), "denied", pair);
    until("the password is rejected", || {
        let trouble = denied.progress().trouble;
        trouble.is_some_and(|trouble| trouble.reason == Reason::AccessDenied)
    })
    .await;
    denied.stop().await;
    let all = lab.mirror_from(end("secret"), "all", ("", "all/"));
    until("other keys are denied", || {
        let trouble = all.progress().trouble;
        trouble.is_some_and(|trouble| trouble.reason == Reason::AccessDenied)
    })
    .await;
    all.stop().await;
    let mirror = lab.mirror_from(end("secret"), "m", pair);
    until("the copy is complete", || {
        mirror.progress().state == State::Following
    })
    .await;
    root.commit(&url, &[], &[put("k/2")]).await.unwrap();
    let begun = std::time::Instant::now();
    while keys_below(&lab.destination, "copy/").await.len() < 2 {
        assert!(begun.elapsed() < Duration::from_mins(1), "k/2 is missing");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    mirror.stop().await;
    assert!(keys_below(&lab.destination, "all/").await.is_empty());
}
