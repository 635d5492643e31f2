//! The API server enforces the restricted Pod Security Standard. Members, seeds and operators have no privileges and
//! write only to volumes, and members have no API token.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::leaks::ensure_no_leaks;
use e2e::manifests::{aws_secret, restore_with};
use e2e::objects::{Kind, await_complete};
use e2e::{DEADLINE, Keyspace, Sandbox, scenario};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{Api, ListParams};
use serde_json::{Value, json};

use crate::backup_restore_s3::backup;
use crate::fixtures::cluster;

const KEYS: usize = 100;

/// Checks that every pod meets the restricted standard and has read-only root file systems, and that members have no
/// API token. Returns the number of pods.
async fn every_pod_is_hardened(sandbox: &Sandbox) -> Result<usize> {
    let pods = sandbox.api::<Pod>().list(&ListParams::default()).await?;
    for pod in &pods {
        let pod = serde_json::to_value(pod)?;
        let name = &pod["metadata"]["name"];
        let spec = &pod["spec"];
        ensure!(spec["securityContext"]["runAsNonRoot"] == true, "{name}");
        ensure!(
            spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault",
            "{name}"
        );
        // Member pods have no ServiceAccount token, because members do not use the API server.
        let is_member = pod["metadata"]["labels"]["app"] == "etcd";
        if is_member {
            ensure!(
                spec["automountServiceAccountToken"] == false,
                "{name} has a token"
            );
        }
        let all = |key: &str| spec[key].as_array().cloned().unwrap_or_default();
        for container in [all("containers"), all("initContainers")].concat() {
            let security = &container["securityContext"];
            let what = format!("{name}/{}: {security}", container["name"]);
            ensure!(security["readOnlyRootFilesystem"] == true, "{what}");
            ensure!(security["allowPrivilegeEscalation"] == false, "{what}");
            ensure!(security["capabilities"]["drop"] == json!(["ALL"]), "{what}");
            ensure!(security["privileged"] != true, "{what}");
            let mounts = container["volumeMounts"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            let token = |mount: &Value| {
                let path = mount["mountPath"].as_str().unwrap_or_default();
                path.starts_with("/var/run/secrets/kubernetes.io")
            };
            ensure!(!is_member || !mounts.iter().any(token), "{what}");
        }
    }
    Ok(pods.items.len())
}

#[tokio::test]
async fn all_pods_meet_restricted_profile() {
    scenario("restricted_namespace", async |sandbox| {
        let namespaces: Api<Namespace> = Api::all(sandbox.client.clone());
        let namespace = namespaces.get(&sandbox.namespace).await?;
        let labels = namespace
            .metadata
            .labels
            .context("the namespace has no labels")?;
        let enforced = labels.get("pod-security.kubernetes.io/enforce");
        ensure!(enforced.is_some_and(|level| level == "restricted"));

        let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
        sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
        sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
        sandbox.await_members("c", 3).await?;
        let (env, own) = (&sandbox.env, &sandbox.namespace);
        let keys = Keyspace::of_cluster(env, own, "c").await?;
        keys.fill("kept/", KEYS, |_| ()).await?;
        sandbox
            .apply(&backup(sandbox, "first", &bucket.name, "etcd.backup")?)
            .await?;
        await_complete(&sandbox.objects(Kind::EtcdBackup), "first", DEADLINE).await?;
        let path = format!("{}/etcd.backup", bucket.name);
        sandbox
            .apply(&restore_with(
                sandbox.env.s3()?,
                "back",
                "{name: d}",
                &path,
                "",
            ))
            .await?;
        await_complete(&sandbox.objects(Kind::EtcdRestore), "back", DEADLINE).await?;
        sandbox.await_members("d", 3).await?;
        let restored = Keyspace::of_cluster(env, own, "d").await?;
        restored.verify("kept/", KEYS).await?;
        // There are at least nine pods: three operators, and two clusters with three members each.
        ensure!(every_pod_is_hardened(sandbox).await? >= 9);
        ensure_no_leaks(sandbox).await
    })
    .await;
}
