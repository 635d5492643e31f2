//! Checks TLS Secrets before a member uses them: the private key, the chain to a trusted authority, the validity, the
//! usage and the names. rustls and webpki verify the certificates. Performs no I/O.
//!
//! Invariant 20: a member starts only with Secrets without faults.

use api::names::{Addresses, MEMBER_SUFFIX};
use jiff::Timestamp;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, TrustAnchor, UnixTime};
use rustls::sign::CertifiedKey;
use webpki::{EndEntityCert, KeyUsage};

use super::material::{Fault, FaultKind, Keys, Material, Purpose};
use super::{ClusterTls, Slot};
use crate::certificate::Certificate;

struct SecretCheck<'a> {
    purpose: Purpose,
    secret: &'a str,
    material: &'a Material,
    keys: Keys,
}

/// The side of a TLS handshake that presents the certificate.
#[derive(Clone, Copy)]
enum Use {
    Server,
    Client,
}

impl<'a> SecretCheck<'a> {
    fn new(purpose: Purpose, slot: Option<&'a Slot>) -> Option<Result<Self, Fault>> {
        let slot = slot?;
        Some(
            slot.found
                .as_ref()
                .map_err(Clone::clone)
                .map(|material| Self {
                    purpose,
                    secret: &slot.secret,
                    material,
                    keys: purpose.keys(material.names),
                }),
        )
    }

    fn fault(&self, code: FaultKind, what: &str) -> Fault {
        Fault::new(self.purpose, self.secret, code, what)
    }

