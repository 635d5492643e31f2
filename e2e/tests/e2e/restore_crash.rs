//! The restore operator dies before every write of a restore over a living cluster, one process at each, and the last
//! one finds enough to come to the end.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, restore_with};
use e2e::objects::{Kind, await_complete, field};
use e2e::wait::Look;
use e2e::{Keyspace, PATIENCE, Sandbox, scenario, until};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;

use crate::backup_restore_s3::backup;
use crate::fixtures::{DURABLE, cluster_with};

const OPERATOR: &str = "etcd-restore-operator";
const KEYS: usize = 200;

/// In the order in which they are come to.
const POINTS: &[&str] = &[
    "restore-before-record-intent",
    "restore-before-guard",
    "restore-before-claim",
    "restore-before-create-service",
    "restore-before-create-volume-claim",
    "restore-before-create-pod",
    "restore-before-record-restored",
    "restore-before-record-formed",
    "restore-before-stop-former",
    "restore-before-join",
    "restore-before-release-claim",
    "restore-before-let-go",
    "restore-before-status",
];

/// The operator's pod anew, with another environment. The one before stands at its point and gets no further.
async fn restart_with(sandbox: &Sandbox, variable: &str) -> Result<()> {
    let deployment = format!("deployment/{OPERATOR}");
    sandbox
        .kubectl(&["set", "env", &deployment, variable])
        .await?;
    // The dead process cannot give its lease back, and it takes its time to run out.
    let delete = ["delete", "lease", OPERATOR, "--ignore-not-found"];
    sandbox.kubectl(&delete).await.map(drop)
}

async fn dies(sandbox: &Sandbox, point: &str) -> Result<()> {
    let selector = format!("app.kubernetes.io/component={OPERATOR}");
    let selector = ListParams::default().labels(&selector);
    let told = format!("FAILPOINTS={point}=panic");
    until(
        &format!("the operator dies {point}"),
        PATIENCE,
        async || {
            let pods = sandbox.api::<Pod>().list(&selector).await?;
            let told: Vec<&Pod> = pods.iter().filter(|pod| is_told(pod, &told)).collect();
            Ok(if told.iter().any(|pod| has_died(pod)) {
                Look::Done(())
            } else {
                Look::NotYet(format!("{} pods of it live", told.len()))
            })
        },
    )
    .await
}

fn is_told(pod: &Pod, told: &str) -> bool {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut variables = containers.flat_map(|container| container.env.iter().flatten());
    variables.any(|one| {
        let value = one.value.as_deref().unwrap_or_default();
        format!("{}={value}", one.name) == told
    })
}

fn has_died(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let containers = status.and_then(|status| status.container_statuses.as_ref());
    containers
        .into_iter()
        .flatten()
        .any(|container| container.restart_count > 0)
}

#[tokio::test]
async fn operator_crash_restore_comes_to_the_end_from_before_every_write() {
    scenario("operator_crash_restore", async |sandbox| {
        let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
        sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, DURABLE)?)
            .await?;
        let before = sandbox.await_members("c", 3).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        let written = keys.fill("kept/", KEYS, |_| ()).await?;
        sandbox
            .apply(&backup(sandbox, "first", &bucket.name, "etcd.backup")?)
            .await?;
        await_complete(&sandbox.objects(Kind::EtcdBackup), "first", PATIENCE).await?;
        keys.fill("later/", 10, |_| ()).await?;
        drop(keys);

        let path = format!("{}/etcd.backup", bucket.name);
        let more = "  overwrite: true\n";
        let manifest = restore_with(sandbox.env.s3()?, "over", "{name: c}", &path, more);
        for (number, point) in POINTS.iter().enumerate() {
            restart_with(sandbox, &format!("FAILPOINTS={point}=panic")).await?;
            if number == 0 {
                let wait = [
                    "rollout",
                    "status",
                    "deployment/etcd-restore-operator",
                    "--timeout=120s",
                ];
                sandbox.kubectl(&wait).await?;
                sandbox.apply(&manifest).await?;
            }
            dies(sandbox, point).await?;
        }
        restart_with(sandbox, "FAILPOINTS-").await?;
        await_complete(&sandbox.objects(Kind::EtcdRestore), "over", PATIENCE).await?;

        let after = sandbox.await_members("c", 3).await?;
        ensure!(after.metadata.uid == before.metadata.uid);
        ensure!(field(&after, "/status/clusterID") != field(&before, "/status/clusterID"));
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        ensure!(keys.verify("kept/", KEYS).await? >= written);
        keys.verify("later/", 0)
            .await
            .context("keys newer than the backup")?;
        Ok(())
    })
    .await;
}
