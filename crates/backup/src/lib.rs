//! The backup operator: takes a snapshot of an etcd cluster and brings it to a store, as EtcdBackup objects say.
//!
//! It changes nothing in etcd, and in the store nothing but the two objects of its own backup: the snapshot at
//! the path of the spec and the manifest beside it (invariant 13).

mod act;
pub mod app;
pub mod candidates;
mod controller;
mod observe;
pub mod observed;
pub mod plan;
mod source;
pub mod status;
pub mod transfer;
mod workers;
