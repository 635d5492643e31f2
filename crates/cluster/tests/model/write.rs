//! The answers of the API server and of etcd to one write.

use std::collections::BTreeSet;

use crate::writes::Write;
use cluster::plan::{Start, State};
use cluster::snapshot::{Intent, Kept, Removal, RetentionNotes};
use etcd::ClusterId;

use crate::etcd_model::Member;
use crate::switch::listener;
use crate::world::{Shown, World, WorldDisk, WorldPod, WorldService, tell};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Done(Option<u64>),
    /// The write was not done, for example because a precondition failed. The operator may retry.
    Failed,
}

/// True if the write is a request to etcd, and not to the API server.
pub(crate) fn is_for_etcd(write: &Write) -> bool {
    matches!(
        write,
        Write::AddMember { .. }
            | Write::UpdatePeerUrls { .. }
            | Write::Promote { .. }
            | Write::Remove { .. }
            | Write::MoveLeader { .. }
            | Write::Downgrade { .. }
            | Write::Compact { .. }
            | Write::AppendEntries { .. }
            | Write::Disarm { .. }
            | Write::Defragment { .. }
    )
}

impl World {
    /// Applies one write as the API server or etcd would. `via`: the members that receive a request to etcd.
    pub(crate) fn write(&mut self, write: &Write, via: &[String]) -> Answer {
        if !is_for_etcd(write) && self.api_is_away() {
            return Answer::Failed;
        }
        self.judge_write(write);
        let could_come_back = self.can_come_back();
        let keeps_up = matches!(
            write,
            Write::Compact { .. }
                | Write::AppendEntries { .. }
                | Write::Disarm { .. }
                | Write::Defragment { .. }
        );
        let answer = if is_for_etcd(write) && !keeps_up {
            self.write_members(write, via)
        } else {
            self.write_object(write)
        };
        if answer != Answer::Failed {
            self.judge_after(write, could_come_back);
        }
        answer
    }

