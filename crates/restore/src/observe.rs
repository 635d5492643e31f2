//! Reads the world into one value: Kubernetes objects, the backup's metadata, etcd's answer. Reads only, each with
//! a deadline; what could not be read is `Unknown`.

mod reach;
mod tls;

use std::time::Duration;

use api::backup::name;
use api::cluster::{self, EtcdClusterSpec};
use api::conditions::{self, ConditionType, Reason};
use api::manifest::BackupManifest;
use api::names::{self, ANNOTATION_RESTORE, Addresses};
use api::problem;
use api::storage::{PvcSource, StorageBlock, StorageSource, StorageType};
use api::version::EtcdVersion;
use api::{EtcdBackup, EtcdCluster, EtcdRestore};
use etcd::Etcd;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod as KubePod, Secret, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::ListParams;
use kube::{Api, Client, Resource, ResourceExt};
use runtime::grants::Grants;
use runtime::member::Members;
use runtime::outcome::Chain;
use runtime::progress;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::observed::{
    Child, Cluster, ClusterFacts, Former, FormerPod, Observed, Pod, Seed, Serving, Source, Trouble,
};
use crate::plan::in_place;
use crate::source::SecretData;
use crate::{naming, plan, pod, source};

/// No single read of Kubernetes may take longer.
const READ: Duration = Duration::from_secs(10);
/// Nor may all that is asked of the store.
const STORE: Duration = Duration::from_secs(30);

/// What was seen: the facts a plan is made from, and the objects a step is made with.
pub struct Seen {
    /// The facts.
    pub observed: Observed,
    /// The EtcdCluster as it was read.
    pub cluster: Option<EtcdCluster>,
    /// The place of the backup.
    pub place: Result<StorageBlock, Trouble>,
    /// The seed's objects as they were read, where they are the seed's.
    pub children: Children,
}

/// The seed's objects.
#[derive(Default)]
pub struct Children {
    /// Its pod.
    pub pod: Option<KubePod>,
    /// Its volume claim.
    pub claim: Option<PersistentVolumeClaim>,
    /// Its Service.
    pub service: Option<Service>,
}

/// Where to look.
pub struct Eyes<'a> {
    /// Kubernetes, in the restore's namespace.
    pub client: &'a Client,
    /// etcd.
    pub etcd: &'a dyn Etcd,
    /// Who may use the operator's own identity.
    pub grants: &'a Grants,
    /// Why its members cannot be asked as the cluster's spec says.
    pub fault: Option<&'a str>,
}

/// The first minor version whose etcdutl raises revisions.
const BUMPS_FROM: (u64, u64) = (3, 6);

/// Looks at what matters for this restore now.
pub async fn observe(eyes: &Eyes<'_>, restore: &EtcdRestore) -> Seen {
    let mut seen = Seen {
        observed: Observed {
            cluster: Cluster::Absent,
            source: Source::NotAsked,
            seed: Seed::not_asked(),
            serving: Serving::NotAsked,
            former: Former::NotAsked,
        },
        cluster: None,
        place: Err(Trouble::new(
            Reason::Unknown_,
            "the backup was not looked for",
        )),
        children: Children::default(),
    };
    if plan::settled(restore).is_some() {
        return seen;
    }
    let namespace = restore.namespace().unwrap_or_default();
    match read::<EtcdCluster>(eyes.client, &namespace, naming::target(restore)).await {
        Err(why) => seen.observed.cluster = Cluster::Unknown(why),
        Ok(None) => {
            if in_place::gives_up(restore) {
                return seen;
            }
            seen.place = place(eyes, restore, &namespace).await;
            if restore
                .status
                .as_ref()
                .is_some_and(|status| status.seed.is_some())
            {
                let there = None;
                seen.observed.source = backup(eyes, restore, &namespace, there, &seen.place).await;
            }
        }
        Ok(Some(mut cluster)) => {
            let certificates = tls::read(eyes.client, &namespace, &mut cluster).await;
            let mut facts = facts(&cluster);
            facts
                .problems
                .extend(tls::problems(&cluster, &certificates));
            look_around(eyes, restore, (&cluster, &facts), &mut seen).await;
            seen.observed.cluster = match cluster.metadata.deletion_timestamp {
                Some(_) => Cluster::Ending,
                None => Cluster::Present(Box::new(facts)),
            };
            seen.cluster = Some(cluster);
        }
    }
    seen
}

