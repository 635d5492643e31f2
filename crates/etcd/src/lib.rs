//! Access to etcd clusters: the trait [`Etcd`], a real client, and a fake cluster for tests.
//!
//! Callers address members by client URL, so this crate does not use Kubernetes. Every call has a deadline, so an
//! unresponsive member delays its caller only until the deadline.

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
mod range;
#[cfg(feature = "testing")]
pub mod testing;
mod users;

pub use access::{Access, Credentials, TlsAccess};
pub use client::{
    Change, Deadlines, EtcdClient, KeyPage, LeaseTtl, MAX_WATCH_MESSAGE, Operation, PageError,
    Precondition, Served, Value, Watch, WatchBatch, WatchError, WatchEvent, served,
};
pub use inspect::{InspectError, Inspected, Inspector, Revisions, WalkError};
pub use port::{
    Added, Alarm, AlarmKind, ClusterId, Error, Etcd, KeyHash, Login, Member, MemberId, Members,
    Pulse, Snapshot, Status,
};
pub use range::KeyRange;
pub use users::{KeyAccess, KeyPermission, PasswordCheck, PermissionRange};
