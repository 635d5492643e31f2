//! The planner computes one step from the desired state and the observed state. It performs no I/O, and returns a plan
//! for every input.
//!
//! Each phase returns its part of the plan, a [`Draft`] with actions that [`actions`] builds. A phase does not read the
//! actions of another phase; [`conflicts`] resolves conflicts between phases.
//!
//! The planner never fails: each obstacle is a [`Reason`] with a text for the user. A step may be interrupted at any
//! point, because the next plan depends only on the observed state.

pub(crate) mod actions;
mod adoption;
mod auth;
mod backed_up;
mod blind;
mod bootstrap;
mod certificates;
mod change;
mod compared;
mod concurrent_join;
mod conflicts;
mod deletion;
pub(crate) mod diff;
mod disks;
mod drain;
pub mod effective;
mod ended;
mod evidence;
mod fate;
mod hibernate;
mod identity;
mod issued;
mod joining;
mod kept_volumes;
mod member_objects;
mod membership;
mod objects;
mod pinned;
mod quorum;
mod raft_log;
mod recovery;
mod replaced;
mod retained;
mod roll;
mod second;
mod settings;
mod size;
mod survey;
mod switch;
mod upkeep;
mod urgent;
mod versions;
mod view;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeSet;
use std::time::Duration;

use etcd::ClusterId;
use jiff::Timestamp;

use crate::action::{Action, Chain, Change, Step};
use crate::naming::Names;
use crate::reason::Reason;
use crate::snapshot::{Desired, Intent, Observed, Seen};

use actions::Builder;
pub use actions::{Label, Start, State};
use certificates::{Keeper, Settled};
use conflicts::Earlier;
pub(crate) use joining::is_late_to_serve;
pub use quorum::Quorum;
pub(crate) use quorum::quorum_of;
pub use urgent::urgent;
pub use versions::VersionRules;
pub(crate) use versions::{Course, course, current_version};
pub use view::{Data, Fate, Health, MemberState, View, name_of};

/// Requeue delay while a change is imminent that causes no watch event, such as a promotion or an election.
const SOON: Duration = Duration::from_millis(100);
/// Requeue delay while etcd does not accept the next request yet.
const SHORTLY: Duration = Duration::from_millis(250);
/// Requeue delay while no member answers.
const BLIND: Duration = Duration::from_secs(1);
/// etcd accepts an addition, or the removal of a live voter, only after the voters have been connected to each other
/// for this time (`HealthInterval` in etcd's server). The operator measures the time from the start of each voter's
/// container.
const CONNECTED: Duration = Duration::from_secs(5);
/// Requeue delay while the cluster is healthy or no action is possible. A change in etcd triggers no reconcile, so the
/// operator checks the cluster at this interval.
pub(crate) const STEADY: Duration = Duration::from_secs(10);

/// A reason with a text for the user. It says why a step waits, or describes a problem.
pub type Explanation = runtime::Trouble<Reason>;

/// The step to execute now, the reasons why further steps wait, and the delay until the next reconcile.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The actions to execute now.
    pub step: Step,
    /// Revision at which the operator must compare the members' data before the next step; `None` if the plan needs no
    /// comparison. Each member reads its whole database for a comparison.
    pub asks: Option<i64>,
    /// Description of the step, for the status.
    pub next: Option<String>,
    /// Obstacles that Kubernetes or etcd will remove without help from the user.
    pub waiting_for: Vec<Explanation>,
    /// Problems that the user must know or resolve.
    pub problems: Vec<Explanation>,
    /// Delay until the next reconcile, unless a watch event triggers one earlier.
    pub requeue: Duration,
}

/// The source of new names and tokens for one plan.
struct NewNames<'a> {
    source: &'a dyn Names,
    members: u64,
    tokens: u64,
}

impl NewNames<'_> {
    fn member(&mut self) -> String {
        self.members += 1;
        self.source.member(self.members - 1)
    }

    fn token(&mut self) -> String {
        self.tokens += 1;
        self.source.token(self.tokens - 1)
    }
}

/// The part of a plan that one phase returns. The parts of all phases form the plan.
#[must_use]
struct Draft<'a> {
    build: Builder<'a>,
    chains: Vec<Chain>,
    asks: Option<i64>,
    change: Option<Change>,
    next: Vec<String>,
    waiting_for: Vec<Explanation>,
    problems: Vec<Explanation>,
    requeue: Duration,
    /// True if a chain is missing, because one of its objects cannot be built.
    incomplete: bool,
    /// Names of the members to drain from the client Service.
    drained: BTreeSet<String>,
}

