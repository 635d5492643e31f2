//! The invariants, checked by a witness who sees the whole world and not only what the operator sees. The
//! numbers are those of docs/architecture.md.

use std::collections::BTreeSet;

use cluster::observed::{Observed, Seen};
use cluster::plan::Plan;
use cluster::write::{Order, Start, State, Write};

use crate::run::said;
use crate::world::World;

const TWO: &str = "two operators";

/// What has to be remembered to judge.
#[derive(Clone, Debug, Default)]
pub(crate) struct Witness {
    /// Members that ever had data.
    ran: BTreeSet<String>,
    /// Tokens whose cluster ID was ever recorded.
    recorded: BTreeSet<String>,
    /// Members that were promoted and not seen healthy since.
    in_flight: Option<u64>,
}

impl Witness {
    /// Invariant 1: unknown is not empty. Without a member list nothing is destroyed and no member changed.
    pub(crate) fn plan_is_careful(observed: &Observed, plan: &Plan, world: &World) {
        if observed.cluster_id.is_none() {
            return;
        }
        let writes = plan.step.orders.iter().flat_map(|order| match order {
            Order::Writes(writes) => writes.clone(),
            Order::Begin { .. } => panic!(
                "invariant 7: a formed cluster is bootstrapped again\n{}",
                said(plan)
            ),
            Order::Reserve { .. } | Order::Recover(_) => Vec::new(),
        });
        let destroys = |write: &Write| {
            matches!(
                write,
                Write::DeletePod { .. } | Write::DeleteDisk { .. } | Write::DeleteService { .. }
            )
        };
        if let Seen::Unknown(_) = observed.members {
            assert!(
                plan.step.change.is_none(),
                "invariant 1: members are changed blindly\n{}",
                said(plan)
            );
            assert!(
                !writes.into_iter().any(|write| destroys(&write)),
                "invariant 1: destroyed blindly\n{}",
                said(plan)
            );
        }
        assert!(world.size >= 1);
    }

    /// Invariants 5, 6 and 10: whose pod is made, and how it begins.
    pub(crate) fn pod_is_created(start: &Start, world: &World) {
        let intended = world
            .intent
            .as_ref()
            .is_some_and(|intent| intent.members.contains(&start.member));
        let listed = world
            .clusters
            .values()
            .any(|cluster| cluster.by_name(&start.member).is_some());
        let known = intended
            || listed
            || world.disks.contains_key(&start.member)
            || world.witness.two_operators();
        assert!(
            known,
            "invariant 10: {} stands nowhere but in memory",
            start.member
        );
        if start.state == State::New {
            assert!(
                intended || world.witness.two_operators(),
                "invariant 6: {} is started as new outside the bootstrap",
                start.member
            );
        }
    }

    /// Invariant 6: nobody starts twice on an empty disk under one name.
    pub(crate) fn starts_empty(&mut self, name: &str, world: &World) {
        let first_time = self.ran.insert(name.to_owned());
        // A second operator that was asleep may start the pod of a member that was removed meanwhile: its ID is
        // no member's, nobody talks to it, and it is cleared away as a leftover.
        let listed = world
            .recorded()
            .is_some_and(|cluster| cluster.by_name(name).is_some());
        let harmless = self.two_operators() && !listed;
        assert!(
            first_time || harmless,
            "invariant 6: {name} is started empty again at {}",
            world.now
        );
    }

    /// Invariant 8 and the point of it all: what was acknowledged is in the log of whoever leads.
    pub(crate) fn no_acknowledged_write_is_lost(&mut self, world: &World) {
        if let (Some(_), Some(intent)) = (world.cluster_id, &world.intent) {
            self.recorded.insert(intent.token.clone());
        }
        let Some(cluster) = world.recorded().filter(|cluster| cluster.serves()) else {
            return;
        };
        let lead = &cluster.members[&cluster.leader.unwrap()].name;
        let has = world.data(lead).map_or(0, |data| data.index);
        assert!(
            has >= cluster.acknowledged,
            "a write is lost: {lead} leads with {has} of {}",
            cluster.acknowledged
        );
        let settled = |id: &u64| {
            cluster
                .members
                .get(id)
                .is_none_or(|member| member.up_since.is_some())
        };
        self.in_flight = self.in_flight.filter(|id| !settled(id));
    }

    /// Judged before a write is applied. `fresh`: nothing moved since the observation it was planned from, and no
    /// other operator is alive.
    pub(crate) fn judge(&mut self, write: &Write, world: &World, fresh: bool) {
        match write {
            Write::RecordIntent {
                intent,
                cluster_id,
                over,
            } if *over == world.object_version.to_string() => {
                self.judge_bootstrap(&intent.token, cluster_id.is_some(), world);
            }
            Write::DeleteDisk { member, .. } | Write::DeletePod { member, .. } => {
                let listed = world
                    .recorded()
                    .filter(|_| world.cluster_id.is_some())
                    .and_then(|all| all.by_name(member));
                let keeps = matches!(write, Write::DeletePod { .. })
                    && world.pods.get(member).is_some_and(|pod| pod.start.durable);
                // Invariants 5 and 8: a member's disk goes when the member has gone, never before.
                assert!(
                    listed.is_none() || keeps || !fresh,
                    "invariant 5: {member} is a member and its disk is deleted"
                );
            }
            Write::AddMember { learner, .. } => Self::judge_addition(*learner, world, fresh),
            Write::Remove { id, .. } => self.judge_removal(id.0, world, fresh),
            Write::Promote { id, .. } => self.judge_promotion(id.0, world, fresh),
            _ => {}
        }
    }

