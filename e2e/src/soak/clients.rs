//! Clients that put, get and compare-and-swap a few keys through the client Service.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use etcd_client::{Client, Compare, CompareOp, GetOptions, KeyValue, Txn, TxnOp, TxnOpResponse};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::dice::Dice;
use super::history::{Operation, Pair, Recorder};
use crate::wait::{Poll, until};
use crate::writer::{Access, Connection, Route};
use crate::{DEADLINE, Keyspace, Sandbox};

/// The prefix of all keys that the clients use.
pub const PREFIX: &str = "soak/";
/// The number of keys. It is small, so that clients often write the same key concurrently.
const KEYS: u64 = 8;
const CLIENTS: u64 = 6;
/// The maximum pause between two operations of a client, in milliseconds.
const PAUSE_MS: u64 = 150;
/// Time limit for an operation. The outcome of a write that exceeds this limit is unknown.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(2);
const ERROR_PAUSE: Duration = Duration::from_millis(100);

/// The clients of a soak. They run until [`Clients::finish`] is called.
pub struct Clients {
    tasks: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    access: Access,
}

impl Clients {
    /// Starts the clients. For each client, the seed determines its sequence of random choices. The seed does not
    /// determine the order of operations of different clients.
    ///
    /// # Errors
    /// Fails if the client Service does not exist.
    pub async fn start(
        sandbox: &Sandbox,
        cluster: &str,
        seed: u64,
        recorder: &Recorder,
    ) -> Result<Self> {
        let access = Access {
            route: Route::to(sandbox, cluster).await?,
            identity: None,
        };
        let stop = Arc::new(AtomicBool::new(false));
        let tasks = (0..CLIENTS)
            .map(|number| {
                let client = SoakClient {
                    number,
                    access: access.clone(),
                    recorder: recorder.clone(),
                    dice: Dice::new(seed, number + 1),
                    connection: None,
                    written: 0,
                };
                tokio::spawn(client.run(Arc::clone(&stop)))
            })
            .collect();
        Ok(Self {
            tasks,
            stop,
            access,
        })
    }

    pub(super) fn access(&self) -> Access {
        self.access.clone()
    }

    /// Stops each client after its current operation, and then reads every key.
    ///
    /// # Errors
    /// Fails if a key cannot be read.
    pub async fn finish(self, recorder: &Recorder) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.context("a client panicked")?;
        }
        let mut last = SoakClient {
            number: CLIENTS,
            access: self.access,
            recorder: recorder.clone(),
            dice: Dice::new(0, 0),
            connection: None,
            written: 0,
        };
        for key in 0..KEYS {
            let key = key_name(key);
            let what = format!("{key} is read");
            let read = until(&what, DEADLINE, async || {
                let read = last.operate("get", &key, String::new()).await;
                read.map(Poll::Done)
            });
            read.await?;
        }
        Ok(())
    }
}

fn key_name(number: u64) -> String {
    format!("{PREFIX}{number}")
}

struct SoakClient {
    number: u64,
    access: Access,
    recorder: Recorder,
    dice: Dice,
    connection: Option<Connection>,
    written: u64,
}

impl SoakClient {
    async fn run(mut self, stop: Arc<AtomicBool>) {
        let mut known = vec![String::new(); usize::try_from(KEYS).unwrap_or(0)];
        while !stop.load(Ordering::Relaxed) {
            let number = self.dice.below(KEYS);
            let index = usize::try_from(number).unwrap_or(0);
            let kind = match self.dice.below(10) {
                0..=2 => "get",
                3..=5 => "put",
                // A swap must name the current value of the key. A client that does not know this value reads the key.
                _ if known[index].is_empty() => "get",
                _ => "swap",
            };
            let expect = if kind == "swap" {
                known[index].clone()
            } else {
                String::new()
            };
            match self.operate(kind, &key_name(number), expect).await {
                Ok(value) => known[index] = value,
                Err(_) => sleep(ERROR_PAUSE).await,
            }
            sleep(Duration::from_millis(self.dice.below(PAUSE_MS))).await;
        }
    }

    /// Sends one operation and records its result. Returns the value of the key after the operation.
    async fn operate(&mut self, kind: &'static str, key: &str, expect: String) -> Result<String> {
        let client = self.client().await?;
        self.written += 1;
        let mut operation = Operation {
            client: self.number,
            key: key.to_owned(),
            kind,
            value: if kind == "get" {
                String::new()
            } else {
                format!("{}-{}", self.number, self.written)
            },
            expect,
            call: self.recorder.now(),
            ..Operation::default()
        };
        let answer = timeout(OPERATION_TIMEOUT, send(&client, &mut operation)).await;
        let outcome = answer.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer in time")));
        if outcome.is_ok() {
            operation.end = Some(self.recorder.now());
        } else {
            self.connection = None;
            (operation.swapped, operation.revision) = (false, 0);
            operation.found.clear();
        }
        self.recorder.add(operation.clone());
        outcome?;
        Ok(if operation.has_written() {
            operation.value
        } else {
            operation.found
        })
    }

    /// Returns the client of the existing connection, or opens a new connection.
    async fn client(&mut self) -> Result<Client> {
        if self.connection.is_none() {
            let connected = timeout(OPERATION_TIMEOUT, self.access.connect()).await;
            self.connection = Some(connected.context("no connection in time")??);
        }
        let connection = self.connection.as_ref().context("no connection")?;
        Ok(connection.client.clone())
    }
}

/// Sends an operation and stores its result in `operation`.
async fn send(client: &Client, operation: &mut Operation) -> Result<()> {
    let mut kv = client.kv_client();
    match operation.kind {
        "get" => {
            let answer = kv.get(operation.key.as_str(), None).await?;
            found(operation, answer.kvs().first());
        }
        "put" => {
            let (key, value) = (operation.key.as_str(), operation.value.as_str());
            let answer = kv.put(key, value, None).await?;
            operation.revision = answer.header().context("no header")?.revision();
        }
        _ => {
            let (key, value) = (operation.key.as_str(), operation.value.as_str());
            let expect = Compare::value(key, CompareOp::Equal, operation.expect.as_str());
            let txn = Txn::new()
                .when([expect])
                .and_then([TxnOp::put(key, value, None)])
                .or_else([TxnOp::get(key, None)]);
            let answer = kv.txn(txn).await?;
            operation.swapped = answer.succeeded();
            if operation.swapped {
                operation.revision = answer.header().context("no header")?.revision();
            } else if let Some(TxnOpResponse::Get(read)) = answer.op_responses().first() {
                found(operation, read.kvs().first());
            } else {
                anyhow::bail!("the failed swap returned no value");
            }
        }
    }
    Ok(())
}

fn found(operation: &mut Operation, pair: Option<&KeyValue>) {
    if let Some(pair) = pair {
        operation.found = text(pair.value());
        operation.revision = pair.mod_revision();
    }
}

pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The current revision and all keys with [`PREFIX`], sorted.
///
/// # Errors
/// Fails if etcd does not respond.
pub async fn read_pairs(keys: &Keyspace) -> Result<(i64, Vec<Pair>)> {
    let options = GetOptions::new().with_prefix();
    let answer = keys.client.kv_client().get(PREFIX, Some(options)).await?;
    let pairs = answer.kvs().iter().map(|pair| Pair {
        key: text(pair.key()),
        value: text(pair.value()),
        revision: pair.mod_revision(),
    });
    let revision = answer.header().context("no header")?.revision();
    Ok((revision, pairs.collect()))
}
