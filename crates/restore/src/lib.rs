//! The restore operator: brings a cluster back from a backup.
//!
//! It creates the EtcdCluster with its claim on it, prepares one seed member whose data directory is restored
//! and verified before etcd starts, records the new cluster in the status, and lets go of the claim last. It
//! never changes or deletes a cluster that is not its own, and it serves nobody's backup to anybody: the seed
//! fetches with its own credentials.

pub mod app;
pub mod command;
pub mod execute;
#[cfg(test)]
mod fake;
mod metrics;
pub mod naming;
pub mod observe;
pub mod outcome;
pub mod plan;
pub mod reason;
mod reconcile;
pub mod seed;
pub mod snapshot;
pub mod source;
pub mod status;
