//! Two conditions that all operators write: `Unreadable` on an object that cannot be parsed, and `Managed`, which
//! reports whether an operator manages the object.
//!
//! Each condition has its own field manager, so that a write of the condition does not change other fields of the
//! status.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::problem::Chain;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{Patch, PatchParams};
use kube::core::DynamicObject;
use kube::core::error_boundary::InvalidObject;
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde_json::{Value, json};
use tracing::warn;

use crate::outcome::{Notice, Report};
use crate::process::Operator;
use crate::scope::{SCOPE_ANNOTATION, SCOPE_CLUSTER_WIDE, Scope};

/// Type of the condition on an object that cannot be parsed.
pub const UNREADABLE: &str = "Unreadable";
/// Type of the condition that reports whether an operator manages the object.
pub const MANAGED: &str = "Managed";

/// After this time, an object outside of this operator's scope is reported as unmanaged, unless another operator has
/// reported that it manages the object. The other operator may need this time to start.
const GRACE: Duration = Duration::from_secs(30);

/// The watch delivers a written condition within this time. Until then, this process does not write a missing condition
/// again.
const DELIVERY: Duration = Duration::from_secs(2);

/// A parse error with the same text is reported again only after the watch has delivered no event about the object for
/// this time.
const REPEAT_AFTER: Duration = Duration::from_hours(24);

type Unreadable = HashMap<String, (String, Instant)>;

/// Writes the conditions `Unreadable` and `Managed` for one operator.
pub(crate) struct Marks<K> {
    client: Client,
    name: &'static str,
    scope: Scope,
    namespace: String,
    report: Arc<Report>,
    /// The last parse error of each object, by UID, and the time of the last event about the object.
    unreadable: Mutex<Unreadable>,
    /// Objects outside of this operator's scope, by UID. The values are the scope annotation, and the time at which
    /// this process first observed it.
    waiting: Mutex<HashMap<String, (Option<String>, Instant)>>,
    /// Objects that this process has reported as managed, by UID.
    claimed: Mutex<HashMap<String, Claim>>,
    kind: PhantomData<fn() -> K>,
}

/// A report of this process that it manages an object.
#[derive(Clone, Copy)]
struct Claim {
    /// The last reconcile of the object.
    reconciled: Instant,
    /// The last successful write of the condition by this process.
    written: Option<Instant>,
}

impl Claim {
    /// True if the watch may not have delivered the written condition yet.
    fn is_in_delivery(&self, now: Instant) -> bool {
        let written = self.written;
        written.is_some_and(|at| now.duration_since(at) < DELIVERY)
    }
}

impl<K> Marks<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Serialize,
{
    pub(crate) fn new(operator: &Operator) -> Self {
        Self {
            client: operator.client.clone(),
            name: operator.name,
            scope: operator.scope.clone(),
            namespace: operator.namespace.clone(),
            report: operator.report.clone(),
            unreadable: Mutex::default(),
            waiting: Mutex::default(),
            claimed: Mutex::default(),
            kind: PhantomData,
        }
    }

    /// Invariant 15: reports by a condition and an Event that an object cannot be parsed. Other objects are not
    /// delayed.
    pub(crate) async fn unreadable(&self, reference: &ObjectReference, invalid: &InvalidObject) {
        if !is_new_error(
            &mut locked(&self.unreadable),
            reference,
            &invalid.error,
            Instant::now(),
        ) {
            return;
        }
        let note = format!(
            "the object cannot be parsed and is ignored: {}; correct this field",
            invalid.error
        );
        self.report.publish(
            reference,
            &Notice::warning(UNREADABLE, "Read", note.clone()),
        );
        let generation = invalid.metadata.generation;
        let condition = condition(UNREADABLE, "True", "NotParseable", &note, generation);
        self.write(reference, "reader", &json!([condition])).await;
    }

