//! `EtcdCluster.spec.TLS`: certificates from Secrets.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use std::time::Duration;

use super::peers::PeerStage;
use crate::duration::DurationText;
use crate::names::{self, CertificateUse};
use crate::schema::{given, null_as_empty, optional_object_name};

/// How long a generated certificate is valid where the spec does not say it.
const DEFAULT_VALIDITY: Duration = Duration::from_hours(90 * 24);
/// How long a generated authority is valid where the spec does not say it.
const DEFAULT_AUTHORITY_VALIDITY: Duration = Duration::from_hours(10 * 365 * 24);

/// TLS of a cluster: `static` or `generated`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!(has(self.static) && has(self.generated))",
    "spec.TLS takes its certificates from one place: give static or generated, not both"
))]
pub struct TlsPolicy {
    /// Certificates from Secrets that somebody else keeps.
    #[serde(default, rename = "static", skip_serializing_if = "Option::is_none")]
    pub static_: Option<StaticTls>,
    /// Certificates that the operator makes, renews and replaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generated: Option<GeneratedTls>,
    /// Members let clients in without TLS, too, on the same port. For the time in which clients are changed, when TLS is
    /// switched on or off; default false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accept_plaintext: Option<bool>,
    /// How far members are that change the way they talk to each other. Kept by the operator, and no part of the
    /// object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    pub peer_stage: Option<PeerStage>,
}

/// Certificates that the operator makes: an authority for peers and one for clients, certificates for every member,
/// one for the operator, and one for clients in the Secret `<cluster>-client-tls`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GeneratedTls {
    /// Whether members talk TLS to each other; default true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<bool>,
    /// Whether members talk TLS to clients; default true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<bool>,
    /// How long a certificate is valid; it is renewed at two thirds of its life. Default `2160h`, at least `3m`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_duration: Option<DurationText>,
    /// How long an authority is valid; it is replaced at two thirds of its life. Default `87600h`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority_duration: Option<DurationText>,
    /// More names and addresses under which clients reach the members, such as that of a load balancer.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(length(max = 32))]
    pub server_names: Vec<String>,
}

impl GeneratedTls {
    /// Whether members talk TLS to each other.
    pub fn peer(&self) -> bool {
        self.peer.unwrap_or(true)
    }

    /// Whether members talk TLS to clients.
    pub fn client(&self) -> bool {
        self.client.unwrap_or(true)
    }

    /// How long a certificate is valid.
    pub fn certificate_duration(&self) -> Duration {
        let given = self.certificate_duration.as_ref();
        given
            .and_then(DurationText::parse)
            .unwrap_or(DEFAULT_VALIDITY)
    }

    /// How long an authority is valid.
    pub fn authority_duration(&self) -> Duration {
        let given = self.authority_duration.as_ref();
        given
            .and_then(DurationText::parse)
            .unwrap_or(DEFAULT_AUTHORITY_VALIDITY)
    }
}

/// Certificates from Secrets. Each Secret has the keys of v1beta2 or `tls.crt`, `tls.key` and `ca.crt`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!(has(self.operatorSecret) && self.operatorSecret != '') || (has(self.member) && has(self.member.serverSecret) && self.member.serverSecret != '')",
    "spec.TLS.static.operatorSecret needs spec.TLS.static.member.serverSecret: give both or neither"
))]
#[x_kube(validation = (
    "!(has(self.member) && has(self.member.serverSecret) && self.member.serverSecret != '') || (has(self.operatorSecret) && self.operatorSecret != '')",
    "spec.TLS.static.member.serverSecret needs spec.TLS.static.operatorSecret, else the operator cannot reach its own cluster: give both or neither"
))]
pub struct StaticTls {
    /// Certificates of the members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<MemberTls>,
    /// Name of the Secret with the operator's client certificate: `etcd-client.crt`, `etcd-client.key` and
    /// `etcd-client-ca.crt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "optional_object_name")]
    pub operator_secret: Option<String>,
}

/// How the keys of a TLS Secret are called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyNames {
    /// As in v1beta2, another name for each purpose: `peer.crt`, `peer.key`, `peer-ca.crt`.
    #[default]
    OfPurpose,
    /// As cert-manager and `kubectl create secret tls` write them: `tls.crt`, `tls.key`, `ca.crt`.
    Usual,
}

