//! The trait and its words. No I/O here.

use std::collections::BTreeSet;
use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use serde::{Deserialize, Serialize};

/// The 64-bit ID of an etcd cluster; shown in hexadecimal as `etcdctl` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ClusterId(pub u64);

/// The 64-bit ID of a member; shown in hexadecimal as `etcdctl` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MemberId(pub u64);

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl FromStr for ClusterId {
    type Err = ParseIntError;

    /// Reads an ID as etcd and its tools write it; leading zeros are accepted.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u64::from_str_radix(text.trim(), 16).map(Self)
    }
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// One entry of etcd's member list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The member's ID: the only thing membership changes are addressed by.
    pub id: MemberId,
    /// Empty until the member has started for the first time.
    pub name: String,
    /// The URLs its peers reach it by, as registered.
    pub peer_urls: Vec<String>,
    /// Empty until the member has started for the first time.
    pub client_urls: Vec<String>,
    /// A learner receives the log and has no vote.
    pub is_learner: bool,
}

/// A linearizable member list: it was confirmed by a quorum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    /// From the response header.
    pub cluster_id: ClusterId,
    /// Sorted by ID.
    pub members: Vec<Member>,
}

/// What one member says of itself (`Maintenance.Status`), answered locally, without a quorum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// From the response header: the cluster this member believes to be part of.
    pub cluster_id: ClusterId,
    /// From the response header: the member that answered.
    pub member_id: MemberId,
    /// The etcd version the member runs, such as `3.6.16`.
    pub version: String,
    /// `None` when the member knows of no leader.
    pub leader: Option<MemberId>,
    /// Whether the member is a learner in its own view.
    pub is_learner: bool,
    /// The store revision applied on this member.
    pub revision: i64,
    /// The raft term of the member.
    pub raft_term: u64,
    /// The index of the last committed raft entry the member knows.
    pub raft_index: u64,
    /// The index of the last raft entry the member has applied.
    pub raft_applied_index: u64,
    /// Bytes of the database file.
    pub db_size: i64,
    /// Bytes of the database in use.
    pub db_size_in_use: i64,
    /// Problems the member reports itself: alarms, corruption, no leader.
    pub errors: Vec<String>,
    /// The version of what it has on its disk, such as `3.6.0`; etcd 3.6 and later tell.
    pub storage_version: Option<String>,
    /// The version the cluster may go back to, such as `3.5`, while a downgrade is enabled; etcd 3.6 and later tell.
    pub downgrade: Option<String>,
}

/// What a member says of itself on its listener for health and metrics, which is open before the one for clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulse {
    /// The member that answered.
    pub member_id: MemberId,
    /// Whether it knows of a leader. A learner never stands for election, so it does not give up one that it has lost.
    pub has_leader: bool,
    /// The index of the last raft entry the member has applied.
    pub raft_applied_index: u64,
    /// The members it has a connection with. One that breaks is noticed at once, or after 5 s of silence.
    pub peers: BTreeSet<MemberId>,
}

/// What an alarm is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AlarmKind {
    /// The quota is used up; the cluster refuses writes.
    NoSpace,
    /// The member's data differs from the others'.
    Corrupt,
}

/// A raised alarm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Alarm {
    /// Whose alarm it is.
    pub member: MemberId,
    /// What it is about.
    pub kind: AlarmKind,
}

/// The answer to an addition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Added {
    /// The ID etcd gave the new member.
    pub id: MemberId,
    /// The list after the addition: what the new member's `--initial-cluster` is made from.
    pub members: Members,
}

/// etcd's own hash of the keys, as they were at a revision (`HashKV`). Hashes can be compared where the revision and
/// the compaction are the same, whatever the version of etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KeyHash {
    /// CRC-32C over every revision of every key that is not compacted.
    pub hash: u32,
    /// The revision the store was compacted at, 0 if never.
    pub compacted: i64,
}

/// How etcd takes the credentials of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Login {
    /// Authentication is off: nobody is asked for a password.
    Off,
    /// The password fits.
    Accepted,
    /// The password does not fit; one it is to replace does.
    Former,
    /// No password fits, and what etcd says.
    Refused(String),
}

/// A snapshot being streamed: the database file followed by its 32-byte SHA-256.
pub struct Snapshot {
    /// The chunks as the member sends them, trailer included.
    pub chunks: BoxStream<'static, Result<Bytes, Error>>,
    /// The etcd version the member named in the stream; absent before etcd 3.6.
    pub version: Option<String>,
}

