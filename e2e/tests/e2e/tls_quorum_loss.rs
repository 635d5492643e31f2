//! Clusters with TLS lose a majority. The seed of the recovery downloads the survivor's snapshot with the operator's
//! certificate, even if authentication is enabled.

use anyhow::{Context, Result, ensure};
use e2e::leaks::cluster_scenario_without_leaks;
use e2e::objects::{Kind, await_object, condition, field, follower, ready_members};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, step, until};
use kube::api::DynamicObject;

use crate::auth::secret;
use crate::certificates::{arguments, client, make_secrets, service_dns_names};
use crate::fixtures::cluster_with;
use crate::quorum_loss::lose;
use crate::tls_generated;

const KEYS: usize = 200;

/// TLS for clients, but not between members.
const FOR_CLIENTS: &str =
    "  TLS: {static: {member: {serverSecret: server}, operatorSecret: operator}}\n";

/// Deletes all pods except the pod of a follower.
async fn lose_majority(sandbox: &Sandbox, before: &DynamicObject) -> Result<()> {
    let survivor = follower(before)?;
    let mut victims = ready_members(before);
    victims.retain(|name| *name != survivor);
    lose(sandbox, &["pod"], &victims).await
}

/// Waits until the operator reports the lost quorum, approves the recovery, and waits until the recovery is complete
/// and the new cluster has three members.
async fn is_recovered(sandbox: &Sandbox, before: &DynamicObject) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(
        &clusters,
        "c",
        "the approval is requested",
        DEADLINE,
        |object| {
            condition(object, "Degraded").is_some_and(|found| {
                let text = found["message"].as_str().unwrap_or_default();
                found["reason"] == "QuorumLost" && text.contains("annotate etcdcluster")
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
    await_object(&clusters, "c", "recovered", DEADLINE, |object| {
        let record = field(object, "/status/recovery");
        record["phase"] == "Complete" && record["fromClusterID"] == id
    })
    .await?;
    sandbox.await_members("c", 3).await.map(drop)
}

/// Ensures that the members use TLS for clients, but not between each other.
async fn clients_have_tls_and_peers_have_none(sandbox: &Sandbox) -> Result<()> {
    let arguments = arguments(sandbox, "c").await?;
    let count = |text: &str| {
        let has = arguments.iter().filter(|one| one.starts_with(text));
        has.count()
    };
    ensure!(count("--listen-peer-urls=http://") == 3);
    ensure!(count("--listen-client-urls=https://") == 3);
    Ok(())
}

#[tokio::test]
async fn cluster_with_client_tls_recovers_from_quorum_loss() {
    cluster_scenario_without_leaks("tls_quorum_loss", async |sandbox| {
        let authority = make_secrets(sandbox, &service_dns_names(sandbox), false).await?;
        let manifest = cluster_with(&sandbox.env, "c", 3, FOR_CLIENTS)?;
        sandbox.apply(&manifest).await?;
        let before = sandbox.await_members("c", 3).await?;
        clients_have_tls_and_peers_have_none(sandbox).await?;
        let identity = client(&authority, sandbox, "c")?;
        let (env, namespace) = (&sandbox.env, &sandbox.namespace);
        let keys = Keyspace::of_tls_cluster(env, namespace, "c", &identity).await?;
        keys.fill("kept/", KEYS, |_| ()).await?;
        drop(keys);
        lose_majority(sandbox, &before).await?;
        is_recovered(sandbox, &before).await?;
        clients_have_tls_and_peers_have_none(sandbox).await?;
        let keys = Keyspace::of_tls_cluster(env, namespace, "c", &identity).await?;
        keys.verify("kept/", KEYS).await.map(drop)
    })
    .await;
}

const PASSWORD: &str = "correct-horse-battery";

/// A cluster with generated certificates and authentication.
struct SecuredCluster<'a> {
    sandbox: &'a Sandbox,
}

impl SecuredCluster<'_> {
    async fn root(&self) -> Result<Keyspace> {
        let (env, namespace) = (&self.sandbox.env, &self.sandbox.namespace);
        let identity = tls_generated::client(self.sandbox, "c").await?;
        let user = ("root", PASSWORD);
        Keyspace::of_tls_cluster_as(env, namespace, "c", &identity, user).await
    }

    async fn form(&self) -> Result<()> {
        let sandbox = self.sandbox;
        sandbox.apply(&secret(PASSWORD)).await?;
        let spec = "  TLS: {generated: {}}\n  auth: {secret: root, enabled: true}\n";
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, spec)?)
            .await?;
        sandbox.await_members("c", 3).await?;
        until("etcd accepts the password", DEADLINE, async || {
            Ok(Poll::Done(self.root().await.map(drop)?))
        })
        .await
    }

    /// Ensures that etcd denies access to a client that has a certificate but no login.
    async fn rejects_certificate_alone(&self, member: &str) -> Result<()> {
        let (env, namespace) = (&self.sandbox.env, &self.sandbox.namespace);
        let identity = tls_generated::client(self.sandbox, "c").await?;
        let anonymous = Keyspace::of_tls_member(env, namespace, member, &identity).await;
        ensure!(
            anonymous.is_err(),
            "a client certificate alone grants access"
        );
        Ok(())
    }

    /// Loses members with `lose`, and ensures that the cluster is recovered.
    async fn recovers(&self, lose: impl AsyncFnOnce(&DynamicObject) -> Result<()>) -> Result<()> {
        let before = self.sandbox.await_members("c", 3).await?;
        self.rejects_certificate_alone(&ready_members(&before).remove(0))
            .await?;
        lose(&before).await?;
        is_recovered(self.sandbox, &before).await?;
        let arguments = arguments(self.sandbox, "c").await?;
        let is_plain = |one: &String| {
            one.starts_with("--listen-client-urls=http://")
                || one.starts_with("--listen-peer-urls=http://")
        };
        ensure!(!arguments.iter().any(is_plain));
        self.root().await?.verify("kept/", KEYS).await.map(drop)
    }

    async fn recovers_with_running_operator(&self) -> Result<()> {
        self.recovers(async |before| lose_majority(self.sandbox, before).await)
            .await
    }

    async fn recovers_with_new_operator(&self) -> Result<()> {
        let scale = async |to| {
            let to = format!("--replicas={to}");
            let words = ["scale", "deployment/etcd-operator", &to];
            self.sandbox.kubectl(&words).await
        };
        self.recovers(async |before| {
            scale(0).await?;
            lose_majority(self.sandbox, before).await?;
            scale(1).await.map(drop)
        })
        .await
    }
}

/// A running operator has a token of the old cluster, which the seed rejects. A new operator has no token, and cannot
/// log in without a quorum. So the operator authenticates with its certificate, which names an etcd user.
#[tokio::test]
async fn cluster_with_authentication_recovers_from_quorum_loss() {
    cluster_scenario_without_leaks("auth_quorum_loss", async |sandbox| {
        let cluster = SecuredCluster { sandbox };
        cluster.form().await?;
        cluster.root().await?.fill("kept/", KEYS, |_| ()).await?;
        let running = cluster.recovers_with_running_operator();
        step("lose the majority while the operator is logged in", running).await?;
        let new = cluster.recovers_with_new_operator();
        step("lose the majority, then start a new operator process", new).await
    })
    .await;
}
