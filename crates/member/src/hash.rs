//! A hash of the spec. If the hash of the spec differs from the recorded hash of a pod, the pod is replaced.
//!
//! The input is the spec, not the built pod, so a release that builds pods differently restarts no members ([ADR
//! 14](../../../docs/adr/0014-what-rolls-out.md)). Equal specs must have equal hashes in every release. A release that
//! hashes other fields must use a new version number of the hash.

use std::collections::BTreeMap;

use api::cluster::{EtcdClusterSpec, TlsPolicy};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// The version number of the hash's format, which is the prefix of every hash.
const FORM: &str = "1-";

/// The hash of the fields that require a new pod: a version number and sixteen hexadecimal digits. The image and the
/// version are compared separately. Volumes, labels, annotations, CPU and memory change without a new pod.
pub fn spec_hash(spec: &EtcdClusterSpec) -> String {
    let mut pod = spec.pod.clone().unwrap_or_default();
    pod.persistent_volume_claim_spec = None;
    pod.labels.clear();
    pod.annotations.clear();
    // The hash omits these two fields, because the operator ignores them.
    pod.busybox_image = None;
    pod.dns_timeout_in_second = None;
    if let Some(resources) = &mut pod.resources {
        for side in [&mut resources.requests, &mut resources.limits] {
            let side = side.iter_mut();
            side.for_each(|all| all.retain(|name, _| !is_resizable(name)));
        }
    }
    let hashed = serde_json::json!({
        "pod": pod,
        "etcd": spec.etcd,
        "memberAddress": spec.member_address,
        "tls": spec.tls.as_ref().map(hashed_tls),
    });
    format!("{FORM}{}", digest(hashed))
}

/// The TLS settings in the hash. For certificates that the operator writes, the names and the lifetime are left out,
/// because a member reads a renewed certificate without a restart.
fn hashed_tls(tls: &TlsPolicy) -> Value {
    let source = match (tls.generated(), &tls.cert_manager) {
        (Some(generated), _) => ("generated", generated.peer(), generated.client()),
        (None, Some(issued)) => ("certManager", issued.peer(), issued.client()),
        (None, None) => return serde_json::json!(tls),
    };
    let (source, peer, client) = source;
    serde_json::json!({
        source: { "peer": peer, "client": client },
        "acceptPlaintext": tls.accept_plaintext,
        "peerStage": tls.peer_stage,
    })
}

fn digest(value: Value) -> String {
    let digest = Sha256::digest(without_empty(value).to_string());
    hex::encode(&digest[..8])
}

/// Removes empty fields and sorts fields by name, so that a missing field equals an empty field.
pub(super) fn without_empty(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields = fields
                .into_iter()
                .map(|(key, value)| (key, without_empty(value)));
            let fields: BTreeMap<String, Value> =
                fields.filter(|(_, value)| !is_empty(value)).collect();
            Value::Object(fields.into_iter().collect())
        }
        other => other,
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(fields) => fields.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

/// True if Kubernetes can change the resource in a running container.
pub(super) fn is_resizable(resource: &str) -> bool {
    matches!(resource, "cpu" | "memory")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::spec;

    const MANY_FIELDS: &str = r#"{"repository":"registry.local/etcd","memberAddress":"Pod",
        "etcd":{"quotaBackendBytes":8589934592,"autoCompactionMode":"periodic","heartbeatInterval":"200ms"},
        "TLS":{"static":{"member":{"peerSecret":"p","serverSecret":"s"},"operatorSecret":"o"}},
        "pod":{"labels":{"team":"a"},"annotations":{"note":"b"},"nodeSelector":{"disk":"fast"},"antiAffinity":true,
            "tolerations":[{"key":"a","operator":"Exists"}],"etcdEnv":[{"name":"A","value":"1"}],
            "resources":{"requests":{"cpu":"1","ephemeral-storage":"1Gi"},"limits":{"memory":"1Gi"}},
            "extraArgs":["--log-level=debug"],"terminationGracePeriodSeconds":20,"priorityClassName":"high"}}"#;

    /// A change of these hashes would restart the members of all clusters. A release that hashes other fields must use
    /// a new version number (`FORM`).
    #[test]
    fn spec_hash_is_stable_across_releases() {
        assert_eq!(spec_hash(&spec("{}")), "1-44136fa355b3678a");
        assert_eq!(spec_hash(&spec(MANY_FIELDS)), "1-5ef8befa2e869d57");
    }

    #[test]
    fn spec_hash_changes_if_new_pod_is_needed() {
        let before = spec_hash(&spec("{}"));
        for changed in [
            r#"{"pod":{"resources":{"limits":{"ephemeral-storage":"1Gi"}}}}"#,
            r#"{"pod":{"etcdEnv":[{"name":"A","value":"1"}]}}"#,
            r#"{"pod":{"nodeSelector":{"disk":"fast"}}}"#,
            r#"{"pod":{"terminationGracePeriodSeconds":5}}"#,
            r#"{"etcd":{"quotaBackendBytes":8589934592}}"#,
            r#"{"TLS":{"static":{"member":{"peerSecret":"p"}}}}"#,
            r#"{"memberAddress":"Pod"}"#,
        ] {
            assert_ne!(spec_hash(&spec(changed)), before, "{changed}");
        }
    }

    #[test]
    fn spec_hash_ignores_lifetime_clients_and_issuers_of_certificates() {
        let of = |more: &str| {
            let tls =
                format!(r#"{{"TLS":{{"certManager":{{"issuerRef":{{"name":"ca"}}{more}}}}}}}"#);
            spec_hash(&spec(&tls))
        };
        for same in [
            r#","duration":"24h""#,
            r#","clients":["app"]"#,
            r#","peerIssuerRef":{"name":"peers"}"#,
        ] {
            assert_eq!(of(same), of(""), "{same}");
        }
        assert_ne!(of(r#","client":false"#), of(""));
        let generated = r#"{"TLS":{"generated":{}}}"#;
        assert_ne!(spec_hash(&spec(generated)), of(""));
    }

    #[test]
    fn spec_hash_ignores_fields_that_need_no_new_pod() {
        let before = spec_hash(&spec("{}"));
        for same in [
            r#"{"size":5}"#,
            r#"{"version":"3.6.16"}"#,
            r#"{"repository":"registry.local/etcd"}"#,
            r#"{"image":"registry.local/etcd@sha256:ab"}"#,
            r#"{"pod":{}}"#,
            r#"{"pod":{"labels":{"team":"a"},"annotations":{"note":"b"}}}"#,
            r#"{"pod":{"resources":{"requests":{"cpu":"1"},"limits":{"memory":"1Gi"}}}}"#,
            r#"{"pod":{"busyboxImage":"busybox","DNSTimeoutInSecond":5}}"#,
            r#"{"pod":{"persistentVolumeClaimSpec":{"accessModes":["ReadWriteOnce"]}}}"#,
        ] {
            assert_eq!(spec_hash(&spec(same)), before, "{same}");
        }
    }
}
