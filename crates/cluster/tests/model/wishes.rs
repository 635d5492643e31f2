//! Spec changes by users at any time (pod settings, hibernation), and etcd's alarms (full databases, members with
//! different data).

use std::collections::BTreeMap;

use crate::writes::Write;
use api::cluster::{BeforeChangeStatus, DefragmentationStatus, LastBackup, RaftLogStatus};
use cluster::snapshot::{BeforeChange, Observed, Seen};
use cluster::upkeep::{Call, UpkeepRule};
use etcd::{Alarm, AlarmKind, KeyHash, MemberId};
use jiff::Timestamp;

use crate::etcd_model::Cluster;
use crate::event::Event;
use crate::invariants::demand;
use crate::others::is_elsewhere;
use crate::owner::Volume;
use crate::world::{World, WorldPod, tell};
use crate::write::Answer;

const QUOTA: i64 = 1000;
/// The number of entries that one call appends to the log.
const APPENDED: u64 = 6_000;
/// The size of a database that is not full.
const SMALL: i64 = 100;

/// The settings that the user has changed, the active alarms, and the records in the status.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wishes {
    /// The settings of the pods in the spec. Pods with other settings must be recreated.
    pub(crate) settings: u8,
    /// `spec.hibernate`.
    pub(crate) hibernate: bool,
    /// `spec.paused`.
    pub(crate) paused: bool,
    /// The StorageClass and the size that the spec requests for PVCs.
    pub(crate) volume: Volume,
    /// The active alarms, and the token of the cluster that raised them.
    alarms: Vec<Alarm>,
    alarmed: String,
    /// File size and size in use of each member's database. A member without an entry has [`SMALL`].
    sizes: BTreeMap<String, (i64, i64)>,
    /// `status.defragmentation`.
    pub(crate) record: Option<DefragmentationStatus>,
    /// `status.raftLog`.
    raft_log: Option<RaftLogStatus>,
    /// `status.beforeChange`.
    pub(crate) before_change: Option<BeforeChangeStatus>,
    /// The number of entries that the operator has appended to the log.
    appended: u64,
    /// The member that this operator process is defragmenting, and the time of its record in the status.
    call: Option<(String, Timestamp)>,
}

/// The part of the spec that determines how the operator handles full databases.
pub(crate) fn rule() -> UpkeepRule {
    UpkeepRule {
        quota: QUOTA,
        only_reports: false,
        keep_revisions: Some(0),
        defragmentation: None,
    }
}

impl World {
    /// Applies the request of a user, or an alarm of etcd.
    pub(crate) fn wish(&mut self, event: Event) {
        match event {
            Event::ChangeSettings => {
                self.wishes.settings += 1;
                self.object_version += 1;
                tell!(self, "the user wants other settings of the pods");
            }
            Event::Hibernate => {
                self.wishes.hibernate = !self.wishes.hibernate;
                self.object_version += 1;
                tell!(self, "the user sets hibernate: {}", self.wishes.hibernate);
            }
            Event::Fill => self.fill(),
            Event::Mistrust(which) => self.mistrust(which),
            _ => {}
        }
    }

    /// Clients write until the database reaches its quota. While an alarm is active, clients cannot write.
    fn fill(&mut self) {
        if !self.alarms().is_empty() {
            return;
        }
        let Some(cluster) = self.recorded().filter(|all| all.serving().is_some()) else {
            return;
        };
        let names = cluster.members().values().map(|one| one.name.clone());
        let names: Vec<String> = names.collect();
        let raised = cluster.voters().map(|(id, _)| *id).next();
        for name in names {
            self.wishes.sizes.insert(name, (QUOTA, QUOTA));
        }
        if let Some(member) = raised {
            self.raise(member, AlarmKind::NoSpace);
        }
        tell!(self, "the databases are full");
    }

    /// etcd compares the members' data, and raises an alarm if the data differs.
    fn mistrust(&mut self, which: u8) {
        let Some(cluster) = self.recorded().filter(|all| all.serving().is_some()) else {
            return;
        };
        let voters: Vec<(u64, String)> = cluster
            .voters()
            .map(|(id, one)| (*id, one.name.clone()))
            .collect();
        let Some((member, name)) = usize::from(which)
            .checked_rem(voters.len())
            .map(|at| voters[at].clone())
        else {
            return;
        };
        self.raise(member, AlarmKind::Corrupt);
        tell!(
            self,
            "etcd reports that the data of {name} differs from the data of the other members"
        );
    }

    fn raise(&mut self, member: u64, kind: AlarmKind) {
        let alarm = Alarm {
            member: MemberId(member),
            kind,
        };
        let token = self.intent.as_ref().map(|intent| intent.token.clone());
        let token = token.unwrap_or_default();
        if self.wishes.alarmed != token {
            self.wishes.alarms.clear();
            self.wishes.alarmed = token;
        }
        if !self.wishes.alarms.contains(&alarm) {
            self.wishes.alarms.push(alarm);
        }
    }

    /// True if an alarm is active in this cluster, so that etcd accepts no writes.
    pub(crate) fn is_alarmed(&self, token: &str) -> bool {
        self.wishes.alarmed == token && !self.wishes.alarms.is_empty()
    }

