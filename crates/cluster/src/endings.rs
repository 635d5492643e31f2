//! Pods that end while etcd is being asked: the look is dropped, and the pods are read again.
//!
//! What members that end were asked is answered late or never: nobody leads any more, and a member that was told to
//! stop waits for its open requests first (`stopServers` in etcd's `server/embed/etcd.go`). A look that began before
//! would wait out its deadlines and keep the next one, which knows better, from beginning. So the end of a pod is told
//! to the look that is under way. Dropping it decides nothing (invariant 1): nothing is made of what was not answered,
//! and without such an event a look has all its time, or each election would be told as an outage.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch::{Receiver, Sender, channel};

/// A cluster that is well answers in much less, whatever becomes of one pod.
const PROMPT: Duration = Duration::from_millis(300);
/// The same when something is to be done that would be done with any answer.
const URGENT: Duration = Duration::from_millis(100);

/// The looks that are under way, by the cluster's UID.
#[derive(Default)]
pub struct Endings(Mutex<HashMap<String, Sender<()>>>);

impl Endings {
    fn looks(&self) -> MutexGuard<'_, HashMap<String, Sender<()>>> {
        // Nothing is left half done under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something of the cluster ends, or has ended.
    pub fn tell(&self, uid: &str) {
        if let Some(look) = self.looks().get(uid) {
            look.send_replace(());
        }
    }

    /// To be called before the pods are read: what ends from now on may be missing in what is read.
    pub fn heed(&self, uid: &str) -> Heed {
        let mut looks = self.looks();
        looks.retain(|_, look| look.receiver_count() > 0);
        let look = looks.entry(uid.to_owned());
        Heed(look.or_insert_with(|| channel(()).0).subscribe())
    }
}

/// One look's ear.
pub struct Heed(Receiver<()>);

impl Heed {
    /// The answer; `None` when it is not there soon and a pod has ended since the look began, or something is to be
    /// done that is `urgent`.
    pub async fn unless_overtaken<T>(
        &mut self,
        answer: impl Future<Output = T>,
        urgent: bool,
    ) -> Option<T> {
        let overtaken = async {
            tokio::time::sleep(if urgent { URGENT } else { PROMPT }).await;
            if !urgent && self.0.changed().await.is_err() {
                // Nobody is left who could tell.
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
    async fn a_look_that_is_not_answered_is_dropped_when_a_pod_ends() {
        let endings = Endings::default();
        let mut heed = endings.heed(UID);
        endings.tell(UID);
        let begun = Instant::now();
        assert_eq!(heed.unless_overtaken(pending::<()>(), false).await, None);
        assert!(begun.elapsed() >= PROMPT, "etcd gets its time");
    }

    /// Invariant 1: an election is no outage.
    #[tokio::test]
    async fn invariant_1_a_look_has_all_its_time_as_long_as_no_pod_ends() {
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
    async fn an_answer_that_is_there_counts_whatever_ends() {
        let endings = Endings::default();
        let mut heed = endings.heed(UID);
        endings.tell(UID);
        assert_eq!(heed.unless_overtaken(ready(1), false).await, Some(1));
    }

    #[tokio::test]
    async fn an_end_in_the_middle_of_the_wait_is_heard_at_once() {
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
    async fn what_is_urgent_waits_for_no_event() {
        let mut heed = Endings::default().heed(UID);
        assert_eq!(heed.unless_overtaken(pending::<()>(), true).await, None);
        assert_eq!(heed.unless_overtaken(ready(1), true).await, Some(1));
    }

    #[test]
    fn looks_that_are_over_leave_nothing() {
        let endings = Endings::default();
        drop(endings.heed(UID));
        drop(endings.heed("another"));
        assert_eq!(endings.looks().len(), 1);
    }
}
