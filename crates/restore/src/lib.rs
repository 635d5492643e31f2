//! The restore operator: creates or replaces a cluster from a backup.
//!
//! The operator sets a restore lock on the EtcdCluster, which it creates if necessary, and never changes a cluster
//! without its lock. Then it creates the seed, the first member of the new cluster. The seed's pod downloads and
//! verifies the backup before etcd starts. Finally, the operator records the new cluster in the status of the
//! EtcdCluster, and removes the lock.

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
pub mod search;
pub mod seed;
pub mod snapshot;
pub mod source;
pub mod status;
