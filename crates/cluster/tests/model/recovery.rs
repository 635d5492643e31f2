//! Recovery from a lost quorum: its records, the start of a new cluster with a survivor's data, and the checks for
//! forbidden changes.

use crate::writes::{RecoveryRecord, Write};
use cluster::plan::Start;
use cluster::snapshot::{Recovery, SeedAnswer, Seen};

use api::cluster::{RecoveryApproval, RecoveryPhase, RecoveryStatus};
use etcd::Members;

use crate::etcd_model::{Cluster, Config, Data, Member, Spot, quorum};
use crate::invariants::is_lost;
use crate::read::{list, seconds};
use crate::world::{World, tell};
use crate::write::Answer;
use crate::writes::Plan;

/// The records of a recovery in the EtcdCluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recorded {
    pub(crate) record: Option<RecoveryStatus>,
    pub(crate) stale_approval: Option<String>,
    /// The annotation with which a person approves a recovery.
    pub(crate) approval: Option<String>,
    /// Time since which the condition Available has been false.
    pub(crate) unavailable_since: Option<u64>,
}

impl World {
    /// A person approves a recovery, or withdraws the approval.
    pub(crate) fn approve(&mut self) {
        let Some(cluster_id) = self.cluster_id else {
            return;
        };
        self.object_version += 1;
        if self.recovery.approval.take().is_some() {
            tell!(self, "a person withdraws the approval of a recovery");
        } else {
            self.recovery.approval = Some(cluster_id.to_string());
            tell!(
                self,
                "a person approves the recovery of cluster {cluster_id}"
            );
        }
    }

    pub(crate) fn read_recovery(&self) -> Recovery {
        let Recorded {
            record,
            stale_approval,
            approval,
            unavailable_since,
        } = self.recovery.clone();
        let unavailable_since = unavailable_since.map(seconds);
        Recovery {
            named_before: self.named_before.clone(),
            record,
            approval,
            stale_approval,
            unavailable_since,
            ..Recovery::default()
        }
    }

    /// Reads the local list of each member that answers, and the answer of a recovery's seed. No quorum is necessary.
    pub(crate) fn ask_without_quorum(
        &self,
        token: &str,
        answered: &[String],
        recovery: &mut Recovery,
    ) {
        let local = answered
            .iter()
            .filter_map(|name| self.local_list(token, std::slice::from_ref(name)));
        recovery.local = local.collect::<Vec<Members>>();
        let record = recovery.record.as_ref();
        let Some(record) = record.filter(|record| record.phase == RecoveryPhase::InProgress) else {
            return;
        };
        let name = &record.member;
        if self
            .pods
            .get(name)
            .is_none_or(|pod| pod.shown.running_since.is_none())
        {
            return;
        }
        let list = self.read_list(&record.token, std::slice::from_ref(name));
        let answer = list.zip(self.status(&record.token, name));
        let answer = answer.map(|(list, status)| SeedAnswer { list, status });
        recovery.seed = Some(answer.map_or(Seen::Unknown("no answer".to_owned()), Seen::Known));
    }

    pub(crate) fn record_recovery(&mut self, record: &RecoveryRecord) -> Answer {
        if record.over != self.object_version.to_string() {
            return Answer::Failed;
        }
        self.object_version += 1;
        self.judge_given_up(record);
        if let Some((intent, cluster_id)) = &record.formed {
            self.judge_recovered(record, &intent.token);
            self.intent = Some(intent.clone());
            self.cluster_id = Some(*cluster_id);
        }
        self.recovery.record.clone_from(&record.recovery);
        self.recovery
            .stale_approval
            .clone_from(&record.stale_approval);
        Answer::Done(None)
    }

    /// Copies the data from the survivor to the seed. The survivor must run.
    pub(crate) fn seed_member(&mut self, start: &Start) -> Option<Data> {
        let record = self
            .recovery
            .record
            .clone()
            .filter(|record| record.member == start.member)?;
        let old = self.clusters.get(&record.from_token)?;
        let mut processes = old.running.values();
        processes
            .find(|one| one.name == record.survivor && one.group == self.group(&start.member))?;
        let index = self.data(&record.survivor)?.last.index;
        let (id, member) = (self.next() + 0xc000, self.next());
        let alone = Member {
            name: start.member.clone(),
            learner: false,
            joined: false,
            dialled: self.usual_of(&start.member),
        };
        let cluster = Cluster::new(id, Config::from([(member, alone)]));
        self.clusters.insert(start.token.clone(), cluster);
        Some(Data {
            last: Spot { term: 0, index },
            ..Data::empty(&start.token, member, 0)
        })
    }

    // ---- checks of a recovery ----

    /// Checks the start of a recovery: a person or the policy has approved the recovery, and no answering member has
    /// more data than the survivor.
    pub(crate) fn judge_recovery(&mut self, plan: &Plan) {
        for write in plan.step.chains.iter().flatten() {
            let Write::RecordRecovery(record) = write else {
                continue;
            };
            if !record.begins(self.recovery.record.as_ref()) {
                continue;
            }
            let Some(recovery) = &record.recovery else {
                continue;
            };
            self.judge_decision(recovery);
            let Some(intent) = self.intent.clone() else {
                continue;
            };
            let reached = self
                .clusters
                .get(&intent.token)
                .into_iter()
                .flat_map(|all| all.running.values());
            let ends = |name: &str| {
                let pod = self.pods.get(name);
                pod.is_none_or(|pod| pod.ends_in.is_some() || !pod.shown.addressed)
            };
            let stays =
                |name: &str| self.operator_reaches(name) && !is_lost(self, name) && !ends(name);
            let reached = reached.filter(|process| stays(&process.name));
            let last = |name: &str| self.data(name).map(|data| data.last);
            let most = reached.filter_map(|process| last(&process.name)).max();
            if last(&recovery.survivor) < most {
                let survivor = recovery.survivor.clone();
                self.broke(format!(
                    "invariant 8: the recovery uses {survivor}, and another member has more data"
                ));
            }
        }
    }

