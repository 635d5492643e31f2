//! Pods that end while etcd is being called: the observation is dropped, and the pods are read again.
//!
//! Calls to ending members return late or never: the leader is lost, and a stopping member first waits for its open
//! requests (`stopServers` in etcd's `server/embed/etcd.go`). An observation that began earlier would wait for its
//! deadlines and delay the next one, which knows about the deletion. So the end of a pod interrupts the observation in
//! progress. Dropping an observation decides nothing (invariant 1): no conclusion follows from a missing answer.
//! Without such an event an observation has its full time; otherwise each election would be reported as an outage.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch::{Receiver, Sender, channel};

/// A healthy cluster answers in much less time, also if one pod ends.
const PROMPT: Duration = Duration::from_millis(300);
/// The same limit for a write that would be sent after any answer.
const URGENT: Duration = Duration::from_millis(100);

/// The observations in progress, by the cluster's UID.
#[derive(Default)]
pub struct PodDeletions(Mutex<HashMap<String, Sender<()>>>);

impl PodDeletions {
    fn senders(&self) -> MutexGuard<'_, HashMap<String, Sender<()>>> {
        // No operation under the lock leaves a partial state.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A pod of the cluster is ending or has ended.
    pub fn notify(&self, uid: &str) {
        if let Some(sender) = self.senders().get(uid) {
            sender.send_replace(());
        }
    }

    /// Must be called before the pods are read: the read may miss a pod that ends later.
    pub fn subscribe(&self, uid: &str) -> Subscription {
        let mut senders = self.senders();
        senders.retain(|_, sender| sender.receiver_count() > 0);
        let sender = senders.entry(uid.to_owned());
        Subscription(sender.or_insert_with(|| channel(()).0).subscribe())
    }
}

/// The subscription of one observation.
pub struct Subscription(Receiver<()>);

impl Subscription {
    /// The answer. `None` if no answer arrives soon and a pod has ended since the observation began, or a write is
    /// `urgent`.
    pub async fn or_interrupted<T>(
        &mut self,
        answer: impl Future<Output = T>,
        urgent: bool,
    ) -> Option<T> {
        let interrupted = async {
            tokio::time::sleep(if urgent { URGENT } else { PROMPT }).await;
            if !urgent && self.0.changed().await.is_err() {
                // The sender was dropped.
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
    async fn unanswered_observation_is_dropped_when_pod_ends() {
        let deletions = PodDeletions::default();
        let mut subscription = deletions.subscribe(UID);
        deletions.notify(UID);
        let begun = Instant::now();
        assert_eq!(
            subscription.or_interrupted(pending::<()>(), false).await,
            None
        );
        assert!(begun.elapsed() >= PROMPT, "etcd gets its time");
    }

    /// Invariant 1: an election is no outage.
    #[tokio::test]
    async fn invariant_1_observation_has_full_time_without_pod_end() {
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
    async fn available_answer_is_used_despite_pod_end() {
        let deletions = PodDeletions::default();
        let mut subscription = deletions.subscribe(UID);
        deletions.notify(UID);
        assert_eq!(subscription.or_interrupted(ready(1), false).await, Some(1));
    }

    #[tokio::test]
    async fn pod_end_interrupts_wait_at_once() {
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
            () = tokio::time::sleep(PROMPT * 20) => panic!("it was not heard"),
        }
    }

    #[tokio::test]
    async fn urgent_write_waits_for_no_event() {
        let mut subscription = PodDeletions::default().subscribe(UID);
        assert_eq!(
            subscription.or_interrupted(pending::<()>(), true).await,
            None
        );
        assert_eq!(subscription.or_interrupted(ready(1), true).await, Some(1));
    }

    #[test]
    fn finished_observations_leave_no_entry() {
        let deletions = PodDeletions::default();
        drop(deletions.subscribe(UID));
        drop(deletions.subscribe("another"));
        assert_eq!(deletions.senders().len(), 1);
    }
}
