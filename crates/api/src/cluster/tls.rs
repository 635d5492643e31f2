//! `EtcdCluster.spec.TLS`: TLS with the user's certificates, with certificates that the operator generates, or with
//! certificates that cert-manager issues.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use std::time::Duration;

use super::cert_manager::{CertManagerTls, IssuedCertificate};
use super::peers::PeerStage;
use crate::duration::DurationText;
use crate::names::{self, CertificateUse};
use crate::schema::{given, null_as_empty, optional_object_name};

/// The default of `spec.TLS.generated.certificateDuration`.
const DEFAULT_VALIDITY: Duration = Duration::from_hours(90 * 24);
/// The default of `spec.TLS.generated.authorityDuration`.
const DEFAULT_AUTHORITY_VALIDITY: Duration = Duration::from_hours(10 * 365 * 24);

/// TLS of a cluster. The certificates are `static`, `generated`, or from cert-manager.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!(has(self.static) && has(self.generated)) && !(has(self.certManager) && (has(self.static) || has(self.generated)))",
    "spec.TLS takes its certificates from one source: set only one of static, generated and certManager"
))]
pub struct TlsPolicy {
    /// Certificates in Secrets that the user creates and renews.
    #[serde(default, rename = "static", skip_serializing_if = "Option::is_none")]
    pub static_: Option<StaticTls>,
    /// Certificates that the operator generates and renews.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generated: Option<GeneratedTls>,
    /// Certificates that cert-manager issues and renews.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cert_manager: Option<CertManagerTls>,
    /// If true, members also accept clients without TLS, on the same port. Set it to true before you switch TLS on or
    /// off, until all clients have changed. The default is false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accept_plaintext: Option<bool>,
    /// The stage of a switch of TLS between members. The operator sets this field, which the schema does not contain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    pub peer_stage: Option<PeerStage>,
}

/// Certificates that the operator generates: a CA for members, a CA for clients, certificates for each member, one for
/// the operators, and one for clients in the Secret `<cluster>-client-tls`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GeneratedTls {
    /// If false, members do not use TLS between each other. The default is true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<bool>,
    /// If false, members do not use TLS for clients. The default is true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<bool>,
    /// Validity of the certificates. The operator renews a certificate after two thirds of its validity. The default
    /// is `2160h`, and the minimum is `3m`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_duration: Option<DurationText>,
    /// Validity of the CAs. The operator replaces a CA after two thirds of its validity. The default is `87600h`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority_duration: Option<DurationText>,
    /// Additional host names and IP addresses in the server certificates, such as the name of a load balancer.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(length(max = 32))]
    pub server_names: Vec<String>,
}

impl GeneratedTls {
    /// True if members use TLS between each other.
    pub fn peer(&self) -> bool {
        self.peer.unwrap_or(true)
    }

    /// True if members use TLS for clients.
    pub fn client(&self) -> bool {
        self.client.unwrap_or(true)
    }

    /// The validity of a certificate.
    pub fn certificate_duration(&self) -> Duration {
        let given = self.certificate_duration.as_ref();
        given
            .and_then(DurationText::parse)
            .unwrap_or(DEFAULT_VALIDITY)
    }

    /// The validity of a CA.
    pub fn authority_duration(&self) -> Duration {
        let given = self.authority_duration.as_ref();
        given
            .and_then(DurationText::parse)
            .unwrap_or(DEFAULT_AUTHORITY_VALIDITY)
    }
}

/// Certificates in Secrets of the user. A Secret has the keys of v1beta2, or the keys `tls.crt`, `tls.key` and
/// `ca.crt`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!(has(self.operatorSecret) && self.operatorSecret != '') || (has(self.member) && has(self.member.serverSecret) && self.member.serverSecret != '')",
    "spec.TLS.static.operatorSecret needs spec.TLS.static.member.serverSecret: set both or neither"
))]
#[x_kube(validation = (
    "!(has(self.member) && has(self.member.serverSecret) && self.member.serverSecret != '') || (has(self.operatorSecret) && self.operatorSecret != '')",
    "spec.TLS.static.member.serverSecret needs spec.TLS.static.operatorSecret, because the operator is a client of the cluster: set both or neither"
))]
pub struct StaticTls {
    /// Certificates of the members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<MemberTls>,
    /// Name of the Secret with the operators' client certificate. Its keys are `etcd-client.crt`, `etcd-client.key`
    /// and `etcd-client-ca.crt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "optional_object_name")]
    pub operator_secret: Option<String>,
}