    pub(crate) async fn readable_again(&self, reference: &ObjectReference, object: &K) {
        locked(&self.unreadable).remove(&uid(reference));
        if condition_of(object, UNREADABLE).is_some() {
            self.write(reference, "reader", &json!([])).await;
        }
    }

    /// Sets the condition `Managed`. A condition of another operator is replaced once, because that operator may be
    /// uninstalled. If the other operator sets its condition again, that operator runs, and this process does not
    /// replace the condition again.
    pub(crate) async fn report_managed(&self, reference: &ObjectReference, object: &K) {
        locked(&self.waiting).remove(&uid(reference));
        let now = Instant::now();
        let last = last_claim(&mut locked(&self.claimed), uid(reference), now);
        let is_managed = match condition_of(object, MANAGED) {
            Some(current) if self.is_own(&current) => true,
            Some(current) => current["status"] == "True" && last.is_some(),
            None => last.is_some_and(|claim| claim.is_in_delivery(now)),
        };
        if is_managed {
            return;
        }
        let note = claim(self.name, &self.namespace);
        let generation = object.meta().generation;
        let condition = condition(MANAGED, "True", self.scope.reason(), &note, generation);
        let is_written = self.write(reference, "scope", &json!([condition])).await;
        if let Some(claim) = locked(&self.claimed).get_mut(&uid(reference)) {
            claim.written = is_written.then(Instant::now);
        }
    }

    fn is_own(&self, managed: &Value) -> bool {
        let claim = claim(self.name, &self.namespace);
        is_report_of(managed, &self.scope, &claim)
    }

    /// Handles an object whose scope annotation requires another operator. Reports the object as unmanaged if no other
    /// operator reports within [`GRACE`] that it manages the object. Returns the delay until the next check, or `None`
    /// if no check is needed.
    pub(crate) async fn report_unmanaged(
        &self,
        reference: &ObjectReference,
        object: Option<&K>,
    ) -> Option<Duration> {
        let object = object?;
        let annotation = object.annotations().get(SCOPE_ANNOTATION).cloned();
        locked(&self.claimed).remove(&uid(reference));
        let current = condition_of(object, MANAGED);
        let is_other = |current: &Value| current["status"] == "True" && !self.is_own(current);
        if current.as_ref().is_some_and(is_other) {
            locked(&self.waiting).remove(&uid(reference));
            return None;
        }
        let left = self.grace_left(uid(reference), annotation.as_deref(), Instant::now());
        if left > Duration::ZERO {
            return Some(left);
        }
        let note = remedy(annotation.as_deref(), &self.namespace);
        if current.is_none_or(|current| current["status"] != "False" || current["message"] != note)
        {
            self.report.publish(
                reference,
                &Notice::warning("NotManaged", "Scope", note.clone()),
            );
            let generation = object.meta().generation;
            let condition = condition(MANAGED, "False", "NotManaged", &note, generation);
            self.write(reference, "scope", &json!([condition])).await;
        }
        None
    }

    fn grace_left(&self, uid: String, annotation: Option<&str>, now: Instant) -> Duration {
        let mut waiting = locked(&self.waiting);
        // Old entries are removed, because their objects may have been deleted.
        waiting.retain(|_, (_, since)| now.duration_since(*since) < GRACE * 100);
        let fresh = || (annotation.map(str::to_owned), now);
        let seen = waiting.entry(uid).or_insert_with(fresh);
        if seen.0.as_deref() != annotation {
            *seen = fresh();
        }
        GRACE.saturating_sub(now.duration_since(seen.1))
    }

    /// Applies the conditions with their own field manager. Returns true on success. Under the operator's field
    /// manager, server-side apply would remove all other fields of the status, including the records of invariant 10.
    async fn write(&self, reference: &ObjectReference, part: &str, conditions: &Value) -> bool {
        let (Some(namespace), Some(name)) = (&reference.namespace, &reference.name) else {
            return false;
        };
        let resource = kube::core::ApiResource::erase::<K>(&());
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), namespace, &resource);
        let body = json!({
            "apiVersion": K::api_version(&()),
            "kind": K::kind(&()),
            "metadata": { "name": name },
            "status": { "conditions": conditions },
        });
        let params = PatchParams::apply(&format!("{}-{part}", self.name)).force();
        let Err(error) = api.patch_status(name, &params, &Patch::Apply(&body)).await else {
            return true;
        };
        if !crate::apply::is_not_found(&error) {
            let error = Chain(&error).to_string();
            warn!(object = name, error, "cannot write a condition");
        }
        false
    }
}

