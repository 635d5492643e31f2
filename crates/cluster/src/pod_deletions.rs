//! Interrupts an observation if a pod is being deleted while the operator waits for etcd's answers. The operator then
//! reads the pods again.
//!
//! If a member's pod ends, etcd's answers are late or missing: the leader may be lost, and a stopping member first
//! waits for its open requests (`stopServers` in etcd's `server/embed/etcd.go`). The operator draws no conclusion from
//! the missing answers (invariant 1).
//!
//! While no pod ends, the operator waits until the deadlines, so that it does not report an election as an outage.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch::{Receiver, Sender, channel};

/// A healthy cluster answers within this time even if a pod ends, so no observation is interrupted earlier.
const PROMPT: Duration = Duration::from_millis(300);
/// Replaces [`PROMPT`] if the operator has planned a write that does not need etcd's answer.
const URGENT: Duration = Duration::from_millis(100);

/// The observations in progress, by the cluster's UID.
#[derive(Default)]
pub struct PodDeletions(Mutex<HashMap<String, Sender<()>>>);

impl PodDeletions {
    fn senders(&self) -> MutexGuard<'_, HashMap<String, Sender<()>>> {
        // No operation under this lock can panic and leave the map inconsistent, so a poisoned lock is safe to use.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Interrupts the observation of this cluster, because a pod of the cluster is terminating or has ended.
    pub fn notify(&self, uid: &str) {
        if let Some(sender) = self.senders().get(uid) {
            sender.send_replace(());
        }
    }

    /// Subscribes to notifications about ended pods. The caller must subscribe before it reads the pods, because a pod
    /// may end right after the read.
    pub fn subscribe(&self, uid: &str) -> Subscription {
        let mut senders = self.senders();
        senders.retain(|_, sender| sender.receiver_count() > 0);
        let sender = senders.entry(uid.to_owned());
        Subscription(sender.or_insert_with(|| channel(()).0).subscribe())
    }
}

/// Notifies an observation when a pod ends.
pub struct Subscription(Receiver<()>);

impl Subscription {
    /// Waits for the answer. `None` if the answer is late and a pod has ended since the subscription, or if `urgent` is
    /// true and the answer is late.
    pub async fn or_interrupted<T>(
        &mut self,
        answer: impl Future<Output = T>,
        urgent: bool,
    ) -> Option<T> {
        let interrupted = async {
            tokio::time::sleep(if urgent { URGENT } else { PROMPT }).await;
            if !urgent && self.0.changed().await.is_err() {
                // The map has dropped the sender of this subscription, so no notification can arrive any more.
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            answer = answer => Some(answer),
            () = interrupted => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::time::Instant;

    use super::*;

    const UID: &str = "uid";

    #[tokio::test]
    async fn observation_without_answer_is_interrupted_when_pod_ends() {
        let deletions = PodDeletions::default();
        let mut subscription = deletions.subscribe(UID);
        deletions.notify(UID);
        let begun = Instant::now();
        assert_eq!(
            subscription.or_interrupted(pending::<()>(), false).await,
            None
        );
        assert!(
            begun.elapsed() >= PROMPT,
            "the observation was interrupted too early"
        );
    }

    /// Invariant 1: an election is no outage, so it does not shorten the observation.
    #[tokio::test]
    async fn invariant_1_observation_is_not_shortened_unless_pod_ends() {
        let deletions = PodDeletions::default();
        deletions.notify(UID);
        let mut subscription = deletions.subscribe(UID);
        deletions.notify("another");
        let slow = async {
            tokio::time::sleep(PROMPT * 2).await;
            "answer"
        };
        assert_eq!(
            subscription.or_interrupted(slow, false).await,
            Some("answer")
        );
    }

    #[tokio::test]
    async fn answer_of_etcd_is_used_although_pod_ended() {
        let deletions = PodDeletions::default();
        let mut subscription = deletions.subscribe(UID);
        deletions.notify(UID);
        assert_eq!(subscription.or_interrupted(ready(1), false).await, Some(1));
    }

    #[tokio::test]
    async fn pod_that_ends_during_observation_interrupts_it() {
        let deletions = PodDeletions::default();
        let mut subscription = deletions.subscribe(UID);
        let late = async {
            tokio::time::sleep(PROMPT + Duration::from_millis(100)).await;
            deletions.notify(UID);
            pending::<()>().await;
        };
        tokio::select! {
            dropped = subscription.or_interrupted(pending::<()>(), false) => assert_eq!(dropped, None),
            () = late => {}
            () = tokio::time::sleep(PROMPT * 20) => panic!("the observation did not notice the end of the pod"),
        }
    }

    #[tokio::test]
    async fn urgent_write_interrupts_observation() {
        let mut subscription = PodDeletions::default().subscribe(UID);
        assert_eq!(
            subscription.or_interrupted(pending::<()>(), true).await,
            None
        );
        assert_eq!(subscription.or_interrupted(ready(1), true).await, Some(1));
    }

    #[test]
    fn subscriptions_of_finished_observations_are_dropped() {
        let deletions = PodDeletions::default();
        drop(deletions.subscribe(UID));
        drop(deletions.subscribe("another"));
        assert_eq!(deletions.senders().len(), 1);
    }
}
