//! The format of the Secrets with generated certificates, and the planner's view of such a Secret without its keys.

use std::collections::{BTreeMap, BTreeSet};

use api::names::{self, CertificateUse};
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use member::certificate::{Certificate, certificates};
use runtime::apply::is_marked;
use sha2::{Digest, Sha256};

use super::{CaScope, Key, Made, Rule, renewal};
use crate::ownership::is_of_others;

/// The data keys of a certificate and its private key. cert-manager and `kubectl create secret tls` use these names.
pub(crate) const TLS_CERTIFICATE: &str = "tls.crt";
pub(crate) const TLS_KEY: &str = "tls.key";
/// The data key of the trusted CAs.
pub(crate) const AUTHORITIES: &str = "ca.crt";
/// The data keys of the next CA's certificate and private key. All members must trust the next CA before it signs.
pub(crate) const NEXT_CERTIFICATE: &str = "next.crt";
pub(crate) const NEXT_KEY: &str = "next.key";

/// A certificate in a Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Start of the validity.
    pub not_before: Timestamp,
    /// End of the validity.
    pub not_after: Timestamp,
    /// Distinguished name of the issuer, in DER.
    pub issuer: Vec<u8>,
    /// Distinguished name of the certificate, in DER.
    pub subject: Vec<u8>,
    /// The DNS names and IP addresses in the certificate.
    pub names: BTreeSet<String>,
    /// Digest of the certificate.
    pub fingerprint: String,
    /// True for a CA certificate whose subject is only a common name: the operator writes only such issuer names.
    pub can_sign: bool,
}

impl Leaf {
    /// The time at which the certificate is renewed.
    pub fn renewal(&self) -> Timestamp {
        renewal(self.not_before, self.not_after)
    }
}

/// A CA in a trust bundle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Anchor {
    /// Distinguished name of the CA, in DER. Certificates refer to it as their issuer.
    pub subject: Vec<u8>,
    /// End of the validity.
    pub not_after: Timestamp,
    /// The certificate, in PEM.
    pub pem: Vec<u8>,
}

/// A Secret with a generated certificate or a CA of the cluster, without its private keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// UID of the Secret, the precondition for deleting it.
    pub uid: String,
    /// The resourceVersion of the Secret, the precondition for writing it.
    pub resource_version: String,
    /// True if the Secret belongs to this cluster, or has no owner and has the cluster's label.
    pub owned: bool,
    /// True if the owner and the labels of the Secret are still as the operator set them.
    pub marked: bool,
    /// The member whose certificate the Secret contains; `None` for other Secrets.
    pub member: Option<String>,
    /// The certificate in `tls.crt`; `None` if it cannot be parsed, or does not belong to the key in `tls.key`.
    pub certificate: Option<Leaf>,
    /// The certificate in `next.crt`; `None` if it cannot be parsed, or does not belong to the key in `next.key`.
    pub next: Option<Leaf>,
    /// The CAs in `ca.crt`, by fingerprint.
    pub trusts: BTreeMap<String, Anchor>,
    /// The latest expiry of the CAs in `ca.crt`: after this time, none of them is valid.
    pub trusts_until: Option<Timestamp>,
    /// The value of the annotation by which a person requested this CA.
    pub rotated_for: Option<String>,
}

impl Held {
    /// A digest of the trusted CAs.
    pub fn trust(&self) -> String {
        digest(self.trusts.keys().map(String::as_str))
    }

    /// True if `ca.crt` contains a CA of this name.
    pub fn trusts_issuer(&self, subject: &[u8]) -> bool {
        let mut anchors = self.trusts.values();
        anchors.any(|anchor| anchor.subject == subject)
    }

    /// For the Secret of a CA: ignores certificates that cannot sign.
    pub(crate) fn of_authority(self) -> Self {
        Self {
            certificate: self.certificate.filter(|leaf| leaf.can_sign),
            next: self.next.filter(|leaf| leaf.can_sign),
            ..self
        }
    }
}

/// A digest of the texts, as sixteen hexadecimal digits.
pub(crate) fn digest<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hasher = Sha256::new();
    for text in texts {
        hasher.update(text);
        hasher.update([0]);
    }
    hex::encode(hasher.finalize()).chars().take(16).collect()
}

/// The labels of the cluster's Secret with this name; `None` if no Secret of the cluster has this name.
pub(crate) fn labels(cluster: &str, name: &str) -> Option<BTreeMap<String, String>> {
    let with = |mut labels: BTreeMap<String, String>, kind: &str| {
        labels.insert(LABEL_CERTIFICATE.to_owned(), kind.to_owned());
        labels
    };
    let mut scopes = [CaScope::Peers, CaScope::Clients].into_iter();
    if scopes.any(|scope| scope.secret(cluster) == name) {
        return Some(with(names::cluster_labels(cluster), "authority"));
    }
    let uses = [
        CertificateUse::Peer,
        CertificateUse::Server,
        CertificateUse::Operator,
        CertificateUse::Client,
        CertificateUse::Proxy,
    ];
    uses.into_iter().find_map(|used| {
        let owner = name.strip_suffix(&names::certificate_secret("", used))?;
        let labels = if owner == cluster {
            names::cluster_labels(cluster)
        } else if names::cluster_of_member(owner) == Some(cluster) {
            names::member_labels(cluster, owner)
        } else {
            return None;
        };
        Some(with(labels, used.word()))
    })
}

