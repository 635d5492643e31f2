//! The progress of an agent: the newest revision in the store, and the time up to which the store has all changes.
//! Performs no I/O.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use etcd::ClusterId;
use serde::{Deserialize, Serialize};

use crate::base::StoredBase;

/// Maximum length of the text of a problem in bytes.
const MAX_PROBLEM: usize = 500;

/// Maximum number of gaps in [`Held::gaps`].
const MAX_GAPS: usize = 10;

/// The progress of an agent. All times are microseconds since the epoch, by the clock of the agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Progress {
    /// The newest revision in the store. `None` before the first base.
    pub revision: Option<i64>,
    /// The time at which the agent received this revision.
    pub revision_time: Option<i64>,
    /// All changes before this time are in the store. `None` if this is not known yet.
    pub complete_time: Option<i64>,
    /// The newest revision that etcd has reported.
    pub etcd_revision: Option<i64>,
    /// The base of the current chain.
    pub base: Option<BaseProgress>,
    /// Number of segments that this process has stored.
    pub segments: u64,
    /// Number of bytes of complete segments that are not in the store yet.
    pub waiting_bytes: u64,
    /// The content of the store when the last base was taken, or when the agent started.
    pub held: Option<Held>,
    /// The last failure. `None` after the agent has stored all changes again.
    pub problem: Option<String>,
    /// Why the agent cannot delete old bases.
    pub retention_problem: Option<String>,
}

/// The base of the current chain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BaseProgress {
    /// The ID of the cluster, in hexadecimal without leading zeros.
    #[serde(rename = "clusterID")]
    pub cluster_id: String,
    /// The revision of the base.
    pub revision: i64,
    /// The time at which the base was written.
    pub created: i64,
    /// Number of segments of the base in the store.
    pub segments: u64,
    /// Number of bytes of these segments.
    pub bytes: u64,
}

/// The content of the store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Held {
    /// Number of bases.
    pub bases: u64,
    /// The revision of the oldest base.
    pub oldest_revision: i64,
    /// The time at which the oldest base was written.
    pub oldest_time: i64,
    /// Number of gaps between the chains of consecutive bases.
    pub gap_count: u64,
    /// The newest gaps, newest first; at most ten.
    pub gaps: Vec<Missing>,
}

/// Revisions that are missing between two chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Missing {
    /// The last revision before the gap.
    pub after: i64,
    /// The revision of the base after the gap.
    pub until: i64,
    /// The time at which the base after the gap was written.
    pub until_time: i64,
    /// True if the bases before and after the gap have different cluster IDs.
    pub cluster_changed: bool,
}

impl Held {
    /// The content of a store with these gaps, which are sorted from the oldest to the newest.
    pub(crate) fn new(bases: &[StoredBase], mut gaps: Vec<Missing>) -> Option<Self> {
        let oldest = &bases.first()?.base;
        gaps.reverse();
        let gap_count = gaps.len() as u64;
        gaps.truncate(MAX_GAPS);
        Some(Self {
            bases: bases.len() as u64,
            oldest_revision: oldest.revision,
            oldest_time: oldest.created,
            gap_count,
            gaps,
        })
    }
}

#[derive(Debug, Default)]
struct State {
    progress: Progress,
    cluster_id: Option<ClusterId>,
    /// The time of a request to etcd, and the revision in etcd's answer. The store does not have this revision yet.
    probe: Option<(i64, i64)>,
}

impl State {
    /// Updates the time up to which all changes are in the store.
    fn settle(&mut self) {
        let stored = self.progress.revision;
        if let Some((time, revision)) = self.probe
            && stored.is_some_and(|stored| stored >= revision)
        {
            self.progress.complete_time = Some(time);
            self.progress.problem = None;
            self.probe = None;
        }
    }
}

/// The progress that an agent updates. Other tasks of its process read it.
#[derive(Clone, Debug, Default)]
pub struct Monitor(Arc<Mutex<State>>);

