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
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use tracing::{debug, info, warn};

use crate::event::{Queue, Reporter, SERIES, Series};
pub use crate::notice::Notice;

/// How long an unchanged notice is not repeated. Events themselves last an hour by default.
const REPEAT_AFTER: Duration = Duration::from_mins(30);
/// How many Events of one reason about one object are written at once.
const BURST: u32 = 20;
/// How long until one more may be.
const REFILL: Duration = Duration::from_secs(30);

/// What a reconcile did and has to say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// When to look again, at the latest; `None` waits for a change.
    pub requeue: Option<Duration>,
    /// What the user should see; each becomes an Event and a log line.
    pub notices: Vec<Notice>,
}

/// An error of a reconcile: it can be sorted into few kinds.
pub trait Failure: StdError + Send + Sync + 'static {
    /// A stable, PascalCase reason: metric label and Event reason.
    fn reason(&self) -> &'static str;

    /// What was done before the failure, or beside it.
    fn notices(&self) -> &[Notice] {
        &[]
    }

    /// When it is worth another try, where the failure itself knows; it does not count as another one then.
    fn again_in(&self) -> Option<Duration> {
        None
    }
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
    withheld: Family<Where, Counter>,
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
            withheld: Family::default(),
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
        registry.register(
            "notices_withheld",
            "Events not written because there were too many about one object",
            metrics.withheld.clone(),
        );
        metrics
    }
}

/// What was told lately, and how much more may be.
#[derive(Default)]
struct Told {
    /// By object and reason, by note.
    notes: HashMap<(String, &'static str), HashMap<String, Said>>,
    /// By object and reason.
    allowances: HashMap<(String, &'static str), Allowance>,
}

/// A note that was told.
struct Said {
    at: Instant,
    series: Series,
    /// It does not hold any more: should it hold again, that is news.
    over: bool,
    /// Something was done: that it was told is remembered only to count it.
    change: bool,
}

impl Said {
    fn is_needed(&self, now: Instant) -> bool {
        let long = if self.change { SERIES } else { REPEAT_AFTER };
        now.duration_since(self.at) < long
    }
}

/// How many Events of one reason about one object may still be written: as many as [`BURST`] at once, then one each
/// [`REFILL`]. A cluster that flaps must not drown the API server in Events, and what flaps must not hold back the Event
/// of a recovery.
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

/// What became of a notice.
enum Telling {
    /// It is published as this Event.
    As(Series),
    /// Just that was told already.
    Told,
    /// Too much was told about the object.
    Withheld,
}

/// Reports outcomes of one operator.
pub struct Report {
    client: Client,
    reporter: Reporter,
    metrics: Metrics,
    told: Mutex<Told>,
    /// Locked before the other one.
    published: Mutex<Queue>,
}

impl Report {
    /// For the operator named `controller`, running as `instance`.
    pub fn new(client: Client, controller: &str, instance: &str, metrics: Metrics) -> Self {
        let reporter = Reporter {
            controller: controller.to_owned(),
            instance: instance.to_owned(),
        };
        Self {
            client,
            reporter,
            metrics,
            told: Mutex::default(),
            published: Mutex::default(),
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
                self.settle(object, &done.notices);
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
                for notice in error.notices() {
                    self.tell(object, notice);
                }
                self.tell(object, &notice);
            }
        }
    }

    /// What was told and is not found any more is over.
    fn settle(&self, object: &ObjectReference, notices: &[Notice]) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        for ((uid, reason), notes) in &mut told.notes {
            if Some(uid) == object.uid.as_ref() {
                for (note, said) in notes {
                    let holds = |one: &Notice| one.reason == *reason && one.note == *note;
                    said.over = !notices.iter().any(holds);
                }
            }
        }
    }

