//! Checks of the invariants in docs/architecture.md. The checks use the whole world, including the parts that the
//! operator has not observed.
//!
//! A plan is checked against the world from which it was made. A write is checked against the world in which it
//! arrives, even if it arrives late. After each tick, the logs are checked: no acknowledged write may be lost.

use std::collections::BTreeSet;

use crate::writes::{Change, Write};
use cluster::plan::{Start, State};
use cluster::snapshot::Role;
use etcd::ClusterId;

use crate::etcd_model::{Data, Moved};
use crate::read::list;
use crate::removed::AllVanished;
use crate::world::{Power, World, WorldDisk, WorldPod, tell};
use crate::write::is_for_etcd;

/// The facts that the checks remember between events.
#[allow(clippy::struct_excessive_bools)] // Each flag is a separate fact.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    /// The first violation of an invariant, if any.
    pub(crate) broken: Option<String>,
    /// Members that ever had data.
    ran: BTreeSet<String>,
    /// Names of all members ever added.
    added: BTreeSet<String>,
    /// Tokens with a recorded cluster ID.
    recorded: BTreeSet<String>,
    /// The token of the cluster with the last acknowledged write.
    pub(crate) writes_to: Option<String>,
    /// True if the status was deleted at some time.
    pub(crate) thrown: bool,
    /// True if the status was deleted, and no operator has found the cluster again.
    status_lost: bool,
    /// A member that was promoted and has not been observed healthy since.
    pub(crate) in_flight: Option<u64>,
    /// Members that other software removed from etcd.
    pub(crate) vanished: AllVanished,
    /// True if a second operator is active, or if a write was late. In these cases, objects may exist that no plan
    /// expected. These objects must do no harm.
    pub(crate) second: bool,
    /// The highest UID that existed when the step was planned.
    pub(crate) seen: u64,
    /// True if the world has not changed since the observation for the current step.
    pub(crate) fresh: bool,
}

impl Memory {
    /// Registers a cluster that exists before the operator starts.
    pub(crate) fn know<'a>(&mut self, token: &str, members: impl Iterator<Item = &'a String>) {
        self.recorded.insert(token.to_owned());
        self.ran.extend(members.cloned());
    }

    /// Forgets the cluster. The user who deleted the EtcdCluster has accepted the loss of its data.
    pub(crate) fn forget_all(&mut self) {
        self.recorded.clear();
        (self.writes_to, self.in_flight) = (None, None);
        self.status_lost = false;
    }
}

macro_rules! demand {
    ($world:expr, $holds:expr, $($text:tt)*) => {
        if !$holds {
            let text = format!($($text)*);
            $world.broke(text);
        }
    };
}
pub(crate) use demand;

impl World {
    pub(crate) fn broke(&mut self, text: String) {
        tell!(self, "!! {text}");
        self.memory.broken.get_or_insert(text);
    }

    // ---- checks of writes ----

    /// Checks a write of any sender before the world applies the write, even if it arrives late.
    pub(crate) fn judge_write(&mut self, write: &Write) {
        self.forget_deleted_evidence();
        match write {
            Write::RecordIntent {
                intent,
                cluster_id,
                over,
            } if *over == self.object_version.to_string() => {
                self.judge_bootstrap(&intent.token, cluster_id.is_some());
            }
            Write::DeletePod { member, uid } => {
                let pod = self
                    .pods
                    .get(member)
                    .filter(|pod| pod.uid.to_string() == *uid);
                // The deletion of an ended pod destroys no data.
                let keeps = |pod: &WorldPod| pod.start.durable || pod.ended;
                if let Some((keeps, uid)) = pod.map(|pod| (keeps(pod), pod.uid)) {
                    self.judge_deletion(member, keeps);
                    self.judge_seen(member, uid);
                    self.judge_restart(member);
                }
            }
            Write::DeleteDisk { member, uid } => {
                let disk = self
                    .disks
                    .get(member)
                    .filter(|disk| disk.uid.to_string() == *uid);
                if let Some(uid) = disk.map(|disk| disk.uid) {
                    self.judge_deletion(member, false);
                    self.judge_evidence(member);
                    self.judge_seen(member, uid);
                }
            }
            Write::LabelPod(label) | Write::LabelDisk(label) => {
                let (name, id) = (&label.member, label.cluster_id);
                let others = self
                    .marks(name)
                    .into_iter()
                    .flatten()
                    .find(|mark| Some(*mark) != id);
                demand!(
                    self,
                    others.is_none(),
                    "invariant 7: {name} is adopted although it belongs to cluster {others:?}"
                );
                // The check ignores a member that does not serve clients yet: this member may be drained even if no
                // other member is an endpoint.
                let was = self.pods.get(name).map(|pod| pod.role);
                let served = was == Some(Role::Voter) || self.serves_clients(name);
                let out = matches!(label.role, Some(Role::Busy { .. })) && served;
                let in_service =
                    |(other, pod): (&String, &WorldPod)| other != name && pod.role == Role::Voter;
                let left = self.pods.iter().any(in_service);
                demand!(
                    self,
                    !out || left || !self.memory.fresh || self.memory.second,
                    "invariant 22: {name} is drained, and no other member is an endpoint of the client Service"
                );
                if matches!(write, Write::LabelPod(_)) {
                    self.judge_let_in(label);
                }
            }
            Write::CreatePod(start) if !self.pods.contains_key(&start.member) => {
                self.judge_pod(start);
            }
            Write::AddMember { member, learner } => {
                let old = self.setup.version.starts_with("3.3");
                demand!(
                    self,
                    *learner || old,
                    "invariant 4: {member} joins with a vote"
                );
                let listed = self
                    .recorded()
                    .is_some_and(|cluster| cluster.by_name(member).is_some());
                let used = self.memory.ran.contains(member) && !listed && !self.memory.second;
                demand!(self, !used, "invariant 6: the name {member} is used again");
                let kept = self.memory.second || self.services.contains_key(member);
                demand!(
                    self,
                    kept,
                    "invariant 10: {member} is added without a record in the API server"
                );
            }
            _ => {}
        }
    }

