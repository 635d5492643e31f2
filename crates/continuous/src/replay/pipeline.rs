//! Sends the transactions of a replay to etcd, several at a time.

use std::sync::Arc;

use etcd_client::Error;
use futures::future::LocalBoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};

use super::operations::{Part, parts};
use super::target::Target;
use super::window::{Answer, Attempt, Drift, Window};
use crate::record::Transaction;

/// An attempt in flight. Its result contains the recorded revision.
type InFlight<'a> = LocalBoxFuture<'a, (i64, Result<Answer, Error>)>;

/// Why a transaction was not applied at its revision.
pub(super) enum Failure {
    /// A call to the target failed.
    Target {
        /// The recorded revision of the transaction.
        revision: i64,
        /// The error of etcd.
        error: Error,
    },
    /// The target has another revision than the recorded one.
    Drift(Drift),
    /// A lease has ended during the replay.
    LeaseLost {
        /// The ID of the lease.
        id: i64,
        /// The recorded revision of the transaction.
        revision: i64,
    },
}

/// The transactions in flight, and their requests.
pub(super) struct Pipeline<'a> {
    target: &'a Target,
    window: Window,
    in_flight: FuturesUnordered<InFlight<'a>>,
}

impl<'a> Pipeline<'a> {
    /// The target must have this revision.
    pub(super) fn new(target: &'a Target, revision: i64) -> Self {
        Self {
            target,
            window: Window::new(revision),
            in_flight: FuturesUnordered::new(),
        }
    }

    /// The revision of the last transaction that was sent.
    pub(super) fn sent(&self) -> i64 {
        self.window.sent()
    }

    /// Number of attempts that etcd has rejected and that were sent again.
    pub(super) fn repeated(&self) -> u64 {
        self.window.repeated()
    }

    /// Sends the next transaction. Waits until the window admits the transaction. Waits for its answer only if the
    /// transaction deletes a range.
    pub(super) async fn send(&mut self, transaction: Transaction) -> Result<(), Failure> {
        // A transaction with a range counts the keys of this range, so etcd must first apply all earlier transactions.
        let counts_keys = has_range(&transaction);
        if counts_keys {
            self.drain().await?;
        }
        let transaction = Arc::new(transaction);
        loop {
            if let Some(attempt) = self.window.admit(&transaction) {
                self.start(attempt);
                break;
            }
            self.answer().await?;
        }
        // `now_or_never` polls the futures of new requests, and the first poll of a future sends its request.
        while let Some(Some((revision, result))) = self.in_flight.next().now_or_never() {
            self.process(revision, result)?;
        }
        if counts_keys {
            self.drain().await?;
        }
        Ok(())
    }

    /// Waits until etcd has applied all transactions.
    pub(super) async fn drain(&mut self) -> Result<(), Failure> {
        while !self.in_flight.is_empty() {
            self.answer().await?;
        }
        Ok(())
    }

    async fn answer(&mut self) -> Result<(), Failure> {
        match self.in_flight.next().await {
            Some((revision, result)) => self.process(revision, result),
            // Never happens: a window without a transaction in flight is empty, and admits the next transaction.
            None => Err(self.failed(Drift {
                expected: self.sent() + 1,
                found: self.sent(),
            })),
        }
    }

    fn process(&mut self, revision: i64, result: Result<Answer, Error>) -> Result<(), Failure> {
        let answer = result.map_err(|error| Failure::Target { revision, error })?;
        let again = self.window.answer(revision, answer);
        if let Some(attempt) = again.map_err(|drift| self.failed(drift))? {
            self.start(attempt);
        }
        Ok(())
    }

    fn start(&self, attempt: Attempt) {
        let target = self.target;
        let request = async move {
            let result = target.apply(&attempt).await;
            (attempt.transaction.revision, result)
        };
        self.in_flight.push(request.boxed_local());
    }

    /// Converts a drift to a failure. If a lease has ended, the failure names the lease, because its end has caused the
    /// drift.
    fn failed(&self, drift: Drift) -> Failure {
        match self.target.lost_lease() {
            Some(id) => Failure::LeaseLost {
                id,
                revision: drift.expected,
            },
            None => Failure::Drift(drift),
        }
    }
}

/// Whether the changes contain a deletion of a range.
fn has_range(transaction: &Transaction) -> bool {
    let parts = parts(&transaction.changes);
    parts.iter().any(|part| matches!(part, Part::Run(_)))
}
