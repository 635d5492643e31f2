//! Reads the seed and its objects, the old members, and the etcd of the seed or the restored cluster.

use api::EtcdCluster;
use api::EtcdRestore;
use api::names::{self, Addresses};
use api::problem::Chain;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod as KubePod, Service};
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, Client, Resource, ResourceExt};
use member::Members;
use runtime::clock;
use store::progress;
use tokio::time::timeout;

use super::{ObserveContext, READ_TIMEOUT, pod, reach, read};
use crate::naming;
use crate::plan::in_place;
use crate::snapshot::takes_name;
use crate::snapshot::{
    Child, Life, OldMembers, OldPod, Pod, PodFacts, Seed, SeedObjects, Serving, Snapshot,
};

/// The objects with the names of the seed's objects. Another owner may have created them. `Err` contains the message
/// of a failed read.
pub(super) struct NamedObjects {
    pub(super) service: Result<Option<Service>, String>,
    pub(super) pvc: Result<Option<PersistentVolumeClaim>, String>,
    pub(super) pod: Result<Option<KubePod>, String>,
}

/// Reads the pod with the seed's name. While the restore holds the lock (`locked`), also reads the Service and the
/// PVC.
pub(super) async fn named(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    namespace: &str,
    (cluster, locked): (&EtcdCluster, bool),
) -> NamedObjects {
    let member = naming::seed(restore).member;
    let (service, pod, pvc) = tokio::join!(
        async {
            if locked {
                read::<Service>(context.client, namespace, &member).await
            } else {
                Ok(None)
            }
        },
        read::<KubePod>(context.client, namespace, &member),
        async {
            if locked && cluster.spec.is_durable() {
                read::<PersistentVolumeClaim>(context.client, namespace, &member).await
            } else {
                Ok(None)
            }
        },
    );
    NamedObjects { service, pvc, pod }
}

/// Builds the facts about the seed. An object that the EtcdCluster does not own counts as `NameTaken`.
pub(super) fn seed(
    named: NamedObjects,
    cluster: &EtcdCluster,
    old_members: &OldMembers,
    children: &mut SeedObjects,
) -> Seed {
    let owner = cluster.metadata.uid.as_deref().unwrap_or_default();
    let (service, pod, pvc) = (
        child(named.service, owner, &mut children.service),
        child(named.pod, owner, &mut children.pod),
        child(named.pvc, owner, &mut children.pvc),
    );
    // The operator creates the Service before the other objects of a seed, so the creation time of the Service is the
    // start of the seed.
    let began = children.service.as_ref();
    let began = began.and_then(ResourceExt::creation_timestamp);
    let began = began.map(|time| time.0);
    let now = Timestamp::now();
    let pod = match (pod, &children.pod) {
        (Child::Unknown(why), _) => Pod::Unknown(why),
        (Child::NameTaken, _) => Pod::NameTaken,
        (Child::Present, Some(pod)) => Pod::Present(PodFacts {
            life: pod::life(pod, began, now),
            // The delay before the replacement of a pod grows with the time since `began`. After the old members have
            // stopped, no member serves clients, so `began` is ignored, and the minimum delay applies.
            recent: pod::is_recent(pod, began.filter(|_| !old_members.have_stopped()), now),
            ..pod::facts(pod)
        }),
        (Child::Absent | Child::Present, _) => Pod::Absent,
    };
    Seed { service, pvc, pod }
}

/// Adds a problem to `seed` if Kubernetes provides no storage for its PersistentVolumeClaim in time. The time limit
/// must have passed by the clock of the operator and by the clock of the API server. Without an answer of the API
/// server, no problem is added (invariant 1).
pub(super) async fn check_storage(client: &Client, seed: &mut Seed, children: &SeedObjects) {
    let (Pod::Present(facts), Some(pod), Some(pvc)) = (&mut seed.pod, &children.pod, &children.pvc)
    else {
        return;
    };
    let now = Timestamp::now();
    if facts.life != Life::Active || pod::no_storage(pod, pvc, now).is_none() {
        return;
    }
    let Ok(Ok(difference)) = timeout(READ_TIMEOUT, clock::difference(client)).await else {
        return;
    };
    let now = clock::earlier(now, difference);
    if let Some(trouble) = pod::no_storage(pod, pvc, now) {
        facts.trouble = Some(trouble);
    }
}

/// Reads the progress of the container `fetch` while it runs, and then the progress of a replay until etcd is ready.
pub(super) async fn read_progress(seed: &mut Seed, pod: Option<&KubePod>) {
    let Pod::Present(facts) = &mut seed.pod else {
        return;
    };
    let status = pod.and_then(|pod| pod.status.as_ref());
    let address = status.and_then(|status| status.pod_ip.as_ref()?.parse().ok());
    let replays = facts.replays && facts.restored.is_some() && !facts.verified;
    if let Some(address) = address.filter(|_| facts.fetching || replays) {
        facts.progress = progress::read(address).await;
    }
}

pub(super) fn child<K: Resource>(
    found: Result<Option<K>, String>,
    owner: &str,
    present: &mut Option<K>,
) -> Child {
    match found {
        Err(why) => Child::Unknown(why),
        Ok(None) => Child::Absent,
        Ok(Some(object)) if takes_name(&object, owner) => Child::NameTaken,
        Ok(Some(object)) => {
            *present = Some(object);
            Child::Present
        }
    }
}

fn addresses(cluster: &EtcdCluster, namespace: &str) -> Addresses {
    Members::of(cluster, namespace, "", None).addresses()
}

