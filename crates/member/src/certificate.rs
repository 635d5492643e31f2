//! Parses X.509 certificates into plain data.
//!
//! Performs no I/O, and verifies nothing: rustls verifies certificates.

#![expect(
    clippy::redundant_closure_for_method_calls,
    reason = "with a method path instead of a closure, the compiler reports a lifetime that is not general enough"
)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use jiff::Timestamp;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use sha2::{Digest, Sha256};
use yasna::models::ObjectIdentifier;
use yasna::{ASN1Error, ASN1ErrorKind, ASN1Result, BERReader, BERReaderSeq, Tag, parse_der};

/// Object identifiers of X.509 attributes and extensions.
const COMMON_NAME: [u64; 4] = [2, 5, 4, 3];
const SUBJECT_ALT_NAME: [u64; 4] = [2, 5, 29, 17];
const BASIC_CONSTRAINTS: [u64; 4] = [2, 5, 29, 19];

/// The reason why a text is not a certificate. The reason contains no part of the text (invariant 14).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// The text has no PEM block of type CERTIFICATE.
    #[error("contains no certificate in PEM format")]
    None,
    /// A PEM block is damaged.
    #[error("contains a PEM block that cannot be parsed")]
    Pem,
    /// A PEM block is not an X.509 certificate.
    #[error("contains a certificate that cannot be parsed")]
    Certificate,
}

/// The fields of a certificate that the operators use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Start of the validity.
    pub not_before: Timestamp,
    /// End of the validity.
    pub not_after: Timestamp,
    /// Common name of the subject. Empty if the subject has none.
    pub common_name: String,
    /// DNS names of the subjectAltName extension, in lower case.
    pub dns_names: Vec<String>,
    /// IP addresses of the subjectAltName extension.
    pub addresses: Vec<IpAddr>,
    /// True for the certificate of a certificate authority (CA).
    pub is_authority: bool,
    /// Serial number, in hexadecimal.
    pub serial: String,
    /// Distinguished name of the issuer, in DER.
    pub issuer: Vec<u8>,
    /// Distinguished name of the subject, in DER.
    pub subject: Vec<u8>,
    /// Public key (SubjectPublicKeyInfo), in DER.
    pub public_key: Vec<u8>,
    /// SHA-256 of the DER encoding, in hexadecimal.
    pub fingerprint: String,
    /// The certificate in DER, for the verification by rustls.
    pub der: CertificateDer<'static>,
}

/// All certificates in a PEM text, in their order.
///
/// # Errors
/// Fails if the text contains no certificate, or a block that cannot be parsed.
pub fn certificates(pem: &[u8]) -> Result<Vec<Certificate>, Unreadable> {
    let blocks: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let blocks = blocks.map_err(|_| Unreadable::Pem)?;
    if blocks.is_empty() {
        return Err(Unreadable::None);
    }
    blocks
        .into_iter()
        .map(|block| Certificate::read(block).ok_or(Unreadable::Certificate))
        .collect()
}

impl Certificate {
    /// Parses one certificate. `None` if it is invalid.
    pub fn read(der: CertificateDer<'static>) -> Option<Self> {
        let fields = parse_der(&der, |reader| {
            reader.read_sequence(|reader| {
                let fields = reader.next().read_sequence(to_be_signed)?;
                reader.next().read_der()?;
                reader.next().read_der()?;
                Ok(fields)
            })
        })
        .ok()?;
        Some(Self {
            fingerprint: hex::encode(Sha256::digest(&der)),
            der,
            ..fields
        })
    }

    /// True if the certificate is valid for this IP address or DNS name. A `*` in the certificate matches exactly one
    /// label.
    pub fn covers(&self, host: &str) -> bool {
        if let Ok(address) = host.parse::<IpAddr>() {
            return self.addresses.contains(&address);
        }
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        let below = host.split_once('.').map(|(_, rest)| rest);
        self.dns_names.iter().any(|name| {
            let wild = name.strip_prefix("*.");
            *name == host || (wild.is_some() && wild == below)
        })
    }

    /// The identity of a certificate authority: a hash of its subject and public key, as sixteen hexadecimal digits. A
    /// renewed certificate with the same subject and key has the same identity, because it verifies the same
    /// certificates.
    pub fn identity(&self) -> String {
        let mut hasher = Sha256::new();
        hasher.update(&self.subject);
        hasher.update(&self.public_key);
        hex::encode(hasher.finalize()).chars().take(16).collect()
    }
}

