//! Publishes notices as Events. A new notice creates an Event. A repeated notice increments the count of this Event.
//!
//! Keeps only the name and the count of an Event in memory. kube's recorder keeps whole Events, which take kilobytes
//! each, and distinguishes Events only by their reason.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::task::JoinHandle;

use crate::answer::is_not_found;
use crate::logs::in_background;
use crate::notice::Notice;

/// Within this time, a repeated notice increments the count of its Event. Later, a repeated notice creates a new Event.
pub(crate) const SERIES: Duration = Duration::from_mins(6);
/// Time limit for the publication of one Event, because later Events of the same object wait for it. The rate limit
/// allows one Event in a longer interval, so the queue cannot grow without bounds.
const DEADLINE: Duration = Duration::from_secs(10);
/// Maximum length of the note of an Event in bytes (events.k8s.io allows 1 kB).
const NOTE_LIMIT: usize = 1000;

/// The Events that are being published. The Events of one object are sent in order, because a count that arrives before
/// its Event, or after a higher count, would be lost. Each publication is a task that waits for the previous task of
/// its object, so reconciles and other objects do not wait.
pub(crate) struct Queue {
    last: HashMap<String, JoinHandle<()>>,
    deadline: Duration,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            last: HashMap::new(),
            deadline: DEADLINE,
        }
    }
}

impl Queue {
    /// Publishes an Event after all earlier Events of this object were sent, failed or timed out.
    pub(crate) fn push(
        &mut self,
        object: &str,
        publish: impl Future<Output = ()> + Send + 'static,
    ) {
        self.last.retain(|_, task| !task.is_finished());
        let (before, deadline) = (self.last.remove(object), self.deadline);
        let task = async move {
            if let Some(before) = before {
                // An error of `before` is ignored, so that a panic while one Event is published does not prevent the
                // next Event.
                let _ = before.await;
            }
            // The publication has a time limit, because a request without a response would block the queue forever.
            let _ = tokio::time::timeout(deadline, publish).await;
        };
        let task = tokio::spawn(in_background(task));
        self.last.insert(object.to_owned(), task);
    }
}

/// The operator as the source of Events.
#[derive(Clone, Debug)]
pub(crate) struct Reporter {
    /// Name of the operator.
    pub(crate) controller: String,
    /// Name of the operator's pod.
    pub(crate) instance: String,
}

/// The name and the count of an Event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Series {
    name: String,
    count: i32,
}

impl Series {
    /// The Event for a notice about the object with this name. `last` is the previous Event for the same notice, and
    /// the time of its publication.
    pub(crate) fn next(last: Option<(Self, Instant)>, object: Option<&str>, now: Instant) -> Self {
        match last {
            Some((series, at)) if now.duration_since(at) < SERIES => Self {
                count: series.count.saturating_add(1),
                ..series
            },
            _ => {
                let at = jiff::Timestamp::now().as_nanosecond();
                let name = format!("{}.{at:x}", object.unwrap_or("object"));
                Self { name, count: 1 }
            }
        }
    }

    /// Creates the Event, or increments the count of the existing Event.
    pub(crate) async fn publish(
        &self,
        client: Client,
        reporter: Reporter,
        object: ObjectReference,
        notice: &Notice,
    ) -> Result<(), kube::Error> {
        let namespace = object.namespace.as_deref().unwrap_or("default");
        let events = Api::<Event>::namespaced(client, namespace);
        let now = MicroTime(jiff::Timestamp::now());
        if self.count > 1 {
            let series = json!({ "series": { "count": self.count, "lastObservedTime": now } });
            let (params, series) = (PatchParams::default(), Patch::Merge(&series));
            let counted = events.patch(&self.name, &params, &series);
            match counted.await {
                // The Event was deleted or has expired (by default after an hour), so the operator creates a new
                // Event.
                Err(error) if is_not_found(&error) => {}
                counted => return counted.map(drop),
            }
        }
        let event = self.event(now, reporter, object, notice);
        events
            .create(&PostParams::default(), &event)
            .await
            .map(drop)
    }

