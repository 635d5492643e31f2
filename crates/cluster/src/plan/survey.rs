//! Combines etcd's member list, the Kubernetes objects and the answers of the members.

use etcd::{Member, Members};
use jiff::Timestamp;

use api::names::member_of_url;

use crate::plan::view::{
    Data, Fate, Health, MemberState, View, data, is_elsewhere, is_known, name_of,
};
use crate::plan::{fate, joining};
use crate::snapshot::{Desired, Observed, Pod, Seen};
use crate::upkeep::Call;

impl<'a> View<'a> {
    /// Combines the member list with the Kubernetes objects.
    pub fn new(
        list: &'a Members,
        (desired, observed, now): (&Desired, &'a Observed, Timestamp),
    ) -> Self {
        let mut members: Vec<MemberState> = list
            .members
            .iter()
            .map(|member| state_of(member, observed, now))
            .collect();
        let names = members.iter().map(|member| member.name.clone()).collect();
        for member in &mut members {
            // A member that can never join needs no data, so data in its `emptyDir` counts as lost.
            if member.cannot_join(&names) && member.pod.is_some_and(|pod| !pod.durable) {
                member.data = Data::Gone;
            }
        }
        let leader = observed.leader();
        let fates = fate::decide(&members, (desired, observed, now), leader);
        for (member, decision) in members.iter_mut().zip(fates) {
            (member.fate, member.gone_at) = (decision.fate, decision.lost_at);
            member.followed = decision.followed;
        }
        // Invariant 19: a member is not healthy until its defragmentation is complete. From etcd 3.6 on, the member
        // does not even return its status, because etcd reads the storage version under a lock that the defragmentation
        // holds (`StorageVersion` in `server/etcdserver/server.go`).
        if let Some(name) = observed.upkeep.defragmenting() {
            let asked = observed.upkeep.call == Some(Call::Running);
            for member in members.iter_mut().filter(|member| member.name == name) {
                if member.serves() || (asked && member.pod.is_some_and(Pod::stays)) {
                    member.health = Health::Busy;
                }
            }
        }
        Self {
            list,
            members,
            leader,
        }
    }
}

/// The name that a member has in Kubernetes: etcd's name of the member, or a name in its peer URLs. `None` if no
/// Kubernetes object has one of these names.
fn known_as(member: &Member, observed: &Observed) -> Option<String> {
    let urls = member.peer_urls.iter();
    let told = urls.filter_map(|url| member_of_url(url));
    let mut all = std::iter::once(member.name.as_str()).chain(told);
    all.find(|name| is_known(observed, name)).map(str::to_owned)
}

fn state_of<'a>(member: &'a Member, observed: &'a Observed, now: Timestamp) -> MemberState<'a> {
    let name = known_as(member, observed).unwrap_or_else(|| name_of(member));
    let pod = observed.pods.get(&name);
    let disk = observed.disks.get(&name);
    let service = observed.services.get(&name);
    let health = health(member, &name, pod, observed);
    let may_have_run = !member.client_urls.is_empty() || observed.is_first_member(&name);
    let data = if is_elsewhere(observed, &name) {
        Data::Elsewhere
    } else {
        data(pod, disk, service, may_have_run)
    };
    MemberState {
        listed: member,
        pod,
        disk,
        service,
        data,
        health,
        fate: Fate::Stays,
        gone_at: None,
        followed: false,
        follows: joining::applied(member, (&name, pod), observed, now),
        name,
    }
}

fn health(member: &Member, name: &str, pod: Option<&Pod>, observed: &Observed) -> Health {
    let unhealthy = |why: &str| Health::Unhealthy(why.to_owned());
    match observed.statuses.get(name) {
        Some(Seen::Known(status)) if status.member_id != member.id => {
            unhealthy("another member answers at the address of this member")
        }
        Some(Seen::Known(status)) if status.leader.is_none() => {
            unhealthy("the member knows no leader")
        }
        Some(Seen::Known(_)) => Health::Healthy,
        Some(Seen::Unknown(why)) => unhealthy(why),
        None => unhealthy(match pod {
            None => "the member has no pod",
            Some(pod) if pod.terminating => "the pod of the member is being deleted",
            Some(pod) => pod
                .trouble
                .as_ref()
                .map_or("the etcd container of the member does not run", |trouble| {
                    trouble.message()
                }),
        }),
    }
}
