//! What has to hold when a request is sent, read once more. Another operator may have led since the observation
//! (invariant 11).

use std::time::Instant;

use api::names::ANNOTATION_RESTORE;
use api::{EtcdCluster, EtcdRestore};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use super::{Error, ExecuteContext, in_time};
use crate::naming;
use crate::plan::{Check, choice};

/// Fails if the check does. Returns since when the observation counts as fresh.
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
                // A store may have taken long to show the backup, and nothing but the EtcdRestore matters here.
                return Ok(began);
            }
            missing("the EtcdRestore has changed, or is gone, since it was read")
        }
        Check::SameBackup => has_the_same_backup(context, restore).await.map(|()| since),
        Check::ClusterInPlace(before) => match in_place(context, restore, before).await? {
            Some(_) => Ok(since),
            None => missing(
                "the EtcdCluster was claimed, let go or recorded as another cluster since it was read",
            ),
        },
        Check::SeedUnchanged(before) => {
            if !is_the_seed(context, restore, before.as_deref()).await? {
                return missing("the seed's pod has gone, or changed, since it was read");
            }
            in_time(since).map(|()| since)
        }
    }
}

/// Otherwise another operator may have created the EtcdCluster, and a person deleted it since. A second one would be
/// claimed by a restore that has ended, and get no members.
async fn is_unchanged(context: &ExecuteContext, restore: &EtcdRestore) -> Result<bool, Error> {
    let now = read_again(context, restore).await?;
    let is = |restore: &EtcdRestore| (restore.uid(), restore.resource_version());
    Ok(now.as_ref().map(is) == Some(is(restore)))
}

/// Invariant 9: a seed is deleted because of what is recorded. With another record it may be a member by now.
async fn has_the_same_backup(context: &ExecuteContext, restore: &EtcdRestore) -> Result<(), Error> {
    let now = read_again(context, restore).await?;
    let why = match now.filter(|now| naming::uid(now) == naming::uid(restore)) {
        None => "the EtcdRestore is gone",
        Some(now) if choice::recorded(&now) == choice::recorded(restore) => return Ok(()),
        Some(_) => "another backup was recorded since the EtcdRestore was read",
    };
    Err(Error::Missing(why.to_owned()))
}

/// The EtcdCluster, if it is still claimed by the restore and records the same etcd cluster. Invariant 9: all of a seed
/// is deleted only before the cutover, which another operator may have made.
pub(super) async fn in_place(
    context: &ExecuteContext,
    restore: &EtcdRestore,
    before: &EtcdCluster,
) -> Result<Option<EtcdCluster>, Error> {
    let namespace = restore.namespace().unwrap_or_default();
    let now: Option<EtcdCluster> = context.read(&namespace, &before.name_any()).await?;
    let id = |cluster: &EtcdCluster| cluster.status.as_ref()?.cluster_id.clone();
    Ok(now.filter(|now| {
        let claim = now.annotations().get(ANNOTATION_RESTORE);
        id(now) == id(before)
            && now.uid() == before.uid()
            && claim.map(String::as_str) == Some(naming::uid(restore))
    }))
}

/// Invariant 9: the cluster turns only to a seed that still exists. Another operator may have given it up, and the data
/// of a pod without a volume is lost with the pod.
async fn is_the_seed(
    context: &ExecuteContext,
    restore: &EtcdRestore,
    before: Option<&Pod>,
) -> Result<bool, Error> {
    let namespace = restore.namespace().unwrap_or_default();
    let name = naming::seed(restore).member;
    let now: Option<Pod> = context.read(&namespace, &name).await?;
    let is = |pod: Option<&Pod>| pod.map(|pod| (pod.uid(), pod.resource_version()));
    Ok(is(now.as_ref()) == is(before))
}

pub(super) async fn read_again(
    context: &ExecuteContext,
    restore: &EtcdRestore,
) -> Result<Option<EtcdRestore>, Error> {
    let namespace = restore.namespace().unwrap_or_default();
    context.read(&namespace, &restore.name_any()).await
}
