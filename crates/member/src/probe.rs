//! The readiness probe. The kubelet sends HTTP requests, so the image needs neither a shell nor a client.
//!
//! There is no liveness probe, because it would kill a member repeatedly while the member loads a large database.

use api::names::{CLIENT_PORT, METRICS_PORT};
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{HTTPGetAction, Probe, TCPSocketAction};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::Members;
use super::flags::has_metrics_listener;

/// The readiness probe. A ready member serves linearizable reads, so it is connected to a quorum. A member with a
/// NOSPACE alarm stays ready, because it serves reads, and clients must reach it to delete data.
pub(super) fn readiness(members: &Members<'_>, version: &EtcdVersion) -> Probe {
    // Up to etcd 3.4, a request to `/health` writes an entry to the Raft log. etcd 3.6 does not start on a log with
    // such entries (`v2ToV3Request` in its `apply_v2.go`). For these releases, the probe requests `/version`, which
    // etcd serves after the member has joined.
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
    // The kubelet has no client certificate. If the client port uses TLS, the probe can only check whether the port is
    // open.
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
