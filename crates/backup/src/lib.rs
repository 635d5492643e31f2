//! The backup operator: takes a snapshot of an etcd cluster and brings it to a store, as EtcdBackup objects say.
//!
//! It changes nothing in etcd, and in the store nothing but backups of its own: the snapshot at the path of the spec
//! and the manifest beside it, and those older ones of the same path that a policy does not keep (invariant 13).

pub mod app;
mod cluster_backup;
pub mod command;
mod execute;
mod metrics;
mod observe;
pub mod plan;
pub mod pvc;
pub mod reason;
mod reconcile;
pub mod removal;
pub mod retention;
pub mod snapshot;
pub mod status;
pub mod transfer;
mod workers;