/// Stores the parse error of an object. Returns true if the error is new. Drops old entries.
fn is_new_error(
    reported: &mut Unreadable,
    object: &ObjectReference,
    error: &str,
    now: Instant,
) -> bool {
    reported.retain(|_, (_, at)| now.duration_since(*at) < REPEAT_AFTER);
    let known = reported.insert(uid(object), (error.to_owned(), now));
    known.is_none_or(|(known, _)| known != error)
}

impl Scope {
    /// The reason for the condition `Managed`.
    fn reason(&self) -> &'static str {
        match self {
            Self::Namespaces(_) => "Namespaced",
            Self::Annotated | Self::All => "ClusterWide",
        }
    }
}

/// The message of the condition `Managed` with status `True`, which names the operator and its namespace.
fn claim(operator: &str, namespace: &str) -> String {
    format!("managed by {operator} in namespace {namespace}")
}

/// Whether the operator with this scope and message has set the condition `Managed` to `True`.
fn is_report_of(managed: &Value, scope: &Scope, claim: &str) -> bool {
    managed["status"] == "True"
        && managed["reason"] == scope.reason()
        && managed["message"] == claim
}

/// Records a reconcile of a managed object. Returns the object's previous entry. `None` if this process has not
/// reported the object as managed yet. Drops expired entries when the number of entries has doubled.
fn last_claim(claimed: &mut HashMap<String, Claim>, uid: String, now: Instant) -> Option<Claim> {
    let known = claimed.get(&uid).copied();
    if known.is_none() && claimed.len().is_power_of_two() {
        claimed.retain(|_, claim| now.duration_since(claim.reconciled) < REPEAT_AFTER);
    }
    let claim = Claim {
        reconciled: now,
        written: known.and_then(|claim| claim.written),
    };
    claimed.insert(uid, claim)
}

fn remedy(annotation: Option<&str>, namespace: &str) -> String {
    match annotation {
        None => format!(
            "no operator manages the object: the cluster-wide operator in namespace {namespace} manages only objects \
             with the annotation {SCOPE_ANNOTATION}: {SCOPE_CLUSTER_WIDE}; add this annotation, or install an operator \
             in this namespace"
        ),
        Some(SCOPE_CLUSTER_WIDE) => format!(
            "no operator manages the object: its annotation {SCOPE_ANNOTATION} requires a cluster-wide operator; remove \
             this annotation, or install an operator with --cluster-wide"
        ),
        Some(other) => format!(
            "no operator manages the object: its annotation {SCOPE_ANNOTATION} has the unknown value {other:?}; set it to \
             {SCOPE_CLUSTER_WIDE}, or remove it"
        ),
    }
}

fn uid(reference: &ObjectReference) -> String {
    reference.uid.clone().unwrap_or_default()
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn condition(
    kind: &str,
    status: &str,
    reason: &str,
    message: &str,
    generation: Option<i64>,
) -> Value {
    json!({
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": now(),
        "observedGeneration": generation.unwrap_or_default(),
    })
}

fn status_of<K: Serialize>(object: &K) -> Value {
    serde_json::to_value(object).map_or(Value::Null, |mut object| object["status"].take())
}

fn condition_of<K: Serialize>(object: &K, kind: &str) -> Option<Value> {
    find(&status_of(object), kind).cloned()
}

fn find<'a>(status: &'a Value, kind: &str) -> Option<&'a Value> {
    let conditions = status["conditions"].as_array()?;
    conditions.iter().find(|one| one["type"] == kind)
}

