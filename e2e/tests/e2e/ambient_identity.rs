//! An EtcdBackup or EtcdRestore without a Secret uses the operator's cloud identity. The operators use this identity
//! only for locations that an administrator has granted to the namespace of the object. `clusterwide.rs` calls these
//! functions.

use anyhow::{Result, ensure};
use e2e::bucket::Bucket;
use e2e::env::S3;
use e2e::objects::{Kind, await_complete, await_object, condition, field};
use e2e::{DEADLINE, Keyspace, Sandbox, kubectl};
use serde_json::{Value, json};

const KEYS: usize = 100;
const SCOPE: &str = "etcd.database.coreos.com/scope: clusterwide";
const API: &str = "apiVersion: etcd.database.coreos.com/v1beta2";

/// The environment variables from which AWS tools read the credentials, the region and the endpoint.
fn environment(s3: &S3) -> Vec<(&'static str, String)> {
    vec![
        ("AWS_ACCESS_KEY_ID", s3.access_key.clone()),
        ("AWS_SECRET_ACCESS_KEY", s3.secret_key.clone()),
        ("AWS_REGION", s3.region.clone()),
        ("AWS_ENDPOINT_URL_S3", s3.endpoint.clone()),
    ]
}

/// A grant that allows one namespace to use the operators' cloud identity for one location.
pub(crate) struct Grant {
    bucket: Bucket,
    /// The granted location: a bucket and a key prefix.
    place: String,
    namespace: String,
}

impl Grant {
    /// Creates the bucket, and a grant for the namespace of `allowed`. Gives the pods of seed members in this namespace
    /// credentials for the bucket.
    pub(crate) async fn create(wide: &Sandbox, allowed: &Sandbox) -> Result<Self> {
        let s3 = wide.env.s3()?;
        let bucket = Bucket::create(s3, &wide.namespace).await?;
        let policy = pod_identity(s3, &allowed.namespace);
        kubectl::run_with_input(&wide.env, &["apply", "-f", "-"], Some(&policy)).await?;
        Ok(Self {
            place: format!("{}/team-a", bucket.name),
            bucket,
            namespace: allowed.namespace.clone(),
        })
    }

    /// The path of a backup in the granted location.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.place)
    }

    /// Installs cluster-wide operators with the grant and a cloud identity for the bucket.
    pub(crate) async fn install(&self, wide: &Sandbox) -> Result<()> {
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
        let grants = json!([format!("{}=s3://{}", self.namespace, self.place)]);
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
}

/// Deletes the cluster-scoped admission policies that [`Grant::create`] created.
pub(crate) async fn remove_policies(wide: &Sandbox, allowed: &Sandbox) -> Result<()> {
    let policies = "mutatingadmissionpolicies,mutatingadmissionpolicybindings";
    let words = ["delete", policies, &allowed.namespace, "--ignore-not-found"];
    kubectl::run(&wide.env, &words).await.map(drop)
}

/// The manifest of an admission policy that adds credentials to the container that downloads a backup, as the webhooks
/// of cloud providers do. A seed member downloads its backup with the identity of its pod, not of the operator.
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

/// The manifest of an EtcdBackup to `path`, or of an EtcdRestore from `path`, without a Secret.
fn without_secret(kind: Kind, name: &str, cluster: &str, path: &str) -> String {
    let (kind, field) = match kind {
        Kind::EtcdRestore => ("EtcdRestore", "backupStorageType"),
        _ => ("EtcdBackup", "storageType"),
    };
    format!(
        "{API}\nkind: {kind}\nmetadata: {{name: {name}, annotations: {{{SCOPE}}}}}\nspec:\n  \
         etcdCluster: {{name: {cluster}}}\n  {field}: S3\n  s3: {{path: {path}, forcePathStyle: true}}\n"
    )
}

/// Applies an object, and waits until its status reports the rejection and the remedy. The operator checks the location
/// before the cluster, so the cluster need not exist.
async fn is_refused(sandbox: &Sandbox, kind: Kind, name: &str, path: &str) -> Result<()> {
    let manifest = without_secret(kind, name, "absent", path);
    sandbox.apply(&manifest).await?;
    let objects = sandbox.objects(kind);
    let seen = await_object(&objects, name, "a rejection", DEADLINE, |object| {
        condition(object, "Complete").is_some_and(|found| found["reason"] == "AccessDenied")
    })
    .await?;
    let message =
        condition(&seen, "Complete").map_or(String::new(), |found| found["message"].to_string());
    let remedy = format!("--ambient-identity={}=s3://{path}", sandbox.namespace);
    ensure!(
        message.contains("spec.s3.awsSecret") && message.contains(&remedy),
        "{message}"
    );
    Ok(())
}

/// Backs up, deletes and restores the cluster in the namespace with the grant. Ensures that the operators reject an
/// adjacent location, and reject the granted location in another namespace.
pub(crate) async fn only_granted_identity_is_used(
    grant: &Grant,
    allowed: &Sandbox,
    cluster: &str,
    other: &Sandbox,
) -> Result<()> {
    let path = format!("{}/etcd", grant.place);
    let keys = Keyspace::of_cluster(&allowed.env, &allowed.namespace, cluster).await?;
    let written = keys.fill("kept/", KEYS, |_| ()).await?;
    drop(keys);

    let backup = without_secret(Kind::EtcdBackup, "kept", cluster, &path);
    allowed.apply(&backup).await?;
    let backups = allowed.objects(Kind::EtcdBackup);
    let done = await_complete(&backups, "kept", DEADLINE).await?;
    ensure!(*field(&done, "/status/location") == format!("s3://{path}"));
    // This location begins with the text of the granted location, but is not inside it.
    let adjacent = format!("{}-b/etcd", grant.place);
    is_refused(allowed, Kind::EtcdBackup, "adjacent", &adjacent).await?;
    is_refused(other, Kind::EtcdBackup, "foreign", &path).await?;
    is_refused(other, Kind::EtcdRestore, "foreign", &path).await?;
    let found = grant.bucket.keys().await?;
    ensure!(
        found.len() == 2 && found.iter().all(|key| key.starts_with("team-a/")),
        "{found:?}"
    );

    allowed.delete_cluster(cluster).await?;
    is_refused(allowed, Kind::EtcdRestore, "adjacent", &adjacent).await?;
    allowed
        .kubectl(&["delete", "etcdrestore", "adjacent"])
        .await?;
    let restore = without_secret(Kind::EtcdRestore, "back", cluster, &path);
    allowed.apply(&restore).await?;
    let restores = allowed.objects(Kind::EtcdRestore);
    await_complete(&restores, "back", DEADLINE).await?;
    allowed.await_members(cluster, 1).await?;
    let keys = Keyspace::of_cluster(&allowed.env, &allowed.namespace, cluster).await?;
    ensure!(keys.verify("kept/", KEYS).await? >= written);
    Ok(())
}
