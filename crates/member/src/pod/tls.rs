//! TLS in a member's pod: the mounted Secrets, at the paths of v1beta2, and the TLS flags of etcd.
//!
//! Only the etcd container mounts the Secrets. The readiness probe needs no client certificate, because the metrics
//! listener uses plain HTTP and serves no data.

use api::cluster::{KeyNames, PodPolicy};
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{KeyToPath, SecretVolumeSource, Volume, VolumeMount};

use crate::tls::Purpose;
use crate::{Member, Members};

/// File mode of mounted Secrets. The group of the pod, to which etcd belongs, can read the files.
const MODE: i32 = 0o440;
/// File mode if the security context in the spec has no group. All users can read the files, because the group of etcd
/// is unknown.
const MODE_WITHOUT_GROUP: i32 = 0o444;

/// Cipher suites for TLS 1.2 with forward secrecy and authenticated encryption. etcd accepts these names since 3.4. In
/// Go, the suites of TLS 1.3 cannot be configured.
const CIPHER_SUITES: [&str; 6] = [
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305",
];

/// The variable of the flag `--tls-min-version`, which exists since etcd 3.4.25, 3.5.8 and 3.6.
const MIN_VERSION: &str = "ETCD_TLS_MIN_VERSION";
/// The variable of the flag `--peer-skip-client-san-verification`, which exists since etcd 3.6.
pub(crate) const SKIP_REVERSE_DNS: &str = "ETCD_PEER_SKIP_CLIENT_SAN_VERIFICATION";
/// The variable in etcd 3.4 to 3.6 for the same setting as [`SKIP_REVERSE_DNS`]. etcd 3.6 does not start with both
/// variables.
pub(crate) const SKIP_REVERSE_DNS_EXPERIMENTAL: &str =
    "ETCD_EXPERIMENTAL_PEER_SKIP_CLIENT_SAN_VERIFICATION";

/// A Secret that the etcd container mounts.
struct Mounted {
    purpose: Purpose,
    secret: String,
    names: KeyNames,
}

impl Mounted {
    fn volume(&self) -> &'static str {
        match self.purpose {
            Purpose::Peer => "member-peer-tls",
            _ => "member-server-tls",
        }
    }

    fn path(&self) -> &'static str {
        match self.purpose {
            Purpose::Peer => "/etc/etcdtls/member/peer-tls",
            _ => "/etc/etcdtls/member/server-tls",
        }
    }
}

fn mounted(members: &Members<'_>, member: &str) -> Vec<Mounted> {
    let Some(tls) = &members.spec.tls else {
        return Vec::new();
    };
    let peer = tls
        .peer_secret_of(members.cluster, member)
        .map(|secret| Mounted {
            purpose: Purpose::Peer,
            secret,
            names: tls.peer_keys(),
        });
    let server = tls
        .server_secret_of(members.cluster, member)
        .map(|secret| Mounted {
            purpose: Purpose::Server,
            secret,
            names: tls.server_keys(),
        });
    peer.into_iter().chain(server).collect()
}

pub(super) fn volumes(members: &Members<'_>, member: &str, policy: &PodPolicy) -> Vec<Volume> {
    let given = policy.security_context.as_ref();
    let grouped = given.is_none_or(|context| context.fs_group.is_some());
    let volume = |mounted: Mounted| {
        let (from, to) = (
            mounted.purpose.keys(mounted.names),
            mounted.purpose.keys(KeyNames::OfPurpose),
        );
        let name = mounted.volume().to_owned();
        let item = |key: &str, path: &str| KeyToPath {
            key: key.to_owned(),
            path: path.to_owned(),
            mode: None,
        };
        Volume {
            name,
            secret: Some(SecretVolumeSource {
                secret_name: Some(mounted.secret),
                default_mode: Some(if grouped { MODE } else { MODE_WITHOUT_GROUP }),
                // Only these keys are mounted, because members must not read other keys of the Secret.
                items: Some(vec![
                    item(from.certificate, to.certificate),
                    item(from.key, to.key),
                    item(from.ca, to.ca),
                ]),
                optional: None,
            }),
            ..Volume::default()
        }
    };
    mounted(members, member).into_iter().map(volume).collect()
}

