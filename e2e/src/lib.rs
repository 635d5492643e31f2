//! The library of the end-to-end tests: namespaces with operators, functions that wait for a state, and etcd clients.
//!
//! The tests use the operators only as a user does: through the chart, custom resources, `kubectl`, and etcd's API. Of
//! the operators' crates, the tests use only `api`.

pub mod bucket;
pub mod chart;
mod crds;
pub mod discovery;
pub mod drill;
pub mod env;
pub mod guide;
mod health;
pub mod keyspace;
pub mod kubectl;
pub mod leaks;
pub mod ledger;
pub mod load;
pub mod manifests;
pub mod metrics;
pub mod objects;
pub mod picture;
pub mod plugin;
pub mod prometheus;
pub mod reader;
pub mod recording;
mod retry;
pub mod rolling_check;
pub mod rules;
pub mod sandbox;
pub mod screen;
pub mod soak;
pub mod store_state;
pub mod testbed;
pub mod tls;
pub mod wait;
pub mod watch;
pub mod writer;

pub use env::Env;
pub use keyspace::Keyspace;
pub use load::Load;
pub use prometheus::Prometheus;
pub use reader::Reader;
pub use recording::Recording;
pub use rolling_check::RollingCheck;
pub use sandbox::{Sandbox, cluster_scenario, scenario};
pub use testbed::Testbed;
pub use wait::until;
pub use writer::Writer;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Time limit for most calls of [`until`]. It is long enough for a busy machine; on an idle machine, most calls return
/// within seconds.
pub const DEADLINE: Duration = Duration::from_mins(5);

/// Runs one step of a test, and prints its name and its duration.
///
/// # Errors
/// Fails if the step fails. The error contains `name`.
pub async fn step<T>(name: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    println!("step: {name}");
    let begun = Instant::now();
    // `Box::pin` keeps the future on the heap, because the futures of all steps together would exceed the stack of
    // the thread.
    let outcome = Box::pin(work).await;
    println!("step: {name}: {:.1} s", begun.elapsed().as_secs_f64());
    outcome.with_context(|| format!("step: {name}"))
}
