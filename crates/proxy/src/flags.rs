//! The command line of a proxy.

use api::EtcdCluster;
use api::cluster::GrpcProxy;
use api::names::{CLIENT_PORT, METRICS_PORT};
use api::version::EtcdVersion;
use kube::ResourceExt;

use crate::certificates::{AUTHORITIES, CERTIFICATE, KEY};

/// Mount path of the Secret with the client certificate for the members.
pub(crate) const CLIENT_TLS: &str = "/etc/etcdtls/proxy/client-tls";
/// Mount path of the Secret with the certificate for clients.
pub(crate) const SERVER_TLS: &str = "/etc/etcdtls/proxy/server-tls";

/// The default of etcd's flag `--max-request-bytes`.
const DEFAULT_REQUEST_BYTES: i64 = 1_572_864;
/// A member accepts gRPC messages that are longer than `--max-request-bytes` by this number of bytes
/// (`grpcOverheadBytes` in `server/etcdserver/api/v3rpc/grpc.go`).
const OVERHEAD_BYTES: i64 = 512 * 1024;

/// The arguments of etcd for a proxy of this version. etcd reads no environment variables for a proxy.
pub fn arguments(cluster: &EtcdCluster, proxy: &GrpcProxy, version: &EtcdVersion) -> Vec<String> {
    let addresses = member::addresses(cluster);
    let own = addresses.url_of(&proxy.service_name(&cluster.name_any()));
    let mut arguments = vec![
        "grpc-proxy".to_owned(),
        "start".to_owned(),
        // The client Service selects only members that serve, so the proxy needs no addresses of members.
        format!("--endpoints={}", addresses.service_url()),
        format!("--listen-addr=0.0.0.0:{CLIENT_PORT}"),
        format!("--metrics-addr=http://0.0.0.0:{METRICS_PORT}"),
        // Clients that read the member list get this address, and therefore stay connected to the proxies.
        format!("--advertise-client-url={own}"),
        format!("--max-send-bytes={}", max_send_bytes(cluster)),
    ];
    if version.has_proxy_keepalive() {
        // Without keepalive, a proxy would wait for minutes for a member on a lost node. Members reject intervals
        // below 5 s (`--grpc-keepalive-min-time`).
        let keepalive = ["--dial-keepalive-time=10s", "--dial-keepalive-timeout=5s"];
        arguments.extend(keepalive.map(str::to_owned));
    }
    if let Some(prefix) = &proxy.namespace_prefix {
        // Kubernetes expands `$(NAME)` in arguments, and replaces `$$` by `$`.
        arguments.push(format!("--namespace={}", prefix.replace('$', "$$")));
    }
    if addresses.client_tls {
        arguments.extend([
            format!("--cert={CLIENT_TLS}/{CERTIFICATE}"),
            format!("--key={CLIENT_TLS}/{KEY}"),
            format!("--cacert={CLIENT_TLS}/{AUTHORITIES}"),
            format!("--cert-file={SERVER_TLS}/{CERTIFICATE}"),
            format!("--key-file={SERVER_TLS}/{KEY}"),
            // With this flag, the proxy requires a certificate from every client.
            format!("--trusted-ca-file={SERVER_TLS}/{AUTHORITIES}"),
        ]);
    }
    arguments
}

/// The host name in the URL of the proxies.
pub(crate) fn host(cluster: &EtcdCluster, proxy: &GrpcProxy) -> String {
    member::addresses(cluster).host_of(&proxy.service_name(&cluster.name_any()))
}

