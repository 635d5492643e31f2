//! Reports the result of each reconcile as log lines, Events and metrics.
//!
//! The labels of metrics are fixed texts and namespaces, so their number is limited. The text of an error appears only
//! in logs and Events.
//!
//! Invariant 14: callers never pass the content of a Secret to this module.

use std::collections::HashMap;
use std::error::Error as StdError;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use api::problem::Chain;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use tracing::{debug, info, warn};

use crate::event::{Queue, Reporter, SERIES, Series};
pub use crate::notice::Notice;

/// A state that lasts is published again after this time, because Events expire (by default after an hour).
const REPEAT_AFTER: Duration = Duration::from_mins(30);
/// Maximum number of Events in a burst, for one object and one reason.
const BURST: u32 = 20;
/// After a burst, one Event is allowed in each interval of this length.
const REFILL: Duration = Duration::from_secs(30);

/// The result of a successful reconcile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Maximum time until the next reconcile. If `None`, only a change of an object triggers the next reconcile.
    pub requeue: Option<Duration>,
    /// Notices for users. Each notice becomes an Event and a log line.
    pub notices: Vec<Notice>,
}

/// An error of a reconcile, with one of a few fixed reasons.
pub trait Failure: StdError + Send + Sync + 'static {
    /// The reason in PascalCase, for the metric label and the Event. It must not change between releases.
    fn reason(&self) -> &'static str;

    /// The changes that the reconcile made before it failed.
    fn notices(&self) -> &[Notice] {
        &[]
    }

    /// Time until the retry. A retry after this time does not increase the back-off. If `None`, the back-off determines
    /// the time.
    fn retry_after(&self) -> Option<Duration> {
        None
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

/// The metrics of reconciles.
#[derive(Clone)]
pub struct Metrics {
    duration: Family<Where, Histogram, fn() -> Histogram>,
    failed: Family<Why, Counter>,
    notices: Family<Why, Counter>,
    withheld: Family<Where, Counter>,
}

impl Metrics {
    /// Registers the metrics. Their names contain `word`, as in `etcd_operator_cluster_reconcile_...`.
    pub fn register(registry: &mut Registry, word: &str) -> Self {
        // The buckets cover 5 ms to 82 s.
        let buckets: fn() -> Histogram = || Histogram::new(exponential_buckets(0.005, 2.0, 15));
        let metrics = Self {
            duration: Family::new_with_constructor(buckets),
            failed: Family::default(),
            notices: Family::default(),
            withheld: Family::default(),
        };
        let registry = registry.sub_registry_with_prefix(format!("etcd_operator_{word}"));
        registry.register(
            "reconcile_duration",
            "Duration of a reconcile in seconds",
            metrics.duration.clone(),
        );
        // The same metric is exported under two names, because coreos/etcd-operator used the name `reconcile_duration`,
        // which has no unit.
        registry.register(
            "reconcile_duration_seconds",
            "Duration of a reconcile in seconds",
            metrics.duration.clone(),
        );
        registry.register(
            "reconcile_failed",
            "Failed reconciles, by reason",
            metrics.failed.clone(),
        );
        registry.register(
            "notices",
            "Events published, by reason",
            metrics.notices.clone(),
        );
        registry.register(
            "notices_withheld",
            "Events dropped by the rate limit of one object",
            metrics.withheld.clone(),
        );
        metrics
    }
}

/// The notices that were published recently, and the rate limits.
#[derive(Default)]
struct History {
    /// The published notices, by the UID of the object and the reason, and then by the note.
    notes: HashMap<(String, &'static str), HashMap<String, Published>>,
    /// The rate limits, by UID of the object and reason.
    allowances: HashMap<(String, &'static str), Allowance>,
}

/// A notice that was published as an Event.
struct Published {
    at: Instant,
    series: Series,
    /// True if the state has ended. If the state occurs again, its note is published again.
    ended: bool,
    /// True if the note reports a change. Each repetition of a change is published, and increments the count of the
    /// same Event.
    change: bool,
}

impl Published {
    fn is_needed(&self, now: Instant) -> bool {
        let long = if self.change { SERIES } else { REPEAT_AFTER };
        now.duration_since(self.at) < long
    }
}

/// The rate limit for Events of one object and one reason: a burst of [`BURST`] Events, and then one Event per
/// [`REFILL`]. It prevents an unstable cluster from overloading the API server. Because each reason has its own limit,
/// many failures do not suppress the Event of the recovery.
struct Allowance {
    left: u32,
    since: Instant,
}

impl Allowance {
    fn take(&mut self, now: Instant) -> bool {
        let gained = now.duration_since(self.since).as_secs() / REFILL.as_secs();
        if let Some(gained) = u32::try_from(gained).ok().filter(|gained| *gained > 0) {
            self.left = self.left.saturating_add(gained).min(BURST);
            self.since = now;
        }
        let may = self.left > 0;
        self.left = self.left.saturating_sub(1);
        may
    }
}

enum Decision {
    Publish(Series),
    /// The state was already published and has not ended, so the notice is not published.
    Duplicate,
    /// The rate limit allows no Event now, so the notice is not published.
    RateLimited,
}

/// Publishes the outcomes of one operator.
pub struct Report {
    client: Client,
    reporter: Reporter,
    metrics: Metrics,
    history: Mutex<History>,
    /// To prevent a deadlock, code that needs both locks must lock `queue` before `history`.
    queue: Mutex<Queue>,
}

impl Report {
    /// Creates the report of an operator. `controller` is the name of the operator, and `instance` the name of its pod.
    pub fn new(client: Client, controller: &str, instance: &str, metrics: Metrics) -> Self {
        let reporter = Reporter {
            controller: controller.to_owned(),
            instance: instance.to_owned(),
        };
        Self {
            client,
            reporter,
            metrics,
            history: Mutex::default(),
            queue: Mutex::default(),
        }
    }

    /// Creates one time series of each metric, because a metric without a time series is not exported. For tests.
    #[cfg(test)]
    pub(crate) fn fill_metrics(&self) {
        let namespace = String::new();
        let why = Why {
            namespace: namespace.clone(),
            reason: "Failed",
        };
        let place = Where { namespace };
        self.metrics.duration.get_or_create(&place).observe(1.0);
        self.metrics.withheld.get_or_create(&place).inc();
        self.metrics.failed.get_or_create(&why).inc();
        self.metrics.notices.get_or_create(&why).inc();
    }

    /// Reports the result of one reconcile. A failed publication does not affect the reconcile.
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
                self.mark_ended(object, &done.notices);
                for notice in &done.notices {
                    self.publish(object, notice);
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
                for notice in error.notices() {
                    self.publish(object, notice);
                }
                self.publish(object, &notice);
            }
        }
    }

    /// Marks the published states that are not in `notices` as ended. `notices` are the notices of the latest
    /// reconcile.
    fn mark_ended(&self, object: &ObjectReference, notices: &[Notice]) {
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        for ((uid, reason), notes) in &mut history.notes {
            if Some(uid) == object.uid.as_ref() {
                for (note, published) in notes {
                    let holds = |one: &Notice| one.reason == *reason && one.note == *note;
                    published.ended = !notices.iter().any(holds);
                }
            }
        }
    }

    /// Logs a notice and publishes it as an Event, unless the same state was already published.
    pub fn publish(&self, object: &ObjectReference, notice: &Notice) {
        // The lock on the queue is held until the notice is in the queue, so that the counts of one Event are
        // published in ascending order.
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let series = match self.decide(object, notice, Instant::now()) {
            Decision::Publish(series) => series,
            Decision::Duplicate => return,
            Decision::RateLimited => {
                let namespace = object.namespace.clone().unwrap_or_default();
                self.metrics
                    .withheld
                    .get_or_create(&Where { namespace })
                    .inc();
                if notice.change {
                    // A change is reported only once, so a suppressed change is logged here. A state that lasts is
                    // reported again by a later reconcile.
                    info!(
                        reason = notice.reason,
                        "{} (no Event: rate limit)", notice.note
                    );
                }
                return;
            }
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
        // A background task publishes the Event, so that the reconcile does not wait.
        let (object, notice) = (object.clone(), notice.clone());
        let (client, reporter) = (self.client.clone(), self.reporter.clone());
        let uid = object.uid.clone().unwrap_or_default();
        queue.push(&uid, async move {
            if let Err(error) = series.publish(client, reporter, object, &notice).await {
                debug!(
                    error = Chain(&error).to_string(),
                    "cannot publish the Event"
                );
            }
        });
    }

    /// Decides whether a notice is published. Each note has its own Event, which counts the repetitions of the note.
    fn decide(&self, object: &ObjectReference, notice: &Notice, now: Instant) -> Decision {
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        let history = &mut *history;
        for notes in history.notes.values_mut() {
            notes.retain(|_, published| published.is_needed(now));
        }
        history.notes.retain(|_, notes| !notes.is_empty());
        history
            .allowances
            .retain(|_, one| now.duration_since(one.since) < REPEAT_AFTER);
        let uid = object.uid.clone().unwrap_or_default();
        let key = (uid, notice.reason);
        let notes = history.notes.entry(key.clone()).or_default();
        let before = notes.get(&notice.note);
        if before.is_some_and(|published| !published.ended) && !notice.change {
            return Decision::Duplicate;
        }
        let allowance = history.allowances.entry(key).or_insert(Allowance {
            left: BURST,
            since: now,
        });
        if !allowance.take(now) {
            return Decision::RateLimited;
        }
        let last = notes
            .remove(&notice.note)
            .map(|published| (published.series, published.at));
        let series = Series::next(last, object.name.as_deref(), now);
        let published = Published {
            at: now,
            series: series.clone(),
            ended: false,
            change: notice.change,
        };
        notes.insert(notice.note.clone(), published);
        Decision::Publish(series)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let client = unreachable_client();
        Report::new(
            client,
            "etcd-operator",
            "pod",
            Metrics::register(&mut Registry::default(), "cluster"),
        )
    }

    fn unreachable_client() -> Client {
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        Client::try_from(config).unwrap()
    }

    fn object(uid: &str) -> ObjectReference {
        ObjectReference {
            uid: Some(uid.into()),
            ..ObjectReference::default()
        }
    }

    #[tokio::test]
    async fn event_of_unchanged_state_is_published_only_once() {
        let (report, object, now) = (report(), object("1"), Instant::now());
        let is_published = |notice: &Notice, at| {
            matches!(report.decide(&object, notice, at), Decision::Publish(_))
        };
        let first = Notice::warning("QuorumLost", "Wait", "two of three members are lost");
        let other = Notice::warning("QuorumLost", "Wait", "three of three members are lost");
        assert!(is_published(&first, now));
        assert!(!is_published(&first, now));
        assert!(is_published(&other, now));
        assert!(
            !is_published(&first, now),
            "the Event of a state that continues was published twice"
        );
        assert!(is_published(&other, now + REPEAT_AFTER));
        // `mark_ended` gets the states that continue (`other`). The state `first` has therefore ended, and is published
        // when it occurs again.
        report.mark_ended(&object, std::slice::from_ref(&other));
        assert!(is_published(&first, now));
        assert!(!is_published(&other, now));
    }

    #[tokio::test]
    async fn published_notices_are_removed_from_memory_after_expiry() {
        let (report, now) = (report(), Instant::now());
        let publish =
            |uid: &str, notice: &Notice, at| drop(report.decide(&object(uid), notice, at));
        for uid in ["1", "2", "3"] {
            publish(uid, &Notice::change("MemberStarted", "Start", uid), now);
            publish(uid, &Notice::warning("QuorumLost", "Wait", uid), now);
        }
        let kept = |notice: &Notice, at| {
            publish("last", notice, at);
            let history = report.history.lock().unwrap();
            (history.notes.len(), history.allowances.len())
        };
        let change = Notice::change("MemberStarted", "Start", "last");
        assert_eq!(kept(&change, now), (7, 7));
        assert_eq!(
            kept(&change, now + SERIES),
            (4, 7),
            "notices about states must be kept longer than notices about changes"
        );
        assert_eq!(kept(&change, now + REPEAT_AFTER), (1, 1));
    }

    #[tokio::test]
    async fn every_change_is_published_as_event() {
        let (report, object, now) = (report(), object("1"), Instant::now());
        let change = Notice::change("MemberStarted", "Start", "create the pod of db-a");
        for _ in 0..3 {
            assert!(matches!(
                report.decide(&object, &change, now),
                Decision::Publish(_)
            ));
        }
    }

    #[tokio::test]
    async fn rate_limit_applies_to_each_object_and_reason_separately() {
        let (report, now) = (report(), Instant::now());
        let is_published = |uid: &str, round: u32, at| {
            let notice = Notice::warning("MemberUnhealthy", "Plan", format!("round {round}"));
            matches!(
                report.decide(&object(uid), &notice, at),
                Decision::Publish(_)
            )
        };
        let count = (0..BURST * 3)
            .filter(|round| is_published("1", *round, now))
            .count();
        assert_eq!(u32::try_from(count).unwrap(), BURST);
        assert!(is_published("2", 0, now));
        let recovered = Notice::change("RecoveryComplete", "Recover", "cluster 1");
        let decision = report.decide(&object("1"), &recovered, now);
        assert!(matches!(decision, Decision::Publish(_)));
        assert!(is_published("1", 1000, now + REFILL));
        assert!(!is_published("1", 1001, now + REFILL));
    }

    #[test]
    fn failure_metric_has_namespace_and_reason_as_labels() {
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