/// Why an etcd call did not do what was asked. Texts never carry credentials.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// None of the members answered: unknown, not empty (invariant 1).
    #[error("no member could be reached: {0}")]
    Unreachable(String),
    /// A member was reached and did not answer in time; a linearizable call without a quorum ends here.
    #[error("no answer within the deadline from {0}")]
    Timeout(String),
    /// etcd refuses for now (`unhealthy cluster`, `too many learners`, learner not ready, no leader).
    #[error("etcd refuses for now: {0}")]
    Unavailable(String),
    /// The named member is not in the list.
    #[error("member not found")]
    MemberNotFound,
    /// A member with these peer URLs exists already.
    #[error("a member with this peer URL exists already")]
    PeerUrlExists,
    /// Authentication or authorisation failed.
    #[error("access denied: {0}")]
    AccessDenied(String),
    /// TLS handshake or certificate trouble.
    #[error("TLS: {0}")]
    Tls(String),
    /// Anything else etcd answered.
    #[error("etcd answered: {0}")]
    Other(String),
}

/// What the operators ask of an etcd cluster. Client URLs look like `http://name.namespace.svc:2379`.
///
/// `via` lists members any of which may answer; they are tried until one does.
#[async_trait]
pub trait Etcd: Send + Sync {
    /// The linearizable member list.
    async fn members(&self, via: &[String]) -> Result<Members, Error>;
    /// One member's own view.
    async fn status(&self, member: &str) -> Result<Status, Error>;
    /// What one member tells where its health is asked for, at an address and port such as `10.0.0.7:2381`; never over
    /// TLS, and without credentials.
    async fn pulse(&self, health: &str) -> Result<Pulse, Error>;
    /// The member list as one member has it, answered without a quorum: it may be behind. Good for evidence when no
    /// quorum answers, and for nothing else.
    async fn local_members(&self, member: &str) -> Result<Members, Error>;
    /// The alarms raised in the cluster.
    async fn alarms(&self, via: &[String]) -> Result<Vec<Alarm>, Error>;
    /// Takes an alarm back; one that is not raised is no error.
    async fn disarm(&self, via: &[String], alarm: Alarm) -> Result<(), Error>;
    /// Forgets what was before this revision, and returns when one member has it out of its database; a revision
    /// that was compacted before is no error.
    async fn compact(&self, via: &[String], revision: i64) -> Result<(), Error>;
    /// Writes one member's database file anew, without what is free in it. That member answers nothing else
    /// meanwhile. It goes on when the caller does not wait any longer, and a second call waits for the first.
    async fn defragment(&self, member: &str) -> Result<(), Error>;
    /// Adds a member that is not started yet.
    async fn add_member(
        &self,
        via: &[String],
        peer_urls: &[String],
        learner: bool,
    ) -> Result<Added, Error>;
    /// Gives a member other peer URLs; the others dial it there from then on. Giving it those it has is no error.
    async fn update_member(
        &self,
        via: &[String],
        id: MemberId,
        peer_urls: &[String],
    ) -> Result<(), Error>;
    /// Makes a learner that has caught up a voter.
    async fn promote_member(&self, via: &[String], id: MemberId) -> Result<(), Error>;
    /// Removes a member; removing one that is not there is `MemberNotFound`.
    async fn remove_member(&self, via: &[String], id: MemberId) -> Result<(), Error>;
    /// Hands leadership from the leader, reached at its own client URL, to another voter.
    async fn move_leader(&self, leader: &str, to: MemberId) -> Result<(), Error>;
    /// Lets the cluster's members go back to the minor release before theirs, such as `3.5` (3.6 and later), after
    /// etcd has found that they may; `None` takes that back.
    async fn downgrade(&self, via: &[String], to: Option<&str>) -> Result<(), Error>;
    /// How etcd takes the credentials this client has, as last found out within minutes; `None` when it has none. It
    /// takes a quorum.
    async fn login(&self, via: &[String]) -> Result<Option<Login>, Error>;
    /// Turns authentication on with the client's own user as `root`: makes the user or sets its password, gives it
    /// the role `root`, and then turns it on. Each part does no harm when it is done again.
    async fn enable_auth(&self, via: &[String]) -> Result<(), Error>;
    /// Turns authentication off; users and roles stay.
    async fn disable_auth(&self, via: &[String]) -> Result<(), Error>;
    /// Sets the password of the client's own user to the wanted one.
    async fn change_password(&self, via: &[String]) -> Result<(), Error>;
    /// Streams a snapshot from one member. The deadline is for progress, not for the whole.
    async fn snapshot(&self, member: &str) -> Result<Snapshot, Error>;
    /// The hash of the keys as they were at a revision, as one member has them, answered without a quorum; `None` when
    /// it has compacted them since. The member reads its whole database and applies nothing meanwhile.
    async fn hash(&self, member: &str, revision: i64) -> Result<Option<KeyHash>, Error>;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All three operators write IDs into statuses and compare them as text. One in sixteen begins with a zero.
    #[test]
    fn ids_are_written_as_etcd_writes_them_without_leading_zeros() {
        assert_eq!(
            ClusterId(0x0d33_b92e_7a68_3be3).to_string(),
            "d33b92e7a683be3"
        );
        assert_eq!(MemberId(0xaa).to_string(), "aa");
    }
}