/// Queries the seed at the address of its pod, because no Service selects the seed while old members serve.
pub(super) async fn seed_serving(
    context: &ObserveContext<'_>,
    (namespace, cluster): (&str, &EtcdCluster),
    seed: &Seed,
    found: Option<&KubePod>,
) -> Serving {
    match &seed.pod {
        Pod::Present(facts)
            if (facts.restored.is_some() || facts.report_lost)
                && found.is_some_and(pod::etcd_runs) => {}
        _ => return Serving::NotRead,
    }
    match seed_url(namespace, cluster, found) {
        Some(url) => reach::serving(context, &url).await,
        None => Serving::Unknown("the seed's pod has no address yet".to_owned()),
    }
}

/// True if the plan after the cutover needs an answer from the seed. It needs the answer to stop the old members, and
/// to add the seed to the Services. While the old members terminate, the plan only waits.
pub(super) fn needs_answer(restore: &EtcdRestore, snapshot: &Snapshot) -> bool {
    let OldMembers::Known(old_members) = &snapshot.old_members else {
        return true;
    };
    let joined = matches!(&snapshot.seed.pod, Pod::Present(pod) if pod.joined);
    if old_members.iter().any(|pod| !pod.terminating) {
        return true;
    }
    !joined && !in_place::is_aborted(restore) && !old_members.iter().any(|pod| pod.ready)
}

pub(super) fn seed_url(
    namespace: &str,
    cluster: &EtcdCluster,
    pod: Option<&KubePod>,
) -> Option<String> {
    let addresses = addresses(cluster, namespace);
    let status = pod.and_then(|pod| pod.status.as_ref());
    let address = status.and_then(|status| status.pod_ip.as_ref()?.parse().ok());
    Some(addresses.client_url_at(address?, &pod?.name_any()))
}

/// Compares etcd's hash of the seed's keys with the hash in the manifest. No client can have changed the keys yet.
pub(super) async fn compare_hash(
    context: &ObserveContext<'_>,
    seed: &Seed,
    url: Option<String>,
    serving: Serving,
) -> Serving {
    let (Pod::Present(pod), Serving::Serves { revision, .. }, Some(url)) =
        (&seed.pod, &serving, url)
    else {
        return serving;
    };
    let (Some(restored), Some(expected)) = (pod.restored, pod.hash) else {
        return serving;
    };
    if *revision < restored {
        return serving;
    }
    match context.etcd.hash(&url, restored).await {
        Err(error) => {
            Serving::Unknown(format!("etcd did not return the hash of its data: {error}"))
        }
        Ok(Some(found)) if found.compacted == expected.compacted && found.hash != expected.hash => {
            Serving::Differs {
                expected: expected.hash,
                found: found.hash,
            }
        }
        // The hash equals the expected hash, or the hashes cannot be compared, for example because etcd has compacted
        // its data at another revision.
        Ok(_) => serving,
    }
}

pub(super) async fn cluster_serving(
    context: &ObserveContext<'_>,
    namespace: &str,
    cluster: &EtcdCluster,
) -> Serving {
    let addresses = addresses(cluster, namespace);
    let status = cluster.status.as_ref();
    let members = status.iter().flat_map(|status| &status.member_details);
    // With TLS, the URLs of the members are tried after the URL of the client Service: the certificates always contain
    // the names of the members, but may lack the name of the Service.
    let members = members.map(|member| addresses.client_url(&member.name));
    let mut answer = Serving::NotRead;
    for url in std::iter::once(addresses.service_url()).chain(members) {
        answer = reach::serving(context, &url).await;
        if matches!(answer, Serving::Serves { .. }) || !addresses.client_tls {
            break;
        }
    }
    answer
}

/// The pods of the old members. Such a pod has no owner or is owned by this EtcdCluster, and does not have the token of
/// the seed.
pub(crate) async fn old_members(
    client: &Client,
    restore: &EtcdRestore,
    namespace: &str,
    cluster: &EtcdCluster,
) -> OldMembers {
    let api: Api<KubePod> = Api::namespaced(client.clone(), namespace);
    let selector = names::cluster_selector(&cluster.name_any());
    let selected = ListParams::default().labels(&selector);
    let pods = match timeout(READ_TIMEOUT, api.list(&selected)).await {
        Ok(Ok(pods)) => pods.items,
        Ok(Err(error)) => return OldMembers::Unknown(Chain(&error).to_string()),
        Err(_) => {
            return OldMembers::Unknown(format!("the pods: no answer within {READ_TIMEOUT:?}"));
        }
    };
    let uid = cluster.metadata.uid.as_deref().unwrap_or_default();
    OldMembers::Known(old_pods(&pods, uid, &naming::seed(restore).token))
}

pub(super) fn old_pods(pods: &[KubePod], owner: &str, token: &str) -> Vec<OldPod> {
    let is_old = |pod: &&KubePod| {
        let owners = pod.owner_references();
        let is_ours = owners.is_empty() || owners.iter().any(|one| one.uid == owner);
        is_ours
            && pod
                .annotations()
                .get(names::ANNOTATION_CLUSTER_TOKEN)
                .is_none_or(|pod_token| pod_token != token)
    };
    let old_pods = pods.iter().filter(is_old).map(|pod| OldPod {
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        terminating: pod.metadata.deletion_timestamp.is_some(),
        ready: is_ready(pod),
    });
    old_pods.collect()
}

fn is_ready(pod: &KubePod) -> bool {
    let conditions = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
