//! Reads custom resources as JSON. Tests use the field names as text, so a test fails if a field of the API is
//! renamed.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams};
use serde_json::Value;

use crate::wait::{Poll, until};

/// The custom resource kinds of this project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The kind EtcdCluster, which the cluster operator reconciles.
    EtcdCluster,
    /// The kind EtcdBackup, which the backup operator reconciles.
    EtcdBackup,
    /// The kind EtcdRestore, which the restore operator reconciles.
    EtcdRestore,
    /// The kind EtcdMirror, which the backup operator reconciles.
    EtcdMirror,
    /// The kind EtcdRole, which the cluster operator reconciles.
    EtcdRole,
    /// The kind EtcdUser, which the cluster operator reconciles.
    EtcdUser,
}

impl Kind {
    /// The resource of this kind, for kube's dynamic API.
    #[must_use]
    pub fn resource(self) -> ApiResource {
        let kind = format!("{self:?}");
        ApiResource::from_gvk(&GroupVersionKind::gvk(
            "etcd.database.coreos.com",
            "v1beta2",
            &kind,
        ))
    }

    /// The API client for objects of this kind in one namespace.
    #[must_use]
    pub fn api(self, client: kube::Client, namespace: &str) -> Api<DynamicObject> {
        Api::namespaced_with(client, namespace, &self.resource())
    }
}

/// The value at a JSON pointer. `Null` if it does not exist.
#[must_use]
pub fn field<'a>(object: &'a DynamicObject, pointer: &str) -> &'a Value {
    object.data.pointer(pointer).unwrap_or(&Value::Null)
}

/// True if the object has a condition of the type `kind` with this status (`True`, `False` or `Unknown`).
#[must_use]
pub fn has_condition(object: &DynamicObject, kind: &str, status: &str) -> bool {
    condition(object, kind).is_some_and(|found| found["status"] == status)
}

/// The condition of the type `kind`. `None` if it does not exist.
#[must_use]
pub fn condition<'a>(object: &'a DynamicObject, kind: &str) -> Option<&'a Value> {
    field(object, "/status/conditions")
        .as_array()?
        .iter()
        .find(|condition| condition["type"] == kind)
}

/// True if the object has the condition Failed with status True and this reason.
#[must_use]
pub fn has_failed_for(object: &DynamicObject, reason: &str) -> bool {
    condition(object, "Failed")
        .is_some_and(|found| found["status"] == "True" && found["reason"] == reason)
}

/// The names in `status.members.ready`.
#[must_use]
pub fn ready_members(object: &DynamicObject) -> Vec<String> {
    strings(field(object, "/status/members/ready"))
}

/// The name and the ID of each member in `status.memberDetails`.
#[must_use]
pub fn members(object: &DynamicObject) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let details = field(object, "/status/memberDetails").as_array();
    details
        .into_iter()
        .flatten()
        .map(|member| (text(&member["name"]), text(&member["id"])))
        .collect()
}

/// The name of the leader, from the status.
///
/// # Errors
/// Fails if the status has no leader.
pub fn leader(object: &DynamicObject) -> Result<String> {
    let leader = field(object, "/status/leader")
        .as_str()
        .context("status.leader is empty")?;
    members(object)
        .into_iter()
        .find(|(name, id)| name == leader || id == leader)
        .map(|(name, _)| name)
        .with_context(|| format!("{leader} is not a member"))
}

/// The name of a ready member that is not the leader, from the status.
///
/// # Errors
/// Fails if the status has no leader, or if no other member is ready.
pub fn follower(object: &DynamicObject) -> Result<String> {
    let leader = leader(object)?;
    ready_members(object)
        .into_iter()
        .find(|name| *name != leader)
        .context("only the leader is ready")
}

/// True if the pod has the condition Ready with status True.
#[must_use]
pub fn is_ready(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|found| found.type_ == "Ready" && found.status == "True")
}

/// The name of the node of the pod. Empty if the pod is not scheduled.
#[must_use]
pub fn node_of(pod: &Pod) -> &str {
    let spec = pod.spec.as_ref();
    spec.and_then(|spec| spec.node_name.as_deref())
        .unwrap_or_default()
}

/// The strings in a JSON list.
#[must_use]
pub fn strings(value: &Value) -> Vec<String> {
    value
        .as_array()
        .map(|list| {
            list.iter()
                .filter_map(Value::as_str)
                .map(str::to_owned)
                .collect()
        })
        .unwrap_or_default()
}

/// The conditions, phase and members of the object in one line, for error messages.
#[must_use]
pub fn conditions_line(object: &DynamicObject) -> String {
    let mut line = String::new();
    for condition in field(object, "/status/conditions")
        .as_array()
        .into_iter()
        .flatten()
    {
        let _ = write!(
            line,
            "{}={}({}: {}) ",
            condition["type"].as_str().unwrap_or("?"),
            condition["status"].as_str().unwrap_or("?"),
            condition["reason"].as_str().unwrap_or("?"),
            condition["message"].as_str().unwrap_or("")
        );
    }
    let _ = write!(
        line,
        "phase={} members={} waitingFor={}",
        field(object, "/status/phase"),
        field(object, "/status/members"),
        field(object, "/status/waitingFor")
    );
    line
}

/// Waits until `holds` is true for the object, and returns the object.
///
/// # Errors
/// Fails after the time `within`. The error contains the conditions of the object.
pub async fn await_object(
    api: &Api<DynamicObject>,
    name: &str,
    what: &str,
    within: Duration,
    holds: impl Fn(&DynamicObject) -> bool,
) -> Result<DynamicObject> {
    until(&format!("{name}: {what}"), within, async || {
        let object = api.get(name).await.with_context(|| format!("get {name}"))?;
        Ok(if holds(&object) {
            Poll::Done(object)
        } else {
            Poll::NotYet(conditions_line(&object))
        })
    })
    .await
}

/// Waits until an EtcdBackup or EtcdRestore has completed.
///
/// # Errors
/// Fails if the object fails, or does not complete in time. The error contains the conditions of the object.
pub async fn await_complete(
    api: &Api<DynamicObject>,
    name: &str,
    within: Duration,
) -> Result<DynamicObject> {
    let object = await_object(api, name, "completion or failure", within, |object| {
        has_condition(object, "Complete", "True") || has_condition(object, "Failed", "True")
    })
    .await?;
    ensure!(
        has_condition(&object, "Complete", "True"),
        "{}",
        conditions_line(&object)
    );
    Ok(object)
}

/// Waits until a cluster has no pods and no persistent volume claims.
///
/// # Errors
/// Fails if pods or PVCs remain at the time limit. The error contains their number.
pub async fn await_no_data(
    client: &kube::Client,
    namespace: &str,
    cluster: &str,
    within: Duration,
) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let volumes: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
    let selector = ListParams::default().labels(&format!("etcd_cluster={cluster}"));
    until(
        "pods and volumes of the cluster are deleted",
        within,
        async || {
            let pods = pods.list(&selector).await?.items.len();
            let volumes = volumes.list(&selector).await?.items.len();
            Ok(if pods + volumes == 0 {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{pods} pods, {volumes} volumes"))
            })
        },
    )
    .await
}
