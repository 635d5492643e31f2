//! The trait `Etcd` and its types. Performs no I/O.

use std::collections::BTreeSet;
use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use serde::{Deserialize, Serialize};

/// The 64-bit ID of an etcd cluster. Displayed in hexadecimal, as `etcdctl` does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ClusterId(pub u64);

/// The 64-bit ID of a member. Displayed in hexadecimal, as `etcdctl` does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MemberId(pub u64);

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl FromStr for ClusterId {
    type Err = ParseIntError;

    /// Parses an ID as etcd and its tools write it. Leading zeros are accepted.
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
    /// The ID of the member, which identifies it in membership changes.
    pub id: MemberId,
    /// The name. Empty until the member has started for the first time.
    pub name: String,
    /// The peer URLs in etcd's member list.
    pub peer_urls: Vec<String>,
    /// The client URLs. Empty until the member has started for the first time.
    pub client_urls: Vec<String>,
    /// Whether the member is a learner. A learner receives the log, but does not vote.
    pub is_learner: bool,
}

/// A member list. The list from [`Etcd::members`] is linearizable. The list from [`Etcd::local_members`] may be stale.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    /// The cluster ID in the response header.
    pub cluster_id: ClusterId,
    /// The members, sorted by ID.
    pub members: Vec<Member>,
}

/// The status that one member reports about itself (`Maintenance.Status`). The member responds even without a quorum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The ID of the member's cluster, from the response header.
    pub cluster_id: ClusterId,
    /// The ID of the member that responded, from the response header.
    pub member_id: MemberId,
    /// The etcd version that the member runs, such as `3.6.16`.
    pub version: String,
    /// The leader. `None` if the member knows no leader.
    pub leader: Option<MemberId>,
    /// Whether the member regards itself as a learner.
    pub is_learner: bool,
    /// The newest revision that the member has applied.
    pub revision: i64,
    /// The Raft term that the member reports.
    pub raft_term: u64,
    /// The index of the last Raft entry that the member knows to be committed. Before etcd 3.4, the index of the last
    /// applied entry.
    pub raft_index: u64,
    /// The index of the last Raft entry that the member has applied. Zero before etcd 3.4.
    pub raft_applied_index: u64,
    /// Size of the database file in bytes.
    pub db_size: i64,
    /// Size in bytes of the used part of the database.
    pub db_size_in_use: i64,
    /// Problems that the member reports: alarms, corruption, no leader.
    pub errors: Vec<String>,
    /// The storage version of the member's data, such as `3.6.0`. `None` before etcd 3.6.
    pub storage_version: Option<String>,
    /// The target version of an enabled downgrade, such as `3.5`. `None` if no downgrade is enabled, and before etcd
    /// 3.6.
    pub downgrade: Option<String>,
}

/// Health data from a member's listener for health and metrics. etcd opens this listener before the client listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulse {
    /// The ID of the member that responded.
    pub member_id: MemberId,
    /// Whether the member knows a leader. A learner reports a leader even after it has lost the connection to the
    /// leader, because a learner never starts an election.
    pub has_leader: bool,
    /// The index of the last Raft entry that the member has applied.
    pub raft_applied_index: u64,
    /// The members to which this member is connected. The member detects a broken connection at once, or after 5 s
    /// without data.
    pub peers: BTreeSet<MemberId>,
}

/// The kind of an alarm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AlarmKind {
    /// The database has reached its quota, and the cluster rejects writes.
    NoSpace,
    /// The member's data differs from the data of other members.
    Corrupt,
}

/// An alarm that etcd has raised for a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Alarm {
    /// The member that raised the alarm.
    pub member: MemberId,
    /// The kind of the alarm.
    pub kind: AlarmKind,
}

/// The result of adding a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Added {
    /// The ID that etcd has assigned to the new member.
    pub id: MemberId,
    /// The member list after the addition, from which the caller builds `--initial-cluster` of the new member.
    pub members: Members,
}

/// etcd's hash of the keys at a revision (`HashKV`). Two hashes are comparable if they have the same revision and the
/// same compaction revision. The etcd versions may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KeyHash {
    /// CRC-32C of all key revisions that are not compacted.
    pub hash: u32,
    /// The compaction revision, 0 if etcd was never compacted.
    pub compacted: i64,
}

/// The result of a login with the client's credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Login {
    /// Authentication is disabled. etcd requires no password.
    Off,
    /// etcd accepts the current password.
    Accepted,
    /// etcd rejects the current password, but accepts a previous one.
    Former,
    /// etcd rejects all passwords, with this error.
    Refused(String),
}

/// A snapshot stream: the database file, and then its 32-byte SHA-256.
pub struct Snapshot {
    /// The chunks in the order in which the member sends them, including the SHA-256.
    pub chunks: BoxStream<'static, Result<Bytes, Error>>,
    /// The etcd version in the stream. `None` before etcd 3.6.
    pub version: Option<String>,
}

/// Why an etcd call failed. The texts never contain credentials.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// No member could be reached. The member list is unknown, not empty (invariant 1).
    #[error("no member could be reached: {0}")]
    Unreachable(String),
    /// A member was reached, but did not respond within the deadline. Without a quorum, linearizable calls fail with
    /// this error.
    #[error("no answer within the deadline from {0}")]
    Timeout(String),
    /// The connection broke after a change was sent. etcd may have applied the change, so the client does not repeat it
    /// (`EtcdClient::change`).
    #[error("the answer to a change was lost, and etcd may have applied the change: {0}")]
    AnswerLost(String),
    /// etcd rejects the call temporarily, for example because a learner is not ready, or because there is no leader.
    #[error("etcd rejects the call temporarily: {0}")]
    Unavailable(String),
    /// No member with this ID is in the member list.
    #[error("member not found")]
    MemberNotFound,
    /// A member with one of these peer URLs already exists.
    #[error("a member with this peer URL already exists")]
    PeerUrlExists,
    /// Authentication or authorization failed.
    #[error("access denied: {0}")]
    AccessDenied(String),
    /// The TLS handshake failed or a certificate is invalid.
    #[error("TLS: {0}")]
    Tls(String),
    /// Any other error: an error response of etcd, or a response that the client rejects.
    #[error("the call to etcd failed: {0}")]
    Other(String),
}

