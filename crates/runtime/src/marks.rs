//! The two conditions the driver itself writes, because no operator's own status does: `Unreadable`, on an object
//! that cannot be parsed, and `Managed`, which says whether an operator has taken the object.
//!
//! Each has a field manager of its own, so that they never disturb a status.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{Patch, PatchParams};
use kube::core::DynamicObject;
use kube::core::error_boundary::InvalidObject;
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde_json::{Value, json};
use tracing::warn;

use crate::outcome::{Chain, Notice, Report};
use crate::process::Operator;
use crate::scope::{SCOPE_ANNOTATION, SCOPE_CLUSTER_WIDE, Scope};

/// The condition of an object that cannot be parsed.
pub const UNREADABLE: &str = "Unreadable";
/// The condition that says whether an operator has taken the object.
pub const MANAGED: &str = "Managed";

/// How long an operator of the other kind may take before the object counts as nobody's: it may be starting, or
/// waiting for a lease.
const GRACE: Duration = Duration::from_secs(30);

/// An object that cannot be parsed and of which nothing was heard for so long is told of again.
const FORGOTTEN: Duration = Duration::from_hours(24);

type Unreadable = HashMap<String, (String, Instant)>;

/// Writes the marks of one operator.
pub(crate) struct Marks<K> {
    client: Client,
    name: &'static str,
    scope: Scope,
    namespace: String,
    report: Arc<Report>,
    /// What was last told of unreadable objects, by uid: only to spare writes.
    unreadable: Mutex<Unreadable>,
    /// Since when objects with this scope annotation are seen that are not ours, by uid.
    waiting: Mutex<HashMap<String, (Option<String>, Instant)>>,
    kind: PhantomData<fn() -> K>,
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
            kind: PhantomData,
        }
    }

    /// Invariant 15: the object gets a condition and an Event; nobody else waits for it.
    pub(crate) async fn unreadable(&self, reference: &ObjectReference, invalid: &InvalidObject) {
        if !is_news(
            &mut locked(&self.unreadable),
            reference,
            &invalid.error,
            Instant::now(),
        ) {
            return;
        }
        let note = format!(
            "the object cannot be read and is left alone: {}; correct that field",
            invalid.error
        );
        self.report.tell(
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

    /// The object is this operator's: says so once. Nothing is rewritten that says it already, so that two
    /// operators of one kind do not take turns.
    pub(crate) async fn ours(&self, reference: &ObjectReference, object: &K) {
        locked(&self.waiting).remove(&uid(reference));
        let said = condition_of(object, MANAGED);
        if said.is_some_and(|said| said["status"] == "True" && said["reason"] == self.scope.word())
        {
            return;
        }
        let note = format!("by {} in namespace {}", self.name, self.namespace);
        let generation = object.meta().generation;
        let condition = condition(MANAGED, "True", self.scope.word(), &note, generation);
        self.write(reference, "scope", &json!([condition])).await;
    }

    /// The object is another operator's by its scope annotation: says so when none has taken it. Returns when to
    /// look again.
    pub(crate) async fn not_ours(
        &self,
        reference: &ObjectReference,
        object: Option<&K>,
    ) -> Option<Duration> {
        let object = object?;
        let annotation = object.annotations().get(SCOPE_ANNOTATION).cloned();
        if taken_by_another(&status_of(object), self.scope.word()) {
            locked(&self.waiting).remove(&uid(reference));
            return None;
        }
        let left = self.grace_left(uid(reference), annotation.as_deref(), Instant::now());
        if left > Duration::ZERO {
            return Some(left);
        }
        let note = remedy(annotation.as_deref(), &self.namespace);
        let said = condition_of(object, MANAGED);
        if said.is_none_or(|said| said["status"] != "False" || said["message"] != note) {
            self.report.tell(
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
        // Objects that are gone leave no trace for ever.
        waiting.retain(|_, (_, since)| now.duration_since(*since) < GRACE * 100);
        let fresh = || (annotation.map(str::to_owned), now);
        let seen = waiting.entry(uid).or_insert_with(fresh);
        if seen.0.as_deref() != annotation {
            *seen = fresh();
        }
        GRACE.saturating_sub(now.duration_since(seen.1))
    }

    /// Written raw and by a manager of its own: server-side apply by the operator's manager would take
    /// everything else out of the status, and with it what invariant 10 relies on.
    async fn write(&self, reference: &ObjectReference, part: &str, conditions: &Value) {
        let (Some(namespace), Some(name)) = (&reference.namespace, &reference.name) else {
            return;
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
        match api.patch_status(name, &params, &Patch::Apply(&body)).await {
            Err(error) if !crate::apply::is_not_found(&error) => warn!(
                object = name,
                error = Chain(&error).to_string(),
                "a condition is not written"
            ),
            _ => {}
        }
    }
}

/// Whether this was not told of the object yet; objects that are gone leave no trace for ever.
fn is_news(told: &mut Unreadable, object: &ObjectReference, error: &str, now: Instant) -> bool {
    told.retain(|_, (_, at)| now.duration_since(*at) < FORGOTTEN);
    let known = told.insert(uid(object), (error.to_owned(), now));
    known.is_none_or(|(known, _)| known != error)
}

impl Scope {
    /// The reason of `Managed`: which kind of operator has taken the object.
    fn word(&self) -> &'static str {
        match self {
            Self::Namespace(_) => "Namespaced",
            Self::Cluster => "ClusterWide",
        }
    }
}

/// Whether an operator of the other kind has taken the object.
fn taken_by_another(status: &Value, own: &str) -> bool {
    find(status, MANAGED).is_some_and(|said| said["status"] == "True" && said["reason"] != own)
}

fn remedy(annotation: Option<&str>, namespace: &str) -> String {
    match annotation {
        None => format!(
            "no operator has taken the object: the cluster-wide operator in namespace {namespace} takes only objects \
             annotated {SCOPE_ANNOTATION}: {SCOPE_CLUSTER_WIDE}; add that annotation, or install an operator in this \
             namespace"
        ),
        Some(SCOPE_CLUSTER_WIDE) => format!(
            "no operator has taken the object: its annotation {SCOPE_ANNOTATION} asks for a cluster-wide operator; remove \
             that annotation, or install an operator with --cluster-wide"
        ),
        Some(other) => format!(
            "no operator has taken the object: its annotation {SCOPE_ANNOTATION} is {other:?}, which no operator takes; \
             make it {SCOPE_CLUSTER_WIDE}, or remove it"
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
    fn an_unreadable_object_is_told_of_once_and_forgotten_when_it_is_gone() {
        let object = |uid: &str| ObjectReference {
            uid: Some(uid.into()),
            ..ObjectReference::default()
        };
        let (mut told, now) = (Unreadable::default(), Instant::now());
        assert!(is_news(&mut told, &object("1"), "no size", now));
        assert!(!is_news(&mut told, &object("1"), "no size", now));
        assert!(is_news(&mut told, &object("1"), "no version", now));
        assert!(is_news(&mut told, &object("2"), "no size", now + FORGOTTEN));
        assert_eq!(told.len(), 1);
    }

    #[test]
    fn conditions_are_found_in_any_object() {
        let marked = json!({ "status": { "conditions": [{ "type": UNREADABLE }] } });
        assert!(condition_of(&marked, UNREADABLE).is_some());
        assert!(condition_of(&marked, MANAGED).is_none());
        assert!(condition_of(&json!({ "status": {} }), UNREADABLE).is_none());
        assert!(condition_of(&json!({}), UNREADABLE).is_none());
    }

    #[test]
    fn an_object_is_nobodys_until_an_operator_of_its_kind_says_it_is_its_own() {
        let managed = |status: &str, reason: &str| {
            json!({ "observedGeneration": 3,
                "conditions": [{ "type": MANAGED, "status": status, "reason": reason }] })
        };
        // (status, seen by a namespaced operator, by a cluster-wide one)
        let cases = [
            (json!(null), false, false),
            (json!({ "phase": "Creating" }), false, false),
            (managed("False", "NotManaged"), false, false),
            // It was ours and its annotation was changed: the other kind has not come yet.
            (managed("True", "Namespaced"), false, true),
            (managed("True", "ClusterWide"), true, false),
            (json!({ "observedGeneration": 3 }), false, false),
        ];
        for (status, namespaced, cluster_wide) in cases {
            assert_eq!(
                taken_by_another(&status, "Namespaced"),
                namespaced,
                "{status}"
            );
            assert_eq!(
                taken_by_another(&status, "ClusterWide"),
                cluster_wide,
                "{status}"
            );
        }
    }

    #[test]
    fn what_to_do_about_an_object_of_nobody_is_said() {
        assert!(remedy(None, "ops").contains("add that annotation"));
        assert!(remedy(Some("clusterwide"), "ops").contains("--cluster-wide"));
        assert!(remedy(Some("all"), "ops").contains("\"all\""));
    }
}
