//! Records in the status: data that the operator can read neither from etcd nor from another object.
//!
//! Each field manager writes all its fields in one request, because server-side apply removes a field that the request
//! omits. The precondition is the observed resourceVersion (invariants 10 and 11). The status report has a different
//! field manager, so that a report never removes a record.

use api::cluster::{
    BeforeChangeStatus, BootstrapStatus, DefragmentationStatus, RecoveryPhase, RecoveryStatus,
    TlsStatus,
};
use etcd::ClusterId;
use serde_json::{Value, json};

use super::{Builder, Event, action};
use crate::action::{Action, Begins, Request, StatusRecord};
use crate::plan::view::is_known;
use crate::reason::Reason;
use crate::snapshot::{Intent, Observed};
use crate::switch::TlsMode;
use crate::upkeep::raft_log_record;

/// Field manager of the token, the first members, the cluster ID and the recovery.
const MANAGER_IDENTITY: &str = "etcd-operator-identity";
/// Field manager of `status.defragmentation`, the record of the last defragmentation.
const MANAGER_UPKEEP: &str = "etcd-operator-upkeep";
/// Field manager of `status.raftLog`, the record of the Raft log before an upgrade to etcd 3.7.
const MANAGER_RAFT_LOG: &str = "etcd-operator-raft-log";
/// Field manager of `status.beforeChange`, the request for a backup before a change.
const MANAGER_BEFORE_CHANGE: &str = "etcd-operator-before-change";
/// Field manager of `status.TLS`, the TLS settings with which members are started.
const MANAGER_TLS: &str = "etcd-operator-tls";

/// The status fields that identify the cluster, and the fields of its recovery. Each write contains all of them.
struct Identity<'a> {
    intent: Option<&'a Intent>,
    cluster_id: Option<ClusterId>,
    recovery: Option<&'a RecoveryStatus>,
    stale_approval: Option<&'a String>,
}

impl<'a> Identity<'a> {
    fn of(observed: &'a Observed) -> Self {
        Self {
            intent: observed.intent.as_ref(),
            cluster_id: observed.cluster_id,
            recovery: observed.recovery.record.as_ref(),
            stale_approval: observed.recovery.stale_approval.as_ref(),
        }
    }

    fn status(&self) -> Value {
        let bootstrap = self.intent.map(|intent| BootstrapStatus {
            token: intent.token.clone(),
            members: intent.members.iter().cloned().collect(),
        });
        let mut status = json!({ "bootstrap": bootstrap.unwrap_or_default() });
        if let Some(id) = self.cluster_id {
            status["clusterID"] = json!(id.to_string());
        }
        if let Some(recovery) = self.recovery {
            status["recovery"] = json!(recovery);
        }
        if let Some(approval) = self.stale_approval {
            status["staleApproval"] = json!(approval);
        }
        status
    }
}

impl Builder<'_> {
    /// Records a new bootstrap or, with a cluster ID, the existing cluster that has this ID.
    pub(crate) fn record_intent(&self, intent: &Intent, cluster_id: Option<ClusterId>) -> Action {
        let identity = Identity {
            intent: Some(intent),
            cluster_id,
            ..Identity::of(self.observed)
        };
        let (reason, verb, text) = if let Some(id) = cluster_id {
            let text = format!("record the existing cluster {id}");
            (Reason::ClusterRecorded, "Record", text)
        } else {
            let names: Vec<&str> = intent.members.iter().map(String::as_str).collect();
            let text = format!("record the first members {}", names.join(", "));
            (Reason::BootstrapBegun, "Bootstrap", text)
        };
        let mut members = intent.members.iter();
        let is_new = cluster_id.is_none() && !members.any(|name| is_known(self.observed, name));
        self.record(
            "before-record-intent",
            Some((reason, verb)),
            text,
            (MANAGER_IDENTITY, identity.status()),
            is_new.then_some(Begins::Bootstrap),
        )
    }

    /// Records the cluster ID that etcd has reported.
    pub(crate) fn record_cluster_id(&self, id: ClusterId) -> Action {
        let identity = Identity {
            cluster_id: Some(id),
            ..Identity::of(self.observed)
        };
        self.record(
            "before-record-cluster-id",
            Some((Reason::ClusterFormed, "Bootstrap")),
            format!("record cluster ID {id}"),
            (MANAGER_IDENTITY, identity.status()),
            None,
        )
    }

    /// Records the state of a recovery, and an approval that is ignored because it was set before the quorum was lost.
    /// `formed`: the cluster that replaces the recorded cluster.
    pub(crate) fn record_recovery(
        &self,
        recovery: Option<&RecoveryStatus>,
        stale_approval: Option<&String>,
        formed: Option<(&Intent, ClusterId)>,
    ) -> Action {
        let mut identity = Identity::of(self.observed);
        if let Some((intent, id)) = formed {
            (identity.intent, identity.cluster_id) = (Some(intent), Some(id));
        }
        (identity.recovery, identity.stale_approval) = (recovery, stale_approval);
        let known = self.observed.recovery.in_progress();
        let begins = recovery
            .filter(|next| next.phase == RecoveryPhase::InProgress)
            .is_some_and(|next| known.is_none_or(|known| known.member != next.member));
        self.record(
            "before-record-recovery",
            recovery.and_then(recovery_event),
            recovery_text(recovery),
            (MANAGER_IDENTITY, identity.status()),
            begins.then_some(Begins::Recovery),
        )
    }

    /// Records the TLS settings with which members start from now on.
    pub(crate) fn record_tls(&self, record: &TlsStatus) -> Action {
        // A record without a TLS policy causes no Event, because every cluster without TLS gets such a record.
        let event = record
            .policy
            .as_ref()
            .map(|_| (Reason::TLSRecorded, "Record"));
        let words = TlsMode::of(record.policy().as_ref()).words();
        self.record(
            "before-record-tls",
            event,
            format!("record the TLS settings of members: they {words}"),
            (MANAGER_TLS, json!({ "TLS": record })),
            None,
        )
    }

    pub(crate) fn record_defragmentation(&self, record: &DefragmentationStatus) -> Action {
        self.record(
            "before-record-defragmentation",
            defragmentation_event(record),
            defragmentation_text(record),
            (MANAGER_UPKEEP, json!({ "defragmentation": record })),
            None,
        )
    }

    /// Records the index of the newest entry in the Raft log before an upgrade to etcd 3.7. `None` removes the record.
    pub(crate) fn record_raft_log(&self, newest: Option<u64>) -> Action {
        let record = newest.zip(self.observed.cluster_id).map(|(index, id)| {
            let index = i64::try_from(index).unwrap_or(i64::MAX);
            raft_log_record(id.to_string(), index)
        });
        let (event, text) = match &record {
            Some(record) => (
                Some((Reason::LogPrepared, "Upgrade")),
                format!(
                    "make etcd save snapshots of the Raft logs after entry {}",
                    record.index
                ),
            ),
            None => (None, "remove the record status.raftLog".to_owned()),
        };
        let status = record.map_or_else(|| json!({}), |record| json!({ "raftLog": record }));
        self.record(
            "before-record-raft-log",
            event,
            text,
            (MANAGER_RAFT_LOG, status),
            None,
        )
    }

    /// Records that a change waits for a backup, or why it may start. `None` removes the record.
    pub(crate) fn record_before_change(&self, record: Option<&BeforeChangeStatus>) -> Action {
        let (event, text) = before_change_event(record);
        let status = record.map_or_else(|| json!({}), |record| json!({ "beforeChange": record }));
        self.record(
            "before-record-before-change",
            event,
            text,
            (MANAGER_BEFORE_CHANGE, status),
            None,
        )
    }

    fn record(
        &self,
        point: &'static str,
        event: Event,
        text: impl Into<String>,
        (manager, status): (&'static str, Value),
        begins: Option<Begins>,
    ) -> Action {
        let record = StatusRecord {
            manager,
            status,
            over: self.observed.resource_version.clone(),
            begins,
        };
        action(point, event, text, Request::Record(record))
    }
}

