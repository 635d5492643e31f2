//! A majority of a cluster with TLS is lost: the seed takes the survivor's snapshot with the operator's certificate.

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, await_object, condition, field, follower, ready_members};
use e2e::{Keyspace, PATIENCE, Sandbox, scenario};

use crate::certificates::{STATIC, arguments, client, make_secrets, of_services};
use crate::fixtures::cluster_with;

const KEYS: usize = 200;

async fn lose(sandbox: &Sandbox, victims: &[String]) -> Result<()> {
    let mut words = vec![
        "delete",
        "pod",
        "--wait=false",
        "--grace-period=0",
        "--force",
    ];
    words.extend(victims.iter().map(String::as_str));
    sandbox.kubectl(&words).await.map(drop)
}

#[tokio::test]
async fn a_lost_majority_is_recovered_over_tls() {
    scenario("tls_quorum_loss", async |sandbox| {
        let authority = make_secrets(sandbox, &of_services(sandbox), false).await?;
        let manifest = cluster_with(&sandbox.env, "c", 3, STATIC)?;
        sandbox.apply(&manifest).await?;
        let before = sandbox.await_members("c", 3).await?;
        let identity = client(&authority, sandbox, "c")?;
        let (env, namespace) = (&sandbox.env, &sandbox.namespace);
        let keys = Keyspace::of_tls_cluster(env, namespace, "c", &identity).await?;
        keys.fill("kept/", KEYS, |_| ()).await?;
        drop(keys);
        let survivor = follower(&before)?;
        let mut victims = ready_members(&before);
        victims.retain(|name| *name != survivor);
        lose(sandbox, &victims).await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        await_object(&clusters, "c", "the quorum is lost", PATIENCE, |object| {
            condition(object, "Degraded").is_some_and(|found| found["reason"] == "QuorumLost")
        })
        .await?;
        let id = field(&before, "/status/clusterID").as_str();
        let id = id.context("no cluster ID")?;
        let approval = format!("etcd.database.coreos.com/recover={id}");
        sandbox
            .kubectl(&["annotate", "etcdcluster", "c", &approval])
            .await?;
        await_object(&clusters, "c", "recovered", PATIENCE, |object| {
            field(object, "/status/recovery/phase") == "Complete"
        })
        .await?;
        sandbox.await_members("c", 3).await?;
        let arguments = arguments(sandbox).await?;
        let is_plain = |one: &String| one.starts_with("--listen-client-urls=http://");
        ensure!(!arguments.iter().any(is_plain));
        let keys = Keyspace::of_tls_cluster(env, namespace, "c", &identity).await?;
        keys.verify("kept/", KEYS).await.map(drop)
    })
    .await;
}
