//! The one place where the result of a reconcile becomes a log line, an Event and a metric.
//!
//! Metric labels come from `&'static str`s and the namespace, so their number is bounded; the text of an
//! error reaches logs and Events, never a label. No text given to this module may hold a Secret's content.
//! Invariant 14.

use std::collections::HashMap;
use std::error::Error as StdError;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use tracing::{debug, info, warn};

/// How long an unchanged notice is not repeated. Events themselves last an hour by default.
const REPEAT_AFTER: Duration = Duration::from_mins(30);
/// What fits into the note of an Event (events.k8s.io allows 1 kB).
const NOTE_LIMIT: usize = 1000;

/// What a reconcile did and has to say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// When to look again, at the latest; `None` waits for a change.
    pub requeue: Option<Duration>,
    /// What the user should see; each becomes an Event and a log line.
    pub notices: Vec<Notice>,
}

/// One thing to tell the user about an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Whether the user should worry.
    pub warning: bool,
    /// Stable, PascalCase.
    pub reason: &'static str,
    /// What the operator was doing: stable, PascalCase verb.
    pub action: &'static str,
    /// A sentence for people, with the remedy.
    pub note: String,
}

impl Notice {
    /// Something happened as it should.
    pub fn normal(reason: &'static str, action: &'static str, note: impl Into<String>) -> Self {
        Self {
            warning: false,
            reason,
            action,
            note: note.into(),
        }
    }

    /// Something needs the user.
    pub fn warning(reason: &'static str, action: &'static str, note: impl Into<String>) -> Self {
        Self {
            warning: true,
            reason,
            action,
            note: note.into(),
        }
    }
}

/// An error of a reconcile: it can be sorted into few kinds.
pub trait Failure: StdError + Send + Sync + 'static {
    /// A stable, PascalCase reason: metric label and Event reason.
    fn reason(&self) -> &'static str;
}

