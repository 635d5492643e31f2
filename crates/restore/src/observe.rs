//! Reads Kubernetes objects, the metadata of the backup and the answers of etcd. Changes nothing. Every read has a time
//! limit; data that cannot be read is `Unknown`.

mod backup;
pub(crate) mod members;
mod pod;
pub(crate) mod provenance;
mod reach;
mod tls;

use std::time::Duration;

use api::cluster::{self, EtcdClusterSpec};
use api::conditions::{self, ConditionType};
use api::names::ANNOTATION_RESTORE;
use api::{EtcdCluster, EtcdRestore};
use etcd::Etcd;
use kube::{Api, Client, Resource, ResourceExt};
use runtime::image::OwnImage;
use runtime::outcome::Chain;
use serde::de::DeserializeOwned;
use store::grants::Grants;
use tokio::time::timeout;

use crate::plan::{choice, effective, in_place};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{
    Another, Cluster, ClusterFacts, Objects, Observation, Pod, SeedObjects, Serving, Snapshot,
    Source,
};
use crate::{naming, plan};

/// Time limit for one read of Kubernetes.
const READ: Duration = Duration::from_secs(10);
/// Time limit for all reads of the store together.
const STORE: Duration = Duration::from_secs(30);

/// The clients and settings for reads.
pub struct ObserveContext<'a> {
    /// The client of the API server.
    pub client: &'a Client,
    /// The client of etcd.
    pub etcd: &'a dyn Etcd,
    /// The namespaces that may use the identity of the operator.
    pub grants: &'a Grants,
    /// The image of seed members.
    pub image: &'a OwnImage,
    /// The problem with the Secrets that the spec of the cluster names for access to its members.
    pub fault: Option<&'a str>,
}

/// Reads the data that the plan needs in the current state of the restore.
pub async fn observe(context: &ObserveContext<'_>, restore: &EtcdRestore) -> Observation {
    let mut seen = Observation {
        snapshot: Snapshot::not_asked(),
        objects: Objects {
            cluster: None,
            effective: None,
            backup: Err(Trouble::new(
                Reason::Unknown,
                "the backup was not looked for",
            )),
            image: Err("the image was not looked for".to_owned()),
            seed: SeedObjects::default(),
        },
    };
    if plan::settled(restore).is_some() {
        return seen;
    }
    let namespace = restore.namespace().unwrap_or_default();
    match read::<EtcdCluster>(context.client, &namespace, naming::target(restore)).await {
        Err(why) => seen.snapshot.cluster = Cluster::Unknown(why),
        Ok(None) => {
            if in_place::gives_up(restore) {
                return seen;
            }
            seen.objects.backup = backup::choose(context, restore, &namespace, false).await;
            if restore
                .status
                .as_ref()
                .is_some_and(|status| status.seed.is_some())
            {
                let there = None;
                look_at_backup(context, restore, there, &mut seen).await;
            }
        }
        Ok(Some(cluster)) => {
            let claim = cluster.annotations().get(ANNOTATION_RESTORE);
            let claimed = claim.map(String::as_str) == Some(naming::uid(restore));
            let named = members::named(context, restore, &namespace, (&cluster, claimed)).await;
            // If the pod cannot be read, the recorded TLS settings are used.
            let pod = named.pod.as_ref().ok().and_then(Option::as_ref);
            let effective = effective::as_started(&cluster, pod, claimed);
            let certificates = tls::read(context.client, &namespace, &effective).await;
            let effective = effective::as_addressed(effective, &namespace, &certificates);
            let mut facts = facts(&effective);
            facts
                .problems
                .extend(tls::problems(&effective, &certificates));
            let around = look_around(context, restore, (&effective, &facts), named, &mut seen);
            Box::pin(around).await;
            seen.snapshot.cluster = match cluster.metadata.deletion_timestamp {
                Some(_) => Cluster::Ending,
                None => Cluster::Present(Box::new(facts)),
            };
            seen.objects.image = context.image.get().await.cloned();
            seen.objects.effective = Some(effective.spec);
            seen.objects.cluster = Some(cluster);
        }
    }
    seen
}

