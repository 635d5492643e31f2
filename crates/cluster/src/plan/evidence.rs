//! Finds out which members of a cluster without a serving quorum are lost, and which still have their data.
//!
//! The operator knows the voters' names from the report in the status, and from the member list on each member's disk.
//! Each list may be stale, so the quorum counts as lost only if a majority of every list is lost. Without any list,
//! nothing counts as lost (invariant 1).

use std::collections::BTreeSet;

use etcd::{ClusterId, Members, Status};

use crate::plan::quorum::quorum_of;
use crate::plan::versions::minor;
use crate::plan::view::{self, Data};
use crate::snapshot::{Cause, Disk, Intent, Observed, Pod, Seen, Trouble};

/// A member that has data, according to its pod or its PVC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Member {
    /// The member answers and knows no leader: it is a survivor.
    Survives(Box<Status>),
    /// The member answers and knows a leader, so the quorum is not lost.
    Led,
    /// The member does not answer, but may answer later.
    Silent(String),
    /// The member does not answer and never will: its data is damaged.
    Damaged(String),
}

/// The members of a cluster without a serving quorum, and the data that each member still has.
#[derive(Clone, Debug)]
pub(super) struct Evidence {
    /// Names of all members that at least one list contains as a voter.
    pub(super) voters: BTreeSet<String>,
    /// The members that have data.
    pub(super) members: Vec<(String, Member)>,
    /// True if the data of a majority is lost, or will be deleted together with terminating pods.
    pub(super) is_lost: bool,
    /// True if the data of a majority is lost, and `is_something_left` is false for each lost member.
    pub(super) is_lost_for_sure: bool,
    /// True if no quorum of voters answers, whether or not the silent voters have their data.
    pub(super) is_silent: bool,
}

impl Evidence {
    /// Collects the evidence from the Kubernetes objects of this cluster and the answers of its members.
    pub(super) fn new(observed: &Observed, intent: &Intent, cluster_id: ClusterId) -> Self {
        let lists = lists(observed, cluster_id);
        let names: BTreeSet<&String> = observed.pods.keys().chain(observed.disks.keys()).collect();
        let members: Vec<(String, Member)> = names
            .into_iter()
            .filter(|name| has_data(observed, intent, name))
            .map(|name| (name.clone(), member(observed, cluster_id, name)))
            .collect();
        let led = members.iter().any(|(_, member)| *member == Member::Led);
        // True if no member reports a leader, and in every member list, the voters for which `counts` is true are fewer
        // than a quorum.
        let too_few = |counts: &dyn Fn(&str) -> bool| {
            let few = |list: &BTreeSet<String>| {
                list.iter().filter(|name| counts(name)).count() < quorum_of(list.len())
            };
            !led && !lists.is_empty() && lists.iter().all(few)
        };
        let survives = |name: &str| survives(&members, name);
        Self {
            is_lost: too_few(&|name| has_data(observed, intent, name)),
            is_lost_for_sure: too_few(&|name| is_something_left(observed, intent, name)),
            is_silent: too_few(&survives),
            voters: lists.iter().flatten().cloned().collect(),
            members,
        }
    }

    /// The survivor from which a recovery starts. Of all survivors that can send a snapshot, it has the highest
    /// committed index or, of several with this index, the highest applied index.
    pub(super) fn most_advanced(&self) -> Option<(&str, &Status)> {
        let survivors = self.members.iter().filter_map(|(name, member)| {
            let Member::Survives(status) = member else {
                return None;
            };
            gives_snapshots(status).then_some((name.as_str(), status.as_ref()))
        });
        let progress = |status: &Status| {
            (
                status.raft_index,
                status.raft_applied_index,
                status.revision,
                !status.is_learner,
            )
        };
        // Of two survivors with equal progress, the first by name is selected, so that concurrent operator processes
        // select the same survivor.
        survivors.fold(None, |best: Option<(&str, &Status)>, next| match best {
            Some(best) if progress(best.1) >= progress(next.1) => Some(best),
            _ => Some(next),
        })
    }

    /// The voters whose data is lost, being deleted, or damaged.
    pub(super) fn lost(&self) -> Vec<String> {
        let has_data = |name: &String| {
            let found = self.members.iter().find(|(other, _)| other == name);
            found.is_some_and(|(_, member)| !matches!(member, Member::Damaged(_)))
        };
        let lost = self.voters.iter().filter(|name| !has_data(name));
        lost.cloned().collect()
    }

    /// The voters whose PVC exists and whose volume is lost.
    pub(super) fn without_volume(&self, observed: &Observed) -> Vec<&str> {
        let is_one = |name: &&String| {
            let data = self.members.iter().any(|(other, _)| other == *name);
            !data && observed.disks.get(*name).is_some_and(|disk| disk.lost)
        };
        self.voters
            .iter()
            .filter(is_one)
            .map(String::as_str)
            .collect()
    }

    /// True if the member answers and knows no leader.
    pub(super) fn survives(&self, name: &str) -> bool {
        survives(&self.members, name)
    }

    /// The voters that do not answer, whether or not they have their data.
    pub(super) fn absent(&self) -> Vec<&str> {
        let absent = self.voters.iter().filter(|name| !self.survives(name));
        absent.map(String::as_str).collect()
    }

