//! Checks each plan against the world from which it was made, before a request is sent.

use crate::writes::Write;
use cluster::snapshot::{Disk, Observed, Seen};

use crate::etcd_model::{Cluster, Member};
use crate::invariants::{demand, is_lost};
use crate::others::is_elsewhere;
use crate::run::said;
use crate::world::{Power, World};
use crate::write::is_for_etcd;
use crate::writes::Plan;

impl World {
    /// Checks a plan. `atomic`: the world did not change during the observation.
    pub(crate) fn judge_plan(&mut self, observed: &Observed, plan: &Plan, atomic: bool) {
        self.judge_caution(observed, plan);
        self.judge_owner(observed, plan, atomic);
        if atomic {
            self.judge_recovery(plan);
            self.judge_roll(plan);
            self.judge_backup(plan);
        }
        let Some(change) = &plan.step.change else {
            return;
        };
        // Invariant 2: a plan changes the voters at most once. It may add several learners.
        let learners = |write: &Write| matches!(write, Write::AddMember { learner: true, .. });
        let mut changes = change.chain.iter().filter(|write| is_for_etcd(write));
        let single = changes.clone().count() == 1 || changes.all(learners);
        demand!(
            self,
            single,
            "invariant 2: several changes of the voters at once: {}",
            said(plan)
        );
        let Some(cluster) = self.recorded().cloned().filter(|_| atomic) else {
            return;
        };
        self.judge_joining(change, &cluster);
        for write in &change.chain {
            match write {
                Write::AddMember { .. } => self.judge_addition(&cluster),
                Write::Remove { id, .. } => self.judge_removal(id.0, &cluster),
                Write::Promote { id, .. } => self.judge_promotion(id.0, &cluster),
                _ => {}
            }
        }
    }

    /// Invariant 1: while the member list is unknown, the operator changes no member, and deletes only pods whose
    /// deletion loses no data.
    fn judge_caution(&mut self, observed: &Observed, plan: &Plan) {
        if observed.cluster_id.is_none() {
            return;
        }
        let begin = |write: &Write| {
            matches!(
                write,
                Write::RecordIntent {
                    cluster_id: None,
                    ..
                }
            )
        };
        let begins = plan.step.chains.iter().flatten().any(begin);
        demand!(
            self,
            !begins,
            "invariant 7: a formed cluster is bootstrapped again: {}",
            said(plan)
        );
        let Seen::Unknown(_) = observed.members else {
            return;
        };
        demand!(
            self,
            plan.step.change.is_none(),
            "invariant 1: members are changed without a member list: {}",
            said(plan)
        );
        // A plan may delete a pod in the phase `Failed` if no data is lost: a PVC has the data, or the pod is the seed
        // of a recovery, which has a copy of the survivor's data.
        let holds_nothing = |member: &String| {
            let record = observed.recovery.record.as_ref();
            let begins = record.is_some_and(|record| record.member == *member);
            let pod = observed.pods.get(member);
            pod.is_some_and(|pod| pod.failed && (pod.durable || begins))
        };
        let stops = |write: &Write| match write {
            Write::DeletePod { member, .. } => {
                let given_up = self
                    .seed_given_up()
                    .is_some_and(|(seed, _)| seed == *member);
                // Invariant 20: members without a common CA reject each other, so there is no member list. The plan may
                // restart a member with a volume, because the volume keeps its data.
                let keeps = observed.disks.get(member).is_some_and(Disk::stays);
                let cut_off = self.is_torn() && keeps;
                self.wishes.hibernate || holds_nothing(member) || given_up || cut_off
            }
            _ => false,
        };
        let mut writes = plan.step.chains.iter().flatten();
        let destroys = writes.any(|one| destroys(one) && !stops(one));
        demand!(
            self,
            !destroys,
            "invariant 1: objects are deleted without a member list: {}",
            said(plan)
        );
    }

    fn judge_addition(&mut self, cluster: &Cluster) {
        // Invariant 5: voters that have lost their data are removed before another member is added.
        let dead =
            |(id, member): &(&u64, &Member)| !cluster.is_up(**id) && is_lost(self, &member.name);
        let dead = cluster
            .voters()
            .find(dead)
            .map(|(_, member)| member.name.clone());
        demand!(
            self,
            dead.is_none(),
            "invariant 5: a member is added before {dead:?} is removed"
        );
    }

