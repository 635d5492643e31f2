//! The backup operator: takes snapshots of etcd clusters and writes them to a store, as EtcdBackup objects specify.
//!
//! This crate writes nothing to etcd. The operator writes snapshots and their manifests to the path in the spec, and
//! deletes older backups there according to the retention rules (invariant 13).

pub mod app;
mod cluster_backup;
pub mod command;
pub mod copies;
mod decrypt;
mod execute;
mod metrics;
mod observe;
pub mod plan;
pub mod pvc;
mod reads;
pub mod reason;
mod reconcile;
pub mod recording;
pub mod removal;
mod request;
pub mod retention;
pub mod snapshot;
pub mod status;
pub mod transfer;
pub mod verification;
mod workers;