    /// The members that may answer later, with the reason for their silence.
    pub(super) fn silent(&self) -> Vec<(&str, &str)> {
        let silent = self.members.iter().filter_map(|(name, member)| {
            if let Member::Silent(why) = member {
                return Some((name.as_str(), why.as_str()));
            }
            None
        });
        silent.collect()
    }
}

fn survives(members: &[(String, Member)], name: &str) -> bool {
    let mut found = members.iter().filter(|(other, _)| other == name);
    found.any(|(_, member)| matches!(member, Member::Survives(_)))
}

/// The voters of each list: the members' own lists, and the report in the status unless it describes a former cluster.
fn lists(observed: &Observed, cluster_id: ClusterId) -> Vec<BTreeSet<String>> {
    let mut lists = Vec::new();
    let report = &observed.reported_voters;
    if !report.is_empty() && !is_of_former_cluster(observed, report) {
        lists.push(report.clone());
    }
    let local = observed.recovery.local.iter();
    let ours = local.filter(|list| list.cluster_id == cluster_id && !list.members.is_empty());
    lists.extend(ours.map(voters));
    lists
}

fn is_of_former_cluster(observed: &Observed, report: &BTreeSet<String>) -> bool {
    let replaced = observed.recovery.replaced.as_ref();
    if replaced.is_some_and(|before| before.members.iter().any(|name| report.contains(name))) {
        return true;
    }
    observed.recovery.former().is_some_and(|record| {
        let mut former = record
            .lost_members
            .iter()
            .chain(&record.silent_members)
            .chain([&record.survivor]);
        former.any(|name| report.contains(name))
    })
}

fn voters(list: &Members) -> BTreeSet<String> {
    let voters = list.members.iter().filter(|member| !member.is_learner);
    voters.map(view::name_of).collect()
}

/// True unless the object has the token of another cluster. An object without a token belongs to this cluster.
fn is_ours(token: Option<&String>, intent: &Intent) -> bool {
    token.is_none_or(|token| *token == intent.token)
}

fn pod<'a>(observed: &'a Observed, intent: &Intent, name: &str) -> Option<&'a Pod> {
    let pod = observed.pods.get(name);
    pod.filter(|pod| is_ours(pod.token.as_ref(), intent))
}

fn disk<'a>(observed: &'a Observed, intent: &Intent, name: &str) -> Option<&'a Disk> {
    let disk = observed.disks.get(name);
    disk.filter(|disk| is_ours(disk.token.as_ref(), intent) && !disk.is_evidence())
}

fn has_data(observed: &Observed, intent: &Intent, name: &str) -> bool {
    let (pod, disk) = (pod(observed, intent, name), disk(observed, intent, name));
    // If the volume is lost, a pod without an address has no data, because Kubernetes mounts the volumes before it
    // assigns the address.
    let lost = disk.is_some_and(|disk| disk.lost);
    let pod = pod.filter(|pod| pod.addressed || !lost);
    (pod.is_some() || disk.is_some())
        && view::data(pod, disk, observed.services.get(name), true) == Data::There
}

/// True if the member may still run, or its data may return: its pod exists, a person can restore the lost volume of
/// its PVC, or other software runs the member.
fn is_something_left(observed: &Observed, intent: &Intent, name: &str) -> bool {
    let pod = pod(observed, intent, name).filter(|pod| !pod.failed);
    let strange = |other: &String| other.split(' ').next_back() == Some(name);
    let elsewhere = view::is_elsewhere(observed, name) || observed.strangers.iter().any(strange);
    pod.is_some() || disk(observed, intent, name).is_some() || elsewhere
}

fn member(observed: &Observed, cluster_id: ClusterId, name: &str) -> Member {
    match observed.statuses.get(name) {
        Some(Seen::Known(status)) if status.cluster_id != cluster_id => Member::Silent(
            "a member of another cluster answers at the address of this member".to_owned(),
        ),
        Some(Seen::Known(status)) if status.leader.is_some() => Member::Led,
        Some(Seen::Known(status)) => Member::Survives(Box::new(status.clone())),
        Some(Seen::Unknown(why)) => damaged(observed, name).unwrap_or(Member::Silent(why.clone())),
        None => damaged(observed, name).unwrap_or_else(|| Member::Silent(unheard(observed, name))),
    }
}

fn damaged(observed: &Observed, name: &str) -> Option<Member> {
    let ending = observed.pods.get(name)?.ending.as_ref()?;
    match &ending.cause {
        Cause::Data(why) => Some(Member::Damaged(why.clone())),
        _ => None,
    }
}

fn unheard(observed: &Observed, name: &str) -> String {
    let Some(pod) = observed.pods.get(name) else {
        return "the pod of the member is being recreated".to_owned();
    };
    let trouble = pod.trouble.as_ref().map(Trouble::message);
    trouble.map_or_else(
        || "the pod of the member is starting".to_owned(),
        str::to_owned,
    )
}

/// True if the member can send a snapshot. Before etcd 3.5, a learner cannot: it rejects every stream
/// (`isRPCSupportedForLearner` and the interceptors in etcd's `api/v3rpc`).
fn gives_snapshots(status: &Status) -> bool {
    !status.is_learner || minor(&status.version).is_some_and(|minor| minor >= (3, 5))
}
