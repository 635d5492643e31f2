//! The planner: computes one step from the desired and the observed state. Pure, synchronous, total.
//!
//! The phases of [`plan`] add actions, which [`actions`] builds. `conflicts` resolves conflicts between phases.
//!
//! The planner has no client, clock, randomness or log. It never fails: an obstacle is a [`Reason`] with a text, and
//! reaches the user as `waitingFor`, a condition and an Event. A step can be interrupted at any point: the next plan
//! is computed from the observed state alone, and no step depends on a remembered one.

pub(crate) mod actions;
mod adoption;
mod age;
mod auth;
mod blind;
mod bootstrap;
mod certificates;
mod change;
mod compared;
mod concurrent_join;
mod conflicts;
mod disks;
mod drain;
pub mod effective;
mod ended;
mod evidence;
mod fate;
mod hibernate;
mod identity;
mod joining;
mod kept_volumes;
mod member_objects;
mod membership;
mod objects;
mod quorum;
mod recovery;
mod replaced;
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

use jiff::Timestamp;

use crate::action::{Action, Chain, Change, Step};
use crate::naming::Names;
use crate::reason::Reason;
use crate::snapshot::{Desired, Observed, Seen};

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

/// Delay of the requeue while an event is imminent that no watch reports: a promotion, an election.
const SOON: Duration = Duration::from_millis(100);
/// Delay of the requeue while etcd has to change its state.
const SHORTLY: Duration = Duration::from_millis(250);
/// Delay of the requeue while no member answers.
const BLIND: Duration = Duration::from_secs(1);
/// etcd accepts an addition, or the removal of a live voter, only after the voters have been connected for this time
/// (`HealthInterval` in its server). A voter cannot be connected for longer than it runs.
const CONNECTED: Duration = Duration::from_secs(5);
/// Interval of health requests to etcd while the cluster is healthy or no action is possible: etcd sends no events.
pub(crate) const STEADY: Duration = Duration::from_secs(10);

/// A reason with a text for the user: why a step waits, or what is wrong.
pub type Explanation = runtime::Trouble<Reason>;

/// The step to execute now, the reasons why further steps wait, and the delay until the next reconcile.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The actions to execute now.
    pub step: Step,
    /// Revision at which the data of the members must be compared before the next step. Each member reads its whole
    /// database for the comparison, so the operator does not compare on every reconcile.
    pub asks: Option<i64>,
    /// Description of the step.
    pub next: Option<String>,
    /// Obstacles that Kubernetes or etcd will remove without help.
    pub waiting_for: Vec<Explanation>,
    /// Problems that the user must know about or resolve.
    pub problems: Vec<Explanation>,
    /// Delay until the next reconcile if no watch fires earlier.
    pub requeue: Duration,
}

/// A plan under construction.
struct Draft<'a> {
    /// Builds the objects of actions.
    build: Builder<'a>,
    names: &'a dyn Names,
    /// Number of names and tokens taken from `names`.
    members_named: u64,
    tokens_used: u64,
    chains: Vec<Chain>,
    asks: Option<i64>,
    change: Option<Change>,
    next: Vec<String>,
    waiting_for: Vec<Explanation>,
    problems: Vec<Explanation>,
    requeue: Duration,
    /// A chain is missing because an object of it cannot be built.
    incomplete: bool,
    /// Members to remove from the endpoints of the client Service.
    drained: BTreeSet<String>,
}

