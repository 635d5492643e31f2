//! Secrets with CAs are deleted, emptied or replaced in a healthy cluster. In some steps, a pod is deleted at the same
//! time. The operator replaces a lost CA in steps, and members and clients can connect in each step.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use e2e::leaks::cluster_scenario_without_leaks;
use e2e::objects::{self, Kind, is_ready};
use e2e::tls::{Authority, Identity};
use e2e::wait::Poll;
use e2e::{DEADLINE, RollingCheck, Sandbox, Writer, step, until};
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::certificates::until_with_reads;
use crate::fixtures::{DURABLE, cluster_with};
use crate::tls_generated::{GENERATED, client, restarts_by_uid, value};

/// The change of a Secret with a CA.
#[derive(Clone, Copy, Debug)]
enum Loss {
    Deleted,
    Emptied,
    Replaced,
}

impl Loss {
    async fn apply(self, sandbox: &Sandbox, secret: &str) -> Result<()> {
        let data = match self {
            Self::Deleted => {
                sandbox.kubectl(&["delete", "secret", secret]).await?;
                return Ok(());
            }
            Self::Emptied => json!({ "data": null }),
            Self::Replaced => {
                let other = Authority::new("another authority")?;
                json!({ "stringData": {
                    "tls.crt": other.pem,
                    "tls.key": other.key_pem(),
                    "ca.crt": other.pem,
                } })
            }
        };
        let secrets = sandbox.api::<Secret>();
        let patch = Patch::Merge(data);
        secrets
            .patch(secret, &PatchParams::default(), &patch)
            .await?;
        Ok(())
    }
}

/// The peer certificates (if `kind` is `peer`) or server certificates (if `kind` is `server`), by member.
async fn certificates(sandbox: &Sandbox, kind: &str) -> Result<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    for pod in sandbox.member_pods("c").await? {
        let pod = pod.name_any();
        let held = value(sandbox, &format!("{pod}-{kind}-tls"), "tls.crt").await;
        all.insert(pod, held.unwrap_or_default());
    }
    Ok(all)
}

/// Waits until every member has restarted with a new certificate, and all members are ready.
async fn await_replaced(
    sandbox: &Sandbox,
    kinds: &[&str],
    before: &[BTreeMap<String, String>],
    restarts: &[(String, i32)],
) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = "the authority is replaced, all members are ready";
    until_with_reads(sandbox, what, async || {
        for (kind, before) in kinds.iter().zip(before) {
            let now = certificates(sandbox, kind).await?;
            let new = |(pod, held): (&String, &String)| {
                !held.is_empty() && before.get(pod).is_some_and(|old| old != held)
            };
            if now.len() != 3 || !now.iter().all(new) {
                return Ok(Poll::NotYet(format!(
                    "the {kind} certificates are unchanged"
                )));
            }
        }
        let pods = sandbox.member_pods("c").await?;
        let object = clusters.get("c").await?;
        let ready = objects::ready_members(&object);
        let now = restarts_by_uid(sandbox).await?;
        let again = now.iter().all(|life| !restarts.contains(life));
        let whole = pods.iter().all(is_ready) && ready.len() == 3 && again;
        Ok(
            if whole && objects::has_condition(&object, "Available", "True") {
                Poll::Done(())
            } else {
                Poll::NotYet(format!(
                    "ready: {ready:?}; {}",
                    objects::conditions_line(&object)
                ))
            },
        )
    })
    .await
}

/// Waits until the client Secret trusts more CAs than `before`, and returns a client with this Secret.
async fn await_bundle(sandbox: &Sandbox, before: &Identity) -> Result<Identity> {
    let count = |identity: &Identity| identity.ca.matches("BEGIN CERTIFICATE").count();
    until("clients trust the next authority", DEADLINE, async || {
        sandbox.trigger_reconcile("c").await?;
        let Ok(now) = client(sandbox, "c").await else {
            return Ok(Poll::NotYet("the clients' Secret is incomplete".into()));
        };
        Ok(if count(&now) > count(before) {
            Poll::Done(now)
        } else {
            Poll::NotYet(format!("{} authorities", count(&now)))
        })
    })
    .await
}

/// Changes the Secret of a CA. Members restart one at a time, so a write waits for at most one restart.
async fn lose_authority(sandbox: &Sandbox, kind: &str, secret: &str, loss: Loss) -> Result<()> {
    let what = format!("{secret} is {loss:?}");
    let identity = client(sandbox, "c").await?;
    let mut writer = Writer::start_tls(sandbox, "c", &identity).await?;
    let before = [certificates(sandbox, kind).await?];
    let restarts = restarts_by_uid(sandbox).await?;
    let check = RollingCheck::start(sandbox, "c", 3).await?;
    loss.apply(sandbox, secret).await?;
    if kind == "server" {
        let both = await_bundle(sandbox, &identity).await?;
        writer.finish(&what).await?;
        writer = Writer::start_tls(sandbox, "c", &both).await?;
    }
    await_replaced(sandbox, &[kind], &before, &restarts).await?;
    ensure!(
        check.finish().await? == 3,
        "{what}: not every member restarted once"
    );
    let tally = writer.finish(&what).await?;
    ensure!(tally.acknowledged > 50, "{what}: {tally}");
    Ok(())
}