    fn write_object(&mut self, write: &Write) -> Answer {
        match write {
            Write::RecordIntent {
                intent,
                cluster_id,
                over,
            } => self.record(Some(intent), *cluster_id, over),
            Write::RecordClusterId { cluster_id, over } => {
                self.record(None, Some(*cluster_id), over)
            }
            Write::RecordRecovery(record) => self.record_recovery(record),
            Write::ApplyHeadless => {
                self.shared.headless = Kept::AsMade(());
                Answer::Done(None)
            }
            Write::ApplyClient { open } => {
                self.shared.client = Kept::AsMade(*open);
                self.client_token = self.intent.as_ref().map(|intent| intent.token.clone());
                Answer::Done(None)
            }
            Write::ApplyBudget { quorum } => {
                self.shared.budget = Kept::AsMade(*quorum);
                Answer::Done(None)
            }
            // The model has no state for these writes: etcd's users, the NetworkPolicy, and the labels, annotations and
            // resources of pods.
            Write::Access(_) | Write::ResizePod { .. } | Write::PatchMetadata { .. } => {
                Answer::Done(None)
            }
            Write::Certificate(_) | Write::NotifyPod { .. } | Write::DeleteSecret { .. } => {
                self.write_certificate(write)
            }
            Write::RecordTls { record, over } => self.record_tls(record, over),
            Write::SetFinalizer { set, over } => self.set_finalizer(*set, over),
            Write::RecordDefragmentation { .. }
            | Write::RecordRaftLog { .. }
            | Write::RecordBeforeChange { .. }
            | Write::Compact { .. }
            | Write::AppendEntries { .. }
            | Write::Disarm { .. }
            | Write::Defragment { .. } => self.fulfil(write),
            Write::DeleteBudget => {
                self.shared.budget = Kept::Missing;
                Answer::Done(None)
            }
            Write::CreateDisk(start) => self.create_disk(start),
            Write::GrowDisk { member, uid, size } => self.grow_disk(member, uid, size),
            Write::NoteRemoval {
                member,
                over,
                removal,
            } => self.note_removal(member, over, *removal),
            Write::DeleteDisk { member, uid } => self.delete_disk(member, uid),
            Write::CreatePod(start) => self.create_pod(start),
            Write::DeletePod { member, uid } => self.delete_pod(member, uid),
            Write::PatchImage { .. } | Write::SettleImage { .. } | Write::NoteVersion { .. } => {
                self.change_version(write)
            }
            Write::LabelPod(label) => {
                let pod = self.pods.get_mut(&label.member);
                let Some(pod) = pod.filter(|pod| pod.uid.to_string() == label.uid) else {
                    return Answer::Failed;
                };
                pod.role = label.role.unwrap_or(pod.role);
                (pod.cluster_id, pod.owned, pod.marked) = (label.cluster_id, true, true);
                Answer::Done(None)
            }
            Write::LabelDisk(label) => {
                let may_be_deleted = self.may_be_deleted();
                let disk = self.disks.get_mut(&label.member);
                let Some(disk) = disk.filter(|disk| disk.uid.to_string() == label.uid) else {
                    return Answer::Failed;
                };
                (disk.cluster_id, disk.owned, disk.marked) = (label.cluster_id, true, true);
                if may_be_deleted {
                    self.adopted.insert(disk.uid);
                }
                if let Some(retention) = &label.retention {
                    disk.retention.clone_from(retention);
                }
                Answer::Done(None)
            }
            _ => self.write_service(write),
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

    fn create_service(&mut self, member: &str, started: bool, closed: bool) -> Answer {
        if self.services.contains_key(member) {
            return Answer::Failed;
        }
        let version = self.next();
        let (uid, created, drifted) = (version, self.now, false);
        let service = WorldService {
            owned: true,
            uid,
            version,
            started,
            renewed: false,
            drifted,
            closed,
            created,
        };
        self.services.insert(member.to_owned(), service);
        self.note_service(uid);
        Answer::Done(Some(version))
    }

    fn write_service(&mut self, write: &Write) -> Answer {
        match write {
            Write::CreateService {
                member,
                started,
                closed,
            } => self.create_service(member, *started, *closed),
            Write::OpenService { member, uid } | Write::RepairService { member, uid } => {
                let version = self.next();
                let service = self.services.get_mut(member);
                let Some(service) = service.filter(|service| service.uid.to_string() == *uid)
                else {
                    return Answer::Failed;
                };
                (service.version, service.drifted, service.closed) = (version, false, false);
                service.owned = true;
                let uid = service.uid;
                self.note_service(uid);
                Answer::Done(Some(version))
            }
            Write::MarkService {
                member,
                started,
                over,
            } => {
                let version = self.next();
                let Some(service) = self.services.get_mut(member) else {
                    return Answer::Failed;
                };
                if over
                    .as_ref()
                    .is_some_and(|over| *over != service.version.to_string())
                {
                    return Answer::Failed;
                }
                (service.version, service.started, service.renewed) = (version, *started, false);
                if !started {
                    self.judge_taken_back(member);
                }
                Answer::Done(Some(version))
            }
            Write::RenewMark { member, over } => {
                let version = self.next();
                let service = self.services.get_mut(member);
                let Some(service) = service.filter(|seen| seen.version.to_string() == *over) else {
                    return Answer::Failed;
                };
                (service.version, service.started, service.renewed) = (version, true, true);
                Answer::Done(None)
            }
            Write::DeleteService { member, uid } => match self.services.get(member) {
                Some(service) if service.uid.to_string() != *uid => Answer::Failed,
                _ => {
                    self.services.remove(member);
                    Answer::Done(None)
                }
            },
            other => panic!("the model does not know how to {other}"),
        }
    }

    fn create_disk(&mut self, start: &Start) -> Answer {
        if self.disks.contains_key(&start.member) {
            return Answer::Failed;
        }
        let disk = self.new_disk(start);
        self.disks.insert(start.member.clone(), disk);
        self.note_disk(&start.member, &start.version);
        Answer::Done(None)
    }

    pub(crate) fn new_disk(&mut self, start: &Start) -> WorldDisk {
        let first = start.state == State::New;
        WorldDisk {
            marked: true,
            version: 0,
            removal: None,
            retention: RetentionNotes::default(),
            volume: self.wishes.volume,
            uid: self.next(),
            initial: if first {
                start.initial.clone()
            } else {
                BTreeSet::new()
            },
            token: start.token.clone(),
            cluster_id: start.cluster_id,
            owned: true,
            terminating: false,
            lost: false,
            node: None,
            data: None,
        }
    }

    fn note_removal(&mut self, member: &str, over: &str, removal: Option<Removal>) -> Answer {
        let disk = self.disks.get_mut(member);
        let Some(disk) = disk.filter(|disk| disk.version.to_string() == over) else {
            return Answer::Failed;
        };
        disk.removal = removal;
        disk.version += 1;
        Answer::Done(None)
    }

    fn delete_disk(&mut self, member: &str, uid: &str) -> Answer {
        match self.disks.get_mut(member) {
            Some(disk) if disk.uid.to_string() == uid => disk.terminating = true,
            Some(_) => return Answer::Failed,
            None => return Answer::Done(None),
        }
        if !self.pods.contains_key(member) {
            self.disks.remove(member);
        }
        Answer::Done(None)
    }

    fn create_pod(&mut self, start: &Start) -> Answer {
        if self.pods.contains_key(&start.member) {
            return Answer::Failed;
        }
        let uid = self.next();
        let pod = self.new_pod(uid, start);
        self.note_pod(uid, &start.initial);
        self.note_trust(uid);
        self.pods.insert(start.member.clone(), pod);
        Answer::Done(None)
    }

    pub(crate) fn new_pod(&self, uid: u64, start: &Start) -> WorldPod {
        let slow = u64::from(self.setup.slow) + 1;
        WorldPod {
            ended: false,
            old: false,
            marked: true,
            uid,
            start: start.clone(),
            role: start.role,
            cluster_id: start.cluster_id,
            owned: true,
            node: None,
            ends_in: None,
            running: false,
            serves_from: 0,
            shown: Shown {
                unready_since: self.now,
                ..Shown::default()
            },
            data: None,
            created: self.now,
            starts_in: u8::try_from(uid * 7 % slow).unwrap(),
            settings: self.wishes.settings,
        }
    }

    fn delete_pod(&mut self, member: &str, uid: &str) -> Answer {
        match self.pods.get_mut(member) {
            Some(pod) if pod.uid.to_string() == uid => {
                pod.ends_in = pod.ends_in.or(Some(2));
                Answer::Done(None)
            }
            Some(_) => Answer::Failed,
            None => Answer::Done(None),
        }
    }

    fn write_members(&mut self, write: &Write, via: &[String]) -> Answer {
        let Some(token) = self.intent.as_ref().map(|intent| intent.token.clone()) else {
            return Answer::Failed;
        };
        let Some(mut cluster) = self.clusters.remove(&token) else {
            return Answer::Failed;
        };
        let asked = via.iter().find_map(|name| {
            let mut running = cluster.running.iter();
            let (id, process) = running.find(|(_, process)| process.name == *name)?;
            let answers = self.operator_reaches(name) && self.serves_clients(name);
            answers.then_some((*id, process.group))
        });
        let answer =
            match asked.and_then(|(asked, group)| Some((asked, group, cluster.leader(group)?))) {
                Some(asked) => self.ask(&token, &mut cluster, asked, write),
                None => Err("no member answers"),
            };
        self.clusters.insert(token, cluster);
        if let (Ok(()), Write::Downgrade { to }) = (&answer, write) {
            return self.allow_downgrade(to.as_deref());
        }
        match answer {
            Ok(()) => Answer::Done(None),
            Err(why) => {
                tell!(self, "   etcd refuses: {why}");
                Answer::Failed
            }
        }
    }

    /// Sends a request to the member `asked`, whose network group is `group`. `leader`: the leader of this group.
    fn ask(
        &mut self,
        token: &str,
        cluster: &mut crate::etcd_model::Cluster,
        (asked, group, leader): (u64, usize, u64),
        write: &Write,
    ) -> Result<(), &'static str> {
        let (now, new) = (self.now, self.next());
        let (learners, most) = (self.knows_learners(), self.most_learners());
        let dialled = self.usual();
        let lagging = self.lagging(cluster);
        let mut logs = self.logs(token);
        let mut config = cluster.configs[logs[&leader].config].clone();
        let refused = match write {
            Write::AddMember { member, .. } if config.values().any(|one| one.name == *member) => {
                return Ok(());
            }
            // etcd before 3.4 ignores the learner flag of an addition.
            Write::AddMember { member, learner } => {
                let learner = *learner && learners;
                let joined = Member {
                    name: member.clone(),
                    learner,
                    joined: false,
                    dialled,
                };
                let refused = cluster.refuses_addition(&config, group, (learner, most), now);
                config.insert(new, joined);
                refused
            }
            Write::Remove { id, .. } if !config.contains_key(&id.0) => return Ok(()),
            Write::Remove { id, .. } => {
                let refused = cluster.refuses_removal(&config, (id.0, asked), group, now);
                config.remove(&id.0);
                refused
            }
            Write::Promote { id, .. } => {
                let refused = cluster.refuses_promotion(&config, id.0, logs[&leader].last);
                config
                    .entry(id.0)
                    .and_modify(|member| member.learner = false);
                refused
            }
            Write::MoveLeader { from, id, .. } => {
                let able = cluster
                    .running
                    .get(&id.0)
                    .is_some_and(|process| process.group == group);
                let votes = config.get(&id.0).is_some_and(|member| !member.learner);
                if cluster.running[&leader].name != *from
                    || !able
                    || !votes
                    || lagging.contains(&id.0)
                {
                    return Err(
                        "the leadership transfer does not begin at the leader, or its target is invalid",
                    );
                }
                cluster.hand_over(leader, id.0, &mut logs, &lagging);
                return Ok(());
            }
            Write::UpdatePeerUrls { id, urls, .. } => {
                let Some(member) = config.get_mut(&id.0) else {
                    return Err("member not found");
                };
                member.dialled = urls.first().and_then(|url| listener(url)).unwrap();
                None
            }
            Write::Downgrade { .. } => return Ok(()),
            _ => Some("the write is not a request to etcd"),
        };
        if let Some(why) = refused {
            return Err(why);
        }
        cluster.append(leader, &mut logs, &lagging, Some(config));
        if let Write::Promote { id, .. } = write {
            self.memory.in_flight = Some(id.0);
        }
        Ok(())
    }
}
