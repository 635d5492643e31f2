//! Reads the Secrets of generated certificates one by one, by name: the operator has no permission to list or watch
//! Secrets.

use std::collections::BTreeSet;

use api::EtcdCluster;
use api::cluster::TlsPolicy;
use api::names::{self, CertificateUse};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret, Service};
use kube::{Api, Client, ResourceExt};
use member::tls::FaultKind;

use crate::certificates::{rule, seed};
use crate::snapshot::Observed;

/// Reads the Secrets of the certificates that the operator generates under the TLS policy in effect.
pub(super) async fn read(
    client: &Client,
    (cluster, tls): (&EtcdCluster, Option<&TlsPolicy>),
    (pods, claims, services): (&[Pod], &[PersistentVolumeClaim], &[Service]),
) -> Result<Vec<Secret>, kube::Error> {
    let Some(rule) = rule(cluster, tls) else {
        return Ok(Vec::new());
    };
    let mut wanted: BTreeSet<String> = rule
        .scopes()
        .map(|scope| scope.secret(&rule.cluster))
        .collect();
    let of_cluster = rule.uses_of_cluster();
    wanted.extend(of_cluster.map(|used| names::certificate_secret(&rule.cluster, used)));
    let status = cluster.status.as_ref();
    let first = status.and_then(|status| status.bootstrap.as_ref());
    let first = first
        .into_iter()
        .flat_map(|bootstrap| bootstrap.members.clone());
    let member = |service: &Service| service.labels().get(names::LABEL_MEMBER).cloned();
    let members: BTreeSet<String> = pods
        .iter()
        .map(ResourceExt::name_any)
        .chain(claims.iter().map(ResourceExt::name_any))
        .chain(services.iter().filter_map(member))
        .chain(first)
        .chain(seed(cluster))
        .collect();
    for member in &members {
        wanted.extend(
            rule.uses_of_member()
                .map(|used| names::certificate_secret(member, used)),
        );
    }
    let api = Api::<Secret>::namespaced(client.clone(), &rule.namespace);
    let reads = try_join_all(wanted.iter().map(|name| api.get_opt(name)));
    Ok(reads.await?.into_iter().flatten().collect())
}

/// Removes `SecretMissing` from the TLS faults if the operator will create the Secret of its own certificate.
pub(super) fn expect(observed: &mut Observed) {
    let certificates = &observed.certificates;
    if let Some(rule) = &certificates.rule
        && certificates
            .leaf(&rule.cluster, CertificateUse::Operator)
            .is_none()
    {
        observed
            .tls
            .faults
            .retain(|fault| fault.code != FaultKind::SecretMissing);
    }
}

/// Records that a pod must be recreated if its etcd trusts outdated CAs. Instead of recreating a pod without a volume,
/// the operator replaces its member, so this pod is recorded only if the running members would accept a new member.
pub(super) fn differ(observed: &mut Observed) {
    let certificates = &observed.certificates;
    let running = observed.pods.iter().filter(|(_, pod)| pod.running);
    let running: Vec<&String> = running.map(|(member, _)| member).collect();
    let takes_part = certificates.accepts_new_members(running.iter().copied());
    for (member, pod) in &mut observed.pods {
        if let Some(why) = observed.certificates.outdated(member)
            && (pod.durable || takes_part)
        {
            pod.difference.pod.get_or_insert(why);
        }
    }
}
