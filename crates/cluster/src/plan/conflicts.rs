//! Resolves conflicts between the phases of a plan. No other module resolves them.
//!
//! 1. **Priority** is the order in which the phases are called. A phase neither reads nor changes the actions of
//!    another phase. If several phases request a change of the members, the plan keeps only the first (invariant 2).
//! 2. **Deferrable work.** A phase whose work can wait does not read the actions of earlier phases. It gets an
//!    [`Earlier`] that summarizes them. Depending on its work, the phase waits while the plan contains any action, a
//!    change of the members, or a restart.
//! 3. **Certificates forbid actions** (invariant 20). [`settle`] removes forbidden actions once, after all other
//!    phases. It removes whole chains, because the actions of a chain depend on each other. It also removes a forbidden
//!    change of the members.
//! 4. **Certificates come first.** [`settle`] puts the certificates of a member before its pod, and before the
//!    annotation `started` on its Service. It deletes the certificates before the Service, because the operator finds
//!    them by the name of the Service.
//! 5. The certificates themselves are the last phase. No action of this phase is removed.

use std::collections::BTreeSet;

use crate::action::{Action, Begins, Change, EtcdCall, Kind, Object, Request};
use crate::plan::certificates::{Keeper, Settled, wait_for_certificates};
use crate::plan::{BLIND, Draft, actions};
use crate::reason::Reason;
use crate::snapshot::Observed;

/// A summary of the actions of earlier phases, for phases whose work can wait.
#[allow(clippy::struct_excessive_bools)] // Each flag is a separate fact.
pub(super) struct Earlier {
    /// True if the earlier phases plan no action.
    pub(super) is_idle: bool,
    /// True if the earlier phases change etcd's members or the leader.
    pub(super) changes_members: bool,
    /// True if the earlier phases add members to etcd.
    pub(super) adds: bool,
    /// Names of the members that the earlier phases remove from etcd.
    pub(super) removed: BTreeSet<String>,
    /// True if the earlier phases take a member out of service, or change the members.
    pub(super) disturbs_members: bool,
    /// True if the earlier phases create or delete a pod.
    pub(super) touches_pods: bool,
}

impl Earlier {
    /// Summarizes a draft. A chain that could not be built counts as an action, because the next plan may build it.
    pub(super) fn of(draft: &Draft) -> Self {
        let of_objects = || draft.chains.iter().flatten();
        let of_etcd = || draft.change.iter().flat_map(|change| &change.chain);
        let deletes_pod = |action: &Action| action.deletes(Kind::Pod).is_some();
        let ends = |action: &Action| deletes_pod(action) || action.changes_image();
        let touches = |action: &Action| deletes_pod(action) || action.creates_pod().is_some();
        let changes_members = draft.change.is_some();
        let removed = of_etcd().filter_map(Action::removes_member);
        Self {
            is_idle: draft.chains.is_empty() && !changes_members && !draft.incomplete,
            changes_members,
            adds: of_etcd().any(Action::adds_member),
            removed: removed.map(str::to_owned).collect(),
            disturbs_members: draft.incomplete || changes_members || of_objects().any(ends),
            touches_pods: draft.incomplete || of_objects().any(touches),
        }
    }
}

impl Draft<'_> {
    /// Requests a change of the members or of the leader. Invariant 2: the plan keeps only the first request. Returns
    /// false for a later request.
    pub(super) fn request_change(&mut self, change: Change, said: String) -> bool {
        if self.change.is_some() {
            return false;
        }
        self.say(said);
        self.change = Some(change);
        true
    }

    /// If an action of the change of the members is forbidden, removes the change from the plan and returns its
    /// actions.
    fn forbid_change(&mut self, forbidden: impl Fn(&Action) -> bool) -> Option<Vec<Action>> {
        let change = self
            .change
            .take_if(|change| change.chain.iter().any(forbidden));
        change.map(|change| change.chain)
    }
}

/// Removes or reorders the actions of the phases before `certificates` where the certificates require it.
pub(super) fn settle(keeper: Option<&Keeper>, draft: &mut Draft) -> Settled {
    let held = hold_back_for_faults(draft);
    let Some(keeper) = keeper else {
        return Settled::default();
    };
    if keeper.cuts_off() {
        // No recovery starts while certificates prevent connections, because the silence of members then does not prove
        // that their data is lost.
        drop_recovery(draft);
    }
    let adds = hold_back_for_authorities(keeper, draft);
    let started = certificates_before_pods(keeper, draft);
    certificates_before_services(keeper, draft);
    Settled {
        started,
        adds,
        held,
        touches_pods: Earlier::of(draft).touches_pods,
    }
}

