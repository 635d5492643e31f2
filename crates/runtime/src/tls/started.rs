//! Whom the members that run trust, beside whom the Secrets say is trusted by now. etcd reads its authorities when it
//! starts and certificates at every handshake, so a Secret can be right in itself and still part the members.
//!
//! Invariant 20: whom members trust changes in steps. A step that would leave a member that runs and one that is
//! started now without a common authority, or a certificate that one of them does not accept, is a fault. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;

use super::material::{Fault, FaultKind, Purpose};
use super::{ClusterTls, Slot, check};
use crate::certificate::{Certificate, certificates};

/// The authorities by which a member's etcd verifies others, since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Authorities {
    /// Other members.
    pub peer: BTreeSet<String>,
    /// Clients.
    pub server: BTreeSet<String>,
}

impl Authorities {
    /// Those of the Secrets as they are now; `None` where one that is used cannot be read.
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

    /// Reads what was noted on a pod. What cannot be read is not known, and counts as nothing.
    pub fn read(text: &str) -> Self {
        let of = |word: &str| {
            let mut parts = text.split(';').filter_map(|part| part.split_once('='));
            let names = parts.find_map(|(name, list)| (name == word).then_some(list));
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

/// As it is noted on a pod.
impl fmt::Display for Authorities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |names: &BTreeSet<String>| names.iter().cloned().collect::<Vec<_>>().join("+");
        write!(f, "peer={};server={}", list(&self.peer), list(&self.server))
    }
}

/// The authorities of a Secret, by what stands for each: one that was made again with its name and key is the same.
fn trusted(slot: &Slot) -> Option<BTreeMap<String, Certificate>> {
    let all = certificates(&slot.found.as_ref().ok()?.ca).ok()?;
    Some(all.into_iter().map(|one| (one.identity(), one)).collect())
}

/// What is wrong for members that were started with these authorities, by name.
pub(super) fn faults(
    tls: &ClusterTls,
    started: &BTreeMap<String, Authorities>,
    now: Timestamp,
) -> Vec<Fault> {
    // Members verify each other by the peers' Secret, and clients, the operators among them, by the server's.
    let circles = [
        (Purpose::Peer, &tls.peer, (Purpose::Peer, &tls.peer)),
        (
            Purpose::Server,
            &tls.server,
            (Purpose::Operator, &tls.operator),
        ),
    ];
    let mut faults = Vec::new();
    for (purpose, slot, (shown, shows)) in circles {
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
        let apart: Vec<&str> = known
            .iter()
            .filter(|(_, common)| common.is_empty())
            .map(|(member, _)| *member)
            .collect();
        if !apart.is_empty() {
            faults.push(no_common(purpose, slot, &apart));
            continue;
        }
        let Some(shows) = shows.as_ref() else {
            continue;
        };
        let refuses = known
            .iter()
            .find(|(_, common)| check::is_of_others(shown, shows, common, now));
        if let Some((member, _)) = refuses {
            faults.push(not_accepted(shown, shows, member));
        }
    }
    faults
}

fn keys(purpose: Purpose, slot: &Slot) -> super::material::Keys {
    let names = slot.found.as_ref().map(|material| material.names);
    purpose.keys(names.unwrap_or_default())
}

fn no_common(purpose: Purpose, slot: &Slot, apart: &[&str]) -> Fault {
    let what = format!(
        "{} has none of the authorities that {} started with: put the one before in again, beside the new one, with \
         certificates by the one before, until all members were started with both (or, on volumes and without service \
         meanwhile, delete the pods of all members at once)",
        keys(purpose, slot).ca,
        listed(apart)
    );
    Fault::new(purpose, &slot.secret, FaultKind::AuthorityReplaced, &what)
}

fn not_accepted(purpose: Purpose, slot: &Slot, member: &str) -> Fault {
    let what = format!(
        "{} was not signed by any authority that {member} was started with: put the certificate before in again until \
         all members were started with both authorities",
        keys(purpose, slot).certificate
    );
    Fault::new(purpose, &slot.secret, FaultKind::UnknownAuthority, &what)
}

fn listed(members: &[&str]) -> String {
    let verb = if members.len() == 1 { "was" } else { "were" };
    format!("{} {verb}", members.join(", "))
}
