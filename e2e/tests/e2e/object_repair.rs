//! The test changes each object that the operator creates, one field at a time: it deletes, empties or replaces the
//! field. The operator must restore the object. The test repeats some of the changes while a pod is lost.
//!
//! The changes are derived from the objects of the cluster. The test fails if its list of kinds lacks a kind that the
//! operator may create.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::leaks::cluster_scenario_without_leaks;
use e2e::objects::{Kind, is_ready};
use e2e::wait::Poll;
use e2e::{DEADLINE, RollingCheck, Sandbox, Writer, until};
use k8s_openapi::api::rbac::v1::Role;
use kube::ResourceExt;
use kube::api::{DynamicObject, ListParams};
use serde_json::{Map, Value, json};

use crate::auth;
use crate::fixtures::{DURABLE, cluster_with};
use crate::manual_changes::{Case, KINDS, Name, cases_of, fields, is_of_operator, objects_of};
use crate::tls_generated::client;

/// The interval at which the test makes the operator read Secrets.
const READ_TRIGGER_INTERVAL: Duration = Duration::from_secs(3);
/// Lines under `spec` that make the operator create an object of every kind in [`KINDS`].
const EVERYTHING: &str = "  TLS: {generated: {}}\n  networkPolicy: {}\n";

/// The keys of a Secret with an issued certificate.
const ISSUED: [&str; 3] = ["tls.crt", "tls.key", "ca.crt"];
/// The base64 encoding of `-----BEGIN`.
const PEM: &str = "LS0tLS1CRUdJTi";
/// Annotations that must exist, but may have another value after the repair: fingerprints of certificates, and the
/// annotation `started` of a Service.
const PRESENT: [&str; 4] = [
    "etcd.database.coreos.com/started",
    "etcd.database.coreos.com/authorities",
    "etcd.database.coreos.com/certificates",
    "etcd.database.coreos.com/trust",
];

/// Fields of the status that may change while the spec and the members are unchanged.
const VOLATILE: [&str; 7] = [
    "certificates",
    "leader",
    "memberDetails",
    "nextStep",
    "waitingFor",
    "defragmentation",
    "lastErrors",
];

/// The object without fields that Kubernetes sets, and without values that differ in each issued certificate.
fn normalized(found: &DynamicObject) -> Result<Value> {
    let object = serde_json::to_value(found)?;
    let kind = object["kind"].as_str().unwrap_or_default().to_owned();
    if object.pointer("/spec/size").is_some() {
        let mut status = fields(&object, "/status");
        status.retain(|key, _| !VOLATILE.contains(&key.as_str()));
        let conditions = status.get("conditions").and_then(Value::as_array).cloned();
        let said = conditions.into_iter().flatten();
        // The order of conditions is not compared, because it depends on the order of writes.
        let said = said.map(|one| {
            let key = one["type"].as_str().unwrap_or_default().to_owned();
            (key, json!([one["status"], one["reason"]]))
        });
        status.insert("conditions".to_owned(), Value::Object(said.collect()));
        if let Some(bootstrap) = status.get_mut("bootstrap").and_then(Value::as_object_mut) {
            bootstrap.remove("members");
        }
        return Ok(json!({ "status": status }));
    }
    let mut annotations = fields(&object, "/metadata/annotations");
    annotations.retain(|key, _| is_of_operator(key));
    for key in PRESENT {
        if let Some(value) = annotations.get_mut(key) {
            *value = json!(value.as_str().is_some_and(|text| !text.is_empty()));
        }
    }
    let mut owners = object
        .pointer("/metadata/ownerReferences")
        .cloned()
        .unwrap_or_default();
    for owner in owners.as_array_mut().into_iter().flatten() {
        // Of an owner reference, only the fields that the operator needs are compared.
        let [kind, name, uid] = ["kind", "name", "uid"].map(|key| owner[key].clone());
        *owner = json!([kind, name, uid, owner["controller"]]);
    }
    let mut spec = fields(&object, "/spec");
    spec.retain(|key, _| !key.starts_with("clusterIP"));
    let data = fields(&object, "/data").into_iter().map(|(key, value)| {
        // The values of the keys in `ISSUED` are not compared, because they change when a certificate is issued
        // again. All other values must be equal.
        let is_issued = ISSUED.contains(&key.as_str());
        let is_pem = || value.as_str().is_some_and(|text| text.starts_with(PEM));
        let kept = if is_issued { json!(is_pem()) } else { value };
        (key, kept)
    });
    let data: Map<String, Value> = data.collect();
    let is_spec_kept = matches!(
        kind.as_str(),
        "Service" | "PodDisruptionBudget" | "NetworkPolicy"
    );
    Ok(json!({
        "labels": object.pointer("/metadata/labels"),
        "annotations": annotations,
        "owners": owners,
        "finalizers": object.pointer("/metadata/finalizers"),
        "spec": is_spec_kept.then_some(spec),
        "data": data,
        "is deleted": found.metadata.deletion_timestamp.is_some(),
        "is ready": kind == "Pod" && is_ready(&serde_json::from_value(object)?),
    }))
}

