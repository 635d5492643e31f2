//! The client verifies a member's certificate with the CA and with the host name in the endpoint.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use etcd::{Access, Error, Etcd, EtcdClient, TlsAccess};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

fn authority() -> Authority {
    let mut own = CertificateParams::default();
    own.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let pem = own.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(own, key);
    Authority { issuer, pem }
}

/// Starts a listener that only completes TLS handshakes, with a certificate for this name. Returns its port.
async fn member(authority: &Authority, name: &str) -> u16 {
    let parameters = CertificateParams::new(vec![name.to_owned()]).unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = parameters.signed_by(&key, &authority.issuer).unwrap();
    let chain = vec![CertificateDer::from(certificate.der().to_vec())];
    let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            drop(acceptor.accept(stream).await);
        }
    });
    port
}

async fn answer(ca: &str, endpoint: &str) -> Error {
    let client = EtcdClient::new(Access {
        tls: Some(TlsAccess {
            ca: ca.as_bytes().to_vec(),
            identity: None,
            user: None,
        }),
        credentials: None,
    });
    client.status(endpoint).await.unwrap_err()
}

/// Invariant 20: the certificate of a member at an IP address must contain the host name in the endpoint. The CA of the
/// client must have issued the certificate.
#[tokio::test]
async fn invariant_20_client_verifies_host_name_at_ip_address() {
    let (one, two) = (authority(), authority());
    let port = member(&one, "db-a.prod.svc").await;
    let address = format!("https://127.0.0.1:{port}");
    // The member completes the TLS handshake but never answers the call, so the call fails with another error than a
    // TLS error.
    let good = answer(&one.pem, &format!("{address}#db-a.prod.svc")).await;
    assert!(!matches!(good, Error::Tls(_)), "{good:?}");
    for (ca, endpoint) in [
        (&one.pem, format!("{address}#db-b.prod.svc")),
        (&one.pem, address.clone()),
        (&two.pem, format!("{address}#db-a.prod.svc")),
    ] {
        let refused = answer(ca, &endpoint).await;
        assert!(matches!(refused, Error::Tls(_)), "{endpoint}: {refused:?}");
    }
}