/// The names of the keys in a TLS Secret.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyNames {
    /// The names of coreos/etcd-operator. They depend on the purpose of the Secret: for peers, they are `peer.crt`,
    /// `peer.key` and `peer-ca.crt`.
    #[default]
    OfPurpose,
    /// The names of cert-manager: `tls.crt`, `tls.key` and `ca.crt`.
    Usual,
}

/// Certificates of the members.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemberTls {
    /// Name of the Secret for TLS between members. Its keys are `peer.crt`, `peer.key` and `peer-ca.crt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "optional_object_name")]
    pub peer_secret: Option<String>,
    /// Name of the Secret for TLS with clients. Its keys are `server.crt`, `server.key` and `server-ca.crt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "optional_object_name")]
    pub server_secret: Option<String>,
    /// The names of the keys in the peer Secret. The operator reads them from the Secret; the object has no such
    /// field.
    #[serde(skip)]
    pub peer_keys: KeyNames,
    /// The names of the keys in the server Secret. The operator reads them from the Secret; the object has no such
    /// field.
    #[serde(skip)]
    pub server_keys: KeyNames,
}

impl TlsPolicy {
    /// The static Secret for TLS between members, if any.
    pub fn peer_secret(&self) -> Option<&str> {
        given(self.static_.as_ref()?.member.as_ref()?.peer_secret.as_ref())
    }

    /// The static Secret for TLS with clients, if any.
    pub fn server_secret(&self) -> Option<&str> {
        given(
            self.static_
                .as_ref()?
                .member
                .as_ref()?
                .server_secret
                .as_ref(),
        )
    }

    /// The static Secret with the operators' client certificate, if any.
    pub fn operator_secret(&self) -> Option<&str> {
        given(self.static_.as_ref()?.operator_secret.as_ref())
    }

    /// The names of the keys in the Secret for TLS between members.
    pub fn peer_keys(&self) -> KeyNames {
        if self.generated.is_some() || self.cert_manager.is_some() {
            return KeyNames::Usual;
        }
        let member = self.static_.as_ref().and_then(|tls| tls.member.as_ref());
        member.map(|member| member.peer_keys).unwrap_or_default()
    }

    /// The names of the keys in the Secret for TLS with clients.
    pub fn server_keys(&self) -> KeyNames {
        if self.generated.is_some() || self.cert_manager.is_some() {
            return KeyNames::Usual;
        }
        let member = self.static_.as_ref().and_then(|tls| tls.member.as_ref());
        member.map(|member| member.server_keys).unwrap_or_default()
    }

    /// The settings of generated certificates, if any.
    pub fn generated(&self) -> Option<&GeneratedTls> {
        self.generated.as_ref()
    }

    /// The Secret of all members for TLS between members. `None` without TLS between members, or if each member has a
    /// separate Secret.
    pub fn shared_peer_secret(&self, cluster: &str) -> Option<String> {
        let issued = self.cert_manager.as_ref().map(|tls| {
            let secret = || IssuedCertificate::Peer.secret(cluster);
            tls.peer().then(secret)
        });
        issued.unwrap_or_else(|| self.peer_secret().map(str::to_owned))
    }

    /// The Secret of all members for TLS with clients. `None` without TLS for clients, or if each member has a separate
    /// Secret.
    pub fn shared_server_secret(&self, cluster: &str) -> Option<String> {
        let issued = self.cert_manager.as_ref().map(|tls| {
            let secret = || IssuedCertificate::Server.secret(cluster);
            tls.client().then(secret)
        });
        issued.unwrap_or_else(|| self.server_secret().map(str::to_owned))
    }

    /// The Secret with the peer certificate of a member. `None` without TLS between members. A generated Secret belongs
    /// to one member. A static Secret and a Secret from cert-manager belong to all members.
    pub fn peer_secret_of(&self, cluster: &str, member: &str) -> Option<String> {
        match &self.generated {
            Some(generated) => generated
                .peer()
                .then(|| names::certificate_secret(member, CertificateUse::Peer)),
            None => self.shared_peer_secret(cluster),
        }
    }

    /// The Secret with the server certificate of a member. `None` without TLS for clients.
    pub fn server_secret_of(&self, cluster: &str, member: &str) -> Option<String> {
        match &self.generated {
            Some(generated) => generated
                .client()
                .then(|| names::certificate_secret(member, CertificateUse::Server)),
            None => self.shared_server_secret(cluster),
        }
    }

