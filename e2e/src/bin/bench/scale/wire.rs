//! The protobuf messages of etcd's API that the operator uses. The field numbers (`tag`) are those of etcd's
//! `rpc.proto`.

use prost::Message;

/// `ResponseHeader`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Header {
    #[prost(uint64, tag = "1")]
    pub(super) cluster_id: u64,
    #[prost(uint64, tag = "2")]
    pub(super) member_id: u64,
    #[prost(int64, tag = "3")]
    pub(super) revision: i64,
    #[prost(uint64, tag = "4")]
    pub(super) raft_term: u64,
}

/// A response that contains only a header. It also stands for a `RangeResponse` or `AlarmResponse` with an empty list.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Empty {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Member {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    #[prost(string, tag = "2")]
    pub(super) name: String,
    #[prost(string, repeated, tag = "3")]
    pub(super) peer_urls: Vec<String>,
    #[prost(string, repeated, tag = "4")]
    pub(super) client_urls: Vec<String>,
    #[prost(bool, tag = "5")]
    pub(super) is_learner: bool,
}

/// The responses of `MemberList`, `MemberRemove`, `MemberPromote` and `MemberUpdate`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Members {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(message, repeated, tag = "2")]
    pub(super) members: Vec<Member>,
}

/// `MemberAddResponse`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Added {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(message, optional, tag = "2")]
    pub(super) member: Option<Member>,
    #[prost(message, repeated, tag = "3")]
    pub(super) members: Vec<Member>,
}

/// `MemberAddRequest`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Add {
    #[prost(string, repeated, tag = "1")]
    pub(super) peer_urls: Vec<String>,
    #[prost(bool, tag = "2")]
    pub(super) is_learner: bool,
}

/// A request with the ID of one member: `MemberRemoveRequest`, `MemberPromoteRequest` or `MoveLeaderRequest`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct OneMember {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
}

/// `MemberUpdateRequest`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Update {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    #[prost(string, repeated, tag = "2")]
    pub(super) peer_urls: Vec<String>,
}

/// A request with one revision: `CompactionRequest` or `HashKVRequest`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct AtRevision {
    #[prost(int64, tag = "1")]
    pub(super) revision: i64,
}

/// `HashKVResponse`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct KeyHash {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(uint32, tag = "2")]
    pub(super) hash: u32,
    #[prost(int64, tag = "3")]
    pub(super) compact_revision: i64,
    #[prost(int64, tag = "4")]
    pub(super) hash_revision: i64,
}

/// `StatusResponse`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Status {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(string, tag = "2")]
    pub(super) version: String,
    #[prost(int64, tag = "3")]
    pub(super) db_size: i64,
    #[prost(uint64, tag = "4")]
    pub(super) leader: u64,
    #[prost(uint64, tag = "5")]
    pub(super) raft_index: u64,
    #[prost(uint64, tag = "6")]
    pub(super) raft_term: u64,
    #[prost(uint64, tag = "7")]
    pub(super) raft_applied_index: u64,
    #[prost(string, repeated, tag = "8")]
    pub(super) errors: Vec<String>,
    #[prost(int64, tag = "9")]
    pub(super) db_size_in_use: i64,
    #[prost(bool, tag = "10")]
    pub(super) is_learner: bool,
    #[prost(string, tag = "11")]
    pub(super) storage_version: String,
}
