//! All writes to the API server: server-side apply, create under a fixed name, delete with a UID precondition, and
//! status updates. A status update is sent only if the status differs.
//!
//! Invariant 11: two operator processes may send these writes concurrently. Because of fixed names, UIDs and resource
//! versions, the later of two equal writes changes nothing.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::Status;
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

pub use crate::answer::is_not_found;
use crate::outcome::Failure;

/// Reason for a failed write: the schema of the installed CRD does not contain a field of the object.
pub const DEFINITION_OUTDATED: &str = "DefinitionOutdated";
/// Part of the API server's message if the schema does not contain a field of an applied object (`validate.go` of
/// structured-merge-diff, `structuredmerge.go` of apimachinery's managedfields). In this case, the API server rejects
/// the whole object.
const UNDECLARED: &str = "field not declared in schema";

/// Maximum age of the observed state on which a write is based (invariant 11). It is shorter than the lease duration,
/// so a process that was suspended until its lease expired sends no write.
pub const FRESH: Duration = Duration::from_secs(10);

/// Invariant 11: whether the observed state is recent enough for a write. `since` is the start of the observation.
pub fn is_fresh(since: Instant) -> bool {
    since.elapsed() <= FRESH
}

/// Why a write failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The object cannot be serialized as JSON, which is a defect of the code that builds it.
    #[error("cannot serialize {kind} {name}")]
    Serialise {
        /// The kind of the object that cannot be serialized.
        kind: String,
        /// The name of the object that cannot be serialized.
        name: String,
        /// The error of the serializer.
        #[source]
        source: serde_json::Error,
    },
    /// The schema of the installed CRD does not contain a field of the object, so the API server rejected the whole
    /// object.
    #[error(
        "the installed CRD of {kind} is older than this operator: update the CRD with `helm upgrade` and \
         crds.install=true, or apply the chart's templates/crds.yaml (docs/install.md, Manage the CRDs). The API \
         server reports: {message}"
    )]
    Definition {
        /// The kind of the object that the outdated CRD defines.
        kind: String,
        /// The API server's message, which names the field.
        message: String,
    },
    /// The API server rejected the request or could not be reached.
    #[error("cannot {verb} {kind} {name}")]
    Api {
        /// What the operator tried, for example `create`.
        verb: &'static str,
        /// The kind of the object in the failed request.
        kind: String,
        /// The name of the object in the failed request.
        name: String,
        /// The error of the Kubernetes client.
        #[source]
        source: Box<kube::Error>,
    },
}

impl Error {
    /// Whether the object has changed since it was read.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Api { source, .. } if is_conflict(source))
    }

    /// Whether the object does not exist.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Api { source, .. } if is_not_found(source))
    }
}

impl Failure for Error {
    fn reason(&self) -> &'static str {
        match self {
            Self::Serialise { .. } => "Defect",
            Self::Definition { .. } => DEFINITION_OUTDATED,
            Self::Api { source, .. } => kube_reason(source),
        }
    }
}

api::reasons! {
    /// The kinds of failures of a request to the API server.
    pub enum ApiFailure {
        /// The operator lacks a permission, or a quota or a webhook rejected the request.
        Forbidden,
        /// The object does not exist.
        NotFound,
        /// The object already exists, or was changed after it was read.
        Conflict,
        /// The API server rejects the content of the object.
        Refused,
        /// The API server received too many requests.
        Throttled,
        /// An error response of the API server that no other variant describes.
        ApiServerError,
        /// The API server did not answer.
        ApiServerUnreachable,
    }
}

impl ApiFailure {
    /// Finds the kind of an error of the Kubernetes client.
    pub fn of(error: &kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => match status.code {
                401 | 403 => Self::Forbidden,
                404 => Self::NotFound,
                409 => Self::Conflict,
                422 | 400 => Self::Refused,
                429 => Self::Throttled,
                _ => Self::ApiServerError,
            },
            _ => Self::ApiServerUnreachable,
        }
    }
}