    /// Tells the user one thing: an Event and a log line, unless just that was told already.
    pub fn tell(&self, object: &ObjectReference, notice: &Notice) {
        // What is counted later is published later.
        let mut published = self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let series = match self.telling(object, notice, Instant::now()) {
            Telling::As(series) => series,
            Telling::Told => return,
            Telling::Withheld => {
                let namespace = object.namespace.clone().unwrap_or_default();
                self.metrics
                    .withheld
                    .get_or_create(&Where { namespace })
                    .inc();
                if notice.change {
                    // A state is told as soon as it may be; of what was done, this line is the only record.
                    info!(reason = notice.reason, "{} (no Event)", notice.note);
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
        // Nobody waits for an Event: the next step is worth more than the word about the last one.
        let (object, notice) = (object.clone(), notice.clone());
        let (client, reporter) = (self.client.clone(), self.reporter.clone());
        let uid = object.uid.clone().unwrap_or_default();
        published.push(&uid, async move {
            if let Err(error) = series.publish(client, reporter, object, &notice).await {
                debug!(
                    error = Chain(&error).to_string(),
                    "the Event was not accepted"
                );
            }
        });
    }

    /// Each note has a series of its own: what is told again is counted.
    fn telling(&self, object: &ObjectReference, notice: &Notice, now: Instant) -> Telling {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let told = &mut *told;
        for notes in told.notes.values_mut() {
            notes.retain(|_, said| said.is_needed(now));
        }
        told.notes.retain(|_, notes| !notes.is_empty());
        told.allowances
            .retain(|_, one| now.duration_since(one.since) < REPEAT_AFTER);
        let uid = object.uid.clone().unwrap_or_default();
        let key = (uid, notice.reason);
        let notes = told.notes.entry(key.clone()).or_default();
        let said = notes.get(&notice.note);
        if said.is_some_and(|said| !said.over) && !notice.change {
            return Telling::Told;
        }
        let allowance = told.allowances.entry(key).or_insert(Allowance {
            left: BURST,
            since: now,
        });
        if !allowance.take(now) {
            return Telling::Withheld;
        }
        let last = notes
            .remove(&notice.note)
            .map(|said| (said.series, said.at));
        let series = Series::next(last, object.name.as_deref(), now);
        let said = Said {
            at: now,
            series: series.clone(),
            over: false,
            change: notice.change,
        };
        notes.insert(notice.note.clone(), said);
        Telling::As(series)
    }
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

    fn object(uid: &str) -> ObjectReference {
        ObjectReference {
            uid: Some(uid.into()),
            ..ObjectReference::default()
        }
    }

    #[tokio::test]
    async fn a_notice_is_told_again_only_when_it_changed() {
        let (report, object, now) = (report(), object("1"), Instant::now());
        let tells =
            |notice: &Notice, at| matches!(report.telling(&object, notice, at), Telling::As(_));
        let first = Notice::warning("QuorumLost", "Wait", "two of three members are gone");
        let other = Notice::warning("QuorumLost", "Wait", "three of three members are gone");
        assert!(tells(&first, now));
        assert!(!tells(&first, now));
        assert!(tells(&other, now));
        assert!(!tells(&first, now), "both hold");
        assert!(tells(&other, now + REPEAT_AFTER));
        // What ended and comes again is news.
        report.settle(&object, std::slice::from_ref(&other));
        assert!(tells(&first, now));
        assert!(!tells(&other, now));
    }

    #[tokio::test]
    async fn what_was_told_leaves_nothing_in_the_end() {
        let (report, now) = (report(), Instant::now());
        let tell = |uid: &str, notice: &Notice, at| drop(report.telling(&object(uid), notice, at));
        for uid in ["1", "2", "3"] {
            tell(uid, &Notice::change("MemberStarted", "Start", uid), now);
            tell(uid, &Notice::warning("QuorumLost", "Wait", uid), now);
        }
        let kept = |notice: &Notice, at| {
            tell("last", notice, at);
            let told = report.told.lock().unwrap();
            (told.notes.len(), told.allowances.len())
        };
        let change = Notice::change("MemberStarted", "Start", "last");
        assert_eq!(kept(&change, now), (7, 7));
        assert_eq!(kept(&change, now + SERIES), (4, 7), "states are kept");
        assert_eq!(kept(&change, now + REPEAT_AFTER), (1, 1));
    }

    #[tokio::test]
    async fn every_change_is_told_also_when_it_is_the_same_again() {
        let (report, object, now) = (report(), object("1"), Instant::now());
        let change = Notice::change("MemberStarted", "Start", "create the pod of db-a");
        for _ in 0..3 {
            assert!(matches!(
                report.telling(&object, &change, now),
                Telling::As(_)
            ));
        }
    }

    #[tokio::test]
    async fn a_flapping_reason_is_told_at_a_bounded_rate_and_holds_back_no_other() {
        let (report, now) = (report(), Instant::now());
        let told = |uid: &str, round: u32, at| {
            let notice = Notice::warning("MemberUnhealthy", "Plan", format!("round {round}"));
            matches!(report.telling(&object(uid), &notice, at), Telling::As(_))
        };
        let count = (0..BURST * 3)
            .filter(|round| told("1", *round, now))
            .count();
        assert_eq!(u32::try_from(count).unwrap(), BURST);
        assert!(told("2", 0, now));
        let recovered = Notice::change("RecoveryComplete", "Recover", "cluster 1");
        let telling = report.telling(&object("1"), &recovered, now);
        assert!(matches!(telling, Telling::As(_)));
        assert!(told("1", 1000, now + REFILL));
        assert!(!told("1", 1001, now + REFILL));
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