    /// The Secret with the operators' client certificate. `None` without TLS for clients.
    pub fn operator_secret_of(&self, cluster: &str) -> Option<String> {
        match (&self.generated, &self.cert_manager) {
            (Some(generated), _) => generated
                .client()
                .then(|| names::certificate_secret(cluster, CertificateUse::Operator)),
            (None, Some(tls)) => tls
                .client()
                .then(|| IssuedCertificate::Operator.secret(cluster)),
            (None, None) => self.operator_secret().map(str::to_owned),
        }
    }

    /// True if the operator writes the TLS Secrets. They may be missing until the cluster operator has reconciled the
    /// EtcdCluster.
    pub fn is_written_by_operator(&self) -> bool {
        self.generated.is_some() || self.cert_manager.is_some()
    }

    /// True if members use TLS between each other.
    pub fn encrypts_peers(&self) -> bool {
        self.peer_secret_of("", "").is_some()
    }

    /// True if members use TLS for clients.
    pub fn encrypts_clients(&self) -> bool {
        self.server_secret_of("", "").is_some()
    }

    /// True if members reject clients without TLS.
    pub fn insists_on_tls(&self) -> bool {
        self.encrypts_clients() && !self.accepts_plaintext()
    }

    /// True if members accept clients with and without TLS.
    pub fn accepts_plaintext(&self) -> bool {
        self.encrypts_clients() && self.accept_plaintext == Some(true)
    }

    /// The same policy without TLS between members. `None` if the policy then has no TLS at all.
    #[must_use]
    pub fn without_peers(&self) -> Option<Self> {
        let mut policy = self.clone();
        if let Some(member) = policy.static_.as_mut().and_then(|tls| tls.member.as_mut()) {
            member.peer_secret = None;
        }
        if let Some(generated) = &mut policy.generated {
            generated.peer = Some(false);
        }
        if let Some(issued) = &mut policy.cert_manager {
            issued.peer = Some(false);
        }
        policy.peer_stage = None;
        policy.encrypts_clients().then_some(policy)
    }

    /// The stage of TLS between members.
    pub fn peers(&self) -> PeerStage {
        match (self.encrypts_peers(), self.peer_stage) {
            (false, _) => PeerStage::Plain,
            (true, None) => PeerStage::Tls,
            (true, Some(stage)) => stage,
        }
    }
}

/// The stage of TLS between members. `Plain` without a policy.
pub fn peers_of(policy: Option<&TlsPolicy>) -> PeerStage {
    policy.map_or(PeerStage::Plain, TlsPolicy::peers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificate_durations_have_documented_defaults() {
        let generated = |json: &str| -> GeneratedTls { serde_json::from_str(json).unwrap() };
        let hours = Duration::from_hours;
        let default = generated("{}");
        assert_eq!(default.certificate_duration(), hours(2_160));
        assert_eq!(default.authority_duration(), hours(87_600));
        let given = generated(r#"{"certificateDuration":"24h","authorityDuration":"48h"}"#);
        assert_eq!(given.certificate_duration(), hours(24));
        assert_eq!(given.authority_duration(), hours(48));
    }

    #[test]
    fn all_members_share_secrets_of_cert_manager() {
        let policy = |json: &str| -> TlsPolicy { serde_json::from_str(json).unwrap() };
        let tls = policy(r#"{"certManager":{"issuerRef":{"name":"ca"}}}"#);
        let named = |secret: Option<String>| secret.unwrap_or_default();
        assert_eq!(named(tls.peer_secret_of("db", "db-a")), "db-peer-certs");
        assert_eq!(named(tls.server_secret_of("db", "db-b")), "db-server-certs");
        assert_eq!(named(tls.operator_secret_of("db")), "db-operator-certs");
        assert_eq!(tls.peer_keys(), KeyNames::Usual);
        assert!(tls.encrypts_peers() && tls.insists_on_tls());
        let clients = tls.without_peers().unwrap();
        assert!(!clients.encrypts_peers() && clients.encrypts_clients());
        let peers = policy(r#"{"certManager":{"issuerRef":{"name":"ca"},"client":false}}"#);
        assert!(peers.encrypts_peers() && !peers.encrypts_clients());
        assert_eq!(peers.operator_secret_of("db"), None);
        assert_eq!(peers.without_peers(), None);
    }
}