/// The reason of an error, as a metric label. Its values are the names in [`ApiFailure`].
pub fn kube_reason(error: &kube::Error) -> &'static str {
    ApiFailure::of(error).as_str()
}

fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

fn has_reason(status: &Status, reason: &str) -> bool {
    status.reason == reason
}

/// The result of a create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Created<K> {
    /// The object was created.
    New(K),
    /// An object with this name exists. Nothing was changed.
    Exists,
}

/// The result of a delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deleted {
    /// The API server accepted the request. The object may still be terminating.
    Accepted,
    /// The object does not exist.
    Gone,
    /// The object has another UID or resource version, so it was not deleted.
    Changed,
}

/// The result of a status update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The status differed, and was written.
    Sent,
    /// The status was equal, and no request was sent.
    Same,
}

/// Applies the whole object as `manager` with server-side apply. Removes fields that `manager` applied before and now
/// omits. Takes over the fields of the object from other managers.
///
/// # Errors
/// Fails if the API server rejects the object or cannot be reached.
pub async fn apply<K>(api: &Api<K>, manager: &str, object: &K) -> Result<K, Error>
where
    K: Resource<DynamicType = ()> + Serialize + DeserializeOwned + Clone + Debug,
{
    let name = object.name_any();
    let mut body = to_value(object)?;
    // The API server sets `managedFields` and `creationTimestamp` itself, and rejects a body that contains
    // `managedFields`, so both fields are removed.
    if let Some(metadata) = body.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("managedFields");
        metadata.remove("creationTimestamp");
    }
    type_meta::<K>(&mut body);
    let params = PatchParams::apply(manager).force();
    api.patch(&name, &params, &Patch::Apply(&body))
        .await
        .map_err(|e| failed::<K>("apply", &name, e))
}

/// Creates the object if no object has the same name.
///
/// # Errors
/// Fails if the API server rejects the object, except because the name exists, or if it cannot be reached.
pub async fn create<K>(api: &Api<K>, manager: &str, object: &K) -> Result<Created<K>, Error>
where
    K: Resource<DynamicType = ()> + Serialize + DeserializeOwned + Clone + Debug,
{
    let params = PostParams {
        field_manager: Some(manager.to_owned()),
        ..PostParams::default()
    };
    match api.create(&params, object).await {
        Ok(created) => Ok(Created::New(created)),
        Err(kube::Error::Api(status)) if has_reason(&status, "AlreadyExists") => {
            Ok(Created::Exists)
        }
        Err(source) => Err(failed::<K>("create", &object.name_any(), source)),
    }
}

/// Deletes the object with its UID as precondition. If `grace_seconds` is `None`, the object's own grace period
/// applies.
///
/// # Errors
/// Fails if the API server rejects the request or cannot be reached.
pub async fn delete<K>(api: &Api<K>, seen: &K, grace_seconds: Option<u32>) -> Result<Deleted, Error>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
{
    delete_at(api, seen, None, grace_seconds).await
}

/// Deletes the object with its UID and its resourceVersion as preconditions. Use this function if the content of the
/// object is the reason for its deletion.
///
/// # Errors
/// Fails like [`delete`].
pub async fn delete_if_unchanged<K>(api: &Api<K>, seen: &K) -> Result<Deleted, Error>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
{
    delete_at(api, seen, seen.resource_version(), None).await
}