    /// The certificates in one entry of the Secret.
    fn certificates(
        &self,
        key: &str,
        pem: &'a [u8],
    ) -> Result<Vec<CertificateDer<'static>>, Fault> {
        let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
        match read {
            Ok(all) if !all.is_empty() => Ok(all),
            _ => Err(self.fault(
                FaultKind::CertificateUnreadable,
                &format!("{key} contains no certificate in PEM format: replace it"),
            )),
        }
    }

    fn chain(&self) -> Result<Vec<CertificateDer<'static>>, Fault> {
        self.certificates(self.keys.certificate, &self.material.certificate)
    }

    fn authorities(&self) -> Result<Vec<CertificateDer<'static>>, Fault> {
        self.certificates(self.keys.ca, &self.material.ca)
    }

    /// Checks that the private key is valid and matches the certificate.
    fn pair(&self, provider: &CryptoProvider) -> Result<(), Fault> {
        let (certificate, key) = (self.keys.certificate, self.keys.key);
        let chain = self.chain()?;
        let Ok(private) = PrivateKeyDer::from_pem_slice(&self.material.key) else {
            let what = format!("{key} contains no private key in PEM format: replace it");
            return Err(self.fault(FaultKind::CertificateUnreadable, &what));
        };
        match CertifiedKey::from_der(chain, private, provider) {
            Ok(_) => Ok(()),
            Err(rustls::Error::InconsistentKeys(_)) => {
                let what = format!(
                    "{key} does not contain the private key of the certificate in {certificate}: store a certificate \
                     and its private key"
                );
                Err(self.fault(FaultKind::KeyMismatch, &what))
            }
            Err(error) => {
                let what = format!("{certificate} and {key} cannot be used: {error}");
                Err(self.fault(FaultKind::CertificateUnreadable, &what))
            }
        }
    }

    /// Checks that one of these authorities has issued the certificate for this usage, and that the certificate is
    /// valid now. Expired authorities are left out, because etcd rejects them, but webpki accepts them.
    fn trusted(
        &self,
        (authorities, theirs): (&[CertificateDer<'static>], &str),
        required: Use,
        context: Context<'_>,
    ) -> Result<(), Fault> {
        let expired = |one: &&CertificateDer<'static>| {
            let read = Certificate::read((*one).clone());
            read.filter(|one| one.not_after < context.1)
        };
        let valid = authorities.iter().filter(|one| expired(one).is_none());
        let valid: Vec<_> = valid.cloned().collect();
        let fault = self.chain_fault((&valid, theirs), required, context);
        if fault.as_ref().is_ok_and(Option::is_none) || valid.len() == authorities.len() {
            return fault?.map_or(Ok(()), Err);
        }
        // If an expired authority has issued the certificate, the message names this authority as the cause.
        for one in authorities {
            let own = std::slice::from_ref(one);
            let Some(end) = expired(&one).map(|expired| expired.not_after) else {
                continue;
            };
            let rejected = self.chain_fault((own, theirs), required, context)?;
            if rejected.is_none_or(|fault| fault.code != FaultKind::UnknownAuthority) {
                let what = format!(
                    "{} was issued by an authority in {theirs} that expired at {end}. Store a new authority, and \
                     certificates issued by it, in every TLS Secret. If members use volumes, then delete the pods of \
                     all members to restart them",
                    self.keys.certificate
                );
                return Err(self.fault(FaultKind::AuthorityExpired, &what));
            }
        }
        fault?.map_or(Ok(()), Err)
    }

    /// The fault in the chain to these authorities. `None` if the chain is valid.
    fn chain_fault(
        &self,
        (authorities, theirs): (&[CertificateDer<'_>], &str),
        required: Use,
        (provider, now): Context<'_>,
    ) -> Result<Option<Fault>, Fault> {
        let chain = self.chain()?;
        let certificate = self.keys.certificate;
        let unreadable = |error: &webpki::Error| {
            let what = format!("{certificate} cannot be used: {error}");
            self.fault(FaultKind::CertificateUnreadable, &what)
        };
        let Some((leaf, intermediates)) = chain.split_first() else {
            return Ok(None);
        };
        let leaf = EndEntityCert::try_from(leaf).map_err(|error| unreadable(&error))?;
        let anchors: Result<Vec<TrustAnchor<'_>>, _> = authorities
            .iter()
            .map(webpki::anchor_from_trusted_cert)
            .collect();
        let anchors = anchors.map_err(|error| {
            let what = format!("{theirs} cannot be used as a certificate authority: {error}");
            self.fault(FaultKind::CertificateUnreadable, &what)
        })?;
        let seconds = u64::try_from(now.as_second()).unwrap_or_default();
        let usage = match required {
            Use::Server => KeyUsage::server_auth(),
            Use::Client => KeyUsage::client_auth(),
        };
        let verified = leaf.verify_for_usage(
            provider.signature_verification_algorithms.all,
            &anchors,
            intermediates,
            UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds)),
            usage,
            None,
            None,
        );
        let rejected = verified.err();
        Ok(rejected.map(|error| self.rejected(&error, theirs, required)))
    }

    fn rejected(&self, error: &webpki::Error, theirs: &str, required: Use) -> Fault {
        let certificate = self.keys.certificate;
        let (code, what) = match error {
            webpki::Error::CertExpired { not_after, .. } => (
                FaultKind::CertificateExpired,
                format!(
                    "{certificate} expired at {}: store a new certificate",
                    date(*not_after)
                ),
            ),
            webpki::Error::CertNotValidYet { not_before, .. } => (
                FaultKind::CertificateNotYetValid,
                format!(
                    "{certificate} is not valid before {}: wait until then, store another certificate, or correct the clocks",
                    date(*not_before)
                ),
            ),
            webpki::Error::UnknownIssuer | webpki::Error::InvalidSignatureForPublicKey => (
                FaultKind::UnknownAuthority,
                format!(
                    "{certificate} was not issued by any authority in {theirs}: add the authority that issued it to \
                     {theirs}, or store a certificate that an authority in {theirs} issued"
                ),
            ),
            webpki::Error::RequiredEkuNotFoundContext(_) | webpki::Error::EmptyEkuExtension => {
                let (usage, holder) = match required {
                    Use::Server => ("server auth", "a server"),
                    Use::Client => ("client auth", "a client"),
                };
                (
                    FaultKind::WrongUsage,
                    format!(
                        "{certificate} cannot be used by {holder}: issue a certificate with {usage:?} in its extended \
                         key usage"
                    ),
                )
            }
            webpki::Error::CaUsedAsEndEntity => (
                FaultKind::WrongUsage,
                format!(
                    "{certificate} contains the certificate of an authority: store a certificate that this authority \
                     issued"
                ),
            ),
            other => (
                FaultKind::CertificateUnreadable,
                format!("{certificate} cannot be used: {other}"),
            ),
        };
        self.fault(code, &what)
    }

    /// Checks that the certificate is valid for the host names of all members.
    fn names(&self, addresses: &Addresses) -> Result<(), Fault> {
        let chain = self.chain()?;
        let host = example_host(addresses);
        if covers(&chain, &host) {
            return Ok(());
        }
        let domain = host.split_once('.').map_or("", |(_, rest)| rest);
        let what = format!(
            "{} is valid for {}, but not for members such as {host}: issue a certificate for *.{domain}",
            self.keys.certificate,
            listed(&chain)
        );
        Err(self.fault(FaultKind::NameNotCovered, &what))
    }
}

/// The first fault of each Secret. Further faults of a Secret may be consequences of the first fault.
pub(super) fn faults(tls: &ClusterTls, addresses: &Addresses, now: Timestamp) -> Vec<Fault> {
    let provider = aws_lc_rs::default_provider();
    let context = (&provider, now);
    let peer = SecretCheck::new(Purpose::Peer, tls.peer.as_ref());
    let server = SecretCheck::new(Purpose::Server, tls.server.as_ref());
    let operator = SecretCheck::new(Purpose::Operator, tls.operator.as_ref());
    let mut faults = Vec::new();
    let mut note = |result: Result<(), Fault>| faults.extend(result.err());
    note(match &peer {
        None => Ok(()),
        Some(Err(fault)) => Err(fault.clone()),
        Some(Ok(peer)) => peer_faults(peer, addresses, context),
    });
    note(match (&server, &operator) {
        (None, _) => Ok(()),
        (Some(Err(fault)), _) => Err(fault.clone()),
        (Some(Ok(server)), operator) => {
            // `by` is the operator's Secret, because the operators verify members with the authorities in this Secret.
            let by = operator
                .as_ref()
                .and_then(|operator| operator.as_ref().ok());
            server_faults(server, by, addresses, context)
        }
    });
    note(match (&operator, &server) {
        (None, _) => Ok(()),
        (Some(Err(fault)), _) => Err(fault.clone()),
        (Some(Ok(operator)), server) => {
            let by = server.as_ref().and_then(|server| server.as_ref().ok());
            operator_faults(operator, by, context)
        }
    });
    faults
}

