//! Back-off after the API server has rejected the start of a member.
//!
//! The start of a member sets the annotation `started` on the member's Service, and removes the annotation if the API
//! server rejects a later request. Both changes trigger a reconcile at once, so without a back-off, the operator would
//! retry as fast as the API server answers.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::EtcdCluster;
use api::problem::Chain;
use kube::ResourceExt;
use runtime::controller::{MAX_BACKOFF, delay};

use crate::execute::error::Error;
use crate::reason::Reason;

/// The rejections, by the UID of the EtcdCluster and the name of the member.
#[derive(Default)]
pub struct Refusals(Mutex<HashMap<(String, String), Refusal>>);

struct Refusal {
    /// Generation of the EtcdCluster at the rejection. A new spec ends the back-off, because the start may then
    /// succeed.
    generation: Option<i64>,
    times: u32,
    until: Instant,
    reason: Reason,
    said: String,
}

impl Refusals {
    fn all(&self) -> MutexGuard<'_, HashMap<(String, String), Refusal>> {
        // No operation under this lock can panic and leave the map inconsistent, so a poisoned lock is safe to use.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// During a member's back-off, the error of the last rejection; `None` if the member may be started. The text stays
    /// the same, so that the error is reported only once.
    pub fn holds(&self, cluster: &EtcdCluster, member: &str, now: Instant) -> Option<Error> {
        let all = self.all();
        let refusal = all.get(&key(cluster, member))?;
        let holds = refusal.generation == cluster.metadata.generation && now < refusal.until;
        holds.then(|| Error::Held {
            reason: refusal.reason,
            said: refusal.said.clone(),
            left: refusal.until.duration_since(now),
        })
    }

    /// Records that the start of a member was rejected, unless planning again resolves the error
    /// ([`Error::is_passing`]).
    pub fn refused(&self, cluster: &EtcdCluster, member: &str, error: &Error, now: Instant) {
        if error.is_passing() {
            return;
        }
        let mut all = self.all();
        let before = all.get(&key(cluster, member));
        let same = before.filter(|one| one.generation == cluster.metadata.generation);
        let times = same.map_or(0, |one| one.times);
        let refusal = Refusal {
            generation: cluster.metadata.generation,
            times: times.saturating_add(1),
            until: now + delay(times),
            reason: error.reason(),
            said: Chain(error).to_string(),
        };
        all.insert(key(cluster, member), refusal);
    }

    /// Ends the back-off of a member, because the member was started.
    pub fn allowed(&self, cluster: &EtcdCluster, member: &str) {
        self.all().remove(&key(cluster, member));
    }

    /// Drops the records of members whose back-off ended long ago.
    pub fn forget(&self, now: Instant) {
        self.all()
            .retain(|_, refusal| now < refusal.until + MAX_BACKOFF * 5);
    }
}

fn key(cluster: &EtcdCluster, member: &str) -> (String, String) {
    (cluster.uid().unwrap_or_default(), member.to_owned())
}

impl Error {
    /// The remaining back-off of a rejected start; `None` for all other errors.
    pub(crate) fn held(&self) -> Option<Duration> {
        match self {
            Self::Held { left, .. } => Some(*left),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::tests::snapshot;

    fn refusal() -> Error {
        Error::Missing("no Secret".to_owned())
    }

    #[test]
    fn repeated_rejections_back_off() {
        let (refusals, cluster) = (Refusals::default(), snapshot().cluster);
        let mut now = Instant::now();
        let left = |now| refusals.holds(&cluster, "a", now)?.held();
        assert_eq!(left(now), None);
        for seconds in [1, 2, 4, 8, 16, 32, 64, 120, 120] {
            let pause = Duration::from_secs(seconds);
            refusals.refused(&cluster, "a", &refusal(), now);
            assert_eq!(left(now), Some(pause));
            assert!(refusals.holds(&cluster, "b", now).is_none());
            now += pause;
            assert_eq!(left(now), None, "after {seconds} s");
        }
        refusals.allowed(&cluster, "a");
        refusals.refused(&cluster, "a", &refusal(), now);
        assert_eq!(left(now), Some(Duration::from_secs(1)));
        refusals.forget(now + MAX_BACKOFF);
        assert!(!refusals.all().is_empty());
        refusals.forget(now + MAX_BACKOFF * 10);
        assert!(refusals.all().is_empty());
    }

    #[test]
    fn spec_change_or_stale_observation_allows_member_start_at_once() {
        let (refusals, mut cluster, now) =
            (Refusals::default(), snapshot().cluster, Instant::now());
        refusals.refused(&cluster, "a", &Error::TooOld, now);
        assert!(refusals.holds(&cluster, "a", now).is_none());
        refusals.refused(&cluster, "a", &refusal(), now);
        let held = refusals.holds(&cluster, "a", now).unwrap();
        assert_eq!(
            (held.reason(), held.to_string()),
            (Reason::Missing, "no Secret".to_owned())
        );
        assert!(!held.is_passing());
        cluster.metadata.generation = Some(77);
        assert!(refusals.holds(&cluster, "a", now).is_none());
    }
}
