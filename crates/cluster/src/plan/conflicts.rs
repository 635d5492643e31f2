//! Conflicts between the phases of a plan. Only this module resolves them.
//!
//! 1. **Priority** is the order in which the phases are called. A phase returns its actions. It neither sees nor
//!    changes the actions of another phase.
//!    At most one phase changes the members (invariant 2): the first that requests it.
//! 2. **Deferrable work.** A phase whose work can wait does not read the actions of earlier phases. It gets them as
//!    [`Earlier`], which says what it gives way to: any action, a change of the members, or a member that is taken out
//!    of service.
//! 3. **Certificates forbid** (invariant 20). [`settle`] removes forbidden actions once, after all other phases. It
//!    removes whole chains, because the mark on a Service announces the pod of the same chain, and it removes the
//!    membership change.
//! 4. **Certificates come first.** [`settle`] puts the certificates of a member before its pod and before the mark on
//!    its Service, and deletes them before the Service that is needed to find them.
//! 5. The certificates themselves are the last phase. Nothing is removed from it.

use std::collections::BTreeSet;

use crate::action::{Action, Begins, Change, EtcdCall, Kind, Object, Request};
use crate::certificates::CertificateWrite;
use crate::plan::certificates::{Keeper, Settled, wait_for_certificates};
use crate::plan::{BLIND, Draft, actions};
use crate::reason::Reason;
use crate::snapshot::Observed;

/// The work of earlier phases, to which deferrable work gives way.
#[allow(clippy::struct_excessive_bools)] // Each is a question of another phase.
pub(super) struct Earlier {
    /// Nothing is sent.
    pub(super) is_idle: bool,
    /// The members or the leader are changed.
    pub(super) changes_members: bool,
    /// Members are added to etcd.
    pub(super) adds: bool,
    /// The members that are removed from etcd.
    pub(super) removed: BTreeSet<String>,
    /// A member is taken out of service, or the members are changed.
    pub(super) disturbs_members: bool,
    /// A pod is created or deleted.
    pub(super) touches_pods: bool,
}

impl Earlier {
    /// An action that cannot be built counts as well: its obstacle may be gone in the next plan.
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
    /// Requests a change of the members or of the leader. Invariant 2: the first request counts.
    pub(super) fn request_change(&mut self, change: Change, said: String) -> bool {
        if self.change.is_some() {
            return false;
        }
        self.say(said);
        self.change = Some(change);
        true
    }

    /// Removes the membership change if one of its actions is forbidden, and returns it.
    fn forbid_change(&mut self, forbidden: impl Fn(&Action) -> bool) -> Option<Vec<Action>> {
        let change = self
            .change
            .take_if(|change| change.chain.iter().any(forbidden));
        change.map(|change| change.chain)
    }
}

/// Applies the restrictions of the certificates to the actions of all other phases.
pub(super) fn settle(keeper: Option<&Keeper>, draft: &mut Draft) -> Settled {
    let held = hold_back_for_faults(draft);
    let Some(keeper) = keeper else {
        return Settled::default();
    };
    if keeper.cuts_off() {
        // If members reject the operator's certificate, their silence proves no lost quorum. Members that reject each
        // other's certificates have lost no data.
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

/// Starts no member with invalid certificates, and stops no serving member because a Secret became invalid. Returns
/// whether certificates block starts.
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

/// Stops no serving member that could not be restarted, and adds no member that the others would reject. Returns
/// whether an addition was removed.
fn hold_back_for_authorities(keeper: &Keeper, draft: &mut Draft) -> bool {
    let observed = draft.build.observed;
    let ready = keeper.is_ready();
    let joins = keeper.accepts_new_members();
    let held =
        |action: &Action| !ready && starts(action, observed) || !joins && action.adds_member();
    let before = draft.chains.len();
    draft.chains.retain(|chain| {
        // A start waits for its certificates, and is removed together with them.
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

/// Creates the certificates of a member before its pod. Returns the members that are started.
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
        // The certificates precede the mark that a pod may exist: a rejected certificate leaves no mark. A new
        // Service precedes them, because the operator finds the Secrets by it.
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

/// Deletes the certificates of a member before its Service, which is needed to find them.
fn certificates_before_services(keeper: &Keeper, draft: &mut Draft) {
    for chain in &mut draft.chains {
        let all = chain.iter().enumerate();
        let mut deleted = all.filter_map(|(at, action)| Some((at, action.deletes(Kind::Service)?)));
        let Some((at, member)) = deleted.next() else {
            continue;
        };
        let discards = keeper.held_of(member).map(|(secret, held)| {
            actions::certificate(CertificateWrite::Discard {
                secret: secret.clone(),
                uid: held.uid.clone(),
            })
        });
        let discards: Vec<Action> = discards.collect();
        chain.splice(at..at, discards);
    }
}

/// Starts no recovery if certificates may be the only reason for the silence of members. A recovery in progress
/// continues.
fn drop_recovery(draft: &mut Draft) {
    let begins = |action: &Action| begins(action, Begins::Recovery);
    draft.chains.retain(|chain| !chain.iter().any(begins));
}

fn begins(action: &Action, what: Begins) -> bool {
    matches!(&action.request, Request::Record(record) if record.begins == Some(what))
}

/// Whether an action starts a member, or leads to the start of one.
fn starts(action: &Action, observed: &Observed) -> bool {
    let serves = |member: &str| {
        let pod = observed.pods.get(member);
        pod.is_some_and(|pod| pod.ready && pod.stays())
    };
    match &action.request {
        Request::Create(Object::Pod(_))
        | Request::Etcd(EtcdCall::AddMember { .. })
        | Request::Resize(_) => true,
        // A serving member is not stopped for a replacement that could not start.
        Request::Delete(pod) if pod.kind == Kind::Pod => serves(&pod.name),
        Request::Etcd(EtcdCall::Remove { member, .. }) => serves(member),
        _ => action.changes_image(),
    }
}

/// Whether an action uses names of members without objects: a new bootstrap, or the Service of a future member. The
/// record of a rediscovered cluster names existing members.
fn names_new_members(action: &Action) -> bool {
    match &action.request {
        Request::Create(Object::Service(_)) => action.start.is_none(),
        _ => begins(action, Begins::Bootstrap),
    }
}
