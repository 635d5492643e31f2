//! The etcd port: what the operators ask of an etcd cluster, as a trait, with the real client and a fake.
//!
//! Callers name the members they want to reach by client URL; nothing here knows Kubernetes.
//! Every call has a deadline that is really applied: a member that hangs costs its caller that long and no more.

mod access;
mod answer;
mod client;
#[cfg(feature = "fake")]
pub mod fake;
mod inspect;
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