async fn delete_at<K>(
    api: &Api<K>,
    seen: &K,
    resource_version: Option<String>,
    grace_seconds: Option<u32>,
) -> Result<Deleted, Error>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
{
    let name = seen.name_any();
    // Invariant 11: an object without a UID was not read from the API server, so the operator does not delete it.
    // Another object may have the same name.
    let Some(uid) = seen.uid() else {
        return Ok(Deleted::Changed);
    };
    let params = DeleteParams {
        grace_period_seconds: grace_seconds,
        preconditions: Some(Preconditions {
            uid: Some(uid),
            resource_version,
        }),
        ..DeleteParams::default()
    };
    match api.delete(&name, &params).await {
        Ok(_) => Ok(Deleted::Accepted),
        Err(error) if is_not_found(&error) => Ok(Deleted::Gone),
        Err(error) if is_conflict(&error) => Ok(Deleted::Changed),
        Err(source) => Err(failed::<K>("delete", &name, source)),
    }
}

/// Applies the status subresource as `manager`, unless `current` equals `desired`. Removes fields that this manager
/// applied before and now omits. Takes over the fields in `desired` from other managers, and changes no other fields.
///
/// Use this function only for fields that each reconcile writes again: on the status subresource, the API server
/// ignores the UID, so the status can reach a new object of the same name. For fields that later reconciles depend on,
/// use [`status_if_unchanged`].
///
/// # Errors
/// Fails if the API server rejects the status or cannot be reached.
pub async fn status<K, S>(
    api: &Api<K>,
    manager: &str,
    object: &K,
    current: Option<&S>,
    desired: &S,
) -> Result<Written, Error>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
    S: Serialize + PartialEq,
{
    if current == Some(desired) {
        return Ok(Written::Same);
    }
    write_status(api, manager, object, desired, None).await
}

/// Like [`status`], with the resourceVersion as precondition. Use this function for fields that later reconciles depend
/// on, and for decisions that must be made only once.
///
/// # Errors
/// Fails like [`status`]. The reason is `Conflict` if the object was changed after it was read, or if another object
/// with the same name has replaced it.
pub async fn status_if_unchanged<K, S>(
    api: &Api<K>,
    manager: &str,
    object: &K,
    current: Option<&S>,
    desired: &S,
) -> Result<Written, Error>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
    S: Serialize + PartialEq,
{
    if current == Some(desired) {
        return Ok(Written::Same);
    }
    write_status(api, manager, object, desired, object.resource_version()).await
}

async fn write_status<K, S>(
    api: &Api<K>,
    manager: &str,
    object: &K,
    desired: &S,
    resource_version: Option<String>,
) -> Result<Written, Error>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
    S: Serialize,
{
    let name = object.name_any();
    let status =
        serde_json::to_value(desired).map_err(|source| unserialisable::<K>(&name, source))?;
    let mut body = json!({ "metadata": { "name": name }, "status": status });
    if let Some(version) = resource_version {
        body["metadata"]["resourceVersion"] = json!(version);
    }
    type_meta::<K>(&mut body);
    let params = PatchParams::apply(manager).force();
    api.patch_status(&name, &params, &Patch::Apply(&body))
        .await
        .map(|_| Written::Sent)
        .map_err(|e| failed::<K>("write the status of", &name, e))
}

/// Sets an annotation, or removes it if the value is `None`. UID and resourceVersion are preconditions.
///
/// # Errors
/// Fails if the API server rejects the patch or cannot be reached. The reason is `Conflict` if the object was changed
/// after it was read.
pub async fn annotate<K>(
    api: &Api<K>,
    manager: &str,
    seen: &K,
    key: &str,
    value: Option<&str>,
) -> Result<(), Error>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
{
    let annotations = json!({ "annotations": { key: value } });
    merge_metadata(api, manager, seen, annotations).await
}

/// Merges `metadata` into the metadata of the object. UID and resourceVersion are preconditions.
///
/// # Errors
/// Fails if the API server rejects the patch or cannot be reached. The reason is `Conflict` if the object was changed
/// after it was read.
pub async fn merge_metadata<K>(
    api: &Api<K>,
    manager: &str,
    seen: &K,
    mut metadata: Value,
) -> Result<(), Error>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
{
    let name = seen.name_any();
    metadata["uid"] = json!(seen.uid());
    metadata["resourceVersion"] = json!(seen.resource_version());
    let params = PatchParams {
        field_manager: Some(manager.to_owned()),
        ..PatchParams::default()
    };
    let patch = Patch::Merge(json!({ "metadata": metadata }));
    let patched = api.patch(&name, &params, &patch).await;
    patched
        .map(|_| ())
        .map_err(|e| failed::<K>("patch", &name, e))
}

