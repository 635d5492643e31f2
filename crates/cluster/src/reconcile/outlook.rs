//! The end of a reconcile: its metrics, Events and error, and the time of the next reconcile.

use std::time::Duration;

use api::cluster::EtcdClusterStatus;
use runtime::Done;

use super::observation::Round;
use crate::execute::{self, Acted};
use crate::outcome::{Error, notices};
use crate::reconcile::ClusterOperator;

/// Requeue delay after a failed action, for example after a conflict or while etcd is not ready.
const POSTPONED: Duration = Duration::from_millis(200);
/// Requeue delays from this length on are randomized, so that many clusters are not reconciled at the same moment.
const SPREAD_FROM: Duration = Duration::from_secs(5);

impl ClusterOperator {
    pub(super) fn done(
        &self,
        round: &Round,
        status: &EtcdClusterStatus,
        acted: Acted,
    ) -> Result<Done, Error> {
        let cluster = &round.snapshot.cluster;
        let uid = cluster.metadata.uid.as_deref().unwrap_or_default();
        self.cache.record_step(uid, !round.plan.step.is_empty());
        self.metrics.see(cluster, status, &acted.done);
        let requeue = if acted.failed.is_empty() {
            spread(round.plan.requeue, rand::random())
        } else {
            POSTPONED
        };
        let notices = notices(&round.plan, &acted);
        let failed = acted.failed.into_iter();
        let lasting = failed.filter(|error| !error.is_passing());
        // `held` is `None` for a new failure, which is reported first. Without a new failure, the rejected start whose
        // back-off ends first is reported.
        match lasting.min_by_key(execute::Error::held) {
            Some(source) => Err(Error::Act {
                source,
                told: notices,
            }),
            None => Ok(Done {
                requeue: Some(requeue),
                notices,
            }),
        }
    }
}

/// Shortens a delay of at least [`SPREAD_FROM`] by up to a fifth. `chance` is a random number from 0 to 1.
fn spread(pause: Duration, chance: f64) -> Duration {
    if pause < SPREAD_FROM {
        pause
    } else {
        pause.mul_f64(1.0 - 0.2 * chance.clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_requeue_delays_are_randomized() {
        let (short, long) = (Duration::from_millis(100), Duration::from_secs(10));
        assert_eq!(spread(short, 1.0), short);
        assert_eq!(spread(long, 0.0), long);
        assert_eq!(spread(long, 1.0), Duration::from_secs(8));
        assert!(spread(long, 0.3) < long);
    }
}