    /// Invariant 7: objects with the ID of another cluster are neither started nor deleted.
    fn judge_foreign(&mut self, member: &str, what: &str) {
        let foreign = self
            .marks(member)
            .into_iter()
            .flatten()
            .find(|id| Some(*id) != self.cluster_id);
        // Pods and PVCs of the former cluster are allowed, because the operator deletes them after a recovery. A late
        // write that creates a pod of the former cluster does no harm, because clients reach only the new cluster.
        let former = |id: &ClusterId| self.former() == Some(id.to_string().as_str());
        let foreign = foreign.filter(|id| self.cluster_id.is_some() && !former(id));
        demand!(
            self,
            foreign.is_none(),
            "invariant 7: {member} is {what} although it belongs to cluster {foreign:?}"
        );
    }

    /// Invariant 11: a request deletes only the observed object, never a later object of the same name.
    fn judge_seen(&mut self, member: &str, uid: u64) {
        let seen = uid <= self.memory.seen;
        demand!(
            self,
            seen,
            "invariant 11: a later object with the name {member} is deleted instead of the observed object"
        );
    }

    /// Invariant 11: a membership change is sent only while the member list equals the list in the plan.
    pub(crate) fn judge_change(&mut self, change: &Change) {
        let now = self
            .recorded()
            .map(|cluster| list(cluster.id, cluster.members()));
        let same = now.as_ref() == Some(&change.planned_from);
        demand!(
            self,
            same,
            "invariant 11: a membership change is sent although the member list has changed"
        );
    }

    /// The cluster IDs on the member's pod and disk.
    fn marks(&self, member: &str) -> [Option<ClusterId>; 2] {
        let pod = self.pods.get(member).and_then(|pod| pod.cluster_id);
        let disk = self.disks.get(member).and_then(|disk| disk.cluster_id);
        [pod, disk]
    }

    /// Checks the deletion of a member's pod or disk. `keeps`: true if the data survives the deletion.
    fn judge_deletion(&mut self, member: &str, keeps: bool) {
        self.judge_foreign(member, "deleted");
        // Invariant 9: the disks of the cluster before a recovery stay until the recovered cluster is complete.
        let id = self
            .disks
            .get(member)
            .and_then(|disk| disk.cluster_id)
            .filter(|_| !keeps);
        let former = id.is_some_and(|id| self.former() == Some(id.to_string().as_str()));
        let whole = self.recorded().is_some_and(|all| {
            all.voters().count() >= self.size && all.voters().all(|(id, _)| all.is_up(*id))
        });
        demand!(
            self,
            !former || whole || !self.memory.fresh,
            "invariant 9: the disk of {member} is deleted before the new cluster is complete"
        );
        // Invariants 5 and 8: the operator may delete the disk of a member only after etcd has removed the member.
        let listed = self
            .recorded()
            .filter(|_| self.cluster_id.is_some())
            .and_then(|all| all.by_name(member));
        demand!(
            self,
            listed.is_none() || keeps,
            "invariant 5: the disk of {member} is deleted, and {member} is still a member"
        );
    }