/// All objects of a cluster, by kind and name.
async fn objects(sandbox: &Sandbox, cluster: &str) -> Result<BTreeMap<Name, DynamicObject>> {
    let mut all = BTreeMap::new();
    let prefix = format!("{cluster}-");
    for (_, _, kind, _) in KINDS {
        let api = objects_of(sandbox, kind)?;
        let list = api.list(&ListParams::default()).await?;
        for mut object in list.items {
            let name = object.name_any();
            if name == cluster || name.starts_with(&prefix) {
                // The kind is set here, because the items of a list have none.
                object.data["kind"] = json!(kind);
                all.insert((kind, name), object);
            }
        }
    }
    let clusters = sandbox.objects(Kind::EtcdCluster);
    all.insert(
        ("EtcdCluster", cluster.to_owned()),
        clusters.get(cluster).await?,
    );
    Ok(all)
}

/// Invariant 26: the operator restores every object. Returns the first difference between `before` and `now`, if any.
fn difference(before: &BTreeMap<Name, Value>, now: &BTreeMap<Name, Value>) -> Option<String> {
    for (name, was) in before {
        let Some(is) = now.get(name) else {
            return Some(format!("{} {} is missing", name.0, name.1));
        };
        if let Some(text) = different("", was, is) {
            return Some(format!("{} {}: {text}", name.0, name.1));
        }
    }
    let added = now.keys().find(|name| !before.contains_key(name));
    added.map(|name| format!("{} {} was added", name.0, name.1))
}

fn different(path: &str, was: &Value, is: &Value) -> Option<String> {
    if let (Value::Object(was), Value::Object(is)) = (was, is) {
        let keys: BTreeSet<&String> = was.keys().chain(is.keys()).collect();
        return keys.into_iter().find_map(|key| {
            let get = |of: &Map<String, Value>| of.get(key).cloned().unwrap_or_default();
            different(&format!("{path}/{key}"), &get(was), &get(is))
        });
    }
    (was != is).then(|| format!("{path} is {is}, was {was}"))
}

struct Table<'a> {
    sandbox: &'a Sandbox,
    cluster: &'static str,
    before: BTreeMap<Name, Value>,
    /// The number of changes that the API server accepted.
    applied: usize,
    /// The number of changes that the API server rejected.
    rejected: usize,
}

impl<'a> Table<'a> {
    async fn new(sandbox: &'a Sandbox, cluster: &'static str) -> Result<Self> {
        let mut table = Self {
            sandbox,
            cluster,
            before: BTreeMap::new(),
            applied: 0,
            rejected: 0,
        };
        table.before = table.now().await?;
        Ok(table)
    }

    async fn now(&self) -> Result<BTreeMap<Name, Value>> {
        let all = objects(self.sandbox, self.cluster).await?;
        let all = all.iter();
        all.map(|(name, object)| Ok((name.clone(), normalized(object)?)))
            .collect()
    }

    /// Waits until all objects are as in `before`.
    async fn await_as_before(&self) -> Result<()> {
        let mut triggered = Instant::now();
        // The trigger makes the operator read Secrets. Without a trigger, it reads Secrets only once a minute.
        self.sandbox.trigger_reconcile(self.cluster).await?;
        until("everything is restored", DEADLINE, async || {
            if triggered.elapsed() > READ_TRIGGER_INTERVAL {
                self.sandbox.trigger_reconcile(self.cluster).await?;
                triggered = Instant::now();
            }
            let now = self.now().await?;
            Ok(difference(&self.before, &now).map_or(Poll::Done(()), Poll::NotYet))
        })
        .await
    }

    /// Makes a change, deletes the pod `pod` if it is set, and waits until all objects are as in `before`.
    async fn run(&mut self, case: &Case, pod: Option<&str>) -> Result<()> {
        let begun = Instant::now();
        if !case.apply(self.sandbox).await? {
            self.rejected += 1;
            return Ok(());
        }
        self.applied += 1;
        if let Some(pod) = pod {
            let delete = ["delete", "pod", pod, "--now", "--wait=false"];
            self.sandbox.kubectl(&delete).await?;
        }
        let lost = pod.map_or(String::new(), |pod| format!(", and {pod} is deleted"));
        let outcome = self.await_as_before().await;
        println!("{:5.1} s  {case}{lost}", begun.elapsed().as_secs_f64());
        outcome.with_context(|| format!("{case}{lost}"))
    }
}

