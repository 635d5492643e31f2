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
pub struct Endings(Mutex<HashMap<String, Sender<()>>>);

impl Endings {
    fn looks(&self) -> MutexGuard<'_, HashMap<String, Sender<()>>> {
        // No operation under the lock leaves a partial state.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A pod of the cluster is ending or has ended.
    pub fn tell(&self, uid: &str) {
        if let Some(look) = self.looks().get(uid) {
            look.send_replace(());
        }
    }

    /// Must be called before the pods are read: the read may miss a pod that ends later.
    pub fn heed(&self, uid: &str) -> Heed {
        let mut looks = self.looks();
        looks.retain(|_, look| look.receiver_count() > 0);
        let look = looks.entry(uid.to_owned());
        Heed(look.or_insert_with(|| channel(()).0).subscribe())
    }
}

/// The subscription of one observation.
pub struct Heed(Receiver<()>);

impl Heed {
    /// The answer. `None` if no answer arrives soon and a pod has ended since the observation began, or a write is
    /// `urgent`.
    pub async fn unless_overtaken<T>(
        &mut self,
        answer: impl Future<Output = T>,
        urgent: bool,
    ) -> Option<T> {
        let overtaken = async {
            tokio::time::sleep(if urgent { URGENT } else { PROMPT }).await;
            if !urgent && self.0.changed().await.is_err() {
                // The sender was dropped.
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            answer = answer => Some(answer),
            () = overtaken => None,
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
        let endings = Endings::default();
        let mut heed = endings.heed(UID);
        endings.tell(UID);
        let begun = Instant::now();
        assert_eq!(heed.unless_overtaken(pending::<()>(), false).await, None);
        assert!(begun.elapsed() >= PROMPT, "etcd gets its time");
    }

    /// Invariant 1: an election is no outage.
    #[tokio::test]
    async fn invariant_1_observation_has_full_time_without_pod_end() {
        let endings = Endings::default();
        endings.tell(UID);
        let mut heed = endings.heed(UID);
        endings.tell("another");
        let slow = async {
            tokio::time::sleep(PROMPT * 2).await;
            "answer"
        };
        assert_eq!(heed.unless_overtaken(slow, false).await, Some("answer"));
    }

    #[tokio::test]
    async fn available_answer_is_used_despite_pod_end() {
        let endings = Endings::default();
        let mut heed = endings.heed(UID);
        endings.tell(UID);
        assert_eq!(heed.unless_overtaken(ready(1), false).await, Some(1));
    }

    #[tokio::test]
    async fn pod_end_interrupts_wait_at_once() {
        let endings = Endings::default();
        let mut heed = endings.heed(UID);
        let late = async {
            tokio::time::sleep(PROMPT + Duration::from_millis(100)).await;
            endings.tell(UID);
            pending::<()>().await;
        };
        tokio::select! {
            dropped = heed.unless_overtaken(pending::<()>(), false) => assert_eq!(dropped, None),
            () = late => {}
            () = tokio::time::sleep(PROMPT * 20) => panic!("it was not heard"),
        }
    }

    #[tokio::test]
    async fn urgent_write_waits_for_no_event() {
        let mut heed = Endings::default().heed(UID);
        assert_eq!(heed.unless_overtaken(pending::<()>(), true).await, None);
        assert_eq!(heed.unless_overtaken(ready(1), true).await, Some(1));
    }

    #[test]
    fn finished_observations_leave_no_entry() {
        let endings = Endings::default();
        drop(endings.heed(UID));
        drop(endings.heed("another"));
        assert_eq!(endings.looks().len(), 1);
    }
}