impl<'a> Draft<'a> {
    fn new(build: Builder<'a>) -> Self {
        Self {
            build,
            chains: Vec::new(),
            asks: None,
            change: None,
            next: Vec::new(),
            waiting_for: Vec::new(),
            problems: Vec::new(),
            requeue: STEADY,
            incomplete: false,
            drained: BTreeSet::new(),
        }
    }

    fn chain(&mut self, chain: Chain) {
        self.chains.push(chain);
    }

    /// Adds a chain of actions. If an object of the chain cannot be built, adds the problem instead of the chain.
    fn try_chain(&mut self, chain: Result<Chain, Explanation>) {
        match chain {
            Ok(chain) => self.chain(chain),
            Err(problem) => {
                self.incomplete = true;
                self.add_problem(problem);
            }
        }
    }

    fn join(&mut self, phase: Self) {
        self.chains.extend(phase.chains);
        // Invariant 2: a plan contains at most one change of the members, so later changes are dropped.
        self.change = self.change.take().or(phase.change);
        self.asks = phase.asks.or(self.asks);
        self.next.extend(phase.next);
        self.waiting_for.extend(phase.waiting_for);
        for problem in phase.problems {
            self.add_problem(problem);
        }
        self.requeue = self.requeue.min(phase.requeue);
        self.incomplete |= phase.incomplete;
        self.drained.extend(phase.drained);
    }

    /// Adds a single action that depends on no other action.
    fn add(&mut self, action: Action) {
        self.chain(vec![action]);
    }

    fn say(&mut self, text: impl Into<String>) {
        self.next.push(text.into());
    }

    fn wait(&mut self, reason: Reason, message: impl Into<String>, delay: Duration) {
        self.waiting_for.push(Explanation::new(reason, message));
        self.requeue = self.requeue.min(delay);
    }

    fn problem(&mut self, reason: Reason, message: impl Into<String>) {
        self.add_problem(Explanation::new(reason, message));
    }

