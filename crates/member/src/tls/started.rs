//! Compares the authorities that running members trust with the authorities in the Secrets. etcd reads its trust
//! bundle only at its start, but its certificates at each handshake. Members can therefore reject each other although
//! no Secret has a fault.
//!
//! Invariant 20: trust bundles change in steps. A fault is reported if a running member and a new member have no common
//! authority, or if one of them would reject the certificate of the other. Performs no I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;

use super::material::{Fault, FaultKind, Purpose};
use super::{ClusterTls, Slot, check};
use crate::certificate::{Certificate, certificates};

/// The identities of the authorities that a running member trusts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Authorities {
    /// The authorities for certificates of other members.
    pub peer: BTreeSet<String>,
    /// The authorities for certificates of clients.
    pub server: BTreeSet<String>,
}

impl Authorities {
    /// The authorities in the Secrets. `None` without TLS, or if a trust bundle cannot be read.
    pub fn of(tls: &ClusterTls) -> Option<Self> {
        let names = |slot: &Option<Slot>| match slot {
            None => Some(BTreeSet::new()),
            Some(slot) => Some(trusted(slot)?.into_keys().collect()),
        };
        tls.is_used().then_some(Self {
            peer: names(&tls.peer)?,
            server: names(&tls.server)?,
        })
    }

    /// Parses the annotation of a pod. A missing or invalid part becomes an empty set, for which `faults` reports
    /// nothing.
    pub fn read(text: &str) -> Self {
        let of = |key: &str| {
            let mut parts = text.split(';').filter_map(|part| part.split_once('='));
            let names = parts.find_map(|(name, list)| (name == key).then_some(list));
            let names = names.unwrap_or_default().split('+');
            names
                .filter(|name| !name.is_empty())
                .map(str::to_owned)
                .collect()
        };
        Self {
            peer: of("peer"),
            server: of("server"),
        }
    }

    fn by(&self, purpose: Purpose) -> &BTreeSet<String> {
        match purpose {
            Purpose::Peer => &self.peer,
            _ => &self.server,
        }
    }
}

/// Formats the value of the pod annotation with the authorities.
impl fmt::Display for Authorities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |names: &BTreeSet<String>| names.iter().cloned().collect::<Vec<_>>().join("+");
        write!(f, "peer={};server={}", list(&self.peer), list(&self.server))
    }
}

/// The authorities in the trust bundle of a Secret, by their [`Certificate::identity`].
fn trusted(slot: &Slot) -> Option<BTreeMap<String, Certificate>> {
    let all = certificates(&slot.found.as_ref().ok()?.ca).ok()?;
    Some(all.into_iter().map(|one| (one.identity(), one)).collect())
}

/// The faults for running members. `started` contains the authorities of each member, by its name.
pub(super) fn faults(
    tls: &ClusterTls,
    started: &BTreeMap<String, Authorities>,
    now: Timestamp,
) -> Vec<Fault> {
    // Members verify each other with the authorities in the peer Secret. They verify clients with the authorities in
    // the server Secret. The operators are clients.
    let trust = [
        (Purpose::Peer, &tls.peer, (Purpose::Peer, &tls.peer)),
        (
            Purpose::Server,
            &tls.server,
            (Purpose::Operator, &tls.operator),
        ),
    ];
    let mut faults = Vec::new();
    for (purpose, slot, (client_purpose, client)) in trust {
        let Some((slot, now_trusted)) = slot.as_ref().and_then(|slot| Some((slot, trusted(slot)?)))
        else {
            continue;
        };
        let known = started
            .iter()
            .filter(|(_, started)| !started.by(purpose).is_empty());
        let common = |started: &Authorities| -> Vec<CertificateDer<'static>> {
            let theirs = started.by(purpose);
            let both = now_trusted
                .iter()
                .filter(|(name, _)| theirs.contains(*name));
            both.map(|(_, one)| one.der.clone()).collect()
        };
        let known: Vec<_> = known
            .map(|(member, started)| (member.as_str(), common(started)))
            .collect();
        let separated: Vec<&str> = known
            .iter()
            .filter(|(_, common)| common.is_empty())
            .map(|(member, _)| *member)
            .collect();
        if !separated.is_empty() {
            faults.push(no_common_authority(purpose, slot, &separated));
            continue;
        }
        let Some(client) = client.as_ref() else {
            continue;
        };
        let rejecting = known
            .iter()
            .find(|(_, common)| check::is_issued_by_other(client_purpose, client, common, now));
        if let Some((member, _)) = rejecting {
            faults.push(not_accepted(client_purpose, client, member));
        }
    }
    faults
}

fn keys(purpose: Purpose, slot: &Slot) -> super::material::Keys {
    let names = slot.found.as_ref().map(|material| material.names);
    purpose.keys(names.unwrap_or_default())
}

fn no_common_authority(purpose: Purpose, slot: &Slot, separated: &[&str]) -> Fault {
    let what = format!(
        "{} has none of the authorities that {} started with. Store the previous authority together with the new one, \
         and certificates issued by the previous one, until all members have restarted with both authorities. Or, if \
         members use volumes and downtime is acceptable, delete the pods of all members at once",
        keys(purpose, slot).ca,
        listed(separated)
    );
    Fault::new(purpose, &slot.secret, FaultKind::AuthorityReplaced, &what)
}

fn not_accepted(purpose: Purpose, slot: &Slot, member: &str) -> Fault {
    let what = format!(
        "{} was not issued by any authority that {member} was started with: store the previous certificate until all \
         members have restarted with both authorities",
        keys(purpose, slot).certificate
    );
    Fault::new(purpose, &slot.secret, FaultKind::UnknownAuthority, &what)
}

fn listed(members: &[&str]) -> String {
    let verb = if members.len() == 1 { "was" } else { "were" };
    format!("{} {verb}", members.join(", "))
}
