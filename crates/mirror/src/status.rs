//! Computes the status of an EtcdMirror. Performs no I/O.

use api::EtcdMirror;
use api::mirror::{EtcdMirrorStatus, MirrorCopy, MirrorLag};
use api::readiness::{Readiness, set_readiness};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::checkpoint::CopyReason;
use crate::lag::Lag;
use crate::progress::{Progress, State};
use crate::reason::{Reason, Trouble};

/// Minimum time between two writes of the status that change only numbers, times and messages.
pub(crate) const WRITE_INTERVAL: SignedDuration = SignedDuration::from_secs(10);

/// Maximum age of `syncedTime` of a mirror that is up to date. The mirror reads the revision of the source every five
/// seconds.
const MAX_AGE: SignedDuration = SignedDuration::from_secs(30);

/// The result of a reconcile for the status.
#[derive(Clone, Debug)]
pub(crate) enum Verdict {
    /// The mirror has a task.
    Running(Box<Progress>),
    /// The mirror has no task, or its connections cannot be read. Contains the progress of the task if a task runs.
    Troubled(Trouble, Option<Box<Progress>>),
}

/// The complete status.
pub(crate) fn compute(
    mirror: &EtcdMirror,
    verdict: &Verdict,
    max_mirrors: usize,
    now: Timestamp,
) -> EtcdMirrorStatus {
    let mut status = mirror.status.clone().unwrap_or_default();
    // The time is rounded down, because Kubernetes stores the times in the status in whole seconds.
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let generation = mirror.metadata.generation;
    status.observed_generation = generation;
    status.source = mirror.spec.source_text();
    status.check_time = Some(Time(now));
    let progress = match verdict {
        Verdict::Running(progress) => Some(progress),
        Verdict::Troubled(_, progress) => progress.as_ref(),
    };
    if let Some(progress) = progress {
        record(&mut status, progress, now);
    }
    let (readiness, trouble) = match verdict {
        Verdict::Troubled(trouble, _) => (of_trouble(trouble.reason), trouble.clone()),
        Verdict::Running(progress) => of_progress(progress, max_mirrors, now),
    };
    let text = (trouble.reason.into(), trouble.message.as_str());
    set_readiness(
        &mut status.conditions,
        readiness,
        text,
        generation,
        &Time(now),
    );
    status
}

fn record(status: &mut EtcdMirrorStatus, progress: &Progress, now: Timestamp) {
    let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    if let Some(source) = progress.source {
        status.source_cluster_id = Some(source.to_string());
    }
    if progress.revision.is_some() {
        status.source_revision = progress.revision;
    }
    if let Some(copy) = &progress.copy {
        status.copy = Some(MirrorCopy {
            reason: copy.reason.as_str().to_owned(),
            complete: copy.complete,
            compared_keys: Some(number(copy.compared)),
            written_keys: Some(number(copy.written)),
            deleted_keys: Some(number(copy.deleted)),
        });
    }
    status.split_transactions = Some(number(progress.splits)).filter(|count| *count > 0);
    status.lag = None;
    if let Some(Lag { revisions, synced }) = progress.lag {
        let synced = synced.and_then(|time| Timestamp::from_second(time.as_second()).ok());
        status.synced_time = synced.map(Time).or(status.synced_time.take());
        let since = status.synced_time.as_ref().map(|time| time.0);
        status.lag = since.map(|since| MirrorLag::new(revisions, age(since, now).as_secs()));
    }
}

fn age(since: Timestamp, now: Timestamp) -> SignedDuration {
    now.duration_since(since).max(SignedDuration::ZERO)
}

fn of_trouble(reason: Reason) -> Readiness {
    match reason {
        Reason::AccessDenied
        | Reason::Conflict
        | Reason::DestinationRejects
        | Reason::EndpointNotGranted
        | Reason::InvalidSpec
        | Reason::SecretMissing
        | Reason::SourceReplaced
        | Reason::TooManyMirrors => Readiness::Stalled,
        _ => Readiness::Reconciling,
    }
}

