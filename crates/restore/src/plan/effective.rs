//! The spec in effect: the TLS settings and address format with which members are started. `spec.TLS` may change at any
//! time, and the cluster operator rolls the change out in steps. Until then the operators connect to the members with
//! the settings in effect. The seed's pod records its own settings. Pure.

use api::EtcdCluster;
use api::cluster::TlsPolicy;
use api::names::ANNOTATION_TLS;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use member::tls::ClusterTls;

use crate::snapshot::is_in_the_way;

/// The TLS settings in the annotation of the seed's pod, if the pod belongs to the cluster.
#[expect(
    clippy::option_option,
    reason = "without TLS is something else than unknown"
)]
fn noted(seed: &Pod, owner: &str) -> Option<Option<TlsPolicy>> {
    if is_in_the_way(seed, owner) {
        return None;
    }
    serde_json::from_str(seed.annotations().get(ANNOTATION_TLS)?).ok()
}

/// The TLS settings in effect. With the restore lock, those of the seed's pod come first, otherwise the recorded ones
/// of the current cluster token. Without either, `spec.TLS` counts.
pub fn policy(cluster: &EtcdCluster, seed: Option<&Pod>, claimed: bool) -> Option<TlsPolicy> {
    let owner = cluster.metadata.uid.as_deref().unwrap_or_default();
    let of_seed = seed.and_then(|seed| noted(seed, owner));
    let status = cluster.status.as_ref();
    let token = status.and_then(|status| Some(&status.bootstrap.as_ref()?.token));
    let record = status.and_then(|status| status.tls.as_ref());
    let recorded = record
        .filter(|record| Some(&record.token) == token)
        .map(api::cluster::TlsStatus::policy);
    let known = if claimed {
        of_seed.or(recorded)
    } else {
        recorded.or(of_seed)
    };
    known.unwrap_or_else(|| cluster.spec.tls.clone())
}

/// The EtcdCluster with the TLS settings in effect.
pub(crate) fn as_started(cluster: &EtcdCluster, seed: Option<&Pod>, claimed: bool) -> EtcdCluster {
    let mut effective = cluster.clone();
    effective.spec.tls = policy(cluster, seed, claimed);
    effective
}

/// Adds the address format that the certificates cover.
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

    /// A cluster with recorded TLS settings and other settings in its spec.
    fn cluster(recorded: Option<&str>, wanted: &str) -> EtcdCluster {
        let record = recorded.map(|said| api::cluster::TlsStatus::new("t", tls(said).as_ref()));
        let wanted: serde_json::Value = serde_json::from_str(wanted).unwrap();
        serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "db", "uid": "u" },
            "spec": { "TLS": wanted },
            "status": { "bootstrap": { "token": "t", "members": [] }, "TLS": record },
        }))
        .unwrap()
    }

    fn seed(owner: &str, said: &str) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.owner_references = Some(vec![
            serde_json::from_value(json!({ "apiVersion": "v1", "kind": "k",
            "name": "db", "uid": owner }))
            .unwrap(),
        ]);
        pod.annotations_mut()
            .insert(ANNOTATION_TLS.to_owned(), said.to_owned());
        pod
    }

    const INSISTS: &str = r#"{"generated":{}}"#;
    const ACCEPTS: &str = r#"{"generated":{},"acceptPlaintext":true}"#;

    #[test]
    fn tls_settings_in_effect_override_spec() {
        // The spec requests a TLS switch that has not started.
        let switched = cluster(Some(INSISTS), ACCEPTS);
        assert_eq!(policy(&switched, None, true), tls(INSISTS));
        assert_eq!(policy(&switched, None, false), tls(INSISTS));
        // With the lock, the settings of the seed count. The record belongs to the old cluster.
        let plain = seed("u", "null");
        assert_eq!(policy(&switched, Some(&plain), true), None);
        assert_eq!(policy(&switched, Some(&plain), false), tls(INSISTS));
        let mut turned = switched.clone();
        let bootstrap = turned.status.as_mut().and_then(|it| it.bootstrap.as_mut());
        bootstrap.unwrap().token = "restore-1".into();
        assert_eq!(policy(&turned, Some(&plain), false), None);
        // The pod of another owner does not count.
        let theirs = seed("another", "null");
        assert_eq!(policy(&switched, Some(&theirs), true), tls(INSISTS));
        assert_eq!(policy(&turned, Some(&theirs), false), tls(ACCEPTS));
        assert_eq!(policy(&cluster(None, INSISTS), None, true), tls(INSISTS));
    }
}
