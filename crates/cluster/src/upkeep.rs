//! The planner's view of the members' databases and logs: the alarms, the records in the status, and the call in
//! progress.
//!
//! A defragmentation may take minutes, so its call runs outside the reconciles. Only the process that sent the call
//! receives the result. A new operator process sends the call again.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::cluster::{Defragmentation, DefragmentationStatus, RaftLogStatus};
use etcd::Alarm;
use futures::FutureExt;
use futures::future::BoxFuture;
use jiff::Timestamp;
use runtime::logs::in_background;
use sha2::{Digest, Sha256};
use tokio::task::JoinHandle;

use crate::seen::Seen;

/// The operator drops a call whose result no reconcile has read for this long, because its cluster was deleted.
const FORGOTTEN: Duration = Duration::from_mins(10);

/// The observed state of the members' databases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Upkeep {
    /// The active alarms. They are read only if a member reports an alarm.
    pub alarms: Seen<Vec<Alarm>>,
    /// `status.defragmentation`. `None` if no defragmentation was recorded.
    pub record: Option<DefragmentationStatus>,
    /// `status.raftLog`. `None` if no log was recorded.
    pub raft_log: Option<RaftLogStatus>,
    /// The result of the call to the recorded member; `None` if this process has sent no such call.
    pub call: Option<Call>,
    /// True if a linearizable read was slow: the operator then starts no work that loads the members.
    pub slow: bool,
}

impl Upkeep {
    /// The recorded defragmentation run if it is not complete.
    pub fn open_run(&self) -> Option<&DefragmentationStatus> {
        let record = self.record.as_ref()?;
        record.completion_time.is_none().then_some(record)
    }

    /// The member whose defragmentation is recorded as started and not as ended.
    pub fn defragmenting(&self) -> Option<&str> {
        let last = self.open_run()?.members.last()?;
        last.completion_time.is_none().then_some(&last.name)
    }
}

/// The record of the Raft log with its checksum. Invariant 29: the checksum reveals that a person has edited the index.
/// With a lower index, etcd 3.7 could start on a log that it cannot read.
pub fn raft_log_record(cluster_id: String, index: i64) -> RaftLogStatus {
    let digest = Sha256::digest(format!("{cluster_id}\n{index}"));
    let checksum = Some(hex::encode(&digest[..8]));
    RaftLogStatus {
        cluster_id,
        index,
        checksum,
    }
}

/// The state of the call that defragments a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// The member has not answered yet.
    Running,
    /// The defragmentation succeeded.
    Done,
    /// The defragmentation failed for this reason.
    Failed(String),
}

/// The settings in `spec.upkeep`, and the fields of `spec.etcd` that they depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct UpkeepRule {
    /// The quota of each member's database, in bytes.
    pub quota: i64,
    /// True if the operator only reports a full database and leaves the remedy to a person.
    pub only_reports: bool,
    /// Number of revisions to keep when a full database is compacted; `None` disables compaction.
    pub keep_revisions: Option<i64>,
    /// When databases that are not full are defragmented.
    pub defragmentation: Option<Defragmentation>,
}

/// The defragmentation calls of this process, by the cluster's UID: at most one per cluster.
#[derive(Debug, Default)]
pub struct Calls(Mutex<HashMap<String, Under>>);

#[derive(Debug)]
struct Under {
    /// The member, and the time at which its defragmentation was recorded.
    what: (String, Timestamp),
    handle: Option<JoinHandle<Result<(), etcd::Error>>>,
    answer: Option<Call>,
    asked: Instant,
}

impl Calls {
    fn calls(&self) -> MutexGuard<'_, HashMap<String, Under>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a call, unless this process has already sent a call for the same member and record.
    pub fn begin(
        &self,
        cluster: &str,
        what: (String, Timestamp),
        call: BoxFuture<'static, Result<(), etcd::Error>>,
    ) {
        let mut calls = self.calls();
        if calls.get(cluster).is_some_and(|under| under.what == what) {
            return;
        }
        let under = Under {
            what,
            handle: Some(tokio::spawn(in_background(call))),
            answer: None,
            asked: Instant::now(),
        };
        calls.insert(cluster.to_owned(), under);
    }