    fn event(
        &self,
        now: MicroTime,
        reporter: Reporter,
        object: ObjectReference,
        notice: &Notice,
    ) -> Event {
        Event {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                namespace: object.namespace.clone(),
                ..ObjectMeta::default()
            },
            action: Some(notice.action.to_owned()),
            reason: Some(notice.reason.to_owned()),
            note: Some(shorten(&notice.note)),
            type_: Some(if notice.warning { "Warning" } else { "Normal" }.to_owned()),
            event_time: Some(now),
            regarding: Some(object),
            reporting_controller: Some(reporter.controller),
            reporting_instance: Some(reporter.instance),
            ..Event::default()
        }
    }
}

fn shorten(note: &str) -> String {
    if note.len() <= NOTE_LIMIT {
        return note.to_owned();
    }
    let end = (0..=NOTE_LIMIT - 3)
        .rev()
        .find(|&at| note.is_char_boundary(at))
        .unwrap_or(0);
    format!("{}...", &note[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without the queue, the two worker threads would publish later Events during the first publication.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn events_of_one_object_are_published_in_order() {
        let (sent, mut received) = tokio::sync::mpsc::unbounded_channel();
        let (opens, opened) = tokio::sync::oneshot::channel::<()>();
        let mut queue = Queue::default();
        queue.push("a", async move { opened.await.unwrap() });
        for number in 0..100 {
            let sent = sent.clone();
            queue.push("a", async move { sent.send(("a", number)).unwrap() });
        }
        queue.push("b", async move { sent.send(("b", 0)).unwrap() });
        assert_eq!(received.recv().await, Some(("b", 0)));
        assert!(
            received.try_recv().is_err(),
            "an Event overtook the first Event of `a`"
        );
        opens.send(()).unwrap();
        for number in 0..100 {
            assert_eq!(received.recv().await, Some(("a", number)));
        }
        assert_eq!(received.recv().await, None);
    }

    #[tokio::test]
    async fn failed_publication_does_not_block_event_queue() {
        let (sent, received) = tokio::sync::oneshot::channel();
        let mut queue = Queue {
            deadline: Duration::from_millis(10),
            ..Queue::default()
        };
        queue.push("a", async { panic!("a defect") });
        queue.push("a", std::future::pending());
        queue.push("a", async move { sent.send(()).unwrap() });
        assert!(received.await.is_ok());
        while !queue.last["a"].is_finished() {
            tokio::task::yield_now().await;
        }
        queue.push("b", async {});
        assert_eq!(queue.last.len(), 1, "completed tasks must be removed");
    }

    #[test]
    fn long_event_note_is_truncated_between_characters() {
        let note = "\u{fc}".repeat(NOTE_LIMIT);
        let short = shorten(&note);
        assert!(short.len() <= NOTE_LIMIT && short.ends_with("..."));
        assert_eq!(shorten("brief"), "brief");
    }

    #[test]
    fn repeated_notice_is_counted_in_same_event_for_limited_time() {
        let now = Instant::now();
        let first = Series::next(None, Some("db"), now);
        assert!(first.count == 1 && first.name.starts_with("db."));
        let second = Series::next(Some((first.clone(), now)), Some("db"), now);
        assert_eq!((&second.name, second.count), (&first.name, 2));
        let later = Series::next(Some((second.clone(), now)), Some("db"), now + SERIES);
        assert_eq!(later.count, 1);
        assert_ne!(later.name, first.name);
    }

    #[test]
    fn event_contains_reporter_reason_and_object() {
        let reporter = Reporter {
            controller: "etcd-operator".into(),
            instance: "pod".into(),
        };
        let object = ObjectReference {
            name: Some("db".into()),
            namespace: Some("prod".into()),
            ..ObjectReference::default()
        };
        let notice = Notice::warning("QuorumLost", "Wait", "two of three members are lost");
        let series = Series::next(None, Some("db"), Instant::now());
        let now = MicroTime(jiff::Timestamp::UNIX_EPOCH);
        let event = serde_json::to_value(series.event(now, reporter, object, &notice)).unwrap();
        assert_eq!(event["metadata"]["namespace"], "prod");
        assert_eq!(event["metadata"]["name"], series.name);
        assert_eq!(event["regarding"]["name"], "db");
        assert_eq!(event["type"], "Warning");
        assert_eq!(event["reason"], "QuorumLost");
        assert_eq!(event["action"], "Wait");
        assert_eq!(event["note"], "two of three members are lost");
        assert_eq!(event["reportingController"], "etcd-operator");
        assert_eq!(event["reportingInstance"], "pod");
        assert_eq!(event["eventTime"], "1970-01-01T00:00:00.000000Z");
    }
}
