//! Tests of the API as files: generated CRDs and reference, validation rules, old manifests, examples.
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
