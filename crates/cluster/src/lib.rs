//! The cluster operator: runs etcd clusters, and repairs them after every failure that leaves the data recoverable.
//!
//! Observe (reads only) -> plan (pure) -> execute (one step) -> status (pure, one patch). A step consists of the
//! requests in [`action`]. The state of a cluster is in etcd's member list, the pods, the volumes, and a few fields of
//! the status. The operator process can restart at any time.

#![cfg_attr(
    test,
    expect(
        clippy::large_stack_arrays,
        reason = "test tables are arrays of whole clusters"
    )
)]

#[cfg(test)]
extern crate self as cluster;

pub mod access;
pub mod action;
pub mod app;
pub mod authority;
pub mod certificates;
pub mod clock;
pub mod command;
pub mod desired;
pub mod execute;
pub mod expiry;
pub mod metrics;
pub mod naming;
pub mod objects;
pub mod observe;
pub mod outcome;
mod ownership;
pub mod plan;
pub mod pod_deletions;
pub mod quantity;
pub mod reason;
pub mod reconcile;
pub mod refusals;
mod seen;
pub mod snapshot;
pub mod status;
pub mod switch;
pub mod tls;
pub mod upkeep;
