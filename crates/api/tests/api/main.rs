//! Tests of the API with files: generated files, validation rules, old manifests, and examples.
//!
//! `UPDATE=1 cargo test -p api` rewrites the generated files.

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
