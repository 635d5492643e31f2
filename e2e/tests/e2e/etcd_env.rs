//! `spec.pod.etcdEnv` must not override flags that the operator sets. `ETCD_FORCE_NEW_CLUSTER`, for example, would
//! remove two of three members.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use e2e::objects::{Kind, ready_members};
use e2e::{Keyspace, Sandbox, cluster_scenario};
use kube::ResourceExt;
use serde_json::json;

use crate::all_pods_lost::restarts;
use crate::fixtures::{DURABLE, cluster_with};
use crate::volume_growth::claims;

const KEYS: usize = 50;
const PREFIX: &str = "etcd-env";
/// The operator must accept this variable, because v1beta2 has no field for this option.
const ALLOWED: &str = "ETCD_AUTO_COMPACTION_RETENTION";

async fn set(sandbox: &Sandbox, name: &str) -> Result<String> {
    let variables = json!([{"name": ALLOWED, "value": "1"}, {"name": name, "value": "true"}]);
    let patch = json!({"spec": {"pod": {"etcdEnv": variables}}}).to_string();
    let words = ["patch", "etcdcluster", "c", "--type=merge", "-p", &patch];
    sandbox.kubectl(&words).await
}

/// The UIDs of all pods, each with the number of its restarts, and the UIDs of all PVCs, each with 0.
async fn pods_and_pvcs(sandbox: &Sandbox) -> Result<BTreeMap<String, i32>> {
    let (pods, claims) = (sandbox.member_pods("c").await?, claims(sandbox).await?);
    let kept = claims.iter().map(|claim| &claim.metadata);
    let kept = kept.filter(|metadata| metadata.deletion_timestamp.is_none());
    ensure!(
        pods.len() == 3 && kept.count() == 3,
        "expected three pods and three PVCs"
    );
    let pods = pods.iter();
    let pods = pods.map(|pod| (pod.uid().unwrap_or_default(), restarts(pod)));
    let claims = claims.iter();
    let claims = claims.map(|claim| (claim.uid().unwrap_or_default(), 0));
    Ok(pods.chain(claims).collect())
}

/// Restarts and UIDs of pods and PVCs, the cluster ID, and the members with their learner flags.
type ClusterState = (BTreeMap<String, i32>, u64, Vec<(String, bool)>);

async fn cluster_state(sandbox: &Sandbox, keys: &Keyspace) -> Result<ClusterState> {
    let mut members = keys.members().await?;
    members.sort();
    let cluster = keys.cluster_id().await?;
    Ok((pods_and_pvcs(sandbox).await?, cluster, members))
}

#[tokio::test]
async fn etcd_env_that_overrides_operator_flags_is_rejected() {
    cluster_scenario("etcd_env", async |sandbox| {
        let allowed = format!("{DURABLE}    etcdEnv: [{{name: {ALLOWED}, value: \"1\"}}]\n");
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, &allowed)?)
            .await?;
        let object = sandbox.await_members("c", 3).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        keys.fill(PREFIX, KEYS, |_| {}).await?;
        let before = cluster_state(sandbox, &keys).await?;

        for name in [
            "ETCD_FORCE_NEW_CLUSTER",
            "ETCD_WAL_DIR",
            "ETCD_CONFIG_FILE",
            "ETCD_DISCOVERY_SRV",
            "ETCD_INITIAL_CLUSTER_STATE",
        ] {
            let text = match set(sandbox, name).await {
                Ok(printed) => bail!("{name} is accepted: {printed}"),
                Err(error) => format!("{error:#}"),
            };
            ensure!(
                text.contains("spec.pod.etcdEnv") && text.contains("remove that variable"),
                "the rejection of {name} does not name the field and the remedy: {text}"
            );
        }

        let after = cluster_state(sandbox, &keys).await?;
        ensure!(before == after, "before: {before:?}, after: {after:?}");
        let now = sandbox.objects(Kind::EtcdCluster).get("c").await?;
        ensure!(now.metadata.generation == object.metadata.generation);
        ensure!(ready_members(&now) == ready_members(&object));
        keys.verify(PREFIX, KEYS).await.map(drop)
    })
    .await;
}