impl<'a> Draft<'a> {
    fn new(build: Builder<'a>, names: &'a dyn Names) -> Self {
        Self {
            build,
            names,
            members_named: 0,
            tokens_used: 0,
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

    /// Adds actions that are sent in order.
    fn chain(&mut self, chain: Chain) {
        self.chains.push(chain);
    }

    /// Adds actions that are sent in order, or the reason why an object of them cannot be built.
    fn try_chain(&mut self, chain: Result<Chain, Explanation>) {
        match chain {
            Ok(chain) => self.chain(chain),
            Err(problem) => {
                self.incomplete = true;
                if !self.problems.contains(&problem) {
                    self.problems.push(problem);
                }
            }
        }
    }

    /// Adds an action that depends on no other action.
    fn add(&mut self, action: Action) {
        self.chain(vec![action]);
    }

    /// Returns the name of a new member. Each call returns a different name.
    fn new_member(&mut self) -> String {
        self.members_named += 1;
        self.names.member(self.members_named - 1)
    }

    /// Returns the token of a new cluster. Each call returns a different token.
    fn new_token(&mut self) -> String {
        self.tokens_used += 1;
        self.names.token(self.tokens_used - 1)
    }

    fn say(&mut self, text: impl Into<String>) {
        self.next.push(text.into());
    }

    fn wait(&mut self, reason: Reason, message: impl Into<String>, delay: Duration) {
        self.waiting_for.push(Explanation::new(reason, message));
        self.requeue = self.requeue.min(delay);
    }

    fn problem(&mut self, reason: Reason, message: impl Into<String>) {
        self.problems.push(Explanation::new(reason, message));
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

/// Plans the actions to send now. New members and clusters take their names from `names`.
pub fn plan(desired: &Desired, observed: &Observed, names: &dyn Names, now: Timestamp) -> Plan {
    let build = Builder {
        desired,
        observed,
        now,
    };
    let mut draft = Draft::new(build, names);
    if observed.deleting {
        draft.wait(
            Reason::Deleting,
            "the object is being deleted; garbage collection removes what it owns",
            STEADY,
        );
        return draft.finish();
    }
    if let Some(restore) = &observed.claimed_by {
        let text = format!(
            "the EtcdRestore with UID {restore} has claimed this cluster and hands it back when done; its members are \
             not changed until then"
        );
        draft.wait(Reason::Restoring, text, BLIND);
        // The pod of the seed waits for its certificates.
        let keeper = Keeper::of(observed, now, &mut draft);
        certificates::keep(observed, keeper.as_ref(), &Settled::default(), &mut draft);
        return draft.finish();
    }
    if let Some(problem) = &desired.invalid {
        draft.problem(Reason::InvalidSpec, problem.clone());
        certificates::renew(observed, now, &mut draft);
        return draft.finish();
    }
    if desired.paused {
        draft.wait(
            Reason::Paused,
            "spec.paused is true: nothing is changed until it is false",
            STEADY,
        );
        return draft.finish();
    }
    if hibernate::hibernates(desired, observed, &mut draft) {
        return draft.finish();
    }
    match (observed.cluster_id, &observed.intent) {
        // Invariant 7: a cluster with a recorded ID is never bootstrapped again.
        (Some(cluster_id), Some(intent)) => {
            if identity::correct(observed, (intent, cluster_id), &mut draft) {
                return draft.finish();
            }
            formed((desired, observed, now), cluster_id, intent, &mut draft);
        }
        (None, Some(intent)) => bootstrap::unformed((desired, observed, now), intent, &mut draft),
        (recorded, None) => bootstrap::unrecorded(desired, observed, recorded, &mut draft),
    }
    let keeper = Keeper::of(observed, now, &mut draft);
    let settled = conflicts::settle(observed, keeper.as_ref(), &mut draft);
    certificates::keep(observed, keeper.as_ref(), &settled, &mut draft);
    for fault in &observed.tls.faults {
        draft.problem(fault.code.into(), fault.message.clone());
    }
    draft.finish()
}

/// Plans for a cluster whose ID is recorded.
fn formed(
    (desired, observed, now): (&Desired, &Observed, Timestamp),
    cluster_id: etcd::ClusterId,
    intent: &crate::snapshot::Intent,
    draft: &mut Draft,
) {
    let open = recovery::lets_clients_in(observed, intent);
    objects::shared_services(observed, open, draft);
    auth::network(desired, observed, draft);
    match &observed.members {
        Seen::Unknown(why) => {
            blind::blind((desired, observed, now), intent, cluster_id, why, draft);
        }
        Seen::Known(list) if list.cluster_id != cluster_id => {
            // Invariant 1: an answer from another cluster says nothing about this cluster.
            let answered = list.cluster_id;
            draft.problem(
                Reason::ForeignCluster,
                format!("the members answer for cluster {answered}, but this is cluster {cluster_id}: nothing is changed"),
            );
        }
        Seen::Known(list) => {
            let view = View::new(list, (desired, observed, now));
            recovery::settle(observed, cluster_id, now, draft);
            objects::budget(desired, observed, &view, draft);
            objects::labels((&view, now), intent, cluster_id, draft);
            objects::member_services((observed, now), &view, draft);
            let kept = kept_volumes::find(observed, &view);
            kept_volumes::settle((desired, observed, now), &view, &kept, draft);
            objects::leftovers((desired, observed, now), &view, &kept, draft);
            if adoption::refuses(observed, list, draft) {
                return;
            }
            auth::settle(desired, observed, draft);
            membership::change((desired, observed, now), &view, draft);
            let earlier = Earlier::of(draft);
            kept_volumes::clear(desired, &view, &earlier, draft);
            ended::clear(observed, &view.names(), draft);
            let identity = (intent, cluster_id);
            membership::start(desired, observed, &view, identity, &earlier, draft);
            switch::settle(observed, intent, &view, &earlier, draft);
            let earlier = Earlier::of(draft);
            upkeep::keep_up((desired, observed, now), &view, &earlier, draft);
            disks::grow(desired, &view, draft);
            settings::metadata(&view, draft);
            settings::volume_versions((desired, observed), &view, draft);
            settings::resources(&view, &Earlier::of(draft), draft);
            drain::settle((&view, intent, cluster_id), now, draft);
            objects::troubles(observed, &view.names(), now, draft);
        }
    }
}
