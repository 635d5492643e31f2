//! A hash of what the spec says about pods, to see whether a pod was made for the spec as it is now.

use std::fmt::Write as _;

use api::cluster::EtcdClusterSpec;
use sha2::{Digest, Sha256};

/// Sixteen hexadecimal digits. What a member's pod does not depend on (size, version, volumes) is left out: the
/// version stands in an annotation of its own, a volume is changed without its pod. The hash is of the user's
/// words, not of the built pod: a new release of the operator restarts nobody's members.
pub fn spec_hash(spec: &EtcdClusterSpec) -> String {
    let mut pod = spec.pod.clone().unwrap_or_default();
    pod.persistent_volume_claim_spec = None;
    let said = serde_json::json!({
        "pod": pod,
        "etcd": spec.etcd,
        "repository": spec.repository,
        "memberAddress": spec.member_address,
        "tls": spec.tls,
    });
    let digest = Sha256::digest(without_nulls(said).to_string());
    digest.iter().take(8).fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// An absent field and one that says nothing are the same.
fn without_nulls(value: serde_json::Value) -> serde_json::Value {
    use serde_json::Value;
    match value {
        Value::Object(fields) => {
            let said = fields
                .into_iter()
                .map(|(key, value)| (key, without_nulls(value)));
            Value::Object(said.filter(|(_, value)| !is_empty(value)).collect())
        }
        other => other,
    }
}

fn is_empty(value: &serde_json::Value) -> bool {
    use serde_json::Value;
    match value {
        Value::Null => true,
        Value::Object(fields) => fields.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::spec;
    use super::*;

    #[test]
    fn the_hash_changes_with_what_the_pod_depends_on() {
        let before = spec_hash(&spec("{}"));
        assert_eq!(before.len(), 16);
        for changed in [
            r#"{"pod":{"labels":{"team":"a"}}}"#,
            r#"{"pod":{"resources":{"limits":{"memory":"1Gi"}}}}"#,
            r#"{"etcd":{"quotaBackendBytes":8589934592}}"#,
            r#"{"repository":"registry.local/etcd"}"#,
            r#"{"memberAddress":"Pod"}"#,
        ] {
            assert_ne!(spec_hash(&spec(changed)), before, "{changed}");
        }
    }

    #[test]
    fn the_hash_ignores_what_no_pod_depends_on() {
        let before = spec_hash(&spec("{}"));
        for same in [
            r#"{"size":5}"#,
            r#"{"version":"3.6.16"}"#,
            r#"{"pod":{}}"#,
            r#"{"pod":{"persistentVolumeClaimSpec":{"accessModes":["ReadWriteOnce"]}}}"#,
        ] {
            assert_eq!(spec_hash(&spec(same)), before, "{same}");
        }
    }
}
