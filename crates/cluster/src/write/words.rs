//! The failpoint, the Event and the text of each write.

use std::fmt;

use api::cluster::{DefragmentationStatus, RecoveryPhase, RecoveryStatus};
use etcd::{Alarm, AlarmKind};

use super::{RecoveryRecord, Write};
use crate::access::AccessWrite as Access;
use crate::certificates::CertificateWrite as Certificate;
use crate::reason::Reason;
use crate::snapshot::Removal;
use crate::switch::Way;

/// Reason and verb of an Event.
type Event = (Reason, &'static str);

impl Write {
    /// The failpoint before the request, and its Event. `None`: the write follows from another one that is reported, or
    /// does not concern users.
    #[rustfmt::skip] // One line for each write.
    pub(crate) fn point_and_event(&self) -> (&'static str, Option<Event>) {
        match self {
            Self::RecordIntent { cluster_id: Some(_), .. } => ("before-record-intent", Some((Reason::ClusterRecorded, "Record"))),
            Self::RecordIntent { .. } => ("before-record-intent", Some((Reason::BootstrapBegun, "Bootstrap"))),
            Self::RecordClusterId { .. } => ("before-record-cluster-id", Some((Reason::ClusterFormed, "Bootstrap"))),
            Self::RecordRecovery(record) => ("before-record-recovery", of_recovery(record)),
            // A cluster that never had TLS reports nothing.
            Self::RecordTls { record, .. } => ("before-record-tls", record.policy.as_ref().map(|_| (Reason::TLSRecorded, "Record"))),
            Self::RecordDefragmentation { record, .. } => ("before-record-defragmentation", of_defragmentation(record)),
            Self::ApplyHeadless => ("before-apply-headless", Some((Reason::HeadlessServiceApplied, "Apply"))),
            Self::ApplyClient { open: true } => ("before-apply-client", Some((Reason::ClientServiceOpened, "Apply"))),
            Self::ApplyClient { open: false } => ("before-apply-client", Some((Reason::ClientServiceApplied, "Apply"))),
            Self::ApplyBudget { .. } => ("before-apply-budget", Some((Reason::DisruptionBudgetApplied, "Apply"))),
            Self::DeleteBudget => ("before-delete-budget", Some((Reason::DisruptionBudgetDeleted, "Delete"))),
            Self::Access(Access::Record { .. }) => ("before-record-passwords", None),
            Self::Access(Access::Forget) => ("before-forget-passwords", None),
            Self::Access(Access::Enable) => ("before-enable-auth", Some((Reason::AuthEnabled, "Enable"))),
            Self::Access(Access::Disable) => ("before-disable-auth", Some((Reason::AuthDisabled, "Disable"))),
            Self::Access(Access::ChangePassword) => ("before-change-password", Some((Reason::PasswordChanged, "Change"))),
            Self::Access(Access::ApplyNetwork) => ("before-apply-network-policy", Some((Reason::NetworkPolicyApplied, "Apply"))),
            Self::Access(Access::DeleteNetwork) => ("before-delete-network-policy", Some((Reason::NetworkPolicyDeleted, "Delete"))),
            Self::Certificate(Certificate::Authority { .. }) => ("before-make-authority", Some((Reason::AuthorityCreated, "Create"))),
            Self::Certificate(Certificate::Rejoin { .. }) => ("before-rejoin-authority", Some((Reason::AuthorityRejoined, "Rotate"))),
            Self::Certificate(Certificate::Prepare { .. }) => ("before-prepare-authority", Some((Reason::AuthorityPrepared, "Rotate"))),
            Self::Certificate(Certificate::Switch { .. }) => ("before-switch-authority", Some((Reason::AuthoritySwitched, "Rotate"))),
            Self::Certificate(Certificate::Retire { .. }) => ("before-retire-authority", Some((Reason::AuthorityRetired, "Rotate"))),
            Self::Certificate(Certificate::Issue { over: Some(_), .. }) => ("before-issue-certificate", Some((Reason::CertificateRenewed, "Renew"))),
            Self::Certificate(Certificate::Issue { .. }) => ("before-issue-certificate", Some((Reason::CertificateIssued, "Create"))),
            Self::Certificate(Certificate::Trust { .. }) => ("before-write-trust-bundle", None),
            Self::Certificate(Certificate::Mark { .. }) => ("before-mark-secret", None),
            Self::Certificate(Certificate::Tell { .. }) => ("before-tell-certificates", None),
            Self::Certificate(Certificate::Discard { .. }) => ("before-discard-certificate", None),
            Self::CreateService { .. } => ("before-create-service", Some((Reason::MemberServiceCreated, "Create"))),
            Self::RepairService { .. } => ("before-repair-service", Some((Reason::ServiceRepaired, "Repair"))),
            Self::OpenService { .. } => ("before-open-service", None),
            Self::MarkService { .. } | Self::RenewMark { .. } => ("before-mark-service", None),
            Self::DeleteService { .. } => ("before-delete-service", Some((Reason::MemberServiceDeleted, "Delete"))),
            Self::CreateDisk(_) => ("before-create-disk", Some((Reason::VolumeClaimCreated, "Create"))),
            Self::GrowDisk { .. } => ("before-grow-disk", Some((Reason::VolumeClaimGrown, "Patch"))),
            Self::NoteRemoval { removal, .. } => ("before-note-removal", of_removal(*removal)),
            Self::NoteVersion { .. } => ("before-note-version", None),
            Self::LabelDisk(_) => ("before-label-disk", None),
            Self::DeleteDisk { .. } => ("before-delete-disk", Some((Reason::VolumeClaimDeleted, "Delete"))),
            Self::CreatePod(_) => ("before-create-pod", Some((Reason::MemberStarted, "Start"))),
            Self::PatchImage { .. } => ("before-patch-image", Some((Reason::MemberVersionChanged, "Upgrade"))),
            Self::SettleImage { .. } => ("before-settle-image", None),
            Self::PatchMetadata { .. } => ("before-patch-metadata", Some((Reason::PodPatched, "Patch"))),
            Self::ResizePod { .. } => ("before-resize-pod", Some((Reason::PodResized, "Resize"))),
            Self::LabelPod(_) => ("before-label-pod", None),
            Self::DeletePod { .. } => ("before-delete-pod", Some((Reason::PodDeleted, "Delete"))),
            Self::AddMember { .. } => ("before-add-member", Some((Reason::MemberAdded, "Add"))),
            Self::UpdatePeerUrls { .. } => ("before-update-peer-urls", Some((Reason::PeerUrlChanged, "Update"))),
            Self::Promote { .. } => ("before-promote-member", Some((Reason::MemberPromoted, "Promote"))),
            Self::Remove { .. } => ("before-remove-member", Some((Reason::MemberRemoved, "Remove"))),
            Self::MoveLeader { .. } => ("before-move-leader", Some((Reason::LeaderMoved, "Move"))),
            Self::Downgrade { to: Some(_) } => ("before-downgrade", Some((Reason::DowngradeAllowed, "Downgrade"))),
            Self::Downgrade { to: None } => ("before-downgrade", Some((Reason::DowngradeTakenBack, "Downgrade"))),
            // It may take minutes: the records before and after it are reported.
            Self::Defragment { .. } => ("before-defragment", None),
            Self::Compact { .. } => ("before-compact", Some((Reason::Compacted, "Compact"))),
            Self::Disarm { .. } => ("before-disarm", Some((Reason::AlarmDisarmed, "Disarm"))),
        }
    }
}

fn of_recovery(record: &RecoveryRecord) -> Option<Event> {
    match record.recovery.as_ref()?.phase {
        RecoveryPhase::InProgress => Some((Reason::RecoveryBegun, "Recover")),
        RecoveryPhase::Complete => Some((Reason::RecoveryComplete, "Recover")),
        RecoveryPhase::Cancelled => Some((Reason::RecoveryCancelled, "Recover")),
        RecoveryPhase::Unknown(_) => None,
    }
}

fn of_removal(removal: Option<Removal>) -> Option<Event> {
    let by_others = matches!(removal, Some(Removal::ByOthers { .. }));
    by_others.then_some((Reason::VolumeKept, "Keep"))
}

/// The begin of a defragmentation, and the end of each member's, with its failure.
fn of_defragmentation(record: &DefragmentationStatus) -> Option<Event> {
    let Some(last) = record.members.last() else {
        return record
            .completion_time
            .is_none()
            .then_some((Reason::DefragmentationBegun, "Defragment"));
    };
    if record.completion_time.is_some() || last.completion_time.is_none() {
        return None;
    }
    Some(match last.error {
        None => (Reason::MemberDefragmented, "Defragment"),
        Some(_) => (Reason::DefragmentationFailed, "Defragment"),
    })
}

impl fmt::Display for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RecordIntent {
                cluster_id: Some(cluster_id),
                ..
            } => write!(f, "record cluster {cluster_id}, which is there"),
            Self::RecordIntent { intent, .. } => {
                let names: Vec<&str> = intent.members.iter().map(String::as_str).collect();
                write!(f, "record the first members {}", names.join(", "))
            }
            Self::RecordClusterId { cluster_id, .. } => write!(f, "record cluster ID {cluster_id}"),
            Self::RecordRecovery(record) => recorded(record, f),
            Self::RecordTls { record, .. } => {
                let words = Way::of(record.policy().as_ref()).words();
                write!(f, "record that members {words}")
            }
            Self::ApplyHeadless => f.write_str("apply the headless Service"),
            Self::ApplyClient { open: true } => {
                f.write_str("let clients in through the client Service")
            }
            Self::ApplyClient { open: false } => f.write_str("apply the client Service, closed"),
            Self::ApplyBudget { quorum } => {
                write!(f, "apply the disruption budget for a quorum of {quorum}")
            }
            Self::Access(write) => write!(f, "{write}"),
            Self::DeleteBudget => f.write_str("delete the disruption budget"),
            Self::CreateService { member, .. } => write!(f, "create the Service of {member}"),
            Self::OpenService { member, .. } => write!(f, "open the Service of {member}"),
            Self::RepairService { member, .. } => write!(f, "repair the Service of {member}"),
            Self::MarkService { member, .. } => write!(f, "mark the Service of {member}"),
            Self::RenewMark { member, .. } => write!(f, "mark the Service of {member} again"),
            Self::DeleteService { member, .. } => write!(f, "delete the Service of {member}"),
            Self::CreateDisk(start) => write!(f, "create the volume claim of {}", start.member),
            Self::GrowDisk { member, size, .. } => {
                write!(f, "ask for {size} for the volume of {member}")
            }
            Self::NoteRemoval {
                member, removal, ..
            } => removal_of(member, *removal, f),
            Self::DeleteDisk { member, .. } => write!(f, "delete the volume claim of {member}"),
            Self::CreatePod(start) => write!(f, "create the pod of {}", start.member),
            Self::DeletePod { member, .. } => write!(f, "delete the pod of {member}"),
            Self::PatchImage {
                member,
                version,
                changed,
                ..
            } => write!(f, "change {member} from etcd {} to {version}", changed.from),
            Self::SettleImage { member, .. } => write!(f, "note that {member} is back"),
            Self::NoteVersion {
                member, version, ..
            } => write!(f, "note etcd {version} on the volume claim of {member}"),
            Self::Downgrade { to: Some(to) } => write!(f, "let etcd go back to {to}"),
            Self::Downgrade { to: None } => f.write_str("take the downgrade back"),
            Self::Certificate(write) => write.fmt(f),
            Self::PatchMetadata { member, .. } => {
                write!(f, "change labels and annotations of the pod of {member}")
            }
            Self::ResizePod { member, .. } => {
                write!(f, "change CPU and memory of the pod of {member}")
            }
            Self::LabelPod(label) => write!(f, "label the pod of {}", label.member),
            Self::LabelDisk(label) => write!(f, "label the volume claim of {}", label.member),
            Self::AddMember {
                member,
                learner: true,
            } => write!(f, "add {member} as a learner"),
            Self::AddMember {
                member,
                learner: false,
            } => write!(f, "add {member} as a voter"),
            Self::UpdatePeerUrls { member, urls, .. } => {
                write!(f, "have {member} dialled at {}", urls.join(", "))
            }
            Self::Promote { member, .. } => write!(f, "make {member} a voter"),
            Self::Remove { member, .. } => write!(f, "remove {member} from the cluster"),
            Self::RecordDefragmentation { record, .. } => record_of(record, f),
            Self::Defragment { member, .. } => write!(f, "defragment {member}"),
            Self::Compact { revision, .. } => {
                write!(f, "compact what is before revision {revision}")
            }
            Self::Disarm { alarm, .. } => write!(f, "take back {}", alarm_of(*alarm)),
            Self::MoveLeader { from, to, .. } => write!(f, "hand leadership from {from} to {to}"),
        }
    }
}

fn alarm_of(alarm: Alarm) -> String {
    let kind = match alarm.kind {
        AlarmKind::NoSpace => "NOSPACE",
        AlarmKind::Corrupt => "CORRUPT",
    };
    format!("the alarm {kind} of {}", alarm.member)
}

fn removal_of(member: &str, removal: Option<Removal>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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

fn record_of(record: &DefragmentationStatus, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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

fn recorded(record: &RecoveryRecord, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
