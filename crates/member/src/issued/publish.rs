//! Publishes issued certificates: decides which certificate and which trust bundle the Secrets of members and clients
//! contain.
//!
//! Invariant 20: if cert-manager uses another CA, the Secrets change in these steps. After a change of a trust bundle,
//! members are restarted as after a change of static Secrets.
//! 1. The trust bundles also contain the new CA. Every member is restarted with both CAs.
//! 2. When every running member trusts the new CA, the Secrets get the certificates of the new CA.
//! 3. Clients get time to load their certificates. Then the trust bundles lose the former CA, and every member is
//!    restarted again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use api::cluster::IssuedCertificate;
use api::names;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt;

use super::held::{Anchor, Held, KEYS};
use super::{GROUP, Issuance, Pair};
use crate::Members;
use crate::tls::Authorities;

/// Time for the kubelets and for clients to read a trust bundle, before a certificate of its new CA is published.
pub(super) const SPREAD: Duration = Duration::from_mins(2);

/// A write of a published Secret.
#[derive(Clone, Debug, PartialEq)]
pub struct Publication {
    /// The Secret without the certificate and its private key.
    pub secret: Secret,
    /// The resourceVersion of the Secret that the write replaces, as precondition; `None` creates the Secret.
    pub over: Option<String>,
    /// Name of the Secret with the certificate and its private key.
    pub from: String,
    /// The resourceVersion of the Secret `from`, a precondition of the write.
    pub from_version: String,
    /// True if the Secret gets another certificate.
    pub renews: bool,
}

impl Publication {
    /// The complete Secret. `from` is the Secret with the certificate and its private key.
    pub fn with_keys(&self, from: &Secret) -> Secret {
        let mut secret = self.secret.clone();
        let data = secret.data.get_or_insert_default();
        for key in [KEYS[0], KEYS[1]] {
            let value = from.data.as_ref().and_then(|all| all.get(key));
            data.insert(key.to_owned(), value.cloned().unwrap_or_default());
        }
        secret
    }
}

impl fmt::Display for Publication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.secret.name_any();
        if self.renews {
            write!(
                f,
                "publish the certificate of Secret {} in Secret {name}",
                self.from
            )
        } else {
            write!(f, "update the trust bundle in Secret {name}")
        }
    }
}

/// The certificates of one scope: for connections between members, or for connections with clients.
struct Scope<'a> {
    pairs: Vec<&'a Pair>,
    /// The CAs with which each running member was started. `None` if they are unknown.
    started: Vec<Option<&'a BTreeSet<String>>>,
    validity: Duration,
    now: Timestamp,
}

impl Issuance {
    /// The Secrets to write now. `started` contains the CAs with which each running member was started, or `None` if
    /// they are unknown.
    pub fn publications(
        &self,
        members: &Members<'_>,
        started: &[Option<&Authorities>],
        now: Timestamp,
    ) -> Vec<Publication> {
        let of_peers = |pair: &&Pair| pair.of == IssuedCertificate::Peer;
        let (peers, clients): (Vec<&Pair>, Vec<&Pair>) = self.pairs.iter().partition(of_peers);
        let scope = |pairs, started| Scope {
            pairs,
            started,
            validity: self.tls.duration(),
            now,
        };
        let scopes = [
            scope(
                peers,
                started.iter().map(|one| one.map(|all| &all.peer)).collect(),
            ),
            scope(
                clients,
                started
                    .iter()
                    .map(|one| one.map(|all| &all.server))
                    .collect(),
            ),
        ];
        let scopes = scopes.iter();
        scopes
            .flat_map(|scope| scope.publications(members))
            .collect()
    }
}

impl<'a> Scope<'a> {
    fn publications(&self, members: &Members<'_>) -> Vec<Publication> {
        let bundle = self.bundle();
        let pairs = self.pairs.iter();
        pairs
            .filter_map(|pair| self.publication(pair, &bundle, members))
            .collect()
    }