/// Calls to an etcd cluster. Client URLs have the form `http://name.namespace.svc:2379`.
///
/// `via` lists client URLs of members. A read is sent to one member after another until a member responds. A change is
/// sent to the next member only if the previous member certainly did not apply it.
#[async_trait]
pub trait Etcd: Send + Sync {
    /// Returns the linearizable member list.
    async fn members(&self, via: &[String]) -> Result<Members, Error>;
    /// Returns the status that one member reports about itself.
    async fn status(&self, member: &str) -> Result<Status, Error>;
    /// Returns the health data of one member. `health` is an address with a port, such as `10.0.0.7:2381`. The request
    /// uses neither TLS nor credentials.
    async fn pulse(&self, health: &str) -> Result<Pulse, Error>;
    /// Returns the local member list of one member, even without a quorum. The list may be stale, so call this function
    /// only while there is no quorum.
    async fn local_members(&self, member: &str) -> Result<Members, Error>;
    /// Returns the raised alarms.
    async fn alarms(&self, via: &[String]) -> Result<Vec<Alarm>, Error>;
    /// Disarms an alarm. Succeeds even if the alarm is not raised.
    async fn disarm(&self, via: &[String], alarm: Alarm) -> Result<(), Error>;
    /// Compacts all revisions before `revision`. Returns after one member has removed them from its database. Succeeds
    /// even if they are already compacted.
    async fn compact(&self, via: &[String], revision: i64) -> Result<(), Error>;
    /// Appends entries to the Raft log until this member has applied the entry with the index `until`, for about ten
    /// seconds at most. The caller repeats the call until `raft_applied_index` reaches `until`. The entries do not
    /// change keys, revisions, leases or alarms.
    async fn append_entries(&self, member: &str, until: u64) -> Result<(), Error>;
    /// Defragments the database file of one member. During the defragmentation, the member answers no other call. After
    /// a timeout, the defragmentation continues, and a second call waits for its end.
    async fn defragment(&self, member: &str) -> Result<(), Error>;
    /// Adds a member that has not started yet.
    async fn add_member(
        &self,
        via: &[String],
        peer_urls: &[String],
        learner: bool,
    ) -> Result<Added, Error>;
    /// Changes the peer URLs of a member. The other members then connect to the new URLs. Idempotent.
    async fn update_member(
        &self,
        via: &[String],
        id: MemberId,
        peer_urls: &[String],
    ) -> Result<(), Error>;
    /// Promotes a learner to a voter. The learner must have caught up. Idempotent.
    async fn promote_member(&self, via: &[String], id: MemberId) -> Result<(), Error>;
    /// Removes a member. Fails with `MemberNotFound` if the member is not in the list.
    async fn remove_member(&self, via: &[String], id: MemberId) -> Result<(), Error>;
    /// Moves the leadership to the voter `to`. `leader` is the client URL of the current leader.
    async fn move_leader(&self, leader: &str, to: MemberId) -> Result<(), Error>;
    /// Enables a downgrade to the previous minor release, such as `3.5`, if etcd accepts it. `None` cancels the
    /// downgrade. Requires etcd 3.6.
    async fn downgrade(&self, via: &[String], to: Option<&str>) -> Result<(), Error>;
    /// Returns the result of a login with the client's credentials. The result may be some minutes old. `None` if the
    /// client has no credentials. A login requires a quorum.
    async fn login(&self, via: &[String]) -> Result<Option<Login>, Error>;
    /// Enables authentication. First creates the client's user or sets its password, and grants it the role `root`.
    /// Each step is idempotent.
    async fn enable_auth(&self, via: &[String]) -> Result<(), Error>;
    /// Disables authentication. Users and roles remain.
    async fn disable_auth(&self, via: &[String]) -> Result<(), Error>;
    /// Sets the password of the client's user in etcd to the current password of the credentials.
    async fn change_password(&self, via: &[String]) -> Result<(), Error>;
    /// Streams a snapshot from one member. The deadline limits the time between two chunks, not the whole stream.
    async fn snapshot(&self, member: &str) -> Result<Snapshot, Error>;
    /// Returns the hash of one member's keys at a revision. `None` if the member has compacted this revision. The
    /// member responds even without a quorum. While it computes the hash, it applies no entries.
    async fn hash(&self, member: &str, revision: i64) -> Result<Option<KeyHash>, Error>;
    /// Returns the number of one member's keys at a revision. `None` if the member has compacted this revision. The
    /// member responds even without a quorum. The member counts in memory, and delays writes by about 0.1 s per million
    /// keys.
    async fn key_count(&self, member: &str, revision: i64) -> Result<Option<i64>, Error>;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The operators compare IDs in statuses as text, so the same ID must always have the same format.
    #[test]
    fn cluster_and_member_ids_have_no_leading_zeros() {
        assert_eq!(
            ClusterId(0x0d33_b92e_7a68_3be3).to_string(),
            "d33b92e7a683be3"
        );
        assert_eq!(MemberId(0xaa).to_string(), "aa");
    }
}
