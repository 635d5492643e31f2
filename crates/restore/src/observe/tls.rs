//! Reads the certificates of the target cluster, and reports their problems.

use api::EtcdCluster;
use api::problem::Problem;
use jiff::Timestamp;
use kube::{Client, ResourceExt};
use member::tls::{ClusterTls, FaultKind};

/// Reads the Secrets with the certificates of the cluster.
pub(super) async fn read(client: &Client, namespace: &str, cluster: &EtcdCluster) -> ClusterTls {
    let name = cluster.name_any();
    let policy = cluster.spec.tls.as_ref();
    runtime::reach::cluster_tls(client, (namespace, &name), policy).await
}

/// The problems of the certificates. No seed starts with invalid certificates (invariant 20).
pub(super) fn problems(cluster: &EtcdCluster, tls: &ClusterTls) -> Vec<Problem> {
    let generated = cluster
        .spec
        .tls
        .as_ref()
        .is_some_and(|tls| tls.generated.is_some());
    // With `generated`, a missing Secret is no fault, because the cluster operator generates the Secrets only after the
    // EtcdCluster exists.
    let mut faults = tls.faults(&member::addresses(cluster), Timestamp::now());
    faults.retain(|fault| !(generated && fault.code == FaultKind::SecretMissing));
    let problem = |fault: member::tls::Fault| {
        let what = fault.message.replacen(fault.purpose.field(), "", 1);
        let what = what.trim_start_matches(": ").to_owned();
        Problem::new(fault.purpose.field(), what, "and the restore continues")
    };
    faults.into_iter().map(problem).collect()
}