/// Adds the finalizers `names` if `set` is true, and removes them if `set` is false. UID and resourceVersion are
/// preconditions (invariant 11). Does not change other finalizers. Succeeds if the object does not exist.
///
/// # Errors
/// Fails if the object was changed after it was read, or if the API server rejects the patch.
pub async fn set_finalizers<K>(
    api: &Api<K>,
    manager: &str,
    seen: &K,
    names: &[&str],
    set: bool,
) -> Result<(), Error>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
{
    let mut finalizers = seen.finalizers().to_vec();
    finalizers.retain(|one| !names.contains(&one.as_str()));
    if set {
        finalizers.extend(names.iter().map(|one| (*one).to_owned()));
    }
    match merge_metadata(api, manager, seen, json!({ "finalizers": finalizers })).await {
        Err(Error::Api { source, .. }) if is_not_found(&source) => Ok(()),
        done => done,
    }
}

/// Whether the object has an owner reference with the UID `owner`.
pub fn is_owned(metadata: &ObjectMeta, owner: &str) -> bool {
    let mut owners = metadata.owner_references.iter().flatten();
    owners.any(|one| one.uid == owner)
}

/// Whether the object has an owner reference with the UID `owner` and all these labels.
pub fn is_marked(metadata: &ObjectMeta, owner: &str, labels: &BTreeMap<String, String>) -> bool {
    let found = |key: &String| metadata.labels.as_ref()?.get(key);
    is_owned(metadata, owner) && labels.iter().all(|(key, value)| found(key) == Some(value))
}

/// The controller reference to `owner`. `None` if `owner` has no name or UID. When the owner is deleted, garbage
/// collection deletes the objects with this reference.
pub fn owner_reference<K: Resource<DynamicType = ()>>(owner: &K) -> Option<OwnerReference> {
    owner.controller_owner_ref(&())
}

/// The part of the API server's message that names the unknown field. `None` if the message reports another problem.
fn undeclared(message: &str) -> Option<&str> {
    if !message.contains(UNDECLARED) {
        return None;
    }
    Some(
        message
            .split_once("): ")
            .map_or(message, |(_, missing)| missing),
    )
}

fn type_meta<K: Resource<DynamicType = ()>>(body: &mut Value) {
    body["apiVersion"] = json!(K::api_version(&()));
    body["kind"] = json!(K::kind(&()));
}

fn to_value<K: Resource<DynamicType = ()> + Serialize>(object: &K) -> Result<Value, Error> {
    serde_json::to_value(object).map_err(|source| unserialisable::<K>(&object.name_any(), source))
}

fn unserialisable<K: Resource<DynamicType = ()>>(name: &str, source: serde_json::Error) -> Error {
    Error::Serialise {
        kind: K::kind(&()).into_owned(),
        name: name.to_owned(),
        source,
    }
}

fn failed<K: Resource<DynamicType = ()>>(
    verb: &'static str,
    name: &str,
    source: kube::Error,
) -> Error {
    // `Error::Definition` reports an outdated CRD, so it is used only for the CRDs of this project.
    if K::group(&()) == api::names::GROUP
        && let kube::Error::Api(status) = &source
        && let Some(message) = undeclared(&status.message)
    {
        return Error::Definition {
            kind: K::kind(&()).into_owned(),
            message: message.to_owned(),
        };
    }
    Error::Api {
        verb,
        kind: K::kind(&()).into_owned(),
        name: name.to_owned(),
        source: Box::new(source),
    }
}

#[cfg(test)]
mod tests;
