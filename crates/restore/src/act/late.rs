//! Steps of an operator that is late (invariant 11): it stood still after its look, and another one has led since.
//!
//! What is made over the version that was read is refused by the API server then. The rest is not begun when the look is
//! too old; and where a request may have been under way for longer than anybody knows, it is looked once more whether the
//! world is still the one it was planned for, and what was made is taken back, however late.

use std::time::{Duration, Instant};

use api::names::{ANNOTATION_RESTORE, MANAGER_RESTORE};
use api::{EtcdCluster, EtcdRestore};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt};
use runtime::apply::{self, Created};
use runtime::outcome::Failure;

use super::{Error, Hands, STOP_SECONDS, create, known_cluster, release};
use crate::observe::{Seen, members};
use crate::observed::Former;
use crate::plan::in_place;
use crate::{choice, naming};

/// How old a look may be when a step is made of it that the API server would make at any time. Shorter than the lease.
pub(super) const LONGEST: Duration = Duration::from_secs(10);
/// How often what nobody else would take back is tried to be, and how long in between.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);

/// Invariant 11: who slept through its lease does not finish what it began.
pub(super) fn in_time(since: Instant) -> Result<(), Error> {
    if since.elapsed() > LONGEST {
        return Err(Error::TooOld);
    }
    Ok(())
}

/// Invariants 9 and 11: a seed goes because of what is recorded. An operator that stood still may have read another record,
/// and the seed be a member by now.
pub(super) async fn confirm(hands: &Hands<'_>, restore: &EtcdRestore) -> Result<(), Error> {
    let namespace = restore.namespace().unwrap_or_default();
    let now: Option<EtcdRestore> = hands.read(&namespace, &restore.name_any()).await?;
    let why = match now.filter(|now| naming::uid(now) == naming::uid(restore)) {
        None => "the EtcdRestore is gone",
        Some(now) if choice::recorded(&now) == choice::recorded(restore) => return Ok(()),
        Some(_) => "another backup was recorded since the EtcdRestore was read",
    };
    Err(Error::Missing(why.to_owned()))
}

/// Invariant 9: all of a seed goes only before the turn. Another operator may have made it meanwhile.
pub(super) async fn confirm_where_it_is(
    hands: &Hands<'_>,
    restore: &EtcdRestore,
    seen: &Seen,
) -> Result<(), Error> {
    if is_where_it_was(hands, restore, seen).await?.is_some() {
        return Ok(());
    }
    let why =
        "the EtcdCluster was claimed, let go or recorded as another cluster since it was read";
    Err(Error::Missing(why.to_owned()))
}

/// Invariant 9: what the cluster turns to is there still. Another operator may have given it up since, and what a pod without
/// a volume holds goes with it.
pub(super) async fn confirm_seed(
    hands: &Hands<'_>,
    restore: &EtcdRestore,
    seen: &Seen,
) -> Result<(), Error> {
    let (namespace, name) = (
        restore.namespace().unwrap_or_default(),
        naming::seed(restore).member,
    );
    let now: Option<Pod> = hands.read(&namespace, &name).await?;
    let is = |pod: Option<&Pod>| pod.map(|pod| (pod.uid(), pod.resource_version()));
    if is(now.as_ref()) == is(seen.children.pod.as_ref()) {
        return in_time(hands.since);
    }
    let why = "the seed's pod has gone, or changed, since it was read";
    Err(Error::Missing(why.to_owned()))
}

/// Makes the EtcdCluster, unless the EtcdRestore has changed since it was read: another operator may have made it, and
/// people have deleted it since. Another one would be claimed by a restore that is done, and nobody would give it members.
/// The look may be older than that of other steps, for a store may take its time to show the backup: so it is `begun` anew.
/// What is made all the same, by a request that was under way for long, goes with the EtcdRestore: to delete an EtcdCluster
/// the operator has no right.
pub(super) async fn create_cluster(
    hands: &Hands<'_>,
    restore: &EtcdRestore,
    cluster: &EtcdCluster,
    begun: Instant,
) -> Result<(), Error> {
    let namespace = restore.namespace().unwrap_or_default();
    let now: Option<EtcdRestore> = hands.read(&namespace, &restore.name_any()).await?;
    let is = |restore: &EtcdRestore| (restore.uid(), restore.resource_version());
    if now.as_ref().map(is) != Some(is(restore)) {
        let why = "the EtcdRestore has changed, or is gone, since it was read";
        return Err(Error::Missing(why.to_owned()));
    }
    in_time(begun)?;
    create(hands, &namespace, cluster).await
}

