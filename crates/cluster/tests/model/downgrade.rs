//! A member is lost during a downgrade. etcd rejects new members while a downgrade is enabled, so the operator cancels
//! the downgrade before it replaces the member.

use cluster::snapshot::{Observed, Seen};

use crate::event::{Dice, Event, Setup, draw};
use crate::mutation::Mutation;
use crate::others::Begun;
use crate::story::play;

impl Mutation {
    /// Deliberate mistake: the planner does not see that a downgrade is enabled.
    pub(crate) fn overlooks_a_downgrade(observed: &mut Observed) {
        for seen in observed.statuses.values_mut() {
            if let Seen::Known(status) = seen {
                status.downgrade = None;
            }
        }
    }
}

fn drawn(seed: u64) -> (Setup, Vec<Event>) {
    /// The version 3.5.35, as an index into `VERSIONS`.
    const PREVIOUS: u8 = 2;
    let mut dice = Dice::new(seed ^ 0xd0_3635);
    let setup = Setup {
        size: 3,
        durable: true,
        version: "3.6.16",
        begun: Begun::Here,
        ..draw(seed, false).0
    };
    let mut events = [Event::Round, Event::Tick].repeat(30);
    events.push(Event::Version(PREVIOUS));
    events.extend([Event::Round, Event::Tick].repeat(usize::from(dice.small(12))));
    events.push(Event::LoseDisk(dice.byte()));
    events.extend([Event::Round, Event::Tick].repeat(20));
    (setup, events)
}

#[test]
fn model_detects_operator_that_overlooks_downgrade() {
    let found = (0..100).find(|seed| {
        let (setup, events) = drawn(*seed);
        let broken = |mutation| play(&setup, &events, mutation, false).broken;
        let stuck = broken(Some(Mutation::OverlooksDowngrade));
        stuck.is_some_and(|broken| broken.starts_with("does not converge"))
            && broken(None).is_none()
    });
    println!("OverlooksDowngrade: seed {found:?}");
    assert!(found.is_some());
}
