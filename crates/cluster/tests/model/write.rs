//! The API server and etcd taking one write.

use std::collections::BTreeSet;

use cluster::observed::{Intent, Kept};
use cluster::write::{Start, State, Write};
use etcd::ClusterId;

use crate::etcd_model::Member;
use crate::invariants::Witness;
use crate::world::{World, WorldDisk, WorldPod, WorldService};

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Done(Option<u64>),
    /// A lost race, or etcd is not ready.
    Failed,
}

impl World {
    /// Applies one write as the API server or etcd would.
    pub(crate) fn write(&mut self, write: &Write) -> Answer {
        match write {
            Write::RecordIntent {
                intent,
                cluster_id,
                over,
            } => self.record(Some(intent), *cluster_id, over),
            Write::RecordClusterId { cluster_id, over } => {
                self.record(None, Some(*cluster_id), over)
            }
            Write::RecordRecovery(_) => Answer::Failed,
            Write::ApplyHeadless => {
                self.shared.headless = Kept::AsMade(());
                Answer::Done(None)
            }
            Write::ApplyClient { open } => {
                self.shared.client = Kept::AsMade(*open);
                Answer::Done(None)
            }
            Write::ApplyBudget { quorum } => {
                self.shared.budget = Kept::AsMade(*quorum);
                Answer::Done(None)
            }
            Write::DeleteBudget => {
                self.shared.budget = Kept::Missing;
                Answer::Done(None)
            }
            Write::CreateService { .. }
            | Write::OpenService { .. }
            | Write::RepairService { .. }
            | Write::MarkService { .. }
            | Write::DeleteService { .. } => self.write_service(write),
            Write::CreateDisk(start) => self.create_disk(start),
            Write::DeleteDisk { member, uid } => {
                if let Some(disk) = self
                    .disks
                    .get_mut(member)
                    .filter(|disk| disk.uid.to_string() == *uid)
                {
                    disk.terminating = true;
                    if !self.pods.contains_key(member) {
                        self.disks.remove(member);
                    }
                    return Answer::Done(None);
                }
                if self.disks.contains_key(member) {
                    Answer::Failed
                } else {
                    Answer::Done(None)
                }
            }
            Write::CreatePod(start) => self.create_pod(start),
            Write::DeletePod { member, uid } => {
                if let Some(pod) = self
                    .pods
                    .get_mut(member)
                    .filter(|pod| pod.uid.to_string() == *uid)
                {
                    pod.ends_in = pod.ends_in.or(Some(2));
                    return Answer::Done(None);
                }
                if self.pods.contains_key(member) {
                    Answer::Failed
                } else {
                    Answer::Done(None)
                }
            }
            Write::HurryPod { member, uid } => {
                let pod = self.pods.get_mut(member);
                let Some(pod) = pod.filter(|pod| pod.uid.to_string() == *uid) else {
                    return Answer::Failed;
                };
                pod.ends_in = pod.ends_in.map(|ticks| ticks.min(1));
                Answer::Done(None)
            }
            Write::LabelPod(label) => {
                let pod = self
                    .pods
                    .get_mut(&label.member)
                    .filter(|pod| pod.uid.to_string() == label.uid);
                let Some(pod) = pod else {
                    return Answer::Failed;
                };
                pod.role = label.role.unwrap_or(pod.role);
                (pod.cluster_id, pod.owned) = (label.cluster_id, true);
                Answer::Done(None)
            }
            Write::LabelDisk(label) => {
                let disk = self
                    .disks
                    .get_mut(&label.member)
                    .filter(|disk| disk.uid.to_string() == label.uid);
                let Some(disk) = disk else {
                    return Answer::Failed;
                };
                (disk.cluster_id, disk.owned) = (label.cluster_id, true);
                Answer::Done(None)
            }
            Write::AddMember { .. }
            | Write::Promote { .. }
            | Write::Remove { .. }
            | Write::MoveLeader { .. } => self.write_members(write),
        }
    }

    fn record(
        &mut self,
        intent: Option<&Intent>,
        cluster_id: Option<ClusterId>,
        over: &str,
    ) -> Answer {
        if over != self.object_version.to_string() {
            return Answer::Failed;
        }
        self.object_version += 1;
        if let Some(intent) = intent {
            self.intent = Some(intent.clone());
            self.cluster_id = None;
        }
        self.cluster_id = cluster_id.or(self.cluster_id);
        Answer::Done(None)
    }

