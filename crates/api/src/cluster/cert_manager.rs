//! `EtcdCluster.spec.TLS.certManager`: certificates that cert-manager issues for a cluster.

use std::time::Duration;

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::duration::DurationText;
use crate::names::OPERATOR_USER;
use crate::problem::Problem;
use crate::schema::{null_as_empty, object_name};

use super::access::ROOT_USER;

/// The default duration of cert-manager, which applies if the spec sets no duration.
const DEFAULT_VALIDITY: Duration = Duration::from_hours(90 * 24);
/// The minimum of `duration` that cert-manager accepts.
const SHORTEST_VALIDITY: Duration = Duration::from_hours(1);
/// The minimum of `renewBefore` that cert-manager accepts.
const SHORTEST_RENEWAL: Duration = Duration::from_mins(5);
/// The algorithms of private keys, each with its sizes.
const ALGORITHMS: [(&str, &[i64]); 3] = [
    ("RSA", &[2048, 4096, 8192]),
    ("ECDSA", &[256, 384, 521]),
    ("Ed25519", &[]),
];

/// Certificates that cert-manager issues. The operator writes the Certificates, and copies the issued certificates to
/// the Secrets that members and clients mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!has(self.clients) || self.clients.all(name, name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$') && name != 'root' && name != 'etcd-operator')",
    "spec.TLS.certManager.clients has a name that no client can have: use lowercase letters, digits and dashes, and neither root nor etcd-operator"
))]
pub struct CertManagerTls {
    /// The issuer of the certificates. It must return its CA certificate, as issuers of the type CA and Vault do.
    pub issuer_ref: IssuerRef,
    /// The issuer of the certificates for TLS between members. The default is `issuerRef`. Every certificate of this
    /// issuer can act as a member, so use a separate CA.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_issuer_ref: Option<IssuerRef>,
    /// If false, members do not use TLS between each other. The default is true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<bool>,
    /// If false, members do not use TLS for clients. The default is true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<bool>,
    /// Validity of the certificates. The default of cert-manager is `2160h`, and the minimum is `1h`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration: Option<DurationText>,
    /// Time before the expiry at which cert-manager renews a certificate. The default of cert-manager is a third of the
    /// validity, and the minimum is `5m`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renew_before: Option<DurationText>,
    /// The private keys. The default is ECDSA with 256 bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub private_key: Option<PrivateKeyOptions>,
    /// Additional host names and IP addresses in the server certificate, such as the name of a load balancer.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(length(max = 32))]
    pub server_names: Vec<String>,
    /// Names of clients. Each client gets a certificate in the Secret `<cluster>-client-<name>-certs`. The common name
    /// of the certificate is the name of the client.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(length(max = 32), inner(length(min = 1, max = 63)))]
    pub clients: Vec<String>,
}

/// An issuer of cert-manager, or of a controller that signs for cert-manager.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct IssuerRef {
    /// Name of the issuer.
    #[schemars(schema_with = "object_name")]
    pub name: String,
    /// Kind of the issuer. The default is `Issuer`, an issuer in the namespace of the EtcdCluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub kind: Option<String>,
    /// API group of the issuer. The default is `cert-manager.io`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub group: Option<String>,
}

impl IssuerRef {
    /// The kind of the issuer.
    pub fn kind(&self) -> &str {
        self.kind.as_deref().unwrap_or("Issuer")
    }

    /// The API group of the issuer.
    pub fn group(&self) -> &str {
        self.group.as_deref().unwrap_or("cert-manager.io")
    }
}

/// The private keys of the certificates. cert-manager creates a new private key for each certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!has(self.algorithm) || self.algorithm in ['RSA', 'ECDSA', 'Ed25519']",
    "spec.TLS.certManager.privateKey.algorithm is unknown: use RSA, ECDSA or Ed25519"
))]
pub struct PrivateKeyOptions {
    /// Algorithm of the private keys: `RSA`, `ECDSA` or `Ed25519`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub algorithm: Option<String>,
    /// Size of the private keys in bits: 2048, 4096 or 8192 for RSA, and 256, 384 or 521 for ECDSA.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<i64>,
}

impl PrivateKeyOptions {
    /// The algorithm of the private keys.
    pub fn algorithm(&self) -> &str {
        self.algorithm.as_deref().unwrap_or("ECDSA")
    }
}

impl CertManagerTls {
    /// True if members use TLS between each other.
    pub fn peer(&self) -> bool {
        self.peer.unwrap_or(true)
    }

    /// True if members use TLS for clients.
    pub fn client(&self) -> bool {
        self.client.unwrap_or(true)
    }

