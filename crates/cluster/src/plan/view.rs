//! The members as etcd lists them, each with what Kubernetes has of it.
//!
//! Members are matched by name and named by ID, never by position. The name is the first label of the peer URL.

use std::collections::BTreeSet;

use api::names::{cluster_of_member, member_of_url};
use etcd::{Member, MemberId, Members};
use jiff::Timestamp;

use crate::plan::quorum::Quorum;
use crate::snapshot::{Disk, Observed, Pod, Service};

/// What became of a member's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// It is on a disk that is there and stays.
    There,
    /// The disk was there, or may have been, and is gone or going.
    Gone,
    /// The member never started, and surely no pod was ever made for it.
    NeverMade,
    /// Nothing in Kubernetes belongs to it, and its name is not one of ours: it is somebody else's.
    Elsewhere,
}

/// What is to become of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It stays a member.
    Stays,
    /// It serves, and is replaced when that is safe; this is why.
    Leaves(String),
    /// It does not serve and will not again; this is why.
    Lost(String),
}

/// Whether a member serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// It answers for itself and knows a leader.
    Healthy,
    /// It does not, and this is why.
    Unhealthy(String),
    /// It is being defragmented, and serves again when that is done.
    Busy,
}

/// One member of the list.
#[derive(Clone, Debug)]
pub struct MemberState<'a> {
    /// Its entry in the list.
    pub member: &'a Member,
    /// Its name.
    pub name: String,
    /// Its pod.
    pub pod: Option<&'a Pod>,
    /// Its volume claim.
    pub disk: Option<&'a Disk>,
    /// Its Service.
    pub service: Option<&'a Service>,
    /// What became of its data.
    pub data: Data,
    /// Whether it serves.
    pub health: Health,
    /// What is to become of it.
    pub fate: Fate,
    /// When it will count as gone if nothing changes.
    pub gone_at: Option<Timestamp>,
    /// It leaves because its pod has to be made anew; another member comes first.
    pub followed: bool,
    /// What it has applied, where it follows the leader and does not serve clients yet. It counts for promotions alone.
    pub follows: Option<u64>,
}

impl MemberState<'_> {
    /// What membership changes name it by.
    pub fn id(&self) -> MemberId {
        self.member.id
    }

    /// It votes.
    pub fn votes(&self) -> bool {
        !self.member.is_learner
    }

    /// It has joined: it published its client URLs through a quorum.
    pub fn joined(&self) -> bool {
        !self.member.client_urls.is_empty()
    }

    /// It answers for itself and knows a leader.
    pub fn serves(&self) -> bool {
        self.health == Health::Healthy
    }

    /// It does not answer, and nobody knows why.
    pub fn is_down(&self) -> bool {
        !self.is_healthy() && self.health != Health::Busy && !self.is_joining()
    }

    /// It follows the leader and does not serve clients yet.
    pub fn is_joining(&self) -> bool {
        self.follows.is_some() && !self.is_lost() && self.health != Health::Busy
    }

    /// It answers and will go on answering.
    pub fn is_healthy(&self) -> bool {
        self.serves() && !self.is_lost()
    }

    /// It counts as gone.
    pub fn is_lost(&self) -> bool {
        matches!(self.fate, Fate::Lost(_))
    }

    /// It serves and is to be replaced.
    pub fn leaves(&self) -> bool {
        matches!(self.fate, Fate::Leaves(_))
    }

    /// Why it is to be replaced.
    pub fn why(&self) -> &str {
        match &self.fate {
            Fate::Stays => "",
            Fate::Leaves(why) | Fate::Lost(why) => why,
        }
    }

    /// The pod was started with a list of members that is not the list any more, and etcd has refused it:
    /// it compares the two once, at its first start, and its flags do not change. One that was started as a first
    /// member compares nothing.
    pub fn cannot_join(&self, names: &BTreeSet<String>) -> bool {
        let stale =
            |pod: &Pod| pod.restarts > 0 && !pod.ready && pod.joins && pod.initial != *names;
        !self.joined() && !self.serves() && self.pod.is_some_and(stale)
    }
}

