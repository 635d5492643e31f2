//! Faults of members, pods and volumes.

use super::*;

impl Scene {
    pub(crate) fn without_pod(mut self, member: &str) -> Self {
        self.observed.pods.remove(member);
        self.observed.statuses.remove(member);
        self
    }

    pub(crate) fn terminating(mut self, member: &str) -> Self {
        self.observed.statuses.remove(member);
        self.with_pod(member, |pod| pod.terminating = true)
    }

    pub(crate) fn not_running(mut self, member: &str) -> Self {
        self.observed.statuses.remove(member);
        self.with_pod(member, |pod| {
            (pod.addressed, pod.running, pod.ready) = (false, false, false);
        })
    }

    /// Removes the answers of the member's etcd. Its pod still runs.
    pub(crate) fn down(mut self, member: &str) -> Self {
        self.observed
            .statuses
            .insert(member.into(), Seen::Unknown("connection refused".into()));
        self
    }

    /// Marks the node of the pod as lost for the last `seconds` seconds. etcd in the pod does not answer.
    pub(crate) fn node_lost(self, member: &str, seconds: i64) -> Self {
        self.down(member).with_pod(member, |pod| {
            pod.ready = false;
            pod.unready_since = Some(at(1000 - seconds));
            pod.lost_since = pod.unready_since;
        })
    }

    /// Marks the pod as deleted, with a grace period that ended this number of seconds ago. The pod still exists.
    pub(crate) fn stuck(self, member: &str, seconds: i64) -> Self {
        self.terminating(member).with_pod(member, |pod| {
            pod.lost_since = Some(at(1000 - seconds));
        })
    }

    /// Makes the container of the member crash. Its pod became unready this number of seconds ago.
    pub(crate) fn crashes(self, member: &str, cause: Cause, restarts: i32, seconds: i64) -> Self {
        self.not_running(member).with_pod(member, |pod| {
            pod.unready_since = Some(at(1000 - seconds));
            pod.restarts = restarts;
            pod.trouble = Some(Trouble::Failing("CrashLoopBackOff".into()));
            pod.ending = Some(Ending { at: at(995), cause });
        })
    }

    /// Marks the PVC as being deleted. Kubernetes keeps the PVC as long as its pod exists.
    pub(crate) fn claim_deleted(mut self, member: &str) -> Self {
        self.observed.disks.get_mut(member).unwrap().terminating = true;
        self
    }

    /// Marks the volume of the member as lost. Its PVC still exists.
    pub(crate) fn volume_lost(mut self, member: &str) -> Self {
        self.observed.disks.get_mut(member).unwrap().lost = true;
        self
    }

    pub(crate) fn without_claim(mut self, member: &str) -> Self {
        self.observed.disks.remove(member);
        self
    }

    /// Adds a PVC, even if the member has no other object.
    pub(crate) fn with_disk(mut self, member: &str) -> Self {
        let disk = disk(member, self.observed.cluster_id);
        self.observed.disks.insert(member.into(), disk);
        self
    }

    /// Adds the PVC of a member that the operator removed from etcd.
    pub(crate) fn with_leftover_disk(self, member: &str) -> Self {
        let mut scene = self.with_disk(member);
        let disk = scene.observed.disks.get_mut(member).unwrap();
        disk.removal = Some(Removal::ByOperator);
        scene
    }

    /// Adds the pod of the member.
    pub(crate) fn starts(self, member: &str) -> Self {
        self.pod(member, Role::Voter)
    }

    /// Adds the member to etcd's list as a voter that has never started.
    pub(crate) fn added_with_vote(mut self, member: &str) -> Self {
        self.enlist(member, false, false);
        self
    }

    /// Removes the leader from the answer of the member.
    pub(crate) fn silent_voter(mut self, member: &str) -> Self {
        if let Some(Seen::Known(status)) = self.observed.statuses.get_mut(member) {
            status.leader = None;
        }
        self
    }

    pub(crate) fn young(self, member: &str) -> Self {
        self.with_pod(member, |pod| {
            (pod.running_since, pod.created) = (Some(at(999)), at(999));
        })
    }

    /// Removes all answers of etcd.
    pub(crate) fn silent(mut self) -> Self {
        self.observed.members = Seen::Unknown("connection refused".into());
        self.observed.statuses.clear();
        self
    }
}
