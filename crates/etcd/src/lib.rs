//! Access of the operators to an etcd cluster: the trait [`Etcd`], a real client, and a fake cluster for tests.
//!
//! Callers address members by client URL. This crate does not use Kubernetes. The client enforces a deadline for every
//! call, so a member that does not respond delays its caller only until the deadline.

mod access;
mod answer;
mod channel;
mod client;
#[cfg(feature = "fake")]
pub mod fake;
mod inspect;
mod limits;
mod login;
mod port;
#[cfg(feature = "testing")]
pub mod testing;

pub use access::{Access, Credentials, TlsAccess};
pub use client::{
    Change, Deadlines, EtcdClient, LeaseTtl, MAX_WATCH_MESSAGE, Served, Value, Watch, WatchBatch,
    WatchError, WatchEvent, served,
};
pub use inspect::{InspectError, Inspected, Inspector, Revisions, WalkError};
pub use port::{
    Added, Alarm, AlarmKind, ClusterId, Error, Etcd, KeyHash, Login, Member, MemberId, Members,
    Pulse, Snapshot, Status,
};
