//! The progress of a running mirror, and the notices about its changes. Performs no I/O.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use etcd::ClusterId;
use jiff::Timestamp;
use runtime::Notice;

use crate::checkpoint::{Checkpoint, CopyReason, Phase};
use crate::lag::{Lag, LagMeter};
use crate::reason::{Reason, Trouble};

/// Maximum number of notices that wait for a reconcile.
const MAX_NOTICES: usize = 16;

/// What a mirror does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// The mirror waits until fewer mirrors run.
    #[default]
    Queued,
    /// The mirror connects to both clusters.
    Starting,
    /// The mirror copies all keys.
    Copying,
    /// The mirror applies the changes of the source.
    Following,
}

/// The progress of a mirror since its start in this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// What the mirror does.
    pub state: State,
    /// Why the last attempt has failed. `None` if the mirror works.
    pub trouble: Option<Trouble>,
    /// The cluster ID of the source.
    pub source: Option<ClusterId>,
    /// The revision of the source that the destination contains. During a copy, the revision whose keys are copied.
    pub revision: Option<i64>,
    /// The lag. `None` unless the mirror follows its source.
    pub lag: Option<Lag>,
    /// The last copy of all keys. `None` if this process has only applied changes.
    pub copy: Option<CopyProgress>,
    /// Number of transactions that the destination has applied.
    pub transactions: u64,
    /// Number of transactions of the source that were applied in parts.
    pub splits: u64,
}

/// The progress of a copy of all keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyProgress {
    /// Why all keys are copied.
    pub reason: CopyReason,
    /// Whether the copy is complete.
    pub complete: bool,
    /// Number of compared keys of the source.
    pub compared: u64,
    /// Number of keys that were written to the destination.
    pub written: u64,
    /// Number of keys that were deleted in the destination.
    pub deleted: u64,
}

#[derive(Default)]
struct Shared {
    progress: Progress,
    meter: LagMeter,
    notices: Vec<Notice>,
    /// The destination in which this process has found or created the checkpoint.
    registered: Option<ClusterId>,
}

/// The progress of a mirror, shared by its task and the reconciles of its EtcdMirror.
#[derive(Clone, Default)]
pub struct Monitor(Arc<Mutex<Shared>>);

impl Monitor {
    /// The progress.
    pub fn read(&self) -> Progress {
        self.shared().progress.clone()
    }

    /// The notices since the last call.
    pub fn take_notices(&self) -> Vec<Notice> {
        std::mem::take(&mut self.shared().notices)
    }

    /// Records that the mirror has a slot, and connects to both clusters.
    pub(crate) fn start(&self) {
        self.shared().progress.state = State::Starting;
    }

    /// Records that a destination contains the checkpoint.
    pub(crate) fn register(&self, destination: ClusterId) {
        self.shared().registered = Some(destination);
    }

    /// Whether this process has found or created the checkpoint in this destination before.
    pub(crate) fn is_registered(&self, destination: ClusterId) -> bool {
        self.shared().registered == Some(destination)
    }

    /// Records that an attempt has failed. Returns true if the reason is new.
    pub(crate) fn fail(&self, trouble: Trouble) -> bool {
        let mut shared = self.shared();
        let known = shared.progress.trouble.replace(trouble);
        let reason = |trouble: Option<&Trouble>| trouble.map(|trouble| trouble.reason);
        reason(known.as_ref()) != reason(shared.progress.trouble.as_ref())
    }

    /// Records a checkpoint of the destination. Returns true if the state of the mirror has changed.
    pub(crate) fn reach(&self, checkpoint: &Checkpoint) -> bool {
        let mut shared = self.shared();
        let progress = &mut shared.progress;
        let before = (progress.state, progress.trouble.is_some());
        progress.trouble = None;
        progress.source = checkpoint.source.parse().ok();
        progress.revision = Some(checkpoint.revision);
        match checkpoint.phase {
            Phase::Copying { .. } => {
                progress.state = State::Copying;
                progress.lag = None;
            }
            Phase::Following { .. } => progress.state = State::Following,
        }
        before != (progress.state, false)
    }

    /// Records the beginning of a copy, or its continuation after an interruption.
    pub(crate) fn begin_copy(&self, reason: CopyReason) {
        let mut shared = self.shared();
        let known = shared.progress.copy.as_ref();
        if known.is_some_and(|copy| copy.reason == reason && !copy.complete) {
            return;
        }
        shared.progress.copy = Some(CopyProgress {
            reason,
            complete: false,
            compared: 0,
            written: 0,
            deleted: 0,
        });
        let (warning, why) = match reason {
            CopyReason::Initial => (false, "the mirror is new"),
            CopyReason::Compacted => (
                true,
                "the source has compacted changes that the mirror had not applied. Keys that the source no longer has \
                 are deleted in the destination",
            ),
            CopyReason::SourceReplaced => (
                true,
                "another source was approved. Keys that it does not have are deleted in the destination",
            ),
            CopyReason::OutOfOrder => (true, "the source has sent changes out of order"),
        };
        let note = format!("all keys are copied: {why}");
        shared.notify(Notice {
            warning,
            ..Notice::change(Reason::CopyStarted.as_str(), "Copy", note)
        });
    }

