//! etcd, as far as membership goes: who may vote, who has which log, what is refused and when.

use std::collections::{BTreeMap, BTreeSet};

/// One member of one etcd cluster.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) learner: bool,
    /// It started once and published its client URLs through a quorum.
    pub(crate) joined: bool,
    /// Since when it has been up; `None` while it is down.
    pub(crate) up_since: Option<u64>,
}

/// One etcd cluster: what its token made.
#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    pub(crate) id: u64,
    pub(crate) members: BTreeMap<u64, Member>,
    pub(crate) formed: bool,
    pub(crate) leader: Option<u64>,
    /// The newest write a client was told is safe.
    pub(crate) acknowledged: u64,
}

/// What a disk holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Data {
    pub(crate) token: String,
    pub(crate) member: u64,
    pub(crate) index: u64,
}

/// How long voters have to be connected before etcd takes a change (5 s in etcd, 2 ticks here).
const CONNECTED: u64 = 2;

impl Cluster {
    pub(crate) fn voters(&self) -> impl Iterator<Item = (&u64, &Member)> {
        self.members.iter().filter(|(_, member)| !member.learner)
    }

    pub(crate) fn quorum(&self) -> usize {
        self.voters().count() / 2 + 1
    }

    pub(crate) fn up(&self) -> usize {
        self.voters()
            .filter(|(_, member)| member.up_since.is_some())
            .count()
    }

    /// A leader was elected and still has a quorum: linearizable answers are given.
    pub(crate) fn serves(&self) -> bool {
        self.formed && self.leader.is_some() && self.up() >= self.quorum()
    }

    pub(crate) fn by_name(&self, name: &str) -> Option<u64> {
        self.members
            .iter()
            .find(|(_, member)| member.name == name)
            .map(|(id, _)| *id)
    }

    pub(crate) fn names(&self) -> BTreeSet<String> {
        self.members
            .values()
            .map(|member| member.name.clone())
            .collect()
    }

    /// `mayAddMember`.
    pub(crate) fn takes_addition(&self, now: u64) -> bool {
        self.serves()
            && self.voters().all(|(_, member)| {
                member
                    .up_since
                    .is_some_and(|since| now >= since + CONNECTED)
            })
    }

    /// `mayRemoveMember`.
    pub(crate) fn takes_removal(&self, id: u64) -> bool {
        if !self.serves() {
            return false;
        }
        let Some(member) = self.members.get(&id) else {
            return true;
        };
        if member.learner {
            return true;
        }
        let others = self.voters().filter(|(other, _)| **other != id);
        let (all, joined) = others.fold((0, 0), |(all, joined), (_, other)| {
            (all + 1, joined + usize::from(other.joined))
        });
        if all == 0 || joined < all / 2 + 1 {
            return false;
        }
        member.up_since.is_none() || self.up() > 1 + (self.voters().count() - 1) / 2
    }
}