/// Certificates of the members.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemberTls {
    /// Name of the Secret for TLS between members: `peer.crt`, `peer.key` and `peer-ca.crt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "optional_object_name")]
    pub peer_secret: Option<String>,
    /// Name of the Secret for TLS towards clients: `server.crt`, `server.key` and `server-ca.crt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "optional_object_name")]
    pub server_secret: Option<String>,
    /// How the keys of the Secret for peers are called. Found, and no part of the object.
    #[serde(skip)]
    pub peer_keys: KeyNames,
    /// How the keys of the Secret for clients are called. Found, and no part of the object.
    #[serde(skip)]
    pub server_keys: KeyNames,
}

impl TlsPolicy {
    /// The Secret for TLS between members, if they use it.
    pub fn peer_secret(&self) -> Option<&str> {
        given(self.static_.as_ref()?.member.as_ref()?.peer_secret.as_ref())
    }

    /// The Secret for TLS towards clients, if they use it.
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

    /// The Secret with the operator's client certificate, if it has one.
    pub fn operator_secret(&self) -> Option<&str> {
        given(self.static_.as_ref()?.operator_secret.as_ref())
    }

    /// How the keys of the Secret for TLS between members are called.
    pub fn peer_keys(&self) -> KeyNames {
        if self.generated.is_some() {
            return KeyNames::Usual;
        }
        let member = self.static_.as_ref().and_then(|tls| tls.member.as_ref());
        member.map(|member| member.peer_keys).unwrap_or_default()
    }

    /// How the keys of the Secret for TLS towards clients are called.
    pub fn server_keys(&self) -> KeyNames {
        if self.generated.is_some() {
            return KeyNames::Usual;
        }
        let member = self.static_.as_ref().and_then(|tls| tls.member.as_ref());
        member.map(|member| member.server_keys).unwrap_or_default()
    }

    /// What the operator makes itself, if it does.
    pub fn generated(&self) -> Option<&GeneratedTls> {
        self.generated.as_ref()
    }

    /// The Secret from which this member takes its certificate towards its peers; `None` when peers use no TLS.
    /// Generated ones are the member's own.
    pub fn peer_secret_of(&self, member: &str) -> Option<String> {
        match &self.generated {
            Some(generated) => generated
                .peer()
                .then(|| names::certificate_secret(member, CertificateUse::Peer)),
            None => self.peer_secret().map(str::to_owned),
        }
    }

    /// The Secret from which this member takes its certificate towards clients; `None` when clients use no TLS.
    pub fn server_secret_of(&self, member: &str) -> Option<String> {
        match &self.generated {
            Some(generated) => generated
                .client()
                .then(|| names::certificate_secret(member, CertificateUse::Server)),
            None => self.server_secret().map(str::to_owned),
        }
    }

    /// The Secret with the operators' own client certificate for this cluster; `None` when clients use no TLS.
    pub fn operator_secret_of(&self, cluster: &str) -> Option<String> {
        match &self.generated {
            Some(generated) => generated
                .client()
                .then(|| names::certificate_secret(cluster, CertificateUse::Operator)),
            None => self.operator_secret().map(str::to_owned),
        }
    }

    /// Whether members talk TLS to each other.
    pub fn encrypts_peers(&self) -> bool {
        self.peer_secret_of("").is_some()
    }

    /// Whether members talk TLS to clients.
    pub fn encrypts_clients(&self) -> bool {
        self.server_secret_of("").is_some()
    }

    /// Whether clients get in with TLS alone.
    pub fn insists_on_tls(&self) -> bool {
        self.encrypts_clients() && !self.accepts_plaintext()
    }

    /// Whether members that talk TLS to clients let them in without it, too.
    pub fn accepts_plaintext(&self) -> bool {
        self.encrypts_clients() && self.accept_plaintext == Some(true)
    }

    /// The same without TLS between members; `None` where nothing else was encrypted.
    #[must_use]
    pub fn without_peers(&self) -> Option<Self> {
        let mut policy = self.clone();
        if let Some(member) = policy.static_.as_mut().and_then(|tls| tls.member.as_mut()) {
            member.peer_secret = None;
        }
        if let Some(generated) = &mut policy.generated {
            generated.peer = Some(false);
        }
        policy.peer_stage = None;
        policy.encrypts_clients().then_some(policy)
    }

    /// How members talk to each other.
    pub fn peers(&self) -> PeerStage {
        match (self.encrypts_peers(), self.peer_stage) {
            (false, _) => PeerStage::Plain,
            (true, None) => PeerStage::Tls,
            (true, Some(stage)) => stage,
        }
    }
}

/// How members talk to each other under a policy, or without one.
pub fn peers_of(policy: Option<&TlsPolicy>) -> PeerStage {
    policy.map_or(PeerStage::Plain, TlsPolicy::peers)
}