    fn judge_bootstrap(&self, token: &str, found: bool, world: &World) {
        // Invariant 7.
        assert!(
            world.cluster_id.is_none(),
            "invariant 7: a recorded cluster is bootstrapped again"
        );
        let pods = world.pods.values().map(|pod| &pod.start.token);
        let mut tokens = pods.chain(world.disks.values().map(|disk| &disk.token));
        let beside = tokens.find(|other| *other != token && self.recorded.contains(*other));
        assert!(
            found || beside.is_none(),
            "invariant 7: bootstrapped beside {beside:?}"
        );
    }

    fn judge_addition(learner: bool, world: &World, fresh: bool) {
        let Some(cluster) = world.recorded() else {
            return;
        };
        // Invariant 4.
        let old = world.version.starts_with("3.3");
        assert!(learner || old, "invariant 4: a member joins with a vote");
        if fresh {
            // Invariant 5.
            let dead = cluster
                .voters()
                .find(|(_, member)| is_given_up(world, &member.name));
            assert!(
                dead.is_none(),
                "invariant 5: a member is added before {dead:?} is removed"
            );
        }
    }

    fn judge_removal(&mut self, id: u64, world: &World, fresh: bool) {
        let Some(cluster) = world.recorded() else {
            return;
        };
        let Some(member) = cluster.members.get(&id).filter(|_| fresh) else {
            return;
        };
        if member.learner {
            return;
        }
        let stays = |(other, member): &(&u64, &crate::etcd_model::Member)| {
            **other != id && member.up_since.is_some() && !is_given_up(world, &member.name)
        };
        let (healthy, voters) = (
            cluster.voters().filter(stays).count(),
            cluster.voters().count() - 1,
        );
        assert!(
            healthy > voters / 2,
            "invariant 3: {} is removed, {healthy} healthy of {voters} left",
            member.name
        );
        if !is_given_up(world, &member.name) && world.data(&member.name).is_some() {
            // Invariant 5: a member whose disk exists leaves only a cluster that is too large, or because its claim
            // was deleted.
            let asked = world
                .disks
                .get(&member.name)
                .is_some_and(|disk| disk.terminating);
            assert!(
                asked || cluster.members.len() > world.size,
                "invariant 5: {} is removed with its disk there",
                member.name
            );
            assert_ne!(
                cluster.leader,
                Some(id),
                "the leader {} is removed",
                member.name
            );
            self.judge_in_flight("a removal", Some(id), world);
        }
    }

    fn judge_promotion(&mut self, id: u64, world: &World, fresh: bool) {
        let Some(cluster) = world.recorded() else {
            return;
        };
        let Some(member) = cluster.members.get(&id).filter(|_| fresh) else {
            return;
        };
        // Invariant 4.
        assert!(
            member.joined && member.up_since.is_some(),
            "invariant 4: {} votes before it runs",
            member.name
        );
        self.judge_in_flight("a promotion", None, world);
        // Invariant 2.
        let down = cluster.voters().find(|(_, voter)| voter.up_since.is_none());
        assert!(
            down.is_none(),
            "invariant 2: {} is promoted while {down:?} is down",
            member.name
        );
        self.in_flight = Some(id);
    }

    fn judge_in_flight(&self, what: &str, besides: Option<u64>, world: &World) {
        let down = |id: &u64| {
            let member = world.recorded().and_then(|cluster| cluster.members.get(id));
            member.is_some_and(|member| member.up_since.is_none())
        };
        let other = self.in_flight.filter(|id| Some(*id) != besides && down(id));
        assert!(
            other.is_none(),
            "invariant 2: {what} while {other:?} is in flight"
        );
    }

    /// Set while a second operator acts: then only what is true of any history is asserted.
    pub(crate) fn two_operators(&self) -> bool {
        self.recorded.contains(TWO)
    }

    pub(crate) fn forget(&mut self) {
        self.recorded.retain(|token| token == TWO);
    }

    pub(crate) fn a_second_operator_acts(&mut self) {
        self.recorded.insert(TWO.to_owned());
    }
}

/// The member counts as gone: its data is, or cannot be reached for longer than the user waits, or read.
pub(crate) fn is_given_up(world: &World, name: &str) -> bool {
    // Two ticks are the six seconds of `spec.memberReplacement.after` here.
    let away = world
        .lost
        .get(name)
        .is_some_and(|since| world.now >= since + 2);
    is_lost(world, name) || away || world.damaged.contains_key(name)
}

/// The member's data is gone or goes with its pod.
pub(crate) fn is_lost(world: &World, name: &str) -> bool {
    let on_claim = world.disks.get(name).is_some_and(|disk| !disk.terminating);
    let pod = world.pods.get(name);
    let claim = world.disks.contains_key(name);
    !on_claim && !pod.is_some_and(|pod| pod.ends_in.is_none() && (!pod.start.durable || claim))
}
