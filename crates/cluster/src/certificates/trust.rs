//! The CAs that members trust: the CAs in their Secrets, and the CAs with which a running etcd was started.
//!
//! etcd reads its trust bundle only when it starts. An annotation of each pod therefore contains the CAs with which its
//! etcd was started.

use std::collections::BTreeSet;

use jiff::Timestamp;
use member::tls::Authorities;

use super::{Certificates, Noted};
use crate::authority::{CaScope, Held, digest};

/// The first sixteen digits of a fingerprint, as in annotations of pods.
fn short(fingerprint: &str) -> String {
    fingerprint.chars().take(16).collect()
}

fn of_circle(authorities: &Authorities, scope: CaScope) -> &BTreeSet<String> {
    match scope {
        CaScope::Peers => &authorities.peer,
        CaScope::Clients => &authorities.server,
    }
}

impl Certificates {
    /// The Secret of a CA that can sign; `None` if the Secret is missing, damaged, or not owned by the cluster.
    pub fn signer(&self, scope: CaScope) -> Option<&Held> {
        self.authority(scope)
            .filter(|held| held.owned && held.certificate.is_some())
    }

    /// The trust annotation of a pod that starts now; `None` until all CAs exist.
    pub fn trust(&self) -> Option<String> {
        if self.rule.is_none() {
            return self.others.as_ref().map(|digest| format!("{digest}@0"));
        }
        let signers = self.signers()?;
        // Each scope has its own `trusts_until`. The annotation contains the earliest time of all scopes.
        let until = signers.iter().filter_map(|(_, held)| held.trusts_until);
        let until = until.min().map_or(0, Timestamp::as_second);
        let digests: Vec<String> = signers.iter().map(|(_, held)| held.trust()).collect();
        let digest = digest(digests.iter().map(String::as_str));
        Some(format!("{digest}@{until}"))
    }

    fn signers(&self) -> Option<Vec<(CaScope, &Held)>> {
        let scopes = self.rule.as_ref()?.scopes();
        scopes
            .map(|scope| Some((scope, self.signer(scope)?)))
            .collect()
    }

    /// The CAs for the annotation of a new pod: those in static Secrets, or those in the trust bundles of the
    /// generated CAs.
    pub fn authorities_now(&self) -> Option<Authorities> {
        if self.rule.is_none() {
            return self.authorities.clone();
        }
        Some(authorities_in(&self.signers()?))
    }

    /// The CAs with which a pod was started; `None` if they are unknown. If the annotation with the CAs is missing, the
    /// operator finds the CAs by the digest in the trust annotation.
    pub fn started_with(&self, member: &str) -> Option<Authorities> {
        let noted = self.pods.get(member)?;
        if let Some(authorities) = &noted.authorities {
            return Some(authorities.clone());
        }
        let noted = noted.trust.as_ref()?.split('@').next()?;
        self.with_digest(noted)
    }

    /// Among the CAs in the Secrets, finds the set of CAs with this digest.
    fn with_digest(&self, noted: &str) -> Option<Authorities> {
        let rule = self.rule.as_ref()?;
        let mut found: Vec<(Vec<String>, Authorities)> = vec![Default::default()];
        for scope in rule.scopes() {
            let sets = subsets(self.prints(scope));
            let with = |(digests, all): &(Vec<String>, Authorities), set: &BTreeSet<&String>| {
                let own = digest(set.iter().map(|print| print.as_str()));
                let digests = digests.iter().cloned().chain([own]).collect();
                let mut all = all.clone();
                let ids = set.iter().map(|print| short(print)).collect();
                match scope {
                    CaScope::Peers => all.peer = ids,
                    CaScope::Clients => all.server = ids,
                }
                (digests, all)
            };
            let each = found.iter();
            found = each
                .flat_map(|one| sets.iter().map(move |set| with(one, set)))
                .collect();
        }
        let is = |digests: &[String]| digest(digests.iter().map(String::as_str)) == noted;
        let found = found.into_iter().find(|(digests, _)| is(digests));
        found.map(|(_, authorities)| authorities)
    }

    /// The fingerprints of all CAs of this scope in the Secrets.
    fn prints(&self, scope: CaScope) -> BTreeSet<&String> {
        let Some(rule) = &self.rule else {
            return BTreeSet::new();
        };
        let own = scope.secret(&rule.cluster);
        let uses = rule
            .uses_of_member()
            .filter(|used| CaScope::of(*used) == scope);
        let members = self.pods.keys();
        let leaves = uses.flat_map(|used| members.clone().map(move |name| (name, used)));
        let leaves = leaves.filter_map(|(member, used)| self.leaf(member, used));
        let secrets = self.secrets.get(&own).into_iter().chain(leaves);
        secrets.flat_map(|held| held.trusts.keys()).collect()
    }

    /// True if the etcd in this pod accepts certificates of this issuer. False if no Secret contains the issuer's CA.
    pub fn accepts(&self, member: &str, scope: CaScope, issuer: &[u8]) -> bool {
        let Some(started) = self.started_with(member) else {
            return false;
        };
        let anchors = self.secrets.values().flat_map(|held| &held.trusts);
        let mut named = anchors.filter(|(_, anchor)| anchor.subject == issuer);
        named.any(|(print, _)| of_circle(&started, scope).contains(&short(print)))
    }