    /// The result of the call for the member in the record; `None` if this process has sent no such call.
    pub fn of(&self, cluster: &str, record: Option<&DefragmentationStatus>) -> Option<Call> {
        let last = record?.members.last()?;
        let mut calls = self.calls();
        let under = calls.get_mut(cluster)?;
        under.asked = Instant::now();
        // The call is for another record. `record` may be stale, so the call is kept.
        if under.what.0 != last.name || under.what.1 != last.start_time.0 {
            return None;
        }
        if last.completion_time.is_some() {
            calls.remove(cluster);
            return None;
        }
        if under.handle.as_ref().is_some_and(JoinHandle::is_finished) {
            let ended = under.handle.take().and_then(FutureExt::now_or_never);
            under.answer = Some(match ended {
                Some(Ok(Ok(()))) => Call::Done,
                Some(Ok(Err(error))) => Call::Failed(error.to_string()),
                Some(Err(_)) | None => Call::Failed("the call was aborted".to_owned()),
            });
        }
        Some(under.answer.clone().unwrap_or(Call::Running))
    }

    /// Drops the defragmentation calls of deleted clusters.
    pub fn forget(&self, now: Instant) {
        self.calls()
            .retain(|_, under| now.duration_since(under.asked) < FORGOTTEN);
    }
}

#[cfg(test)]
mod tests {
    use api::cluster::{DefragmentationCause, MemberDefragmentation};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    fn record(at: i64, done: bool) -> DefragmentationStatus {
        let time = Time(Timestamp::from_second(at).unwrap());
        DefragmentationStatus {
            cause: DefragmentationCause::Schedule,
            start_time: time.clone(),
            completion_time: None,
            compacted_revision: None,
            members: vec![MemberDefragmentation {
                name: "db-a".into(),
                start_time: time.clone(),
                completion_time: done.then_some(time),
                size_before: 1,
                size_after: None,
                error: None,
            }],
        }
    }

    async fn settled(calls: &Calls, record: &DefragmentationStatus) -> Call {
        loop {
            match calls.of("uid", Some(record)).unwrap() {
                Call::Running => tokio::time::sleep(Duration::from_millis(5)).await,
                call => return call,
            }
        }
    }

    #[tokio::test]
    async fn defragmentation_call_is_sent_once_per_record() {
        let (calls, open) = (Calls::default(), record(1, false));
        let what = || ("db-a".to_owned(), Timestamp::from_second(1).unwrap());
        assert_eq!(calls.of("uid", Some(&open)), None);
        calls.begin("uid", what(), async { Ok(()) }.boxed());
        calls.begin("uid", what(), std::future::pending().boxed());
        assert_eq!(settled(&calls, &open).await, Call::Done);
        assert_eq!(settled(&calls, &open).await, Call::Done);
        assert_eq!(calls.of("other", Some(&open)), None);
        assert_eq!(
            calls.of("uid", Some(&record(2, false))),
            None,
            "a call for an earlier record must not count"
        );
        assert_eq!(calls.of("uid", Some(&record(1, true))), None);
        assert!(calls.calls().is_empty());
    }

    /// Invariant 19: a stale record must not make the operator send the call again.
    #[tokio::test]
    async fn newer_defragmentation_call_is_kept_despite_stale_record() {
        let calls = Calls::default();
        let what = ("db-a".to_owned(), Timestamp::from_second(2).unwrap());
        calls.begin("uid", what, std::future::pending().boxed());
        assert_eq!(calls.of("uid", Some(&record(1, true))), None);
        assert_eq!(
            calls.of("uid", Some(&record(2, false))),
            Some(Call::Running)
        );
    }

    #[tokio::test]
    async fn deleted_cluster_leaves_no_defragmentation_call() {
        let calls = Calls::default();
        let what = ("db-a".to_owned(), Timestamp::from_second(1).unwrap());
        calls.begin("uid", what, std::future::pending().boxed());
        let now = Instant::now();
        calls.forget(now);
        assert_eq!(calls.calls().len(), 1);
        calls.forget(now + FORGOTTEN);
        assert!(calls.calls().is_empty());
    }

    #[tokio::test]
    async fn failed_defragmentation_call_reports_reason() {
        let (calls, open) = (Calls::default(), record(1, false));
        let what = ("db-a".to_owned(), Timestamp::from_second(1).unwrap());
        let call = async { Err(etcd::Error::Timeout("db-a".into())) };
        calls.begin("uid", what, call.boxed());
        assert!(matches!(settled(&calls, &open).await, Call::Failed(_)));
    }
}