/// The whole list.
#[derive(Clone, Debug)]
pub struct View<'a> {
    /// As etcd answered it.
    pub list: &'a Members,
    /// Sorted by ID.
    pub seats: Vec<MemberState<'a>>,
    /// The leader the members agree on.
    pub leader: Option<MemberId>,
}

impl<'a> View<'a> {
    /// All names in the list.
    pub fn names(&self) -> BTreeSet<String> {
        self.seats.iter().map(|seat| seat.name.clone()).collect()
    }

    /// The members that vote.
    pub fn voters(&self) -> impl Iterator<Item = &MemberState<'a>> {
        self.seats.iter().filter(|seat| seat.votes())
    }

    /// The members that do not vote yet.
    pub fn learners(&self) -> impl Iterator<Item = &MemberState<'a>> {
        self.seats.iter().filter(|seat| !seat.votes())
    }

    /// The members of ours that stay or are yet to be started: those that are to be replaced do not count. Nor do those
    /// that somebody else has added: none of ours leaves for them.
    pub fn staying(&self) -> impl Iterator<Item = &MemberState<'a>> {
        let ours = |seat: &&MemberState| seat.data != Data::Elsewhere;
        let all = self.seats.iter().filter(ours);
        all.filter(|seat| seat.fate == Fate::Stays)
    }

    /// As many of our voters stay as the spec asks for, and all voters are healthy: volumes that the cluster no longer
    /// needs may be deleted (invariant 9).
    pub fn is_complete(&self, size: usize) -> bool {
        let staying = self.staying().filter(|seat| seat.votes()).count();
        let quorum = self.quorum();
        staying >= size && quorum.healthy() == quorum.voters()
    }

    /// The quorum guard.
    pub fn quorum(&self) -> Quorum {
        Quorum::new(self.voters().map(|seat| (seat.id(), seat.is_healthy())))
    }

    /// The members to ask for a change: voters that are healthy, those that stay first, the leader before all.
    pub fn via(&self, without: Option<MemberId>) -> Vec<String> {
        let able =
            |seat: &&MemberState| seat.health == Health::Healthy && Some(seat.id()) != without;
        let mut seats: Vec<&MemberState> = self.voters().filter(able).collect();
        seats.sort_by_key(|seat| (seat.fate != Fate::Stays, Some(seat.id()) != self.leader));
        seats.iter().map(|seat| seat.name.clone()).collect()
    }
}

/// What a member is called here: the first label of its peer URL, else its own name, else its ID.
/// Of one of ours that has started etcd's own name is the pod's, whatever somebody has changed its peer URLs to.
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

/// Whether nothing in Kubernetes belongs to a member, and its name is not one of ours.
pub(super) fn is_elsewhere(observed: &Observed, name: &str) -> bool {
    !is_known(observed, name) && cluster_of_member(name) != Some(&observed.cluster)
}

pub(super) fn is_known(observed: &Observed, name: &str) -> bool {
    observed.pods.contains_key(name)
        || observed.disks.contains_key(name)
        || observed.services.contains_key(name)
}

/// What became of a member's data. `may_have_run`: etcd knows it has joined, or it belonged to the bootstrap.
pub(super) fn data(
    pod: Option<&Pod>,
    disk: Option<&Disk>,
    service: Option<&Service>,
    may_have_run: bool,
) -> Data {
    // A claim that is being deleted, or whose volume is gone, is worth as much as its pod, which may have the volume
    // open; a pod on a claim that is gone has nothing.
    let pod_keeps = pod.is_some_and(|pod| pod.stays() && (!pod.durable || disk.is_some()));
    if disk.is_some_and(Disk::stays) || pod_keeps {
        return Data::There;
    }
    let had_volume = disk.is_some_and(|disk| disk.lost);
    match service {
        // The mark is set before a pod is made: without it, and without a pod, none ever was.
        Some(service) if !service.started && !may_have_run && pod.is_none() && !had_volume => {
            Data::NeverMade
        }
        _ => Data::Gone,
    }
}
