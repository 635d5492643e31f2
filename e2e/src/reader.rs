//! A client that reads continuously and records the cluster ID of each response. When a cluster is replaced, a client
//! that has reached the new cluster must not reach the old cluster again.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use etcd_client::GetOptions;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::writer::{Access, Connection, Route};
use crate::{DEADLINE, Sandbox, until, wait::Poll};

const READ_INTERVAL: Duration = Duration::from_millis(60);
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// Every fifth read opens a new connection. The other reads use an existing connection.
const READS_PER_CONNECTION: u64 = 5;

/// A client that reads in the background until [`Reader::finish`] is called.
pub struct Reader {
    task: JoinHandle<()>,
    answers: Arc<Mutex<Vec<Answer>>>,
}

/// A response to a read.
#[derive(Clone, Copy, Debug)]
struct Answer {
    begun: Instant,
    ended: Instant,
    cluster_id: u64,
    /// The number of keys in the response.
    keys: i64,
}

/// The summary of all reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadSummary {
    /// The cluster IDs in the order of their first response.
    pub clusters: Vec<u64>,
    /// The number of reads with a response.
    pub answered: usize,
    /// The longest time between two responses.
    pub gap: Duration,
}

impl Reader {
    /// Starts to count the keys with this prefix through the client Service. Returns after the first response.
    ///
    /// # Errors
    /// Fails if etcd answers no read.
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

    /// Waits for `count` more responses.
    ///
    /// # Errors
    /// Fails if the responses do not arrive in time.
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

    /// Stops the client, and returns the summary. Each response must contain exactly `keys` keys.
    ///
    /// # Errors
    /// Fails if a response contains another number of keys. Also fails if the old cluster answers a read that started
    /// after the first response of the new cluster.
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
            "cluster {:016x} returned {} keys instead of {keys}",
            answer.cluster_id,
            answer.keys
        );
        if clusters.last() == Some(&answer.cluster_id) {
            continue;
        }
        // A read that started before the first response of the new cluster may still return data of the old cluster.
        // A read that started after this response must not.
        let later =
            |other: &&Answer| other.cluster_id != answer.cluster_id && other.ended < answer.begun;
        ensure!(
            !clusters.contains(&answer.cluster_id) || answers.iter().find(later).is_none(),
            "the replaced cluster {:016x} answered after the new cluster had answered",
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

/// Sends one linearizable read over `connection`, which is opened if it is `None`.
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
        let header = answer.header().context("the response has no header")?;
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
    fn reader_rejects_old_cluster_that_answers_after_new_cluster() {
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
        // The last read started before the first response of the new cluster, so a response of the old cluster is
        // allowed.
        let crossed = [answer(1, 0, 1), answer(2, 4, 5), answer(1, 3, 6)];
        assert!(summarize(&crossed, 3).is_ok());
    }
}
