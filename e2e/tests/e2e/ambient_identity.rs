//! Backups and restores without a Secret: with the operator's own identity, where its administrator allows that, and
//! nowhere else.

use anyhow::{Result, ensure};
use e2e::bucket::Bucket;
use e2e::env::S3;
use e2e::objects::{Kind, await_complete, await_object, condition, field};
use e2e::sandbox::RELEASE;
use e2e::{Keyspace, PATIENCE, Sandbox, chart, kubectl, scenario};
use serde_json::{Value, json};

use crate::clusterwide::ONE_AT_A_TIME;
use crate::fixtures::cluster;

const KEYS: usize = 100;
const SCOPE: &str = "etcd.database.coreos.com/scope: clusterwide";
const API: &str = "apiVersion: etcd.database.coreos.com/v1beta2";

/// What AWS's own tools read: the identity, and where its S3 is.
fn environment(s3: &S3) -> Vec<(&'static str, String)> {
    vec![
        ("AWS_ACCESS_KEY_ID", s3.access_key.clone()),
        ("AWS_SECRET_ACCESS_KEY", s3.secret_key.clone()),
        ("AWS_REGION", s3.region.clone()),
        ("AWS_ENDPOINT_URL_S3", s3.endpoint.clone()),
    ]
}

/// Cluster-wide operators that have an identity, which one namespace may use for one place.
async fn install(wide: &Sandbox, allowed: &Sandbox, place: &str) -> Result<()> {
    let environment = environment(wide.env.s3()?);
    let data: serde_json::Map<String, Value> = environment
        .iter()
        .map(|(name, value)| ((*name).to_owned(), json!(value)))
        .collect();
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "identity"}, "stringData": data});
    wide.apply(&secret.to_string()).await?;
    let variables: Vec<Value> = environment
        .iter()
        .map(|(name, _)| {
            let key = json!({"secretKeyRef": {"name": "identity", "key": name}});
            json!({"name": name, "valueFrom": key})
        })
        .collect();
    let variables = json!(variables);
    let grants = json!([format!("{}={place}", allowed.namespace)]);
    let values = [
        format!("backupOperator.extraEnv={variables}"),
        format!("restoreOperator.extraEnv={variables}"),
        format!("backups.ambientIdentity={grants}"),
        format!("restores.ambientIdentity={grants}"),
    ];
    let mut settings = vec!["--set", "clusterWide=true"];
    for value in &values {
        settings.extend(["--set-json", value]);
    }
    wide.install_operators_with(&settings).await
}

/// Gives the container that fetches a backup an identity of its own, as the webhooks of clouds do it: a seed fetches
/// with that of its pod, and never with the operator's.
fn pod_identity(s3: &S3, namespace: &str) -> String {
    let variables: Vec<String> = environment(s3)
        .iter()
        .map(|(name, value)| {
            format!("Object.spec.initContainers.env{{name: '{name}', value: '{value}'}}")
        })
        .collect();
    let expression = format!(
        "Object{{spec: Object.spec{{initContainers: [Object.spec.initContainers{{name: 'fetch', env: [{}]}}]}}}}",
        variables.join(", ")
    );
    let fetches = "has(object.spec.initContainers) && object.spec.initContainers.exists(c, c.name == 'fetch')";
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": namespace},
        "spec": {
            "matchConstraints": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                "resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
            },
            "matchConditions": [{"name": "fetches", "expression": fetches}],
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": expression}}],
        },
    });
    let binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": namespace},
        "spec": {"policyName": namespace},
    });
    format!("{policy}\n---\n{binding}\n")
}

/// An EtcdBackup to `path` or an EtcdRestore from there, without a Secret.
fn bare(kind: Kind, name: &str, path: &str) -> String {
    let (kind, field) = match kind {
        Kind::EtcdRestore => ("EtcdRestore", "backupStorageType"),
        _ => ("EtcdBackup", "storageType"),
    };
    format!(
        "{API}\nkind: {kind}\nmetadata: {{name: {name}, annotations: {{{SCOPE}}}}}\nspec:\n  etcdCluster: {{name: c}}\n  \
         {field}: S3\n  s3: {{path: {path}, forcePathStyle: true}}\n"
    )
}

