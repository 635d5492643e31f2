//! Certificates of the tests, manifests of TLS Secrets, and TLS clients.
//!
//! Each test creates its own certificate authorities and certificates.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use etcd_client::{Certificate, ConnectOptions, TlsOptions};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::ClientConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// The data keys of a peer Secret in v1beta2, for the certificate, the private key, and the CA certificates.
pub const PEER: [&str; 3] = ["peer.crt", "peer.key", "peer-ca.crt"];
/// The data keys of a server Secret, in the same order as [`PEER`].
pub const SERVER: [&str; 3] = ["server.crt", "server.key", "server-ca.crt"];
/// The data keys of the operator's client Secret, in the same order as [`PEER`].
pub const CLIENT: [&str; 3] = ["etcd-client.crt", "etcd-client.key", "etcd-client-ca.crt"];
/// The data keys of a Secret from cert-manager, in the same order as [`PEER`].
pub const CERT_MANAGER_KEYS: [&str; 3] = ["tls.crt", "tls.key", "ca.crt"];

/// The validity of a valid certificate, in seconds relative to now: from an hour ago to a year from now.
const VALID: (i64, i64) = (-3_600, 365 * 86_400);
/// The validity of an expired certificate, in seconds relative to now: from a day ago to an hour ago.
const EXPIRED: (i64, i64) = (-86_400, -3_600);

/// A certificate authority (CA).
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// The CA certificate.
    pub pem: String,
}

/// A certificate and its private key.
#[derive(Clone, Debug)]
pub struct Signed {
    /// The certificate, in PEM.
    pub certificate: String,
    /// The private key, in PEM.
    pub key: String,
}

impl Authority {
    /// Creates a CA with this common name.
    ///
    /// # Errors
    /// Fails if the operating system provides no random numbers.
    pub fn new(name: &str) -> Result<Self> {
        let mut own = CertificateParams::default();
        own.distinguished_name.push(DnType::CommonName, name);
        own.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        own.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate()?;
        let pem = own.self_signed(&key).context("authority")?.pem();
        Ok(Self {
            issuer: Issuer::new(own, key),
            pem,
        })
    }

    /// A CA with an existing certificate and private key.
    ///
    /// # Errors
    /// Fails if `key` is invalid.
    pub fn of(name: &str, certificate: &str, key: &str) -> Result<Self> {
        let mut own = CertificateParams::default();
        own.distinguished_name = DistinguishedName::new();
        own.distinguished_name.push(DnType::CommonName, name);
        own.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        Ok(Self {
            issuer: Issuer::new(own, KeyPair::from_pem(key)?),
            pem: certificate.to_owned(),
        })
    }

    /// The private key of the CA, in PEM.
    #[must_use]
    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Issues a certificate for server and client authentication with these DNS names.
    ///
    /// # Errors
    /// Fails if a name is invalid.
    pub fn sign(&self, names: &[String]) -> Result<Signed> {
        self.signed(
            names,
            &[
                ExtendedKeyUsagePurpose::ServerAuth,
                ExtendedKeyUsagePurpose::ClientAuth,
            ],
            VALID,
        )
    }

    /// Issues a client certificate.
    ///
    /// # Errors
    /// Fails if no random numbers are available.
    pub fn client(&self) -> Result<Signed> {
        self.signed(&[], &[ExtendedKeyUsagePurpose::ClientAuth], VALID)
    }

    /// Issues a client certificate that expires after `life`.
    ///
    /// # Errors
    /// Fails if no random numbers are available.
    pub fn client_for(&self, life: Duration) -> Result<Signed> {
        let end = i64::try_from(life.as_secs())?;
        self.signed(&[], &[ExtendedKeyUsagePurpose::ClientAuth], (-3_600, end))
    }

    /// Issues an expired client certificate.
    ///
    /// # Errors
    /// Fails if no random numbers are available.
    pub fn expired_client(&self) -> Result<Signed> {
        self.signed(&[], &[ExtendedKeyUsagePurpose::ClientAuth], EXPIRED)
    }