    /// Adds a problem, unless the draft already contains it: several chains may lack the same object.
    fn add_problem(&mut self, problem: Explanation) {
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    fn finish(self) -> Plan {
        let step = Step {
            chains: self.chains,
            change: self.change,
        };
        let requeue = match (step.is_empty(), self.incomplete) {
            (true, false) => self.requeue,
            (true, true) => BLIND,
            (false, _) => Duration::ZERO,
        };
        let next = (!self.next.is_empty()).then(|| self.next.join("; "));
        Plan {
            step,
            asks: self.asks,
            next,
            waiting_for: self.waiting_for,
            problems: self.problems,
            requeue,
        }
    }
}

/// Plans the actions to send now. `names` generates the names of new members and the tokens of new clusters.
pub fn plan(desired: &Desired, observed: &Observed, names: &dyn Names, now: Timestamp) -> Plan {
    let build = Builder {
        desired,
        observed,
        now,
    };
    let mut draft = Draft::new(build);
    let mut names = NewNames {
        source: names,
        members: 0,
        tokens: 0,
    };
    if observed.deleting {
        let (deletion, heals) = deletion::hold(build);
        draft.join(deletion);
        if !heals {
            return draft.finish();
        }
    }
    if let Some(restore) = &observed.claimed_by {
        let text = format!(
            "the EtcdRestore with UID {restore} owns this cluster. The operator changes no member until the restore has \
             ended"
        );
        draft.wait(Reason::Restoring, text, BLIND);
        // The operator issues certificates even during the restore, because the pod of the seed, the first member of
        // the restored cluster, waits for them.
        let keeper = Keeper::of(build);
        draft.join(certificates::keep(
            build,
            keeper.as_ref(),
            &Settled::default(),
        ));
        draft.join(issued::keep(build));
        return draft.finish();
    }
    if let Some(problem) = &desired.invalid {
        draft.problem(Reason::InvalidSpec, problem.clone());
        draft.join(certificates::renew(build));
        draft.join(issued::publish(build));
        return draft.finish();
    }
    if desired.paused {
        let text = "spec.paused is true: the operator changes nothing until spec.paused is false";
        draft.wait(Reason::Paused, text, STEADY);
        return draft.finish();
    }
    let (hibernation, hibernates) = hibernate::hibernate(build);
    draft.join(hibernation);
    if hibernates {
        deletion::guard(&mut draft);
        return draft.finish();
    }
    match (observed.cluster_id, &observed.intent) {
        // Invariant 7: a cluster with a recorded ID is never bootstrapped again.
        (Some(cluster_id), Some(intent)) => {
            if let Some(correction) = identity::correct(build, (intent, cluster_id)) {
                draft.join(correction);
                return draft.finish();
            }
            draft.join(formed(build, (intent, cluster_id), &mut names));
        }
        (None, Some(intent)) => draft.join(bootstrap::unformed(build, intent, &mut names)),
        (recorded, None) => draft.join(bootstrap::unrecorded(build, recorded, &mut names)),
    }
    let keeper = Keeper::of(build);
    let settled = conflicts::settle(keeper.as_ref(), &mut draft);
    draft.join(certificates::keep(build, keeper.as_ref(), &settled));
    draft.join(issued::keep(build));
    for fault in &observed.tls.faults {
        draft.problem(fault.code.into(), fault.message.clone());
    }
    deletion::guard(&mut draft);
    draft.finish()
}

/// Plans for a cluster whose ID is recorded in the status.
fn formed<'a>(
    build: Builder<'a>,
    (intent, cluster_id): (&Intent, ClusterId),
    names: &mut NewNames,
) -> Draft<'a> {
    let (desired, observed, now) = build.inputs();
    let mut draft = Draft::new(build);
    let open = recovery::lets_clients_in(observed, intent);
    draft.join(objects::shared_services(build, open));
    draft.join(auth::network(build));
    match &observed.members {
        Seen::Unknown(why) => {
            draft.join(blind::blind(build, (intent, cluster_id), why, names));
        }
        Seen::Known(list) if list.cluster_id != cluster_id => {
            // Invariant 1: the member list of another cluster proves nothing about this cluster, so the operator
            // changes nothing.
            let answered = list.cluster_id;
            let text = format!(
                "the members report cluster ID {answered}, but the status records {cluster_id}: the operator \
                 changes nothing"
            );
            draft.problem(Reason::ForeignCluster, text);
        }
        Seen::Known(list) => {
            let view = View::new(list, (desired, observed, now));
            draft.join(with_quorum(build, &view, (intent, cluster_id), names));
        }
    }
    draft
}

/// Plans the actions for a formed cluster whose quorum answers.
fn with_quorum<'a>(
    build: Builder<'a>,
    view: &View,
    identity: (&Intent, ClusterId),
    names: &mut NewNames,
) -> Draft<'a> {
    let (intent, cluster_id) = identity;
    let mut draft = Draft::new(build);
    draft.join(recovery::settle(build, cluster_id));
    draft.join(objects::budget(build, view));
    draft.join(objects::labels(build, view, identity));
    draft.join(objects::member_services(build, view));
    let kept = kept_volumes::find(build.observed, view);
    draft.join(kept_volumes::settle(build, view, &kept));
    draft.join(objects::leftovers(build, view, &kept));
    if let Some(refusal) = adoption::refuses(build, view.list) {
        draft.join(refusal);
        return draft;
    }
    let refusal = adoption::is_not_granted(build);
    let is_closed = refusal.is_some();
    if let Some(refusal) = refusal {
        draft.join(refusal);
    }
    if !is_closed {
        draft.join(auth::settle(build));
        draft.join(membership::change(build, view, names));
    }
    let earlier = Earlier::of(&draft);
    draft.join(kept_volumes::clear(build, view, &earlier));
    draft.join(ended::clear(build, &view.names()));
    draft.join(membership::start(build, view, identity, &earlier));
    draft.join(switch::settle(build, intent, view, &earlier));
    let earlier = Earlier::of(&draft);
    if !is_closed {
        draft.join(upkeep::keep_up(build, view, &earlier));
    }
    draft.join(disks::grow(build, view));
    draft.join(settings::metadata(build, view));
    draft.join(settings::volume_versions(build, view));
    draft.join(settings::resources(build, view, &Earlier::of(&draft)));
    draft.join(drain::settle(build, view, identity, draft.drained.clone()));
    draft.join(objects::troubles(build, &view.names()));
    draft
}