/// Deletes the Secret of a CA and the pod of a member at the same time.
async fn lose_authority_and_pod(sandbox: &Sandbox, kind: &str, secret: &str) -> Result<()> {
    let what = format!("{secret} and a pod are deleted");
    let identity = client(sandbox, "c").await?;
    let mut writer = Writer::start_tls(sandbox, "c", &identity).await?;
    let before = [certificates(sandbox, kind).await?];
    let restarts = restarts_by_uid(sandbox).await?;
    let pods = sandbox.member_pods("c").await?;
    let pod = pods.last().map(ResourceExt::name_any).context("no pod")?;
    let secret = format!("secret/{secret}");
    let pod = format!("pod/{pod}");
    sandbox
        .kubectl(&["delete", &secret, &pod, "--now", "--wait=false"])
        .await?;
    if kind == "server" {
        let both = await_bundle(sandbox, &identity).await?;
        writer.finish(&what).await?;
        writer = Writer::start_tls(sandbox, "c", &both).await?;
    }
    await_replaced(sandbox, &[kind], &before, &restarts).await?;
    writer.finish(&what).await.map(drop)
}

/// Deletes all Secrets, as if the namespace had been restored without them. The private keys of all CAs that running
/// members trust are lost, so the new certificates have CAs that these members do not trust. The operator restarts the
/// members one at a time without an approval.
async fn lose_all_secrets(sandbox: &Sandbox) -> Result<()> {
    let identity = client(sandbox, "c").await?;
    let kinds = ["peer", "server"];
    let before = [
        certificates(sandbox, "peer").await?,
        certificates(sandbox, "server").await?,
    ];
    let restarts = restarts_by_uid(sandbox).await?;
    let mut writer = Writer::start_tls(sandbox, "c", &identity).await?;
    sandbox
        .kubectl(&["delete", "secret", "-l", "etcd_cluster=c"])
        .await?;
    await_replaced(sandbox, &kinds, &before, &restarts).await?;
    // The keys are read with a new certificate, because the CA that signed the certificate of the writer is deleted.
    let identity = client(sandbox, "c").await?;
    writer.read_as(&identity);
    writer.finish("all Secrets are deleted").await?;
    let writer = Writer::start_tls(sandbox, "c", &identity).await?;
    writer.await_more(20).await?;
    writer
        .finish("after all Secrets were deleted")
        .await
        .map(drop)
}

/// Creates a cluster with three members, volumes and generated certificates.
async fn form(sandbox: &Sandbox) -> Result<()> {
    let spec = format!("{GENERATED}{DURABLE}");
    sandbox
        .apply(&cluster_with(&sandbox.env, "c", 3, &spec)?)
        .await?;
    sandbox.await_members("c", 3).await.map(drop)
}

/// Invariant 20: members and clients can connect in each step. The tests in `full`, the unit tests and the model test
/// cover all changes of all CAs.
#[tokio::test]
async fn lost_authorities_are_replaced_while_clients_write() {
    cluster_scenario_without_leaks("tls_lost_authority", async |sandbox| {
        form(sandbox).await?;
        let deleted = lose_authority(sandbox, "peer", "c-peer-ca", Loss::Deleted);
        step("delete the peer authority", deleted).await?;
        let replaced = lose_authority(sandbox, "server", "c-client-ca", Loss::Replaced);
        step("replace the client authority", replaced).await?;
        let with_pod = lose_authority_and_pod(sandbox, "peer", "c-peer-ca");
        step("delete the peer authority and a pod", with_pod).await?;
        step("delete all Secrets", lose_all_secrets(sandbox)).await
    })
    .await;
}

mod full {
    use super::*;

    /// Makes each change in [`Loss`] to the Secret of a CA, and then deletes this Secret together with a pod.
    async fn lose_in_every_way(sandbox: &Sandbox, kind: &str, secret: &str) -> Result<()> {
        form(sandbox).await?;
        for loss in [Loss::Deleted, Loss::Emptied, Loss::Replaced] {
            lose_authority(sandbox, kind, secret, loss).await?;
        }
        lose_authority_and_pod(sandbox, kind, secret).await
    }

    /// Invariant 20: members and clients can connect in each step.
    #[tokio::test]
    async fn every_loss_of_peer_authority_is_repaired() {
        cluster_scenario_without_leaks("tls_lost_peer_ca", async |sandbox| {
            lose_in_every_way(sandbox, "peer", "c-peer-ca").await
        })
        .await;
    }

    /// Invariant 20: members and clients can connect in each step.
    #[tokio::test]
    async fn every_loss_of_client_authority_is_repaired() {
        cluster_scenario_without_leaks("tls_lost_client_ca", async |sandbox| {
            lose_in_every_way(sandbox, "server", "c-client-ca").await
        })
        .await;
    }
}
