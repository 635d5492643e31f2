//! The state of one simulated etcd cluster. The members share this state instead of using Raft. A change takes effect
//! at once if a quorum runs. Without a quorum, the change is refused.
//!
//! The conditions for adding, removing and promoting members are those of etcd's server (`mayAddMember`,
//! `mayRemoveMember`, `mayPromoteMember`).

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

/// When etcd adds or removes a member, it counts only voters that have been connected for at least this time
/// (`HealthInterval` in etcd).
const HEALTH_INTERVAL: Duration = Duration::from_secs(5);
/// The limit of learners that the operator sets for etcd 3.6 (`ETCD_MAX_LEARNERS`).
const MAX_LEARNERS: usize = 7;

/// The arguments of a member's etcd, from the spec of its pod.
#[derive(Clone, Debug)]
pub(super) struct Start {
    /// The cluster token, which identifies the cluster.
    pub(super) token: String,
    pub(super) name: String,
    pub(super) peer_url: String,
    pub(super) client_url: String,
    /// The name and the peer URL of each member in `--initial-cluster`.
    pub(super) initial: Vec<(String, String)>,
    /// True if the member joins an existing cluster.
    pub(super) joins: bool,
    pub(super) version: String,
    /// The UID of the pod. The pods have no volumes, so a member's data is lost when its pod is deleted.
    pub(super) pod: String,
}

/// The running etcd of a member.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pub(super) version: String,
    since: Instant,
}

/// A member in etcd's member list.
#[derive(Clone, Debug, Default)]
pub(super) struct Member {
    pub(super) id: u64,
    pub(super) name: String,
    pub(super) peer_urls: Vec<String>,
    /// Empty until the member has joined.
    pub(super) client_urls: Vec<String>,
    pub(super) is_learner: bool,
    pub(super) process: Option<Process>,
    /// The UID of the pod that has the data of the member, and the client URL that the member advertises.
    data: Option<(String, String)>,
}

/// The reason why etcd refuses a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    MemberNotFound,
    PeerUrlExists,
    Unhealthy,
    TooFewStarted,
    TooManyLearners,
    LearnerNotReady,
    NotALearner,
    NotLeader,
    BadTransferee,
    NotForLearner,
    Unimplemented,
}

impl Refusal {
    /// The gRPC status code and the message of etcd's `rpctypes`.
    pub(super) fn status(self) -> (u8, &'static str) {
        match self {
            Self::MemberNotFound => (5, "etcdserver: member not found"),
            Self::PeerUrlExists => (9, "etcdserver: Peer URLs already exists"),
            Self::Unhealthy => (14, "etcdserver: unhealthy cluster"),
            Self::TooFewStarted => (
                9,
                "etcdserver: re-configuration failed due to not enough started members",
            ),
            Self::TooManyLearners => (9, "etcdserver: too many learner members in cluster"),
            Self::LearnerNotReady => (
                9,
                "etcdserver: can only promote a learner member which is in sync with leader",
            ),
            Self::NotALearner => (9, "etcdserver: can only promote a learner member"),
            Self::NotLeader => (9, "etcdserver: not leader"),
            Self::BadTransferee => (9, "etcdserver: bad leader transferee"),
            Self::NotForLearner => (9, "etcdserver: rpc not supported for learner"),
            Self::Unimplemented => (
                12,
                "the simulator of the benchmark does not support this call",
            ),
        }
    }
}

/// A cluster. `members` is in the order in which the members were added.
#[derive(Clone, Debug)]
pub(super) struct Cluster {
    pub(super) id: u64,
    pub(super) term: u64,
    /// The index of the last log entry. All running members have applied it.
    pub(super) index: u64,
    pub(super) revision: i64,
    /// The compaction revision; -1 if the store was never compacted.
    pub(super) compacted: i64,
    pub(super) leader: Option<u64>,
    pub(super) members: Vec<Member>,
    /// Number of members that were ever added. The ID of a new member depends on this number, so that all IDs differ.
    added: u64,
}

fn id_of(parts: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    hasher.finish().max(1)
}

impl Cluster {
    /// A cluster with the members of `--initial-cluster`. No member runs yet.
    pub(super) fn bootstrap(start: &Start) -> Self {
        let member = |(name, url): &(String, String)| Member {
            id: id_of((&start.token, url)),
            name: name.clone(),
            peer_urls: vec![url.clone()],
            ..Member::default()
        };
        let members: Vec<Member> = start.initial.iter().map(member).collect();
        Self {
            id: id_of(&start.token),
            term: 1,
            index: members.len() as u64,
            revision: 1,
            compacted: -1,
            leader: None,
            members,
            added: 0,
        }
    }

    pub(super) fn member(&self, id: u64) -> Option<&Member> {
        self.members.iter().find(|member| member.id == id)
    }

