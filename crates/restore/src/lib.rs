//! The restore operator: creates or replaces a cluster from a backup.
//!
//! The operator creates the EtcdCluster with a restore lock, or locks an existing EtcdCluster. Then it prepares one
//! seed member: its data directory is restored and verified before etcd starts. The operator records the new cluster in
//! the status of the EtcdCluster, and releases the lock last. It never changes or deletes a cluster that it has not
//! locked. The seed fetches the backup with its own credentials, so no backup data passes through the operator.

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