/// What is to be known around an EtcdCluster that is there.
async fn look_around(
    eyes: &Eyes<'_>,
    restore: &EtcdRestore,
    (cluster, facts): (&EtcdCluster, &ClusterFacts),
    seen: &mut Seen,
) {
    let namespace = restore.namespace().unwrap_or_default();
    let reached = reach::client(eyes, cluster).await;
    let eyes = &reached.eyes(eyes);
    let (turned, in_place) = (
        in_place::has_turned(restore, facts),
        in_place::replaces(restore).is_some(),
    );
    if facts.claim.as_deref() == Some(naming::uid(restore)) {
        if turned && !in_place {
            return;
        }
        if !in_place::gives_up(restore) || turned {
            seen.place = place(eyes, restore, &namespace).await;
        }
        seen.observed.seed = seed(eyes, restore, &namespace, cluster, &mut seen.children).await;
        look_at_progress(&mut seen.observed.seed, seen.children.pod.as_ref()).await;
        if turned {
            seen.observed.former = former(eyes, restore, &namespace, cluster).await;
        } else {
            let pod = seen.children.pod.as_ref();
            seen.observed.serving =
                seed_serving(eyes, (&namespace, cluster), &seen.observed.seed, pod).await;
            if !plan::is_verified(restore) {
                let serving = std::mem::replace(&mut seen.observed.serving, Serving::NotAsked);
                let at = seed_url(&namespace, cluster, pod);
                seen.observed.serving = compared(eyes, &seen.observed.seed, at, serving).await;
            }
        }
    } else if facts.claim.is_none() && turned {
        if facts.available {
            seen.observed.serving = cluster_serving(eyes, &namespace, cluster).await;
        }
    } else if facts.claim.is_none() && restore.spec.overwrite && !in_place::gives_up(restore) {
        seen.place = place(eyes, restore, &namespace).await;
        let there = Some(&cluster.spec);
        seen.observed.source = backup(eyes, restore, &namespace, there, &seen.place).await;
    }
}

/// The pods of the members that are replaced: whatever is this EtcdCluster's and carries another token than the new
/// cluster's.
async fn former(
    eyes: &Eyes<'_>,
    restore: &EtcdRestore,
    namespace: &str,
    cluster: &EtcdCluster,
) -> Former {
    let api: Api<KubePod> = Api::namespaced(eyes.client.clone(), namespace);
    let of_cluster = names::cluster_selector(&cluster.name_any());
    let of_cluster = ListParams::default().labels(&of_cluster);
    let pods = match timeout(READ, api.list(&of_cluster)).await {
        Ok(Ok(pods)) => pods.items,
        Ok(Err(error)) => return Former::Unknown(Chain(&error).to_string()),
        Err(_) => return Former::Unknown(format!("the pods: no answer within {READ:?}")),
    };
    let uid = cluster.metadata.uid.as_deref().unwrap_or_default();
    Former::Known(former_of(&pods, uid, &naming::seed(restore).token))
}

fn former_of(pods: &[KubePod], owner: &str, token: &str) -> Vec<FormerPod> {
    let replaced = |pod: &&KubePod| {
        let owners = pod.owner_references();
        let ours = owners.is_empty() || owners.iter().any(|one| one.uid == owner);
        ours && pod
            .annotations()
            .get(names::ANNOTATION_CLUSTER_TOKEN)
            .is_none_or(|of| of != token)
    };
    let former = pods.iter().filter(replaced).map(|pod| FormerPod {
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        terminating: pod.metadata.deletion_timestamp.is_some(),
        ready: is_ready(pod),
    });
    former.collect()
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

/// An object, `None` when the API server says that there is none, or why nobody can say.
async fn read<K>(client: &Client, namespace: &str, name: &str) -> Result<Option<K>, String>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
        + Clone
        + std::fmt::Debug
        + DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    match timeout(READ, api.get_opt(name)).await {
        Ok(Ok(found)) => Ok(found),
        Ok(Err(error)) => Err(Chain(&error).to_string()),
        Err(_) => Err(format!(
            "{} {name}: no answer within {READ:?}",
            K::kind(&())
        )),
    }
}