    fn voters(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| !member.is_learner)
    }

    fn running(&self) -> usize {
        self.voters()
            .filter(|member| member.process.is_some())
            .count()
    }

    /// Number of voters that etcd considers connected when it changes the members: `asked`, which received the call,
    /// and all voters that have run for [`HEALTH_INTERVAL`].
    fn connected(&self, asked: u64, now: Instant) -> usize {
        let is_connected = |member: &&Member| {
            let process = member.process.as_ref();
            process.is_some_and(|process| {
                member.id == asked || now.duration_since(process.since) >= HEALTH_INTERVAL
            })
        };
        self.voters().filter(is_connected).count()
    }

    /// True if a majority of the voters runs.
    pub(super) fn has_quorum(&self) -> bool {
        self.running() > self.voters().count() / 2
    }

    /// Starts etcd for a member, and returns the ID of the member. Returns `None` where real etcd would exit: the
    /// member is not in the list, or its data was lost with an earlier pod.
    pub(super) fn start(&mut self, start: &Start, now: Instant) -> Option<u64> {
        let entry = |member: &&mut Member| member.peer_urls.contains(&start.peer_url);
        let member = self.members.iter_mut().find(entry)?;
        if member
            .data
            .as_ref()
            .is_some_and(|(pod, _)| *pod != start.pod)
        {
            return None;
        }
        member.name.clone_from(&start.name);
        member.data = Some((start.pod.clone(), start.client_url.clone()));
        member.process = Some(Process {
            version: start.version.clone(),
            since: now,
        });
        let id = member.id;
        self.settle();
        Some(id)
    }

    /// Stops the etcd of a member. The member stays in the list.
    pub(super) fn stop(&mut self, id: u64) {
        if let Some(member) = self.members.iter_mut().find(|member| member.id == id) {
            member.process = None;
        }
        self.settle();
    }

    /// Removes a leader that does not run, elects a leader if a quorum runs, and publishes the client URLs of new
    /// members.
    fn settle(&mut self) {
        if !self.has_quorum() {
            self.leader = None;
            return;
        }
        let leads = |member: &&Member| Some(member.id) == self.leader && member.process.is_some();
        if !self.voters().any(|member| leads(&member)) {
            let next = self.voters().find(|member| member.process.is_some());
            self.leader = next.map(|member| member.id);
            self.term += 1;
            self.index += 1;
        }
        for member in &mut self.members {
            if let (true, Some((_, url)), true) = (
                member.client_urls.is_empty(),
                &member.data,
                member.process.is_some(),
            ) {
                member.client_urls = vec![url.clone()];
                self.index += 1;
            }
        }
    }

    fn is_taken(&self, urls: &[String], except: Option<u64>) -> bool {
        let others = self.members.iter().filter(|one| Some(one.id) != except);
        { others }.any(|member| member.peer_urls.iter().any(|url| urls.contains(url)))
    }

    /// Adds a member to the list. Its etcd does not run yet. `asked` is the ID of the member that received the call.
    pub(super) fn add(
        &mut self,
        asked: u64,
        urls: &[String],
        is_learner: bool,
        now: Instant,
    ) -> Result<u64, Refusal> {
        let voters = self.voters().count();
        let started = |member: &&Member| !member.client_urls.is_empty();
        let started = self.voters().filter(started).count();
        if !is_learner && voters > 1 && started < usize::midpoint(voters, 1) + 1 {
            return Err(Refusal::TooFewStarted);
        }
        if self.connected(asked, now) < voters {
            return Err(Refusal::Unhealthy);
        }
        if self.is_taken(urls, None) {
            return Err(Refusal::PeerUrlExists);
        }
        if is_learner && self.members.len() - voters >= MAX_LEARNERS {
            return Err(Refusal::TooManyLearners);
        }
        self.added += 1;
        self.index += 1;
        let id = id_of((self.id, urls, self.added));
        self.members.push(Member {
            id,
            peer_urls: urls.to_vec(),
            is_learner,
            ..Member::default()
        });
        self.settle();
        Ok(id)
    }

    /// Removes a member from the list. Its etcd stops.
    pub(super) fn remove(&mut self, asked: u64, id: u64, now: Instant) -> Result<(), Refusal> {
        let member = self.member(id).ok_or(Refusal::MemberNotFound)?;
        let left = self.voters().count() - usize::from(!member.is_learner);
        let counts = !member.is_learner && member.process.is_some();
        if counts && left > 0 && self.connected(asked, now).saturating_sub(1) < 1 + left / 2 {
            return Err(Refusal::Unhealthy);
        }
        self.members.retain(|member| member.id != id);
        self.index += 1;
        self.settle();
        Ok(())
    }

    pub(super) fn update(&mut self, id: u64, urls: &[String]) -> Result<(), Refusal> {
        if self.is_taken(urls, Some(id)) {
            return Err(Refusal::PeerUrlExists);
        }
        let member = self.members.iter_mut().find(|member| member.id == id);
        member.ok_or(Refusal::MemberNotFound)?.peer_urls = urls.to_vec();
        self.index += 1;
        Ok(())
    }

    pub(super) fn promote(&mut self, id: u64) -> Result<(), Refusal> {
        let member = self.members.iter_mut().find(|member| member.id == id);
        let member = member.ok_or(Refusal::MemberNotFound)?;
        if !member.is_learner {
            return Err(Refusal::NotALearner);
        }
        if member.process.is_none() {
            return Err(Refusal::LearnerNotReady);
        }
        member.is_learner = false;
        self.index += 1;
        self.settle();
        Ok(())
    }

    pub(super) fn move_leader(&mut self, asked: u64, to: u64) -> Result<(), Refusal> {
        if self.leader != Some(asked) {
            return Err(Refusal::NotLeader);
        }
        let able = |member: &&Member| member.id == to && member.process.is_some();
        if !self.voters().any(|member| able(&member)) {
            return Err(Refusal::BadTransferee);
        }
        if to != asked {
            self.leader = Some(to);
            self.term += 1;
            self.index += 1;
        }
        Ok(())
    }

    /// True if the cluster has exactly `size` members, which are all voters and run this version.
    pub(super) fn is_complete(&self, size: usize, version: &str) -> bool {
        let runs = |member: &Member| {
            let process = member.process.as_ref();
            !member.is_learner && process.is_some_and(|process| process.version == version)
        };
        self.members.len() == size && self.members.iter().all(runs)
    }
}

#[cfg(test)]
pub(super) mod tests;
