//! Users and roles of etcd's authentication: reconciles EtcdUsers and EtcdRoles. Both controllers run in the process of
//! the cluster operator (ADR 43).
//!
//! Observe (reads only) -> plan (pure) -> execute -> status (pure). The crate changes only users and roles that the
//! status of an EtcdUser or EtcdRole has recorded before (invariant 43), and never the users of the operators.

pub mod app;
mod execute;
mod object;
mod observe;
mod outcome;
mod plan;
pub mod reason;
mod reconcile;
pub mod snapshot;
mod status;
mod triggers;
