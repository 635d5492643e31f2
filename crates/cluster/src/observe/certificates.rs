//! The Secrets of generated certificates, read by name, one by one: the operator may neither list nor watch Secrets.

use std::collections::BTreeSet;

use api::EtcdCluster;
use api::cluster::TlsPolicy;
use api::names::{self, CertificateUse};
use futures::future::join_all;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret, Service};
use kube::{Api, Client, ResourceExt};

use crate::certificates::{Certificates, rule};
use crate::observed::Observed;

/// Reads what there may be of generated certificates.
pub(super) async fn read(
    client: &Client,
    cluster: &EtcdCluster,
    (pods, claims, services): (&[Pod], &[PersistentVolumeClaim], &[Service]),
) -> Result<Certificates, kube::Error> {
    let Some(rule) = rule(cluster) else {
        return Ok(Certificates::new(cluster, &[], pods));
    };
    let mut wanted: BTreeSet<String> = rule
        .circles()
        .map(|circle| circle.secret(&rule.cluster))
        .collect();
    if rule.clients {
        for used in [CertificateUse::Operator, CertificateUse::Client] {
            wanted.insert(names::certificate_secret(&rule.cluster, used));
        }
    }
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
        .chain(Certificates::new(cluster, &[], &[]).seed)
        .collect();
    for member in &members {
        wanted.extend(
            rule.uses_of_member()
                .map(|used| names::certificate_secret(member, used)),
        );
    }
    let api = Api::<Secret>::namespaced(client.clone(), &rule.namespace);
    let reads = wanted.iter().map(|name| api.get_opt(name));
    let mut secrets = Vec::new();
    for read in join_all(reads).await {
        secrets.extend(read?);
    }
    Ok(Certificates::new(cluster, &secrets, pods))
}

/// How members talk, and by whose certificates.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Plain,
    Static,
    Generated,
}

/// Between members, and towards clients.
fn ways(policy: Option<&TlsPolicy>) -> (Way, Way) {
    let Some(policy) = policy else {
        return (Way::Plain, Way::Plain);
    };
    let by = if policy.generated.is_some() {
        Way::Generated
    } else {
        Way::Static
    };
    let way = |used: bool| if used { by } else { Way::Plain };
    (way(policy.encrypts_peers()), way(policy.encrypts_clients()))
}

/// The policy a pod was made with: it stands on it, and where it does not, its arguments tell of a pod without TLS.
#[expect(
    clippy::option_option,
    reason = "without TLS is something else than unknown"
)]
fn made_with(pod: &Pod) -> Option<Option<TlsPolicy>> {
    if let Some(said) = pod.annotations().get(names::ANNOTATION_TLS) {
        return serde_json::from_str(said).ok();
    }
    let containers = pod.spec.as_ref()?.containers.iter();
    let mut etcd = containers.filter(|container| container.name == names::CONTAINER_ETCD);
    let arguments = etcd.next()?.args.as_ref()?;
    let listens = |argument: &&String| argument.starts_with("--listen-");
    let mut urls = arguments.iter().filter(listens).peekable();
    urls.peek()?;
    urls.all(|argument| argument.contains("=http://"))
        .then_some(None)
}

/// A cluster that runs stays with the way its members talk: a member that speaks TLS and one that does not cannot reach
/// each other, and those that trust different authorities neither. What the spec asks for instead is said to be refused,
/// and the cluster goes on as it is.
pub(super) fn as_it_runs(cluster: &mut EtcdCluster, pods: &[Pod]) -> Option<String> {
    let wanted = ways(cluster.spec.tls.as_ref());
    let uid = cluster.uid()?;
    let ours = |pod: &&Pod| pod.owner_references().iter().any(|owner| owner.uid == uid);
    let running: Vec<Option<TlsPolicy>> = pods.iter().filter(ours).filter_map(made_with).collect();
    let is_wanted = |policy: &Option<TlsPolicy>| ways(policy.as_ref()) == wanted;
    if running.is_empty() || running.iter().any(is_wanted) {
        return None;
    }
    cluster.spec.tls = running.into_iter().next()?;
    let text = "TLS cannot be switched on, off, or between static and generated, while members run: the cluster goes on \
                as it was; set spec.TLS back, or restore a backup into a new cluster that has it";
    Some(text.to_owned())
}

/// A certificate that is yet to be made is no fault.
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
            .retain(|fault| fault.code != "SecretMissing");
    }
}

/// A pod whose etcd trusts others than it should has to be made anew.
pub(super) fn differ(observed: &mut Observed) {
    for (member, pod) in &mut observed.pods {
        if let Some(why) = observed.certificates.outdated(member) {
            pod.difference.pod.get_or_insert(why);
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{Container, PodSpec};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

    use super::*;

    fn cluster(tls: &str) -> EtcdCluster {
        let spec =
            serde_json::json!({ "TLS": serde_json::from_str::<serde_json::Value>(tls).unwrap() });
        let mut cluster = EtcdCluster::new("db", serde_json::from_value(spec).unwrap());
        cluster.metadata.uid = Some("uid".into());
        cluster
    }

    fn pod(said: Option<&str>, scheme: &str) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.owner_references = Some(vec![OwnerReference {
            uid: "uid".into(),
            ..OwnerReference::default()
        }]);
        if let Some(said) = said {
            pod.annotations_mut()
                .insert(names::ANNOTATION_TLS.into(), said.into());
        }
        pod.spec = Some(PodSpec {
            containers: vec![Container {
                name: names::CONTAINER_ETCD.into(),
                args: Some(vec![format!("--listen-peer-urls={scheme}://0.0.0.0:2380")]),
                ..Container::default()
            }],
            ..PodSpec::default()
        });
        pod
    }

    #[test]
    fn invariant_20_a_cluster_that_runs_is_not_switched() {
        for (wanted, said, scheme) in [
            (r#"{"generated":{}}"#, None, "http"),
            (r#"{"generated":{}}"#, Some("null"), "http"),
            ("null", Some(r#"{"generated":{}}"#), "https"),
            (
                r#"{"generated":{"peer":false}}"#,
                Some(r#"{"generated":{}}"#),
                "https",
            ),
        ] {
            let mut cluster = cluster(wanted);
            assert!(
                as_it_runs(&mut cluster, &[pod(said, scheme)]).is_some(),
                "{wanted}"
            );
            let kept = serde_json::to_string(&cluster.spec.tls).unwrap();
            assert_eq!(kept, said.unwrap_or("null"));
        }
    }

    #[test]
    fn what_members_see_without_a_switch_is_followed() {
        for (wanted, said, scheme) in [
            ("null", None, "http"),
            (
                r#"{"generated":{"certificateDuration":"5m"}}"#,
                Some(r#"{"generated":{}}"#),
                "https",
            ),
            // Who knows.
            (r#"{"generated":{}}"#, None, "https"),
        ] {
            let mut cluster = cluster(wanted);
            assert_eq!(as_it_runs(&mut cluster, &[pod(said, scheme)]), None);
            assert_eq!(serde_json::to_string(&cluster.spec.tls).unwrap(), wanted);
        }
        assert_eq!(as_it_runs(&mut cluster(r#"{"generated":{}}"#), &[]), None);
    }
}
