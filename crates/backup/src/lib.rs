//! The backup operator: takes a snapshot of an etcd cluster and brings it to a store, as EtcdBackup objects say.
//!
//! It changes nothing in etcd, and in the store nothing but backups of its own: the snapshot at the path of the spec
//! and the manifest beside it, and those older ones of the same path that a policy does not keep (invariant 13).

mod act;
pub mod app;
pub mod candidates;
pub mod claim;
mod controller;
mod metrics;
mod named;
mod neighbours;
mod observe;
pub mod observed;
mod of_cluster;
pub mod plan;
pub mod removal;
pub mod retention;
pub mod schedule;
mod source;
pub mod status;
pub mod transfer;
mod workers;
