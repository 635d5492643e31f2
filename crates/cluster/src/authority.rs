//! Generated certificates: the certificate authorities (CAs), the certificates that they sign, and the renewal.
//!
//! Each cluster has two CAs: one for peer certificates, which only members have, and one for clients. With a single CA,
//! every client could connect to members as a peer and take part in the consensus.
//!
//! Apart from random keys and serial numbers, the result of each function depends only on its arguments.

mod keys;
mod secret;
mod sign;

#[cfg(test)]
pub(crate) mod tests;

use std::time::Duration;

use api::names::{self, CertificateUse};
use jiff::Timestamp;

use crate::clock::{SKEW, age};

pub(crate) use keys::Key;
pub(crate) use secret::{
    AUTHORITIES, NEXT_CERTIFICATE, NEXT_KEY, TLS_CERTIFICATE, TLS_KEY, authority_secret, bundle,
    digest, held, labels, leaf_secret,
};
pub use secret::{Anchor, Held, Leaf};
pub(crate) use sign::{Made, Request, authority, leaf};

/// A certificate is renewed after this fraction of its validity: two thirds.
const RENEWED_AT: (u32, u32) = (2, 3);

/// Why no certificate could be created. The error contains no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A private key could not be generated or parsed.
    #[error("a private key cannot be generated or parsed")]
    Key,
    /// A certificate could not be written or parsed.
    #[error("a certificate cannot be encoded or parsed")]
    Certificate,
    /// The name is neither a DNS name nor an IP address.
    #[error("a name in the certificate is neither a DNS name nor an IP address")]
    Name,
}

/// The connections that the certificates of a CA secure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CaScope {
    /// Connections between members.
    Peers,
    /// Connections between members and clients.
    Clients,
}

impl CaScope {
    /// The name of the CA's Secret.
    pub fn secret(self, cluster: &str) -> String {
        match self {
            Self::Peers => names::peer_authority_secret(cluster),
            Self::Clients => names::client_authority_secret(cluster),
        }
    }

    /// The scope as a word, for messages.
    pub fn word(self) -> &'static str {
        match self {
            Self::Peers => "peer",
            Self::Clients => "client",
        }
    }

    /// The scope of certificates with this use.
    pub fn of(used: CertificateUse) -> Self {
        match used {
            CertificateUse::Peer => Self::Peers,
            CertificateUse::Server
            | CertificateUse::Operator
            | CertificateUse::Client
            | CertificateUse::Proxy => Self::Clients,
        }
    }
}

/// The settings in the spec for the certificates that the operator generates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The namespace of the EtcdCluster, which the names in certificates contain.
    pub namespace: String,
    /// Name of the EtcdCluster.
    pub cluster: String,
    /// `spec.pod.ClusterDomain`, without a leading or trailing dot.
    pub domain: String,
    /// True if members use TLS between each other.
    pub peers: bool,
    /// True if members use TLS with clients.
    pub clients: bool,
    /// How long a new certificate is valid.
    pub validity: Duration,
    /// Validity of a CA certificate.
    pub authority_validity: Duration,
    /// Additional names under which clients connect to members.
    pub server_names: Vec<String>,
    /// Name of the Service of the gRPC proxies; `None` without proxies.
    pub proxy: Option<String>,
    /// The value of the annotation by which a person requests new CAs.
    pub rotate: Option<String>,
}

impl Rule {
    /// The scopes for which the cluster uses TLS.
    pub fn scopes(&self) -> impl Iterator<Item = CaScope> {
        let peers = self.peers.then_some(CaScope::Peers);
        let clients = self.clients.then_some(CaScope::Clients);
        peers.into_iter().chain(clients)
    }

    /// The uses of a member's certificates. Each member has one certificate for each use.
    pub fn uses_of_member(&self) -> impl Iterator<Item = CertificateUse> {
        let peer = self.peers.then_some(CertificateUse::Peer);
        let server = self.clients.then_some(CertificateUse::Server);
        peer.into_iter().chain(server)
    }

    /// The uses of the certificates that belong to no member.
    pub fn uses_of_cluster(&self) -> impl Iterator<Item = CertificateUse> {
        let proxy = self.proxy.as_ref().map(|_| CertificateUse::Proxy);
        let uses = [CertificateUse::Operator, CertificateUse::Client];
        let clients = self.clients;
        uses.into_iter().chain(proxy).filter(move |_| clients)
    }

    /// The DNS names and addresses in a certificate. The operator generates no wildcard names, because a member with a
    /// wildcard could impersonate other members.
    pub fn names(&self, owner: &str, used: CertificateUse) -> Vec<String> {
        let place = (&*self.namespace, &*self.cluster, &*self.domain);
        match (used, &self.proxy) {
            (CertificateUse::Proxy, Some(service)) => {
                let place = (&*self.namespace, &*self.domain);
                member::issued::service_names(
                    place,
                    std::slice::from_ref(service),
                    &self.server_names,
                )
            }
            _ => member::issued::subject_names(place, owner, used, &self.server_names),
        }
    }
}

/// The renewal time of a certificate with this validity: after two thirds of the validity.
pub fn renewal(not_before: Timestamp, not_after: Timestamp) -> Timestamp {
    let life = age(not_before, not_after);
    not_before
        .checked_add(life / RENEWED_AT.1 * RENEWED_AT.0)
        .unwrap_or(not_after)
}

/// Start and end of the validity of a certificate that is created now. No certificate is valid longer than its signer
/// (`limit`).
fn life(now: Timestamp, validity: Duration, limit: Option<Timestamp>) -> (Timestamp, Timestamp) {
    let before = SKEW.min(validity / 10);
    let from = now.checked_sub(before).unwrap_or(now);
    let until = now.checked_add(validity).unwrap_or(Timestamp::MAX);
    (from, limit.map_or(until, |limit| limit.min(until)))
}

/// The creation time of a certificate. It is computed from the validity, which starts shortly before the creation.
pub(crate) fn made_at(leaf: &Leaf) -> Timestamp {
    let before = SKEW.min(age(leaf.not_before, leaf.not_after) / 11);
    leaf.not_before
        .checked_add(before)
        .unwrap_or(leaf.not_before)
}