fn of_progress(progress: &Progress, max_mirrors: usize, now: Timestamp) -> (Readiness, Trouble) {
    if let Some(trouble) = &progress.trouble {
        return (of_trouble(trouble.reason), trouble.clone());
    }
    let revision = progress.revision.unwrap_or_default();
    let (reason, message) = match progress.state {
        State::Queued => (
            Reason::TooManyMirrors,
            format!(
                "the operator runs at most {max_mirrors} mirrors, and at most half of them in one namespace if it \
                 manages several namespaces: increase --max-mirrors (mirrors.max of the chart) and the memory of the \
                 operator, or promote another mirror"
            ),
        ),
        State::Starting => (
            Reason::Starting,
            "the mirror connects to both clusters".to_owned(),
        ),
        State::Copying => {
            let copy = progress.copy.as_ref();
            let compared = copy.map_or(0, |copy| copy.compared);
            let is_initial = copy.is_none_or(|copy| copy.reason == CopyReason::Initial);
            let text = format!("{compared} keys of revision {revision} are compared so far");
            if is_initial {
                (Reason::Copying, format!("all keys are copied: {text}"))
            } else {
                (
                    Reason::Resyncing,
                    format!("all keys are copied again: {text}"),
                )
            }
        }
        State::Following => {
            let lag = progress.lag;
            let synced = lag.and_then(|lag| lag.synced);
            if synced.is_some_and(|synced| age(synced, now) <= MAX_AGE) {
                let message =
                    "the destination contains all changes of the source up to the last check";
                let trouble = Trouble::new(Reason::UpToDate, message);
                return (Readiness::Ready, trouble);
            }
            let revisions = lag.map_or(0, |lag| lag.revisions);
            (
                Reason::Syncing,
                format!("the destination is {revisions} revisions behind the source"),
            )
        }
    };
    (of_trouble(reason), Trouble::new(reason, message))
}

/// Whether the status must be written now. A status that differs only in numbers, times and messages is written every
/// ten seconds, because each write triggers a reconcile.
pub(crate) fn is_due(
    current: Option<&EtcdMirrorStatus>,
    desired: &EtcdMirrorStatus,
    now: Timestamp,
) -> bool {
    let Some(current) = current else {
        return true;
    };
    let checked = current.check_time.as_ref().map(|time| time.0);
    let is_old = checked.is_none_or(|time| {
        let age = now.duration_since(time);
        age >= WRITE_INTERVAL || age < SignedDuration::ZERO
    });
    is_old || without_numbers(current) != without_numbers(desired)
}

/// The status without its numbers, times and messages, which change continuously.
fn without_numbers(status: &EtcdMirrorStatus) -> EtcdMirrorStatus {
    let mut status = EtcdMirrorStatus {
        source_revision: None,
        check_time: None,
        synced_time: None,
        lag: None,
        copy: status.copy.as_ref().map(|copy| MirrorCopy {
            reason: copy.reason.clone(),
            complete: copy.complete,
            ..MirrorCopy::default()
        }),
        split_transactions: None,
        ..status.clone()
    };
    for condition in &mut status.conditions {
        condition.message.clear();
    }
    status
}

#[cfg(test)]
mod tests {
    use api::conditions::{ConditionType, find};
    use etcd::ClusterId;
    use serde_json::json;

    use super::*;
    use crate::progress::CopyProgress;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn mirror() -> EtcdMirror {
        let spec = json!({
            "source": { "etcdEndpoints": ["https://etcd.example.com:2379"] },
            "destination": { "etcdCluster": { "name": "new" } },
        });
        let mut mirror = EtcdMirror::new("copy", serde_json::from_value(spec).unwrap());
        mirror.metadata.generation = Some(3);
        mirror
    }

    fn following(revisions: i64, synced: Option<i64>) -> Progress {
        Progress {
            state: State::Following,
            source: Some(ClusterId(0xab)),
            revision: Some(70),
            lag: Some(Lag {
                revisions,
                synced: synced.map(at),
            }),
            ..Progress::default()
        }
    }

