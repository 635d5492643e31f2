//! A hash of what the spec says about pods, to see whether a running pod has to be made anew.
//!
//! It is of the user's words, not of the built pod: a new release of the operator that builds pods differently
//! restarts nobody's members ([ADR 14](../../../../docs/adr/0014-what-rolls-out.md)). The hash of the same words is the
//! same in every release; a test pins it. A release that has to hash other words gives the form another number and
//! continues to recognize the older forms.

use std::collections::BTreeMap;

use api::cluster::{EtcdClusterSpec, TlsPolicy};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// The form of the hash, in front of it.
const FORM: &str = "1-";

/// The form's number and sixteen hexadecimal digits. Only what a pod cannot take while it runs: the image stands in
/// the pod and the version in an annotation; a volume is changed without its pod; labels, annotations, CPU and memory
/// are changed in place (`difference`).
pub fn spec_hash(spec: &EtcdClusterSpec) -> String {
    let mut pod = spec.pod.clone().unwrap_or_default();
    pod.persistent_volume_claim_spec = None;
    pod.labels.clear();
    pod.annotations.clear();
    // Without effect, so no difference.
    pod.busybox_image = None;
    pod.dns_timeout_in_second = None;
    if let Some(resources) = &mut pod.resources {
        for side in [&mut resources.requests, &mut resources.limits] {
            let side = side.iter_mut();
            side.for_each(|all| all.retain(|name, _| !is_resizable(name)));
        }
    }
    let said = serde_json::json!({
        "pod": pod,
        "etcd": spec.etcd,
        "memberAddress": spec.member_address,
        "tls": spec.tls.as_ref().map(said_of_tls),
    });
    format!("{FORM}{}", digest(said))
}

/// Of generated certificates a pod depends on which there are; how long they are valid and for which names it sees
/// without a restart.
fn said_of_tls(tls: &TlsPolicy) -> Value {
    match tls.generated() {
        Some(generated) => serde_json::json!({
            "generated": { "peer": generated.peer(), "client": generated.client() },
            "acceptPlaintext": tls.accept_plaintext,
            "peerStage": tls.peer_stage,
        }),
        None => serde_json::json!(tls),
    }
}

fn digest(said: Value) -> String {
    let digest = Sha256::digest(said_only(said).to_string());
    hex::encode(&digest[..8])
}

/// An absent field and one that says nothing are the same; fields in the order of their names.
pub(super) fn said_only(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let said = fields
                .into_iter()
                .map(|(key, value)| (key, said_only(value)));
            let said: BTreeMap<String, Value> =
                said.filter(|(_, value)| !is_empty(value)).collect();
            Value::Object(said.into_iter().collect())
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

/// Kubernetes changes these two in a running container.
pub(super) fn is_resizable(resource: &str) -> bool {
    matches!(resource, "cpu" | "memory")
}

#[cfg(test)]
mod tests {
    use super::super::fixture::spec;
    use super::*;

    const MUCH: &str = r#"{"repository":"registry.local/etcd","memberAddress":"Pod",
        "etcd":{"quotaBackendBytes":8589934592,"autoCompactionMode":"periodic","heartbeatInterval":"200ms"},
        "TLS":{"static":{"member":{"peerSecret":"p","serverSecret":"s"},"operatorSecret":"o"}},
        "pod":{"labels":{"team":"a"},"annotations":{"note":"b"},"nodeSelector":{"disk":"fast"},"antiAffinity":true,
            "tolerations":[{"key":"a","operator":"Exists"}],"etcdEnv":[{"name":"A","value":"1"}],
            "resources":{"requests":{"cpu":"1","ephemeral-storage":"1Gi"},"limits":{"memory":"1Gi"}},
            "extraArgs":["--log-level=debug"],"terminationGracePeriodSeconds":20,"priorityClassName":"high"}}"#;

    /// A release that changes one of these restarts the members of everybody: give the form another number instead,
    /// and recognise this one.
    #[test]
    fn the_hash_of_the_same_words_is_the_same_in_every_release() {
        assert_eq!(spec_hash(&spec("{}")), "1-44136fa355b3678a");
        assert_eq!(spec_hash(&spec(MUCH)), "1-5ef8befa2e869d57");
    }

    #[test]
    fn the_hash_changes_with_what_a_running_pod_cannot_take() {
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
    fn the_hash_ignores_what_no_pod_depends_on_and_what_is_changed_in_place() {
        let before = spec_hash(&spec("{}"));
        for same in [
            r#"{"size":5}"#,
            r#"{"version":"3.6.16"}"#,
            r#"{"repository":"registry.local/etcd"}"#,
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
