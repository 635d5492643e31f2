//! What is recorded, in words.

use std::fmt;

use api::cluster::{DefragmentationStatus, RecoveryPhase, RecoveryStatus};
use etcd::{Alarm, AlarmKind};

use super::RecoveryRecord;
use crate::snapshot::Removal;

pub(super) fn alarm_of(alarm: Alarm) -> String {
    let kind = match alarm.kind {
        AlarmKind::NoSpace => "NOSPACE",
        AlarmKind::Corrupt => "CORRUPT",
    };
    format!("the alarm {kind} of {}", alarm.member)
}

pub(super) fn removal_of(
    member: &str,
    removal: Option<Removal>,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    match removal {
        Some(Removal::ByOperator) => {
            write!(
                f,
                "note on the volume claim of {member} that the member is being removed"
            )
        }
        Some(Removal::ByOthers { .. }) => write!(
            f,
            "keep the volume claim of {member}: someone other than the operator removed the member from etcd"
        ),
        None => write!(
            f,
            "note on the volume claim of {member} that the member stays"
        ),
    }
}

pub(super) fn record_of(record: &DefragmentationStatus, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let Some(last) = record.members.last() else {
        return write!(f, "begin to defragment ({})", record.cause);
    };
    if record.completion_time.is_some() {
        return write!(f, "the defragmentation is over ({})", record.cause);
    }
    match (&last.completion_time, &last.error, last.size_after) {
        (None, ..) => write!(f, "{} is going to be defragmented", last.name),
        (_, Some(error), _) => write!(f, "{} was not defragmented: {error}", last.name),
        (_, None, after) => write!(
            f,
            "{} was defragmented: {} bytes before, {} after",
            last.name,
            last.size_before,
            after.unwrap_or_default()
        ),
    }
}

pub(super) fn recorded(record: &RecoveryRecord, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let Some(recovery) = &record.recovery else {
        return f.write_str("record which approval counts");
    };
    let RecoveryStatus {
        phase,
        survivor,
        revision,
        from_cluster_id,
        message,
        ..
    } = recovery;
    match (phase, message) {
        (RecoveryPhase::InProgress, _) => write!(
            f,
            "recover cluster {from_cluster_id} from {survivor}, which is at revision {revision}"
        ),
        (phase, Some(message)) => write!(f, "recovery {phase}: {message}"),
        (phase, None) => write!(f, "recovery {phase}"),
    }
}