/// Applies it and waits until it is refused, with the remedy.
async fn is_refused(sandbox: &Sandbox, kind: Kind, name: &str, path: &str) -> Result<()> {
    sandbox.apply(&bare(kind, name, path)).await?;
    let objects = sandbox.objects(kind);
    let seen = await_object(&objects, name, "a refusal", PATIENCE, |object| {
        condition(object, "Complete").is_some_and(|found| found["reason"] == "AccessDenied")
    })
    .await?;
    let said =
        condition(&seen, "Complete").map_or(String::new(), |found| found["message"].to_string());
    let remedy = format!("--ambient-identity={}=s3://{path}", sandbox.namespace);
    ensure!(
        said.contains("spec.s3.awsSecret") && said.contains(&remedy),
        "{said}"
    );
    Ok(())
}

async fn by_grant_alone(wide: &Sandbox, allowed: &Sandbox, other: &Sandbox) -> Result<()> {
    let s3 = wide.env.s3()?;
    let bucket = Bucket::create(s3, &wide.namespace).await?;
    let place = format!("{}/team-a", bucket.name);
    let path = format!("{place}/etcd");
    install(wide, allowed, &format!("s3://{place}")).await?;
    kubectl::run_with_input(
        &wide.env,
        &["apply", "-f", "-"],
        Some(&pod_identity(s3, &allowed.namespace)),
    )
    .await?;

    let plain = cluster(&wide.env, "c", 1)?;
    let annotated = format!("  name: c\n  annotations:\n    {SCOPE}\n");
    let manifest = plain.replacen("  name: c\n", &annotated, 1);
    allowed.apply(&manifest).await?;
    allowed.await_members("c", 1).await?;
    let keys = Keyspace::of_cluster(&allowed.env, &allowed.namespace, "c").await?;
    let written = keys.fill("kept/", KEYS, |_| ()).await?;
    drop(keys);

    let backups = allowed.objects(Kind::EtcdBackup);
    allowed
        .apply(&bare(Kind::EtcdBackup, "kept", &path))
        .await?;
    let done = await_complete(&backups, "kept", PATIENCE).await?;
    ensure!(*field(&done, "/status/location") == format!("s3://{path}"));
    // Another place, another namespace, and one that only begins like the place.
    let beside = format!("{place}-b/etcd");
    is_refused(allowed, Kind::EtcdBackup, "beside", &beside).await?;
    is_refused(other, Kind::EtcdBackup, "strange", &path).await?;
    is_refused(other, Kind::EtcdRestore, "strange", &path).await?;
    let found = bucket.keys().await?;
    ensure!(
        found.len() == 2 && found.iter().all(|key| key.starts_with("team-a/")),
        "{found:?}"
    );

    allowed.delete_cluster("c").await?;
    is_refused(allowed, Kind::EtcdRestore, "beside", &beside).await?;
    allowed
        .kubectl(&["delete", "etcdrestore", "beside"])
        .await?;
    allowed
        .apply(&bare(Kind::EtcdRestore, "back", &path))
        .await?;
    let restores = allowed.objects(Kind::EtcdRestore);
    await_complete(&restores, "back", PATIENCE).await?;
    allowed.await_members("c", 1).await?;
    let keys = Keyspace::of_cluster(&allowed.env, &allowed.namespace, "c").await?;
    ensure!(keys.verify("kept/", KEYS).await? >= written);
    Ok(())
}

mod serial {
    use super::{ONE_AT_A_TIME, RELEASE, Sandbox, by_grant_alone, chart, kubectl, scenario};

    #[tokio::test]
    async fn without_a_secret_a_namespace_uses_the_operators_identity_only_where_that_is_granted() {
        let _one = ONE_AT_A_TIME.lock().await;
        scenario("ambient", async |wide| {
            let allowed = Sandbox::create("ambient_allowed").await?;
            let other = Sandbox::create("ambient_other").await?;
            let outcome = by_grant_alone(wide, &allowed, &other).await;
            if outcome.is_err() {
                allowed.print_state().await;
                other.print_state().await;
            }
            // What belongs to no namespace.
            let gone = ["uninstall", RELEASE, "-n", &wide.namespace, "--wait"];
            let uninstalled = chart::helm(&wide.env, &gone).await;
            let policies = "mutatingadmissionpolicies,mutatingadmissionpolicybindings";
            let words = ["delete", policies, &allowed.namespace, "--ignore-not-found"];
            let removed = kubectl::run(&wide.env, &words).await;
            other.delete().await;
            allowed.delete().await;
            outcome?;
            removed?;
            uninstalled.map(drop)
        })
        .await;
    }
}
