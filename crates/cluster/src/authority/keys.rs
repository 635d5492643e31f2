//! A private key that rcgen can sign with.

use std::fmt;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};
use member::certificate::Certificate;
use rcgen::{PKCS_ECDSA_P256_SHA256, PublicKeyData, SignatureAlgorithm, SigningKey};
use rustls_pki_types::PrivatePkcs8KeyDer;
use rustls_pki_types::pem::PemObject;
use sha2::{Digest, Sha256};

use super::Error;

/// An ECDSA private key on the curve P-256.
pub(crate) struct Key(EcdsaKeyPair);

impl Key {
    pub(crate) fn draw() -> Result<Self, Error> {
        EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING)
            .map(Self)
            .map_err(|_| Error::Key)
    }

    /// Parses a key that [`Self::pem`] has written.
    pub(crate) fn read(pem: &[u8]) -> Result<Self, Error> {
        let der = PrivatePkcs8KeyDer::from_pem_slice(pem).map_err(|_| Error::Key)?;
        EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, der.secret_pkcs8_der())
            .map(Self)
            .map_err(|_| Error::Key)
    }

    /// The key in PKCS #8, as PEM.
    pub(crate) fn pem(&self) -> Result<Vec<u8>, Error> {
        let document = self.0.to_pkcs8v1().map_err(|_| Error::Key)?;
        let block = pem::Pem::new("PRIVATE KEY", document.as_ref());
        let lines = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
        Ok(pem::encode_config(&block, lines).into_bytes())
    }

    /// True if the certificate contains the public key of this private key. A public key in a certificate ends with the
    /// encoded point on the curve.
    pub(crate) fn is_of(&self, certificate: &Certificate) -> bool {
        certificate.public_key.ends_with(self.der_bytes())
    }

    /// The key identifier in certificates: the first 20 bytes of a digest of the public key.
    pub(crate) fn identifier(&self) -> Vec<u8> {
        Sha256::digest(self.der_bytes())
            .iter()
            .take(20)
            .copied()
            .collect()
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

impl SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let signature = self.0.sign(&SystemRandom::new(), message);
        signature
            .map(|signature| signature.as_ref().to_vec())
            .map_err(|_| rcgen::Error::RemoteKeyError)
    }
}

/// Invariant 14: no part of the key is printed.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}
