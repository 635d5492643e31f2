//! After the faults stop, the cluster converges to the spec, or the operator reports why it cannot.

use cluster::reason::Reason;
use cluster::snapshot::{Kept, Removal};
use etcd::ClusterId;

use crate::etcd_model::voters;
use crate::invariants::is_lost;
use crate::others::is_elsewhere;
use crate::run::{Fault, Run, said};
use crate::writes::Plan;

/// Number of rounds within which a cluster must converge after the last fault, without TLS changes and new CAs.
const ROUNDS: usize = 450;

impl crate::world::World {
    /// Number of rounds within which the cluster must converge. TLS changes and new CAs restart all members several
    /// times, and take more rounds.
    fn patience(&self) -> usize {
        if self.plays_tls() || self.plays_authorities() {
            6 * ROUNDS
        } else {
            ROUNDS
        }
    }
}

impl Run {
    /// Stops the faults and the second operator, and checks that the cluster converges or the operator reports why not.
    pub(crate) fn converges(&mut self) {
        if self.world.switch.untold {
            return;
        }
        self.world.heal();
        self.world.be_content();
        self.world.want_what_runs();
        self.second = None;
        let mut last = None;
        for _ in 0..self.world.patience() {
            if self.broken().is_some() || self.world.switch.untold {
                return;
            }
            // `want_what_runs` corrects the version in the spec, because the operator may reject the version of the
            // user.
            self.world.want_what_runs();
            self.world.tidy_by_hand();
            self.world.give_in();
            let plan = if self.cache.is_some() {
                self.watch(u8::MAX);
                self.cached_round()
            } else {
                self.round(Fault::default())
            };
            if let Some(plan) = plan {
                if plan.step.is_empty() && self.rests(&plan) {
                    return;
                }
                last = Some(plan);
            }
            self.world.tick();
        }
        let text = last.as_ref().map(said).unwrap_or_default();
        self.world.broke(format!(
            "does not converge within {} rounds: {text}",
            self.world.patience()
        ));
    }

    /// True if the cluster has converged, or if the operator reports why it cannot converge.
    fn rests(&mut self, plan: &Plan) -> bool {
        if !self.world.late.is_empty() {
            return false;
        }
        if self.world.deleting {
            // Invariant 41: without a quorum, the deletion waits for a person.
            let mut waits = plan.waiting_for.iter();
            let waits = waits.any(|wait| wait.reason == Reason::AwaitingBackup);
            return self.world.guarded && waits && !self.world.can_come_back();
        }
        if self.is_converged() {
            return true;
        }
        let says = |reason| plan.problems.iter().any(|problem| problem.reason == reason);
        // Invariant 36: if the operator reports `IdentityUnknown`, the remaining volumes must not form a quorum.
        if self.world.intent.is_none() && says(Reason::IdentityUnknown) && self.world.setup.retains
        {
            return !self.world.retains_quorum();
        }
        if self.world.is_given_up_by_others(plan) {
            return true;
        }
        if self.world.recovers_by_itself() && !self.is_converged() {
            return false;
        }
        // The operator waits for a person if the status was deleted and a second operator was active. The operator then
        // cannot decide which of the two recorded clusters is the right one.
        let memory = &self.world.memory;
        if memory.thrown && memory.second && says(Reason::IdentityUnknown) {
            return true;
        }
        let serves = self
            .world
            .recorded()
            .is_some_and(|cluster| cluster.serving().is_some());
        if serves || self.world.can_come_back() {
            return false;
        }
        if !says(Reason::QuorumLost) && !self.looks_recoverable() {
            let text = said(plan);
            self.world
                .broke(format!("a lost quorum is not reported: {text}"));
        }
        true
    }

    /// True if the operator must assume that a quorum of the voters can return: the volumes of a quorum exist, with any
    /// content and on any node. The operator knows the voters from the status and from the members' lists, which may
    /// differ.
    fn looks_recoverable(&self) -> bool {
        let left = |names: &mut dyn Iterator<Item = &String>| {
            let (all, left) = names.fold((0, 0), |(all, left), name| {
                (all + 1, left + usize::from(!is_lost(&self.world, name)))
            });
            left > all / 2 || all == 0
        };
        let cluster = self.world.recorded();
        let known = |name: &String| cluster.is_some_and(|all| all.by_name(name).is_some());
        if self.world.former().is_some() && !self.world.reported_voters.iter().any(known) {
            return true; // The status still lists the members of the cluster before the recovery.
        }
        // The list of every member counts, because a member without a connection to the leader may have an outdated
        // list.
        let lists = cluster.into_iter().flat_map(|all| {
            let token = self
                .world
                .intent
                .as_ref()
                .map_or("", |intent| intent.token.as_str());
            self.world
                .all_data(token)
                .map(|(_, data)| voters(&all.configs[data.config]))
        });
        let mut lists = lists.map(|list| left(&mut list.map(|(_, member)| &member.name)));
        left(&mut self.world.reported_voters.iter()) || lists.any(|left| left)
    }

    fn is_converged(&self) -> bool {
        let world = &self.world;
        let Some(cluster) = world.recorded() else {
            return false;
        };
        let members = cluster.members();
        let listed = |name: &String| cluster.by_name(name).is_some();
        // Objects of another cluster do not prevent convergence, because the operator does not delete them.
        let foreign = |name: &String| {
            let pod = world.pods.get(name).and_then(|pod| pod.cluster_id);
            let disk = world.disks.get(name).and_then(|disk| disk.cluster_id);
            let other = |id: ClusterId| {
                Some(id) != world.cluster_id && world.former() != Some(&id.to_string())
            };
            [pod, disk].into_iter().flatten().any(other)
        };
        let known = |name: &String| listed(name) || foreign(name);
        world.cluster_id.is_some()
            && members.len() == world.size
            && members
                .iter()
                .all(|(id, member)| !member.learner && cluster.is_up(*id))
            && members.values().all(|member| {
                world.pods.contains_key(&member.name) && world.services.contains_key(&member.name)
            })
            && world.is_content()
            && world.is_all_ours()
            && world.has_wanted_volumes()
            && world
                .pods
                .keys()
                .filter(|name| !is_elsewhere(name))
                .all(known)
            && world.services.keys().all(known)
            && world.disks.iter().all(|(name, disk)| {
                // Invariant 25: if other software removed a majority of the voters, their volumes may remain, because a
                // person decides about these volumes.
                let kept = matches!(disk.removal, Some(Removal::ByOthers { majority: true, .. }));
                known(name) || kept
            })
            && world.runs_what_is_wanted()
            && world.talks_as_wanted()
            && world.shared.client == Kept::AsMade(true)
            && world.shared.headless == Kept::AsMade(())
            && world.shared.budget == Kept::AsMade(world.size / 2 + 1)
    }
}
