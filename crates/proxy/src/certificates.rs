//! The Secrets of the proxies. Performs no I/O.

use api::EtcdCluster;
use api::cluster::{GrpcProxy, IssuedCertificate};
use api::names::{self, CertificateUse};
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use member::certificate::{Certificate, certificates};
use sha2::{Digest, Sha256};

/// The keys of a Secret, which are also the names of the mounted files.
pub(crate) const CERTIFICATE: &str = "tls.crt";
pub(crate) const KEY: &str = "tls.key";
pub(crate) const AUTHORITIES: &str = "ca.crt";

/// The names of the Secrets that a proxy mounts. If the operator or cert-manager issues the certificate, it serves both
/// purposes, and both names are equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SecretNames {
    /// The Secret with the client certificate for the members.
    pub(crate) client: String,
    /// The Secret with the certificate for clients.
    pub(crate) server: String,
}

impl SecretNames {
    /// The Secrets of the proxies of this cluster. `None` if the proxies use no TLS, or if the certificates are static
    /// and `proxy` does not name both Secrets.
    pub(crate) fn of(cluster: &EtcdCluster, proxy: &GrpcProxy) -> Option<Self> {
        let tls = cluster.spec.tls.as_ref()?;
        if !tls.insists_on_tls() {
            return None;
        }
        if !tls.is_written_by_operator() {
            return Some(Self {
                client: proxy.client_secret.clone()?,
                server: proxy.server_secret.clone()?,
            });
        }
        let name = match &tls.cert_manager {
            Some(_) => IssuedCertificate::Proxy.secret(&cluster.name_any()),
            None => generated_secret(cluster),
        };
        Some(Self {
            client: name.clone(),
            server: name,
        })
    }
}

/// The name of the Secret with the generated certificate of the proxies.
pub(crate) fn generated_secret(cluster: &EtcdCluster) -> String {
    names::certificate_secret(&cluster.name_any(), CertificateUse::Proxy)
}

/// A digest of the certificates and CAs, without the keys (invariant 14). The pods of the proxies have the digest as an
/// annotation, so that a change replaces the pods: a proxy reads its CAs only when it starts.
///
/// # Errors
/// Fails if a proxy of this version would not start with these Secrets, or if the server certificate is not valid for
/// `host`. The text names the Secret and the remedy.
pub(crate) fn digest(
    (host, version): (&str, &EtcdVersion),
    client: &Secret,
    server: &Secret,
) -> Result<String, String> {
    check_common_name(client, version)?;
    // A proxy of etcd 3.4 also rejects a common name in its server certificate (etcd issue 11970).
    if version.minor() < (3, 5) {
        check_common_name(server, version)?;
    }
    if !first(server)?.covers(host) {
        return Err(format!(
            "the certificate in Secret {} does not contain the DNS name {host}: issue a certificate with this name",
            server.name_any()
        ));
    }
    let mut hasher = Sha256::new();
    for secret in [client, server] {
        value(secret, KEY)?;
        for key in [CERTIFICATE, AUTHORITIES] {
            hasher.update(value(secret, key)?);
            hasher.update([0]);
        }
    }
    Ok(hex::encode(&hasher.finalize()[..8]))
}

fn check_common_name(secret: &Secret, version: &EtcdVersion) -> Result<(), String> {
    let common_name = first(secret)?.common_name;
    if common_name.is_empty() {
        return Ok(());
    }
    Err(format!(
        "the certificate in Secret {} has the common name {common_name:?}, but a proxy of etcd {version} does not \
         start with it: issue a certificate without a common name",
        secret.name_any()
    ))
}

fn first(secret: &Secret) -> Result<Certificate, String> {
    let name = secret.name_any();
    let all = certificates(value(secret, CERTIFICATE)?);
    let all = all.map_err(|why| {
        format!("the key {CERTIFICATE} of Secret {name} {why}: replace the certificate")
    })?;
    let first = all.into_iter().next();
    first.ok_or_else(|| format!("the key {CERTIFICATE} of Secret {name} is empty: set it"))
}

fn value<'a>(secret: &'a Secret, key: &str) -> Result<&'a [u8], String> {
    let value = secret.data.as_ref().and_then(|data| data.get(key));
    let value = value.map(|value| value.0.as_slice());
    let value = value.filter(|value| !value.is_empty());
    value.ok_or_else(|| {
        let name = secret.name_any();
        format!("Secret {name} has no value under the key {key}: add the value")
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};

    use super::*;

    const HOST: &str = "db-proxy.prod.svc";

    /// A Secret with a self-signed certificate.
    fn secret(common_name: Option<&str>, host: &str) -> Secret {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.distinguished_name = DistinguishedName::new();
        if let Some(name) = common_name {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        let pem = params.self_signed(&key).unwrap().pem().into_bytes();
        let mut secret = Secret::default();
        secret.metadata.name = Some("tls".to_owned());
        secret.data = Some(
            [
                (CERTIFICATE, pem.clone()),
                (KEY, key.serialize_pem().into_bytes()),
                (AUTHORITIES, pem),
            ]
            .map(|(name, value)| (name.to_owned(), ByteString(value)))
            .into(),
        );
        secret
    }

    fn checked(client: &Secret, server: &Secret) -> Result<String, String> {
        digest((HOST, &EtcdVersion::release(3, 6, 16)), client, server)
    }

    fn without(key: &str) -> Secret {
        let mut secret = secret(None, HOST);
        secret.data.as_mut().unwrap().remove(key);
        secret
    }

    #[test]
    fn digest_depends_on_certificate_but_not_on_private_key() {
        let one = secret(None, HOST);
        let before = checked(&one, &one).unwrap();
        let other = secret(None, HOST);
        assert_ne!(checked(&other, &other), Ok(before.clone()));
        let mut rekeyed = one.clone();
        let data = rekeyed.data.as_mut().unwrap();
        data.insert(KEY.to_owned(), ByteString(b"other".to_vec()));
        assert_eq!(checked(&rekeyed, &rekeyed), Ok(before));
    }

    #[test]
    fn client_certificate_with_common_name_is_refused() {
        let (named, plain) = (secret(Some("root"), HOST), secret(None, HOST));
        let why = checked(&named, &plain).unwrap_err();
        assert!(why.contains("common name \"root\""), "{why}");
        assert!(checked(&plain, &named).is_ok());
        let old = EtcdVersion::release(3, 4, 23);
        assert!(digest((HOST, &old), &plain, &named).is_err());
        assert!(digest((HOST, &old), &plain, &plain).is_ok());
    }

    #[test]
    fn unusable_secrets_are_refused_with_remedy() {
        let good = secret(None, HOST);
        let other = secret(None, "other.prod.svc");
        let mut damaged = good.clone();
        let data = damaged.data.as_mut().unwrap();
        data.insert(CERTIFICATE.to_owned(), ByteString(b"text".to_vec()));
        for (client, server, what) in [
            (
                &good,
                &other,
                "does not contain the DNS name db-proxy.prod.svc",
            ),
            (&good, &without(KEY), "no value under the key tls.key"),
            (
                &without(AUTHORITIES),
                &good,
                "no value under the key ca.crt",
            ),
            (&damaged, &good, "contains no certificate"),
        ] {
            let why = checked(client, server).unwrap_err();
            assert!(why.contains(what) && why.contains(": "), "{why}");
        }
    }
}
