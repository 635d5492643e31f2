//! Sends the requests that the operator needs only without a quorum. Each running member returns the member list on its
//! disk, and the seed of a recovery returns its status.

use std::collections::BTreeSet;
use std::time::Duration;

use api::EtcdCluster;
use api::cluster::{EtcdClusterStatus, LastBackup, RecoveryPhase, RecoveryStatus};
use api::conditions::{ConditionType, find};
use api::names;
use etcd::Etcd;
use futures::future::join_all;
use kube::ResourceExt;

use crate::observe::{KubeSnapshot, seen};
use crate::reason::Reason;
use crate::snapshot::{Observed, Recovery, SeedAnswer, Seen};

/// Deadline of the request for the member list while a recovery is in progress.
const UNDER_WAY: Duration = Duration::from_millis(500);

/// Reads the records of a recovery from the status of the EtcdCluster.
pub(super) fn recorded(cluster: &EtcdCluster, status: &EtcdClusterStatus) -> Recovery {
    let approval = cluster.annotations().get(names::ANNOTATION_RECOVER);
    // The record of an unfinished recovery is ignored if `from_token` is not the current token, because a restore has
    // then replaced the cluster after the recovery had started.
    let token = status.bootstrap.as_ref().map(|bootstrap| &bootstrap.token);
    let is_of_this_cluster = |record: &RecoveryStatus| {
        record.phase != RecoveryPhase::InProgress || token == Some(&record.from_token)
    };
    let available = find(&status.conditions, &ConditionType::Available);
    Recovery {
        record: status.recovery.clone().filter(is_of_this_cluster),
        replaced: status.replaced.clone(),
        approval: approval.cloned(),
        stale_approval: status.stale_approval.clone(),
        // While the cluster hibernates, `unavailable_since` is `None`, because a hibernated cluster is unavailable on
        // purpose.
        unavailable_since: available
            .filter(|condition| {
                condition.status == "False" && !Reason::is_of_hibernation(condition)
            })
            .map(|condition| condition.last_transition_time.0),
        last_backup: status.last_backup.as_ref().map(backup),
        named_before: named_before(status),
        ..Recovery::default()
    }
}

/// Deadline of the request for the member list. During a recovery, the deadline is short, because a lost quorum does
/// not answer. A quorum that returns and answers late loses no write, because the client Service has no endpoints
/// during a recovery.
pub(super) fn patience(observed: &Observed) -> Duration {
    let recovers = observed.recovery.in_progress().is_some();
    if recovers { UNDER_WAY } else { Duration::MAX }
}

/// Names of the members in a status that coreos/etcd-operator wrote: only that operator wrote names without details.
/// Ignores a status that this operator wrote, because it may describe an earlier EtcdCluster of the same name.
fn named_before(status: &EtcdClusterStatus) -> BTreeSet<String> {
    let ours = status.bootstrap.is_some() || !status.member_details.is_empty();
    let members = status.members.iter().filter(|_| !ours);
    let names = members.flat_map(|members| members.ready.iter().chain(&members.unready));
    names.cloned().collect()
}

fn backup(last: &LastBackup) -> String {
    let location = last.location.as_deref().unwrap_or(&last.name);
    match last.revision {
        Some(revision) => format!("{location} at revision {revision}"),
        None => location.to_owned(),
    }
}

pub(super) async fn ask(
    (etcd, asks_seed): (&dyn Etcd, &dyn Etcd),
    snapshot: &KubeSnapshot,
    observed: &mut Observed,
) {
    if observed.cluster_id.is_none() || observed.members.known().is_some() {
        return;
    }
    let answers = observed.answers();
    let urls = answers.filter_map(|(name, _)| snapshot.urls.get(name));
    let lists = join_all(urls.map(|url| etcd.local_members(url)));
    let (lists, seed) = tokio::join!(lists, seed(asks_seed, snapshot, observed));
    observed.recovery.local = lists.into_iter().filter_map(Result::ok).collect();
    observed.recovery.seed = seed;
}

/// Calls the seed of a recovery, the first member of the new cluster. `None` if no seed can answer yet.
async fn seed(
    etcd: &dyn Etcd,
    snapshot: &KubeSnapshot,
    observed: &Observed,
) -> Option<Seen<SeedAnswer>> {
    let name = &observed.recovery.in_progress()?.member;
    // The operator calls the seed only while its etcd container runs: etcd starts after the seed has copied all data.
    observed.pods.get(name).filter(|pod| pod.running)?;
    let url = snapshot.urls.get(name)?;
    let via = [url.clone()];
    let (list, status) = tokio::join!(etcd.members(&via), etcd.status(url));
    let answer = list.and_then(|list| status.map(|status| SeedAnswer { list, status }));
    Some(seen(answer))
}