    fn computed(mirror: &EtcdMirror, progress: Progress, now: i64) -> EtcdMirrorStatus {
        compute(mirror, &Verdict::Running(Box::new(progress)), 4, at(now))
    }

    fn ready(status: &EtcdMirrorStatus) -> (&str, &str) {
        let ready = find(&status.conditions, &ConditionType::Ready).unwrap();
        (&ready.status, &ready.reason)
    }

    #[test]
    fn mirror_is_ready_only_if_destination_was_synced_recently() {
        for (progress, expected) in [
            (following(0, Some(100)), ("True", "UpToDate")),
            (following(9, Some(80)), ("True", "UpToDate")),
            (following(9, Some(60)), ("False", "Syncing")),
            (following(9, None), ("False", "Syncing")),
            (Progress::default(), ("False", "TooManyMirrors")),
        ] {
            let status = computed(&mirror(), progress.clone(), 100);
            assert_eq!(ready(&status), expected, "{progress:?}");
        }
        let status = computed(&mirror(), following(12, Some(97)), 100);
        assert_eq!(status.source_revision, Some(70));
        assert_eq!(status.source_cluster_id.as_deref(), Some("ab"));
        assert_eq!(status.source.as_deref(), Some("etcd.example.com"));
        assert_eq!(status.synced_time, Some(Time(at(97))));
        let lag = status.lag.unwrap();
        assert_eq!((lag.revisions, lag.seconds), (12, 3));
        assert_eq!(lag.text.as_deref(), Some("12 revisions, 3s"));
    }

    #[test]
    fn status_keeps_last_known_progress_during_trouble() {
        let mut mirror = mirror();
        mirror.status = Some(computed(&mirror, following(0, Some(100)), 100));
        let trouble = Trouble::new(Reason::SourceUnreachable, "no answer");
        let failed = Progress {
            trouble: Some(trouble.clone()),
            lag: None,
            ..following(0, None)
        };
        let status = computed(&mirror, failed, 200);
        assert_eq!(ready(&status), ("False", "SourceUnreachable"));
        assert_eq!(status.source_revision, Some(70));
        assert_eq!(status.synced_time, Some(Time(at(100))));
        let refused = Trouble::new(Reason::Conflict, "not empty");
        let verdict = Verdict::Troubled(refused, None);
        let status = compute(&mirror, &verdict, 4, at(200));
        assert!(find(&status.conditions, &ConditionType::Stalled).is_some());
    }

    #[test]
    fn running_copy_is_reported_with_its_reason() {
        for (reason, expected) in [
            (CopyReason::Initial, "Copying"),
            (CopyReason::Compacted, "Resyncing"),
        ] {
            let copying = Progress {
                state: State::Copying,
                revision: Some(70),
                copy: Some(CopyProgress {
                    reason,
                    complete: false,
                    compared: 5,
                    written: 4,
                    deleted: 1,
                }),
                ..Progress::default()
            };
            let status = computed(&mirror(), copying, 100);
            assert_eq!(ready(&status), ("False", expected));
            let copy = status.copy.unwrap();
            assert_eq!(copy.reason, reason.as_str());
            assert_eq!((copy.compared_keys, copy.deleted_keys), (Some(5), Some(1)));
        }
    }

    #[test]
    fn status_with_only_changed_numbers_is_written_every_ten_seconds() {
        let mut mirror = mirror();
        let first = computed(&mirror, following(0, Some(100)), 100);
        assert!(is_due(None, &first, at(100)));
        mirror.status = Some(first.clone());
        let more = computed(&mirror, following(5, Some(104)), 104);
        assert!(!is_due(Some(&first), &more, at(104)));
        assert!(is_due(Some(&first), &more, at(110)));
        assert!(is_due(Some(&first), &more, at(90)));
        let other = computed(&mirror, Progress::default(), 101);
        assert!(is_due(Some(&first), &other, at(101)));
    }
}