fn facts(cluster: &EtcdCluster) -> ClusterFacts {
    let mut problems = cluster::validate(cluster);
    problems.extend(cluster::unsafe_to_ignore(&cluster.spec));
    ClusterFacts {
        uid: cluster.uid().unwrap_or_default(),
        paused: cluster.spec.paused,
        claim: cluster.annotations().get(ANNOTATION_RESTORE).cloned(),
        cluster_id: cluster
            .status
            .as_ref()
            .and_then(|status| status.cluster_id.clone()),
        available: conditions::is_true(cluster.conditions(), &ConditionType::Available),
        durable: cluster.spec.is_durable(),
        problems,
    }
}

/// The place of the backup: the restore's own, or that of the EtcdBackup it names.
async fn place(
    eyes: &Eyes<'_>,
    restore: &EtcdRestore,
    namespace: &str,
) -> Result<StorageBlock, Trouble> {
    let spec = &restore.spec;
    let Some(reference) = &spec.backup else {
        let kind = spec.backup_storage_type.as_ref();
        // Old manifests name the type; a block alone says it too.
        let kind = kind.unwrap_or(&StorageType::S3);
        let selected = spec.blocks().select(kind, "spec", "backupStorageType");
        return selected
            .map(StorageBlock::from)
            .map_err(|problem| Trouble::new(Reason::InvalidSpec, problem.to_string()));
    };
    let name = &reference.name;
    let backup = read::<EtcdBackup>(eyes.client, namespace, name)
        .await
        .map_err(|why| Trouble::new(Reason::StepFailed, why))?
        .ok_or_else(|| {
            let message = format!(
                "spec.backup.name: there is no EtcdBackup {name} in {namespace}: correct the name"
            );
            Trouble::new(Reason::BackupMissing, message)
        })?;
    place_of(&backup, reference.before.as_ref())
}

/// Where the newest complete backup of an EtcdBackup lies, or the newest that was complete by a time.
fn place_of(backup: &EtcdBackup, before: Option<&Time>) -> Result<StorageBlock, Trouble> {
    let name = backup.name_any();
    let selected = backup
        .spec
        .blocks()
        .select(&backup.spec.storage_type, "spec", "storageType");
    let block = selected
        .map(StorageBlock::from)
        .map_err(|problem| Trouble::new(Reason::InvalidSpec, problem.to_string()))?;
    if let Some(problem) = api::restore::unreachable(&backup.spec.storage_type) {
        let message = format!("the EtcdBackup {name}: {problem}");
        return Err(Trouble::new(Reason::NotSupported, message));
    }
    let location = match before {
        None => backup
            .status
            .as_ref()
            .and_then(|status| status.location.as_deref()),
        Some(before) => Some(newest_by(backup, before)?),
    };
    let none = || {
        let message = format!(
            "the EtcdBackup {name} has no complete backup yet: wait for one, or name another"
        );
        Trouble::new(Reason::BackupMissing, message)
    };
    let (_, path) = location
        .and_then(|location| location.split_once("://"))
        .ok_or_else(none)?;
    // A path on a claim does not name it.
    let path = match block.source() {
        StorageSource::Pvc(pvc) => path
            .strip_prefix(&pvc.claim_name)
            .and_then(|path| path.strip_prefix('/'))
            .unwrap_or_default(),
        _ => path,
    };
    // What the spec says by now may be another place than the one the status tells of.
    let own = block.source().path() == path || name::parse(block.source().path(), path).is_some();
    if !own {
        let message = format!(
            "the newest backup of the EtcdBackup {name} lies at another place than its spec names now: wait for its next \
             one, or give the place in the EtcdRestore itself"
        );
        return Err(Trouble::new(Reason::BackupMissing, message));
    }
    Ok(block.at(path.to_owned()))
}

