//! The planner: from what is desired and what is observed to one step. Pure, synchronous, total.
//!
//! The phases decide ([`decide`]) and ask for writes; [`actions`] builds the objects, patches and calls that are sent.
//!
//! No client, no clock, no randomness, no log. It never fails: what stands in the way is a [`Reason`] in words,
//! which reaches the user as `waitingFor`, a condition and an Event. Every step may be interrupted anywhere and is
//! planned again from the world alone, so no step is remembered and none has a second half elsewhere.

pub(crate) mod actions;
mod adoption;
mod age;
mod auth;
mod blind;
mod bootstrap;
mod certificates;
mod change;
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
mod nudge;
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
mod together;
mod upkeep;
mod urgent;
mod versions;
mod view;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;

use crate::action::Action;
use crate::naming::Names;
use crate::reason::Reason;
use crate::snapshot::{Desired, Observed, Seen};
use crate::write::{Chain, Change, Step, Write};

use actions::Builder;
use certificates::{Keeper, Settled};
pub(crate) use joining::is_late_to_serve;
pub use quorum::Quorum;
pub(crate) use quorum::quorum_of;
pub use urgent::urgent;
pub use versions::VersionRules;
pub(crate) use versions::{Course, course, current_version};
pub use view::{Data, Fate, Health, MemberState, View, name_of};

/// How soon to look again while something is about to happen that no watch tells: a promotion, an election.
const SOON: Duration = Duration::from_millis(100);
/// How soon to look again while etcd has to make up its mind.
const SHORTLY: Duration = Duration::from_millis(250);
/// How soon to look again while nothing answers.
const BLIND: Duration = Duration::from_secs(1);
/// etcd takes an addition, or the removal of a live voter, when the voters have been connected for so long
/// (`HealthInterval` in its server); they cannot be connected for longer than they run.
const CONNECTED: Duration = Duration::from_secs(5);
/// How often etcd is asked for its health while all is well or nothing can be done: it sends no events.
pub(crate) const STEADY: Duration = Duration::from_secs(10);

/// Why something does not happen, or what is wrong, with a sentence for people.
pub type Explanation = runtime::Trouble<Reason>;

/// What to do now, why not more, and when to look again. A plan consists of actions; until they are built, it consists
/// of the writes that the phases ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan<T = Action> {
    /// To be done now.
    pub step: Step<T>,
    /// The revision at which the members' data are to be compared before more can be planned: each member reads its
    /// whole database for that, so it is not part of every look.
    pub asks: Option<i64>,
    /// The step in words.
    pub next: Option<String>,
    /// What is waited for; Kubernetes or etcd will bring it about.
    pub waiting_for: Vec<Explanation>,
    /// What the user has to know or to do something about.
    pub problems: Vec<Explanation>,
    /// When to look again if no watch fires before.
    pub requeue: Duration,
}

/// A plan in the making.
struct Draft<'a> {
    names: &'a dyn Names,
    /// The numbers of names and tokens that the draft uses.
    members_named: u64,
    tokens_used: u64,
    chains: Vec<Chain>,
    asks: Option<i64>,
    change: Option<Change>,
    next: Vec<String>,
    waiting_for: Vec<Explanation>,
    problems: Vec<Explanation>,
    requeue: Duration,
    /// The members that new clients are not to reach.
    drained: BTreeSet<String>,
}

impl<'a> Draft<'a> {
    fn new(names: &'a dyn Names) -> Self {
        Self {
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
            drained: BTreeSet::new(),
        }
    }

    /// Writes that are sent one after the other.
    fn chain(&mut self, chain: Chain) {
        self.chains.push(chain);
    }

    /// A write that depends on no other one.
    fn write(&mut self, write: Write) {
        self.chain(vec![write]);
    }

    /// The name of a new member. Each call gives another name.
    fn new_member(&mut self) -> String {
        self.members_named += 1;
        self.names.member(self.members_named - 1)
    }

    /// The token of a new cluster. Each call gives another token.
    fn new_token(&mut self) -> String {
        self.tokens_used += 1;
        self.names.token(self.tokens_used - 1)
    }

    fn say(&mut self, text: impl Into<String>) {
        self.next.push(text.into());
    }

    fn wait(&mut self, reason: Reason, message: impl Into<String>, look_again: Duration) {
        self.waiting_for.push(Explanation::new(reason, message));
        self.requeue = self.requeue.min(look_again);
    }

    fn problem(&mut self, reason: Reason, message: impl Into<String>) {
        self.problems.push(Explanation::new(reason, message));
    }

    fn finish(self) -> Plan<Write> {
        let step = Step {
            chains: self.chains,
            change: self.change,
        };
        let requeue = if step.is_empty() {
            self.requeue
        } else {
            Duration::ZERO
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

/// The actions to send now. New members and clusters take their names from `names`.
pub fn plan(desired: &Desired, observed: &Observed, names: &dyn Names, now: Timestamp) -> Plan {
    let builder = Builder {
        desired,
        observed,
        now,
    };
    builder.plan(decide(desired, observed, names, now))
}

/// Decides what to do now.
pub fn decide(
    desired: &Desired,
    observed: &Observed,
    names: &dyn Names,
    now: Timestamp,
) -> Plan<Write> {
    let mut draft = Draft::new(names);
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
        // The seed's pod waits for its certificates.
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
    nudge::slow_starts(observed, now, &mut draft);
    match (observed.cluster_id, &observed.intent) {
        // Invariant 7: once a cluster ID is recorded, no way leads back to a bootstrap.
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

/// A cluster whose ID is recorded.
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
            // Invariant 1: an answer from another cluster is no answer about this one.
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
            kept_volumes::clear(desired, &view, draft);
            ended::clear(observed, &view.names(), draft);
            membership::start(desired, observed, &view, intent, cluster_id, draft);
            switch::settle(observed, intent, &view, draft);
            upkeep::keep_up((desired, observed, now), &view, draft);
            disks::grow(desired, &view, draft);
            settings::metadata(&view, draft);
            settings::volume_versions((desired, observed), &view, draft);
            settings::resources(&view, draft);
            drain::settle((&view, intent, cluster_id), now, draft);
            objects::troubles(observed, &view.names(), now, draft);
        }
    }
}