/// Reads the seed and the old members of an EtcdCluster that the restore has locked.
async fn look_around(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    (cluster, facts): (&EtcdCluster, &ClusterFacts),
    named: members::Named,
    seen: &mut Observation,
) {
    let namespace = restore.namespace().unwrap_or_default();
    let reached = reach::client(context, cluster).await;
    let context = &reached.context(context);
    let (turned, in_place) = (
        in_place::has_turned(restore, facts),
        in_place::replaces(restore).is_some(),
    );
    if facts.claim.as_deref() == Some(naming::uid(restore)) {
        if turned && !in_place {
            return;
        }
        if !in_place::gives_up(restore) || turned {
            seen.objects.backup = backup::choose(context, restore, &namespace, true).await;
        }
        if turned {
            seen.snapshot.former =
                members::former(context.client, restore, &namespace, cluster).await;
        }
        let former = &seen.snapshot.former;
        seen.snapshot.seed = members::seed(named, cluster, former, &mut seen.objects.seed);
        if let Pod::Present(facts) = &mut seen.snapshot.seed.pod {
            choice::name_in(restore, facts);
            if let Some(pod) = &seen.objects.seed.pod {
                provenance::compare(restore, pod, facts);
            }
        }
        seen.snapshot.found = seen.objects.backup.clone().ok();
        members::look_at_storage(context.client, &mut seen.snapshot.seed, &seen.objects.seed).await;
        members::look_at_progress(&mut seen.snapshot.seed, seen.objects.seed.pod.as_ref()).await;
        let pod = seen.objects.seed.pod.as_ref();
        // An aborted restore sends no request to etcd. A slow answer would make the observation too old again and
        // again.
        let asked = if turned {
            members::is_asked(restore, &seen.snapshot)
        } else {
            !in_place::gives_up(restore)
        };
        if asked {
            seen.snapshot.serving =
                members::seed_serving(context, (&namespace, cluster), &seen.snapshot.seed, pod)
                    .await;
        }
        if asked && !turned && !plan::is_verified(restore) && !holds_another(&seen.snapshot) {
            let serving = std::mem::replace(&mut seen.snapshot.serving, Serving::NotAsked);
            let at = members::seed_url(&namespace, cluster, pod);
            seen.snapshot.serving =
                members::compared(context, &seen.snapshot.seed, at, serving).await;
        }
    } else if facts.claim.is_none() && turned {
        if facts.available {
            seen.snapshot.serving = members::cluster_serving(context, &namespace, cluster).await;
        }
    } else if facts.claim.is_none() && restore.spec.overwrite && !in_place::gives_up(restore) {
        seen.objects.backup = backup::choose(context, restore, &namespace, false).await;
        look_at_backup(context, restore, Some(&cluster.spec), seen).await;
    }
}

/// Whether the seed contains another backup. Such a seed is deleted regardless of its answers.
fn holds_another(snapshot: &Snapshot) -> bool {
    let Pod::Present(facts) = &snapshot.seed.pod else {
        return false;
    };
    matches!(facts.another, Some(Another::Holds(_)))
}

/// Checks the backup before the restore creates or locks anything.
async fn look_at_backup(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    there: Option<&EtcdClusterSpec>,
    seen: &mut Observation,
) {
    let namespace = restore.namespace().unwrap_or_default();
    seen.snapshot.source = backup::look(
        context,
        restore,
        &namespace,
        there,
        &mut seen.objects.backup,
    )
    .await;
    if let (Source::Ready(_), Ok(backup)) = (&seen.snapshot.source, &seen.objects.backup) {
        seen.snapshot.found = Some(backup.clone());
    }
}

/// Reads an object. `None` only if the API server reports that it does not exist.
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
