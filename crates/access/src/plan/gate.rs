//! Decides whether the operator may change a role or a user in etcd.
//!
//! Invariant 43: the operator changes only roles and users that the status of the object has recorded. The operator
//! records a role or a user only if etcd does not have it yet, or if the object has `spec.adopt: true`.

use api::access::{AccessDeletionPolicy, OwnedStatus};
use api::names::FINALIZER_ACCESS;
use api::problem::summary;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

use super::{Call, Plan, Record, Step};
use crate::object::AccessObject;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Cluster, ClusterFacts, EtcdFacts, Rival};

/// The properties of a role or a user in etcd that decide about its ownership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    Missing,
    Exists {
        /// True if the spec contains all permissions of the role, or all roles of the user. The operator may have
        /// created such a role or user for this object before it was interrupted.
        is_partial: bool,
        /// True for a user with the role `root`.
        is_root: bool,
    },
}

/// The result of [`admit`] if the operator may change etcd.
pub(super) struct Admitted<'a> {
    /// The record for the status. It differs from the current record if the EtcdCluster was restored, or was created
    /// again with the data of the same etcd cluster.
    pub(super) record: Record,
    pub(super) etcd: &'a EtcdFacts,
}

/// Fails with a plan if the operator must not change etcd yet: the plan waits, sets the finalizer, or records the
/// ownership. `refuses` is the additional check for a role, or for a user.
pub(super) fn admit<'a, K: AccessObject>(
    object: &K,
    (cluster, rivals): (&'a Cluster, &[Rival]),
    entry: Result<Entry, &Trouble>,
    refuses: impl FnOnce(&ClusterFacts, &EtcdFacts) -> Option<Trouble>,
) -> Result<Admitted<'a>, Box<Plan>> {
    let problems = object.problems();
    if !problems.is_empty() {
        return Err(Plan::waits(Reason::InvalidSpec, summary(&problems)).into());
    }
    if let Some(owned) = object
        .owned()
        .filter(|owned| owned.cluster != object.cluster())
    {
        let field = "spec.etcdCluster.name";
        return Err(moved(object, field, object.cluster(), owned).into());
    }
    let facts = present(object, cluster)?;
    if facts.is_deleting {
        let text = format!("EtcdCluster {} is being deleted", object.cluster());
        return Err(Plan::waits(Reason::ClusterDeleting, text).into());
    }
    let owned = object.owned().filter(|owned| facts.matches(owned));
    if let Some(owned) = owned.filter(|owned| owned.name != object.etcd_name()) {
        return Err(moved(object, K::NAME_FIELD, object.etcd_name(), owned).into());
    }
    if let Some(rival) = preferred(object, owned, rivals) {
        let mut plan = Plan::waits(
            Reason::NameConflict,
            format!(
                "{} {rival} already manages the {word} {} of EtcdCluster {}: delete one of the two objects, or choose \
                 another name in {}",
                K::kind(&()),
                object.etcd_name(),
                object.cluster(),
                K::NAME_FIELD,
                word = K::WORD,
            ),
        );
        plan.record = Record::Forget;
        return Err(plan.into());
    }
    if !facts.has_auth {
        let text = format!(
            "EtcdCluster {} has no spec.auth, so the operator has no user to log in with: set spec.auth.secret \
             (docs/users.md)",
            object.cluster()
        );
        return Err(Plan::waits(Reason::AuthNotConfigured, text).into());
    }
    let held = hold(object.cluster(), facts);
    let etcd = facts.etcd.as_ref().map_err(Clone::clone);
    let etcd = held.map_or(etcd, Err).map_err(Plan::new)?;
    if let Some(trouble) = refuses(facts, etcd) {
        return Err(Plan::new(trouble).into());
    }
    let entry = entry.map_err(|trouble| Plan::new(trouble.clone()))?;
    if !has_finalizer(object) {
        let text = "setting the finalizer of the object";
        return Err(Plan::step(Step::SetFinalizer(true), text).into());
    }
    let record = ownership(object, facts, owned, entry)?;
    Ok(Admitted { record, etcd })
}

