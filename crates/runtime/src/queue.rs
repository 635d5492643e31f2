//! The queue of each controller: the objects whose reconcile is due and has not started. The metrics report its length
//! and the age of its oldest entry.
//!
//! kube_runtime does not show its queue, so this module records the same requests: each change that a watch reports,
//! each requeue, and each start of a reconcile.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;

/// Namespace and name of an object.
pub(crate) type Key = (String, String);

/// The queues of an operator's controllers, by the plural name of the kind, such as `etcdclusters`.
#[derive(Clone, Debug, Default)]
pub struct Queues(Arc<Mutex<BTreeMap<String, Queue>>>);

impl Queues {
    /// The queue for the controllers of a kind, in all namespaces.
    pub(crate) fn of(&self, plural: &str) -> Queue {
        self.queues().entry(plural.to_owned()).or_default().clone()
    }

    fn queues(&self) -> MutexGuard<'_, BTreeMap<String, Queue>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For each object, the time from which its reconcile is due.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue(Arc<Mutex<HashMap<Key, Instant>>>);

impl Queue {
    fn due(&self) -> MutexGuard<'_, HashMap<Key, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the object must be reconciled at this time. Keeps an earlier time that is already recorded.
    pub(crate) fn request(&self, object: Key, at: Instant) {
        let mut due = self.due();
        let time = due.entry(object).or_insert(at);
        *time = at.min(*time);
    }

    /// Records that the reconcile of the object starts, or that the object no longer exists.
    pub(crate) fn remove(&self, object: &Key) {
        self.due().remove(object);
    }

    /// The number of objects whose reconcile is due, and the time for which the oldest of them has waited.
    fn depth(&self, now: Instant) -> (usize, Duration) {
        let due = self.due();
        let waits = due
            .values()
            .filter_map(|due| now.checked_duration_since(*due));
        waits.fold((0, Duration::ZERO), |(count, oldest), wait| {
            (count + 1, oldest.max(wait))
        })
    }
}

/// Computes the metrics of the queues when Prometheus reads them.
#[derive(Debug)]
pub(crate) struct QueueMetrics {
    pub(crate) queues: Queues,
}

impl Collector for QueueMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let now = Instant::now();
        let queues = self.queues.queues();
        let measured: Vec<_> = queues
            .iter()
            .map(|(controller, queue)| (controller, queue.depth(now)))
            .collect();
        let name = "etcd_operator_queue_depth";
        let help = "Objects whose reconcile is due and has not started";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (controller, (count, _)) in &measured {
            let labels = [("controller", controller.as_str())];
            let count = i64::try_from(*count).unwrap_or(i64::MAX);
            ConstGauge::new(count).encode(family.encode_family(&labels)?)?;
        }
        let name = "etcd_operator_queue_oldest_seconds";
        let help =
            "Time for which the first object in the queue has waited, 0 if the queue is empty";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (controller, (_, oldest)) in &measured {
            let labels = [("controller", controller.as_str())];
            ConstGauge::new(oldest.as_secs_f64()).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    fn key(name: &str) -> Key {
        ("prod".to_owned(), name.to_owned())
    }

    #[test]
    fn queue_counts_only_objects_that_are_due() {
        let (queue, now) = (Queue::default(), Instant::now());
        let after = |seconds| now + Duration::from_secs(seconds);
        queue.request(key("a"), now);
        queue.request(key("b"), after(5));
        queue.request(key("c"), after(100));
        assert_eq!(queue.depth(now), (1, Duration::ZERO));
        assert_eq!(queue.depth(after(9)), (2, Duration::from_secs(9)));
        // The age of an entry counts from its first due time, so a second request with a later time does not change the
        // age.
        queue.request(key("a"), after(8));
        assert_eq!(queue.depth(after(9)), (2, Duration::from_secs(9)));
        queue.remove(&key("a"));
        assert_eq!(queue.depth(after(9)), (1, Duration::from_secs(4)));
        // `c` is requested again with an earlier time, so it becomes due at the earlier time.
        queue.request(key("c"), after(9));
        assert_eq!(queue.depth(after(10)), (2, Duration::from_secs(5)));
    }

    #[test]
    fn queue_metrics_have_the_controller_as_only_label() {
        let queues = Queues::default();
        queues.of("etcdbackups").request(key("a"), Instant::now());
        queues.of("etcdclusters");
        let mut registry = Registry::default();
        registry.register_collector(Box::new(QueueMetrics { queues }));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "etcd_operator_queue_depth{controller=\"etcdbackups\"} 1\n",
            "etcd_operator_queue_depth{controller=\"etcdclusters\"} 0\n",
            "etcd_operator_queue_oldest_seconds{controller=\"etcdclusters\"} 0",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
    }
}
