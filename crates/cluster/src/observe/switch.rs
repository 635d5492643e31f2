//! Determines, without I/O, the TLS settings with which members were started: from `status.TLS`, the pods and the PVCs.

use std::collections::{BTreeMap, BTreeSet};

use api::EtcdCluster;
use api::cluster::{PeerListener, PeerStage, TlsPolicy};
use api::names::{self, CertificateUse};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::ResourceExt;

use super::{children, pods};
use crate::switch::{Clients, Maker, Started, TlsMode};

const PEERS: &str = "--listen-peer-urls=";
const CLIENTS: &str = "--listen-client-urls=";

/// The TLS policy of a pod, from its annotation. Without the annotation, the arguments may show a pod without TLS.
#[expect(
    clippy::option_option,
    reason = "the inner None means no TLS, the outer None means unknown"
)]
fn made_with(pod: &Pod) -> Option<Option<TlsPolicy>> {
    if let Some(said) = pod.annotations().get(names::ANNOTATION_TLS) {
        return serde_json::from_str(said).ok();
    }
    let mut urls = pods::arguments(pod)
        .filter(|argument| argument.starts_with("--listen-"))
        .peekable();
    urls.peek()?;
    urls.all(|argument| argument.contains("=http://"))
        .then_some(None)
}

/// The TLS mode of a member according to its flags, no matter which software created the pod.
fn mode(pod: &Pod) -> Option<TlsMode> {
    let listeners = pods::argument(pod, PEERS)?
        .split(',')
        .map(listener)
        .collect::<Option<BTreeSet<_>>>()?;
    let same =
        |stage: &PeerStage| stage.listeners().iter().copied().collect::<BTreeSet<_>>() == listeners;
    let peers = PeerStage::ALL.into_iter().find(same)?;
    let urls = pods::argument(pod, CLIENTS)?;
    let clients = match (urls.contains("http://"), urls.contains("https://")) {
        (true, true) => Clients::Both,
        (false, true) => Clients::Tls,
        _ => Clients::Plain,
    };
    let name = pod.name_any();
    let own = [CertificateUse::Peer, CertificateUse::Server]
        .map(|used| names::certificate_secret(&name, used));
    let mut secrets =
        pods::volumes(pod).filter_map(|volume| volume.secret.as_ref()?.secret_name.as_ref());
    let issued = made_with(pod)
        .flatten()
        .is_some_and(|tls| tls.cert_manager.is_some());
    let maker = if secrets.any(|secret| own.contains(secret)) {
        Maker::Operator
    } else if issued {
        Maker::CertManager
    } else {
        Maker::Others
    };
    let encrypts = peers != PeerStage::Plain || clients != Clients::Plain;
    Some(TlsMode {
        peers,
        clients,
        maker: encrypts.then_some(maker),
    })
}

fn listener(url: &str) -> Option<PeerListener> {
    let (scheme, rest) = url.split_once("://")?;
    let (_, port) = rest.rsplit_once(':')?;
    Some((scheme == "https", port.parse().ok()?))
}

/// True if a member accepts only clients with TLS, according to its flags. `None` if the pod has no such flags.
pub(super) fn insists_on_tls(pod: &Pod) -> Option<bool> {
    let urls = pods::argument(pod, CLIENTS)?;
    Some(!urls.contains("http://"))
}

/// The client URL of each pod's etcd. It contains the pod's IP address, so the operator depends neither on DNS nor on
/// Service routing.
pub(super) fn client_urls(pods: &[Pod], cluster: &EtcdCluster) -> BTreeMap<String, String> {
    let addresses = member::addresses(cluster);
    let url = |pod: &Pod| {
        let text = pod.status.as_ref()?.pod_ip.as_ref()?;
        let name = pod.name_any();
        let mut addresses = addresses.clone();
        if let Some(insists) = insists_on_tls(pod) {
            addresses.client_tls = insists;
        }
        Some(match text.parse() {
            Ok(address) => addresses.client_url_at(address, &name),
            Err(_) => addresses.client_url(&name),
        })
    };
    let pods = pods.iter();
    pods.filter_map(|pod| Some((pod.name_any(), url(pod)?)))
        .collect()
}

