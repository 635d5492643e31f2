//! Rounds in which TLS is switched while members run, beside all other faults, and deliberate mistakes about that.

use api::cluster::{TlsPolicy, TlsStatus, peers_of};
use cluster::plan::View;
use cluster::snapshot::{Desired, Kept, Observed, Seen};
use cluster::switch::Way;
use cluster::write::{Chain, Write};
use jiff::Timestamp;

use crate::event::{Dice, Event, Setup, draw};
use crate::mutation::Mutation;
use crate::sent::Plan;
use crate::story::{find, play_drawn};
use crate::switch;
use crate::world::World;

impl Mutation {
    pub(crate) const ABOUT_TLS: [Self; 8] = [
        Self::SkipsAStage,
        Self::TurnsBackByAJump,
        Self::SwitchesWithSomeBehind,
        Self::SwitchesWhileOneIsDown,
        Self::LeavesPeerUrls,
        Self::RestartsForTlsTogether,
        Self::LeadsClientsByALeap,
        Self::RedirectsBeforeThePort,
    ];

    /// What the planner is told wrongly of a switch.
    pub(crate) fn overlooks_a_switch(self, observed: &mut Observed) {
        let Some(rollout) = &mut observed.tls_rollout else {
            return;
        };
        let at = Way::of(rollout.at.as_ref());
        match self {
            Self::SwitchesWithSomeBehind => rollout.ways.values_mut().for_each(|way| *way = at),
            Self::RedirectsBeforeThePort => {
                let services = observed.services.values_mut();
                services.for_each(|service| service.drifted = false);
                if observed.shared.headless == Kept::Drifted {
                    observed.shared.headless = Kept::AsMade(());
                }
            }
            _ => {}
        }
    }

    /// Another step than the one that was planned.
    pub(crate) fn mistakes_a_switch(
        self,
        world: &World,
        (desired, observed, now): (&Desired, &Observed, Timestamp),
        planned: &mut Plan,
    ) {
        let (Some(rollout), Some(intent)) = (&observed.tls_rollout, &observed.intent) else {
            return;
        };
        let record = |policy: Option<&TlsPolicy>| {
            vec![Write::RecordTls {
                record: Box::new(TlsStatus::new(&intent.token, policy)),
                over: observed.resource_version.clone(),
            }]
        };
        let next = rollout.next.as_ref().filter(|_| rollout.recorded);
        match self {
            Self::SkipsAStage | Self::TurnsBackByAJump => {
                let Some(next) = next.and_then(|next| next.to.as_ref()) else {
                    return;
                };
                let on = peers_of(rollout.at.as_ref()) < next.peers();
                let records = |chain: &&mut Chain| {
                    let is_record = |write: &Write| matches!(write, Write::RecordTls { .. });
                    chain.iter().any(is_record)
                };
                let jump = match self {
                    Self::SkipsAStage if on => Some(TlsPolicy {
                        peer_stage: None,
                        ..next.clone()
                    }),
                    Self::TurnsBackByAJump if !on => next.without_peers(),
                    _ => return,
                };
                for chain in planned.step.chains.iter_mut().filter(records) {
                    *chain = record(jump.as_ref());
                }
            }
            Self::LeavesPeerUrls => {
                let changes = planned.step.change.iter().flat_map(|all| &all.chain);
                let redirects = |write: &Write| matches!(write, Write::UpdatePeerUrls { .. });
                if { changes }.any(redirects)
                    && let Some(next) = next
                {
                    planned.step.change = None;
                    planned.step.chains.push(record(next.to.as_ref()));
                }
            }
            Self::LeadsClientsByALeap if rollout.refused.is_some() => {
                let wanted = world.switch.wanted();
                planned.step.chains.push(record(wanted));
            }
            _ => {}
        }
        let (Seen::Known(list), false) = (&observed.members, desired.hibernate) else {
            return;
        };
        let view = View::new(list, (desired, observed, now));
        match self {
            Self::SwitchesWhileOneIsDown if view.voters().any(|seat| !seat.serves()) => {
                if let Some(next) = next {
                    planned.step.chains.push(record(next.to.as_ref()));
                }
            }
            Self::RestartsForTlsTogether => {
                let at = Way::of(rollout.at.as_ref());
                for seat in view.voters().filter(|seat| seat.serves()) {
                    let way = rollout.ways.get(&seat.name);
                    let pod = seat.pod.filter(|pod| pod.durable && pod.stays());
                    if let Some(pod) = pod.filter(|_| way.is_some_and(|way| *way != at)) {
                        planned.step.chains.push(vec![Write::DeletePod {
                            member: seat.name.clone(),
                            uid: pod.uid.clone(),
                        }]);
                    }
                }
            }
            _ => {}
        }
    }
}

/// The run a seed stands for: one of the others' with switches, and with more time between its events, since a switch
/// takes many rounds.
fn drawn(seed: u64, two: bool) -> (Setup, Vec<Event>) {
    let (mut setup, drawn) = draw(seed, two);
    let mut dice = Dice::new(!seed);
    setup.tls = Some(switch::first(dice.byte(), setup.begun));
    let pass = |rounds: u64| (0..rounds).flat_map(|_| [Event::Round, Event::Tick]);
    let mut events: Vec<Event> = pass(dice.below(12)).collect();
    let often = 4 + dice.below(20);
    for event in drawn {
        if dice.below(often) == 0 {
            events.push(Event::SwitchTls(dice.byte()));
        }
        events.extend(pass(dice.below(4).saturating_sub(1)));
        events.push(event);
    }
    (setup, events)
}

/// So many rounds are played with one operator, and half as many with two.
const ROUNDS: usize = 20_000;

/// Invariant 23, and 20 for clients that follow the documented order.
#[test]
fn tls_switched_at_any_moment_breaks_no_invariant() {
    play_drawn(|seed| drawn(seed, false), ROUNDS);
}

/// Invariants 11 and 23.
#[test]
fn two_operators_and_a_switch_of_tls_break_no_invariant() {
    play_drawn(|seed| drawn(seed, true), ROUNDS / 2);
}

#[test]
fn every_deliberate_mistake_about_a_switch_of_tls_is_found() {
    find(&Mutation::ABOUT_TLS, |seed| drawn(seed, false), ROUNDS);
}