    fn judge_removal(&mut self, id: u64, cluster: &Cluster) {
        let Some(member) = cluster.members().get(&id).filter(|member| !member.learner) else {
            return;
        };
        let stays = |(other, member): &(&u64, &Member)| {
            **other != id && cluster.is_up(**other) && !is_lost(self, &member.name)
        };
        let (healthy, voters) = (
            cluster.voters().filter(stays).count(),
            cluster.voters().count() - 1,
        );
        let name = member.name.clone();
        demand!(
            self,
            healthy > voters / 2,
            "invariant 3: {name} is removed, and only {healthy} of the remaining {voters} voters are healthy"
        );
        let leads = cluster
            .running
            .get(&id)
            .is_some_and(|process| process.leads.is_some());
        demand!(
            self,
            !leads || healthy == 0,
            "invariant 3: the leader {name} is removed before a leadership transfer"
        );
        if is_lost(self, &name) || self.data(&name).is_none() {
            return;
        }
        // Invariant 5: a member whose disk exists is removed only if the cluster is too large, or if the operator may
        // replace the member (`is_excused`).
        let too_large = cluster.members().len() > self.size;
        demand!(
            self,
            too_large || self.is_excused(&name),
            "invariant 5: {name} is removed although its disk exists"
        );
        if !self.is_excused(&name) {
            self.judge_in_flight("a removal", Some(id), cluster);
        }
    }

    /// True if the operator may replace the member: it is external, it has a fault in its node, container, data or
    /// volume, or it has no volume and its pod must be recreated.
    fn is_excused(&self, name: &str) -> bool {
        let pod = self.pods.get(name);
        let fails = |pod: &crate::world::WorldPod| {
            pod.shown.failing || pod.shown.lost_since.is_some() || self.power(pod) != Power::On
        };
        let replaced = |pod: &crate::world::WorldPod| {
            !pod.start.durable && (pod.old || pod.settings != self.wishes.settings)
        };
        if is_elsewhere(name) {
            return self.ours_are_enough();
        }
        let distrusted = self.recorded().and_then(|all| all.by_name(name));
        pod.is_some_and(fails)
            || pod.is_some_and(replaced)
            || distrusted.is_some_and(|id| self.is_mistrusted(id))
            || self.has_unfit_volume(name)
            || self.data(name).is_some_and(|data| data.corrupt)
            || self
                .disks
                .get(name)
                .is_some_and(|disk| disk.terminating || disk.lost)
    }

    fn judge_promotion(&mut self, id: u64, cluster: &Cluster) {
        let Some(member) = cluster.members().get(&id) else {
            return;
        };
        // Invariant 4: a learner is promoted only if it runs, and has at least 90 % of the highest log index.
        let name = &member.name;
        demand!(
            self,
            cluster.is_up(id),
            "invariant 4: {name} is promoted before it runs"
        );
        let newest = cluster
            .running
            .values()
            .filter_map(|process| self.data(&process.name));
        let newest = newest.map(|data| data.last.index).max().unwrap_or_default();
        let has = self.data(name).map_or(0, |data| data.last.index);
        demand!(
            self,
            has * 10 >= newest * 9,
            "invariant 4: {name} is promoted with {has} of {newest} entries"
        );
        self.judge_in_flight("a promotion", None, cluster);
        // Invariant 2: a promotion changes the voters, so all voters must run.
        let down = cluster.voters().find(|(id, _)| !cluster.is_up(**id));
        let down = down.map(|(_, voter)| voter.name.clone());
        demand!(
            self,
            down.is_none(),
            "invariant 2: {name} is promoted while {down:?} is down"
        );
    }

    fn judge_in_flight(&mut self, what: &str, besides: Option<u64>, cluster: &Cluster) {
        let down = |id: &u64| cluster.members().contains_key(id) && !cluster.is_up(*id);
        let other = self
            .memory
            .in_flight
            .filter(|id| Some(*id) != besides && down(id));
        let other = other.map(|id| cluster.members()[&id].name.clone());
        demand!(
            self,
            other.is_none(),
            "invariant 2: {what} while the change of {other:?} is in flight"
        );
    }
}

fn destroys(write: &Write) -> bool {
    matches!(
        write,
        Write::DeletePod { .. } | Write::DeleteDisk { .. } | Write::DeleteService { .. }
    )
}
