//! The members in etcd's list, each with its Kubernetes objects.
//!
//! Members are matched by name and addressed by ID, never by position. The name is the first label of the peer URL.

use std::collections::BTreeSet;

use api::names::{cluster_of_member, member_of_url};
use etcd::{Member, MemberId, Members};
use jiff::Timestamp;

use crate::plan::quorum::Quorum;
use crate::snapshot::{Disk, Observed, Pod, Service};

/// State of a member's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// The data is on a volume that exists and is not being deleted.
    There,
    /// The data existed, or may have existed, and is deleted or being deleted.
    Gone,
    /// The member never started, and certainly no pod was ever created for it.
    NeverMade,
    /// No Kubernetes object belongs to the member, and its name is not one of this cluster's: the operator does not
    /// run it.
    Elsewhere,
}

/// The planned fate of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The member stays.
    Stays,
    /// The member serves and is replaced when that is safe, for this reason.
    Leaves(String),
    /// The member does not serve and never will again, for this reason.
    Lost(String),
}

/// Health of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// The member answers for itself and knows a leader.
    Healthy,
    /// The member does not answer, or knows no leader, for this reason.
    Unhealthy(String),
    /// The member is being defragmented, and serves again afterwards.
    Busy,
}

/// A member of the list.
#[derive(Clone, Debug)]
pub struct MemberState<'a> {
    /// The member's entry in the list.
    pub listed: &'a Member,
    /// Name of the member, its pod, its PVC and its Service.
    pub name: String,
    /// Pod of the member.
    pub pod: Option<&'a Pod>,
    /// The persistent volume claim (PVC) of the member.
    pub disk: Option<&'a Disk>,
    /// Service of the member.
    pub service: Option<&'a Service>,
    /// State of the data.
    pub data: Data,
    /// Whether the member serves.
    pub health: Health,
    /// The planned fate.
    pub fate: Fate,
    /// Time at which the member counts as lost if its state does not change.
    pub gone_at: Option<Timestamp>,
    /// The member leaves because its pod must be recreated; the replacement joins first.
    pub followed: bool,
    /// Applied index of a member that follows the leader and does not serve clients yet. Only promotions use it.
    pub follows: Option<u64>,
}

impl MemberState<'_> {
    /// The ID that membership changes use.
    pub fn id(&self) -> MemberId {
        self.listed.id
    }

    /// Whether the member is a voter.
    pub fn votes(&self) -> bool {
        !self.listed.is_learner
    }

    /// Whether the member has joined: it published its client URLs through a quorum.
    pub fn joined(&self) -> bool {
        !self.listed.client_urls.is_empty()
    }

    /// Whether the member answers for itself and knows a leader.
    pub fn serves(&self) -> bool {
        self.health == Health::Healthy
    }

    /// Whether the member does not answer, without a known cause.
    pub fn is_down(&self) -> bool {
        !self.is_healthy() && self.health != Health::Busy && !self.is_joining()
    }

    /// Whether the member follows the leader and does not serve clients yet.
    pub fn is_joining(&self) -> bool {
        self.follows.is_some() && !self.is_lost() && self.health != Health::Busy
    }

    /// Whether the member serves and is expected to continue.
    pub fn is_healthy(&self) -> bool {
        self.serves() && !self.is_lost()
    }

    /// Whether the member counts as lost.
    pub fn is_lost(&self) -> bool {
        matches!(self.fate, Fate::Lost(_))
    }

    /// Healthy, but scheduled for replacement.
    pub fn leaves(&self) -> bool {
        matches!(self.fate, Fate::Leaves(_))
    }

    /// The reason for the replacement.
    pub fn why(&self) -> &str {
        match &self.fate {
            Fate::Stays => "",
            Fate::Leaves(why) | Fate::Lost(why) => why,
        }
    }

    /// Whether the pod was started with an outdated member list and etcd has refused it. etcd compares the two lists
    /// only at its first start, and its flags do not change. First members compare nothing.
    pub fn cannot_join(&self, names: &BTreeSet<String>) -> bool {
        let stale =
            |pod: &Pod| pod.restarts > 0 && !pod.ready && pod.joins && pod.initial != *names;
        !self.joined() && !self.serves() && self.pod.is_some_and(stale)
    }
}

/// All members of the list.
#[derive(Clone, Debug)]
pub struct View<'a> {
    /// The list as etcd returned it.
    pub list: &'a Members,
    /// Sorted by ID.
    pub members: Vec<MemberState<'a>>,
    /// The leader on which the members agree.
    pub leader: Option<MemberId>,
}

impl<'a> View<'a> {
    /// All names in the list.
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

    /// The members that stay or are not started yet. Members to be replaced do not count. Members added by other
    /// software do not count either: no member is removed in their favor.
    pub fn staying(&self) -> impl Iterator<Item = &MemberState<'a>> {
        let ours = |member: &&MemberState| member.data != Data::Elsewhere;
        let all = self.members.iter().filter(ours);
        all.filter(|member| member.fate == Fate::Stays)
    }

    /// Whether enough voters stay for the size in the spec and all voters are healthy. Only then may volumes that the
    /// cluster no longer needs be deleted (invariant 9).
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

    /// The members to which a change is sent: healthy voters, staying members first, the leader before all others.
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

/// The name of a member: the first label of its peer URL, else its own name, else its ID. For a started member of
/// this cluster, etcd's name is the name of the pod, whatever the peer URLs are.
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

/// Whether no Kubernetes object belongs to the member and its name is not one of this cluster's.
pub(super) fn is_elsewhere(observed: &Observed, name: &str) -> bool {
    !is_known(observed, name) && cluster_of_member(name) != Some(&observed.cluster)
}

pub(super) fn is_known(observed: &Observed, name: &str) -> bool {
    observed.pods.contains_key(name)
        || observed.disks.contains_key(name)
        || observed.services.contains_key(name)
}

/// Returns the state of a member's data. `may_have_run`: etcd reports that the member joined, or it was a first
/// member.
pub(super) fn data(
    pod: Option<&Pod>,
    disk: Option<&Disk>,
    service: Option<&Service>,
    may_have_run: bool,
) -> Data {
    // A PVC that is being deleted, or whose volume is lost, is only of use to a pod that has the volume mounted. A
    // pod without its PVC has no data.
    let pod_keeps = pod.is_some_and(|pod| pod.stays() && (!pod.durable || disk.is_some()));
    if disk.is_some_and(Disk::stays) || pod_keeps {
        return Data::There;
    }
    let had_volume = disk.is_some_and(|disk| disk.lost);
    match service {
        // The mark is set before a pod is created: without a mark and without a pod, no pod ever existed.
        Some(service) if !service.started && !may_have_run && pod.is_none() && !had_volume => {
            Data::NeverMade
        }
        _ => Data::Gone,
    }
}
