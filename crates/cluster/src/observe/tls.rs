//! Finds the problems of a cluster's certificates, and the form of the addresses that the certificates must cover.
//! Performs no I/O.

use std::collections::BTreeMap;

use api::EtcdCluster;
use api::cluster::MemberAddress;
use api::names::Addresses;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use member::tls::{Authorities, ClusterTls, Slot};

use super::{KubeSnapshot, pods};
use crate::tls::Tls;

/// The flag with the advertised peer URL, which shows the form of a running member's address: `member.namespace.svc` or
/// `member.cluster.namespace.svc`.
const ADVERTISED: &str = "--initial-advertise-peer-urls=";

/// The form of the addresses that the running members use; `None` if no pod shows it.
pub(super) fn running_form(cluster: &EtcdCluster, pods: &[Pod]) -> Option<MemberAddress> {
    let addresses = member::addresses(cluster);
    pods.iter().find_map(|pod| form(pod, &addresses))
}

fn form(pod: &Pod, addresses: &Addresses) -> Option<MemberAddress> {
    let url = pods::argument(pod, ADVERTISED)?;
    let of = |member| {
        let addresses = Addresses {
            member,
            ..addresses.clone()
        };
        format!("://{}:", addresses.host(&pod.name_any()))
    };
    [MemberAddress::Service, MemberAddress::Pod]
        .into_iter()
        .find(|form| url.contains(&of(form.clone())))
}

/// The planner's view of the cluster's TLS.
pub(super) fn seen(snapshot: &KubeSnapshot, now: Timestamp) -> Tls {
    let tls = &snapshot.tls;
    let addresses = member::addresses(snapshot.effective.cluster());
    let mut faults = tls.faults(&addresses, now);
    let apart = tls.faults_of_started(&started(snapshot), &faults, now);
    faults.extend(apart);
    let policy = snapshot.effective.cluster().spec.tls.as_ref();
    let faults = faults.into_iter().map(|it| it.in_policy(policy, ""));
    Tls {
        from: used(tls, &addresses),
        faults: faults.collect(),
    }
}

/// The CAs with which the running members were started, from the annotations of their pods.
fn started(snapshot: &KubeSnapshot) -> BTreeMap<String, Authorities> {
    let observed = &snapshot.without_etcd;
    let running = observed.pods.iter().filter(|(_, pod)| pod.running);
    let noted = running.filter_map(|(member, _)| {
        let noted = observed.certificates.pods.get(member)?;
        Some((member.clone(), noted.authorities.clone()?))
    });
    noted.collect()
}

fn used(tls: &ClusterTls, addresses: &Addresses) -> Option<String> {
    let part = |slot: &Option<Slot>, what: &str| {
        let slot = slot.as_ref()?;
        Some(format!("{what} use Secret {}", slot.secret))
    };
    let parts = [
        part(&tls.peer, "peer connections"),
        part(&tls.server, "client connections"),
        part(&tls.operator, "the operators"),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| {
        let form = &addresses.member;
        format!(
            "{}; members have addresses of the form {form}",
            parts.join("; ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_url_flag_shows_address_form_of_running_member() {
        let addresses = Addresses {
            namespace: "prod".to_owned(),
            cluster: "db".to_owned(),
            member: MemberAddress::Service,
            cluster_domain: String::new(),
            peer_tls: true,
            client_tls: true,
        };
        let pod = |url: &str| -> Pod {
            let argument = format!("{ADVERTISED}{url}");
            serde_json::from_value(serde_json::json!({
                "metadata": { "name": "db-a" },
                "spec": { "containers": [{ "name": "etcd", "args": ["--name=db-a", argument] }] },
            }))
            .unwrap()
        };
        for (url, expected) in [
            ("https://db-a.prod.svc:2380", Some(MemberAddress::Service)),
            ("http://db-a.db.prod.svc:2380", Some(MemberAddress::Pod)),
            ("http://10.0.0.1:2380", None),
        ] {
            assert_eq!(form(&pod(url), &addresses), expected, "{url}");
        }
        assert_eq!(form(&Pod::default(), &addresses), None);
    }
}
