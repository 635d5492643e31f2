//! The members in etcd's list, each with its Kubernetes objects.
//!
//! The operator matches members with objects by name ([`name_of`]), and uses the member's ID in calls to etcd.

use std::collections::BTreeSet;

use api::names::{cluster_of_member, member_of_url};
use etcd::{Member, MemberId, Members};
use jiff::Timestamp;

use crate::plan::quorum::Quorum;
use crate::snapshot::{Disk, Observed, Pod, Service};

/// The state of a member's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// The data exists, on a volume that is not being deleted or in a pod that keeps it.
    There,
    /// The data existed or may have existed, and has been deleted or is being deleted.
    Gone,
    /// The member never started, and no pod was ever created for it.
    NeverMade,
    /// The operator does not run the member: the member has no Kubernetes object, and its name does not have the form
    /// of this cluster's names.
    Elsewhere,
}

/// The planned fate of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The member is neither lost nor scheduled for replacement.
    Stays,
    /// The member serves. It is replaced, for this reason, as soon as the replacement is safe.
    Leaves(String),
    /// The member does not serve, and is not expected to serve again, for this reason.
    Lost(String),
}

/// The health of a member in the last observation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// The member itself answers and reports a leader.
    Healthy,
    /// The member does not answer, or reports no leader, for this reason.
    Unhealthy(String),
    /// The member is being defragmented. It serves again afterwards.
    Busy,
}

/// A member of etcd's list, with its objects and its state.
#[derive(Clone, Debug)]
pub struct MemberState<'a> {
    /// The member's entry in etcd's member list.
    pub listed: &'a Member,
    /// Name of the member, its pod, its PVC and its Service.
    pub name: String,
    /// Pod of the member, if it exists.
    pub pod: Option<&'a Pod>,
    /// The PersistentVolumeClaim (PVC) of the member, if it exists.
    pub disk: Option<&'a Disk>,
    /// Service of the member, if it exists.
    pub service: Option<&'a Service>,
    /// The state of the member's data.
    pub data: Data,
    /// The health of the member in the last observation.
    pub health: Health,
    /// The planned fate of the member.
    pub fate: Fate,
    /// Time at which the member counts as lost if nothing changes; `None` if the fate does not depend on time.
    pub gone_at: Option<Timestamp>,
    /// True if the replacement joins before this member is removed: for an external member, and for a member whose data
    /// is only in a pod that must be recreated.
    pub followed: bool,
    /// Applied index of a member that follows the leader and does not serve clients yet; `None` for every other member.
    pub follows: Option<u64>,
}

impl MemberState<'_> {
    /// The member's ID, which calls to etcd contain.
    pub fn id(&self) -> MemberId {
        self.listed.id
    }

    /// True if the member is a voter.
    pub fn votes(&self) -> bool {
        !self.listed.is_learner
    }

    /// True if the member has joined: it has published its client URLs, which a quorum has committed.
    pub fn joined(&self) -> bool {
        !self.listed.client_urls.is_empty()
    }

    /// True if the member itself answers and reports a leader.
    pub fn serves(&self) -> bool {
        self.health == Health::Healthy
    }

    /// True if the member is not healthy, and is neither being defragmented nor joining.
    pub fn is_down(&self) -> bool {
        !self.is_healthy() && self.health != Health::Busy && !self.is_joining()
    }

    /// True if the member follows the leader and does not serve clients yet.
    pub fn is_joining(&self) -> bool {
        self.follows.is_some() && !self.is_lost() && self.health != Health::Busy
    }

    /// True if the member serves and does not count as lost.
    pub fn is_healthy(&self) -> bool {
        self.serves() && !self.is_lost()
    }

    /// True if the member counts as lost.
    pub fn is_lost(&self) -> bool {
        matches!(self.fate, Fate::Lost(_))
    }

    /// True if the member serves, and is scheduled for replacement.
    pub fn leaves(&self) -> bool {
        matches!(self.fate, Fate::Leaves(_))
    }

    /// The reason for the replacement or the loss; empty for a member that stays.
    pub fn why(&self) -> &str {
        match &self.fate {
            Fate::Stays => "",
            Fate::Leaves(why) | Fate::Lost(why) => why,
        }
    }

    /// True if the member can never join, because the pod's `--initial-cluster` differs from etcd's member list. A
    /// joining etcd compares the two at its first start and exits, and the flags of a pod are immutable.
    pub fn cannot_join(&self, names: &BTreeSet<String>) -> bool {
        let stale =
            |pod: &Pod| pod.restarts > 0 && !pod.ready && pod.joins && pod.initial != *names;
        !self.joined() && !self.serves() && self.pod.is_some_and(stale)
    }
}