fn now() -> String {
    jiff::Timestamp::from_second(jiff::Timestamp::now().as_second())
        .unwrap_or_default()
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_parse_error_is_reported_once_and_forgotten_after_expiry() {
        let object = |uid: &str| ObjectReference {
            uid: Some(uid.into()),
            ..ObjectReference::default()
        };
        let (mut reported, now) = (Unreadable::default(), Instant::now());
        let later = now + REPEAT_AFTER;
        assert!(is_new_error(&mut reported, &object("1"), "no size", now));
        assert!(!is_new_error(&mut reported, &object("1"), "no size", now));
        assert!(is_new_error(&mut reported, &object("1"), "no version", now));
        assert!(is_new_error(&mut reported, &object("2"), "no size", later));
        assert_eq!(reported.len(), 1);
    }

    #[test]
    fn condition_is_found_by_type_in_any_object() {
        let marked = json!({ "status": { "conditions": [{ "type": UNREADABLE }] } });
        assert!(condition_of(&marked, UNREADABLE).is_some());
        assert!(condition_of(&marked, MANAGED).is_none());
        assert!(condition_of(&json!({ "status": {} }), UNREADABLE).is_none());
        assert!(condition_of(&json!({}), UNREADABLE).is_none());
    }

    #[test]
    fn managed_condition_identifies_operator_that_wrote_it() {
        let report = |status: &str, reason: &str, namespace: &str| {
            let message = claim("etcd-operator", namespace);
            json!({ "type": MANAGED, "status": status, "reason": reason, "message": message })
        };
        // Each row has a condition and three results. A result is true if the operator in namespace `ops`, with the
        // scope at the same position in `scopes`, has written the condition.
        for (report, expected) in [
            (report("True", "Namespaced", "ops"), [true, false, false]),
            (report("True", "ClusterWide", "ops"), [false, true, true]),
            (report("False", "NotManaged", "ops"), [false; 3]),
            (report("True", "Namespaced", "other"), [false; 3]),
            (report("True", "ClusterWide", "dev-ops"), [false; 3]),
            (
                json!({
                    "type": MANAGED, "status": "True", "reason": "ClusterWide",
                    "message": claim("etcd-backup-operator", "ops"),
                }),
                [false; 3],
            ),
            (json!(null), [false; 3]),
        ] {
            let scopes = [Scope::namespace("ops"), Scope::Annotated, Scope::All];
            let own = claim("etcd-operator", "ops");
            let found = scopes.map(|scope| is_report_of(&report, &scope, &own));
            assert_eq!(found, expected, "{report}");
        }
    }

    #[test]
    fn process_replaces_condition_of_other_operator_only_once() {
        let (mut claimed, now) = (HashMap::new(), Instant::now());
        let mut is_first = |uid: &str, now| last_claim(&mut claimed, uid.into(), now).is_none();
        assert!(is_first("1", now) && is_first("2", now));
        assert!(!is_first("1", now + REPEAT_AFTER / 2));
        assert!(is_first("3", now + REPEAT_AFTER));
        let mut left: Vec<_> = claimed.keys().map(String::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["1", "3"], "the entry of object 2 must have expired");
    }

    #[test]
    fn written_condition_is_not_written_again_before_watch_delivers_it() {
        let now = Instant::now();
        let claim = |written| Claim {
            reconciled: now,
            written,
        };
        assert!(
            !claim(None).is_in_delivery(now),
            "a failed write is not in delivery"
        );
        assert!(claim(Some(now)).is_in_delivery(now + DELIVERY / 2));
        assert!(!claim(Some(now)).is_in_delivery(now + DELIVERY));
    }

    #[test]
    fn unmanaged_object_is_reported_with_remedy() {
        assert!(remedy(None, "ops").contains("add this annotation"));
        assert!(remedy(Some("clusterwide"), "ops").contains("--cluster-wide"));
        assert!(remedy(Some("all"), "ops").contains("\"all\""));
    }
}
