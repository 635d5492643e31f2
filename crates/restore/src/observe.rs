//! Reads the world into one value: Kubernetes objects, the backup's metadata, etcd's answer. Reads only, each with
//! a deadline; what could not be read is `Unknown`.

mod backup;
pub(crate) mod members;
mod reach;
mod target;
mod tls;

use std::time::Duration;

use api::cluster::{self, EtcdClusterSpec};
use api::conditions::{self, ConditionType, Reason};
use api::names::ANNOTATION_RESTORE;
use api::restore::ChosenBackup;
use api::{EtcdCluster, EtcdRestore};
use etcd::Etcd;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod as KubePod, Service};
use kube::{Api, Client, Resource, ResourceExt};
use runtime::grants::Grants;
use runtime::outcome::Chain;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::observed::{Another, Cluster, ClusterFacts, Observed, Pod, Serving, Source, Trouble};
use crate::plan::in_place;
use crate::{choice, made_of, naming, plan, started};

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
    /// The backup: what was recorded, or what the spec names now.
    pub backup: Result<ChosenBackup, Trouble>,
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

/// Looks at what matters for this restore now.
pub async fn observe(eyes: &Eyes<'_>, restore: &EtcdRestore) -> Seen {
    let mut seen = Seen {
        observed: Observed::not_asked(),
        cluster: None,
        backup: Err(Trouble::new(
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
            seen.backup = backup::choose(eyes, restore, &namespace, false).await;
            if restore
                .status
                .as_ref()
                .is_some_and(|status| status.seed.is_some())
            {
                let there = None;
                look_at_backup(eyes, restore, there, &mut seen).await;
            }
        }
        Ok(Some(mut cluster)) => {
            let claim = cluster.annotations().get(ANNOTATION_RESTORE);
            let claimed = claim.map(String::as_str) == Some(naming::uid(restore));
            let named = members::named(eyes, restore, &namespace, (&cluster, claimed)).await;
            // Where the pod cannot be read, what is recorded is the best there is.
            let pod = named.pod.as_ref().ok().and_then(Option::as_ref);
            // What its members are started with, which is not always what its spec says by now.
            cluster.spec.tls = started::policy(&cluster, pod, claimed);
            let certificates = tls::read(eyes.client, &namespace, &mut cluster).await;
            let mut facts = facts(&cluster);
            facts
                .problems
                .extend(tls::problems(&cluster, &certificates));
            let around = look_around(eyes, restore, (&cluster, &facts), named, &mut seen);
            Box::pin(around).await;
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
    named: members::Named,
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
            seen.backup = backup::choose(eyes, restore, &namespace, true).await;
        }
        if turned {
            seen.observed.former = members::former(eyes.client, restore, &namespace, cluster).await;
        }
        let former = &seen.observed.former;
        seen.observed.seed = members::seed(named, cluster, former, &mut seen.children);
        if let Pod::Present(facts) = &mut seen.observed.seed.pod {
            choice::name_in(restore, facts);
            if let Some(pod) = &seen.children.pod {
                made_of::compare(restore, pod, facts);
            }
        }
        seen.observed.found = seen.backup.clone().ok();
        members::look_at_storage(eyes.client, &mut seen.observed.seed, &seen.children).await;
        members::look_at_progress(&mut seen.observed.seed, seen.children.pod.as_ref()).await;
        let pod = seen.children.pod.as_ref();
        // Who gives it up asks nothing: what is slow to answer would make its steps too old, over and over.
        let asked = if turned {
            members::is_asked(restore, &seen.observed)
        } else {
            !in_place::gives_up(restore)
        };
        if asked {
            seen.observed.serving =
                members::seed_serving(eyes, (&namespace, cluster), &seen.observed.seed, pod).await;
        }
        if asked && !turned && !plan::is_verified(restore) && !holds_another(&seen.observed) {
            let serving = std::mem::replace(&mut seen.observed.serving, Serving::NotAsked);
            let at = members::seed_url(&namespace, cluster, pod);
            seen.observed.serving = members::compared(eyes, &seen.observed.seed, at, serving).await;
        }
    } else if facts.claim.is_none() && turned {
        if facts.available {
            seen.observed.serving = members::cluster_serving(eyes, &namespace, cluster).await;
        }
    } else if facts.claim.is_none() && restore.spec.overwrite && !in_place::gives_up(restore) {
        seen.backup = backup::choose(eyes, restore, &namespace, false).await;
        look_at_backup(eyes, restore, Some(&cluster.spec), seen).await;
    }
}

/// The seed goes, whatever it answers.
fn holds_another(observed: &Observed) -> bool {
    let Pod::Present(facts) = &observed.seed.pod else {
        return false;
    };
    matches!(facts.another, Some(Another::Holds(_)))
}

/// Before anything is made of it.
async fn look_at_backup(
    eyes: &Eyes<'_>,
    restore: &EtcdRestore,
    there: Option<&EtcdClusterSpec>,
    seen: &mut Seen,
) {
    let namespace = restore.namespace().unwrap_or_default();
    seen.observed.source = backup::look(eyes, restore, &namespace, there, &mut seen.backup).await;
    if let (Source::Ready(_), Ok(backup)) = (&seen.observed.source, &seen.backup) {
        seen.observed.found = Some(backup.clone());
    }
}

/// An object, `None` when the API server says that there is none, or why nobody can say.
pub(crate) async fn read<K>(
    client: &Client,
    namespace: &str,
    name: &str,
) -> Result<Option<K>, String>
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

#[cfg(test)]
mod tests;