    /// Invariants 6 and 10: checks which member gets a pod, and how its etcd starts.
    fn judge_pod(&mut self, start: &Start) {
        let name = &start.member;
        self.judge_foreign(name, "started");
        self.judge_start_on_evidence(start);
        let intended = self
            .intent
            .as_ref()
            .is_some_and(|intent| intent.members.contains(name));
        let listed = self
            .clusters
            .values()
            .any(|cluster| cluster.by_name(name).is_some());
        let seeds = self
            .recovery
            .record
            .as_ref()
            .is_some_and(|record| record.member == *name);
        let known = seeds
            || intended
            || listed
            || self.disks.contains_key(name)
            || self.memory.added.contains(name);
        demand!(
            self,
            known || self.memory.second,
            "invariant 10: {name} is started without a record in the API server"
        );
        let new = start.state == State::New;
        demand!(
            self,
            !new || intended || self.memory.second,
            "invariant 6: {name} is started with state new outside the bootstrap"
        );
    }

    fn judge_bootstrap(&mut self, token: &str, found: bool) {
        let formed = self.cluster_id.is_some();
        demand!(
            self,
            !formed,
            "invariant 7: a recorded cluster is bootstrapped again"
        );
        let pods = self.pods.values().map(|pod| &pod.start.token);
        let mut tokens = pods.chain(self.disks.values().map(|disk| &disk.token));
        let existing = tokens
            .find(|other| *other != token && self.memory.recorded.contains(*other))
            .cloned();
        demand!(
            self,
            found || existing.is_none(),
            "invariant 7: a second cluster is bootstrapped next to {existing:?}"
        );
        // If the status was deleted and no data is left, the cluster of `writes_to` no longer exists, so clients may
        // write to a new cluster.
        let before = self.memory.writes_to.clone().unwrap_or_default();
        let nothing_left = self.all_data(&before).all(|(name, _)| is_lost(self, name));
        if self.memory.status_lost && nothing_left {
            self.memory.writes_to = None;
            self.memory.recorded.clear();
        }
    }

    /// Checks after a write that a quorum can return, if a quorum could return before the write (`could`).
    pub(crate) fn judge_after(&mut self, write: &Write, could: bool) {
        if let Write::AddMember { member, .. } = write {
            self.memory.added.insert(member.clone());
            return;
        }
        // Writes to the status delete no data, so the check ignores them.
        let records = matches!(
            write,
            Write::RecordIntent { .. } | Write::RecordClusterId { .. } | Write::RecordRecovery(_)
        );
        // After a user has deleted a PVC, the data is lost when its pod is deleted. The second operator may delete the
        // pod, because it may have planned this for a hibernation before the user deleted the PVC.
        let late = self.memory.second
            && matches!(write, Write::DeletePod { member, .. }
            if self.disks.get(member).is_some_and(|disk| disk.terminating));
        let bound = !records && !late && (self.memory.fresh || !is_for_etcd(write));
        let lost = could && bound && !self.can_come_back();
        demand!(
            self,
            !lost,
            "invariant 3: after \"{write}\" the remaining disks do not form a quorum"
        );
        if is_for_etcd(write) {
            self.judge_logs();
            self.judge_switch();
        }
    }

    /// True if a quorum of the voters has its data. A voter that never ran has no data.
    pub(crate) fn can_come_back(&self) -> bool {
        let Some(cluster) = self.recorded().filter(|_| self.cluster_id.is_some()) else {
            return true;
        };
        let left = cluster
            .voters()
            .filter(|(_, one)| !is_lost(self, &one.name) && self.is_usable(&one.name));
        left.count() >= crate::etcd_model::quorum(cluster.members())
    }

    /// True if the member's data exists, etcd can read it, and the node of its disk is not lost.
    pub(crate) fn is_usable(&self, name: &str) -> bool {
        let bound = self.disks.get(name).and_then(|disk| disk.node);
        let gone = bound.is_some_and(|node| self.nodes[node].power == Power::Gone);
        !gone && self.data(name).is_some_and(|data| !data.corrupt)
    }

    // ---- checks of starting members ----

    /// Invariant 6: no member starts twice on an empty disk under one name.
    pub(crate) fn starts_empty(&mut self, name: &str) {
        let first_time = self.memory.ran.insert(name.to_owned());
        // The second operator may start the pod of a member late, after etcd has removed the member. This pod is
        // harmless: no member list contains the member, so no other member connects to the pod.
        let listed = self
            .recorded()
            .is_some_and(|cluster| cluster.by_name(name).is_some());
        let harmless = self.memory.second && !listed;
        // Exception: before etcd 3.4, the second member joins as a voter. Until it has joined, it may start twice,
        // because the first member has every acknowledged write (`plan/second.rs`).
        let second = self.setup.version.starts_with("3.3")
            && self.recorded().is_some_and(|all| {
                let mut members = all.members().values();
                all.members().len() == 2 && members.any(|one| one.name == name && !one.joined)
            })
            && self
                .intent
                .as_ref()
                .is_some_and(|intent| !intent.members.contains(name));
        demand!(
            self,
            first_time || harmless || second,
            "invariant 6: {name} is started a second time on an empty disk"
        );
    }