fn to_be_signed(reader: &mut BERReaderSeq<'_, '_>) -> ASN1Result<Certificate> {
    reader
        .read_optional(|reader| reader.read_tagged(Tag::context(0), |reader| reader.read_i64()))?;
    let (serial, _) = reader.next().read_bigint_bytes()?;
    reader.next().read_der()?;
    let issuer = reader.next().read_der()?;
    let (not_before, not_after) = reader
        .next()
        .read_sequence(|reader| Ok((time(reader.next())?, time(reader.next())?)))?;
    let subject = reader.next().read_der()?;
    let public_key = reader.next().read_der()?;
    for tag in [1, 2] {
        reader.read_optional(|reader| {
            reader.read_tagged_implicit(Tag::context(tag), |reader| reader.read_bitvec_bytes())
        })?;
    }
    let mut certificate = Certificate {
        not_before,
        not_after,
        common_name: common_name(&subject),
        dns_names: Vec::new(),
        addresses: Vec::new(),
        is_authority: false,
        serial: hex::encode(&serial),
        issuer,
        subject,
        public_key,
        fingerprint: String::new(),
        der: CertificateDer::from(Vec::new()),
    };
    reader.read_optional(|reader| {
        reader.read_tagged(Tag::context(3), |reader| {
            reader.read_sequence_of(|reader| extension(reader, &mut certificate))
        })
    })?;
    Ok(certificate)
}

/// Reads a UTCTime or GeneralizedTime. A time that `Timestamp` cannot represent becomes `Timestamp::MAX`.
fn time(reader: BERReader<'_, '_>) -> ASN1Result<Timestamp> {
    let tag = reader.lookahead_tag()?;
    let seconds = if tag == yasna::tags::TAG_UTCTIME {
        reader.read_utctime()?.datetime().unix_timestamp()
    } else {
        reader.read_generalized_time()?.datetime().unix_timestamp()
    };
    Ok(Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX))
}

fn extension(reader: BERReader<'_, '_>, certificate: &mut Certificate) -> ASN1Result<()> {
    let (id, value) = reader.read_sequence(|reader| {
        let id = reader.next().read_oid()?;
        reader.read_optional(|reader| reader.read_bool())?;
        Ok((id, reader.next().read_bytes()?))
    })?;
    if is(&id, &SUBJECT_ALT_NAME) {
        parse_der(&value, |reader| {
            reader.read_sequence_of(|reader| alternative(reader, certificate))
        })?;
    } else if is(&id, &BASIC_CONSTRAINTS) {
        certificate.is_authority = parse_der(&value, |reader| {
            reader.read_sequence(|reader| {
                let authority = reader.read_default(false, |reader| reader.read_bool())?;
                reader.read_optional(|reader| reader.read_u64())?;
                Ok(authority)
            })
        })?;
    }
    Ok(())
}

fn alternative(reader: BERReader<'_, '_>, certificate: &mut Certificate) -> ASN1Result<()> {
    let tag = reader.lookahead_tag()?;
    if tag == Tag::context(2) {
        let name = reader.read_tagged_implicit(tag, |reader| reader.read_ia5_string())?;
        certificate.dns_names.push(name.to_ascii_lowercase());
    } else if tag == Tag::context(7) {
        let bytes = reader.read_tagged_implicit(tag, |reader| reader.read_bytes())?;
        certificate.addresses.push(address(&bytes)?);
    } else {
        reader.read_der()?;
    }
    Ok(())
}

fn address(bytes: &[u8]) -> ASN1Result<IpAddr> {
    if let Ok(four) = <[u8; 4]>::try_from(bytes) {
        return Ok(Ipv4Addr::from(four).into());
    }
    match <[u8; 16]>::try_from(bytes) {
        Ok(sixteen) => Ok(Ipv6Addr::from(sixteen).into()),
        Err(_) => Err(ASN1Error::new(ASN1ErrorKind::Invalid)),
    }
}

/// The common name in a distinguished name, or an empty text. Invalid UTF-8 is replaced.
fn common_name(name: &[u8]) -> String {
    let mut found = String::new();
    let read = parse_der(name, |reader| {
        reader.read_sequence_of(|reader| {
            reader.read_set_of(|reader| {
                reader.read_sequence(|reader| {
                    let id = reader.next().read_oid()?;
                    let value = reader.next().read_tagged_der()?;
                    if is(&id, &COMMON_NAME) {
                        found = String::from_utf8_lossy(value.value()).into_owned();
                    }
                    Ok(())
                })
            })
        })
    });
    if read.is_ok() { found } else { String::new() }
}

fn is(id: &ObjectIdentifier, parts: &[u64]) -> bool {
    id.components().as_slice() == parts
}
