//! Whether TLS material holds: the key is the certificate's, the chain leads to the authority that will be asked, the
//! time, the use and the names are right. Pure; rustls and webpki verify, nothing is verified by hand.
//!
//! Invariant 20: a member is started only with material without a fault.

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

/// One Secret being looked at.
struct Look<'a> {
    purpose: Purpose,
    secret: &'a str,
    material: &'a Material,
    keys: Keys,
}

/// What others will do with a certificate.
#[derive(Clone, Copy)]
enum Use {
    Server,
    Client,
}

impl<'a> Look<'a> {
    fn at(purpose: Purpose, slot: Option<&'a Slot>) -> Option<Result<Self, Fault>> {
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

    /// The certificates in one of its keys.
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
                &format!("{key} holds no certificate in PEM form: correct it"),
            )),
        }
    }

    fn chain(&self) -> Result<Vec<CertificateDer<'static>>, Fault> {
        self.certificates(self.keys.certificate, &self.material.certificate)
    }

    fn authorities(&self) -> Result<Vec<CertificateDer<'static>>, Fault> {
        self.certificates(self.keys.ca, &self.material.ca)
    }

    /// The key can be read and is the certificate's.
    fn pair(&self, provider: &CryptoProvider) -> Result<(), Fault> {
        let (certificate, key) = (self.keys.certificate, self.keys.key);
        let chain = self.chain()?;
        let Ok(private) = PrivateKeyDer::from_pem_slice(&self.material.key) else {
            let what = format!("{key} holds no private key in PEM form: correct it");
            return Err(self.fault(FaultKind::CertificateUnreadable, &what));
        };
        match CertifiedKey::from_der(chain, private, provider) {
            Ok(_) => Ok(()),
            Err(rustls::Error::InconsistentKeys(_)) => {
                let what = format!(
                    "{key} is not the key of {certificate}: put in the two that were made together"
                );
                Err(self.fault(FaultKind::KeyMismatch, &what))
            }
            Err(error) => {
                let what = format!("{certificate} and {key} cannot be used: {error}");
                Err(self.fault(FaultKind::CertificateUnreadable, &what))
            }
        }
    }

    /// The certificate leads to one of these authorities and may be used like this, at this time. An authority that has
    /// run out is none to etcd: Go verifies the whole chain, where webpki takes whom it is told to trust for granted.
    fn trusted(
        &self,
        (authorities, theirs): (&[CertificateDer<'static>], &str),
        wanted: Use,
        with: With<'_>,
    ) -> Result<(), Fault> {
        let ended = |one: &&CertificateDer<'static>| {
            let read = Certificate::read((*one).clone());
            read.filter(|one| one.not_after < with.1)
        };
        let valid = authorities.iter().filter(|one| ended(one).is_none());
        let valid: Vec<_> = valid.cloned().collect();
        let led = self.leads((&valid, theirs), wanted, with);
        if led.as_ref().is_ok_and(Option::is_none) || valid.len() == authorities.len() {
            return led?.map_or(Ok(()), Err);
        }
        // By one that has run out?
        for one in authorities {
            let own = std::slice::from_ref(one);
            let Some(end) = ended(&one).map(|ended| ended.not_after) else {
                continue;
            };
            let refused = self.leads((own, theirs), wanted, with)?;
            if refused.is_none_or(|fault| fault.code != FaultKind::UnknownAuthority) {
                let what = format!(
                    "{} was signed by an authority in {theirs} that expired at {end}: put in a new authority, and \
                     certificates by it in every Secret; members on volumes can then be started again by deleting the \
                     pods of all of them",
                    self.keys.certificate
                );
                return Err(self.fault(FaultKind::AuthorityExpired, &what));
            }
        }
        led?.map_or(Ok(()), Err)
    }

    /// Why the certificate does not lead to any of these authorities; `None` when it does.
    fn leads(
        &self,
        (authorities, theirs): (&[CertificateDer<'_>], &str),
        wanted: Use,
        (provider, now): With<'_>,
    ) -> Result<Option<Fault>, Fault> {
        let chain = self.chain()?;
        let certificate = self.keys.certificate;
        let unreadable = |error: &webpki::Error| {
            let what = format!("{certificate} cannot be used: {error}");
            self.fault(FaultKind::CertificateUnreadable, &what)
        };
        let Some((leaf, between)) = chain.split_first() else {
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
        let usage = match wanted {
            Use::Server => KeyUsage::server_auth(),
            Use::Client => KeyUsage::client_auth(),
        };
        let verified = leaf.verify_for_usage(
            provider.signature_verification_algorithms.all,
            &anchors,
            between,
            UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds)),
            usage,
            None,
            None,
        );
        let refused = verified.err();
        Ok(refused.map(|error| self.refused(&error, theirs, wanted)))
    }

    fn refused(&self, error: &webpki::Error, theirs: &str, wanted: Use) -> Fault {
        let certificate = self.keys.certificate;
        let (code, what) = match error {
            webpki::Error::CertExpired { not_after, .. } => (
                FaultKind::CertificateExpired,
                format!(
                    "{certificate} expired at {}: put in a new one",
                    date(*not_after)
                ),
            ),
            webpki::Error::CertNotValidYet { not_before, .. } => (
                FaultKind::CertificateNotYetValid,
                format!(
                    "{certificate} is valid only from {} on: wait, or put in another, and see that clocks are right",
                    date(*not_before)
                ),
            ),
            webpki::Error::UnknownIssuer | webpki::Error::InvalidSignatureForPublicKey => (
                FaultKind::UnknownAuthority,
                format!(
                    "{certificate} was not signed by any authority in {theirs}: put in that authority, or a certificate \
                     of one that is there"
                ),
            ),
            webpki::Error::RequiredEkuNotFoundContext(_) | webpki::Error::EmptyEkuExtension => {
                let (word, whom) = match wanted {
                    Use::Server => ("server auth", "a server"),
                    Use::Client => ("client auth", "a client"),
                };
                (
                    FaultKind::WrongUsage,
                    format!(
                        "{certificate} may not be used by {whom}: issue one whose extended key usage has {word:?}"
                    ),
                )
            }
            webpki::Error::CaUsedAsEndEntity => (
                FaultKind::WrongUsage,
                format!(
                    "{certificate} is an authority's own certificate: issue one for its holder, signed by the authority"
                ),
            ),
            other => (
                FaultKind::CertificateUnreadable,
                format!("{certificate} cannot be used: {other}"),
            ),
        };
        self.fault(code, &what)
    }

    /// The names of the certificate cover every member's host name.
    fn names(&self, addresses: &Addresses) -> Result<(), Fault> {
        let chain = self.chain()?;
        let host = any_member(addresses);
        if covers(&chain, &host) {
            return Ok(());
        }
        let wanted = host.split_once('.').map_or("", |(_, rest)| rest);
        let what = format!(
            "{} is for {}, which covers no member such as {host}: issue one for *.{wanted}",
            self.keys.certificate,
            listed(&chain)
        );
        Err(self.fault(FaultKind::NameNotCovered, &what))
    }
}

/// All faults of a cluster's material. One Secret's first fault stands for those that follow from it.
pub(super) fn faults(tls: &ClusterTls, addresses: &Addresses, now: Timestamp) -> Vec<Fault> {
    let provider = aws_lc_rs::default_provider();
    let with = (&provider, now);
    let peer = Look::at(Purpose::Peer, tls.peer.as_ref());
    let server = Look::at(Purpose::Server, tls.server.as_ref());
    let operator = Look::at(Purpose::Operator, tls.operator.as_ref());
    let mut faults = Vec::new();
    let mut note = |result: Result<(), Fault>| faults.extend(result.err());
    note(match &peer {
        None => Ok(()),
        Some(Err(fault)) => Err(fault.clone()),
        Some(Ok(peer)) => peer_faults(peer, addresses, with),
    });
    note(match (&server, &operator) {
        (None, _) => Ok(()),
        (Some(Err(fault)), _) => Err(fault.clone()),
        (Some(Ok(server)), operator) => {
            // Those that verify it are the operators: by their authorities.
            let by = operator
                .as_ref()
                .and_then(|operator| operator.as_ref().ok());
            server_faults(server, by, addresses, with)
        }
    });
    note(match (&operator, &server) {
        (None, _) => Ok(()),
        (Some(Err(fault)), _) => Err(fault.clone()),
        (Some(Ok(operator)), server) => {
            let by = server.as_ref().and_then(|server| server.as_ref().ok());
            operator_faults(operator, by, with)
        }
    });
    faults
}

type With<'a> = (&'a CryptoProvider, Timestamp);

