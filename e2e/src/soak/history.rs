//! The history of a soak: the operations of its clients, and the events of its watchers.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;

/// An operation of a client. Its JSON form is the input of the checker `e2e/testbed/linearize`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Operation {
    /// The number of the client.
    pub client: u64,
    /// The key that the operation reads or writes.
    pub key: String,
    /// `get`, `put` or `swap`. A swap writes only if the key has the expected value.
    pub kind: &'static str,
    /// The value that a put or a swap writes. It is unique in the history.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// The value that a swap requires before it writes.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub expect: String,
    /// Nanoseconds from the start of the soak to the request.
    pub call: u64,
    /// Nanoseconds from the start of the soak to the response. `None` if the outcome is unknown.
    #[serde(rename = "return")]
    pub end: Option<u64>,
    /// True if a swap found the expected value, and therefore wrote `value`.
    pub swapped: bool,
    /// The value that a get or a failed swap found. Empty if the key does not exist.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub found: String,
    /// The modification revision of the value that was written or found.
    pub revision: i64,
}

impl Operation {
    /// True if the operation certainly wrote its value.
    #[must_use]
    pub fn has_written(&self) -> bool {
        self.end.is_some() && (self.kind == "put" || self.swapped)
    }

    /// True if the operation wrote its value, or if its outcome is unknown.
    #[must_use]
    pub fn may_have_written(&self) -> bool {
        self.kind != "get" && (self.end.is_none() || self.has_written())
    }
}

/// A change of a key, as reported by a watch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Event {
    /// The revision of the change.
    pub revision: i64,
    /// The key that changed.
    pub key: String,
    /// The new value. Empty for a deletion, which the clients never do.
    pub value: String,
    /// The number of writes of the key since its creation.
    pub version: i64,
}

/// A key, its value, and the revision at which it was last modified.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Pair {
    /// The name of the key.
    pub key: String,
    /// The value of the key.
    pub value: String,
    /// The revision at which the key was last modified.
    pub revision: i64,
}

/// All keys in a restored cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// The name of the restored EtcdCluster.
    pub name: String,
    /// The revision of the restored database.
    pub revision: i64,
    /// The keys and their values, sorted by key.
    pub pairs: Vec<Pair>,
}

/// Records the operations of all clients. The times of all operations come from one clock.
#[derive(Clone, Debug)]
pub struct Recorder {
    start: Instant,
    operations: Arc<Mutex<Vec<Operation>>>,
}

impl Recorder {
    /// An empty history, whose clock starts now.
    #[must_use]
    pub fn new() -> Self {
        Self {
            start: Instant::now(),
            operations: Arc::default(),
        }
    }

    /// Nanoseconds since the start of the soak.
    #[must_use]
    pub fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Adds an operation that has ended or timed out.
    pub fn add(&self, operation: Operation) {
        let mut all = self
            .operations
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        all.push(operation);
    }

    /// The number of operations whose outcome is known.
    #[must_use]
    pub fn answered(&self) -> usize {
        let all = self
            .operations
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        all.iter().filter(|one| one.end.is_some()).count()
    }

    /// All operations so far.
    #[must_use]
    pub fn operations(&self) -> Vec<Operation> {
        let all = self
            .operations
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        all.clone()
    }
}

impl Default for Recorder {
    fn default() -> Self {
        Self::new()
    }
}