pub(super) fn mounts(members: &Members<'_>, member: &str) -> Vec<VolumeMount> {
    let mount = |mounted: Mounted| VolumeMount {
        name: mounted.volume().to_owned(),
        mount_path: mounted.path().to_owned(),
        read_only: Some(true),
        ..VolumeMount::default()
    };
    mounted(members, member).into_iter().map(mount).collect()
}

/// The TLS flags of etcd. Members require a certificate from every client and peer (invariant 20).
pub(crate) fn arguments(members: &Members<'_>, member: &Member<'_>) -> Vec<String> {
    let all = mounted(members, member.name);
    let mut arguments = Vec::new();
    for mounted in &all {
        let keys = mounted.purpose.keys(KeyNames::OfPurpose);
        let path = mounted.path();
        let prefix = match mounted.purpose {
            Purpose::Peer => "peer-",
            _ => "",
        };
        arguments.extend([
            format!("--{prefix}cert-file={path}/{}", keys.certificate),
            format!("--{prefix}key-file={path}/{}", keys.key),
            format!("--{prefix}trusted-ca-file={path}/{}", keys.ca),
            format!("--{prefix}client-cert-auth=true"),
        ]);
    }
    if !all.is_empty() {
        arguments.push(format!("--cipher-suites={}", CIPHER_SUITES.join(",")));
    }
    arguments
}

/// The TLS options that some releases lack or name differently, as variables with their values.
pub(super) fn variables(
    members: &Members<'_>,
    member: &Member<'_>,
) -> Vec<(&'static str, &'static str)> {
    let all = mounted(members, member.name);
    let between_peers = all.iter().any(|one| matches!(one.purpose, Purpose::Peer));
    let min_version = (!all.is_empty()).then_some((MIN_VERSION, "TLS1.2"));
    let reverse_dns = between_peers.then(|| (skip_reverse_dns(member.version), "true"));
    min_version.into_iter().chain(reverse_dns).collect()
}

