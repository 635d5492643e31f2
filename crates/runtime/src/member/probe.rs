//! The readiness probe: plain HTTP by the kubelet, so that the image needs no shell and no client.
//!
//! No liveness probe: it kills members that take long to load a large database, again and again.

use api::names::{CLIENT_PORT, METRICS_PORT};
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{HTTPGetAction, Probe, TCPSocketAction};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::Members;
use super::flags::has_metrics_listener;

/// Ready means: the member reads linearizably, so it is in touch with a quorum. A full database (NOSPACE) still
/// serves reads and must stay reachable for its repair.
pub(super) fn readiness(members: &Members<'_>, version: &EtcdVersion) -> Probe {
    // Up to 3.4 `/health` writes an entry to the log of the cluster, and etcd 3.6 does not start on a log with such
    // entries (`v2ToV3Request` in its `apply_v2.go`). `/version` is served once the member has joined.
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
    // A client port that asks for certificates cannot be asked more than whether it is open.
    let (asked, open) = if port == CLIENT_PORT && members.addresses().client_tls {
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
        http_get: asked,
        tcp_socket: open,
        period_seconds: Some(1),
        timeout_seconds: Some(3),
        failure_threshold: Some(3),
        success_threshold: Some(1),
        ..Probe::default()
    }
}