/// A member is a server to its peers and a client of them, by one certificate.
fn peer_faults(peer: &Look<'_>, addresses: &Addresses, with: With<'_>) -> Result<(), Fault> {
    peer.pair(with.0)?;
    let authorities = peer.authorities()?;
    for wanted in [Use::Server, Use::Client] {
        peer.trusted((&authorities, peer.keys.ca), wanted, with)?;
    }
    peer.names(addresses)
}

fn server_faults(
    server: &Look<'_>,
    by: Option<&Look<'_>>,
    addresses: &Addresses,
    with: With<'_>,
) -> Result<(), Fault> {
    server.pair(with.0)?;
    let own = server.authorities()?;
    let theirs = by.and_then(|by| Some((by.authorities().ok()?, by)));
    match &theirs {
        Some((authorities, by)) => {
            let place = format!("{} of Secret {}", by.keys.ca, by.secret);
            server.trusted((authorities, &place), Use::Server, with)?;
        }
        None => server.trusted((&own, server.keys.ca), Use::Server, with)?,
    }
    server.names(addresses)
}

fn operator_faults(
    operator: &Look<'_>,
    by: Option<&Look<'_>>,
    with: With<'_>,
) -> Result<(), Fault> {
    operator.pair(with.0)?;
    operator.authorities()?;
    let Some((authorities, by)) = by.and_then(|by| Some((by.authorities().ok()?, by))) else {
        return Ok(());
    };
    let place = format!("{} of Secret {}", by.keys.ca, by.secret);
    operator.trusted((&authorities, &place), Use::Client, with)
}

