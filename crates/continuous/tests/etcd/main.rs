//! Tests with real etcd processes: records changes, and replays them on an etcd that was restored from the base.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]
#![allow(clippy::large_futures)] // Each test is one large future.

mod agent;
mod capture;
mod exact;
mod history;
mod lab;
mod pipeline;
mod speed;
