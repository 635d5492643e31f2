//! The replicas of the operator under test.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use e2e::until;
use e2e::wait::Poll;

use super::operator::{Operator, START, Usage};

/// The processes of the operator. Without shards, one process is the leader, and all other processes are on standby.
pub(super) struct Replicas {
    program: PathBuf,
    shards: u16,
    processes: Vec<Operator>,
}

impl Replicas {
    /// Starts `count` processes that share `shards` shards, without waiting for them.
    pub(super) fn start(program: &Path, shards: u16, count: u16) -> Result<Self> {
        let mut replicas = Self {
            program: program.to_owned(),
            shards,
            processes: Vec::new(),
        };
        for _ in 0..count {
            replicas.add()?;
        }
        Ok(replicas)
    }

    /// Starts one more process.
    pub(super) fn add(&mut self) -> Result<()> {
        let started = self.start_process()?;
        self.processes.push(started);
        Ok(())
    }

    fn start_process(&self) -> Result<Operator> {
        let index = free_index(self.processes.iter().map(|one| one.index));
        Operator::start(&self.program, index, self.shards)
    }

    /// Removes the process that was started first from the list of processes, and returns it. The process continues to
    /// run.
    pub(super) fn take_first(&mut self) -> Result<Operator> {
        let exists = !self.processes.is_empty();
        let first = exists.then(|| self.processes.remove(0));
        first.context("the operator has no replica")
    }

    /// Starts a new process in place of each process that has exited. Returns the positions of the new processes in
    /// [`Self::usages`].
    pub(super) fn replace_ended(&mut self) -> Result<Vec<usize>> {
        let mut ended = Vec::new();
        for (position, process) in self.processes.iter_mut().enumerate() {
            if process.has_ended()? {
                ended.push(position);
            }
        }
        for position in &ended {
            let started = self.start_process()?;
            if let Some(process) = self.processes.get_mut(*position) {
                *process = started;
            }
        }
        Ok(ended)
    }

    /// Waits until `/readyz` of each process succeeds.
    pub(super) async fn await_ready(&self) -> Result<()> {
        for process in &self.processes {
            process.await_ready().await?;
        }
        Ok(())
    }

    /// Waits until the processes together hold all shards. Without shards, one of them must be the leader.
    pub(super) async fn await_duty(&self) -> Result<()> {
        self.await_held("a replica holds each shard", 0.0).await
    }

    /// Like [`Self::await_duty`], but also waits until each process holds its share of the shards.
    pub(super) async fn await_shares(&self) -> Result<()> {
        let count = u16::try_from(self.processes.len())?.max(1);
        let least = f64::from(self.shards / count);
        self.await_held("each replica holds its share", least).await
    }

    async fn await_held(&self, what: &str, least: f64) -> Result<()> {
        let shards = f64::from(self.shards);
        let done = until(what, START, async || {
            let mut held = Vec::new();
            for process in &self.processes {
                held.push(process.shards_held().await?);
            }
            let is_fair = held.iter().all(|held| *held >= least);
            Ok(if is_fair && held.iter().sum::<f64>() >= shards {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("the replicas hold {held:?} of {shards} shards"))
            })
        });
        let logs = || self.processes.iter().map(|one| &one.log);
        done.await
            .with_context(|| format!("the logs are {:?}", logs().collect::<Vec<_>>()))
    }

    /// Waits until the queues of objects to reconcile are empty.
    pub(super) async fn await_empty_queue(&self) -> Result<()> {
        until("the queue is empty", START, async || {
            let mut depth = 0.0;
            for process in &self.processes {
                depth += process.queue_depth().await?;
            }
            Ok(if depth > 0.0 {
                Poll::NotYet(format!("{depth} objects are in the queue"))
            } else {
                Poll::Done(())
            })
        })
        .await
    }

    /// The ports of the metrics.
    pub(super) fn ports(&self) -> Vec<u16> {
        self.processes.iter().map(|one| one.port).collect()
    }

    /// The resource usage of each process.
    pub(super) async fn usages(&self) -> Result<Vec<Usage>> {
        let mut usages = Vec::new();
        for process in &self.processes {
            usages.push(process.usage().await?);
        }
        Ok(usages)
    }

    /// Stops all processes at the same time, and waits until they have exited.
    pub(super) async fn stop(self) -> Result<()> {
        for process in &self.processes {
            process.terminate()?;
        }
        for process in self.processes {
            process.await_end().await?;
        }
        Ok(())
    }
}

/// The lowest index that is not in use.
fn free_index(used: impl Iterator<Item = u16>) -> u16 {
    let used: Vec<u16> = used.collect();
    let free = (0..=u16::MAX).find(|index| !used.contains(index));
    free.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::free_index;

    #[test]
    fn new_process_gets_lowest_free_index() {
        for (used, expected) in [
            (vec![], 0),
            (vec![0, 1], 2),
            (vec![1, 2], 0),
            (vec![2, 0], 1),
        ] {
            assert_eq!(free_index(used.iter().copied()), expected, "{used:?}");
        }
    }
}
