//! Checks a precondition directly before a request, because another operator process may have changed the objects
//! since the observation (invariant 11).

use std::time::Instant;

use api::names::ANNOTATION_RESTORE;
use api::{EtcdCluster, EtcdRestore};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use super::{Error, ExecuteContext, in_time};
use crate::naming;
use crate::plan::{Check, choice};

/// Fails if the precondition is not met. The next requests may be sent only within ten seconds after the returned time:
/// `since`, or for [`Check::RestoreUnchanged`], the start of this check.
pub(super) async fn confirm(
    context: &ExecuteContext,
    restore: &EtcdRestore,
    check: &Check,
    since: Instant,
) -> Result<Instant, Error> {
    let missing = |why: &str| Err(Error::Missing(why.to_owned()));
    match check {
        Check::RestoreUnchanged => {
            let began = Instant::now();
            if is_unchanged(context, restore).await? {
                // The next request depends only on the EtcdRestore, which was just read, so its ten seconds start at
                // `began`. The observation may be older, because reads from a backup store can take longer than ten
                // seconds.
                return Ok(began);
            }
            missing("the EtcdRestore was changed or deleted after it was read")
        }
        Check::SameBackup => has_same_backup(context, restore).await.map(|()| since),
        Check::ClusterInPlace(before) => match in_place(context, restore, before).await? {
            Some(_) => Ok(since),
            None => missing(
                "the restore lock or the cluster ID of the EtcdCluster changed after it was read",
            ),
        },
        Check::SeedUnchanged(before) => {
            if !is_same_seed(context, restore, before.as_deref()).await? {
                return missing("the seed's pod was changed or deleted after it was read");
            }
            in_time(since).map(|()| since)
        }
    }
}

/// True if the EtcdRestore is unchanged since the observation. If it has changed, another operator process may have
/// completed the restore, and a user may have deleted the EtcdCluster. A new EtcdCluster would then have a lock that no
/// reconcile removes.
async fn is_unchanged(context: &ExecuteContext, restore: &EtcdRestore) -> Result<bool, Error> {
    let now = read_again(context, restore).await?;
    let version = |restore: &EtcdRestore| (restore.uid(), restore.resource_version());
    Ok(now.as_ref().map(version) == Some(version(restore)))
}

/// Fails if the EtcdRestore was deleted, or if its recorded backup has changed since the observation. The plan to
/// delete the seed or its pod is valid only for the backup that was recorded at the time of the observation (invariant
/// 9).
async fn has_same_backup(context: &ExecuteContext, restore: &EtcdRestore) -> Result<(), Error> {
    let now = read_again(context, restore).await?;
    let why = match now.filter(|now| naming::uid(now) == naming::uid(restore)) {
        None => "the EtcdRestore was deleted",
        Some(now) if choice::recorded(&now) == choice::recorded(restore) => return Ok(()),
        Some(_) => "another backup was recorded after the EtcdRestore was read",
    };
    Err(Error::Missing(why.to_owned()))
}

/// The EtcdCluster. `None` if it was deleted, if this restore no longer holds its lock, or if its cluster ID has
/// changed. After the cutover by another operator process, the objects of the seed must not be deleted (invariant 9).
pub(super) async fn in_place(
    context: &ExecuteContext,
    restore: &EtcdRestore,
    before: &EtcdCluster,
) -> Result<Option<EtcdCluster>, Error> {
    let namespace = restore.namespace().unwrap_or_default();
    let now: Option<EtcdCluster> = context.read(&namespace, &before.name_any()).await?;
    let id = |cluster: &EtcdCluster| cluster.status.as_ref()?.cluster_id.clone();
    Ok(now.filter(|now| {
        let lock = now.annotations().get(ANNOTATION_RESTORE);
        id(now) == id(before)
            && now.uid() == before.uid()
            && lock.map(String::as_str) == Some(naming::uid(restore))
    }))
}

/// True if the seed's pod is unchanged since the observation. The cutover needs this pod (invariant 9), because a seed
/// without a volume loses its data with the pod.
async fn is_same_seed(
    context: &ExecuteContext,
    restore: &EtcdRestore,
    before: Option<&Pod>,
) -> Result<bool, Error> {
    let namespace = restore.namespace().unwrap_or_default();
    let name = naming::seed(restore).member;
    let now: Option<Pod> = context.read(&namespace, &name).await?;
    let version = |pod: Option<&Pod>| pod.map(|pod| (pod.uid(), pod.resource_version()));
    Ok(version(now.as_ref()) == version(before))
}

pub(super) async fn read_again(
    context: &ExecuteContext,
    restore: &EtcdRestore,
) -> Result<Option<EtcdRestore>, Error> {
    let namespace = restore.namespace().unwrap_or_default();
    context.read(&namespace, &restore.name_any()).await
}
