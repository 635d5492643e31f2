//! Code that the three operators share: the start of a process, the leader election, the controller, the writes to the
//! API server, the access to the members of a cluster, schedules and clocks. It also reports the outcome of each
//! reconcile as a log line, an Event and a metric.
//!
//! This crate does not depend on the crates of the operators, and makes no decision about clusters, backups or
//! restores.

pub mod admin;
mod answer;
mod api_requests;
pub mod apply;
pub mod check;
pub mod cli;
mod client;
pub mod clients;
pub mod clock;
pub mod controller;
mod controllers;
pub mod crd;
pub mod credentials;
mod duty;
pub mod endpoints;
mod event;
mod guarded;
pub mod image;
pub mod issued;
pub mod lease;
pub mod logs;
pub mod marks;
pub mod members;
mod notice;
pub mod outcome;
pub mod pod;
pub mod process;
mod process_metrics;
pub mod queue;
pub mod reach;
mod reason;
pub mod schedule;
pub mod scope;
pub mod shards;
pub mod slots;
pub mod snapshot_cache;
pub mod traces;
pub mod watch_cache;
mod watch_pause;
pub mod watched;

pub use controller::{Reconcile, Scope};
pub use outcome::{Done, Failure, Notice};
pub use process::Operator;
pub use reason::Trouble;