    /// The alarms of the recorded cluster.
    pub(crate) fn alarms(&self) -> &[Alarm] {
        let recorded = self.intent.as_ref().map(|intent| intent.token.as_str());
        if recorded == Some(self.wishes.alarmed.as_str()) {
            &self.wishes.alarms
        } else {
            &[]
        }
    }

    pub(crate) fn is_mistrusted(&self, id: u64) -> bool {
        let mut alarms = self.alarms().iter();
        alarms.any(|one| one.kind == AlarmKind::Corrupt && one.member == MemberId(id))
    }

    fn size(&self, member: &str) -> (i64, i64) {
        let size = self.wishes.sizes.get(member);
        size.copied().unwrap_or((SMALL, SMALL))
    }

    /// Withdraws the user's requests. A person resolves the CORRUPT alarms.
    pub(crate) fn be_content(&mut self) {
        (self.wishes.hibernate, self.wishes.paused) = (false, false);
        self.wishes
            .alarms
            .retain(|alarm| alarm.kind == AlarmKind::NoSpace);
        self.object_version += 1;
    }

    /// True if every request of the user is fulfilled.
    pub(crate) fn is_content(&self) -> bool {
        let settings = self.wishes.settings;
        let over = |record: &DefragmentationStatus| record.completion_time.is_some();
        let ours = self.pods.iter().filter(|(name, _)| !is_elsewhere(name));
        { ours }.all(|(_, pod)| pod.settings == settings)
            && self.alarms().is_empty()
            && self.wishes.record.as_ref().is_none_or(over)
    }

    /// Adds the alarms, the databases and the records to the observation.
    pub(crate) fn see_wishes(&self, observed: &mut Observed) {
        for (name, pod) in &mut observed.pods {
            let differs = |pod: &WorldPod| pod.old || pod.settings != self.wishes.settings;
            if self.pods.get(name).is_some_and(differs) {
                pod.difference.pod = Some("its settings differ".to_owned());
            }
        }
        for (name, seen) in &mut observed.statuses {
            if let Seen::Known(status) = seen {
                (status.db_size, status.db_size_in_use) = self.size(name);
            }
        }
        if observed.members.known().is_some() {
            let answered = observed.statuses.iter();
            let answered = answered.filter(|(_, seen)| seen.known().is_some());
            let hash = KeyHash {
                hash: 1,
                compacted: 0,
            };
            let hashes = answered.map(|(name, _)| (name.clone(), Seen::Known(Some(hash))));
            observed.hashes = hashes.collect();
        }
        let appended = self.wishes.appended;
        let add = |index: &mut u64| *index = index.saturating_add(appended);
        for seen in observed.statuses.values_mut() {
            if let Seen::Known(status) = seen {
                add(&mut status.raft_index);
                add(&mut status.raft_applied_index);
            }
        }
        for pulse in observed.pulses.values_mut() {
            add(&mut pulse.raft_applied_index);
        }
        observed.upkeep.record.clone_from(&self.wishes.record);
        observed.upkeep.raft_log.clone_from(&self.wishes.raft_log);
        if observed.members.known().is_some() {
            observed.upkeep.alarms = Seen::Known(self.alarms().to_vec());
        }
        let last = self
            .wishes
            .record
            .as_ref()
            .and_then(|record| record.members.last());
        let told = last.filter(|last| last.completion_time.is_none());
        let call = self.wishes.call.as_ref();
        let done = told.is_some_and(|told| {
            call.is_some_and(|(name, at)| *name == told.name && *at == told.start_time.0)
        });
        observed.upkeep.call = done.then_some(Call::Done);
    }

    /// The record of a change that waits for a backup. The backup operator makes a requested backup at once.
    pub(crate) fn read_before_change(&self) -> BeforeChange {
        let record = self.wishes.before_change.clone();
        let cluster_id = self.cluster_id.map(|id| id.to_string());
        let own = record.as_ref().zip(cluster_id.as_ref());
        let requested = own.filter(|(record, id)| record.requests_backup(id));
        let backup = requested.map(|(record, id)| LastBackup {
            name: "db".to_owned(),
            time: Some(record.start_time.clone()),
            revision: record.revision,
            cluster_id: Some(id.clone()),
            ..LastBackup::default()
        });
        BeforeChange {
            backup,
            record,
            request: None,
            waiver: None,
        }
    }

    /// Forgets the defragmentation, because the operator process that requested it has ended.
    pub(crate) fn forget_call(&mut self) {
        self.wishes.call = None;
    }

