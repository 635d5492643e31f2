//! The readiness probe. It sends HTTP requests, so the etcd image needs neither a shell nor a client.
//!
//! There is no liveness probe, because it would kill a member that loads a large database.

use api::names::{CLIENT_PORT, METRICS_PORT};
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{HTTPGetAction, Probe, TCPSocketAction};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::Members;
use super::flags::has_metrics_listener;

/// The readiness probe. A member that is ready according to `/readyz` or `/health` serves linearizable reads, so it is
/// connected to a quorum. A member with a NOSPACE alarm stays ready, so that clients can delete data.
pub(super) fn readiness(members: &Members<'_>, version: &EtcdVersion) -> Probe {
    // Up to etcd 3.4, `/health` writes an entry to the Raft log, and etcd 3.6 does not start on such a log
    // (`v2ToV3Request` in `apply_v2.go`). For these releases, the probe requests `/version`, which etcd serves after
    // the member has joined.
    let writes = !version.has_readyz() && version.minor() < (3, 5);
    let path = if version.has_readyz() {
        "/readyz"
    } else if writes {
        "/version"
    } else {
        "/health?exclude=NOSPACE"
    };
    let port = if has_metrics_listener(version) && !writes {
        METRICS_PORT
    } else {
        CLIENT_PORT
    };
    // On a client port with TLS, the probe only checks that the port is open: the kubelet has no client certificate.
    let (http_get, tcp_socket) = if port == CLIENT_PORT && members.addresses().client_tls {
        let port = IntOrString::Int(port.into());
        (None, Some(TCPSocketAction { port, host: None }))
    } else {
        let get = HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::Int(port.into()),
            ..HTTPGetAction::default()
        };
        (Some(get), None)
    };
    Probe {
        http_get,
        tcp_socket,
        period_seconds: Some(1),
        timeout_seconds: Some(3),
        failure_threshold: Some(3),
        success_threshold: Some(1),
        ..Probe::default()
    }
}
