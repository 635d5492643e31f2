//! Determines the TLS settings and the address format with which the members were started. After a change of
//! `spec.TLS`, the cluster operator changes the members in steps, and connections need the old settings until the last
//! step. An annotation of the seed's pod records the settings of the seed. Performs no I/O.

use api::EtcdCluster;
use api::cluster::TlsPolicy;
use api::names::ANNOTATION_TLS;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use member::tls::ClusterTls;

use crate::snapshot::takes_name;

/// The TLS settings in the annotation of the seed's pod. The outer `None` means that there is no annotation, or that
/// the pod has another owner.
#[expect(
    clippy::option_option,
    reason = "the inner None means no TLS, the outer None means unknown"
)]
fn tls_of_seed(seed: &Pod, owner: &str) -> Option<Option<TlsPolicy>> {
    if takes_name(seed, owner) {
        return None;
    }
    serde_json::from_str(seed.annotations().get(ANNOTATION_TLS)?).ok()
}

/// Returns the TLS settings in effect. They are recorded in the annotation of the seed's pod, and in `status.tls` of
/// the EtcdCluster for its current token. If both exist, the annotation has priority while the restore holds the lock
/// (`locked`), and the status has priority without the lock. If neither exists, `spec.TLS` applies.
pub fn policy(cluster: &EtcdCluster, seed: Option<&Pod>, locked: bool) -> Option<TlsPolicy> {
    let owner = cluster.metadata.uid.as_deref().unwrap_or_default();
    let of_seed = seed.and_then(|seed| tls_of_seed(seed, owner));
    let status = cluster.status.as_ref();
    let token = status.and_then(|status| Some(&status.bootstrap.as_ref()?.token));
    let record = status.and_then(|status| status.tls.as_ref());
    let recorded = record
        .filter(|record| Some(&record.token) == token)
        .map(api::cluster::TlsStatus::policy);
    let known = if locked {
        of_seed.or(recorded)
    } else {
        recorded.or(of_seed)
    };
    known.unwrap_or_else(|| cluster.spec.tls.clone())
}

/// The EtcdCluster with the TLS settings in effect.
pub(crate) fn as_started(cluster: &EtcdCluster, seed: Option<&Pod>, locked: bool) -> EtcdCluster {
    let mut effective = cluster.clone();
    effective.spec.tls = policy(cluster, seed, locked);
    effective
}

/// The EtcdCluster with the address format that its certificates allow.
pub(crate) fn as_addressed(
    mut effective: EtcdCluster,
    namespace: &str,
    certificates: &ClusterTls,
) -> EtcdCluster {
    let name = effective.name_any();
    certificates.complete_spec(&mut effective.spec, (namespace, &name), None);
    effective
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tls(text: &str) -> Option<TlsPolicy> {
        serde_json::from_str(text).unwrap()
    }

    /// A cluster whose status may record other TLS settings than its spec.
    fn cluster(recorded: Option<&str>, spec: &str) -> EtcdCluster {
        let record = recorded.map(|text| api::cluster::TlsStatus::new("t", tls(text).as_ref()));
        let spec: serde_json::Value = serde_json::from_str(spec).unwrap();
        serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "db", "uid": "u" },
            "spec": { "TLS": spec },
            "status": { "bootstrap": { "token": "t", "members": [] }, "TLS": record },
        }))
        .unwrap()
    }

    fn seed(owner: &str, tls: &str) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.owner_references = Some(vec![
            serde_json::from_value(json!({ "apiVersion": "v1", "kind": "k",
            "name": "db", "uid": owner }))
            .unwrap(),
        ]);
        pod.annotations_mut()
            .insert(ANNOTATION_TLS.to_owned(), tls.to_owned());
        pod
    }

    const TLS_ONLY: &str = r#"{"generated":{}}"#;
    const ACCEPTS_PLAINTEXT: &str = r#"{"generated":{},"acceptPlaintext":true}"#;

    #[test]
    fn tls_settings_in_effect_override_spec() {
        // The cluster operator has not applied the new TLS settings in the spec yet, so the settings in the status are
        // in effect.
        let switched = cluster(Some(TLS_ONLY), ACCEPTS_PLAINTEXT);
        assert_eq!(policy(&switched, None, true), tls(TLS_ONLY));
        assert_eq!(policy(&switched, None, false), tls(TLS_ONLY));
        // While the restore holds the lock, the settings of the seed's pod have priority, because the status describes
        // the old cluster.
        let plain = seed("u", "null");
        assert_eq!(policy(&switched, Some(&plain), true), None);
        assert_eq!(policy(&switched, Some(&plain), false), tls(TLS_ONLY));
        let mut cut_over = switched.clone();
        let bootstrap = cut_over
            .status
            .as_mut()
            .and_then(|it| it.bootstrap.as_mut());
        bootstrap.unwrap().token = "restore-1".into();
        assert_eq!(policy(&cut_over, Some(&plain), false), None);
        // A pod that another EtcdCluster owns is ignored.
        let foreign = seed("another", "null");
        assert_eq!(policy(&switched, Some(&foreign), true), tls(TLS_ONLY));
        assert_eq!(
            policy(&cut_over, Some(&foreign), false),
            tls(ACCEPTS_PLAINTEXT)
        );
        assert_eq!(policy(&cluster(None, TLS_ONLY), None, true), tls(TLS_ONLY));
    }
}