impl Monitor {
    /// The current progress.
    pub fn read(&self) -> Progress {
        self.state().progress.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A poisoned lock is safe to use, because no statement in the middle of a change of the state can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports the start of a chain. `last` is its last revision with the time of this revision, and `stored` the
    /// number of segments and bytes of the base in the store.
    pub(crate) fn begin(&self, base: &StoredBase, last: (i64, i64), stored: (u64, u64)) {
        let mut state = self.state();
        let base = &base.base;
        // The revision in `probe` is dropped if it is from another cluster than this chain.
        if state.cluster_id != Some(base.cluster_id) {
            state.probe = None;
            state.progress.etcd_revision = None;
        }
        state.cluster_id = Some(base.cluster_id);
        let (revision, time) = last;
        state.progress.revision = Some(revision);
        state.progress.revision_time = Some(time);
        let (segments, bytes) = stored;
        state.progress.base = Some(BaseProgress {
            cluster_id: base.cluster_id.to_string(),
            revision: base.revision,
            created: base.created,
            segments,
            bytes,
        });
        state.settle();
    }

    /// Reports that a segment is stored. `last` is its last revision, and the time at which the agent received this
    /// revision.
    pub(crate) fn stored(&self, last: (i64, i64), bytes: u64) {
        let mut state = self.state();
        let (revision, time) = last;
        state.progress.revision = Some(revision);
        state.progress.revision_time = Some(time);
        state.progress.segments += 1;
        if let Some(base) = &mut state.progress.base {
            base.segments += 1;
            base.bytes += bytes;
        }
        state.settle();
    }

    /// Reports the revision that a member of this cluster had at this time. Has no effect if the current chain belongs
    /// to another cluster.
    pub(crate) fn probed(&self, cluster_id: ClusterId, revision: i64, time: i64) {
        let mut state = self.state();
        if state.cluster_id != Some(cluster_id) {
            return;
        }
        let newest = state.progress.etcd_revision.unwrap_or_default();
        state.progress.etcd_revision = Some(newest.max(revision));
        // `probe` keeps the oldest request until the store has the revision of its response. If each new request
        // replaced the older one, the complete time would never advance while clients write without a pause.
        if state.probe.is_none() {
            state.probe = Some((time, revision));
        }
        state.settle();
    }

    /// Ignores etcd's revisions until the next chain begins, because the data of etcd was restored.
    pub(crate) fn resets(&self) {
        self.state().cluster_id = None;
    }

    pub(crate) fn waits(&self, bytes: u64) {
        self.state().progress.waiting_bytes = bytes;
    }

    pub(crate) fn holds(&self, held: Option<Held>) {
        self.state().progress.held = held;
    }

    /// Reports a problem. The problem is cleared when all changes are in the store again.
    pub(crate) fn fails(&self, problem: &str) {
        self.state().progress.problem = Some(limited(problem));
    }

    /// Reports the result of the last deletion of old bases: its problem, or `None` after a success.
    pub(crate) fn retention_ends(&self, problem: Option<&str>) {
        self.state().progress.retention_problem = problem.map(limited);
    }

    /// The number and the total bytes of the current base's segments that the store contains.
    pub(crate) fn base_size(&self) -> (u64, u64) {
        let state = self.state();
        let base = state.progress.base.as_ref();
        base.map_or((0, 0), |base| (base.segments, base.bytes))
    }
}

fn limited(problem: &str) -> String {
    let mut text = problem.to_owned();
    text.truncate(text.floor_char_boundary(MAX_PROBLEM));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{BASE_REVISION, base, base_of};

    const CLUSTER: ClusterId = ClusterId(7);

    fn begun() -> Monitor {
        let monitor = Monitor::default();
        monitor.begin(&base(), (BASE_REVISION, 1_000), (0, 0));
        monitor
    }

    #[test]
    fn complete_time_advances_only_after_probed_revision_is_stored() {
        let monitor = begun();
        monitor.probed(CLUSTER, BASE_REVISION, 2_000);
        assert_eq!(monitor.read().complete_time, Some(2_000));
        monitor.probed(CLUSTER, BASE_REVISION + 3, 3_000);
        monitor.probed(CLUSTER, BASE_REVISION + 5, 4_000);
        monitor.stored((BASE_REVISION + 2, 3_100), 10);
        assert_eq!(monitor.read().complete_time, Some(2_000));
        monitor.stored((BASE_REVISION + 4, 3_200), 10);
        // The store contains the revision that etcd reported at the time 3,000, but not the one reported at 4,000.
        assert_eq!(monitor.read().complete_time, Some(3_000));
        let progress = monitor.read();
        assert_eq!(progress.etcd_revision, Some(BASE_REVISION + 5));
        assert_eq!(progress.revision, Some(BASE_REVISION + 4));
        let base = progress.base.unwrap();
        assert_eq!((base.segments, base.bytes, progress.segments), (2, 20, 2));
    }

    #[test]
    fn revision_of_another_cluster_is_ignored() {
        let monitor = begun();
        monitor.probed(ClusterId(8), 1, 2_000);
        assert_eq!(monitor.read().complete_time, None);
        // A restored cluster has another ID and a lower revision. When its chain begins, the revision of the former
        // cluster no longer counts.
        monitor.probed(CLUSTER, BASE_REVISION + 1, 2_000);
        monitor.begin(&base_of(8, 5), (5, 2_500), (0, 0));
        assert_eq!(monitor.read().complete_time, None);
        monitor.probed(ClusterId(8), 5, 3_000);
        assert_eq!(monitor.read().complete_time, Some(3_000));
    }

    #[test]
    fn revisions_after_restore_count_only_for_next_chain() {
        let monitor = begun();
        monitor.probed(CLUSTER, BASE_REVISION + 1, 2_000);
        monitor.resets();
        monitor.probed(CLUSTER, BASE_REVISION - 2, 3_000);
        assert_eq!(monitor.read().complete_time, None);
        monitor.begin(&base(), (BASE_REVISION - 2, 3_500), (0, 0));
        monitor.probed(CLUSTER, BASE_REVISION - 2, 4_000);
        let progress = monitor.read();
        assert_eq!(progress.complete_time, Some(4_000));
        assert_eq!(progress.etcd_revision, Some(BASE_REVISION - 2));
    }

    #[test]
    fn problem_is_truncated_and_cleared_when_all_changes_are_stored() {
        let monitor = begun();
        monitor.fails(&"x".repeat(1_000));
        assert_eq!(monitor.read().problem.unwrap().len(), MAX_PROBLEM);
        monitor.probed(CLUSTER, BASE_REVISION, 2_000);
        assert_eq!(monitor.read().problem, None);
    }

    #[test]
    fn retention_problem_stays_until_retention_succeeds() {
        let monitor = begun();
        monitor.retention_ends(Some(&"x".repeat(1_000)));
        monitor.probed(CLUSTER, BASE_REVISION, 2_000);
        let problem = monitor.read().retention_problem;
        assert_eq!(problem.unwrap().len(), MAX_PROBLEM);
        monitor.retention_ends(None);
        assert_eq!(monitor.read().retention_problem, None);
    }
}