/// Converts a Secret to the planner's type. The pair contains the name and the UID of the EtcdCluster.
pub(crate) fn held(secret: &Secret, (cluster, cluster_uid): (&str, &str)) -> Held {
    let metadata = &secret.metadata;
    let value = |key: &str| {
        secret
            .data
            .as_ref()?
            .get(key)
            .map(|value| value.0.as_slice())
    };
    let read = |key: &str| value(key).and_then(|pem| certificates(pem).ok());
    let pair = |certificate: &str, key: &str| {
        let first = read(certificate)?.into_iter().next()?;
        let key = Key::read(value(key)?).ok()?;
        key.is_of(&first).then(|| leaf_of(first))
    };
    let trusted = read(AUTHORITIES).unwrap_or_default();
    let name = metadata.name.as_deref().unwrap_or_default();
    let made = labels(cluster, name).unwrap_or_default();
    let found = metadata.labels.as_ref();
    let found = found.and_then(|labels| labels.get(names::LABEL_MEMBER));
    Held {
        uid: metadata.uid.clone().unwrap_or_default(),
        resource_version: metadata.resource_version.clone().unwrap_or_default(),
        owned: !is_of_others(metadata, cluster, cluster_uid),
        marked: is_marked(metadata, cluster_uid, &made),
        member: made.get(names::LABEL_MEMBER).or(found).cloned(),
        certificate: pair(TLS_CERTIFICATE, TLS_KEY),
        next: pair(NEXT_CERTIFICATE, NEXT_KEY),
        trusts_until: trusted.iter().map(|one| one.not_after).max(),
        trusts: trusted.into_iter().map(anchor_of).collect(),
        rotated_for: metadata
            .annotations
            .as_ref()
            .and_then(|all| all.get(names::ANNOTATION_ROTATE_AUTHORITY))
            .cloned(),
    }
}

fn leaf_of(one: Certificate) -> Leaf {
    let addresses = one.addresses.iter().map(ToString::to_string);
    Leaf {
        not_before: one.not_before,
        not_after: one.not_after,
        names: one.dns_names.iter().cloned().chain(addresses).collect(),
        can_sign: one.is_authority && name_of(&one.common_name).as_ref() == Some(&one.subject),
        issuer: one.issuer,
        subject: one.subject,
        fingerprint: one.fingerprint,
    }
}

/// The distinguished name that consists only of this common name, in DER. `None` if the name is too long for length
/// fields of one byte.
fn name_of(common_name: &str) -> Option<Vec<u8>> {
    const COMMON_NAME: [u8; 5] = [6, 3, 85, 4, 3];
    let text = common_name.as_bytes();
    let length = u8::try_from(text.len()).ok().filter(|it| *it <= 100)?;
    let mut der = vec![0x30, length + 11, 0x31, length + 9, 0x30, length + 7];
    der.extend(COMMON_NAME);
    der.extend([0x0c, length]);
    der.extend(text);
    Some(der)
}

/// Converts a CA certificate. The string in the result is the fingerprint.
fn anchor_of(one: Certificate) -> (String, Anchor) {
    let block = pem::Pem::new("CERTIFICATE", one.der.to_vec());
    let lines = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
    let anchor = Anchor {
        subject: one.subject,
        not_after: one.not_after,
        pem: pem::encode_config(&block, lines).into_bytes(),
    };
    (one.fingerprint, anchor)
}

/// Concatenates PEM certificates to a trust bundle.
pub(crate) fn bundle<'a>(certificates: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut all = Vec::new();
    for one in certificates {
        all.extend_from_slice(one);
        if !one.ends_with(b"\n") {
            all.push(b'\n');
        }
    }
    all
}

/// Builds the Secret of a CA: the signer, the next signer, and the trusted CAs.
pub(crate) fn authority_secret(
    rule: &Rule,
    scope: CaScope,
    owner: Option<OwnerReference>,
    (signs, next, trusted): (&Made, Option<&Made>, Vec<u8>),
) -> Secret {
    let name = scope.secret(&rule.cluster);
    let mut secret = secret(rule, name, owner, (signs.clone(), trusted));
    secret.type_ = Some("Opaque".to_owned());
    if let Some(next) = next {
        let data = secret.data.get_or_insert_default();
        data.insert(
            NEXT_CERTIFICATE.to_owned(),
            ByteString(next.certificate.clone()),
        );
        data.insert(NEXT_KEY.to_owned(), ByteString(next.key.clone()));
    }
    secret.metadata.annotations = rule
        .rotate
        .clone()
        .map(|text| BTreeMap::from([(names::ANNOTATION_ROTATE_AUTHORITY.to_owned(), text)]));
    secret
}

/// Label of a Secret. The value is the use of the certificate, or `authority` for the Secret of a CA.
const LABEL_CERTIFICATE: &str = "etcd.database.coreos.com/certificate";

/// Builds the Secret of a certificate, in the format of type `kubernetes.io/tls`.
pub(crate) fn leaf_secret(
    rule: &Rule,
    (owned_by, used): (&str, CertificateUse),
    owner: Option<OwnerReference>,
    (made, trusted): (Made, Vec<u8>),
) -> Secret {
    let name = names::certificate_secret(owned_by, used);
    Secret {
        type_: Some("kubernetes.io/tls".to_owned()),
        ..secret(rule, name, owner, (made, trusted))
    }
}

/// Builds a Secret with a certificate, its key and the CAs that the holder of the certificate trusts.
fn secret(
    rule: &Rule,
    name: String,
    owner: Option<OwnerReference>,
    (made, trusted): (Made, Vec<u8>),
) -> Secret {
    let data = BTreeMap::from([
        (TLS_CERTIFICATE.to_owned(), ByteString(made.certificate)),
        (TLS_KEY.to_owned(), ByteString(made.key)),
        (AUTHORITIES.to_owned(), ByteString(trusted)),
    ]);
    Secret {
        metadata: ObjectMeta {
            labels: labels(&rule.cluster, &name),
            name: Some(name),
            namespace: Some(rule.namespace.clone()),
            owner_references: owner.map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        data: Some(data),
        ..Secret::default()
    }
}
