//! Reads Kubernetes objects, the metadata of the backup, and etcd. Every read has a time limit, and data that cannot
//! be read is `Unknown`.

mod backup;
mod bucket;
mod copies;
pub(crate) mod members;
mod pod;
pub(crate) mod point;
pub(crate) mod provenance;
mod reach;
mod search;
mod stored;
mod tls;

use std::sync::Arc;
use std::time::Duration;

use api::cluster::{self, ClusterChange, EtcdClusterSpec};
use api::conditions::{self, ConditionType};
use api::names::ANNOTATION_RESTORE;
use api::problem::Chain;
use api::{EtcdCluster, EtcdRestore};
use etcd::Etcd;
use futures::FutureExt;
use kube::{Api, Client, Resource, ResourceExt};
use runtime::image::OwnImage;
use runtime::slots::Slots;
use serde::de::DeserializeOwned;
use store::grants::Grants;
use tokio::time::timeout;

use crate::plan::{choice, dry_run, effective, in_place};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{
    Cluster, ClusterFacts, Missing, Objects, Observation, OtherBackup, Pod, SeedObjects, Serving,
    Snapshot, Source,
};
use crate::{naming, plan};

/// Time limit for one request to the API server.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for all requests to the store in an observation.
const STORE_TIMEOUT: Duration = Duration::from_secs(30);

/// The clients and settings for an observation.
pub struct ObserveContext<'a> {
    /// The client of the API server.
    pub client: &'a Client,
    /// The client for the etcd of the seed and of the restored cluster.
    pub etcd: &'a dyn Etcd,
    /// The storage locations that each namespace may use with the operator's own cloud identity.
    pub grants: &'a Grants,
    /// Limits the number of concurrent reads of manifests.
    pub reads: &'a Arc<Slots>,
    /// The image of seed pods.
    pub image: &'a OwnImage,
    /// The problem of the Secrets for connections to the members, if any.
    pub fault: Option<&'a str>,
}

/// Reads the data that the plan needs.
pub async fn observe(context: &ObserveContext<'_>, restore: &EtcdRestore) -> Observation {
    let mut observation = Observation {
        snapshot: Snapshot::not_read(),
        objects: Objects {
            cluster: None,
            effective: None,
            backup: Err(Trouble::new(Reason::Unknown, "the backup was not read")),
            image: Err("the image was not read".to_owned()),
            seed: SeedObjects::default(),
        },
    };
    if plan::final_plan(restore).is_some() {
        return observation;
    }
    let namespace = restore.namespace().unwrap_or_default();
    match read::<EtcdCluster>(context.client, &namespace, naming::target(restore)).await {
        Err(why) => observation.snapshot.cluster = Cluster::Unknown(why),
        Ok(None) => {
            if in_place::is_aborted(restore) {
                return observation;
            }
            choose(context, restore, false, &mut observation).await;
            if dry_run::is_dry_run(restore) {
                report_choice(&mut observation);
            } else if restore
                .status
                .as_ref()
                .is_some_and(|status| status.seed.is_some())
            {
                check_backup(context, restore, None, &mut observation).await;
            }
        }
        Ok(Some(cluster)) => {
            let lock = cluster.annotations().get(ANNOTATION_RESTORE);
            let locked = lock.map(String::as_str) == Some(naming::uid(restore));
            let named = members::named(context, restore, &namespace, (&cluster, locked)).await;
            // If the seed's pod cannot be read, `pod` is `None`, as if no pod existed. `as_started` then uses the TLS
            // settings in the status or in the spec of the EtcdCluster.
            let pod = named.pod.as_ref().ok().and_then(Option::as_ref);
            let effective = effective::as_started(&cluster, pod, locked);
            let certificates = tls::read(context.client, &namespace, &effective).await;
            let effective = effective::as_addressed(effective, &namespace, &certificates);
            let mut facts = facts(&effective);
            facts
                .problems
                .extend(tls::problems(&effective, &certificates));
            let read = read_target(
                context,
                restore,
                (&effective, &facts),
                named,
                &mut observation,
            );
            Box::pin(read).await;
            observation.snapshot.cluster = match cluster.metadata.deletion_timestamp {
                Some(_) => Cluster::Terminating,
                None => Cluster::Present(Box::new(facts)),
            };
            observation.objects.image = context.image.get().await.cloned();
            observation.objects.effective = Some(effective.spec);
            observation.objects.cluster = Some(cluster);
        }
    }
    observation
}