    /// Issues an expired certificate for server and client authentication with these DNS names.
    ///
    /// # Errors
    /// Fails if a name is invalid.
    pub fn sign_expired(&self, names: &[String]) -> Result<Signed> {
        self.signed(
            names,
            &[
                ExtendedKeyUsagePurpose::ServerAuth,
                ExtendedKeyUsagePurpose::ClientAuth,
            ],
            EXPIRED,
        )
    }

    fn signed(
        &self,
        names: &[String],
        usages: &[ExtendedKeyUsagePurpose],
        (from, to): (i64, i64),
    ) -> Result<Signed> {
        let mut parameters = CertificateParams::new(names).context("names")?;
        parameters
            .distinguished_name
            .push(DnType::CommonName, "a test");
        parameters.extended_key_usages = usages.to_vec();
        let at = |seconds: i64| -> Result<_> {
            let since = jiff::Timestamp::now().as_second() + seconds;
            let since = Duration::from_secs(u64::try_from(since)?);
            Ok(rcgen::date_time_ymd(1970, 1, 1) + since)
        };
        (parameters.not_before, parameters.not_after) = (at(from)?, at(to)?);
        let key = KeyPair::generate()?;
        let certificate = parameters.signed_by(&key, &self.issuer).context("sign")?;
        Ok(Signed {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }

    /// A TLS client that trusts this CA, requires `name` in the server certificate, and presents the certificate
    /// `signed`, if any.
    #[must_use]
    pub fn identity(&self, signed: Option<&Signed>, name: &str) -> Identity {
        Identity {
            ca: self.pem.clone(),
            own: signed.cloned(),
            name: name.to_owned(),
        }
    }
}

/// The manifest of a TLS Secret with these data keys, in the order of [`PEER`].
#[must_use]
pub fn secret(name: &str, keys: [&str; 3], signed: &Signed, ca: &str) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": { "name": name },
        "stringData": { keys[0]: signed.certificate, keys[1]: signed.key, keys[2]: ca },
    })
    .to_string()
}

/// The settings of a TLS client.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The CA certificates that the client trusts, in PEM.
    pub ca: String,
    /// The certificate that the client presents, if any.
    pub own: Option<Signed>,
    /// The name that the server certificate must contain.
    pub name: String,
}

impl Identity {
    /// Sends an HTTP request over TLS and returns the response. Any response shows that the server has accepted the
    /// client certificate.
    ///
    /// # Errors
    /// Fails if the client or the server rejects the other's certificate, or if no response arrives in time.
    pub async fn ask(&self, port: u16, path: &str) -> Result<String> {
        let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut roots = rustls::RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(self.ca.as_bytes()) {
            roots.add(certificate?)?;
        }
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots);
        let config = match &self.own {
            None => config.with_no_client_auth(),
            Some(own) => {
                let chain = CertificateDer::pem_slice_iter(own.certificate.as_bytes());
                let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes())?;
                config.with_client_auth_cert(chain.collect::<Result<_, _>>()?, key)?
            }
        };
        let name = ServerName::try_from(self.name.clone())?;
        let connector = TlsConnector::from(std::sync::Arc::new(config));
        let asked = async {
            let stream = TcpStream::connect(("127.0.0.1", port)).await?;
            let mut stream = connector.connect(name, stream).await?;
            let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
            stream.write_all(request.as_bytes()).await?;
            let mut answer = vec![0; 4096];
            let length = stream.read(&mut answer).await?;
            anyhow::Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
        };
        let answer = timeout(Duration::from_secs(20), asked)
            .await
            .context("no answer in time")??;
        ensure!(
            answer.starts_with("HTTP/1."),
            "not an HTTP response: {answer:?}"
        );
        Ok(answer)
    }

    /// The options for an etcd connection with these settings.
    #[must_use]
    pub fn options(&self) -> ConnectOptions {
        let mut tls = TlsOptions::new()
            .ca_certificate(Certificate::from_pem(&self.ca))
            .domain_name(&self.name);
        if let Some(own) = &self.own {
            tls = tls.identity(etcd_client::Identity::from_pem(&own.certificate, &own.key));
        }
        ConnectOptions::new().with_tls(tls)
    }
}