/// Invariant 43: the ownership with which the operator may change etcd, or the plan that first records the ownership in
/// the status.
fn ownership<K: AccessObject>(
    object: &K,
    facts: &ClusterFacts,
    owned: Option<&OwnedStatus>,
    entry: Entry,
) -> Result<Record, Box<Plan>> {
    let (name, cluster) = (object.etcd_name(), object.cluster());
    let wanted = |created: bool| OwnedStatus {
        name: name.to_owned(),
        cluster: cluster.to_owned(),
        cluster_uid: facts.uid.clone(),
        cluster_id: facts.cluster_id.clone().unwrap_or_default(),
        created,
    };
    let recorded = |created: bool| {
        let text = format!("recording the {} {name} in the status", K::WORD);
        let mut plan = Plan::waits(Reason::InProgress, text);
        plan.record = Record::Owned(wanted(created));
        Box::new(plan)
    };
    let is_confirmed = owned.is_some_and(|owned| owned.created);
    match entry {
        Entry::Missing if owned.is_none() => Err(recorded(false)),
        Entry::Exists { is_root: true, .. } if !is_confirmed => Err(Box::new(Plan::waits(
            Reason::RootUser,
            format!(
                "the {} {name} of EtcdCluster {cluster} has the role root, so the operator does not take it over: \
                 choose another name in {}, or run: etcdctl user revoke-role {name} root",
                K::WORD,
                K::NAME_FIELD,
            ),
        ))),
        Entry::Exists { .. } if !is_confirmed && object.adopts() => Err(recorded(true)),
        Entry::Exists {
            is_partial: true, ..
        } if owned.is_some() && !is_confirmed => Err(recorded(true)),
        Entry::Exists { .. } if !is_confirmed => {
            let mut plan = Plan::waits(
                Reason::AlreadyExists,
                format!(
                    "the {word} {name} already exists in EtcdCluster {cluster}, and {} {} has not created it: set \
                     spec.adopt to true if the operator may replace it, or choose another name in {}",
                    K::kind(&()),
                    object.name_any(),
                    K::NAME_FIELD,
                    word = K::WORD,
                ),
            );
            plan.record = Record::Forget;
            Err(plan.into())
        }
        Entry::Missing | Entry::Exists { .. } => {
            let wanted = wanted(is_confirmed);
            Ok(if owned == Some(&wanted) {
                Record::Keep
            } else {
                Record::Owned(wanted)
            })
        }
    }
}

/// Plans the deletion of an object. `delete` is the call that deletes its role or user in etcd.
///
/// If the etcd cluster with the role or the user no longer exists or is being deleted, the plan removes the finalizer
/// and changes nothing in etcd.
pub(super) fn deletion<K: AccessObject>(
    object: &K,
    (cluster, rivals): (&Cluster, &[Rival]),
    entry: Result<Entry, &Trouble>,
    delete: Call,
) -> Plan {
    if !has_finalizer(object) {
        return Plan::waits(Reason::InProgress, "the object is being deleted");
    }
    let release = || Plan::step(Step::SetFinalizer(false), "removing the finalizer");
    let Some(owned) = object.owned() else {
        return release();
    };
    match object.policy() {
        Some(AccessDeletionPolicy::Retain) => return release(),
        Some(AccessDeletionPolicy::Unknown(_)) => {
            return Plan::waits(Reason::InvalidSpec, summary(&object.problems()));
        }
        Some(AccessDeletionPolicy::Delete) | None => {}
    }
    let facts = match cluster {
        Cluster::Missing => return release(),
        // Invariant 1: an EtcdCluster that cannot be read may still exist.
        Cluster::Unknown(_) => None,
        Cluster::Present(facts) => Some(facts),
    };
    if facts.is_some_and(|facts| facts.is_deleting || !facts.matches(owned)) {
        return release();
    }
    // Invariant 43: the status of another object has recorded the same role or user, so this deletion leaves it in
    // etcd.
    if rivals.iter().any(|rival| rival.owns) {
        return release();
    }
    let entry = match facts {
        None => Err(unreadable(object, cluster)),
        Some(facts) => match (hold(&owned.cluster, facts), &facts.etcd) {
            (Some(trouble), _) => Err(trouble),
            (None, Err(trouble)) => Err(trouble.clone()),
            // Invariant 43: the role `root` and the users with which the operators log in stay in etcd.
            // spec.auth.secret of the EtcdCluster can name a user that an EtcdUser has recorded before.
            (None, Ok(etcd)) if K::is_of_operators(&owned.name, etcd) => return release(),
            (None, Ok(_)) => entry.map_err(Clone::clone),
        },
    };
    match entry {
        Err(mut trouble) => {
            trouble.message = format!(
                "the {} {} cannot be deleted in etcd yet: {}. To delete only the {}, set spec.deletionPolicy to Retain",
                K::WORD,
                owned.name,
                trouble.message,
                K::kind(&()),
            );
            Plan::new(trouble)
        }
        Ok(Entry::Exists { is_partial, .. }) if owned.created || is_partial => {
            let mut plan = Plan::step(Step::Call(delete), "deleting in etcd");
            plan.steps.push(Step::SetFinalizer(false));
            plan
        }
        Ok(Entry::Missing | Entry::Exists { .. }) => release(),
    }
}

