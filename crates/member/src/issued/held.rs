//! A Secret with an issued certificate, without its private key.

use std::collections::{BTreeMap, BTreeSet};

use api::names;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

use crate::certificate::certificates;

/// The keys of a Secret: the certificate, its private key, and the trust bundle.
pub(super) const KEYS: [&str; 3] = ["tls.crt", "tls.key", "ca.crt"];

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// A certificate in a Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Leaf {
    pub(super) fingerprint: String,
    pub(super) not_after: Timestamp,
}

/// A CA in a trust bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Anchor {
    pub(super) pem: String,
    pub(super) fingerprint: String,
    pub(super) not_after: Timestamp,
}

/// A Secret of cert-manager, or a published Secret, without its private key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The resourceVersion of the Secret, the precondition for using or replacing it.
    pub(super) resource_version: String,
    /// True if the Secret belongs to this cluster.
    pub(super) owned: bool,
    /// True if the Secret has the owner reference and the label that the operator sets.
    pub(super) marked: bool,
    /// The certificate; `None` if it cannot be parsed, or does not belong to the private key.
    pub(super) leaf: Option<Leaf>,
    /// The CAs in the trust bundle, by their identity. Of two certificates of a CA, only the later to expire is here.
    pub(super) trusts: BTreeMap<String, Anchor>,
    /// The CAs that cert-manager returned with the published certificate, by their identity.
    pub(super) issued_by: BTreeSet<String>,
    /// The time at which the operator has last changed the trust bundle or the CA of the certificate.
    pub(super) published: Option<Timestamp>,
}

impl Held {
    /// Reads a Secret. `owners` contains the UID of the EtcdCluster and the name of the Certificate, one of which must
    /// own a published Secret.
    pub(super) fn of(secret: &Secret, (cluster, owners): (&str, [&str; 2])) -> Self {
        let metadata = &secret.metadata;
        let value = |key: &str| {
            secret
                .data
                .as_ref()?
                .get(key)
                .map(|value| value.0.as_slice())
        };
        let noted = |key: &str| metadata.annotations.as_ref()?.get(key);
        let issued_by = noted(names::ANNOTATION_AUTHORITIES);
        let issued_by = issued_by.map(|text| text.split('+').map(str::to_owned).collect());
        let trusts = value(KEYS[2]).map(anchors).unwrap_or_default();
        let (owned, marked) = ownership(metadata, cluster, owners);
        Self {
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            owned,
            marked,
            leaf: value(KEYS[0]).zip(value(KEYS[1])).and_then(leaf),
            trusts,
            issued_by: issued_by.unwrap_or_default(),
            published: noted(names::ANNOTATION_PUBLISHED).and_then(|text| text.parse().ok()),
        }
    }

    /// True if the Secret has a certificate, its private key, and a CA.
    pub(super) fn is_usable(&self) -> bool {
        self.leaf.is_some() && !self.trusts.is_empty()
    }

    /// True if the certificate in this published Secret has the same CAs as the certificate in `source`, the Secret of
    /// cert-manager.
    pub(super) fn is_issued_like(&self, source: &Self) -> bool {
        self.issued_by.iter().eq(source.trusts.keys())
    }
}

/// Two flags: true if the Secret belongs to the cluster, and true if the Secret has both its owner reference and its
/// label.
fn ownership(metadata: &ObjectMeta, cluster: &str, [uid, certificate]: [&str; 2]) -> (bool, bool) {
    let labels = metadata.labels.as_ref();
    let label = labels.and_then(|labels| labels.get(names::LABEL_CLUSTER));
    let labelled = label.is_some_and(|of| of == cluster);
    let owners = metadata.owner_references.as_deref().unwrap_or_default();
    let own = owners
        .iter()
        .any(|owner| owner.uid == uid || owner.name == certificate);
    (own || owners.is_empty() && labelled, own && labelled)
}

fn leaf((certificate, key): (&[u8], &[u8])) -> Option<Leaf> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificate).collect();
    let private = PrivateKeyDer::from_pem_slice(key).ok()?;
    CertifiedKey::from_der(chain.ok()?, private, &aws_lc_rs::default_provider()).ok()?;
    let first = certificates(certificate).ok()?.into_iter().next()?;
    Some(Leaf {
        fingerprint: first.fingerprint,
        not_after: first.not_after,
    })
}

fn anchors(pem: &[u8]) -> BTreeMap<String, Anchor> {
    let text = String::from_utf8_lossy(pem);
    let mut all: BTreeMap<String, Anchor> = BTreeMap::new();
    for block in text.split_inclusive(END) {
        let Some((_, body)) = block.split_once(BEGIN) else {
            continue;
        };
        let pem = format!("{BEGIN}{body}\n");
        let read = certificates(pem.as_bytes()).ok();
        let Some(one) = read.and_then(|all| all.into_iter().next()) else {
            continue;
        };
        let (identity, not_after) = (one.identity(), one.not_after);
        let known = all.get(&identity);
        if known.is_none_or(|known| known.not_after < not_after) {
            let fingerprint = one.fingerprint;
            let anchor = Anchor {
                pem,
                fingerprint,
                not_after,
            };
            all.insert(identity, anchor);
        }
    }
    all
}
