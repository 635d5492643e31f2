//! Lists the changes that a user can make to the objects of a cluster: each label, annotation, owner, Secret key, spec
//! field and status field is deleted or set to another value.

use anyhow::{Context, Result};
use e2e::Sandbox;
use e2e::objects::Kind;
use kube::ResourceExt;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams,
};
use serde_json::{Map, Value, json};

/// The kinds of objects that the operator creates: API group, version, kind, and resource in the operator's Role.
pub(crate) const KINDS: [(&str, &str, &str, &str); 6] = [
    ("", "v1", "Pod", "pods"),
    ("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    ("", "v1", "Service", "services"),
    ("", "v1", "Secret", "secrets"),
    (
        "policy",
        "v1",
        "PodDisruptionBudget",
        "poddisruptionbudgets",
    ),
    (
        "networking.k8s.io",
        "v1",
        "NetworkPolicy",
        "networkpolicies",
    ),
];

/// Secrets of CAs. Changing them restarts every member, so another test covers them:
/// `lost_authorities_are_replaced_while_clients_write`.
const AUTHORITIES: [&str; 2] = ["c-peer-ca", "c-client-ca"];

/// An annotation with the names of the first members. After the bootstrap, the operator does not read this annotation.
const HISTORY: &str = "etcd.database.coreos.com/first-members";

fn resource(kind: &str) -> Result<ApiResource> {
    if kind == "EtcdCluster" {
        return Ok(Kind::EtcdCluster.resource());
    }
    let (group, version, kind, plural) = KINDS
        .into_iter()
        .find(|(_, _, one, _)| *one == kind)
        .with_context(|| format!("{kind} is not in the table"))?;
    let named = GroupVersionKind::gvk(group, version, kind);
    Ok(ApiResource::from_gvk_with_plural(&named, plural))
}

pub(crate) fn objects_of(sandbox: &Sandbox, kind: &str) -> Result<Api<DynamicObject>> {
    let (client, namespace) = (sandbox.client.clone(), &sandbox.namespace);
    Ok(Api::namespaced_with(client, namespace, &resource(kind)?))
}

/// The kind and the name of an object.
pub(crate) type Name = (&'static str, String);

/// How a [`Case`] changes its object.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Delete,
    /// Sends a JSON merge patch to the object.
    Patch(Value),
    /// Sends a JSON merge patch to the status of the object.
    PatchStatus(Value),
}

/// A change of one object, with a description for messages.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) object: Name,
    pub(crate) what: String,
    change: Change,
}

impl Case {
    /// Makes the change. Returns false if the API server rejects it.
    pub(crate) async fn apply(&self, sandbox: &Sandbox) -> Result<bool> {
        let (kind, name) = &self.object;
        let api = objects_of(sandbox, kind)?;
        let parameters = PatchParams::default();
        let done = match &self.change {
            Change::Delete => api.delete(name, &DeleteParams::default()).await.map(drop),
            Change::Patch(patch) => {
                let patch = Patch::Merge(patch);
                api.patch(name, &parameters, &patch).await.map(drop)
            }
            Change::PatchStatus(patch) => {
                let patch = Patch::Merge(patch);
                api.patch_status(name, &parameters, &patch).await.map(drop)
            }
        };
        match done {
            Ok(()) => Ok(true),
            Err(kube::Error::Api(error)) if matches!(error.code, 400 | 403 | 422) => Ok(false),
            Err(error) => Err(error).with_context(|| self.to_string()),
        }
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (kind, name) = &self.object;
        write!(f, "{kind} {name}: {}", self.what)
    }
}

/// A different value of the same type.
fn other(value: &Value) -> Value {
    match value {
        Value::String(text) => {
            let mut text: Vec<char> = text.chars().collect();
            match text.last_mut() {
                Some(last) => *last = if *last == 'a' { 'b' } else { 'a' },
                None => text.push('a'),
            }
            Value::String(text.into_iter().collect())
        }
        Value::Number(number) => json!(number.as_i64().unwrap_or_default() + 1),
        Value::Bool(is) => json!(!is),
        Value::Array(list) => Value::Array(list.iter().map(other).collect()),
        Value::Object(fields) => {
            let changed = fields
                .iter()
                .map(|(key, value)| (key.clone(), other(value)));
            Value::Object(changed.collect())
        }
        Value::Null => Value::Null,
    }
}

