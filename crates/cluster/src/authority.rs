//! Generated certificates: authorities, what they sign, and when it is renewed.
//!
//! There are two authorities a cluster: one for peers, which nobody but members has certificates of, and one for clients.
//! With one for both, whoever may read keys could also take part in the consensus. Keys are ECDSA on P-256, made and used
//! with the cryptography the TLS stack is built on; rcgen writes the certificates.
//!
//! Apart from the randomness of keys and serial numbers everything here is pure: no client, no clock.

mod keys;
mod secret;
mod sign;

#[cfg(test)]
pub(crate) mod tests;

use std::time::Duration;

use api::names::{self, CertificateUse};
use jiff::Timestamp;

pub(crate) use keys::Key;
pub(crate) use secret::{
    AUTHORITIES, NEXT_CERTIFICATE, NEXT_KEY, TLS_CERTIFICATE, TLS_KEY, authority_secret, bundle,
    digest, held, labels, leaf_secret,
};
pub use secret::{Anchor, Held, Leaf};
pub(crate) use sign::{Made, Request, authority, leaf};

/// How much of its life a certificate has behind it when it is renewed: two thirds.
const RENEWED_AT: (u32, u32) = (2, 3);
/// Certificates are valid from a little before they are made, for clocks that are behind.
pub(crate) const SKEW: Duration = Duration::from_mins(5);

/// Why no certificate could be made. Says nothing about keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A key could not be drawn or read.
    #[error("the key cannot be used")]
    Key,
    /// A certificate could not be written or read.
    #[error("the certificate cannot be made")]
    Certificate,
    /// A name that no certificate can be made for.
    #[error("a name in it is no DNS name and no address")]
    Name,
}

/// Which authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Circle {
    /// Members among each other.
    Peers,
    /// Members and their clients.
    Clients,
}

impl Circle {
    /// The name of the Secret with its authority.
    pub fn secret(self, cluster: &str) -> String {
        match self {
            Self::Peers => names::peer_authority_secret(cluster),
            Self::Clients => names::client_authority_secret(cluster),
        }
    }

    /// As a word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Peers => "peer",
            Self::Clients => "client",
        }
    }

    /// To which one a certificate belongs.
    pub fn of(used: CertificateUse) -> Self {
        match used {
            CertificateUse::Peer => Self::Peers,
            CertificateUse::Server | CertificateUse::Operator | CertificateUse::Client => {
                Self::Clients
            }
        }
    }
}

/// What the spec says about generated certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Namespace of the cluster.
    pub namespace: String,
    /// Name of the EtcdCluster.
    pub cluster: String,
    /// `spec.pod.ClusterDomain`, bare.
    pub domain: String,
    /// Members talk TLS to each other.
    pub peers: bool,
    /// Members talk TLS to clients.
    pub clients: bool,
    /// How long a certificate is valid.
    pub validity: Duration,
    /// How long an authority is valid.
    pub authority_validity: Duration,
    /// More names of the members towards clients.
    pub server_names: Vec<String>,
    /// The text by which a person asks for new authorities.
    pub rotate: Option<String>,
}

impl Rule {
    /// The authorities there are.
    pub fn circles(&self) -> impl Iterator<Item = Circle> {
        let peers = self.peers.then_some(Circle::Peers);
        let clients = self.clients.then_some(Circle::Clients);
        peers.into_iter().chain(clients)
    }

    /// The certificates of one member.
    pub fn uses_of_member(&self) -> impl Iterator<Item = CertificateUse> {
        let peer = self.peers.then_some(CertificateUse::Peer);
        let server = self.clients.then_some(CertificateUse::Server);
        peer.into_iter().chain(server)
    }

    /// The names a certificate is made for. Whole names only: a wildcard would let one member stand for another.
    pub fn names(&self, owner: &str, used: CertificateUse) -> Vec<String> {
        let Self {
            namespace, cluster, ..
        } = self;
        let member = [
            format!("{owner}.{namespace}.svc"),
            format!("{owner}.{cluster}.{namespace}.svc"),
        ];
        let of_cluster = [
            format!("{}.{namespace}.svc", names::client_service(cluster)),
            format!("{}.{namespace}.svc", names::headless_service(cluster)),
        ];
        match used {
            CertificateUse::Peer => self.in_domain(&member),
            CertificateUse::Server => {
                let mut all = self.in_domain(&member);
                all.extend(self.in_domain(&of_cluster));
                for service in [
                    names::client_service(cluster),
                    names::headless_service(cluster),
                ] {
                    all.extend([format!("{service}.{namespace}"), service]);
                }
                all.extend(["localhost", "127.0.0.1", "::1"].map(str::to_owned));
                all.extend(self.server_names.iter().cloned());
                all
            }
            CertificateUse::Operator | CertificateUse::Client => Vec::new(),
        }
    }

    /// With and without the cluster's domain; where the spec names none, the usual one.
    fn in_domain(&self, names: &[String]) -> Vec<String> {
        let domain = match self.domain.as_str() {
            "" => "cluster.local",
            given => given,
        };
        names
            .iter()
            .flat_map(|name| [name.clone(), format!("{name}.{domain}")])
            .collect()
    }
}

/// When a certificate that is valid from and until then is renewed.
pub fn renewal(not_before: Timestamp, not_after: Timestamp) -> Timestamp {
    let life = Duration::try_from(not_after.duration_since(not_before)).unwrap_or_default();
    not_before
        .checked_add(life / RENEWED_AT.1 * RENEWED_AT.0)
        .unwrap_or(not_after)
}

/// From when until when a certificate made now is valid; none outlives who signs it.
fn life(now: Timestamp, validity: Duration, limit: Option<Timestamp>) -> (Timestamp, Timestamp) {
    let before = SKEW.min(validity / 10);
    let from = now.checked_sub(before).unwrap_or(now);
    let until = now.checked_add(validity).unwrap_or(Timestamp::MAX);
    (from, limit.map_or(until, |limit| limit.min(until)))
}

/// When a certificate was made: it is valid from a little before.
pub(crate) fn made_at(leaf: &Leaf) -> Timestamp {
    let life = leaf.not_after.duration_since(leaf.not_before);
    let before = SKEW.min(Duration::try_from(life).unwrap_or_default() / 11);
    leaf.not_before
        .checked_add(before)
        .unwrap_or(leaf.not_before)
}
