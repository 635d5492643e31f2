//! Watchers that record all events. After a failed connection, a watcher resumes after the last recorded event.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use etcd_client::{EventType, WatchOptions, WatchResponse};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::clients::{Clients, PREFIX, text};
use super::history::Event;
use crate::DEADLINE;
use crate::wait::{Poll, until};
use crate::writer::Access;

/// Time limit for the next message. The clients write continuously, so a watcher without messages opens a new
/// connection.
const SILENCE: Duration = Duration::from_secs(5);
const RECONNECT_INTERVAL: Duration = Duration::from_millis(100);

/// The events of a watcher, and the state of its watch.
#[derive(Clone, Debug, Default)]
pub struct WatchRecord {
    /// The events in the order of their arrival.
    pub events: Vec<Event>,
    /// Number of connections that the watcher has opened.
    pub connections: usize,
    /// The reason why etcd cannot resume the watch. `None` while the watch works.
    pub failure: Option<String>,
}

/// A watcher that runs until [`Watcher::finish`] is called.
pub struct Watcher {
    task: JoinHandle<()>,
    record: Arc<Mutex<WatchRecord>>,
}

impl Watcher {
    /// Starts a watch of all keys of the clients at the revision `from`.
    #[must_use]
    pub fn start(clients: &Clients, from: i64) -> Self {
        let record = Arc::new(Mutex::new(WatchRecord::default()));
        let task = tokio::spawn(watch(clients.access(), from, Arc::clone(&record)));
        Self { task, record }
    }

    /// Waits until the watcher has received `revision`, and stops the watcher.
    ///
    /// # Errors
    /// Fails if the watcher does not receive `revision` in time.
    pub async fn finish(self, revision: i64) -> Result<WatchRecord> {
        let what = format!("the watcher has received revision {revision}");
        let waited = until(&what, DEADLINE, async || {
            let now = self.record();
            let last = now.events.iter().map(|event| event.revision).max();
            Ok(if now.failure.is_some() || last >= Some(revision) {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{last:?} over {} connections", now.connections))
            })
        })
        .await;
        self.task.abort();
        waited.map(|()| self.record())
    }

    fn record(&self) -> WatchRecord {
        let record = self.record.lock();
        record.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn watch(access: Access, from: i64, record: Arc<Mutex<WatchRecord>>) {
    let with_record = |change: &mut dyn FnMut(&mut WatchRecord)| {
        change(&mut record.lock().unwrap_or_else(PoisonError::into_inner));
    };
    let mut next = from;
    loop {
        with_record(&mut |record| record.connections += 1);
        let from = next;
        let mut receive = |answer: &WatchResponse| -> Result<()> {
            for event in answer.events() {
                let event = event_of(event)?;
                next = event.revision + 1;
                with_record(&mut |record| record.events.push(event.clone()));
            }
            Ok(())
        };
        let ended = watch_once(&access, from, &mut receive).await;
        if let Err(error) = ended
            && let Some(Refused(why)) = error.downcast_ref()
        {
            with_record(&mut |record| record.failure = Some(why.clone()));
            return;
        }
        sleep(RECONNECT_INTERVAL).await;
    }
}

/// The reason why etcd refuses the watch, for example a compacted revision.
#[derive(Debug)]
struct Refused(String);

impl std::fmt::Display for Refused {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

/// Watches over one connection until the connection or the watch fails.
async fn watch_once(
    access: &Access,
    next: i64,
    receive: &mut (dyn FnMut(&WatchResponse) -> Result<()> + Send),
) -> Result<()> {
    let connection = timeout(SILENCE, access.connect()).await??;
    let mut client = connection.client.watch_client();
    let options = WatchOptions::new().with_prefix().with_start_revision(next);
    let stream = client.watch(PREFIX, Some(options));
    let mut stream = timeout(SILENCE, stream).await??;
    loop {
        let answer = timeout(SILENCE, stream.message()).await??;
        let answer = answer.context("the watch ended")?;
        if answer.compact_revision() > 0 {
            let compacted = answer.compact_revision();
            let why = format!("revision {next} is compacted up to {compacted}");
            return Err(Refused(why).into());
        }
        if answer.canceled() {
            bail!("canceled: {}", answer.cancel_reason());
        }
        receive(&answer)?;
    }
}

fn event_of(event: &etcd_client::Event) -> Result<Event> {
    let pair = event.kv().context("an event without a key")?;
    Ok(Event {
        revision: pair.mod_revision(),
        key: text(pair.key()),
        value: match event.event_type() {
            EventType::Put => text(pair.value()),
            EventType::Delete => String::new(),
        },
        version: pair.version(),
    })
}
