//! Keys and certificates of the control plane: one CA, P-256 keys, and a certificate for each program. Each `testbed
//! up` creates new keys and certificates. No other cluster accepts them.

use std::fs;
use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result};
use p256::ecdsa::signature::Signer as _;
use p256::ecdsa::{Signature, SigningKey};
use p256::elliptic_curve::rand_core::{OsRng, RngCore as _};
use p256::pkcs8::{EncodePrivateKey as _, EncodePublicKey as _, LineEnding};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyIdMethod, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType,
    SerialNumber, SignatureAlgorithm,
};
use sha2::{Digest, Sha256};

struct Key {
    secret: SigningKey,
    point: Vec<u8>,
}

impl Key {
    fn new() -> Self {
        let secret = SigningKey::random(&mut OsRng);
        let point = secret
            .verifying_key()
            .to_encoded_point(false)
            .as_bytes()
            .to_vec();
        Self { secret, point }
    }

    fn write(&self, folder: &Path, name: &str) -> Result<()> {
        let pem = self
            .secret
            .to_pkcs8_pem(LineEnding::LF)
            .context("private key")?;
        write(folder, &format!("{name}.key"), &pem)
    }
}

impl PublicKeyData for Key {
    fn der_bytes(&self) -> &[u8] {
        &self.point
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

impl rcgen::SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let signature: Signature = self.secret.sign(message);
        Ok(signature.to_der().as_bytes().to_vec())
    }
}

/// A CA that writes all certificates into one folder.
pub(crate) struct Authority<'a> {
    folder: &'a Path,
    issuer: Issuer<'static, Key>,
}

impl<'a> Authority<'a> {
    /// Creates a CA, and writes its certificate `ca.crt` and key `ca.key`.
    pub(crate) fn new(folder: &'a Path) -> Result<Self> {
        let key = Key::new();
        let mut params = parameters("testbed", &[], &key);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::CrlSign,
            KeyUsagePurpose::DigitalSignature,
        ];
        write(
            folder,
            "ca.crt",
            &params.self_signed(&key).context("authority")?.pem(),
        )?;
        key.write(folder, "ca")?;
        Ok(Self {
            folder,
            issuer: Issuer::new(params, key),
        })
    }

    /// Writes `NAME.crt` and `NAME.key` for a client. The API server reads `user` and `groups` from the certificate.
    pub(crate) fn client(&self, name: &str, user: &str, groups: &[&str]) -> Result<()> {
        let key = Key::new();
        let mut params = parameters(user, groups, &key);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(name, &params, &key)
    }

    /// Writes `NAME.crt` and `NAME.key` for a server with these DNS names and IP addresses.
    pub(crate) fn server(&self, name: &str, names: &[&str], addresses: &[IpAddr]) -> Result<()> {
        let key = Key::new();
        let mut params = parameters(name, &[], &key);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        for name in names {
            params
                .subject_alt_names
                .push(SanType::DnsName((*name).try_into().context("name")?));
        }
        params
            .subject_alt_names
            .extend(addresses.iter().copied().map(SanType::IpAddress));
        self.sign(name, &params, &key)
    }

    fn sign(&self, name: &str, params: &CertificateParams, key: &Key) -> Result<()> {
        let certificate = params
            .signed_by(key, &self.issuer)
            .with_context(|| format!("certificate {name}"))?;
        write(self.folder, &format!("{name}.crt"), &certificate.pem())?;
        key.write(self.folder, name)
    }
}

/// Writes `NAME.key` and `NAME.pub`, the keys for ServiceAccount tokens.
pub(crate) fn key_pair(folder: &Path, name: &str) -> Result<()> {
    let key = Key::new();
    key.write(folder, name)?;
    let public = key
        .secret
        .verifying_key()
        .to_public_key_pem(LineEnding::LF)
        .context("public key")?;
    write(folder, &format!("{name}.pub"), &public)
}

/// A random password: `bytes` random bytes in hexadecimal.
pub(crate) fn random_word(bytes: usize) -> String {
    let mut random = vec![0; bytes];
    OsRng.fill_bytes(&mut random);
    hex::encode(random)
}

fn parameters(name: &str, groups: &[&str], key: &Key) -> CertificateParams {
    let mut params = CertificateParams::default();
    let mut subject = DistinguishedName::new();
    for group in groups {
        subject.push(DnType::OrganizationName, *group);
    }
    subject.push(DnType::CommonName, name);
    params.distinguished_name = subject;
    let mut serial = [0; 16];
    OsRng.fill_bytes(&mut serial);
    serial[0] &= 0x7f;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.key_identifier_method =
        KeyIdMethod::PreSpecified(Sha256::digest(&key.point)[..20].to_vec());
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params
}

fn write(folder: &Path, name: &str, text: &str) -> Result<()> {
    let path = folder.join(name);
    fs::write(&path, text).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_and_keys_are_written_as_pem() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::new(dir.path()).unwrap();
        authority
            .server(
                "server",
                &["localhost"],
                &["127.0.0.1", "::1"].map(|text| text.parse().unwrap()),
            )
            .unwrap();
        authority
            .client("admin", "admin", &["system:masters"])
            .unwrap();
        key_pair(dir.path(), "sa").unwrap();
        for (file, label) in [
            ("ca.crt", "CERTIFICATE"),
            ("server.crt", "CERTIFICATE"),
            ("admin.key", "PRIVATE KEY"),
            ("sa.pub", "PUBLIC KEY"),
        ] {
            let text = fs::read_to_string(dir.path().join(file)).unwrap();
            assert!(
                text.starts_with(&format!("-----BEGIN {label}-----")),
                "{file}: {text}"
            );
        }
    }

    #[test]
    fn random_passwords_of_testbed_differ() {
        assert_ne!(random_word(16), random_word(16));
        assert_eq!(random_word(16).len(), 32);
    }
}