    /// The validity of a certificate.
    pub fn duration(&self) -> Duration {
        let given = self.duration.as_ref();
        given
            .and_then(DurationText::parse)
            .unwrap_or(DEFAULT_VALIDITY)
    }

    /// The issuer of this certificate.
    pub fn issuer_of(&self, certificate: &IssuedCertificate) -> &IssuerRef {
        match (&self.peer_issuer_ref, certificate) {
            (Some(issuer), IssuedCertificate::Peer) => issuer,
            _ => &self.issuer_ref,
        }
    }

    /// The certificates that the cluster needs. `proxies` is true if the spec has `grpcProxy`.
    pub fn certificates(&self, proxies: bool) -> Vec<IssuedCertificate> {
        let mut all = Vec::new();
        if self.peer() {
            all.push(IssuedCertificate::Peer);
        }
        if self.client() {
            all.extend([IssuedCertificate::Server, IssuedCertificate::Operator]);
            all.extend(self.clients.iter().cloned().map(IssuedCertificate::Client));
            all.extend(proxies.then_some(IssuedCertificate::Proxy));
        }
        all
    }

    /// The first problem of the settings; `None` if they are valid.
    pub(super) fn problem(&self) -> Option<Problem> {
        let of = |field: &str| format!("spec.TLS.certManager.{field}");
        let issuers = [Some(&self.issuer_ref), self.peer_issuer_ref.as_ref()];
        if issuers.into_iter().flatten().any(|one| one.name.is_empty()) {
            let remedy = "set the name of an Issuer or ClusterIssuer";
            return Some(Problem::new(of("issuerRef"), "has no name", remedy));
        }
        for (field, text) in [
            ("duration", &self.duration),
            ("renewBefore", &self.renew_before),
        ] {
            let problem = Problem::invalid_duration(of(field), text.as_ref());
            if problem.is_some() {
                return problem;
            }
        }
        if self.duration() < SHORTEST_VALIDITY {
            let problem = "is too short for cert-manager";
            let remedy = "use at least 1h, usually some weeks";
            return Some(Problem::new(of("duration"), problem, remedy));
        }
        let renewal = self.renew_before.as_ref().and_then(DurationText::parse);
        if renewal.is_some_and(|time| time < SHORTEST_RENEWAL || time >= self.duration()) {
            let problem = "is outside of the range that cert-manager accepts";
            let remedy = "use at least 5m, and less than spec.TLS.certManager.duration";
            return Some(Problem::new(of("renewBefore"), problem, remedy));
        }
        self.private_key_problem().or_else(|| self.client_problem())
    }

    fn private_key_problem(&self) -> Option<Problem> {
        let key = self.private_key.as_ref()?;
        let known = ALGORITHMS.iter().find(|(name, _)| *name == key.algorithm());
        let valid = known.is_some_and(|(_, sizes)| key.size.is_none_or(|it| sizes.contains(&it)));
        (!valid).then(|| {
            Problem::new(
                "spec.TLS.certManager.privateKey",
                "has an algorithm or a size that cert-manager does not accept",
                "use RSA with 2048, 4096 or 8192, ECDSA with 256, 384 or 521, or Ed25519 without a size",
            )
        })
    }

    fn client_problem(&self) -> Option<Problem> {
        const FIELD: &str = "spec.TLS.certManager.clients";
        let is_letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        let is_valid = |name: &String| {
            let inner = |c: char| is_letter(c) || c == '-';
            name.len() <= 63
                && name.starts_with(is_letter)
                && name.ends_with(is_letter)
                && name.chars().all(inner)
                && ![ROOT_USER, OPERATOR_USER].contains(&name.as_str())
        };
        let invalid = self.clients.iter().find(|name| !is_valid(name));
        if let Some(name) = invalid {
            let remedy =
                "use lowercase letters, digits and dashes, and neither root nor etcd-operator";
            let problem = format!("has the item {name:?}, which cannot be the name of a client");
            return Some(Problem::new(FIELD, problem, remedy));
        }
        let mut names = self.clients.iter().enumerate();
        let twice = names.find(|(at, name)| self.clients[..*at].contains(name));
        twice.map(|(_, name)| {
            let problem = format!("has the item {name:?} twice");
            Problem::new(FIELD, problem, "remove one of the two items")
        })
    }
}

/// A certificate that cert-manager issues for a cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum IssuedCertificate {
    /// The certificate of all members for connections between members.
    Peer,
    /// The certificate of all members for connections from clients.
    Server,
    /// Client certificate of the operators.
    Operator,
    /// The certificate of the client with this name.
    Client(String),
    /// The certificate of the gRPC proxies, for connections to members and from clients.
    Proxy,
}