/// Reads the data that depends on the restore lock of the EtcdCluster:
///
/// - With the lock of this restore: the seed and the old members.
/// - Without a lock after the cutover: the etcd of the restored cluster.
/// - Without a lock before the cutover: the backup, if `spec.overwrite` is true.
/// - For a dry run without the lock of this restore: the point in the recorded changes.
async fn read_target(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    (cluster, facts): (&EtcdCluster, &ClusterFacts),
    named: members::NamedObjects,
    observation: &mut Observation,
) {
    let namespace = restore.namespace().unwrap_or_default();
    let reached = reach::client(context, cluster).await;
    let context = &reached.context(context);
    let cut_over = in_place::has_cut_over(restore, facts);
    if facts.lock.as_deref() == Some(naming::uid(restore)) {
        if cut_over && in_place::replaces(restore).is_none() {
            return;
        }
        read_seed(context, restore, (cluster, cut_over), named, observation).await;
    } else if dry_run::is_dry_run(restore) {
        choose(context, restore, false, observation).await;
        report_choice(observation);
    } else if facts.lock.is_none() && cut_over {
        if facts.available {
            observation.snapshot.serving =
                members::cluster_serving(context, &namespace, cluster).await;
        }
    } else if facts.lock.is_none() && restore.spec.overwrite && !in_place::is_aborted(restore) {
        choose(context, restore, false, observation).await;
        check_backup(context, restore, Some(&cluster.spec), observation).await;
    }
}

/// Reads the seed and the old members of an EtcdCluster with the lock of this restore.
async fn read_seed(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    (cluster, cut_over): (&EtcdCluster, bool),
    named: members::NamedObjects,
    observation: &mut Observation,
) {
    let namespace = restore.namespace().unwrap_or_default();
    if !in_place::is_aborted(restore) || cut_over {
        choose(context, restore, true, observation).await;
    }
    let Observation { snapshot, objects } = observation;
    if cut_over {
        snapshot.old_members =
            members::old_members(context.client, restore, &namespace, cluster).await;
    }
    let old_members = &snapshot.old_members;
    snapshot.seed = members::seed(named, cluster, old_members, &mut objects.seed);
    if let Pod::Present(facts) = &mut snapshot.seed.pod {
        choice::name_missing_backup_in(restore, facts);
        if let Some(pod) = &objects.seed.pod {
            provenance::compare(restore, pod, facts);
        }
    }
    snapshot.found = objects.backup.clone().ok();
    members::check_storage(context.client, &mut snapshot.seed, &objects.seed).await;
    members::read_progress(&mut snapshot.seed, objects.seed.pod.as_ref()).await;
    let pod = objects.seed.pod.as_ref();
    // Before the cutover, an aborted restore only deletes the seed, so it does not query the seed's etcd. A slow answer
    // would make the observation older than ten seconds, and the deletion would not be sent.
    let queries_seed = if cut_over {
        members::needs_answer(restore, snapshot)
    } else {
        !in_place::is_aborted(restore)
    };
    if queries_seed {
        snapshot.serving =
            members::seed_serving(context, (&namespace, cluster), &snapshot.seed, pod).await;
    }
    if queries_seed && !cut_over && !plan::is_verified(restore) && !contains_other_backup(snapshot)
    {
        let serving = std::mem::replace(&mut snapshot.serving, Serving::NotRead);
        let url = members::seed_url(&namespace, cluster, pod);
        snapshot.serving = members::compare_hash(context, &snapshot.seed, url, serving).await;
    }
}

