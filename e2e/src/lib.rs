//! The vocabulary of the end-to-end tests: a namespace with operators in it, typed waits, a client's view of etcd.
//!
//! It sees the product as a user does: the chart, custom resources, `kubectl`, etcd's own API. Of the product's
//! crates it knows `api` alone.

pub mod bucket;
pub mod chart;
pub mod env;
mod health;
pub mod keyspace;
pub mod kubectl;
pub mod leaks;
pub mod ledger;
pub mod manifests;
pub mod metrics;
pub mod objects;
pub mod reader;
mod retry;
pub mod rolling_check;
pub mod sandbox;
pub mod store_state;
pub mod testbed;
pub mod tls;
pub mod wait;
pub mod watch;
pub mod writer;

pub use env::Env;
pub use keyspace::Keyspace;
pub use reader::Reader;
pub use rolling_check::RollingCheck;
pub use sandbox::{Sandbox, cluster_scenario, scenario};
pub use testbed::Testbed;
pub use wait::until;
pub use writer::Writer;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// How long a test waits for something that takes seconds on an idle machine, and minutes on one that does much else. A
/// test never waits this long unless it is about to fail: waits end with their condition.
pub const DEADLINE: Duration = Duration::from_mins(5);

/// Runs one step of a test, and prints its name and how long it took.
///
/// # Errors
/// With the name of the step if the step fails.
pub async fn step<T>(name: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    println!("step: {name}");
    let begun = Instant::now();
    // Boxed: the steps of a test together would be more than the stack of its thread.
    let outcome = Box::pin(work).await;
    println!("step: {name}: {:.1} s", begun.elapsed().as_secs_f64());
    outcome.with_context(|| format!("step: {name}"))
}