    /// True if the etcd in this pod was started with this CA.
    pub fn trusts(&self, member: &str, scope: CaScope, fingerprint: &str) -> bool {
        let started = self.started_with(member);
        started.is_some_and(|started| of_circle(&started, scope).contains(&short(fingerprint)))
    }

    /// True if the etcd in this pod was started with a CA that is valid now. False if no Secret contains that CA.
    pub fn trusts_valid(&self, member: &str, scope: CaScope, now: Timestamp) -> bool {
        let anchors = self.secrets.values().flat_map(|held| &held.trusts);
        let mut valid = anchors.filter(|(_, anchor)| anchor.not_after > now);
        valid.any(|(print, _)| self.trusts(member, scope, print))
    }

    /// True if the etcd in this pod was started with exactly the trust bundle in the Secret of this CA.
    pub fn started_with_bundle(&self, member: &str, scope: CaScope, authority: &Held) -> bool {
        let bundle: BTreeSet<String> = authority.trusts.keys().map(|print| short(print)).collect();
        let started = self.started_with(member);
        started.is_some_and(|started| *of_circle(&started, scope) == bundle)
    }

    /// True if all these members accept certificates of the current signer.
    pub fn all_accept_signer<'a>(
        &self,
        scope: CaScope,
        mut members: impl Iterator<Item = &'a String>,
    ) -> bool {
        let signs = self
            .signer(scope)
            .and_then(|held| held.certificate.as_ref());
        let Some(signs) = signs else {
            return false;
        };
        members.all(|member| self.trusts(member, scope, &signs.fingerprint))
    }

    /// True without TLS between members, or if all running members trust the current signer of peer certificates: a new
    /// member can connect to them.
    pub fn accepts_new_members<'a>(&self, mut running: impl Iterator<Item = &'a String>) -> bool {
        let peers = self.rule.as_ref().is_some_and(|rule| rule.peers);
        let signs = self.signer(CaScope::Peers);
        let signs = signs.and_then(|held| held.certificate.as_ref());
        // A pod with neither of the two annotations about its CAs (`silent`) counts as accepting new members, because a
        // restore has just created the pod.
        let accepts = |member: &String| {
            let silent = |noted: &Noted| noted.trust.is_none() && noted.authorities.is_none();
            self.pods.get(member).is_none_or(silent)
                || signs
                    .is_some_and(|signs| self.trusts(member, CaScope::Peers, &signs.fingerprint))
        };
        !peers || running.all(accepts)
    }

    /// Why a pod must be recreated: its etcd was started with other CAs than a new pod would be. `None` if the CAs are
    /// the same, or are unknown.
    pub fn outdated(&self, member: &str) -> Option<String> {
        let wanted = self.trust()?;
        let noted = self.pods.get(member)?;
        let now = self.authorities_now();
        let several = |now: &Authorities| now.peer.len() > 1 || now.server.len() > 1;
        let other = match (&noted.trust, &noted.authorities) {
            // The comparison ignores the part of the annotation after `@`, because this part is the expiry.
            (Some(trust), _) => trust.split('@').next() != wanted.split('@').next(),
            // If a person has deleted the annotation with the trust digest, the list of CAs is compared.
            (None, Some(_)) => noted.authorities != now,
            // Invariant 20: a certificate of a second CA is used only after every pod trusts this CA. A pod without
            // annotations, such as a restored seed pod, therefore restarts if the Secrets contain two CAs.
            (None, None) => self.issued.is_some() && now.as_ref().is_some_and(several),
        };
        other.then(|| "etcd was started with other certificate authorities".to_owned())
    }
}

/// All subsets of these CAs. For more than four CAs, which no rotation leaves, only the complete set is returned.
fn subsets(all: BTreeSet<&String>) -> Vec<BTreeSet<&String>> {
    if all.len() > 4 {
        return vec![all];
    }
    let mut sets = vec![BTreeSet::new()];
    for one in all {
        let with = |set: &BTreeSet<_>| set.iter().copied().chain([one]).collect();
        let more: Vec<BTreeSet<&String>> = sets.iter().map(with).collect();
        sets.extend(more);
    }
    sets
}

fn authorities_in(secrets: &[(CaScope, &Held)]) -> Authorities {
    let of = |scope: CaScope| {
        let of_circle = secrets.iter().filter(|(of, _)| *of == scope);
        let all = of_circle.flat_map(|(_, held)| held.trusts.keys());
        all.map(|print| short(print)).collect()
    };
    Authorities {
        peer: of(CaScope::Peers),
        server: of(CaScope::Clients),
    }
}

impl Noted {
    /// The first time at which the pod trusts no valid CA for peers or no valid CA for clients. `None` for CAs in
    /// Secrets of other owners, because their expiry is not recorded.
    pub fn trusts_until(&self) -> Option<Timestamp> {
        let (_, until) = self.trust.as_ref()?.split_once('@')?;
        let until = until.parse().ok().filter(|seconds| *seconds > 0)?;
        Timestamp::from_second(until).ok()
    }
}
