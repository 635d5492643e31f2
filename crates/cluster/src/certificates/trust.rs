//! The CAs that members trust: those of their Secrets, and those with which a running etcd was started.
//!
//! etcd reads its trust bundle once, when it starts. Each pod carries the CAs with which it was started, so the answer
//! does not depend on a Secret that may be deleted or replaced. Pure.

use std::collections::BTreeSet;

use jiff::Timestamp;
use member::tls::Authorities;

use super::{Certificates, Noted};
use crate::authority::{CaScope, Held, digest};

/// The form on pods: the first sixteen digits of a fingerprint.
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
    /// The Secret of a CA that can sign; `None` while it is missing, damaged, or not owned by the cluster.
    pub fn signer(&self, scope: CaScope) -> Option<&Held> {
        self.authority(scope)
            .filter(|held| held.owned && held.certificate.is_some())
    }

    /// The annotation about trusted CAs for a pod that starts now; `None` until all CAs exist.
    pub fn trust(&self) -> Option<String> {
        if self.rule.is_none() {
            return self.others.as_ref().map(|digest| format!("{digest}@0"));
        }
        let signers = self.signers()?;
        // The earliest expiry counts for the pod.
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

    /// The CAs that a new pod carries: those of static Secrets, or those in the trust bundle of generated certificates.
    pub fn authorities_now(&self) -> Option<Authorities> {
        if self.rule.is_none() {
            return self.authorities.clone();
        }
        Some(authorities_in(&self.signers()?))
    }

    /// The CAs with which a pod was started; `None` if unknown. If the annotation with the CAs was deleted, the digest
    /// on the pod is compared with the content of the Secrets.
    pub fn started_with(&self, member: &str) -> Option<Authorities> {
        let noted = self.pods.get(member)?;
        if let Some(authorities) = &noted.authorities {
            return Some(authorities.clone());
        }
        let noted = noted.trust.as_ref()?.split('@').next()?;
        self.with_digest(noted)
    }

    /// The CAs in Secrets that together have this digest.
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

    /// Every CA of this scope in a Secret.
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

    /// Whether the etcd in this pod accepts certificates of the CA with this name. A CA that is no longer in a Secret
    /// is unknown, and so is the trust in it.
    pub fn accepts(&self, member: &str, scope: CaScope, issuer: &[u8]) -> bool {
        let Some(started) = self.started_with(member) else {
            return false;
        };
        let anchors = self.secrets.values().flat_map(|held| &held.trusts);
        let mut named = anchors.filter(|(_, anchor)| anchor.subject == issuer);
        named.any(|(print, _)| of_circle(&started, scope).contains(&short(print)))
    }

    /// Whether the etcd in this pod was started with this CA.
    pub fn trusts(&self, member: &str, scope: CaScope, fingerprint: &str) -> bool {
        let started = self.started_with(member);
        started.is_some_and(|started| of_circle(&started, scope).contains(&short(fingerprint)))
    }

    /// Whether the etcd in this pod was started with exactly the trust bundle of this CA's Secret.
    pub fn started_with_bundle(&self, member: &str, scope: CaScope, authority: &Held) -> bool {
        let bundle: BTreeSet<String> = authority.trusts.keys().map(|print| short(print)).collect();
        let started = self.started_with(member);
        started.is_some_and(|started| *of_circle(&started, scope) == bundle)
    }

    /// Whether all these members accept certificates of the current signer.
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

    /// Whether a joining member can connect to the running members: the current signer issues its certificate.
    pub fn accepts_new_members<'a>(&self, mut running: impl Iterator<Item = &'a String>) -> bool {
        let peers = self.rule.as_ref().is_some_and(|rule| rule.peers);
        let signs = self.signer(CaScope::Peers);
        let signs = signs.and_then(|held| held.certificate.as_ref());
        // A pod without this annotation was just created by a restore.
        let accepts = |member: &String| {
            let silent = |noted: &Noted| noted.trust.is_none() && noted.authorities.is_none();
            self.pods.get(member).is_none_or(silent)
                || signs
                    .is_some_and(|signs| self.trusts(member, CaScope::Peers, &signs.fingerprint))
        };
        !peers || running.all(accepts)
    }

    /// Why a pod must be recreated: etcd reads its trust bundle only when it starts.
    pub fn outdated(&self, member: &str) -> Option<String> {
        let wanted = self.trust()?;
        let noted = self.pods.get(member)?;
        let other = match &noted.trust {
            // The expiry after `@` is not compared.
            Some(trust) => trust.split('@').next() != wanted.split('@').next(),
            // The annotation was deleted by hand.
            None => noted.authorities.is_some() && noted.authorities != self.authorities_now(),
        };
        other.then(|| "it was started with other certificate authorities".to_owned())
    }
}

/// All subsets of these CAs. For a bundle of more than four, which no rotation leaves, only the complete set.
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
    /// The expiry of the trusted CAs of a pod. For CAs of other parties no expiry is recorded, which yields a time long
    /// ago.
    pub fn trusts_until(&self) -> Option<Timestamp> {
        let (_, until) = self.trust.as_ref()?.split_once('@')?;
        let until = until.parse().ok().filter(|seconds| *seconds > 0)?;
        Timestamp::from_second(until).ok()
    }
}