    fn write_service(&mut self, write: &Write) -> Answer {
        let version = self.next();
        match write {
            Write::CreateService {
                member,
                started,
                closed,
            } => {
                if self.services.contains_key(member) {
                    return Answer::Failed;
                }
                let created = self.now;
                let service = WorldService {
                    uid: version,
                    version,
                    started: *started,
                    drifted: false,
                    closed: *closed,
                    created,
                };
                self.services.insert(member.clone(), service);
                Answer::Done(Some(version))
            }
            Write::OpenService { member, uid } | Write::RepairService { member, uid } => {
                let seen = |service: &&mut WorldService| service.uid.to_string() == *uid;
                let Some(service) = self.services.get_mut(member).filter(seen) else {
                    return Answer::Failed;
                };
                (service.version, service.drifted, service.closed) = (version, false, false);
                Answer::Done(Some(version))
            }
            Write::MarkService {
                member,
                started,
                over,
            } => {
                let Some(service) = self.services.get_mut(member) else {
                    return Answer::Failed;
                };
                if over
                    .as_ref()
                    .is_some_and(|over| *over != service.version.to_string())
                {
                    return Answer::Failed;
                }
                (service.version, service.started) = (version, *started);
                Answer::Done(Some(version))
            }
            Write::DeleteService { member, uid } => {
                if self
                    .services
                    .get(member)
                    .is_some_and(|service| service.uid.to_string() == *uid)
                {
                    self.services.remove(member);
                }
                Answer::Done(None)
            }
            _ => unreachable!(),
        }
    }

    fn create_disk(&mut self, start: &Start) -> Answer {
        if self.disks.contains_key(&start.member) {
            return Answer::Failed;
        }
        let disk = WorldDisk {
            uid: self.next(),
            initial: if start.state == State::New {
                start.initial.clone()
            } else {
                BTreeSet::new()
            },
            token: start.token.clone(),
            cluster_id: start.cluster_id,
            owned: true,
            terminating: false,
            data: None,
        };
        self.disks.insert(start.member.clone(), disk);
        Answer::Done(None)
    }

    fn create_pod(&mut self, start: &Start) -> Answer {
        if self.pods.contains_key(&start.member) {
            return Answer::Failed;
        }
        Witness::pod_is_created(start, self);
        let pod = WorldPod {
            uid: self.next(),
            start: start.clone(),
            role: start.role,
            cluster_id: start.cluster_id,
            owned: true,
            ends_in: None,
            running: false,
            running_since: None,
            restarts: 0,
            data: None,
            created: self.now,
        };
        self.pods.insert(start.member.clone(), pod);
        Answer::Done(None)
    }

    fn write_members(&mut self, write: &Write) -> Answer {
        let now = self.now;
        let id = self.next();
        let Some(token) = self.intent.as_ref().map(|intent| intent.token.clone()) else {
            return Answer::Failed;
        };
        let Some(cluster) = self.clusters.get_mut(&token) else {
            return Answer::Failed;
        };
        let allowed = match write {
            Write::AddMember { .. } => cluster.takes_addition(now),
            Write::Remove { id, .. } => cluster.takes_removal(id.0),
            Write::Promote { id, .. } => {
                cluster.serves()
                    && cluster
                        .members
                        .get(&id.0)
                        .is_some_and(|member| member.up_since.is_some() && member.joined)
            }
            Write::MoveLeader { id, .. } => {
                cluster.serves()
                    && cluster
                        .members
                        .get(&id.0)
                        .is_some_and(|member| member.up_since.is_some())
            }
            _ => false,
        };
        if !allowed || self.deaf {
            return Answer::Failed;
        }
        match write {
            Write::AddMember { member, learner } if cluster.by_name(member).is_none() => {
                let member = Member {
                    name: member.clone(),
                    learner: *learner,
                    joined: false,
                    up_since: None,
                };
                cluster.members.insert(id, member);
            }
            Write::Remove { id, .. } => {
                cluster.members.remove(&id.0);
                cluster.leader = cluster.leader.filter(|leader| *leader != id.0);
            }
            Write::Promote { id, .. } => {
                cluster
                    .members
                    .entry(id.0)
                    .and_modify(|member| member.learner = false);
            }
            Write::MoveLeader { id, .. } => cluster.leader = Some(id.0),
            _ => {}
        }
        Answer::Done(None)
    }
}