/// The TLS settings with which a member was started, from the annotation of its retained PVC.
#[expect(
    clippy::option_option,
    reason = "the inner None means no TLS, the outer None means unknown"
)]
fn kept_with(claim: &PersistentVolumeClaim) -> Option<Option<TlsPolicy>> {
    serde_json::from_str(claim.annotations().get(names::ANNOTATION_TLS)?).ok()
}

/// The TLS settings with which members were started, according to `status.TLS` and the pods. Without pods, according
/// to the retained PVCs.
pub(super) fn started(
    cluster: &EtcdCluster,
    pods: &[Pod],
    claims: &[PersistentVolumeClaim],
) -> Started {
    let uid = cluster.uid().unwrap_or_default();
    let status = cluster.status.as_ref();
    let token = status.and_then(|status| Some(&status.bootstrap.as_ref()?.token));
    // Pods with another token are ignored, because they belong to a cluster that a recovery or a restore has replaced.
    let ours = |pod: &&Pod| {
        let of = pod.annotations().get(names::ANNOTATION_CLUSTER_TOKEN);
        // A pod without the token annotation counts only if this EtcdCluster owns it. A pod with the current token
        // counts even without an owner, because the operator adopts it later.
        let owned = || pod.owner_references().iter().any(|owner| owner.uid == uid);
        let belongs = children::belongs(&pod.metadata, &uid).is_some();
        belongs && of.map_or_else(owned, |of| Some(of) == token)
    };
    let ours = || pods.iter().filter(ours);
    let record = status.and_then(|status| status.tls.as_ref());
    let record = record.filter(|record| Some(&record.token) == token && record.is_consistent());
    let mut made: BTreeMap<_, _> = ours()
        .filter_map(|pod| Some((pod.name_any(), made_with(pod)?)))
        .collect();
    if made.is_empty() {
        // Invariant 23: without pods, the TLS settings in the annotations of the PVCs are used. If the EtcdCluster was
        // deleted and created again, its members thus start with their previous TLS settings.
        let of_token = |claim: &&PersistentVolumeClaim| {
            let of = claim.annotations().get(names::ANNOTATION_CLUSTER_TOKEN);
            token.is_some() && of == token && children::belongs(&claim.metadata, &uid).is_some()
        };
        let claims = claims.iter().filter(of_token);
        made = claims
            .filter_map(|claim| Some((claim.name_any(), kept_with(claim)?)))
            .collect();
    }
    Started {
        record: record.cloned(),
        made,
        modes: ours()
            .filter_map(|pod| Some((pod.name_any(), mode(pod)?)))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use api::cluster::{BootstrapStatus, EtcdClusterStatus, TlsStatus};
    use k8s_openapi::api::core::v1::{Container, PodSpec};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

    use super::*;
    use crate::switch::TlsRollout;

    const BETWEEN: &str = r#"{"static":{"member":{"peerSecret":"p"}}}"#;
    const CLIENTS_TOO: &str =
        r#"{"static":{"member":{"peerSecret":"p","serverSecret":"s"},"operatorSecret":"o"}}"#;

    fn policy(text: &str) -> Option<TlsPolicy> {
        serde_json::from_str(text).unwrap()
    }

    fn cluster(tls: &str) -> EtcdCluster {
        let spec =
            serde_json::json!({ "TLS": serde_json::from_str::<serde_json::Value>(tls).unwrap() });
        let mut cluster = EtcdCluster::new("db", serde_json::from_value(spec).unwrap());
        cluster.metadata.uid = Some("uid".into());
        cluster.status = Some(EtcdClusterStatus {
            bootstrap: Some(BootstrapStatus {
                token: "token".into(),
                members: Vec::new(),
            }),
            ..EtcdClusterStatus::default()
        });
        cluster
    }

    fn recorded(wanted: &str, record: Option<&TlsPolicy>, token: &str) -> EtcdCluster {
        let mut cluster = cluster(wanted);
        if let Some(status) = &mut cluster.status {
            status.tls = Some(TlsStatus::new(token, record));
        }
        cluster
    }

    fn rollout(cluster: &EtcdCluster, pods: &[Pod]) -> TlsRollout {
        TlsRollout::of(&started(cluster, pods, &[]), cluster.spec.tls.as_ref())
    }

    fn pod(said: Option<&str>, scheme: &str) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.name = Some("db-a".into());
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
                args: Some(vec![
                    format!("--listen-peer-urls={scheme}://0.0.0.0:2380"),
                    format!("--listen-client-urls={scheme}://0.0.0.0:2379"),
                ]),
                ..Container::default()
            }],
            ..PodSpec::default()
        });
        pod
    }

    #[test]
    fn invariant_20_unsafe_tls_change_of_running_cluster_is_refused() {
        for (wanted, said, scheme) in [
            (CLIENTS_TOO, None, "http"),
            (r#"{"generated":{}}"#, Some("null"), "http"),
            ("null", Some(r#"{"generated":{}}"#), "https"),
            (CLIENTS_TOO, Some(r#"{"generated":{}}"#), "https"),
        ] {
            let cluster = cluster(wanted);
            let rollout = rollout(&cluster, &[pod(said, scheme)]);
            assert!(rollout.refused.is_some(), "{wanted}");
            assert_eq!(rollout.next, None);
            let kept = serde_json::to_string(&rollout.at).unwrap();
            assert_eq!(kept, said.unwrap_or("null"));
        }
    }

    #[test]
    fn equivalent_or_unknown_tls_settings_of_pods_start_no_rollout() {
        for (wanted, said, scheme) in [
            ("null", None, "http"),
            (
                r#"{"generated":{"certificateDuration":"5m"}}"#,
                Some(r#"{"generated":{}}"#),
                "https",
            ),
            // The pod of this row has no annotation with TLS settings, so the operator assumes those of the spec.
            (r#"{"generated":{}}"#, None, "https"),
        ] {
            let cluster = cluster(wanted);
            let rollout = rollout(&cluster, &[pod(said, scheme)]);
            assert_eq!(serde_json::to_string(&rollout.at).unwrap(), wanted);
            assert_eq!((rollout.next, rollout.refused), (None, None));
        }
    }

    #[test]
    fn invariant_23_recorded_tls_settings_are_kept_without_pods() {
        for (wanted, was) in [(BETWEEN, "null"), ("null", BETWEEN), (CLIENTS_TOO, "null")] {
            let cluster = recorded(wanted, policy(was).as_ref(), "token");
            let rollout = rollout(&cluster, &[]);
            assert!(rollout.recorded);
            assert_eq!(rollout.at, policy(was), "{wanted}");
        }
        // The TLS record and the pod with the token `before` are ignored, because they belong to a cluster that a
        // restore or a recovery has replaced.
        let restored = recorded(BETWEEN, None, "before");
        let mut old = pod(Some("null"), "http");
        old.annotations_mut()
            .insert(names::ANNOTATION_CLUSTER_TOKEN.into(), "before".into());
        let rollout = rollout(&restored, &[old]);
        assert!(!rollout.recorded);
        assert_eq!(rollout.at, policy(BETWEEN));
    }

    /// A person deleted the EtcdCluster without its children, and created it again without its status and with another
    /// `spec.TLS`.
    #[test]
    fn invariant_23_members_of_recreated_cluster_change_tls_in_stages() {
        for (wanted, was) in [(BETWEEN, "null"), ("null", BETWEEN)] {
            let scheme = if was == "null" { "http" } else { "https" };
            let mut orphan = pod(Some(was), scheme);
            orphan.metadata.owner_references = None;
            orphan
                .annotations_mut()
                .insert(names::ANNOTATION_CLUSTER_TOKEN.into(), "token".into());
            let cluster = cluster(wanted);
            let rollout = rollout(&cluster, &[orphan]);
            assert_eq!(rollout.at, policy(was), "{wanted}");
            assert!(!rollout.recorded && rollout.refused.is_none());
            assert!(rollout.next.is_some());
            assert_eq!(rollout.modes.len(), 1);
        }
    }

    /// A person deleted an EtcdCluster with retained volumes, and created it again with another `spec.TLS`.
    #[test]
    fn invariant_23_members_on_retained_volumes_keep_their_tls_settings() {
        for (wanted, was) in [(BETWEEN, "null"), ("null", BETWEEN)] {
            let mut claim = PersistentVolumeClaim::default();
            let notes = [
                (names::ANNOTATION_CLUSTER_TOKEN, "token"),
                (names::ANNOTATION_TLS, was),
            ];
            let notes = notes.map(|(key, value)| (key.to_owned(), value.to_owned()));
            claim.metadata.annotations = Some(notes.into());
            let cluster = cluster(wanted);
            let claims = [claim];
            let started = started(&cluster, &[], &claims);
            let rollout = TlsRollout::of(&started, cluster.spec.tls.as_ref());
            assert_eq!(rollout.at, policy(was), "{wanted}");
            assert!(!rollout.recorded && rollout.next.is_some());
        }
    }

    #[test]
    fn recorded_tls_stage_is_used_if_pod_stages_differ() {
        let at = policy(BETWEEN).map(|tls| TlsPolicy {
            peer_stage: Some(PeerStage::PlainAndTls),
            ..tls
        });
        let cluster = recorded(BETWEEN, at.as_ref(), "token");
        let mut second = pod(None, "http");
        second.metadata.name = Some("db-b".into());
        if let Some(spec) = &mut second.spec {
            spec.containers[0].args = Some(vec![
                format!("{PEERS}http://0.0.0.0:2380,https://0.0.0.0:2382"),
                format!("{CLIENTS}http://0.0.0.0:2379"),
            ]);
        }
        let rollout = rollout(&cluster, &[pod(None, "http"), second]);
        assert_eq!((&rollout.at, &rollout.refused), (&at, &None));
        assert_eq!(rollout.waits_for(), ["db-a"]);
        assert!(rollout.recorded && rollout.next.is_some());
    }

    /// Members that another operator started can listen on IPv6 addresses.
    #[test]
    fn listen_flags_with_ipv4_and_ipv6_addresses_are_read() {
        for (url, expected) in [
            ("http://0.0.0.0:2380", Some((false, 2380))),
            ("https://[::]:2382", Some((true, 2382))),
            ("http://[fd00::7]:2380", Some((false, 2380))),
            ("http://[fd00::7]", None),
        ] {
            assert_eq!(listener(url), expected, "{url}");
        }
    }

    #[test]
    fn member_with_plain_and_tls_listeners_is_called_without_tls() {
        let with = |urls: &str| {
            let mut pod = pod(None, "http");
            if let Some(spec) = &mut pod.spec {
                spec.containers[0].args = Some(vec![format!("{CLIENTS}{urls}")]);
            }
            insists_on_tls(&pod)
        };
        assert_eq!(with("http://0.0.0.0:2379"), Some(false));
        assert_eq!(
            with("http://0.0.0.0:2379,https://0.0.0.0:2379"),
            Some(false)
        );
        assert_eq!(with("https://0.0.0.0:2379"), Some(true));
        assert_eq!(with("http://[::]:2379"), Some(false));
        assert_eq!(with("https://[::]:2379"), Some(true));
        assert_eq!(insists_on_tls(&Pod::default()), None);
    }
}
