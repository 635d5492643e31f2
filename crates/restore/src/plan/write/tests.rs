//! Tests of the requests of an action.

use api::cluster::TlsPolicy;

use super::*;
use crate::plan::effective;

fn restore(scope: Option<&str>) -> EtcdRestore {
    let spec = r#"{"backup":{"name":"b"},"etcdCluster":{"name":"main","template":{
        "metadata":{"labels":{"team":"a"},"annotations":{"note":"n","etcd.database.coreos.com/scope":"x"}},
        "spec":{"size":3}}}}"#;
    let mut restore = EtcdRestore::new("again", serde_json::from_str(spec).unwrap());
    restore.metadata.uid = Some("restore-uid".into());
    restore.metadata.namespace = Some("prod".into());
    if let Some(scope) = scope {
        restore
            .annotations_mut()
            .insert(ANNOTATION_SCOPE.into(), scope.into());
    }
    restore
}

#[test]
fn created_cluster_has_lock_and_template_metadata() {
    let cluster = locked_cluster(&restore(None), EtcdClusterSpec::default());
    assert_eq!(
        cluster.annotations()["etcd.database.coreos.com/restore"],
        "restore-uid"
    );
    assert_eq!(cluster.annotations()["note"], "n");
    assert_eq!(cluster.labels()["team"], "a");
    assert_eq!(cluster.metadata.namespace.as_deref(), Some("prod"));
}

/// The spec has changed, and the pod with the annotation of the TLS settings is lost.
#[test]
fn recreated_seed_keeps_its_tls_settings() {
    let tls = |text: &str| -> Option<TlsPolicy> { serde_json::from_str(text).unwrap() };
    let (accepts_plaintext, tls_only) = (
        tls(r#"{"generated":{},"acceptPlaintext":true}"#),
        tls(r#"{"generated":{}}"#),
    );
    for at_start in [None, accepts_plaintext, tls_only.clone()] {
        let mut cluster = EtcdCluster::new("main", EtcdClusterSpec::default());
        cluster.spec.tls.clone_from(&at_start);
        let status = formed(&restore(None), &cluster, "ab", Timestamp::UNIX_EPOCH);
        let token = naming::seed(&restore(None)).token;
        assert_eq!(status.bootstrap.as_ref().unwrap().token, token);
        cluster.status = Some(status);
        for changed in [None, tls_only.clone()] {
            cluster.spec.tls = changed;
            for locked in [true, false] {
                assert_eq!(effective::policy(&cluster, None, locked), at_start);
            }
        }
    }
}

#[test]
fn created_cluster_has_scope_of_restore() {
    let scope = |scope| {
        let cluster = locked_cluster(&restore(scope), EtcdClusterSpec::default());
        cluster.annotations().get(ANNOTATION_SCOPE).cloned()
    };
    assert_eq!(scope(Some("clusterwide")).as_deref(), Some("clusterwide"));
    assert_eq!(scope(None), None);
}