/// Of the backups that the EtcdBackup's status lists, the newest that was complete by then.
fn newest_by<'a>(backup: &'a EtcdBackup, before: &Time) -> Result<&'a str, Trouble> {
    let listed = backup.status.iter().flat_map(|status| &status.backups);
    let timed = listed.filter_map(|one| Some((one.completion_time.as_ref()?.0, one)));
    let newest = timed
        .filter(|(time, _)| *time <= before.0)
        .max_by_key(|(time, _)| *time);
    newest.map(|(_, one)| one.location.as_str()).ok_or_else(|| {
        let message = format!(
            "spec.backup.before: status.backups of the EtcdBackup {} lists none that was complete by {}: take a later \
             time, or give the place of an older backup in the EtcdRestore itself",
            backup.name_any(),
            before.0
        );
        Trouble::new(Reason::BackupMissing, message)
    })
}

/// Looks at the backup before anything is created for it.
async fn backup(
    eyes: &Eyes<'_>,
    restore: &EtcdRestore,
    namespace: &str,
    there: Option<&EtcdClusterSpec>,
    place: &Result<StorageBlock, Trouble>,
) -> Source {
    let look = async {
        let source = place.as_ref().map_err(Clone::clone)?;
        let place = source.source();
        if let StorageSource::Pvc(pvc) = &place {
            return on_claim(eyes, restore, namespace, there, pvc).await;
        }
        let ambient = store::ambient(&place).is_some();
        let allowed = eyes.grants.check(namespace, &place, ambient);
        allowed.map_err(|why| Trouble::new(Reason::AccessDenied, why))?;
        let named = store::secrets_of(&place);
        let keys = secret(eyes, namespace, named.credentials).await?;
        let ca = secret(eyes, namespace, named.ca).await?;
        let place = source::open(source, keys.as_ref(), ca.as_ref(), None).await?;
        // Reading tells more than looking up: an answer to HEAD has no text.
        let manifest = place.manifest().await?;
        place.check().await?;
        match there {
            Some(there) => check_version(restore, there, manifest.as_ref()).map(|()| there.clone()),
            None => cluster_to_make(restore, manifest.as_ref()),
        }
    };
    match timeout(STORE, look).await {
        Ok(Ok(spec)) => Source::Ready(Box::new(spec)),
        Ok(Err(trouble)) => Source::Unavailable(trouble),
        Err(_) => {
            let message = format!(
                "the store did not answer within {STORE:?}: check the endpoint and the network"
            );
            Source::Unavailable(Trouble::new(Reason::StoreUnreachable, message))
        }
    }
}

/// What lies on a claim the seed's pod alone can see: it looks at the backup before anything is touched.
async fn on_claim(
    eyes: &Eyes<'_>,
    restore: &EtcdRestore,
    namespace: &str,
    there: Option<&EtcdClusterSpec>,
    pvc: &PvcSource,
) -> Result<EtcdClusterSpec, Trouble> {
    let name = &pvc.claim_name;
    let claim = read::<PersistentVolumeClaim>(eyes.client, namespace, name).await;
    if claim
        .map_err(|why| Trouble::new(Reason::StepFailed, format!("spec.pvc.claimName: {why}")))?
        .is_none()
    {
        let message = format!(
            "spec.pvc.claimName: there is no PersistentVolumeClaim {name} in {namespace}: correct the name"
        );
        return Err(Trouble::new(Reason::BackupMissing, message));
    }
    match (there, &restore.spec.etcd_cluster.template) {
        (Some(there), _) => check_version(restore, there, None).map(|()| there.clone()),
        (None, Some(_)) => cluster_to_make(restore, None),
        (None, None) => {
            let message = "spec.etcdCluster.template: what is recorded on a claim beside the backup the operator \
                           cannot see: give the spec of the cluster to make";
            Err(Trouble::new(Reason::InvalidSpec, message))
        }
    }
}

async fn secret(
    eyes: &Eyes<'_>,
    namespace: &str,
    named: Option<store::SecretName<'_>>,
) -> Result<Option<SecretData>, Trouble> {
    let Some(store::SecretName { field, name }) = named else {
        return Ok(None);
    };
    let secret = read::<Secret>(eyes.client, namespace, name)
        .await
        .map_err(|why| Trouble::new(Reason::StepFailed, format!("{field}: {why}")))?;
    let missing = || {
        let message = format!(
            "{field}: there is no Secret {name} in {namespace}: create it, or correct the name"
        );
        Trouble::new(Reason::SecretMissing, message)
    };
    let data = secret.ok_or_else(missing)?.data.unwrap_or_default();
    Ok(Some(
        data.into_iter()
            .map(|(key, value)| (key, value.0))
            .collect(),
    ))
}