    /// Invariant 6: the annotation `started` may be removed only if its member never started, because the operator may
    /// use the member's name again after the removal.
    pub(crate) fn judge_taken_back(&mut self, name: &str) {
        let started = self.pods.contains_key(name) || self.memory.ran.contains(name);
        demand!(
            self,
            !started,
            "invariant 6: the annotation `started` of {name} is removed after {name} was started"
        );
    }

    /// Invariant 6: the seed of a recovery may start repeatedly until the new cluster is recorded.
    pub(crate) fn starts_from_survivor(&mut self, start: &Start) {
        self.memory.ran.insert(start.member.clone());
        let formed = self.memory.recorded.contains(&start.token);
        demand!(
            self,
            !formed,
            "invariant 6: {} is started with old data again",
            start.member
        );
    }

    /// Checks an acknowledged write: it must follow the previous acknowledged write in the same cluster.
    pub(crate) fn judge_move(&mut self, token: &str, moved: &Moved) {
        let Some(after) = moved.acknowledged else {
            return;
        };
        demand!(
            self,
            after,
            "an acknowledged write is lost: another leader acknowledges without it"
        );
        let before = self
            .memory
            .writes_to
            .replace(token.to_owned())
            .filter(|before| before != token);
        demand!(
            self,
            before.is_none(),
            "an acknowledged write is lost: clients wrote to {before:?} and now write to {token}"
        );
    }

    pub(crate) fn remember(&mut self) {
        if let (Some(_), Some(intent)) = (self.cluster_id, &self.intent) {
            self.memory.recorded.insert(intent.token.clone());
            self.memory.status_lost = false;
        }
        let settled = |id: &u64| {
            self.recorded()
                .is_none_or(|all| all.is_up(*id) || !all.members().contains_key(id))
        };
        self.memory.in_flight = self.memory.in_flight.filter(|id| !settled(id));
        self.judge_logs();
        self.judge_switch();
    }

    /// The main check: no member without an acknowledged write could be elected. Raft's rule is applied to all existing
    /// disks, as if all members ran.
    pub(crate) fn judge_logs(&mut self) {
        let mut lacking = None;
        for (token, cluster) in &self.clusters {
            let Some(acknowledged) = cluster.acknowledged else {
                continue;
            };
            let logs: Vec<(&str, &Data)> = self.all_data(token).collect();
            for (name, data) in &logs {
                let others = logs.iter().map(|(_, other)| (other.member, other.last));
                let could_lead = !cluster.contains(data.last, acknowledged)
                    && cluster
                        .electors(data.member, data.last, data.config, others)
                        .is_some();
                if could_lead {
                    lacking = Some((*name).to_owned());
                }
            }
        }
        if let Some(name) = lacking {
            self.broke(format!(
                "an acknowledged write is lost: {name} could be elected without it"
            ));
        }
    }

    /// All readable data of one cluster, on disks and in pods, without the data of removed members.
    pub(crate) fn all_data<'a>(
        &'a self,
        token: &'a str,
    ) -> impl Iterator<Item = (&'a str, &'a Data)> {
        let disks = self
            .disks
            .iter()
            .filter_map(|(name, disk)| Some((name, disk.data.as_ref()?)));
        let pods = self
            .pods
            .iter()
            .filter_map(|(name, pod)| Some((name, pod.data.as_ref()?)));
        let usable = move |(_, data): &(&String, &Data)| {
            data.token == token && !data.removed && !data.corrupt
        };
        disks
            .chain(pods)
            .filter(usable)
            .map(|(name, data)| (name.as_str(), data))
    }

    /// Records that the status was deleted. `unmarked`: an object without the cluster ID exists, so no client can have
    /// written yet.
    pub(crate) fn forget(&mut self, unmarked: bool) {
        self.memory.status_lost = true;
        self.memory.thrown = true;
        if unmarked {
            self.memory.recorded.clear();
        }
    }
}

/// True if the member's data is lost, or will be lost with its pod.
pub(crate) fn is_lost(world: &World, name: &str) -> bool {
    let stays = |disk: &WorldDisk| !disk.terminating && !disk.lost;
    let on_claim = world.disks.get(name).is_some_and(stays);
    let pod = world.pods.get(name).filter(|pod| !pod.ended);
    let claim = world.disks.contains_key(name);
    !on_claim && !pod.is_some_and(|pod| pod.ends_in.is_none() && (!pod.start.durable || claim))
}
