//! The gRPC proxies of EtcdClusters (`spec.grpcProxy`): a Deployment, a Service, a PodDisruptionBudget and a
//! NetworkPolicy. The cluster operator runs this crate after each of its own reconciles (ADR 45).
//!
//! Observe (reads only) -> plan (pure) -> execute. This crate calls no member and writes no status.

mod certificates;
mod error;
mod flags;
mod objects;
mod plan;
mod reconcile;
mod writes;

pub use flags::arguments;
pub use reconcile::{Proxies, WithProxies};
