//! Creates CA certificates, and the certificates that they sign.

use api::names::CertificateUse;
use jiff::Timestamp;
use member::certificate::Certificate;
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyIdMethod, KeyUsagePurpose, SanType, SerialNumber,
};
use std::net::IpAddr;
use std::time::Duration;
use time::OffsetDateTime;

use super::{CaScope, Error, Key, life};

/// A certificate with its key, in PEM.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Made {
    pub(crate) certificate: Vec<u8>,
    /// The private key of the certificate.
    pub(crate) key: Vec<u8>,
}

/// The properties of a certificate to create.
#[derive(Clone, Debug)]
pub(crate) struct Request<'a> {
    /// The subject's common name. If it is empty, the subject is empty.
    pub(crate) common_name: &'a str,
    /// The DNS names and IP addresses that the certificate contains.
    pub(crate) names: &'a [String],
    /// The use that the certificate permits.
    pub(crate) used: CertificateUse,
    pub(crate) validity: Duration,
}

/// Creates a CA with a unique name. The issuer name in a certificate therefore identifies its signer.
pub(crate) fn authority(scope: CaScope, validity: Duration, now: Timestamp) -> Result<Made, Error> {
    let key = Key::draw()?;
    let (serial, text) = serial();
    let short = text.get(..12).unwrap_or_default();
    let mut params = params(&format!("etcd {} authority {short}", scope.word()), serial);
    (params.not_before, params.not_after) = times(life(now, validity, None))?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.key_identifier_method = KeyIdMethod::PreSpecified(key.identifier());
    let certificate = params.self_signed(&key).map_err(|_| Error::Certificate)?;
    Ok(Made {
        certificate: certificate.pem().into_bytes(),
        key: key.pem()?,
    })
}

/// Creates a certificate, signed by the given CA certificate and key.
pub(crate) fn leaf(
    request: &Request<'_>,
    (signer, signer_key): (&Certificate, &[u8]),
    now: Timestamp,
) -> Result<Made, Error> {
    let key = Key::draw()?;
    let (serial, _) = serial();
    let mut params = params(request.common_name, serial);
    (params.not_before, params.not_after) =
        times(life(now, request.validity, Some(signer.not_after)))?;
    params.subject_alt_names = request
        .names
        .iter()
        .map(|name| alternative(name))
        .collect::<Result<_, _>>()?;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = match request.used {
        // A member presents its `Peer` certificate to other members as a client. etcd's JSON gateway presents the
        // `Server` certificate to the listener of the same member. A gRPC proxy presents its certificate to members and
        // to itself. These certificates therefore need `ClientAuth` too.
        CertificateUse::Peer | CertificateUse::Server | CertificateUse::Proxy => vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ],
        CertificateUse::Operator | CertificateUse::Client => {
            vec![ExtendedKeyUsagePurpose::ClientAuth]
        }
    };
    params.use_authority_key_identifier_extension = true;
    params.key_identifier_method = KeyIdMethod::PreSpecified(key.identifier());
    let signer_key = Key::read(signer_key)?;
    let mut signs = self::params(&signer.common_name, SerialNumber::from(0));
    signs.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    signs.key_identifier_method = KeyIdMethod::PreSpecified(signer_key.identifier());
    let issuer = Issuer::new(signs, signer_key);
    let certificate = params
        .signed_by(&key, &issuer)
        .map_err(|_| Error::Certificate)?;
    Ok(Made {
        certificate: certificate.pem().into_bytes(),
        key: key.pem()?,
    })
}

fn params(common_name: &str, serial: SerialNumber) -> CertificateParams {
    let mut params = CertificateParams::default();
    let mut name = DistinguishedName::new();
    if !common_name.is_empty() {
        name.push(DnType::CommonName, common_name);
    }
    params.distinguished_name = name;
    params.serial_number = Some(serial);
    params
}

/// A random serial number, positive and never zero, as bytes and as hexadecimal digits.
fn serial() -> (SerialNumber, String) {
    let mut bytes: [u8; 16] = rand::random();
    bytes[0] = bytes[0] & 0x7f | 0x40;
    (SerialNumber::from_slice(&bytes), hex::encode(bytes))
}

fn times((from, until): (Timestamp, Timestamp)) -> Result<(OffsetDateTime, OffsetDateTime), Error> {
    let time = |at: Timestamp| {
        OffsetDateTime::from_unix_timestamp(at.as_second()).map_err(|_| Error::Certificate)
    };
    Ok((time(from)?, time(until)?))
}

fn alternative(name: &str) -> Result<SanType, Error> {
    if let Ok(address) = name.parse::<IpAddr>() {
        return Ok(SanType::IpAddress(address));
    }
    let is_host = !name.is_empty()
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-.*_".contains(&byte));
    if !is_host {
        return Err(Error::Name);
    }
    Ia5String::try_from(name)
        .map(SanType::DnsName)
        .map_err(|_| Error::Name)
}
