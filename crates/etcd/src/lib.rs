//! The etcd port: the operators' interface to an etcd cluster as a trait, with a real client and a fake.
//!
//! Callers address members by client URL. The crate has no knowledge of Kubernetes. Every call has a deadline
//! that is enforced: a member that does not answer delays its caller no longer than the deadline.

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
pub use client::{Deadlines, EtcdClient};
pub use inspect::{InspectError, Inspected, Inspector, Revisions, WalkError};
pub use port::{
    Added, Alarm, AlarmKind, ClusterId, Error, Etcd, KeyHash, Login, Member, MemberId, Members,
    Pulse, Snapshot, Status,
};