    /// Adds compared, written and deleted keys to the copy.
    pub(crate) fn add_copied(&self, compared: usize, written: usize, deleted: usize) {
        let number = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        if let Some(copy) = &mut self.shared().progress.copy {
            copy.compared += number(compared);
            copy.written += number(written);
            copy.deleted += number(deleted);
        }
    }

    /// Records that all keys are copied.
    pub(crate) fn complete_copy(&self) {
        let mut shared = self.shared();
        let Some(copy) = &mut shared.progress.copy else {
            return;
        };
        if std::mem::replace(&mut copy.complete, true) {
            return;
        }
        let note = format!(
            "all keys are copied: {} compared, {} written, {} deleted in the destination",
            copy.compared, copy.written, copy.deleted
        );
        shared.notify(Notice::change(Reason::CopyComplete.as_str(), "Copy", note));
    }

    /// Records an applied transaction. `begins_split` is true for the first part of a transaction of the source.
    pub(crate) fn count_transaction(&self, begins_split: bool) {
        let mut shared = self.shared();
        shared.progress.transactions += 1;
        if begins_split {
            shared.progress.splits += 1;
            let note = "a transaction of the source exceeds spec.etcd.maxTxnOps or spec.etcd.maxRequestBytes of the \
                        destination, and is applied in several transactions";
            shared.notify(Notice::change(
                Reason::TransactionSplit.as_str(),
                "Apply",
                note,
            ));
        }
    }

    /// Records that a watch begins. The lag is unknown until the next observation, because the destination may have
    /// been restored since the last watch.
    pub(crate) fn begin_watch(&self) {
        let mut shared = self.shared();
        shared.meter = LagMeter::default();
        shared.progress.lag = None;
    }

    /// Records an observation of the source.
    pub(crate) fn observe(&self, newest: i64, at: Timestamp) {
        self.shared().meter.observe(newest, at);
    }

    /// Records the revision that the destination contains. Returns true if the destination has now reached the newest
    /// observed revision of the source, and was behind it or had an unknown lag before.
    pub(crate) fn measure(&self, position: i64) -> bool {
        let mut shared = self.shared();
        let known = shared.progress.lag;
        let was_behind = known.is_none_or(|lag| lag.revisions > 0 || lag.synced.is_none());
        shared.meter.reach(position);
        let lag = shared.meter.lag(position);
        shared.progress.lag = Some(lag);
        shared.progress.revision = Some(position);
        was_behind && lag.revisions == 0 && lag.synced.is_some()
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    fn notify(&mut self, notice: Notice) {
        if self.notices.len() < MAX_NOTICES {
            self.notices.push(notice);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Identity;
    use crate::mapping::Mapping;

    fn checkpoint() -> Checkpoint {
        let identity = Identity {
            uid: "m".to_owned(),
            name: "prod/m".to_owned(),
            mapping: Mapping::new("", ""),
        };
        Checkpoint::new(&identity, (ClusterId(0xab), 7))
    }

    #[test]
    fn each_copy_causes_one_notice_and_number_of_notices_is_limited() {
        let monitor = Monitor::default();
        monitor.begin_copy(CopyReason::Initial);
        monitor.begin_copy(CopyReason::Initial);
        monitor.add_copied(3, 2, 1);
        monitor.complete_copy();
        monitor.complete_copy();
        monitor.begin_copy(CopyReason::Compacted);
        let notices = monitor.take_notices();
        let found: Vec<_> = notices
            .iter()
            .map(|notice| (notice.reason, notice.warning, notice.change))
            .collect();
        let expected = [
            ("CopyStarted", false, true),
            ("CopyComplete", false, true),
            ("CopyStarted", true, true),
        ];
        assert_eq!(found, expected);
        assert!(notices[1].note.contains("3 compared, 2 written, 1 deleted"));
        assert!(monitor.take_notices().is_empty());
        for _ in 0..100 {
            monitor.count_transaction(true);
        }
        assert_eq!(monitor.read().splits, 100);
        assert_eq!(monitor.take_notices().len(), MAX_NOTICES);
    }

    #[test]
    fn failure_is_reported_once_and_cleared_by_checkpoint() {
        let monitor = Monitor::default();
        let trouble = |reason| Trouble::new(reason, "m");
        assert!(monitor.fail(trouble(Reason::SourceUnreachable)));
        assert!(!monitor.fail(trouble(Reason::SourceUnreachable)));
        assert!(monitor.fail(trouble(Reason::DestinationUnreachable)));
        assert!(monitor.reach(&checkpoint()));
        assert!(!monitor.reach(&checkpoint()));
        let progress = monitor.read();
        assert_eq!(progress.trouble, None);
        assert_eq!(progress.state, State::Copying);
        assert_eq!(progress.source, Some(ClusterId(0xab)));
        assert!(monitor.reach(&checkpoint().copied(None)));
        monitor.observe(9, Timestamp::UNIX_EPOCH);
        assert!(!monitor.measure(8));
        assert!(monitor.measure(9));
        assert!(!monitor.measure(10));
        monitor.begin_watch();
        assert!(!monitor.measure(9));
        assert_eq!(monitor.read().lag.unwrap().synced, None);
        monitor.observe(9, Timestamp::UNIX_EPOCH);
        assert!(monitor.measure(9));
    }
}
