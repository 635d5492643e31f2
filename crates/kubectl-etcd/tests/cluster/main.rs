//! Runs the plugin against a real kube-apiserver. There is no kubelet, so commands in containers fail.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::needless_pass_by_value,
    missing_docs
)]

mod changes;
mod fixture;
mod objects;
#[path = "../../../runtime/tests/api_server/server.rs"]
mod server;
mod status;
