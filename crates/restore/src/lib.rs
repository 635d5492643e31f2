//! The restore operator: creates or replaces a cluster from a backup.
//!
//! The operator creates the EtcdCluster with a restore lock, or locks an existing EtcdCluster. It never changes or
//! deletes a cluster that it has not locked. Then the operator creates the seed, the first member of the new cluster.
//! The seed's pod downloads the backup, creates the data directory and verifies it before etcd starts. The operator
//! records the new cluster in the status of the EtcdCluster, and releases the lock last. No backup data passes through
//! the operator.

pub mod app;
pub mod command;
mod encryption;
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