type Context<'a> = (&'a CryptoProvider, Timestamp);

/// Checks the peer Secret. A member uses one certificate as a server and as a client of its peers.
fn peer_faults(
    peer: &SecretCheck<'_>,
    addresses: &Addresses,
    context: Context<'_>,
) -> Result<(), Fault> {
    peer.pair(context.0)?;
    let authorities = peer.authorities()?;
    for required in [Use::Server, Use::Client] {
        peer.trusted((&authorities, peer.keys.ca), required, context)?;
    }
    peer.names(addresses)
}

fn server_faults(
    server: &SecretCheck<'_>,
    by: Option<&SecretCheck<'_>>,
    addresses: &Addresses,
    context: Context<'_>,
) -> Result<(), Fault> {
    server.pair(context.0)?;
    let own = server.authorities()?;
    let theirs = by.and_then(|by| Some((by.authorities().ok()?, by)));
    match &theirs {
        Some((authorities, by)) => {
            let place = format!("{} of Secret {}", by.keys.ca, by.secret);
            server.trusted((authorities, &place), Use::Server, context)?;
        }
        None => server.trusted((&own, server.keys.ca), Use::Server, context)?,
    }
    server.names(addresses)
}

fn operator_faults(
    operator: &SecretCheck<'_>,
    by: Option<&SecretCheck<'_>>,
    context: Context<'_>,
) -> Result<(), Fault> {
    operator.pair(context.0)?;
    operator.authorities()?;
    let Some((authorities, by)) = by.and_then(|by| Some((by.authorities().ok()?, by))) else {
        return Ok(());
    };
    let place = format!("{} of Secret {}", by.keys.ca, by.secret);
    operator.trusted((&authorities, &place), Use::Client, context)
}

/// True if the certificate is valid, but none of these authorities has issued it. The usage is "client auth", because
/// members verify only certificates of clients and peers.
pub(super) fn is_issued_by_other(
    purpose: Purpose,
    slot: &Slot,
    authorities: &[CertificateDer<'static>],
    now: Timestamp,
) -> bool {
    let provider = aws_lc_rs::default_provider();
    let Some(Ok(check)) = SecretCheck::new(purpose, Some(slot)) else {
        return false;
    };
    let fault = check.chain_fault((authorities, ""), Use::Client, (&provider, now));
    matches!(fault, Ok(Some(fault)) if fault.code == FaultKind::UnknownAuthority)
}

/// True if every member certificate is readable, and is valid for the host names of all members.
pub(super) fn covers_members(tls: &ClusterTls, addresses: &Addresses) -> bool {
    let host = example_host(addresses);
    [&tls.peer, &tls.server].into_iter().flatten().all(|slot| {
        let Ok(material) = &slot.found else {
            return false;
        };
        let chain: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(&material.certificate).collect();
        chain.is_ok_and(|chain| covers(&chain, &host))
    })
}

/// The host name of an example member. Member names have random suffixes, so a certificate must be valid for every
/// suffix.
fn example_host(addresses: &Addresses) -> String {
    addresses.host(&format!(
        "{}-{}",
        addresses.cluster,
        "0".repeat(MEMBER_SUFFIX)
    ))
}

fn covers(chain: &[CertificateDer<'_>], host: &str) -> bool {
    let leaf = chain
        .first()
        .and_then(|leaf| EndEntityCert::try_from(leaf).ok());
    let name = ServerName::try_from(host).ok();
    match (leaf, name) {
        (Some(leaf), Some(name)) => leaf.verify_is_valid_for_subject_name(&name).is_ok(),
        _ => false,
    }
}

fn listed(chain: &[CertificateDer<'_>]) -> String {
    let leaf = chain
        .first()
        .and_then(|leaf| EndEntityCert::try_from(leaf).ok());
    let names: Vec<String> = leaf
        .iter()
        .flat_map(|leaf| leaf.valid_dns_names())
        .map(str::to_owned)
        .collect();
    if names.is_empty() {
        "no DNS name".to_owned()
    } else {
        names.join(", ")
    }
}

fn date(time: UnixTime) -> String {
    let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    Timestamp::from_second(seconds)
        .unwrap_or(Timestamp::MAX)
        .to_string()
}
