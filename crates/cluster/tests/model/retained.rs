//! `spec.deletionPolicy: RetainVolumes`: a user deletes the EtcdCluster and creates it again. The volumes stay, so the
//! new EtcdCluster continues the cluster and loses no acknowledged write (invariants 35 and 36).

use cluster::snapshot::Removal;

use crate::etcd_model::quorum;
use crate::event::{Dice, Event, Setup, draw};
use crate::invariants::is_lost;
use crate::others::Begun;
use crate::story::play_drawn;
use crate::world::World;

impl World {
    /// True if the objects identify the cluster: all have the cluster ID, and PVCs of an earlier cluster are marked.
    pub(crate) fn can_be_recreated(&self) -> bool {
        let token = self.intent.as_ref().map(|intent| &intent.token);
        let pods = self.pods.values();
        let mut pods = pods.map(|pod| (Some(&pod.start.token) == token, pod.cluster_id));
        let disks = self.disks.values();
        let mut disks = disks.map(|disk| {
            let is_marked = matches!(disk.removal, Some(Removal::ByOthers { .. }));
            let is_known = Some(&disk.token) == token || is_marked;
            (is_known, disk.cluster_id)
        });
        let is_identified = |(is_known, id): (bool, Option<_>)| is_known && id.is_some();
        !self.disks.is_empty() && pods.all(is_identified) && disks.all(is_identified)
    }

    /// True if the volumes of a quorum exist, from which the operator must find the cluster again.
    pub(crate) fn retains_quorum(&self) -> bool {
        self.clusters.values().any(|cluster| {
            let voters = cluster.voters();
            let left = voters.filter(|(_, one)| !is_lost(self, &one.name)).count();
            left >= quorum(cluster.members())
        })
    }
}

/// Generates a run from the seed: an ordinary run on volumes, in which the EtcdCluster is deleted several times.
fn drawn(seed: u64) -> (Setup, Vec<Event>) {
    let (setup, mut events) = draw(4 * seed + 3, false);
    let setup = Setup {
        durable: true,
        retains: true,
        version: "3.6.16",
        begun: Begun::Here,
        ..setup
    };
    let mut dice = Dice::new(seed ^ 0x35_0036);
    events.truncate(usize::from(dice.small(30)));
    let pass = |dice: &mut Dice, most: u8| {
        [Event::Round, Event::Tick].repeat(usize::from(dice.small(most)))
    };
    events.push(Event::Heal);
    events.extend(pass(&mut dice, 40));
    for _ in 0..=dice.small(3) {
        events.push(match dice.below(5) {
            0 => Event::LoseDisk(dice.byte()),
            1 => Event::DeleteClaim(dice.byte()),
            2 => Event::Resize(1 + 2 * usize::from(dice.small(3))),
            3 => Event::Crash {
                after: dice.small(12),
            },
            _ => Event::Round,
        });
        events.extend(pass(&mut dice, 6));
        events.push(Event::DeleteCluster);
        events.extend(pass(&mut dice, 30));
    }
    (setup, events)
}

const ROUNDS: usize = 20_000;

#[test]
fn invariant_35_recreated_cluster_keeps_acknowledged_writes() {
    play_drawn(drawn, ROUNDS);
}
