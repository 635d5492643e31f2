//! Rounds that plan from watch caches (invariant 33). Each kind of object has a cache, and the caches may have
//! different ages. etcd's answers are current.
//!
//! If the plan from the caches contains a step, or if the status would change, the operator reads all objects and plans
//! again. The deliberate mistake in this file executes the plan from the caches.

use cluster::plan::plan;
use cluster::snapshot::Observed;

use crate::event::{Dice, Event, Setup, draw};
use crate::mutation::Mutation;
use crate::read::seconds;
use crate::run::{Fault, Run, listed_voters};
use crate::sent;
use crate::story::{find, play_drawn};
use crate::world::{World, tell};
use crate::writes::Plan;

impl Mutation {
    pub(crate) const ABOUT_CACHES: [Self; 1] = [Self::ActsOnCaches];
}

impl World {
    /// True if the status must report an outage.
    pub(crate) fn is_unavailable(&self, observed: &Observed) -> bool {
        observed.members.known().is_none()
            && observed.cluster_id.is_some()
            && !self.wishes.hibernate
    }

    /// True if the status of this world contains the report on this observation.
    fn is_reported(&self, observed: &Observed) -> bool {
        let voters = listed_voters(observed);
        voters.is_none_or(|voters| voters == self.reported_voters)
            && self.recovery.unavailable_since.is_some() == self.is_unavailable(observed)
    }
}

impl Run {
    /// The caches receive the current objects of some kinds, by the bits of `kinds`. The first events fill all caches.
    pub(crate) fn watch(&mut self, kinds: u8) {
        let mut now = self.world.clone();
        now.telling = false;
        now.story.clear();
        if let Some(old) = self.cache.take().filter(|old| old.lives == now.lives) {
            if kinds & 1 == 0 {
                now.pods = old.pods;
            }
            if kinds & 2 == 0 {
                now.services = old.services;
            }
            if kinds & 4 == 0 {
                now.disks = old.disks;
            }
            if kinds & 8 == 0 {
                (now.shared, now.client_token) = (old.shared, old.client_token);
            }
            // If `kinds` lacks the bit 16, the cache keeps the older EtcdCluster and its status.
            if kinds & 16 == 0 {
                now.object_version = old.object_version;
                (now.intent, now.cluster_id) = (old.intent, old.cluster_id);
                (now.recovery, now.reported_voters) = (old.recovery, old.reported_voters);
                (now.size, now.wishes) = (old.size, old.wishes);
            }
        }
        self.cache = Some(Box::new(now));
    }

    /// A round that plans from the caches first. Returns the executed plan, or the plan with nothing to do.
    pub(crate) fn cached_round(&mut self) -> Option<Plan> {
        let lives = self.world.lives;
        let cache = self.cache.take().filter(|cache| cache.lives == lives);
        let Some(cache) = cache else {
            return self.round(Fault::default());
        };
        let (services, pods) = (cache.read_services(), cache.read_pods());
        let observed = cache.observe_with(services, pods, &self.world);
        let (desired, names) = (cache.desired(), self.world.unused_names());
        let planned = plan(&desired, &observed, &names, seconds(self.world.now));
        let planned = sent::read(planned, &desired, &observed);
        let rests = planned.step.is_empty() && cache.is_reported(&observed);
        self.cache = Some(cache);
        if rests {
            self.rounds += 1;
            return Some(planned);
        }
        if self.mutation != Some(Mutation::ActsOnCaches) {
            return self.round(Fault::default());
        }
        self.rounds += 1;
        self.world.use_names(&names);
        tell!(
            self.world,
            "round {}: the operator acts on its caches",
            self.rounds
        );
        self.world.judge_plan(&observed, &planned, true);
        self.world.memory.seen = self.world.counter;
        self.act(Fault::default(), &observed, &planned);
        Some(planned)
    }
}

/// Generates a run from the seed: an ordinary run with watch caches. Half of the rounds plan from the caches first.
fn drawn(seed: u64, two: bool) -> (Setup, Vec<Event>) {
    let (setup, drawn) = draw(seed, two);
    let mut dice = Dice::new(!seed);
    let often = 1 + dice.below(6);
    let mut events = vec![Event::WatchEvents(u8::MAX)];
    for event in drawn {
        if dice.below(often) == 0 {
            events.push(Event::WatchEvents(dice.byte()));
        }
        events.push(match event {
            Event::Round if dice.below(2) == 0 => Event::CachedRound,
            event => event,
        });
    }
    (setup, events)
}

/// Number of rounds of the test with one operator. The test with two operators has half as many.
const ROUNDS: usize = 20_000;

#[test]
fn invariant_33_stale_caches_keep_invariants() {
    play_drawn(|seed| drawn(seed, false), ROUNDS);
}

#[test]
fn invariant_33_holds_with_concurrent_operators() {
    play_drawn(|seed| drawn(seed, true), ROUNDS / 2);
}

#[test]
fn model_detects_every_mistake_about_stale_caches() {
    find(&Mutation::ABOUT_CACHES, |seed| drawn(seed, false), ROUNDS);
}
