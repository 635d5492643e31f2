//! The content of a TLS Secret, and the faults of such a Secret. There are two forms of key names, such as `peer.crt`
//! and `tls.crt`.

use std::collections::BTreeMap;
use std::fmt;

use api::cluster::KeyNames;
use k8s_openapi::api::core::v1::Secret;

/// The keys and values of a Secret.
pub type SecretData = BTreeMap<String, Vec<u8>>;

/// Converts a Secret to its keys and values.
pub fn data_of(secret: Secret) -> SecretData {
    let data = secret.data.unwrap_or_default();
    data.into_iter()
        .map(|(key, value)| (key, value.0))
        .collect()
}

/// What a TLS Secret is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Traffic between members.
    Peer,
    /// Connections of clients to members: the certificate of the members.
    Server,
    /// Connections of the operators to members: the certificate of the operators.
    Operator,
    /// Connections of the backup operator to `spec.etcdEndpoints`: the certificate of the backup operator.
    Client,
}

/// The names of the three keys of a TLS Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keys {
    /// The key with the certificate and its intermediate certificates.
    pub certificate: &'static str,
    /// The key of the Secret that contains the private key.
    pub key: &'static str,
    /// The key with the trust bundle, with which other certificates are verified.
    pub ca: &'static str,
}

impl Purpose {
    /// The field of the spec that names the Secret.
    pub fn field(self) -> &'static str {
        match self {
            Self::Peer => "spec.TLS.static.member.peerSecret",
            Self::Server => "spec.TLS.static.member.serverSecret",
            Self::Operator => "spec.TLS.static.operatorSecret",
            Self::Client => "spec.clientTLSSecret",
        }
    }

    /// The names of the keys in the given form.
    pub fn keys(self, names: KeyNames) -> Keys {
        let (certificate, key, ca) = match (names, self) {
            (KeyNames::Usual, _) => ("tls.crt", "tls.key", "ca.crt"),
            (KeyNames::OfPurpose, Self::Peer) => ("peer.crt", "peer.key", "peer-ca.crt"),
            (KeyNames::OfPurpose, Self::Server) => ("server.crt", "server.key", "server-ca.crt"),
            (KeyNames::OfPurpose, Self::Operator | Self::Client) => {
                ("etcd-client.crt", "etcd-client.key", "etcd-client-ca.crt")
            }
        };
        Keys {
            certificate,
            key,
            ca,
        }
    }
}

/// The content of a TLS Secret, as PEM that was not parsed.
#[derive(Clone, PartialEq, Eq)]
pub struct Material {
    /// The form of the key names.
    pub names: KeyNames,
    /// The certificate, and the intermediate certificates that follow it.
    pub certificate: Vec<u8>,
    /// The private key of the certificate.
    pub key: Vec<u8>,
    /// The trust bundle, with which other certificates are verified.
    pub ca: Vec<u8>,
}

/// Invariant 14: the debug output contains no key material.
impl fmt::Debug for Material {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Material")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

api::reasons! {
    /// The kinds of problems of a TLS Secret.
    #[expect(
        missing_docs,
        reason = "the variants are documented in `api::conditions::Reason`"
    )]
    pub enum FaultKind {
        AuthorityExpired,
        AuthorityReplaced,
        CertificateExpired,
        CertificateNotYetValid,
        CertificateUnreadable,
        KeyMismatch,
        KeyMissing,
        NameNotCovered,
        SecretMissing,
        SecretUnreadable,
        UnknownAuthority,
        WrongUsage,
    }
}

/// A problem of a TLS Secret. The message contains the Secret, the key and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The use of the Secret.
    pub purpose: Purpose,
    /// Reason for conditions and Events.
    pub code: FaultKind,
    /// Message for users.
    pub message: String,
}

impl Fault {
    pub(super) fn new(purpose: Purpose, secret: &str, code: FaultKind, what: &str) -> Self {
        Self {
            purpose,
            code,
            message: format!("{}: Secret {secret}: {what}", purpose.field()),
        }
    }

    /// The fault of a Secret that cannot be read.
    pub fn unread(purpose: Purpose, secret: &str, why: &str) -> Self {
        let what = format!("cannot be read: {why}");
        Self::new(purpose, secret, FaultKind::SecretUnreadable, &what)
    }

    /// True if a member that starts with the Secret would fail. A fault of the operator's own certificate affects only
    /// the operator.
    pub fn concerns_members(&self) -> bool {
        matches!(self.purpose, Purpose::Peer | Purpose::Server)
    }
}

/// Reads the content of a Secret. If the Secret has both forms of key names, the names for its purpose take precedence
/// over `tls.crt`, `tls.key` and `ca.crt`.
///
/// # Errors
/// Fails if the Secret is missing, or if it lacks a key of each form.
pub fn material(
    purpose: Purpose,
    secret: &str,
    data: Option<&SecretData>,
) -> Result<Material, Fault> {
    let Some(data) = data else {
        let what = "does not exist: create it, or correct the name";
        return Err(Fault::new(purpose, secret, FaultKind::SecretMissing, what));
    };
    let missing = |names: KeyNames| -> Vec<&'static str> {
        let Keys {
            certificate,
            key,
            ca,
        } = purpose.keys(names);
        let all = [certificate, key, ca].into_iter();
        all.filter(|key| data.get(*key).is_none_or(Vec::is_empty))
            .collect()
    };
    let (of_purpose, usual) = (missing(KeyNames::OfPurpose), missing(KeyNames::Usual));
    let names = if of_purpose.is_empty() {
        KeyNames::OfPurpose
    } else if usual.is_empty() {
        KeyNames::Usual
    } else {
        return Err(incomplete(purpose, secret, &of_purpose, &usual));
    };
    let keys = purpose.keys(names);
    let value = |key: &str| data.get(key).cloned().unwrap_or_default();
    Ok(Material {
        names,
        certificate: value(keys.certificate),
        key: value(keys.key),
        ca: value(keys.ca),
    })
}

fn incomplete(
    purpose: Purpose,
    secret: &str,
    of_purpose: &[&'static str],
    usual: &[&'static str],
) -> Fault {
    // A Secret may use one of two sets of key names. The error reports the set with fewer missing keys.
    let (missing, other) = if usual.len() < of_purpose.len() {
        (usual, KeyNames::OfPurpose)
    } else {
        (of_purpose, KeyNames::Usual)
    };
    let other = purpose.keys(other);
    let what = format!(
        "has no {}: add the missing data, or store all three values under {}, {} and {}",
        missing.join(" and no "),
        other.certificate,
        other.key,
        other.ca
    );
    Fault::new(purpose, secret, FaultKind::KeyMissing, &what)
}
