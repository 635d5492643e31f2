//! The content of a TLS Secret, and its faults. A Secret may use one of two sets of key names, such as `peer.crt` or
//! `tls.crt`.

use std::collections::BTreeMap;
use std::fmt;

use api::cluster::{KeyNames, TlsPolicy};
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

/// The use of a TLS Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Connections between members.
    Peer,
    /// Connections of clients to members. Contains the certificate of the members.
    Server,
    /// Connections of the operators to members. Contains the certificate of the operators.
    Operator,
    /// Connections of the backup operator to `spec.etcdEndpoints`. Contains the certificate of the backup operator.
    Client,
}

/// The names of the three keys in a TLS Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keys {
    /// The key with the certificate and its intermediate certificates.
    pub certificate: &'static str,
    /// The key with the private key of the certificate.
    pub key: &'static str,
    /// The key with the trust bundle, which verifies other certificates.
    pub ca: &'static str,
}

impl Purpose {
    /// The field with the name of the Secret.
    pub fn field(self) -> &'static str {
        match self {
            Self::Peer => "spec.TLS.static.member.peerSecret",
            Self::Server => "spec.TLS.static.member.serverSecret",
            Self::Operator => "spec.TLS.static.operatorSecret",
            Self::Client => "spec.clientTLSSecret",
        }
    }

    /// The names of the three keys in a Secret for this purpose. `names` selects one of the two sets of key names.
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

/// The content of a TLS Secret, as PEM text.
#[derive(Clone, PartialEq, Eq)]
pub struct Material {
    /// The set of key names in the Secret.
    pub names: KeyNames,
    /// The certificate, followed by its intermediate certificates.
    pub certificate: Vec<u8>,
    /// The private key of the certificate.
    pub key: Vec<u8>,
    /// The trust bundle, which verifies other certificates.
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
        CertManagerMissing,
        CertificateExpired,
        CertificateNotIssued,
        CertificateNotYetValid,
        CertificateUnreadable,
        IssuerMissing,
        KeyMismatch,
        KeyMissing,
        NameNotCovered,
        SecretMissing,
        SecretUnreadable,
        UnknownAuthority,
        WrongUsage,
    }
}

/// A problem of a TLS Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The use of the Secret.
    pub purpose: Purpose,
    /// The reason for conditions and Events.
    pub code: FaultKind,
    /// The message for users, with the Secret, the key and the remedy.
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

    /// The fault for a cluster with this policy. With `spec.TLS.certManager`, users write no Secret, so the message
    /// names this field, and the fault of a missing Secret is `CertificateNotIssued`.
    #[must_use]
    pub fn in_policy(self, policy: Option<&TlsPolicy>, secret: &str) -> Self {
        const FIELD: &str = "spec.TLS.certManager";
        if policy.is_none_or(|tls| tls.cert_manager.is_none()) {
            return self;
        }
        if self.code == FaultKind::SecretMissing {
            let message = format!(
                "{FIELD}: Secret {secret} does not exist: the cluster operator creates it when cert-manager has issued \
                 the certificate, and the running members trust its authority"
            );
            let code = FaultKind::CertificateNotIssued;
            return Self {
                code,
                message,
                ..self
            };
        }
        let message = self.message.replacen(self.purpose.field(), FIELD, 1);
        Self { message, ..self }
    }

    /// The fault of a Secret that cannot be read.
    pub fn unread(purpose: Purpose, secret: &str, why: &str) -> Self {
        let what = format!("cannot be read: {why}");
        Self::new(purpose, secret, FaultKind::SecretUnreadable, &what)
    }

    /// True if a member cannot start with the Secret. A fault of the operators' certificate does not affect members.
    pub fn concerns_members(&self) -> bool {
        matches!(self.purpose, Purpose::Peer | Purpose::Server)
    }
}

/// Reads the content of a Secret. If the Secret contains both sets of key names, the names of its purpose have priority
/// over `tls.crt`, `tls.key` and `ca.crt`.
///
/// # Errors
/// Fails if the Secret is missing, or if both sets of key names are incomplete.
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
    // The message names the set of keys (usual names, or names of the purpose) of which fewer keys are missing.
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