/// Ensures that [`KINDS`] has every kind that the operator may create, and that `found` has an object of each kind.
async fn table_is_complete(sandbox: &Sandbox, found: &BTreeMap<Name, DynamicObject>) -> Result<()> {
    let role = sandbox.api::<Role>().get("etcd-operator").await?;
    let rules = role.rules.into_iter().flatten();
    let creating = rules.filter(|rule| rule.verbs.iter().any(|verb| verb == "create"));
    for resource in creating.flat_map(|rule| rule.resources.unwrap_or_default()) {
        // Events need no repair, because the operator does not read them. Deployments exist only for gRPC proxies, and
        // `proxies_are_created_repaired_and_deleted` in `crates/proxy/tests/reconcile.rs` changes them.
        if ["events", "deployments"].contains(&resource.as_str()) {
            continue;
        }
        let kind = KINDS.iter().find(|(.., plural)| *plural == resource);
        let (_, _, kind, _) = kind.with_context(|| format!("{resource} is not in the table"))?;
        let is_found = found.keys().any(|(one, _)| one == kind);
        ensure!(is_found, "the cluster has no {kind}");
    }
    Ok(())
}

/// True if the test changes the object. The members in `others` are skipped, because changing the objects of one
/// member is enough.
fn is_represented((_, name): &Name, others: &[String]) -> bool {
    !others
        .iter()
        .any(|member| name.starts_with(member.as_str()))
}

/// Selects the changes to repeat while a pod is lost: all changes of data that a new pod needs, and the last change of
/// every other object.
fn with_a_lost_pod(cases: &[Case]) -> Vec<&Case> {
    let matters = |case: &&Case| match case.object.0 {
        "EtcdCluster" => [
            "status emptied",
            "bootstrap.token",
            "clusterID",
            "status.TLS ",
        ]
        .iter()
        .any(|what| case.what.contains(what)),
        "PersistentVolumeClaim" => {
            case.what.contains("annotations") && case.what.contains("another value")
        }
        _ => false,
    };
    let some: Vec<&Case> = cases.iter().filter(matters).collect();
    if some.is_empty() {
        cases.last().into_iter().collect()
    } else {
        some
    }
}

/// Changes the objects of a cluster with all features except authentication, while a client writes. Members restart
/// one at a time, so each write waits for at most one restart.
async fn change_everything(sandbox: &Sandbox) -> Result<()> {
    let spec = format!("{EVERYTHING}{DURABLE}");
    let manifest = cluster_with(&sandbox.env, "c", 3, &spec)?;
    sandbox.apply(&manifest).await?;
    sandbox.await_members("c", 3).await?;
    let identity = client(sandbox, "c").await?;
    let writer = Writer::start_tls(sandbox, "c", &identity).await?;
    let found = objects(sandbox, "c").await?;
    table_is_complete(sandbox, &found).await?;

    let pods = sandbox.member_pods("c").await?;
    let members: Vec<String> = pods.iter().map(ResourceExt::name_any).collect();
    let (member, others) = members.split_first().context("no member")?;
    let mut cases = Vec::new();
    for (name, object) in &found {
        if is_represented(name, others) {
            cases.push(cases_of(name, object)?);
        }
    }
    let check = RollingCheck::start(sandbox, "c", 3).await?;
    let mut table = Table::new(sandbox, "c").await?;
    for case in cases.iter().flatten() {
        table.run(case, None).await?;
    }
    for case in cases.iter().flat_map(|cases| with_a_lost_pod(cases)) {
        table.run(case, Some(member)).await?;
    }
    println!(
        "{} changes, {} rejected by the API server",
        table.applied, table.rejected
    );
    check.finish().await?;
    writer.finish("all changes").await.map(drop)
}

/// Changes the Secrets of a cluster with authentication. After each change, etcd must accept the password.
async fn change_auth_secrets(sandbox: &Sandbox) -> Result<()> {
    const PASSWORD: &str = "correct-horse-battery";
    sandbox.apply(&auth::secret(PASSWORD)).await?;
    let spec = format!("  auth: {{secret: root, enabled: true}}\n{DURABLE}");
    let manifest = cluster_with(&sandbox.env, "p", 1, &spec)?;
    sandbox.apply(&manifest).await?;
    sandbox.await_members("p", 1).await?;
    auth::await_password(sandbox, "p", PASSWORD).await?;
    let found = objects(sandbox, "p").await?;
    let mut table = Table::new(sandbox, "p").await?;
    for (name, object) in found.iter().filter(|((kind, _), _)| *kind == "Secret") {
        for case in cases_of(name, object)? {
            table.run(&case, None).await?;
            let accepts_password = auth::accepts_password(sandbox, "p", PASSWORD).await?;
            ensure!(accepts_password, "{case}: etcd rejects the password");
        }
    }
    ensure!(table.applied > 0, "the cluster has no Secret");
    Ok(())
}

/// Invariant 26: the operator restores every object that a user has changed.
#[tokio::test]
async fn operator_repairs_every_changed_object() {
    cluster_scenario_without_leaks("object_repair", async |sandbox| {
        let (all, auth) = tokio::join!(change_everything(sandbox), change_auth_secrets(sandbox));
        all.and(auth)
    })
    .await;
}