/// The EtcdCluster, where it is still claimed, and the same cluster is recorded.
async fn is_where_it_was(
    hands: &Hands<'_>,
    restore: &EtcdRestore,
    seen: &Seen,
) -> Result<Option<EtcdCluster>, Error> {
    let before = known_cluster(seen)?;
    let namespace = restore.namespace().unwrap_or_default();
    let now: Option<EtcdCluster> = hands.read(&namespace, &before.name_any()).await?;
    let id = |cluster: &EtcdCluster| cluster.status.as_ref()?.cluster_id.clone();
    Ok(now.filter(|now| {
        let claim = now.annotations().get(ANNOTATION_RESTORE);
        id(now) == id(before)
            && now.uid() == before.uid()
            && claim.map(String::as_str) == Some(naming::uid(restore))
    }))
}

/// The seed's pod, unless the cluster has gone on without it. One that is made late makes the seed of the backup again: in
/// the place of a member of a cluster that was handed over, whose volume nobody has, it would bring back what that cluster
/// was when it began, under the same IDs.
pub(super) async fn create_pod(
    hands: &Hands<'_>,
    restore: &EtcdRestore,
    seen: &Seen,
    pod: &Pod,
) -> Result<(), Error> {
    in_time(hands.since)?;
    let api: Api<Pod> = hands.api(&restore.namespace().unwrap_or_default());
    let Created::New(made) = apply::create(&api, MANAGER_RESTORE, pod).await? else {
        return Ok(());
    };
    let mut tries = 1;
    let kept = loop {
        match keep(hands, restore, seen, &made).await {
            Err(_) if tries < TRIES => tries += 1,
            kept => break kept?,
        }
        tokio::time::sleep(PAUSE).await;
    };
    if kept {
        return Ok(());
    }
    let why = "the seed's pod was made late and is taken back: the cluster has gone on without it";
    Err(Error::Missing(why.to_owned()))
}

/// Takes back what is not wanted; says whether it stays.
async fn keep(
    hands: &Hands<'_>,
    restore: &EtcdRestore,
    seen: &Seen,
    made: &Pod,
) -> Result<bool, Error> {
    if is_wanted(hands, restore, seen).await? {
        return Ok(true);
    }
    let api: Api<Pod> = hands.api(&restore.namespace().unwrap_or_default());
    apply::delete(&api, made, Some(STOP_SECONDS)).await?;
    Ok(false)
}

/// Whether nobody can have written to a seed, or what was written is on its volume.
async fn is_wanted(hands: &Hands<'_>, restore: &EtcdRestore, seen: &Seen) -> Result<bool, Error> {
    let Some(cluster) = is_where_it_was(hands, restore, seen).await? else {
        return Ok(false);
    };
    if cluster.spec.is_durable() || seen.observed.former == Former::NotAsked {
        return Ok(true);
    }
    // After the turn it is made beside members that run. If they have stopped since, that was for one that serves.
    let namespace = restore.namespace().unwrap_or_default();
    match members::former(hands.client, restore, &namespace, &cluster).await {
        Former::Unknown(why) => Err(Error::Missing(why)),
        former => Ok(!former.have_stopped()),
    }
}

/// Claims exactly the EtcdCluster that was seen. An operator that stood still before this write makes it when another one
/// may have let the EtcdRestore go, and nobody would ever take the claim away again. As long as the finalizer is there,
/// somebody does.
pub(super) async fn claim(
    hands: &Hands<'_>,
    restore: &EtcdRestore,
    cluster: &EtcdCluster,
) -> Result<(), Error> {
    let clusters: Api<EtcdCluster> = hands.api(&restore.namespace().unwrap_or_default());
    let uid = Some(naming::uid(restore));
    let claimed =
        apply::annotate(&clusters, MANAGER_RESTORE, cluster, ANNOTATION_RESTORE, uid).await;
    // After any other answer it may be there.
    if claimed.as_ref().is_err_and(|it| it.reason() == "Conflict") {
        return Ok(claimed?);
    }
    let mut tries = 1;
    while let Err(error) = unclaim(hands, restore, cluster).await {
        if tries == TRIES {
            return Err(error);
        }
        tries += 1;
        tokio::time::sleep(PAUSE).await;
    }
    Ok(claimed?)
}

/// Takes the claim back where nobody holds the EtcdRestore any more, of the EtcdCluster as it is by now.
async fn unclaim(
    hands: &Hands<'_>,
    restore: &EtcdRestore,
    cluster: &EtcdCluster,
) -> Result<(), Error> {
    let (namespace, uid) = (
        restore.namespace().unwrap_or_default(),
        naming::uid(restore),
    );
    let now: Option<EtcdRestore> = hands.read(&namespace, &restore.name_any()).await?;
    if now.is_some_and(|now| naming::uid(&now) == uid && in_place::is_held(&now)) {
        return Ok(());
    }
    let claimed: Option<EtcdCluster> = hands.read(&namespace, &cluster.name_any()).await?;
    let claimed = claimed.filter(|cluster| {
        let claim = cluster.annotations().get(ANNOTATION_RESTORE);
        claim.map(String::as_str) == Some(uid)
    });
    match claimed {
        Some(cluster) => release(hands, restore, &cluster).await,
        None => Ok(()),
    }
}
