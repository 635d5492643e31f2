//! `EtcdCluster.spec.TLS`: certificates from Secrets.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema::{given, optional_object_name};

/// TLS of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TlsPolicy {
    /// Certificates from Secrets that somebody else keeps.
    #[serde(default, rename = "static", skip_serializing_if = "Option::is_none")]
    pub static_: Option<StaticTls>,
}

/// Certificates from Secrets. Each Secret has the keys of v1beta2 or `tls.crt`, `tls.key` and `ca.crt`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
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

/// Certificates of the members.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
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
}
