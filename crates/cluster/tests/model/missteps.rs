//! TLS changes while members run and all other faults occur. This file also contains the deliberate mistakes about TLS
//! changes.

use crate::writes::{Chain, Write};
use api::cluster::{TlsPolicy, TlsStatus, peers_of};
use cluster::plan::View;
use cluster::snapshot::{Desired, Kept, Observed, Seen};
use cluster::switch::TlsMode;
use jiff::Timestamp;

use crate::event::{Dice, Event, Setup, draw};
use crate::mutation::Mutation;
use crate::story::{find, play_drawn};
use crate::switch;
use crate::world::World;
use crate::writes::Plan;

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

    /// Deliberate mistakes: the planner gets wrong input about a TLS change.
    pub(crate) fn overlooks_a_switch(self, observed: &mut Observed) {
        let Some(rollout) = &mut observed.tls_rollout else {
            return;
        };
        let at = TlsMode::of(rollout.at.as_ref());
        match self {
            Self::SwitchesWithSomeBehind => rollout.modes.values_mut().for_each(|mode| *mode = at),
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

    /// Deliberate mistakes: a wrong step replaces the planned step.
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
            Self::SwitchesWhileOneIsDown if view.voters().any(|member| !member.serves()) => {
                if let Some(next) = next {
                    planned.step.chains.push(record(next.to.as_ref()));
                }
            }
            Self::RestartsForTlsTogether => {
                let at = TlsMode::of(rollout.at.as_ref());
                for member in view.voters().filter(|member| member.serves()) {
                    let mode = rollout.modes.get(&member.name);
                    let pod = member.pod.filter(|pod| pod.durable && pod.stays());
                    if let Some(pod) = pod.filter(|_| mode.is_some_and(|mode| *mode != at)) {
                        planned.step.chains.push(vec![Write::DeletePod {
                            member: member.name.clone(),
                            uid: pod.uid.clone(),
                        }]);
                    }
                }
            }
            _ => {}
        }
    }
}

/// Generates a run from the seed: an ordinary run with TLS changes. The events have more time between them, because a
/// TLS change takes many rounds.
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

/// Number of rounds of the test with one operator. The test with two operators has half as many.
const ROUNDS: usize = 20_000;

/// Checks invariant 23, and invariant 20 for clients that follow the documented order of a TLS change.
#[test]
fn tls_change_at_any_time_keeps_invariants() {
    play_drawn(|seed| drawn(seed, false), ROUNDS);
}

/// Invariants 11 and 23: a second operator process, which may be suspended at any time, manages the same cluster.
#[test]
fn concurrent_operators_with_tls_change_keep_invariants() {
    play_drawn(|seed| drawn(seed, true), ROUNDS / 2);
}

#[test]
fn model_detects_every_mistake_about_tls_changes() {
    find(&Mutation::ABOUT_TLS, |seed| drawn(seed, false), ROUNDS);
}
