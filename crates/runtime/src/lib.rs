//! What the three operators share: the start of a process, the leader lease, the controller wiring, the
//! one place where an outcome becomes a log line, an Event and a metric, the writes to the API server, and
//! the pure builders of everything a member consists of.
//!
//! This crate knows no operator: it decides nothing about clusters, backups or restores.

pub mod admin;
mod answer;
pub mod apply;
pub mod certificate;
pub mod check;
pub mod cli;
mod client;
pub mod clock;
pub mod controller;
pub mod crd;
pub mod credentials;
mod event;
pub mod grants;
mod guarded;
pub mod image;
pub mod lease;
pub mod marks;
pub mod member;
mod notice;
pub mod outcome;
pub mod process;
pub mod progress;
pub mod reach;
mod reason;
pub mod scope;
pub mod tls;

pub use controller::{Reconcile, Scope};
pub use outcome::{Done, Failure, Notice};
pub use process::Operator;
pub use reason::Trouble;
