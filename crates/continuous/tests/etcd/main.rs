//! Tests with real etcd processes: changes are recorded, and repeated on an etcd that was restored from the base.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod agent;
mod capture;
mod exact;
mod history;
mod lab;
mod speed;