    /// Applies a write with which the operator fulfills a request of a user or handles an alarm.
    pub(crate) fn fulfil(&mut self, write: &Write) -> Answer {
        match write {
            Write::RecordDefragmentation { record, over } => {
                if *over != self.object_version.to_string() {
                    return Answer::Failed;
                }
                self.object_version += 1;
                self.wishes.record = Some((**record).clone());
                Answer::Done(None)
            }
            Write::RecordRaftLog { record, over } => {
                if *over != self.object_version.to_string() {
                    return Answer::Failed;
                }
                self.object_version += 1;
                self.wishes.raft_log.clone_from(record);
                Answer::Done(None)
            }
            Write::RecordBeforeChange { record, over } => {
                if *over != self.object_version.to_string() {
                    return Answer::Failed;
                }
                self.object_version += 1;
                self.wishes.before_change.clone_from(record);
                Answer::Done(None)
            }
            Write::AppendEntries { member, .. } => {
                if !self.is_led(std::slice::from_ref(member)) {
                    return Answer::Failed;
                }
                // The operator needs several calls, because one call appends only a part of the entries.
                self.wishes.appended += APPENDED;
                Answer::Done(None)
            }
            Write::Compact { via, .. } => {
                if !self.is_led(via) {
                    return Answer::Failed;
                }
                for (_, in_use) in self.wishes.sizes.values_mut() {
                    *in_use = SMALL;
                }
                Answer::Done(None)
            }
            Write::Disarm { alarm, via } => {
                if !self.is_led(via) {
                    return Answer::Failed;
                }
                self.judge_disarming(*alarm);
                self.wishes.alarms.retain(|one| one != alarm);
                Answer::Done(None)
            }
            Write::Defragment { member, recorded } => {
                if !self.operator_reaches(member)
                    || !self.pods.get(member).is_some_and(|pod| pod.running)
                {
                    return Answer::Failed;
                }
                self.judge_defragmentation(member);
                let (_, in_use) = self.size(member);
                self.wishes.sizes.insert(member.clone(), (in_use, in_use));
                self.wishes.call = Some((member.clone(), *recorded));
                Answer::Done(None)
            }
            _ => Answer::Done(None),
        }
    }

    /// True if one of the called members reaches a leader.
    fn is_led(&self, via: &[String]) -> bool {
        let token = self.intent.as_ref().map(|intent| intent.token.clone());
        token.is_some_and(|token| {
            via.iter().any(|name| {
                self.status(&token, name)
                    .is_some_and(|status| status.leader.is_some())
            })
        })
    }

    // ---- checks of upkeep ----

    /// Checks invariant 19: an alarm is disarmed only after its cause is resolved.
    fn judge_disarming(&mut self, alarm: Alarm) {
        let names = |world: &Self| -> Vec<String> {
            let all = world.recorded().into_iter().flat_map(Cluster::voters);
            all.map(|(_, one)| one.name.clone()).collect()
        };
        let full = names(self)
            .into_iter()
            .find(|name| self.size(name).0 >= QUOTA);
        let is_member = self
            .recorded()
            .is_some_and(|all| all.members().contains_key(&alarm.member.0));
        let fresh = self.memory.fresh;
        if alarm.kind == AlarmKind::NoSpace {
            demand!(
                self,
                full.is_none() || !fresh,
                "invariant 19: the alarm is disarmed while the database of {full:?} is full"
            );
        } else {
            demand!(
                self,
                !is_member,
                "invariant 19: the alarm of {:x} is disarmed while it is still a member",
                alarm.member.0
            );
        }
    }

    /// Checks invariant 19: a member answers no call during its defragmentation, so every other voter must serve.
    fn judge_defragmentation(&mut self, member: &str) {
        let Some(cluster) = self.recorded().filter(|_| self.memory.fresh) else {
            return;
        };
        let down = cluster
            .voters()
            .find(|(id, one)| one.name != member && !cluster.is_up(**id))
            .map(|(_, one)| one.name.clone());
        let leads = cluster.by_name(member).is_some_and(|id| self.leads(id));
        let alone = cluster.voters().count() < 2;
        demand!(
            self,
            down.is_none(),
            "invariant 19: {member} is defragmented while {down:?} is down"
        );
        demand!(
            self,
            !leads || alone,
            "invariant 19: the leader {member} is defragmented before a leadership transfer"
        );
    }

    fn leads(&self, id: u64) -> bool {
        let process = self.recorded().and_then(|all| all.running.get(&id));
        process.is_some_and(|process| process.leads.is_some())
    }

    /// Checks invariant 18: a member is restarted only while every other voter serves, and a leader only after a
    /// leadership transfer.
    pub(crate) fn judge_restart(&mut self, member: &str) {
        let Some(cluster) = self.recorded().filter(|_| self.cluster_id.is_some()) else {
            return;
        };
        let Some(id) = cluster.by_name(member).filter(|id| cluster.is_up(*id)) else {
            return;
        };
        // If certificates were lost together with their CAs (`is_torn`), the operator may restart members at the same
        // time.
        if self.wishes.hibernate
            || !self.memory.fresh
            || self.is_torn()
            || cluster.members()[&id].learner
        {
            return;
        }
        let down = cluster
            .voters()
            .find(|(other, _)| **other != id && !cluster.is_up(**other))
            .map(|(_, one)| one.name.clone());
        let alone = cluster.voters().count() < 2;
        let leads = self.leads(id);
        demand!(
            self,
            down.is_none(),
            "invariant 18: {member} is restarted while {down:?} is down"
        );
        demand!(
            self,
            !leads || alone,
            "invariant 18: the leader {member} is restarted before a leadership transfer"
        );
    }
}