/// Prints an error with its causes, each once.
pub struct Chain<'a>(pub &'a dyn StdError);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = self.0.to_string();
        f.write_str(&said)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            // Some libraries repeat the cause in their own text.
            let text = error.to_string();
            if !said.contains(&text) {
                write!(f, ": {text}")?;
                said = text;
            }
            cause = error.source();
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Where {
    namespace: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Why {
    namespace: String,
    reason: &'static str,
}

/// What is counted about reconciles.
#[derive(Clone)]
pub struct Metrics {
    duration: Family<Where, Histogram, fn() -> Histogram>,
    failed: Family<Why, Counter>,
    notices: Family<Why, Counter>,
}

impl Metrics {
    /// Registers the metrics under the object's word, such as `cluster`: `etcd_operator_cluster_reconcile_...`.
    pub fn register(registry: &mut Registry, word: &str) -> Self {
        // From 5 ms to 82 s: a reconcile that takes longer is stuck.
        let buckets: fn() -> Histogram = || Histogram::new(exponential_buckets(0.005, 2.0, 15));
        let metrics = Self {
            duration: Family::new_with_constructor(buckets),
            failed: Family::default(),
            notices: Family::default(),
        };
        let registry = registry.sub_registry_with_prefix(format!("etcd_operator_{word}"));
        registry.register(
            "reconcile_duration",
            "Seconds one reconcile took",
            metrics.duration.clone(),
        );
        registry.register(
            "reconcile_failed",
            "Reconciles that failed, by reason",
            metrics.failed.clone(),
        );
        registry.register(
            "notices",
            "What users were told in Events, by reason",
            metrics.notices.clone(),
        );
        metrics
    }
}

type Told = HashMap<(String, &'static str), (String, Instant, Recorder)>;

/// Reports outcomes of one operator.
pub struct Report {
    client: Client,
    reporter: Reporter,
    metrics: Metrics,
    told: Mutex<Told>,
}

impl Report {
    /// For the operator named `controller`, running as `instance`.
    pub fn new(client: Client, controller: &str, instance: &str, metrics: Metrics) -> Self {
        let reporter = Reporter {
            controller: controller.to_owned(),
            instance: Some(instance.to_owned()),
        };
        Self {
            client,
            reporter,
            metrics,
            told: Mutex::default(),
        }
    }

    /// Reports one reconcile of one object. A failed publication of an Event fails nothing.
    pub fn outcome<F: Failure>(
        &self,
        object: &ObjectReference,
        took: Duration,
        result: &Result<Done, F>,
    ) {
        let namespace = object.namespace.clone().unwrap_or_default();
        self.metrics
            .duration
            .get_or_create(&Where {
                namespace: namespace.clone(),
            })
            .observe(took.as_secs_f64());
        match result {
            Ok(done) => {
                debug!(?took, requeue = ?done.requeue, "reconciled");
                for notice in &done.notices {
                    self.tell(object, notice);
                }
            }
            Err(error) => {
                let reason = error.reason();
                self.metrics
                    .failed
                    .get_or_create(&Why { namespace, reason })
                    .inc();
                let notice = Notice::warning(reason, "Reconcile", Chain(error).to_string());
                warn!(reason, error = notice.note, ?took, "reconcile failed");
                self.tell(object, &notice);
            }
        }
    }

    /// Tells the user one thing: an Event and a log line, unless just that was told already.
    pub fn tell(&self, object: &ObjectReference, notice: &Notice) {
        let Some(recorder) = self.recorder_if_new(object, notice, Instant::now()) else {
            return;
        };
        if notice.warning {
            warn!(reason = notice.reason, "{}", notice.note);
        } else {
            info!(reason = notice.reason, "{}", notice.note);
        }
        let namespace = object.namespace.clone().unwrap_or_default();
        self.metrics
            .notices
            .get_or_create(&Why {
                namespace,
                reason: notice.reason,
            })
            .inc();
        let event = Event {
            type_: if notice.warning {
                EventType::Warning
            } else {
                EventType::Normal
            },
            reason: notice.reason.to_owned(),
            note: Some(shorten(&notice.note)),
            action: notice.action.to_owned(),
            secondary: None,
        };
        // Nobody waits for an Event: the next step is worth more than the word about the last one.
        let object = object.clone();
        tokio::spawn(async move {
            if let Err(error) = recorder.publish(&event, &object).await {
                debug!(
                    error = Chain(&error).to_string(),
                    "the Event was not accepted"
                );
            }
        });
    }

    /// A recorder remembers what it published by reason alone and repeats the first note; a changed note
    /// therefore gets a recorder of its own.
    fn recorder_if_new(
        &self,
        object: &ObjectReference,
        notice: &Notice,
        now: Instant,
    ) -> Option<Recorder> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.retain(|_, (_, at, _)| now.duration_since(*at) < REPEAT_AFTER);
        let key = (object.uid.clone().unwrap_or_default(), notice.reason);
        match told.get(&key) {
            Some((note, ..)) if *note == notice.note => None,
            _ => {
                let recorder = Recorder::new(self.client.clone(), self.reporter.clone());
                told.insert(key, (notice.note.clone(), now, recorder.clone()));
                Some(recorder)
            }
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

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] Inner);

    #[derive(Debug, thiserror::Error)]
    #[error("inner")]
    struct Inner;

    fn report() -> Report {
        let service = tower_never();
        Report::new(
            service,
            "etcd-operator",
            "pod",
            Metrics::register(&mut Registry::default(), "cluster"),
        )
    }

    fn tower_never() -> Client {
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        Client::try_from(config).unwrap()
    }

    #[test]
    fn a_chain_says_each_cause_once() {
        assert_eq!(Chain(&Outer(Inner)).to_string(), "outer: inner");
    }

    #[test]
    fn long_notes_are_cut_between_characters() {
        let note = "\u{fc}".repeat(NOTE_LIMIT);
        let short = shorten(&note);
        assert!(short.len() <= NOTE_LIMIT && short.ends_with("..."));
        assert_eq!(shorten("brief"), "brief");
    }

    #[tokio::test]
    async fn a_notice_is_told_again_only_when_it_changed() {
        let report = report();
        let object = ObjectReference {
            uid: Some("1".into()),
            ..ObjectReference::default()
        };
        let now = Instant::now();
        let first = Notice::warning("QuorumLost", "Wait", "two of three members are gone");
        let changed = Notice::warning("QuorumLost", "Wait", "three of three members are gone");
        assert!(report.recorder_if_new(&object, &first, now).is_some());
        assert!(report.recorder_if_new(&object, &first, now).is_none());
        assert!(report.recorder_if_new(&object, &changed, now).is_some());
        assert!(
            report
                .recorder_if_new(&object, &changed, now + REPEAT_AFTER)
                .is_some()
        );
    }

    #[test]
    fn metric_labels_are_bounded_and_name_the_namespace() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry, "cluster");
        metrics
            .failed
            .get_or_create(&Why {
                namespace: "a".into(),
                reason: "Forbidden",
            })
            .inc();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let line =
            r#"etcd_operator_cluster_reconcile_failed_total{namespace="a",reason="Forbidden"} 1"#;
        assert!(text.contains(line), "{text}");
    }
}