/// Chooses the backup. If a pod must search recorded changes first, `observation.snapshot.source` contains the next
/// step of this pod.
async fn choose(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    locked: bool,
    observation: &mut Observation,
) {
    let namespace = restore.namespace().unwrap_or_default();
    // The future contains the nested types of the stores. Without `boxed`, the compiler exceeds its recursion limit
    // when it checks that this future is `Send`.
    let chosen = backup::choose(context, restore, &namespace, locked).boxed();
    let chosen = chosen.await;
    observation.objects.backup = chosen.map_err(|missing| match missing {
        Missing::Trouble(trouble) => trouble,
        Missing::Search(step) => {
            observation.snapshot.source = Source::Search(step);
            let message = "a pod has not searched the recorded changes yet";
            Trouble::new(Reason::InProgress, message)
        }
    });
}

/// Passes the chosen backup, or the reason for which no backup can be chosen, to the plan of a dry run. A dry run needs
/// no check of a cluster.
fn report_choice(observation: &mut Observation) {
    if matches!(observation.snapshot.source, Source::Search(_)) {
        return;
    }
    match &observation.objects.backup {
        Ok(chosen) => observation.snapshot.found = Some(chosen.clone()),
        Err(trouble) => observation.snapshot.source = Source::Unavailable(trouble.clone()),
    }
}

/// True if the seed's data differs from the recorded backup. Such a seed is deleted without a query of its etcd.
fn contains_other_backup(snapshot: &Snapshot) -> bool {
    let Pod::Present(facts) = &snapshot.seed.pod else {
        return false;
    };
    matches!(facts.other_backup, Some(OtherBackup::Contains(_)))
}

/// Checks the backup before the restore creates or locks the EtcdCluster.
async fn check_backup(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    existing: Option<&EtcdClusterSpec>,
    observation: &mut Observation,
) {
    let namespace = restore.namespace().unwrap_or_default();
    let Observation { snapshot, objects } = observation;
    if matches!(snapshot.source, Source::Search(_)) {
        return;
    }
    snapshot.source =
        backup::check(context, restore, &namespace, existing, &mut objects.backup).await;
    if let (Source::Ready(_), Ok(backup)) = (&snapshot.source, &objects.backup) {
        snapshot.found = Some(backup.clone());
    }
}

/// Reads an object. `None` only if the API server answers that the object does not exist.
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
    match timeout(READ_TIMEOUT, api.get_opt(name)).await {
        Ok(Ok(found)) => Ok(found),
        Ok(Err(error)) => Err(Chain(&error).to_string()),
        Err(_) => Err(format!(
            "{} {name}: no answer within {READ_TIMEOUT:?}",
            K::kind(&())
        )),
    }
}

fn facts(cluster: &EtcdCluster) -> ClusterFacts {
    let mut problems = cluster::validate(cluster);
    problems.extend(cluster::unsafe_to_ignore(&cluster.spec));
    let available = conditions::find(cluster.conditions(), &ConditionType::Available);
    let status = cluster.status.as_ref();
    let change = ClusterChange::Restore;
    let max_backup_age = cluster.spec.max_backup_age_before(&change);
    let needed = max_backup_age.map(|age| cluster.spec.needed_backup(&change, age));
    ClusterFacts {
        uid: cluster.uid().unwrap_or_default(),
        paused: cluster.spec.paused,
        lock: cluster.annotations().get(ANNOTATION_RESTORE).cloned(),
        cluster_id: status.and_then(|status| status.cluster_id.clone()),
        available: conditions::is_true(cluster.conditions(), &ConditionType::Available),
        durable: cluster.spec.is_durable(),
        problems,
        max_backup_age,
        needed_backup: needed.unwrap_or_default(),
        backup: status.and_then(|status| status.backup_for_changes.clone()),
        unavailable_since: available
            .filter(|condition| condition.status == "False")
            .map(|condition| condition.last_transition_time.0),
    }
}

#[cfg(test)]
mod tests;
