//! The six kinds of `etcd.database.coreos.com/v1beta2`, their names and labels, and their validation.
//!
//! This crate contains only types and pure functions: no I/O, no clock, no randomness. The schemas of the CRDs contain
//! all checks that an API server can make. `validate` repeats checks that protect the operators, because an object may
//! be older than the schema.

#![allow(
    unreachable_pub,
    reason = "the derive macro for schemas copies public types into functions"
)]
#![allow(
    clippy::duplicated_attributes,
    reason = "columns of one type are not duplicates"
)]

mod text;

pub mod access;
pub mod backup;
pub mod cluster;
pub mod command;
pub mod conditions;
pub mod crd;
pub mod display;
pub mod duration;
pub mod manifest;
pub mod mirror;
pub mod names;
pub mod problem;
pub mod readiness;
pub mod restore;
pub mod storage;
pub mod version;

mod schema;

pub use access::{EtcdRole, EtcdUser};
pub use backup::{EtcdBackup, EtcdBackupSpec, EtcdBackupStatus};
pub use cluster::{EtcdCluster, EtcdClusterSpec, EtcdClusterStatus};
pub use mirror::{EtcdMirror, EtcdMirrorSpec, EtcdMirrorStatus};
pub use problem::Problem;
pub use restore::{EtcdRestore, EtcdRestoreSpec, EtcdRestoreStatus};
