//! Volumes are lost while pods have them mounted, especially the volume of the seed of a recovery. Kubernetes reports
//! the PVC as `Lost`, and the pod continues until it restarts.

use crate::writes::RecoveryRecord;
use cluster::snapshot::Observed;

use api::cluster::RecoveryPhase;

use crate::event::{Dice, Event, Setup, draw};
use crate::invariants::is_lost;
use crate::mutation::Mutation;
use crate::story::{find, play_drawn};
use crate::world::{World, tell};

/// An event with at least this number selects the newest PVC.
const NEWEST: u8 = 128;

impl World {
    /// The volume of a PVC is lost, and the pod that has mounted it continues to run.
    pub(crate) fn lose_volume(&mut self, which: u8) {
        let mut claims: Vec<(&u64, &String)> = self
            .disks
            .iter()
            .map(|(name, disk)| (&disk.uid, name))
            .collect();
        claims.sort_unstable();
        let at = match which {
            NEWEST.. => claims.len().checked_sub(1),
            _ => usize::from(which).checked_rem(claims.len()),
        };
        let Some(name) = at.map(|at| claims[at].1.clone()) else {
            return;
        };
        self.disks.get_mut(&name).unwrap().lost = true;
        tell!(
            self,
            "the volume of {name} is lost, and the pod that has mounted it continues"
        );
    }

    /// Deletes the data of each lost volume that no running pod has mounted.
    pub(crate) fn close_lost_volumes(&mut self) {
        let pods = &self.pods;
        let closed = |name: &String| pods.get(name).is_none_or(|pod| !pod.running);
        for (name, disk) in &mut self.disks {
            if disk.lost && closed(name) {
                disk.data = None;
            }
        }
    }

    /// True if the member's volume is lost, so that no container can start on it.
    pub(crate) fn has_lost_its_volume(&self, name: &str) -> bool {
        let durable = self.pods.get(name).is_some_and(|pod| pod.start.durable);
        durable && self.disks.get(name).is_some_and(|disk| disk.lost)
    }

    /// The running seed of an abandoned recovery and its survivor; `None` if there is no such seed, or the survivor
    /// does not answer.
    pub(crate) fn seed_given_up(&self) -> Option<(String, String)> {
        let record = self.recovery.record.as_ref();
        let record = record.filter(|record| record.phase == RecoveryPhase::Cancelled)?;
        let seed = self.pods.get(&record.member)?;
        let survivor = &record.survivor;
        let pod = self.pods.get(survivor)?;
        let old = self.clusters.get(&record.from_token)?;
        let survives = pod.shown.addressed
            && pod.ends_in.is_none()
            && self.operator_reaches(survivor)
            && !is_lost(self, survivor)
            && old.running.values().any(|one| one.name == *survivor);
        let goes_on = seed.ends_in.is_none() && seed.start.token == record.token;
        (survives && goes_on).then(|| (record.member.clone(), survivor.clone()))
    }

    /// Checks a recovery after an abandoned recovery: the abandoned seed must not run at the same time as the new seed.
    pub(crate) fn judge_given_up(&mut self, next: &RecoveryRecord) {
        let begins = next.recovery.as_ref();
        let begins = begins.is_some_and(|next| next.phase == RecoveryPhase::InProgress);
        if let Some((member, survivor)) = self.seed_given_up()
            && begins
            && self.memory.fresh
        {
            self.broke(format!(
                "invariant 16: the abandoned seed {member} runs next to another seed, and its survivor {survivor} answers"
            ));
        }
    }
}

impl Mutation {
    /// Deliberate mistakes: the planner gets wrong input about volumes.
    pub(crate) fn mistakes_a_volume(self, observed: &mut Observed) {
        match self {
            Self::TakesLostVolumesForThere => {
                let disks = observed.disks.values_mut();
                disks.for_each(|disk| disk.lost = false);
            }
            Self::ForgetsGivenUpSeeds => {
                let record = observed.recovery.record.as_ref();
                let record = record.filter(|record| record.phase == RecoveryPhase::Cancelled);
                if let Some(pod) = record.and_then(|one| observed.pods.get_mut(&one.member)) {
                    pod.token = Some("unknown".to_owned());
                }
            }
            _ => {}
        }
    }
}

/// Generates a run from the seed: an ordinary run on volumes. Then a majority is lost, a recovery is approved, and
/// volumes are lost while pods have them mounted.
fn drawn(seed: u64) -> (Setup, Vec<Event>) {
    let (mut setup, mut events) = draw(4 * seed, false);
    setup.durable = true;
    let mut dice = Dice::new(seed ^ 0x7_0105);
    events.truncate(usize::from(dice.small(40)));
    let pass = |dice: &mut Dice, most: u8| {
        [Event::Round, Event::Tick].repeat(usize::from(dice.small(most)))
    };
    events.push(Event::Heal);
    events.extend(pass(&mut dice, 30));
    for _ in 0..dice.small(3) {
        events.push(Event::LoseVolume(dice.byte()));
        events.extend(pass(&mut dice, 6));
    }
    for _ in 0..dice.small(6) {
        events.push(Event::LoseDisk(dice.byte()));
    }
    events.extend(pass(&mut dice, 3));
    events.push(Event::Approve);
    for _ in 0..=dice.small(4) {
        events.extend(pass(&mut dice, 9));
        events.push(Event::LoseVolume(dice.byte()));
    }
    (setup, events)
}

const ROUNDS: usize = 40_000;

#[test]
fn loss_of_mounted_volumes_keeps_invariants() {
    play_drawn(drawn, ROUNDS);
}

#[test]
fn lost_volume_model_detects_each_deliberate_mistake() {
    let mistakes = [
        Mutation::TakesLostVolumesForThere,
        Mutation::ForgetsGivenUpSeeds,
    ];
    find(&mistakes, drawn, ROUNDS);
}
