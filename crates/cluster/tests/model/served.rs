//! A cluster of one member. The minor release that the user requests may have no image. The pod is lost at any moment,
//! and the user sets the version back (invariant 30).

use cluster::snapshot::{Observed, Trouble};

use crate::event::{Dice, Event, Setup, draw};
use crate::mutation::Mutation;
use crate::others::Begun;
use crate::story::{find, play, play_drawn};

impl Mutation {
    /// Deliberate mistakes: the planner gets wrong input about the version that last served the data on a volume.
    pub(crate) fn mistakes_a_served_version(self, observed: &mut Observed) {
        for (name, disk) in &mut observed.disks {
            let answer = observed.statuses.get(name).and_then(|seen| seen.known());
            match (self, observed.pods.get_mut(name)) {
                (Self::ForgetsWhatServed, _) => disk.served = None,
                (Self::GoesBackUnproven, Some(pod))
                    if disk.served.is_some() && answer.is_none() =>
                {
                    pod.trouble = Some(Trouble::Image("silent".to_owned()));
                    (pod.running, pod.running_since, pod.restarts) = (false, None, 0);
                    (pod.ready, pod.changed) = (false, None);
                }
                _ => {}
            }
        }
    }
}

fn drawn(seed: u64) -> (Setup, Vec<Event>) {
    /// The versions that the spec requests, as indexes into `VERSIONS`: 3.6.999, which has no image, and 3.6.16.
    const NEXT: [u8; 3] = [6, 6, 4];
    /// The first version of the cluster (3.5.35), as an index into `VERSIONS`.
    const FIRST: u8 = 2;
    let mut dice = Dice::new(seed ^ 0x30_0030);
    let setup = Setup {
        size: 1,
        durable: true,
        version: "3.5.35",
        begun: Begun::Here,
        ..draw(seed, false).0
    };
    let mut events = [Event::Round, Event::Tick].repeat(20);
    for _ in 0..=dice.small(4) {
        events.push(match dice.below(4) {
            0 => Event::Version(FIRST),
            _ => Event::Version(NEXT[usize::from(dice.small(3))]),
        });
        events.extend([Event::Round, Event::Tick].repeat(usize::from(dice.small(4))));
        // Time passes without reconciles, so the operator does not notice that the member starts.
        events.extend([Event::Tick].repeat(usize::from(dice.small(6))));
        events.push(match dice.below(5) {
            0 | 1 => Event::DeletePod(0),
            2 => Event::LosePod(0),
            3 => Event::ApiAway { ticks: 3 },
            _ => Event::Deafen,
        });
        events.push(Event::Version(dice.small(7)));
        events.extend([Event::Round, Event::Tick].repeat(usize::from(dice.small(4))));
        events.push(Event::Heal);
    }
    (setup, events)
}

const ROUNDS: usize = 20_000;

#[test]
fn invariant_30_holds_for_sole_member_with_missing_images() {
    play_drawn(drawn, ROUNDS);
}

#[test]
fn model_detects_rollback_after_next_version_may_have_run() {
    find(&[Mutation::GoesBackUnproven], drawn, ROUNDS);
}

/// Without the record of the served version, a cluster of one member stays forever on a version that has no image.
#[test]
fn model_detects_operator_that_forgets_served_version() {
    let found = (0..100).find(|seed| {
        let (setup, events) = drawn(*seed);
        let forgets = play(&setup, &events, Some(Mutation::ForgetsWhatServed), false);
        let keeps = || play(&setup, &events, None, false).broken;
        forgets
            .broken
            .is_some_and(|broken| broken.starts_with("does not converge"))
            && keeps().is_none()
    });
    println!("ForgetsWhatServed: seed {found:?}");
    assert!(found.is_some());
}
