//! Certificates the tests make, the Secrets that hold them, and clients that show them.
//!
//! They are made anew for each test and are worth nothing outside of it.

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

/// The keys of Secrets as v1beta2 names them: certificate, private key, authorities.
pub const PEER: [&str; 3] = ["peer.crt", "peer.key", "peer-ca.crt"];
/// As [`PEER`], towards clients.
pub const SERVER: [&str; 3] = ["server.crt", "server.key", "server-ca.crt"];
/// As [`PEER`], of the operator as a client.
pub const CLIENT: [&str; 3] = ["etcd-client.crt", "etcd-client.key", "etcd-client-ca.crt"];
/// The keys as cert-manager names them.
pub const CERT_MANAGER_KEYS: [&str; 3] = ["tls.crt", "tls.key", "ca.crt"];

/// A year from now, and an hour ago.
const VALID: (i64, i64) = (-3_600, 365 * 86_400);
/// Over since an hour.
const EXPIRED: (i64, i64) = (-86_400, -3_600);

/// An authority that signs certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its own certificate.
    pub pem: String,
}

/// A certificate and its private key.
#[derive(Clone, Debug)]
pub struct Signed {
    /// The certificate.
    pub certificate: String,
    /// Its key.
    pub key: String,
}

impl Authority {
    /// A new authority.
    ///
    /// # Errors
    /// When there is no randomness.
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

    /// An authority whose certificate and key somebody else has made, by its common name.
    ///
    /// # Errors
    /// When the key is none.
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

    /// Its private key, in PEM.
    #[must_use]
    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// A certificate for servers and clients of these names.
    ///
    /// # Errors
    /// When a name is none.
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

    /// A client's certificate.
    ///
    /// # Errors
    /// When there is no randomness.
    pub fn client(&self) -> Result<Signed> {
        self.signed(&[], &[ExtendedKeyUsagePurpose::ClientAuth], VALID)
    }

    /// A client's certificate that is valid for this long.
    ///
    /// # Errors
    /// When there is no randomness.
    pub fn client_for(&self, life: Duration) -> Result<Signed> {
        let end = i64::try_from(life.as_secs())?;
        self.signed(&[], &[ExtendedKeyUsagePurpose::ClientAuth], (-3_600, end))
    }

    /// A client's certificate that has expired.
    ///
    /// # Errors
    /// When there is no randomness.
    pub fn expired_client(&self) -> Result<Signed> {
        self.signed(&[], &[ExtendedKeyUsagePurpose::ClientAuth], EXPIRED)
    }

    /// A certificate for servers and clients of these names that has expired.
    ///
    /// # Errors
    /// When a name is none.
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

    /// What a client shows and trusts that has this certificate.
    #[must_use]
    pub fn identity(&self, signed: Option<&Signed>, name: &str) -> Identity {
        Identity {
            ca: self.pem.clone(),
            own: signed.cloned(),
            name: name.to_owned(),
        }
    }
}

/// A Secret as a manifest; `keys` as in [`PEER`].
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

/// What a client shows, and whom it trusts.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The authority it trusts.
    pub ca: String,
    /// What it shows; nothing when it has nothing.
    pub own: Option<Signed>,
    /// The name it expects in the certificate of whom it talks to.
    pub name: String,
}

impl Identity {
    /// The answer to a plain HTTP request over TLS, at an address. Whoever is let in gets one, whatever it says.
    ///
    /// # Errors
    /// When either side refuses the other's certificate.
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
            .context("no answer")??;
        ensure!(answer.starts_with("HTTP/1."), "no answer: {answer:?}");
        Ok(answer)
    }

    /// The options of a connection.
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
