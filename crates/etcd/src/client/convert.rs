//! Converts responses of etcd into the types of the module `port`, and limits their size. Performs no I/O.

use etcd_client::{AlarmType, ResponseHeader, StatusResponse};

use crate::limits::{MAX_MEMBERS, MemberText, check_members, shortened};
use crate::port::{Alarm, AlarmKind, ClusterId, Member, MemberId, Members, Status};

/// Maximum number of alarms. A member can raise each of the two kinds of alarm once.
const MAX_ALARMS: usize = 2 * MAX_MEMBERS;

fn cluster_id(header: Option<&ResponseHeader>) -> ClusterId {
    ClusterId(header.map_or(0, ResponseHeader::cluster_id))
}

pub(super) fn members_from(
    header: Option<&ResponseHeader>,
    list: &[etcd_client::Member],
) -> Result<Members, etcd_client::Error> {
    let texts = list.iter().map(|member| MemberText {
        name: member.name(),
        peer_urls: member.peer_urls(),
        client_urls: member.client_urls(),
    });
    check_members(list.len(), texts).map_err(etcd_client::Error::EndpointError)?;
    let mut members: Vec<Member> = list
        .iter()
        .map(|member| Member {
            id: MemberId(member.id()),
            name: member.name().to_owned(),
            peer_urls: member.peer_urls().to_vec(),
            client_urls: member.client_urls().to_vec(),
            is_learner: member.is_learner(),
        })
        .collect();
    members.sort_by_key(|member| member.id);
    Ok(Members {
        cluster_id: cluster_id(header),
        members,
    })
}

pub(super) fn status_from(status: &StatusResponse) -> Status {
    let header = status.header();
    let errors = status.errors().iter().take(MAX_MEMBERS);
    Status {
        cluster_id: cluster_id(header),
        member_id: MemberId(header.map_or(0, ResponseHeader::member_id)),
        version: shortened(status.version()),
        leader: Some(status.leader()).filter(|id| *id != 0).map(MemberId),
        is_learner: status.is_learner(),
        revision: header.map_or(0, ResponseHeader::revision),
        raft_term: status.raft_term(),
        raft_index: status.raft_index(),
        raft_applied_index: status.raft_applied_index(),
        db_size: status.db_size(),
        db_size_in_use: status.raft_used_db_size(),
        errors: errors.map(|error| shortened(error)).collect(),
        storage_version: Some(shortened(status.storage_version()))
            .filter(|version| !version.is_empty()),
        downgrade: status
            .downgrade_info()
            .filter(|info| info.enabled())
            .map(|info| shortened(info.target_version())),
    }
}

pub(super) fn alarms_from(alarms: &[etcd_client::AlarmMember]) -> Vec<Alarm> {
    alarms
        .iter()
        .take(MAX_ALARMS)
        .filter_map(|alarm| {
            let kind = match alarm.alarm() {
                AlarmType::Nospace => AlarmKind::NoSpace,
                AlarmType::Corrupt => AlarmKind::Corrupt,
                AlarmType::None => return None,
            };
            Some(Alarm {
                member: MemberId(alarm.member_id()),
                kind,
            })
        })
        .collect()
}
