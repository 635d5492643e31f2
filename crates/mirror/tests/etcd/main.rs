//! Tests of mirrors with two real etcd processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]
#![allow(clippy::large_futures)] // Each test is one large future.

mod access;
mod copy;
mod fencing;
mod lab;