/// All members in etcd's list.
#[derive(Clone, Debug)]
pub struct View<'a> {
    /// The member list as etcd returned it.
    pub list: &'a Members,
    /// The members, sorted by ID.
    pub members: Vec<MemberState<'a>>,
    /// The leader that a member reports for the highest Raft term; `None` if no member reports one.
    pub leader: Option<MemberId>,
}

impl<'a> View<'a> {
    /// The names of all members in etcd's list.
    pub fn names(&self) -> BTreeSet<String> {
        self.members
            .iter()
            .map(|member| member.name.clone())
            .collect()
    }

    /// The members that vote.
    pub fn voters(&self) -> impl Iterator<Item = &MemberState<'a>> {
        self.members.iter().filter(|member| member.votes())
    }

    /// The members that do not vote yet.
    pub fn learners(&self) -> impl Iterator<Item = &MemberState<'a>> {
        self.members.iter().filter(|member| !member.votes())
    }

    /// The members that are neither scheduled for replacement nor lost, including members that have not started.
    /// Members that other software added are left out, because they must not cause the removal of a member of this
    /// cluster.
    pub fn staying(&self) -> impl Iterator<Item = &MemberState<'a>> {
        let ours = |member: &&MemberState| member.data != Data::Elsewhere;
        let all = self.members.iter().filter(ours);
        all.filter(|member| member.fate == Fate::Stays)
    }

    /// True if all voters are healthy, and at least `size` of them stay. Only while it is true, the operator deletes
    /// volumes that the cluster no longer needs (invariant 9).
    pub fn is_complete(&self, size: usize) -> bool {
        let staying = self.staying().filter(|member| member.votes()).count();
        let quorum = self.quorum();
        staying >= size && quorum.healthy() == quorum.voters()
    }

    /// The quorum guard for the voters.
    pub fn quorum(&self) -> Quorum {
        Quorum::new(
            self.voters()
                .map(|member| (member.id(), member.is_healthy())),
        )
    }

    /// Names of the healthy voters to which a change is sent, except the member `without`. Members that stay come
    /// first, with the leader at the beginning.
    pub fn via(&self, without: Option<MemberId>) -> Vec<String> {
        let able = |member: &&MemberState| {
            member.health == Health::Healthy && Some(member.id()) != without
        };
        let mut members: Vec<&MemberState> = self.voters().filter(able).collect();
        members
            .sort_by_key(|member| (member.fate != Fate::Stays, Some(member.id()) != self.leader));
        members.iter().map(|member| member.name.clone()).collect()
    }
}

/// The name of a member. In this order: the name in etcd, if it has the form of the operator's member names; the first
/// label of the peer URL; any other name in etcd; the ID.
pub fn name_of(member: &Member) -> String {
    if cluster_of_member(&member.name).is_some() {
        return member.name.clone();
    }
    let urls = member.peer_urls.iter();
    let named = { urls }.find_map(|url| member_of_url(url));
    match named.unwrap_or(&member.name) {
        "" => member.id.to_string(),
        name => name.to_owned(),
    }
}

/// True if the member has no Kubernetes object, and its name does not have the form of this cluster's names.
pub(super) fn is_elsewhere(observed: &Observed, name: &str) -> bool {
    !is_known(observed, name) && cluster_of_member(name) != Some(&observed.cluster)
}

pub(super) fn is_known(observed: &Observed, name: &str) -> bool {
    observed.pods.contains_key(name)
        || observed.disks.contains_key(name)
        || observed.services.contains_key(name)
}

/// Determines the state of a member's data. `may_have_run`: the member has joined according to etcd, or was a first
/// member of the cluster.
pub(super) fn data(
    pod: Option<&Pod>,
    disk: Option<&Disk>,
    service: Option<&Service>,
    may_have_run: bool,
) -> Data {
    // A pod that has mounted its volume keeps the data, even while the PVC is being deleted or is in phase Lost. If the
    // pod uses a PVC (`durable`) and this PVC does not exist, the data is lost.
    let pod_keeps = pod.is_some_and(|pod| pod.stays() && (!pod.durable || disk.is_some()));
    if disk.is_some_and(Disk::stays) || pod_keeps {
        return Data::There;
    }
    let had_volume = disk.is_some_and(|disk| disk.lost);
    match service {
        // If the pod and the annotation `started` are both missing, the member never had a pod, because the operator
        // sets the annotation on the Service before it creates the pod.
        Some(service) if !service.started && !may_have_run && pod.is_none() && !had_volume => {
            Data::NeverMade
        }
        _ => Data::Gone,
    }
}