/// The variable that turns off the reverse DNS check of peers. With the check, etcd rejects all peers while reverse DNS
/// is slow or down.
///
/// The check looks up the IP address of a peer in reverse DNS, and compares the result with the wildcard names in the
/// certificate (`checkCertSAN`, `isHostInDNS` in `client/pkg/transport/listener_tls.go`). With the variable, etcd
/// verifies the issuer and the usage of the certificate. When etcd connects to another member, it verifies the name
/// too.
fn skip_reverse_dns(version: &EtcdVersion) -> &'static str {
    if version.has_stable_flag_names() {
        SKIP_REVERSE_DNS
    } else {
        SKIP_REVERSE_DNS_EXPERIMENTAL
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Fixture;

    const TLS: &str = r#"{"TLS":{"static":{"member":{"peerSecret":"p","serverSecret":"s"},"operatorSecret":"o"}}}"#;

    fn has(arguments: &[String], argument: &str) -> bool {
        arguments.iter().any(|one| one == argument)
    }

    #[test]
    fn members_with_tls_require_client_certificates() {
        let arguments = Fixture::with(TLS).arguments();
        for argument in [
            "--listen-peer-urls=https://0.0.0.0:2380",
            "--listen-client-urls=https://0.0.0.0:2379",
            "--advertise-client-urls=https://db-aaaaaaaaaa.prod.svc:2379",
            "--client-cert-auth=true",
            "--peer-client-cert-auth=true",
            "--trusted-ca-file=/etc/etcdtls/member/server-tls/server-ca.crt",
            "--peer-trusted-ca-file=/etc/etcdtls/member/peer-tls/peer-ca.crt",
            "--peer-cert-file=/etc/etcdtls/member/peer-tls/peer.crt",
            "--key-file=/etc/etcdtls/member/server-tls/server.key",
            "--listen-metrics-urls=http://0.0.0.0:2381",
        ] {
            assert!(has(&arguments, argument), "{argument} in {arguments:?}");
        }
        assert!(!arguments.iter().any(|one| one.contains("auto-tls")));
    }

    /// Invariant 20: only the reverse DNS check is turned off, with the name of the variable in each release.
    #[test]
    fn peer_certificate_check_skips_reverse_dns() {
        let of = |json, version| {
            let fixture = Fixture::with(json).version(version);
            variables(&fixture.members(), &fixture.member())
        };
        let minimum = (MIN_VERSION, "TLS1.2");
        for version in ["3.6.16", "3.7.3"] {
            assert_eq!(of(TLS, version), [minimum, (SKIP_REVERSE_DNS, "true")]);
        }
        for version in ["3.4.23", "3.5.35"] {
            let expected = [minimum, (SKIP_REVERSE_DNS_EXPERIMENTAL, "true")];
            assert_eq!(of(TLS, version), expected);
        }
        let clients = r#"{"TLS":{"static":{"member":{"serverSecret":"s"},"operatorSecret":"o"}}}"#;
        assert_eq!(of(clients, "3.6.16"), [minimum]);
        assert_eq!(of("{}", "3.6.16"), []);
    }

    #[test]
    fn peer_tls_and_client_tls_are_independent() {
        let peers =
            Fixture::with(r#"{"TLS":{"static":{"member":{"peerSecret":"p"}}}}"#).arguments();
        assert!(has(&peers, "--listen-client-urls=http://0.0.0.0:2379"));
        assert!(
            has(&peers, "--peer-client-cert-auth=true") && !has(&peers, "--client-cert-auth=true")
        );
        let clients = r#"{"TLS":{"static":{"member":{"serverSecret":"s"},"operatorSecret":"o"}}}"#;
        let clients = Fixture::with(clients).arguments();
        assert!(has(&clients, "--listen-peer-urls=http://0.0.0.0:2380"));
        assert!(has(&clients, "--client-cert-auth=true"));
        assert!(!clients.iter().any(|one| one.starts_with("--peer-")));
    }

    #[test]
    fn members_mount_secrets_that_operator_publishes() {
        let fixture = Fixture::with(r#"{"TLS":{"certManager":{"issuerRef":{"name":"ca"}}}}"#);
        let spec = fixture.pod().spec.unwrap();
        let volumes = spec.volumes.iter().flatten();
        let secrets: Vec<_> = volumes.filter_map(|volume| volume.secret.clone()).collect();
        let names: Vec<_> = secrets.iter().flat_map(|one| &one.secret_name).collect();
        assert_eq!(names, ["db-peer-certs", "db-server-certs"]);
        let items = secrets[0].items.as_ref().unwrap();
        let keys: Vec<_> = items.iter().map(|item| item.key.as_str()).collect();
        assert_eq!(keys, ["tls.crt", "tls.key", "ca.crt"]);
    }

    #[test]
    fn etcd_container_mounts_peer_and_server_secrets_read_only() {
        let mut fixture = Fixture::with(TLS);
        let static_ = fixture.spec.tls.as_mut().unwrap().static_.as_mut().unwrap();
        static_.member.as_mut().unwrap().server_keys = KeyNames::Usual;
        let spec = fixture.pod().spec.unwrap();
        let secrets: Vec<_> = spec
            .volumes
            .iter()
            .flatten()
            .filter_map(|volume| volume.secret.clone())
            .collect();
        let names: Vec<_> = secrets.iter().flat_map(|one| &one.secret_name).collect();
        assert_eq!(names, ["p", "s"]);
        // The mounted file has the name `server.key`, whether its key in the Secret is `tls.key` or `server.key`.
        let items = secrets[1].items.as_ref().unwrap();
        assert_eq!(
            (items[1].key.as_str(), items[1].path.as_str()),
            ("tls.key", "server.key")
        );
        let mounts = spec.containers[0].volume_mounts.as_ref().unwrap();
        let mounted = mounts
            .iter()
            .filter(|mount| mount.mount_path.starts_with("/etc/etcdtls/"));
        assert!(mounted.clone().all(|mount| mount.read_only == Some(true)));
        assert_eq!(mounted.count(), 2);
    }
}
