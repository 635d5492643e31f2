//! Reads the certificates of the target cluster, and reports their problems.

use api::EtcdCluster;
use api::cluster::TlsPolicy;
use api::problem::Problem;
use jiff::Timestamp;
use kube::{Client, ResourceExt};
use member::tls::{ClusterTls, Fault, FaultKind};

/// Reads the Secrets with the certificates of the cluster.
pub(super) async fn read(client: &Client, namespace: &str, cluster: &EtcdCluster) -> ClusterTls {
    let name = cluster.name_any();
    let policy = cluster.spec.tls.as_ref();
    runtime::reach::cluster_tls(client, (namespace, &name), policy).await
}

/// The problems of the certificates. No seed starts with invalid certificates (invariant 20).
pub(super) fn problems(cluster: &EtcdCluster, tls: &ClusterTls) -> Vec<Problem> {
    let policy = cluster.spec.tls.as_ref();
    let written = policy.is_some_and(TlsPolicy::is_written_by_operator);
    // If the cluster operator provides the certificates, a missing Secret or certificate is no problem, because the
    // cluster operator creates them only after the EtcdCluster exists.
    let is_missing = |code: FaultKind| {
        matches!(
            code,
            FaultKind::SecretMissing | FaultKind::CertificateNotIssued
        )
    };
    let mut faults = tls.faults(&member::addresses(cluster), Timestamp::now());
    faults.retain(|fault| !(written && is_missing(fault.code)));
    let problem = |fault: Fault| {
        let fault = fault.in_policy(policy, "");
        let (field, what) = fault.message.split_once(": ").unwrap_or_default();
        Problem::new(field, what, "and the restore continues")
    };
    faults.into_iter().map(problem).collect()
}
