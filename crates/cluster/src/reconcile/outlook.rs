//! The end of a reconcile: what is reported of it, and when the next one begins.

use std::time::Duration;

use api::cluster::EtcdClusterStatus;
use runtime::Done;

use super::observation::Round;
use crate::execute::{self, Acted};
use crate::outcome::{Error, notices};
use crate::reconcile::ClusterOperator;

/// How soon a step that was postponed (a lost race, an etcd that is not ready) is planned again.
const POSTPONED: Duration = Duration::from_millis(200);
/// A pause from which on looks are spread in time, so that many clusters are not asked in the same instant.
const SPREAD_FROM: Duration = Duration::from_secs(5);

impl ClusterOperator {
    pub(super) fn done(
        &self,
        round: &Round,
        status: &EtcdClusterStatus,
        acted: Acted,
    ) -> Result<Done, Error> {
        self.figures.see(&round.look.cluster, status, &acted.done);
        let requeue = if acted.failed.is_empty() {
            spread(round.plan.requeue, rand::random())
        } else {
            POSTPONED
        };
        let notices = notices(&round.plan, &acted);
        let failed = acted.failed.into_iter();
        let lasting = failed.filter(|error| !error.is_passing());
        // What is only held back comes after what has failed now, and first what is tried again first.
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

/// Up to a fifth sooner, by chance.
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
    fn long_pauses_are_spread_and_short_ones_are_kept() {
        let (short, long) = (Duration::from_millis(100), Duration::from_secs(10));
        assert_eq!(spread(short, 1.0), short);
        assert_eq!(spread(long, 0.0), long);
        assert_eq!(spread(long, 1.0), Duration::from_secs(8));
        assert!(spread(long, 0.3) < long);
    }
}