/// Whether a certificate that holds in itself was signed by none of these authorities, and is so refused by whoever
/// trusts no others. The usage asked about is the client's: a peer has both, and whom members ask for a certificate is
/// a client.
pub(super) fn is_of_others(
    purpose: Purpose,
    slot: &Slot,
    authorities: &[CertificateDer<'static>],
    now: Timestamp,
) -> bool {
    let provider = aws_lc_rs::default_provider();
    let Some(Ok(look)) = Look::at(purpose, Some(slot)) else {
        return false;
    };
    let led = look.leads((authorities, ""), Use::Client, (&provider, now));
    matches!(led, Ok(Some(fault)) if fault.code == FaultKind::UnknownAuthority)
}

/// Whether the certificates of the members, those that can be read, cover every member's host name.
pub(super) fn covers_members(tls: &ClusterTls, addresses: &Addresses) -> bool {
    let host = any_member(addresses);
    [&tls.peer, &tls.server].into_iter().flatten().all(|slot| {
        let Ok(material) = &slot.found else {
            return false;
        };
        let chain: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(&material.certificate).collect();
        chain.is_ok_and(|chain| covers(&chain, &host))
    })
}

/// The host name of a member whose name is as good as any other's: names are drawn, so a certificate of all members
/// has to cover each that might be.
fn any_member(addresses: &Addresses) -> String {
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
