//! A client that reads all along, over connections old and new, and notes which cluster answered: clients may be kept
//! waiting, and may never have two clusters to choose from.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use etcd_client::GetOptions;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::writer::{Access, Connection, Route};
use crate::{DEADLINE, Sandbox, until, wait::Poll};

/// From one read to the next.
const READ_INTERVAL: Duration = Duration::from_millis(60);
/// A read that takes longer is given up.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// Every so many reads go over a new connection.
const READS_PER_CONNECTION: u64 = 5;

/// A client that reads in the background until [`Reader::finish`].
pub struct Reader {
    task: JoinHandle<()>,
    answers: Arc<Mutex<Vec<Answer>>>,
}

/// One read that was answered.
#[derive(Clone, Copy, Debug)]
struct Answer {
    begun: Instant,
    ended: Instant,
    cluster_id: u64,
    /// How many keys there were.
    keys: i64,
}

/// What the reads told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadSummary {
    /// The clusters that answered, in the order in which they did.
    pub clusters: Vec<u64>,
    /// How many reads were answered.
    pub answered: usize,
    /// The longest time between two answers.
    pub gap: Duration,
}

impl Reader {
    /// Begins to count the keys with a prefix, through the client Service; returns when the first read is answered.
    ///
    /// # Errors
    /// When none is.
    pub async fn start(sandbox: &Sandbox, cluster: &str, prefix: &str) -> Result<Self> {
        let access = Access {
            route: Route::to(sandbox, cluster).await?,
            identity: None,
        };
        let answers = Arc::new(Mutex::new(Vec::new()));
        let task = tokio::spawn(read(access, prefix.to_owned(), Arc::clone(&answers)));
        let reader = Self { task, answers };
        reader.await_more(1).await?;
        Ok(reader)
    }

    /// Waits until so many more reads are answered.
    ///
    /// # Errors
    /// When they are not.
    pub async fn await_more(&self, count: usize) -> Result<()> {
        let before = self.answers().len();
        until(&format!("{count} more reads"), DEADLINE, async || {
            let now = self.answers().len();
            Ok(if now >= before + count {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{}", now - before))
            })
        })
        .await
    }

    /// Ends the reading, and says what was read.
    ///
    /// # Errors
    /// When a cluster answered a read that began after another cluster had answered, or keys were missing.
    pub fn finish(self, keys: usize) -> Result<ReadSummary> {
        self.task.abort();
        summarize(&self.answers(), keys)
    }

    fn answers(&self) -> Vec<Answer> {
        let answers = self.answers.lock();
        answers.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn summarize(answers: &[Answer], keys: usize) -> Result<ReadSummary> {
    let mut clusters: Vec<u64> = Vec::new();
    for answer in answers {
        ensure!(
            usize::try_from(answer.keys).is_ok_and(|found| found == keys),
            "cluster {:016x} showed {} of {keys} keys",
            answer.cluster_id,
            answer.keys
        );
        if clusters.last() == Some(&answer.cluster_id) {
            continue;
        }
        // Reads over two connections may end in another order than they began.
        let later =
            |other: &&Answer| other.cluster_id != answer.cluster_id && other.ended < answer.begun;
        ensure!(
            !clusters.contains(&answer.cluster_id) || answers.iter().find(later).is_none(),
            "cluster {:016x} answers again after another one has",
            answer.cluster_id
        );
        if !clusters.contains(&answer.cluster_id) {
            clusters.push(answer.cluster_id);
        }
    }
    let pairs = answers.iter().zip(answers.iter().skip(1));
    let gap = pairs
        .map(|(one, next)| next.ended.saturating_duration_since(one.ended))
        .max();
    Ok(ReadSummary {
        clusters,
        answered: answers.len(),
        gap: gap.unwrap_or_default(),
    })
}

async fn read(access: Access, prefix: String, answers: Arc<Mutex<Vec<Answer>>>) {
    let mut beat = interval(READ_INTERVAL);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut connection: Option<Connection> = None;
    for number in 0_u64.. {
        beat.tick().await;
        let read = if number.is_multiple_of(READS_PER_CONNECTION) {
            read_once(&access, &mut None, &prefix).await
        } else {
            let read = read_once(&access, &mut connection, &prefix).await;
            if read.is_err() {
                connection = None;
            }
            read
        };
        if let Ok(answer) = read {
            let mut answers = answers.lock().unwrap_or_else(PoisonError::into_inner);
            answers.push(answer);
        }
    }
}

/// One read, which a quorum confirms, over the connection there is or a new one.
async fn read_once(
    access: &Access,
    connection: &mut Option<Connection>,
    prefix: &str,
) -> Result<Answer> {
    let asked = async {
        if connection.is_none() {
            *connection = Some(access.connect().await?);
        }
        let client = connection
            .as_ref()
            .map(|connection| connection.client.kv_client());
        let mut client = client.context("no connection")?;
        let begun = Instant::now();
        let options = GetOptions::new().with_prefix().with_count_only();
        let answer = client.get(prefix, Some(options)).await?;
        let header = answer.header().context("an answer without a header")?;
        Ok(Answer {
            begun,
            ended: Instant::now(),
            cluster_id: header.cluster_id(),
            keys: answer.count(),
        })
    };
    timeout(READ_TIMEOUT, asked)
        .await
        .context("no answer in time")?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_answer_of_replaced_cluster() {
        let zero = Instant::now();
        let answer = |cluster_id, begun, ended| Answer {
            begun: zero + Duration::from_millis(begun),
            ended: zero + Duration::from_millis(ended),
            cluster_id,
            keys: 3,
        };
        let good = [
            answer(1, 0, 1),
            answer(1, 2, 9),
            answer(2, 20, 21),
            answer(2, 22, 23),
        ];
        let summary = summarize(&good, 3).unwrap();
        assert_eq!(summary.clusters, [1, 2]);
        assert_eq!(summary.gap, Duration::from_millis(12));
        assert!(summarize(&good, 4).is_err(), "keys are missing");
        let again = [answer(1, 0, 1), answer(2, 2, 3), answer(1, 4, 5)];
        assert!(summarize(&again, 3).is_err());
        // It was asked before the other one had answered.
        let crossed = [answer(1, 0, 1), answer(2, 4, 5), answer(1, 3, 6)];
        assert!(summarize(&crossed, 3).is_ok());
    }
}