    fn sources(&self) -> impl Iterator<Item = &'a Held> {
        let sources = self.pairs.iter().filter_map(|pair| pair.source.as_ref());
        sources.filter(|source| source.is_usable())
    }

    fn targets(&self) -> impl Iterator<Item = &'a Held> {
        let targets = self.pairs.iter().filter_map(|pair| pair.target.as_ref());
        targets.filter(|target| target.owned)
    }

    /// The trust bundle of all Secrets of this scope, by the identity of the CAs.
    fn bundle(&self) -> BTreeMap<&'a String, &'a Anchor> {
        let mut bundle: BTreeMap<&String, &Anchor> = BTreeMap::new();
        for (identity, anchor) in self.sources().flat_map(|source| &source.trusts) {
            let known = bundle.entry(identity).or_insert(anchor);
            if known.not_after < anchor.not_after {
                *known = anchor;
            }
        }
        if self.retires() {
            return bundle;
        }
        let former = self.targets().flat_map(|target| &target.trusts);
        for (identity, anchor) in former.filter(|(_, anchor)| anchor.not_after > self.now) {
            bundle.entry(identity).or_insert(anchor);
        }
        bundle
    }

    /// True if no member and no client needs the former CAs: all certificates of the current CAs are published, and
    /// clients had time to load them.
    fn retires(&self) -> bool {
        let grace = (self.validity / 3).max(SPREAD);
        let current = |pair: &&Pair| {
            let published = pair.target.as_ref().and_then(|target| target.leaf.as_ref());
            let issued = pair.source.as_ref().and_then(|source| source.leaf.as_ref());
            published.is_some() && published == issued
        };
        self.pairs.iter().all(current) && self.is_published_for(grace)
    }

    /// True if no trust bundle and no CA of a certificate in this scope has changed within this time.
    fn is_published_for(&self, time: Duration) -> bool {
        let last = self.targets().filter_map(|target| target.published).max();
        let until = last.map(|at| at.checked_add(time).unwrap_or(Timestamp::MAX));
        until.is_none_or(|until| until <= self.now)
    }

    /// True if every running member accepts certificates of the CAs in this Secret.
    fn is_trusted(&self, source: &Held) -> bool {
        let mut published = self.targets().flat_map(|target| target.trusts.keys());
        let is_only = published.all(|identity| source.trusts.contains_key(identity));
        let trusts = |started: Option<&BTreeSet<String>>| match started {
            // A member without TLS in this scope has no CAs.
            Some(all) => {
                all.is_empty() || source.trusts.keys().all(|identity| all.contains(identity))
            }
            // The CAs of the member are unknown, but it was started with a published trust bundle. If the published
            // bundles contain only CAs of `source`, the member trusts them. If they contain other CAs, the operator
            // restarts the member, and then knows its CAs.
            None => is_only,
        };
        self.started.iter().copied().all(trusts)
    }

    /// True if the published Secret `target` now gets the certificate in `source`, the Secret of cert-manager.
    fn takes(&self, source: &Held, target: Option<&Held>) -> bool {
        let Some(issued) = source.leaf.as_ref().filter(|_| source.is_usable()) else {
            return false;
        };
        let Some(target) = target else {
            return self.is_trusted(source);
        };
        // A damaged or expired certificate is replaced at once, because no member accepts it.
        let published = target.leaf.as_ref();
        let Some(published) = published.filter(|one| one.not_after > self.now) else {
            return true;
        };
        // Even without running members, a new CA is first published in the trust bundle: a pod that is created in the
        // same step records only the CAs in the trust bundle that the operator has read.
        let mut wanted = source.trusts.keys();
        let is_prepared = wanted.all(|identity| target.trusts.contains_key(identity));
        let is_due = target.is_issued_like(source) || is_prepared && self.is_published_for(SPREAD);
        published.fingerprint != issued.fingerprint && is_due && self.is_trusted(source)
    }

    fn publication(
        &self,
        pair: &Pair,
        bundle: &BTreeMap<&String, &Anchor>,
        members: &Members<'_>,
    ) -> Option<Publication> {
        let target = pair.target.as_ref();
        if target.is_some_and(|target| !target.owned) {
            return None;
        }
        let source = pair.source.as_ref();
        let takes = source.filter(|source| self.takes(source, target));
        let wanted: BTreeSet<&str> = bundle
            .values()
            .map(|one| one.fingerprint.as_str())
            .collect();
        let with_bundle = target.filter(|target| {
            let held = target.trusts.values();
            let held: BTreeSet<&str> = held.map(|one| one.fingerprint.as_str()).collect();
            held == wanted
        });
        let is_same = with_bundle.is_some_and(|target| target.marked);
        if takes.is_none() && (is_same || bundle.is_empty()) {
            return None;
        }
        let name = pair.of.secret(members.cluster);
        let (from, held, issued_by): (_, _, Vec<String>) = match (takes, target) {
            (Some(source), _) => (
                pair.of.certificate(members.cluster),
                source,
                source.trusts.keys().cloned().collect(),
            ),
            (None, Some(target)) => (
                name.clone(),
                target,
                target.issued_by.iter().cloned().collect(),
            ),
            (None, None) => return None,
        };
        // A renewal by the same CAs keeps the time of the publication, so that renewals do not delay the steps of a
        // change of the CA.
        let kept = with_bundle.filter(|it| takes.is_none_or(|source| it.is_issued_like(source)));
        let published = kept.and_then(|target| target.published);
        let bundle: String = bundle.values().map(|anchor| anchor.pem.as_str()).collect();
        let mut metadata = members.metadata(name, names::cluster_labels(members.cluster));
        let published = published.unwrap_or(self.now).to_string();
        metadata.annotations = Some(BTreeMap::from([
            (names::ANNOTATION_PUBLISHED.to_owned(), published),
            (
                names::ANNOTATION_AUTHORITIES.to_owned(),
                issued_by.join("+"),
            ),
        ]));
        if let Some(uid) = pair.uid.as_ref().filter(|_| pair.of.is_of_clients()) {
            // When a client or the proxies are removed from the spec, Kubernetes deletes the Secret together with its
            // Certificate.
            metadata.owner_references = Some(vec![OwnerReference {
                api_version: format!("{GROUP}/v1"),
                kind: "Certificate".to_owned(),
                name: pair.of.certificate(members.cluster),
                uid: uid.clone(),
                controller: Some(true),
                block_owner_deletion: None,
            }]);
        }
        let bundle = (KEYS[2].to_owned(), ByteString(bundle.into_bytes()));
        Some(Publication {
            secret: Secret {
                metadata,
                type_: Some("kubernetes.io/tls".to_owned()),
                data: Some(BTreeMap::from([bundle])),
                ..Secret::default()
            },
            over: target.map(|target| target.resource_version.clone()),
            from,
            from_version: held.resource_version.clone(),
            renews: takes.is_some(),
        })
    }
}
