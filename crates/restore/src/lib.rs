//! The restore operator: brings a cluster back from a backup.
//!
//! It creates the EtcdCluster with its claim on it, prepares one seed member whose data directory is restored
//! and verified before etcd starts, records the new cluster in the status, and lets go of the claim last. It
//! never changes or deletes a cluster that is not its own, and it serves nobody's backup to anybody: the seed
//! fetches with its own credentials.

pub mod act;
pub mod choice;
pub mod controller;
#[cfg(test)]
mod fake;
pub mod made_of;
mod metrics;
pub mod naming;
pub mod observe;
pub mod observed;
mod ownership;
pub mod plan;
pub mod pod;
pub mod seed;
pub mod source;
pub mod started;
pub mod status;
pub mod step;
