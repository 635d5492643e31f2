//! The task of one mirror: repeats attempts until it is stopped.

use std::time::Duration;

use etcd::{EtcdClient, KeyRange, Operation, Precondition};
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::attempt::{Attempt, check_cluster, stored};
use crate::checkpoint::{Checkpoint, Identity, checkpoint_key};
use crate::ends::{End, Ends};
use crate::failure::{Failure, Side};
use crate::progress::Monitor;

/// Maximum pause between two attempts.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Minimum number of attempts to delete a checkpoint. A delayed transaction of the mirror can change the checkpoint
/// between its read and its deletion.
const RELEASES: usize = 5;

/// The task of one mirror.
pub struct Task {
    /// The identity of the mirror.
    pub identity: Identity,
    /// The connections. If they change, the mirror connects again.
    pub ends: watch::Receiver<Ends>,
    /// The progress.
    pub monitor: Monitor,
    /// Stops the task.
    pub stop: CancellationToken,
    /// Called when the state of the mirror has changed.
    pub changed: Box<dyn Fn() + Send + Sync>,
}

impl Task {
    /// Copies until the task is stopped. After a failure, the mirror continues from its checkpoint.
    pub async fn run(mut self) {
        self.monitor.start();
        let (mut failures, mut number) = (0_u32, 0_usize);
        loop {
            let ends = self.ends.borrow_and_update().clone();
            let before = self.monitor.read().transactions;
            let report = (&self.monitor, &*self.changed);
            let attempt = Attempt::new(&self.identity, &ends, report, number);
            let failure = tokio::select! {
                () = self.stop.cancelled() => return,
                changed = self.ends.changed() => match changed {
                    Ok(()) => continue,
                    Err(_) => return,
                },
                ended = Box::pin(attempt.run()) => match ended {
                    Ok(()) => continue,
                    Err(failure) => failure,
                },
            };
            drop(attempt);
            if self.monitor.read().transactions > before {
                failures = 0;
            }
            self.report(&failure);
            number = number.wrapping_add(1);
            let pause = pause(&failure, failures);
            failures = failures.saturating_add(1);
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = sleep(pause) => {}
                changed = self.ends.changed() => if changed.is_err() {
                    return;
                },
            }
        }
    }

    fn report(&self, failure: &Failure) {
        let trouble = failure.trouble();
        if matches!(failure, Failure::CheckpointChanged) {
            tracing::info!(mirror = self.identity.name, "{}", trouble.message);
            return;
        }
        tracing::warn!(mirror = self.identity.name, problem = %trouble, "the mirror is interrupted");
        if self.monitor.fail(trouble) {
            (self.changed)();
        }
    }
}

/// The pause before the next attempt.
fn pause(failure: &Failure, failures: u32) -> Duration {
    if failure.needs_user() {
        return MAX_PAUSE;
    }
    if matches!(failure, Failure::CheckpointChanged) && failures == 0 {
        return Duration::from_millis(100);
    }
    Duration::from_secs(1 << failures.min(5)).min(MAX_PAUSE)
}

/// Deletes the checkpoint of a mirror, so that the mirror can no longer change the destination. Returns the deleted
/// checkpoint, or `None` if the destination has none.
///
/// Invariant 42: each transaction of the mirror requires the checkpoint, so a delayed transaction fails after the
/// deletion.
///
/// Fails if the destination does not answer, belongs to another cluster, or changes the checkpoint during each attempt.
pub async fn release(destination: &End, uid: &str) -> Result<Option<Checkpoint>, Failure> {
    let client = EtcdClient::new(destination.access.clone());
    let mut failure = Failure::CheckpointChanged;
    for index in 0..RELEASES.max(destination.endpoints.len()) {
        let position = index % destination.endpoints.len().max(1);
        let member = destination.endpoints.get(position);
        let member = member.map(String::as_str).unwrap_or_default();
        match Box::pin(release_through(&client, destination, member, uid)).await {
            Ok(released) => return Ok(released),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

async fn release_through(
    client: &EtcdClient,
    destination: &End,
    member: &str,
    uid: &str,
) -> Result<Option<Checkpoint>, Failure> {
    let key = checkpoint_key(uid);
    let probe = client.page(member, &KeyRange::key(&key), 0, 1).await;
    let probe = probe.map_err(|error| Failure::of_page(Side::Destination, error))?;
    check_cluster(Side::Destination, probe.cluster_id, destination)?;
    let Some(stored) = stored(client, member, uid).await? else {
        return Ok(None);
    };
    let precondition = Precondition::Value {
        key: key.clone(),
        value: stored.value,
    };
    let deleted = client
        .commit(member, &[precondition], &[Operation::Delete { key }])
        .await;
    match deleted {
        Ok(Some(_)) => Ok(Some(stored.checkpoint)),
        Ok(None) => Err(Failure::CheckpointChanged),
        Err(error) => Err(Failure::Etcd(Side::Destination, error)),
    }
}

#[cfg(test)]
mod tests {
    use etcd::Error;

    use super::*;

    #[test]
    fn retry_pauses_grow_exponentially_up_to_maximum() {
        let failure = Failure::Etcd(Side::Source, Error::Timeout("e".to_owned()));
        let seconds = |failures| pause(&failure, failures).as_secs();
        assert_eq!(
            [0, 1, 2, 3, 4, 5, 99].map(seconds),
            [1, 2, 4, 8, 16, 30, 30]
        );
        assert!(pause(&Failure::CheckpointChanged, 0) < Duration::from_secs(1));
        let denied = Failure::Etcd(Side::Source, Error::AccessDenied("e".to_owned()));
        assert_eq!(pause(&denied, 0), MAX_PAUSE);
    }
}
