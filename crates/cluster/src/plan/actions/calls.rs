//! Builds the actions that call etcd.

use etcd::{Alarm, AlarmKind, MemberId};
use jiff::Timestamp;

use super::{Builder, Event, action};
use crate::action::{Action, AuthChange, EtcdCall, Request};
use crate::reason::Reason;

impl Builder<'_> {
    /// Adds a member. The peer URL is derived from the member's name.
    pub(crate) fn add_member(&self, member: &str, learner: bool) -> Action {
        let url = self.members().addresses().peer_url(member);
        let kind = if learner { "learner" } else { "voter" };
        call(
            "before-add-member",
            Some((Reason::MemberAdded, "Add")),
            format!("add {member} as a {kind}"),
            EtcdCall::AddMember { url, learner },
        )
    }

    pub(crate) fn auth(&self, change: AuthChange) -> Action {
        let (point, event, text) = match change {
            AuthChange::Enable => (
                "before-enable-auth",
                (Reason::AuthEnabled, "Enable"),
                "enable authentication in etcd",
            ),
            AuthChange::Disable => (
                "before-disable-auth",
                (Reason::AuthDisabled, "Disable"),
                "disable authentication in etcd",
            ),
            AuthChange::ChangePassword => (
                "before-change-password",
                (Reason::PasswordChanged, "Change"),
                "set the password in etcd to the password in the Secret of spec.auth.secret",
            ),
        };
        let via = self.answering_voters();
        call(point, Some(event), text, EtcdCall::Auth { change, via })
    }

    fn answering_voters(&self) -> Vec<String> {
        let voters = self.observed.answers();
        let voters = voters.filter(|(_, status)| !status.is_learner);
        voters.map(|(name, _)| name.clone()).collect()
    }
}

/// Sets the peer URLs of a member. The other members then connect to these URLs.
pub(crate) fn update_peer_urls(member: &str, id: MemberId, urls: Vec<String>) -> Action {
    call(
        "before-update-peer-urls",
        Some((Reason::PeerUrlChanged, "Update")),
        format!("set the peer URLs of {member} to {}", urls.join(", ")),
        EtcdCall::UpdatePeerUrls { id, urls },
    )
}

pub(crate) fn promote(member: &str, id: MemberId) -> Action {
    call(
        "before-promote-member",
        Some((Reason::MemberPromoted, "Promote")),
        format!("promote {member} to voter"),
        EtcdCall::Promote { id },
    )
}

pub(crate) fn remove(member: &str, id: MemberId) -> Action {
    let text = format!("remove {member} from etcd");
    let member = member.to_owned();
    call(
        "before-remove-member",
        Some((Reason::MemberRemoved, "Remove")),
        text,
        EtcdCall::Remove { member, id },
    )
}

/// Moves leadership to the member with this name and ID.
pub(crate) fn move_leader(from: &str, to: &str, id: MemberId) -> Action {
    let text = format!("move leadership from {from} to {to}");
    let from = from.to_owned();
    call(
        "before-move-leader",
        Some((Reason::LeaderMoved, "Move")),
        text,
        EtcdCall::MoveLeader { from, id },
    )
}

/// Enables a downgrade of etcd to this minor release, or cancels it.
pub(crate) fn downgrade(to: Option<String>) -> Action {
    let (reason, text) = match &to {
        Some(to) => (
            Reason::DowngradeAllowed,
            format!("enable the downgrade of etcd to {to}"),
        ),
        None => (
            Reason::DowngradeTakenBack,
            "cancel the downgrade of etcd".to_owned(),
        ),
    };
    call(
        "before-downgrade",
        Some((reason, "Downgrade")),
        text,
        EtcdCall::Downgrade { to },
    )
}

/// Defragments one member. The call has no Event, because it can take minutes: the records in the status before and
/// after the call have Events.
pub(crate) fn defragment(member: &str, recorded: Timestamp) -> Action {
    let text = format!("defragment {member}");
    let member = member.to_owned();
    call(
        "before-defragment",
        None,
        text,
        EtcdCall::Defragment { member, recorded },
    )
}

/// Compacts the history before this revision.
pub(crate) fn compact(revision: i64, via: Vec<String>) -> Action {
    call(
        "before-compact",
        Some((Reason::Compacted, "Compact")),
        format!("compact the history before revision {revision}"),
        EtcdCall::Compact { revision, via },
    )
}

/// Appends entries to the Raft log, so that etcd saves a snapshot of the log. The call is repeated, and has no Event:
/// the record in the status before the first call has an Event.
pub(crate) fn append_entries(member: &str, until: u64) -> Action {
    let text = format!("append entries to the Raft log of {member}");
    let member = member.to_owned();
    call(
        "before-append-entries",
        None,
        text,
        EtcdCall::AppendEntries { member, until },
    )
}

pub(crate) fn disarm(alarm: Alarm, via: Vec<String>) -> Action {
    let kind = match alarm.kind {
        AlarmKind::NoSpace => "NOSPACE",
        AlarmKind::Corrupt => "CORRUPT",
    };
    call(
        "before-disarm",
        Some((Reason::AlarmDisarmed, "Disarm")),
        format!("disarm the alarm {kind} of member {}", alarm.member),
        EtcdCall::Disarm { alarm, via },
    )
}

fn call(point: &'static str, event: Event, text: impl Into<String>, call: EtcdCall) -> Action {
    action(point, event, text, Request::Etcd(call))
}