/// If certificates are invalid, removes the actions that start members or stop serving members. Returns true if
/// certificates prevent starts.
fn hold_back_for_faults(draft: &mut Draft) -> bool {
    let observed = draft.build.observed;
    if !observed.tls.faults.is_empty() {
        drop_recovery(draft);
    }
    let formed = observed.cluster_id.is_some();
    if observed.tls.in_the_way(formed).next().is_none() {
        return false;
    }
    let before = draft.chains.len();
    draft.chains.retain(|chain| {
        let mut actions = chain.iter();
        !actions.any(|action| starts(action, observed) || names_new_members(action))
    });
    let change = draft.forbid_change(|action| starts(action, observed));
    if change.is_some() || draft.chains.len() < before {
        draft.next.clear();
        wait_for_certificates(draft);
    }
    true
}

/// Removes two kinds of actions: the stop of serving members that could not start again, and the addition of members
/// that running members would reject. Returns true if an addition was removed.
fn hold_back_for_authorities(keeper: &Keeper, draft: &mut Draft) -> bool {
    let observed = draft.build.observed;
    let ready = keeper.is_ready();
    let joins = keeper.accepts_new_members();
    let held =
        |action: &Action| !ready && starts(action, observed) || !joins && action.adds_member();
    let before = draft.chains.len();
    draft.chains.retain(|chain| {
        // Chains that create a pod stay. `certificates_before_pods` completes or removes these chains later.
        let begins = |action: &Action| action.creates_pod().is_some();
        chain.iter().any(begins) || !chain.iter().any(held)
    });
    let change = draft.forbid_change(held);
    if change.is_some() || draft.chains.len() < before {
        let text =
            "no member is added or restarted until all members trust the certificate authorities";
        draft.wait(Reason::AuthorityRotating, text, BLIND);
    }
    !joins && change.is_some_and(|change| change.iter().any(Action::adds_member))
}

/// Puts the certificates of a member before its pod. Returns the members that the plan starts.
fn certificates_before_pods(keeper: &Keeper, draft: &mut Draft) -> BTreeSet<String> {
    let mut started = BTreeSet::new();
    let ready = keeper.is_ready();
    let before = draft.chains.len();
    draft.chains.retain_mut(|chain| {
        let pods = chain.iter().enumerate();
        let mut pods = pods.filter_map(|(at, action)| Some((at, action.creates_pod()?)));
        let Some((at, member)) = pods.next() else {
            return true;
        };
        if !ready {
            return false;
        }
        // Certificates come before the patch that sets `started`, so that a rejected certificate leaves no annotation.
        // A new Service comes first, because the operator finds the certificate Secrets by its name.
        let prepares = |action: &Action| match &action.request {
            Request::Create(object) => matches!(object, Object::VolumeClaim(_)),
            Request::Patch(patch) => patch.kind == Kind::Service,
            _ => false,
        };
        let first = chain.iter().position(prepares).unwrap_or(at);
        let issued = keeper.of_member(&member).into_iter();
        chain.splice(first..first, issued.map(actions::certificate));
        started.insert(member);
        true
    });
    if draft.chains.len() < before {
        let text = "members are started when the certificate authorities exist";
        draft.wait(Reason::AuthorityMissing, text, BLIND);
    }
    started
}

/// Deletes the certificates of a member before its Service, because the operator finds them by the name of the Service.
fn certificates_before_services(keeper: &Keeper, draft: &mut Draft) {
    for chain in &mut draft.chains {
        let all = chain.iter().enumerate();
        let mut deleted = all.filter_map(|(at, action)| Some((at, action.deletes(Kind::Service)?)));
        let Some((at, member)) = deleted.next() else {
            continue;
        };
        let discards = keeper.held_of(member);
        let discards =
            discards.map(|(secret, held)| actions::discard_certificate(secret, &held.uid));
        let discards: Vec<Action> = discards.collect();
        chain.splice(at..at, discards);
    }
}

/// Removes the start of a recovery if certificates may be the only reason why members do not answer. A recovery that
/// has already started continues.
fn drop_recovery(draft: &mut Draft) {
    let begins = |action: &Action| begins(action, Begins::Recovery);
    draft.chains.retain(|chain| !chain.iter().any(begins));
}

fn begins(action: &Action, what: Begins) -> bool {
    matches!(&action.request, Request::Record(record) if record.begins == Some(what))
}

/// True if the action starts a member, or requires that a member or its replacement starts later.
fn starts(action: &Action, observed: &Observed) -> bool {
    let serves = |member: &str| {
        let pod = observed.pods.get(member);
        pod.is_some_and(|pod| pod.ready && pod.stays())
    };
    match &action.request {
        Request::Create(Object::Pod(_))
        | Request::Etcd(EtcdCall::AddMember { .. })
        | Request::Resize(_) => true,
        // A serving member is not stopped, because neither the member nor its replacement could start without valid
        // certificates.
        Request::Delete(pod) if pod.kind == Kind::Pod => serves(&pod.name),
        Request::Etcd(EtcdCall::Remove { member, .. }) => serves(member),
        _ => action.changes_image(),
    }
}

/// True if the action names members without objects: a new bootstrap, or the Service of a future member.
fn names_new_members(action: &Action) -> bool {
    match &action.request {
        Request::Create(Object::Service(_)) => action.start.is_none(),
        _ => begins(action, Begins::Bootstrap),
    }
}
