//! The API as files: generated definitions and reference, rules, old manifests, examples.
//!
//! `UPDATE=1 cargo test -p api` rewrites what is generated.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod files;
mod generated;
mod manifests;
mod reference;
mod rules;
mod schema;
