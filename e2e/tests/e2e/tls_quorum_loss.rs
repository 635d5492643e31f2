//! A majority of a cluster with TLS is lost: the seed takes the survivor's snapshot with the operator's certificate.

use anyhow::{Context, Result, ensure};
use e2e::leaks::discreet_cluster;
use e2e::objects::{Kind, await_object, condition, field, follower, ready_members};
use e2e::wait::Look;
use e2e::{Keyspace, PATIENCE, Sandbox, until};
use kube::api::DynamicObject;

use crate::auth::secret;
use crate::certificates::{STATIC, arguments, client, make_secrets, of_services};
use crate::fixtures::cluster_with;
use crate::tls_generated;

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

/// It is said that the quorum is lost; approved, a new cluster goes on from what is left.
async fn is_recovered(sandbox: &Sandbox, before: &DynamicObject) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    // An approval counts for a loss that is sure: a process that is being ended may answer once more.
    await_object(
        &clusters,
        "c",
        "approval is asked for",
        PATIENCE,
        |object| {
            condition(object, "Degraded").is_some_and(|found| {
                let text = found["message"].as_str().unwrap_or_default();
                found["reason"] == "QuorumLost" && text.contains("set the annotation")
            })
        },
    )
    .await?;
    let id = field(before, "/status/clusterID").as_str();
    let id = id.context("no cluster ID")?;
    let approval = format!("etcd.database.coreos.com/recover={id}");
    sandbox
        .kubectl(&["annotate", "etcdcluster", "c", &approval, "--overwrite"])
        .await?;
    await_object(&clusters, "c", "recovered", PATIENCE, |object| {
        field(object, "/status/recovery/phase") == "Complete"
    })
    .await?;
    sandbox.await_members("c", 3).await.map(drop)
}

#[tokio::test]
async fn a_lost_majority_is_recovered_over_tls() {
    discreet_cluster("tls_quorum_loss", async |sandbox| {
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
        is_recovered(sandbox, &before).await?;
        let arguments = arguments(sandbox).await?;
        let is_plain = |one: &String| one.starts_with("--listen-client-urls=http://");
        ensure!(!arguments.iter().any(is_plain));
        let keys = Keyspace::of_tls_cluster(env, namespace, "c", &identity).await?;
        keys.verify("kept/", KEYS).await.map(drop)
    })
    .await;
}

const PASSWORD: &str = "correct-horse-battery";

/// A cluster with authentication loses its majority, while the operator does what `meanwhile` says.
async fn loses_its_majority_with_authentication(
    sandbox: &Sandbox,
    meanwhile: impl AsyncFnOnce(&[String]) -> Result<()>,
) -> Result<()> {
    sandbox.apply(&secret(PASSWORD)).await?;
    let spec = "  TLS: {generated: {}}\n  auth: {secret: root, enabled: true}\n";
    sandbox
        .apply(&cluster_with(&sandbox.env, "c", 3, spec)?)
        .await?;
    sandbox.await_members("c", 3).await?;
    let (env, namespace) = (&sandbox.env, &sandbox.namespace);
    let identity = tls_generated::client(sandbox, "c").await?;
    let root = async || {
        let user = ("root", PASSWORD);
        Keyspace::of_tls_cluster_as(env, namespace, "c", &identity, user).await
    };
    until("etcd takes the password", PATIENCE, async || {
        Ok(Look::Done(root().await.map(drop)?))
    })
    .await?;
    root().await?.fill("kept/", KEYS, |_| ()).await?;
    let before = sandbox.await_members("c", 3).await?;
    let member = ready_members(&before).remove(0);
    let nobody = Keyspace::of_tls_member(env, namespace, &member, &identity).await;
    ensure!(nobody.is_err(), "a client's certificate is enough");
    let survivor = follower(&before)?;
    let mut victims = ready_members(&before);
    victims.retain(|name| *name != survivor);
    meanwhile(&victims).await?;
    is_recovered(sandbox, &before).await?;
    root().await?.verify("kept/", KEYS).await.map(drop)
}

/// Without a quorum etcd gives no login out, and an operator that has just been started has none: the certificate the
/// operator has made for itself names a user.
#[tokio::test]
async fn a_lost_majority_is_recovered_with_authentication_on() {
    discreet_cluster("auth_quorum_loss", async |sandbox| {
        loses_its_majority_with_authentication(sandbox, async |victims| {
            let scale = async |to| {
                let to = format!("--replicas={to}");
                let words = ["scale", "deployment/etcd-operator", &to];
                sandbox.kubectl(&words).await
            };
            scale(0).await?;
            lose(sandbox, victims).await?;
            scale(1).await.map(drop)
        })
        .await
    })
    .await;
}

/// An operator that was there all along has a login of the cluster before: the seed would keep every call with it.
#[tokio::test]
async fn a_lost_majority_is_recovered_by_an_operator_that_is_logged_in() {
    discreet_cluster("auth_quorum_loss_in", async |sandbox| {
        loses_its_majority_with_authentication(sandbox, async |victims| {
            lose(sandbox, victims).await
        })
        .await
    })
    .await;
}