/// The spec of the cluster to make: the template's, or the one recorded beside the backup.
pub fn cluster_to_make(
    restore: &EtcdRestore,
    manifest: Option<&BackupManifest>,
) -> Result<EtcdClusterSpec, Trouble> {
    let target = &restore.spec.etcd_cluster;
    let recorded = manifest.and_then(|manifest| manifest.cluster.as_ref());
    let spec = match (&target.template, recorded) {
        (Some(template), _) => template.spec.clone(),
        (None, Some(recorded)) => recorded.spec.clone(),
        (None, None) => {
            let message = "spec.etcdCluster.template: nothing is recorded beside the backup about its cluster: give \
                           the spec of the cluster to make";
            return Err(Trouble::new(Reason::InvalidSpec, message));
        }
    };
    let cluster = EtcdCluster::new(&target.name, spec);
    let problems = cluster::validate(&cluster);
    if !problems.is_empty() {
        let message = format!("the cluster to make: {}", problem::summary(&problems));
        return Err(Trouble::new(Reason::InvalidSpec, message));
    }
    let dangerous = cluster::unsafe_to_ignore(&cluster.spec);
    if !dangerous.is_empty() {
        let message = format!(
            "the cluster to make: {}; or give spec.etcdCluster.template",
            problem::summary(&dangerous)
        );
        return Err(Trouble::new(Reason::NotSupported, message));
    }
    check_version(restore, &cluster.spec, manifest)?;
    Ok(cluster.spec)
}

/// An older etcd cannot read a newer one's database; and its tool has to know what it is asked for.
fn check_version(
    restore: &EtcdRestore,
    spec: &EtcdClusterSpec,
    manifest: Option<&BackupManifest>,
) -> Result<(), Trouble> {
    let Ok(wanted) = EtcdVersion::parse(&spec.version) else {
        return Ok(());
    };
    let bumps = restore.spec.bump_revision.is_some_and(|by| by > 0);
    if bumps && wanted.minor() < BUMPS_FROM {
        let message = format!(
            "spec.bumpRevision: the cluster is of etcd {wanted}, and etcdutl knows --bump-revision and \
             --mark-compacted from 3.6 on: restore without them and restart every client that caches, or restore \
             into a cluster of 3.6"
        );
        return Err(Trouble::new(Reason::NotSupported, message));
    }
    let backup = manifest.and_then(|manifest| EtcdVersion::parse(&manifest.etcd_version).ok());
    match backup {
        Some(backup) if wanted.minor() < backup.minor() => {
            let message = format!(
                "the cluster's version is {wanted}, and the backup is of etcd {backup}: use that minor version or a \
                 newer one in the EtcdCluster's spec.version, or in spec.etcdCluster.template.spec.version"
            );
            Err(Trouble::new(Reason::InvalidSpec, message))
        }
        _ => Ok(()),
    }
}

async fn seed(
    eyes: &Eyes<'_>,
    restore: &EtcdRestore,
    namespace: &str,
    cluster: &EtcdCluster,
    children: &mut Children,
) -> Seed {
    let member = naming::seed(restore).member;
    let owner = cluster.metadata.uid.as_deref().unwrap_or_default();
    let (service, pod, claim) = tokio::join!(
        read::<Service>(eyes.client, namespace, &member),
        read::<KubePod>(eyes.client, namespace, &member),
        async {
            if cluster.spec.is_durable() {
                read::<PersistentVolumeClaim>(eyes.client, namespace, &member).await
            } else {
                Ok(None)
            }
        },
    );
    let (service, pod, claim) = (
        child(service, owner, &mut children.service),
        child(pod, owner, &mut children.pod),
        child(claim, owner, &mut children.claim),
    );
    let pod = match (pod, &children.pod) {
        (Child::Unknown(why), _) => Pod::Unknown(why),
        (Child::InTheWay, _) => Pod::InTheWay,
        (Child::Present, Some(pod)) => Pod::Present(pod::facts(pod)),
        (Child::Absent | Child::Present, _) => Pod::Absent,
    };
    Seed {
        service,
        claim,
        pod,
    }
}

