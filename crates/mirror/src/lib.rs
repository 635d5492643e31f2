//! Mirrors: this crate copies the keys of one etcd cluster to another cluster continuously, and contains the controller
//! of EtcdMirrors. The process of the backup operator runs this controller.
//!
//! The modules `decide`, `compare` and `follow` compute the transactions of a mirror from its checkpoint and from the
//! source, without I/O. The module `attempt` sends them. Invariant 42: each transaction has the stored checkpoint as
//! its precondition, and writes the next checkpoint.

pub mod app;
mod attempt;
pub mod checkpoint;
pub mod compare;
pub mod decide;
pub mod ends;
pub mod failure;
pub mod follow;
pub mod lag;
pub mod mapping;
pub mod metrics;
pub mod progress;
pub mod reason;
mod reconcile;
mod status;
pub mod step;
pub mod task;
mod tasks;

#[cfg(test)]
mod tests;
