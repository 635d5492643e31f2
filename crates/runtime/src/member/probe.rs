//! The readiness probe: plain HTTP by the kubelet, so that the image needs no shell and no client.
//!
//! No liveness probe: it kills members that take long to load a large database, again and again.

use api::names::{CLIENT_PORT, METRICS_PORT};
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{HTTPGetAction, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::flags::has_metrics_listener;

/// Ready means: the member reads linearizably, so it is in touch with a quorum. A full database (NOSPACE) still
/// serves reads and must stay reachable for its repair.
pub(super) fn readiness(version: &EtcdVersion) -> Probe {
    let path = if version.has_readyz() {
        "/readyz"
    } else {
        "/health?exclude=NOSPACE"
    };
    let port = if has_metrics_listener(version) {
        METRICS_PORT
    } else {
        CLIENT_PORT
    };
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::Int(port.into()),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(1),
        timeout_seconds: Some(3),
        failure_threshold: Some(3),
        success_threshold: Some(1),
        ..Probe::default()
    }
}
