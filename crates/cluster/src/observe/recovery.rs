//! What is read when no quorum answers: who the members say the members are, and the seed of a recovery.

use std::collections::BTreeSet;
use std::time::Duration;

use api::EtcdCluster;
use api::cluster::{EtcdClusterStatus, LastBackup, RecoveryPhase, RecoveryStatus};
use api::conditions::ConditionType;
use api::names;
use etcd::Etcd;
use futures::future::join_all;
use kube::ResourceExt;

use crate::observe::{Look, seen};
use crate::reason::Reason;
use crate::snapshot::{Observed, Recovery, SeedAnswer, Seen};

/// How long the list is waited for while a recovery is under way.
const UNDER_WAY: Duration = Duration::from_millis(500);

/// What the object says.
pub(super) fn recorded(cluster: &EtcdCluster, status: &EtcdClusterStatus) -> Recovery {
    let approval = cluster.annotations().get(names::ANNOTATION_RECOVER);
    // One that was under way when a restore replaced the cluster ended with it.
    let token = status.bootstrap.as_ref().map(|bootstrap| &bootstrap.token);
    let is_of_this_cluster = |record: &RecoveryStatus| {
        record.phase != RecoveryPhase::InProgress || token == Some(&record.from_token)
    };
    let available = status
        .conditions
        .iter()
        .find(|condition| condition.type_ == ConditionType::Available.as_str());
    Recovery {
        record: status.recovery.clone().filter(is_of_this_cluster),
        replaced: status.replaced.clone(),
        approval: approval.cloned(),
        stale_approval: status.stale_approval.clone(),
        // A cluster that was stopped on purpose has lost nothing: the time begins when it is to serve again.
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

/// How long the list is waited for. A recovery that is under way is not to be held up by it: a quorum that is back
/// answers at once, and one that comes back cannot have acknowledged anything through the client Service.
pub(super) fn patience(observed: &Observed) -> Duration {
    let record = observed.recovery.record.as_ref();
    let under_way = record.is_some_and(|record| record.phase == RecoveryPhase::InProgress);
    if under_way { UNDER_WAY } else { Duration::MAX }
}

/// What coreos/etcd-operator wrote names members in this way alone; every report of this operator says more of each, and
/// one of those may be of an object before that had the same name.
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

/// Asks what is only worth asking without a quorum.
pub(super) async fn ask(
    (etcd, asks_seed): (&dyn Etcd, &dyn Etcd),
    look: &Look,
    observed: &mut Observed,
) {
    if observed.cluster_id.is_none() || observed.members.known().is_some() {
        return;
    }
    let answer = observed.statuses.iter();
    let answer = answer.filter(|(_, seen)| seen.known().is_some());
    let urls = answer.filter_map(|(name, _)| look.urls.get(name));
    let lists = join_all(urls.map(|url| etcd.local_members(url)));
    let (lists, seed) = tokio::join!(lists, seed(asks_seed, look, observed));
    observed.recovery.local = lists.into_iter().filter_map(Result::ok).collect();
    observed.recovery.seed = seed;
}

/// The first member of the new cluster; `None` without one that could answer.
async fn seed(etcd: &dyn Etcd, look: &Look, observed: &Observed) -> Option<Seen<SeedAnswer>> {
    let record = observed.recovery.record.as_ref()?;
    let name = Some(&record.member).filter(|_| record.phase == RecoveryPhase::InProgress)?;
    // Before its data is there nothing listens.
    observed.pods.get(name).filter(|pod| pod.running)?;
    let url = look.urls.get(name)?;
    let via = [url.clone()];
    let (list, status) = tokio::join!(etcd.members(&via), etcd.status(url));
    let answer = list.and_then(|list| status.map(|status| SeedAnswer { list, status }));
    Some(seen(answer))
}