impl IssuedCertificate {
    /// Name of the Certificate, and of the Secret that cert-manager writes. No pod mounts this Secret: the operator
    /// copies the certificate to [`Self::secret`].
    pub fn certificate(&self, cluster: &str) -> String {
        format!("{}-issued", self.owner(cluster))
    }

    /// Name of the Secret that members or clients mount. The operator writes this Secret.
    pub fn secret(&self, cluster: &str) -> String {
        format!("{}-certs", self.owner(cluster))
    }

    /// True if neither members nor operators use the certificate. The operator deletes such a certificate when the spec
    /// no longer needs it.
    pub fn is_of_clients(&self) -> bool {
        match self {
            Self::Peer | Self::Server | Self::Operator => false,
            Self::Client(_) | Self::Proxy => true,
        }
    }

    fn owner(&self, cluster: &str) -> String {
        match self {
            Self::Peer => format!("{cluster}-peer"),
            Self::Server => format!("{cluster}-server"),
            Self::Operator => format!("{cluster}-operator"),
            Self::Client(name) => format!("{cluster}-client-{name}"),
            Self::Proxy => format!("{cluster}-proxy"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> CertManagerTls {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn issued_certificates_depend_on_clients_proxy_and_client_tls() {
        use IssuedCertificate::{Client, Operator, Peer, Proxy, Server};
        let tls = of(r#"{"issuerRef":{"name":"ca"},"clients":["app"]}"#);
        let all = tls.certificates(true);
        assert_eq!(
            all,
            [Peer, Server, Operator, Client("app".to_owned()), Proxy]
        );
        assert_eq!(tls.certificates(false), all[..4]);
        let peers = of(r#"{"issuerRef":{"name":"ca"},"client":false,"clients":["app"]}"#);
        assert_eq!(peers.certificates(true), [Peer]);
        assert_eq!(all[3].certificate("db"), "db-client-app-issued");
        assert_eq!(all[3].secret("db"), "db-client-app-certs");
        assert_eq!(Peer.secret("db"), "db-peer-certs");
        assert_eq!(Proxy.secret("db"), "db-proxy-certs");
    }

    #[test]
    fn peer_issuer_ref_applies_only_to_peer_certificate() {
        let tls = of(
            r#"{"issuerRef":{"name":"ca"},"peerIssuerRef":{"name":"peers","kind":"ClusterIssuer"}}"#,
        );
        let peer = tls.issuer_of(&IssuedCertificate::Peer);
        assert_eq!(
            (peer.name.as_str(), peer.kind()),
            ("peers", "ClusterIssuer")
        );
        let server = tls.issuer_of(&IssuedCertificate::Server);
        assert_eq!((server.name.as_str(), server.kind()), ("ca", "Issuer"));
        assert_eq!(server.group(), "cert-manager.io");
    }

    #[test]
    fn invalid_cert_manager_settings_are_reported_with_field() {
        let with = |more: &str| {
            let text = format!(r#"{{"issuerRef":{{"name":"ca"}}{more}}}"#);
            of(&text).problem().map(|problem| problem.field)
        };
        for valid in [
            "",
            r#","duration":"1h","renewBefore":"59m""#,
            r#","privateKey":{"algorithm":"RSA","size":4096}"#,
            r#","privateKey":{"size":384}"#,
            r#","clients":["app","backup-2"]"#,
        ] {
            assert_eq!(with(valid), None, "{valid}");
        }
        for (invalid, field) in [
            (r#","duration":"59m""#, "duration"),
            (r#","duration":"soon""#, "duration"),
            (r#","renewBefore":"4m""#, "renewBefore"),
            (r#","duration":"2h","renewBefore":"2h""#, "renewBefore"),
            (r#","privateKey":{"algorithm":"DSA"}"#, "privateKey"),
            (
                r#","privateKey":{"algorithm":"RSA","size":256}"#,
                "privateKey",
            ),
            (
                r#","privateKey":{"algorithm":"Ed25519","size":256}"#,
                "privateKey",
            ),
            (r#","clients":["root"]"#, "clients"),
            (r#","clients":["etcd-operator"]"#, "clients"),
            (r#","clients":["App"]"#, "clients"),
            (r#","clients":["app","app"]"#, "clients"),
        ] {
            let expected = format!("spec.TLS.certManager.{field}");
            assert_eq!(with(invalid), Some(expected), "{invalid}");
        }
        let nameless = of(r#"{"issuerRef":{"name":""}}"#).problem();
        assert!(nameless.is_some_and(|problem| problem.field.ends_with("issuerRef")));
    }
}