/// Maximum size of a gRPC message to a member in bytes. The proxy's default of `--max-send-bytes` is smaller than the
/// limit of a member.
fn max_send_bytes(cluster: &EtcdCluster) -> i64 {
    let etcd = cluster.spec.etcd.as_ref();
    let bytes = etcd.and_then(|etcd| etcd.max_request_bytes);
    let bytes = bytes.unwrap_or(DEFAULT_REQUEST_BYTES);
    bytes.saturating_add(OVERHEAD_BYTES)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn built(spec: Value, version: &str) -> Vec<String> {
        let mut cluster = EtcdCluster::new("db", serde_json::from_value(spec).unwrap());
        cluster.metadata.namespace = Some("prod".to_owned());
        let proxy = cluster.spec.grpc_proxy.clone().unwrap();
        arguments(&cluster, &proxy, &EtcdVersion::parse(version).unwrap())
    }

    fn has(arguments: &[String], argument: &str) -> bool {
        arguments.iter().any(|one| one == argument)
    }

    #[test]
    fn proxy_connects_to_client_service() {
        let arguments = built(json!({ "grpcProxy": {} }), "3.6.16");
        assert_eq!(arguments[..2], ["grpc-proxy", "start"]);
        for argument in [
            "--endpoints=http://db-client.prod.svc:2379",
            "--listen-addr=0.0.0.0:2379",
            "--metrics-addr=http://0.0.0.0:2381",
            "--advertise-client-url=http://db-proxy.prod.svc:2379",
            "--max-send-bytes=2097152",
            "--dial-keepalive-time=10s",
        ] {
            assert!(has(&arguments, argument), "{argument} in {arguments:?}");
        }
        let is_option = |one: &String| one.contains("namespace") || one.contains("cert");
        assert!(!arguments.iter().any(is_option), "{arguments:?}");
    }

    #[test]
    fn proxy_uses_certificates_for_members_and_clients() {
        let spec = json!({
            "TLS": { "generated": {} },
            "grpcProxy": { "serviceName": "front" },
            "pod": { "ClusterDomain": ".cluster.local" },
        });
        let arguments = built(spec, "3.7.3");
        for argument in [
            "--endpoints=https://db-client.prod.svc.cluster.local:2379",
            "--advertise-client-url=https://front.prod.svc.cluster.local:2379",
            "--cert=/etc/etcdtls/proxy/client-tls/tls.crt",
            "--key=/etc/etcdtls/proxy/client-tls/tls.key",
            "--cacert=/etc/etcdtls/proxy/client-tls/ca.crt",
            "--cert-file=/etc/etcdtls/proxy/server-tls/tls.crt",
            "--key-file=/etc/etcdtls/proxy/server-tls/tls.key",
            "--trusted-ca-file=/etc/etcdtls/proxy/server-tls/ca.crt",
            "--metrics-addr=http://0.0.0.0:2381",
        ] {
            assert!(has(&arguments, argument), "{argument} in {arguments:?}");
        }
    }

    /// While members accept TLS and plaintext, the proxies use plaintext, because a proxy has only one listener.
    #[test]
    fn proxy_uses_plaintext_while_members_accept_plaintext() {
        let tls = json!({ "generated": {}, "acceptPlaintext": true });
        let arguments = built(json!({ "TLS": tls, "grpcProxy": {} }), "3.6.16");
        assert!(has(
            &arguments,
            "--endpoints=http://db-client.prod.svc:2379"
        ));
        assert!(!arguments.iter().any(|one| one.starts_with("--cert")));
    }

    #[test]
    fn dollar_signs_in_prefix_are_not_expanded() {
        let spec = json!({ "grpcProxy": { "namespacePrefix": "/$(HOME)/" } });
        assert!(has(&built(spec, "3.6.16"), "--namespace=/$$(HOME)/"));
    }

    #[test]
    fn proxy_request_limit_follows_max_request_bytes_of_members() {
        let spec = json!({ "etcd": { "maxRequestBytes": 3_000_000 }, "grpcProxy": {} });
        assert!(has(&built(spec, "3.6.16"), "--max-send-bytes=3524288"));
    }

    #[test]
    fn keepalive_flags_are_omitted_for_releases_without_them() {
        for version in ["3.4.23", "3.5.12"] {
            let arguments = built(json!({ "grpcProxy": {} }), version);
            assert!(!arguments.iter().any(|one| one.contains("keepalive")));
        }
    }
}