fn has_finalizer<K: AccessObject>(object: &K) -> bool {
    object
        .finalizers()
        .iter()
        .any(|one| one == FINALIZER_ACCESS)
}

fn present<'a, K: AccessObject>(
    object: &K,
    cluster: &'a Cluster,
) -> Result<&'a ClusterFacts, Box<Plan>> {
    match cluster {
        Cluster::Present(facts) => Ok(facts),
        Cluster::Unknown(_) => Err(Plan::new(unreadable(object, cluster)).into()),
        Cluster::Missing => {
            let text = format!(
                "spec.etcdCluster.name: there is no EtcdCluster {} in this namespace: create it or correct the name",
                object.cluster()
            );
            Err(Plan::waits(Reason::ClusterMissing, text).into())
        }
    }
}

fn unreadable<K: AccessObject>(object: &K, cluster: &Cluster) -> Trouble {
    let why = match cluster {
        Cluster::Unknown(why) => why.as_str(),
        Cluster::Missing | Cluster::Present(_) => "unknown cause",
    };
    let text = format!("EtcdCluster {} cannot be read: {why}", object.target());
    Trouble::new(Reason::ClusterUnreadable, text)
}

/// Why the operator must not change etcd now.
fn hold(cluster: &str, facts: &ClusterFacts) -> Option<Trouble> {
    let (reason, text) = if facts.is_restoring {
        let text = "an EtcdRestore replaces its data: wait until the restore is complete";
        (Reason::Restoring, text)
    } else if facts.is_paused {
        let text = "spec.paused is true: set it to false";
        (Reason::Paused, text)
    } else if facts.is_hibernated {
        let text = "spec.hibernate is true, so no member runs: set it to false";
        (Reason::Hibernated, text)
    } else {
        return None;
    };
    Some(Trouble::new(
        reason,
        format!("EtcdCluster {cluster}: {text}"),
    ))
}

fn moved<K: AccessObject>(object: &K, field: &str, wanted: &str, owned: &OwnedStatus) -> Plan {
    let text = format!(
        "{field} is {wanted}, but {kind} {} owns the {word} {} of EtcdCluster {}: set {field} back, or delete the \
         {kind} and create it again",
        object.name_any(),
        owned.name,
        owned.cluster,
        kind = K::kind(&()),
        word = K::WORD,
    );
    Plan::waits(Reason::NameChanged, text)
}

/// The name of the rival that manages the role or the user instead of this object. An object that owns the role or the
/// user comes first, and then the oldest object. `None` if this object comes first.
fn preferred<'a, K: AccessObject>(
    object: &K,
    owned: Option<&OwnedStatus>,
    rivals: &'a [Rival],
) -> Option<&'a str> {
    type Rank<'b> = (bool, Option<Timestamp>, &'b str);
    let name = object.name_any();
    let created = object.meta().creation_timestamp.as_ref();
    let own: Rank<'_> = (owned.is_none(), created.map(|time| time.0), &name);
    let ranks = rivals
        .iter()
        .map(|rival| -> Rank<'a> { (!rival.owns, rival.created, &rival.name) });
    let first = ranks.min()?;
    (first < own).then_some(first.2)
}