fn recovery_event(recovery: &RecoveryStatus) -> Event {
    match recovery.phase {
        RecoveryPhase::InProgress => Some((Reason::RecoveryBegun, "Recover")),
        RecoveryPhase::Complete => Some((Reason::RecoveryComplete, "Recover")),
        RecoveryPhase::Cancelled => Some((Reason::RecoveryCancelled, "Recover")),
        RecoveryPhase::Unknown(_) => None,
    }
}

fn recovery_text(recovery: Option<&RecoveryStatus>) -> String {
    let Some(recovery) = recovery else {
        return "update status.staleApproval: a recover annotation that was set while a quorum answered starts no recovery"
            .to_owned();
    };
    match (&recovery.phase, &recovery.message) {
        (RecoveryPhase::InProgress, _) => format!(
            "recover cluster {} from {}, which is at revision {}",
            recovery.from_cluster_id, recovery.survivor, recovery.revision
        ),
        (phase, Some(message)) => format!("recovery {phase}: {message}"),
        (phase, None) => format!("recovery {phase}"),
    }
}

fn before_change_event(record: Option<&BeforeChangeStatus>) -> (Event, String) {
    let Some(record) = record else {
        return (None, "remove the request for a backup".to_owned());
    };
    let change = &record.change;
    let event = |reason| Some((reason, "Backup"));
    match &record.backup {
        _ if record.completion_time.is_some() => {
            (None, format!("record the end of the change {change}"))
        }
        Some(backup) => {
            let place = backup.location.as_deref().unwrap_or(&backup.name);
            (
                event(Reason::BackupPresent),
                format!("start the change {change} after the backup {place}"),
            )
        }
        None if record.waived => (
            event(Reason::BackupWaived),
            format!("start the change {change} without a backup, because a user has waived it"),
        ),
        None => (
            event(Reason::BackupRequested),
            format!("request a backup before the change {change}"),
        ),
    }
}

/// The Event for this record: the start of a defragmentation run, or the success or failure of one member's
/// defragmentation. `None` for all other records.
fn defragmentation_event(record: &DefragmentationStatus) -> Event {
    let Some(last) = record.members.last() else {
        let begins = record.completion_time.is_none();
        return begins.then_some((Reason::DefragmentationBegun, "Defragment"));
    };
    if record.completion_time.is_some() || last.completion_time.is_none() {
        return None;
    }
    Some(match last.error {
        None => (Reason::MemberDefragmented, "Defragment"),
        Some(_) => (Reason::DefragmentationFailed, "Defragment"),
    })
}

fn defragmentation_text(record: &DefragmentationStatus) -> String {
    let Some(last) = record.members.last() else {
        return format!("start the defragmentation ({})", record.cause);
    };
    if record.completion_time.is_some() {
        return format!("the defragmentation is complete ({})", record.cause);
    }
    match (&last.completion_time, &last.error, last.size_after) {
        (None, ..) => format!("the operator defragments {} next", last.name),
        (_, Some(error), _) => format!("{} was not defragmented: {error}", last.name),
        (_, None, after) => format!(
            "{} was defragmented: {} bytes before, {} after",
            last.name,
            last.size_before,
            after.unwrap_or_default()
        ),
    }
}