/// How far the container that fetches is, while it runs.
async fn look_at_progress(seed: &mut Seed, pod: Option<&KubePod>) {
    let Pod::Present(facts) = &mut seed.pod else {
        return;
    };
    let status = pod.and_then(|pod| pod.status.as_ref());
    let address = status.and_then(|status| status.pod_ip.as_ref()?.parse().ok());
    if let Some(address) = address.filter(|_| facts.fetching) {
        facts.moved = progress::read(address).await;
    }
}

fn child<K: Resource>(
    found: Result<Option<K>, String>,
    owner: &str,
    keep: &mut Option<K>,
) -> Child {
    match found {
        Err(why) => Child::Unknown(why),
        Ok(None) => Child::Absent,
        Ok(Some(object)) if is_in_the_way(&object, owner) => Child::InTheWay,
        Ok(Some(object)) => {
            *keep = Some(object);
            Child::Present
        }
    }
}

/// On its way out, or not a child of this EtcdCluster but of an earlier one of its name.
fn is_in_the_way<K: Resource>(object: &K, owner: &str) -> bool {
    let is_child = object
        .owner_references()
        .iter()
        .any(|reference| reference.uid == owner);
    object.meta().deletion_timestamp.is_some() || !is_child
}

fn addresses(cluster: &EtcdCluster, namespace: &str) -> Addresses {
    Members::of(cluster, namespace, "", None).addresses()
}

/// At the pod's own address: beside members that serve no Service leads to it.
async fn seed_serving(
    eyes: &Eyes<'_>,
    (namespace, cluster): (&str, &EtcdCluster),
    seed: &Seed,
    pod: Option<&KubePod>,
) -> Serving {
    match &seed.pod {
        Pod::Present(pod) if pod.restored.is_some() => {}
        _ => return Serving::NotAsked,
    }
    match seed_url(namespace, cluster, pod) {
        Some(url) => reach::serving(eyes, &url).await,
        None => Serving::Unknown("its pod has no address yet".to_owned()),
    }
}

fn seed_url(namespace: &str, cluster: &EtcdCluster, pod: Option<&KubePod>) -> Option<String> {
    let addresses = addresses(cluster, namespace);
    let status = pod.and_then(|pod| pod.status.as_ref());
    let address = status.and_then(|status| status.pod_ip.as_ref()?.parse().ok());
    Some(addresses.client_url_at(address?, &pod?.name_any()))
}

/// Before anybody else may use it: whether etcd reads the same keys as the member did that the backup came from.
async fn compared(eyes: &Eyes<'_>, seed: &Seed, at: Option<String>, serving: Serving) -> Serving {
    let (Pod::Present(pod), Serving::Serves { revision, .. }, Some(url)) =
        (&seed.pod, &serving, at)
    else {
        return serving;
    };
    let (Some(restored), Some(expected)) = (pod.restored, pod.hash) else {
        return serving;
    };
    if *revision < restored {
        return serving;
    }
    match eyes.etcd.hash(&url, restored).await {
        Err(error) => Serving::Unknown(format!("no hash of its keys: {error}")),
        Ok(Some(found)) if found.compacted == expected.compacted && found.hash != expected.hash => {
            Serving::Differs {
                expected: expected.hash,
                found: found.hash,
            }
        }
        // Of a store that was compacted since nothing can be compared.
        Ok(_) => serving,
    }
}

async fn cluster_serving(eyes: &Eyes<'_>, namespace: &str, cluster: &EtcdCluster) -> Serving {
    let addresses = addresses(cluster, namespace);
    let status = cluster.status.as_ref();
    let members = status.iter().flat_map(|status| &status.member_details);
    // Certificates need not cover the client Service, and do cover the members.
    let members = members.map(|member| addresses.client_url(&member.name));
    let mut answer = Serving::NotAsked;
    for url in std::iter::once(addresses.service_url()).chain(members) {
        answer = reach::serving(eyes, &url).await;
        if matches!(answer, Serving::Serves { .. }) || !addresses.client_tls {
            break;
        }
    }
    answer
}

#[cfg(test)]
mod tests;
