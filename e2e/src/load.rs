//! Clients that write to a cluster as fast as possible, or at a given rate.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use etcd_client::Client;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval_at, sleep};

use crate::Sandbox;
use crate::writer::{Access, Connection, Route};

/// Number of concurrent clients. They share one connection.
const CLIENTS: u32 = 64;
/// Number of keys of each client.
const KEYS: u64 = 100;
/// Length of a value in bytes.
const VALUE: usize = 100;
/// Pause of a client after a failed write.
const RETRY: Duration = Duration::from_millis(100);

/// The numbers of acknowledged and failed writes since the clients started.
#[derive(Debug, Default)]
struct Counters {
    acknowledged: AtomicU64,
    failed: AtomicU64,
}

/// Clients that write in the background until this value is dropped.
pub struct Load {
    tasks: Vec<JoinHandle<()>>,
    counters: Arc<Counters>,
    _connection: Connection,
}

impl Load {
    /// Starts to write. `rate` is the number of writes per second of all clients together. Without `rate`, each client
    /// sends its next write when the last one is acknowledged.
    ///
    /// # Errors
    /// Fails if the clients cannot connect.
    pub async fn start(sandbox: &Sandbox, cluster: &str, rate: Option<u32>) -> Result<Self> {
        let access = Access {
            route: Route::to(sandbox, cluster).await?,
            identity: None,
        };
        let connection = access.connect().await?;
        let counters = Arc::new(Counters::default());
        let begun = Instant::now();
        let tasks = (0..CLIENTS).map(|number| {
            let client = connection.client.clone();
            let counters = Arc::clone(&counters);
            let interval = rate.map(|rate| Duration::from_secs(1) * CLIENTS / rate.max(1));
            let first = begun + interval.unwrap_or_default() * number / CLIENTS;
            tokio::spawn(write(client, number, first, interval, counters))
        });
        Ok(Self {
            tasks: tasks.collect(),
            counters,
            _connection: connection,
        })
    }

    /// The number of acknowledged writes per second while `work` runs.
    ///
    /// # Errors
    /// Fails if `work` fails, or if a write fails while `work` runs.
    pub async fn rate_during<T>(&self, work: impl Future<Output = Result<T>>) -> Result<(f64, T)> {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let before = count(&self.counters.acknowledged);
        let failed = count(&self.counters.failed);
        let begun = Instant::now();
        let result = work.await?;
        let seconds = begun.elapsed().as_secs_f64();
        let written = count(&self.counters.acknowledged) - before;
        let failed = count(&self.counters.failed) - failed;
        ensure!(failed == 0, "{failed} writes have failed");
        #[allow(clippy::cast_precision_loss)] // `f64` represents integers below 2^52 exactly.
        let rate = written as f64 / seconds;
        Ok((rate, result))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// Writes until the task is aborted. A write that begins late does not shift the later writes.
async fn write(
    client: Client,
    number: u32,
    begin: Instant,
    period: Option<Duration>,
    counters: Arc<Counters>,
) {
    let mut ticks = period.map(|period| {
        let mut ticks = interval_at(begin.into(), period.max(Duration::from_micros(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        ticks
    });
    let mut kv = client.kv_client();
    let mut state = u64::from(number) + 0x9e37_79b9_7f4a_7c15;
    for index in 0_u64.. {
        if let Some(ticks) = &mut ticks {
            ticks.tick().await;
        }
        let key = format!("load/{number}/{}", index % KEYS);
        let failed = kv.put(key, random(&mut state), None).await.is_err();
        let counter = if failed {
            &counters.failed
        } else {
            &counters.acknowledged
        };
        counter.fetch_add(1, Ordering::Relaxed);
        if failed {
            sleep(RETRY).await;
        }
    }
}

/// A random value, which does not compress.
fn random(state: &mut u64) -> Vec<u8> {
    let mut value = Vec::with_capacity(VALUE + 8);
    while value.len() < VALUE {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        value.extend_from_slice(&state.to_le_bytes());
    }
    value.truncate(VALUE);
    value
}