/// A merge patch that sets the field at `path` to `value`.
fn at(path: &[&str], value: &Value) -> Value {
    path.iter()
        .rev()
        .fold(value.clone(), |inner, key| json!({ *key: inner }))
}

/// The changes that delete each of these fields, or set it to another value.
fn each_field(object: &Name, path: &[&str], fields: &Map<String, Value>) -> Vec<Case> {
    let mut cases = Vec::new();
    for (key, value) in fields {
        let path: Vec<&str> = path.iter().copied().chain([key.as_str()]).collect();
        let words = path.join(".");
        for (what, patch) in [
            (format!("{words} deleted"), at(&path, &Value::Null)),
            (
                format!("{words} set to another value"),
                at(&path, &other(value)),
            ),
        ] {
            let change = if path.first() == Some(&"status") {
                Change::PatchStatus(patch)
            } else {
                Change::Patch(patch)
            };
            let object = object.clone();
            cases.push(Case {
                object,
                what,
                change,
            });
        }
    }
    cases
}

pub(crate) fn fields(object: &Value, pointer: &str) -> Map<String, Value> {
    object
        .pointer(pointer)
        .and_then(Value::as_object)
        .cloned()
        .unwrap_or_default()
}

/// All changes that the test makes to one object.
pub(crate) fn cases_of(object: &Name, found: &DynamicObject) -> Result<Vec<Case>> {
    let value = serde_json::to_value(found)?;
    let case = |what: &str, change: Change| Case {
        object: object.clone(),
        what: what.to_owned(),
        change,
    };
    if object.0 == "EtcdCluster" {
        let status = fields(&value, "/status");
        let mut cases = vec![case(
            "status emptied",
            Change::PatchStatus(json!({ "status": null })),
        )];
        cases.extend(each_field(object, &["status"], &status));
        for recorded in ["bootstrap", "TLS"] {
            let mut inner = fields(&value, &format!("/status/{recorded}"));
            inner.remove("members");
            cases.extend(each_field(object, &["status", recorded], &inner));
        }
        return Ok(cases);
    }
    let mut cases = Vec::new();
    for map in ["labels", "annotations"] {
        let mut all = fields(&value, &format!("/metadata/{map}"));
        all.retain(|key, _| is_of_operator(key));
        cases.extend(each_field(object, &["metadata", map], &all));
    }
    cases.push(case(
        "ownerReferences deleted",
        Change::Patch(json!({ "metadata": { "ownerReferences": null } })),
    ));
    if !found.finalizers().is_empty() {
        let none = json!({ "metadata": { "finalizers": null } });
        cases.push(case("finalizers deleted", Change::Patch(none)));
    }
    match object.0 {
        "Secret" if AUTHORITIES.contains(&object.1.as_str()) => return Ok(cases),
        "Secret" => {
            let data = fields(&value, "/data");
            for key in data.keys() {
                for (what, value) in [
                    ("deleted", Value::Null),
                    ("emptied", json!("")),
                    ("set to another value", json!("b3RoZXI=")),
                ] {
                    let patch = at(&["data", key], &value);
                    cases.push(case(&format!("data.{key} {what}"), Change::Patch(patch)));
                }
            }
            cases.push(case("data emptied", Change::Patch(json!({ "data": null }))));
        }
        "Service" | "PodDisruptionBudget" | "NetworkPolicy" => {
            let mut spec = fields(&value, "/spec");
            spec.retain(|key, _| !key.starts_with("clusterIP"));
            cases.extend(each_field(object, &["spec"], &spec));
        }
        _ => {}
    }
    // No case deletes a PVC, because the operator would then replace the member instead of repairing the PVC. The
    // tests in `member_loss.rs` delete PVCs.
    if object.0 != "PersistentVolumeClaim" {
        cases.push(case("deleted", Change::Delete));
    }
    Ok(cases)
}

/// True if the operator sets and restores the label or annotation with this key.
pub(crate) fn is_of_operator(key: &str) -> bool {
    let by_kubernetes = key.contains("kubernetes.io/") && !key.starts_with("app.kubernetes.io/");
    !by_kubernetes && key != "e2e-trigger" && key != HISTORY
}