    fn judge_decision(&mut self, recovery: &RecoveryStatus) {
        let Some(cluster) = self.recorded() else {
            return;
        };
        let disks = cluster
            .voters()
            .filter(|(_, member)| !is_lost(self, &member.name))
            .count();
        let lost = disks < quorum(cluster.members());
        let approved = self.recovery.approval == self.cluster_id.map(|id| id.to_string())
            && self.recovery.stale_approval.is_none();
        match recovery.approved_by {
            RecoveryApproval::Policy if !self.setup.automatic => {
                self.broke(
                    "invariant 8: an automatic recovery begins without permission of the spec"
                        .to_owned(),
                );
            }
            RecoveryApproval::Policy if !lost => {
                self.broke(
                    "invariant 8: a recovery begins although a quorum of the disks exists"
                        .to_owned(),
                );
            }
            RecoveryApproval::Policy => {}
            _ if !approved => {
                self.broke("invariant 8: a recovery begins without approval".to_owned());
            }
            _ => {}
        }
    }

    /// Checks the write that replaces the record of the old cluster by the record of the new cluster. The new cluster
    /// must have the survivor's data, and the status must report the missing data.
    fn judge_recovered(&mut self, record: &RecoveryRecord, token: &str) {
        let Some(recovery) = &record.recovery else {
            return;
        };
        let Some(new) = self.clusters.get(token) else {
            self.broke(format!(
                "invariant 7: the recorded cluster {token} does not exist"
            ));
            return;
        };
        let has = new
            .members()
            .values()
            .filter_map(|member| self.data(&member.name));
        let Some(has) = has.map(|data| data.last.index).max() else {
            return; // The data of the new cluster was lost before the cluster was recorded.
        };
        let stays = new
            .members()
            .values()
            .all(|member| !is_lost(self, &member.name));
        if !stays && self.memory.fresh {
            self.broke(format!(
                "invariant 9: cluster {token} is recorded, and its data is lost with its pod"
            ));
            return;
        }
        if self.memory.fresh && self.has_lost_its_volume(&recovery.member) {
            self.broke(format!(
                "invariant 9: cluster {token} is recorded, and the volume of its first member is lost"
            ));
            return;
        }
        let old = self
            .clusters
            .get(&recovery.from_token)
            .and_then(|old| old.acknowledged);
        let missing = old.is_some_and(|old| has < old.index);
        let said = recovery.message.is_some()
            && !(recovery.lost_members.is_empty() && recovery.silent_members.is_empty());
        if i64::try_from(has).unwrap() < recovery.revision || missing && !said {
            self.broke(format!(
                "an acknowledged write is lost: {token} has {has}, and the status does not report the loss"
            ));
        }
        if self.memory.writes_to.as_ref() == Some(&recovery.from_token) {
            self.memory.writes_to = Some(token.to_owned());
        }
    }

    /// The ID of the cluster before the recovery; `None` without a completed recovery.
    pub(crate) fn former(&self) -> Option<&str> {
        let record = self.recovery.record.as_ref()?;
        (record.phase == RecoveryPhase::Complete).then_some(record.from_cluster_id.as_str())
    }

    /// True if the policy `Automatic` must recover without a person: each lost member is certainly lost, all other
    /// members answer, and their lists are equal.
    pub(crate) fn recovers_by_itself(&self) -> bool {
        let Some(cluster) = self.recorded().filter(|_| self.setup.automatic) else {
            return false;
        };
        let token = self.intent.as_ref().map(|intent| &intent.token);
        let named = |name: &String| {
            let pod = self
                .pods
                .get(name)
                .is_some_and(|pod| Some(&pod.start.token) == token);
            pod || self
                .disks
                .get(name)
                .is_some_and(|disk| Some(&disk.token) == token)
        };
        let answers = |name: &str| cluster.running.values().any(|process| process.name == name);
        let known = self
            .pods
            .keys()
            .chain(self.disks.keys())
            .filter(|name| named(name));
        // The policy `Automatic` recovers only if the status lists the same voters as etcd.
        let reported = cluster
            .voters()
            .all(|(_, member)| self.reported_voters.contains(&member.name))
            && self
                .reported_voters
                .iter()
                .all(|name| cluster.by_name(name).is_some());
        let (mut any, mut all) = (
            false,
            reported && cluster.voters().all(|(_, member)| member.joined),
        );
        for name in known {
            let voter = cluster
                .by_name(name)
                .is_some_and(|id| !cluster.members()[&id].learner);
            any |= voter && answers(name);
            all &= answers(name) && cluster.by_name(name).is_some();
        }
        any && all
    }

    /// The member list that a member knows, which may be outdated.
    pub(crate) fn local_list(&self, token: &str, via: &[String]) -> Option<Members> {
        let cluster = self.clusters.get(token)?;
        via.iter().rev().find_map(|name| {
            cluster
                .running
                .values()
                .find(|process| process.name == *name)?;
            let answers = self.operator_reaches(name) && self.serves_clients(name);
            let data = self.data(name).filter(|_| answers)?;
            Some(list(cluster.id, &cluster.configs[data.config]))
        })
    }
}
