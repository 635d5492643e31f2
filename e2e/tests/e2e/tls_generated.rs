//! Certificates that the operator makes: a cluster forms with them and lives on them, they are made anew without a
//! restart, their authorities are replaced without anybody being locked out, and a cluster whose certificates have run
//! out while no operator was there comes back by itself.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::kubectl::PortForward;
use e2e::leaks::discreet_cluster;
use e2e::objects::{Kind, await_object, condition, has_condition};
use e2e::tls::{Identity, Signed};
use e2e::wait::Look;
use e2e::{Keyspace, PATIENCE, Sandbox, Writer, cluster_scenario, until};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::ResourceExt;
use kube::api::ListParams;

use crate::certificates::{arguments, client_name, lives};
use crate::fixtures::{DURABLE, cluster_with};
use crate::tls_static::is_let_in;

/// Lines under `spec` for certificates the operator makes.
pub(crate) const GENERATED: &str = "  TLS: {generated: {}}\n";
/// For certificates that run out while a test can wait for it.
const SHORT: &str = "  TLS: {generated: {certificateDuration: 3m}}\n";
/// After so long the last of them has run out.
const RUN_OUT: Duration = Duration::from_secs(190);

/// A key of a Secret as text.
pub(crate) async fn value(sandbox: &Sandbox, secret: &str, key: &str) -> Result<String> {
    let secret = sandbox.api::<Secret>().get(secret).await?;
    let data = secret.data.unwrap_or_default();
    let value = data.get(key).with_context(|| format!("no {key}"))?;
    Ok(String::from_utf8(value.0.clone())?)
}

/// What a user's client takes from the Secret that is made for it.
pub(crate) async fn client(sandbox: &Sandbox, cluster: &str) -> Result<Identity> {
    let secret = format!("{cluster}-client-tls");
    Ok(Identity {
        ca: value(sandbox, &secret, "ca.crt").await?,
        own: Some(Signed {
            certificate: value(sandbox, &secret, "tls.crt").await?,
            key: value(sandbox, &secret, "tls.key").await?,
        }),
        name: client_name(sandbox, cluster),
    })
}

/// The pods, and how often their containers were started again.
pub(crate) async fn lives_of(sandbox: &Sandbox) -> Result<Vec<(String, i32)>> {
    let pods = sandbox.member_pods("c").await?;
    let life = |pod: &Pod| {
        let statuses = pod
            .status
            .as_ref()
            .and_then(|status| status.container_statuses.as_ref());
        let restarts = statuses
            .into_iter()
            .flatten()
            .map(|one| one.restart_count)
            .sum();
        (pod.uid().unwrap_or_default(), restarts)
    };
    let mut all: Vec<_> = pods.iter().map(life).collect();
    all.sort();
    Ok(all)
}

/// Whether every member serves with a certificate for this name, to whoever has this identity.
pub(crate) async fn all_serve_as(
    sandbox: &Sandbox,
    identity: &Identity,
    name: &str,
) -> Result<bool> {
    let identity = Identity {
        name: name.to_owned(),
        ..identity.clone()
    };
    for pod in sandbox.member_pods("c").await? {
        let pod = pod.name_any();
        if Keyspace::of_tls_member(&sandbox.env, &sandbox.namespace, &pod, &identity)
            .await
            .is_err()
        {
            return Ok(false);
        }
    }
    Ok(true)
}

#[tokio::test]
async fn a_cluster_lives_on_certificates_the_operator_makes() {
    discreet_cluster("tls_generated", async |sandbox| {
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, GENERATED)?)
            .await?;
        sandbox.await_members("c", 3).await?;
        for argument in arguments(sandbox).await? {
            ensure!(
                !argument.contains("http://") || argument.starts_with("--listen-metrics-urls="),
                "{argument}"
            );
        }
        let identity = client(sandbox, "c").await?;
        lives(sandbox, &identity, "generated certificates").await?;

        // Whatever is in a pod, no authority's key is, and nothing of the operators or clients.
        for pod in sandbox.member_pods("c").await? {
            let (name, spec) = (pod.name_any(), pod.spec.unwrap_or_default());
            for secret in spec
                .volumes
                .into_iter()
                .flatten()
                .filter_map(|volume| volume.secret)
            {
                let secret = secret.secret_name.unwrap_or_default();
                let own = [format!("{name}-peer-tls"), format!("{name}-server-tls")];
                ensure!(own.contains(&secret), "{name} sees Secret {secret}");
            }
        }
        let of_cluster = ListParams::default().labels("etcd_cluster=c");
        // Two authorities, the operators', the clients', two a member.
        let secrets = until(
            "no member's certificates outlive it",
            PATIENCE,
            async || {
                let secrets = sandbox.api::<Secret>().list(&of_cluster).await?.items;
                let names: Vec<_> = secrets.iter().map(ResourceExt::name_any).collect();
                Ok(if secrets.len() == 4 + 2 * 3 {
                    Look::Done(secrets)
                } else {
                    Look::NotYet(format!("{names:?}"))
                })
            },
        )
        .await?;
        for secret in secrets {
            let owners = secret.owner_references();
            ensure!(
                owners.iter().any(|owner| owner.kind == "EtcdCluster"),
                "{}",
                secret.name_any()
            );
        }
        // A client's certificate is none of a peer.
        let peers = Identity {
            ca: value(sandbox, "c-peer-ca", "ca.crt").await?,
            ..identity
        };
        ensure!(peers.ca != value(sandbox, "c-client-ca", "ca.crt").await?);
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn certificates_are_made_anew_without_a_restart() {
    discreet_cluster("tls_rotation_leaf", async |sandbox| {
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, GENERATED)?)
            .await?;
        sandbox.await_members("c", 3).await?;
        let identity = client(sandbox, "c").await?;
        let writer = Writer::start_tls(sandbox, "c", &identity).await?;
        let before = lives_of(sandbox).await?;
        ensure!(!all_serve_as(sandbox, &identity, "etcd.example.net").await?);

        let patch = r#"{"spec":{"TLS":{"generated":{"serverNames":["etcd.example.net"]}}}}"#;
        sandbox
            .kubectl(&["patch", "etcdcluster", "c", "--type=merge", "-p", patch])
            .await?;
        until(
            "every member serves with its new certificate",
            PATIENCE,
            async || {
                if all_serve_as(sandbox, &identity, "etcd.example.net").await? {
                    return Ok(Look::Done(()));
                }
                Ok(Look::NotYet("some serve with the one before".into()))
            },
        )
        .await?;
        // The operators' own: the next reading takes it.
        let own = value(sandbox, "c-operator-tls", "tls.crt").await?;
        sandbox
            .kubectl(&["delete", "secret", "c-operator-tls"])
            .await?;
        sandbox.look_at("c").await?;
        until(
            "the operators have a certificate again",
            PATIENCE,
            async || {
                Ok(match value(sandbox, "c-operator-tls", "tls.crt").await {
                    Ok(now) if now != own => Look::Done(()),
                    other => Look::NotYet(format!("{:?}", other.is_ok())),
                })
            },
        )
        .await?;
        sandbox.await_members("c", 3).await?;
        ensure!(lives_of(sandbox).await? == before, "a member was restarted");
        writer.finish("new certificates").await.map(drop)
    })
    .await;
}

#[tokio::test]
async fn a_cluster_whose_certificates_have_run_out_comes_back() {
    discreet_cluster("tls_expired", async |sandbox| {
        sandbox
            .apply(&cluster_with(
                &sandbox.env,
                "c",
                3,
                &format!("{SHORT}{DURABLE}"),
            )?)
            .await?;
        sandbox.await_members("c", 3).await?;
        let identity = client(sandbox, "c").await?;
        let writer = Writer::start_tls(sandbox, "c", &identity).await?;
        writer.await_more(20).await?;
        writer.finish("before").await?;
        let operator = "deployment/etcd-operator";
        sandbox
            .kubectl(&["scale", operator, "--replicas=0"])
            .await?;
        // One that is ending may make a last one anew.
        sandbox.await_pods_of("etcd-operator", 0).await?;
        let pods = sandbox.member_pods("c").await?;
        let first = pods.first().map(ResourceExt::name_any).context("no pod")?;
        let first = format!("pod/{first}");
        ensure!(is_let_in(sandbox, &first, 2379, &identity).await?);
        tokio::time::sleep(RUN_OUT).await;
        let forward = PortForward::open(&sandbox.env, &sandbox.namespace, &first, 2379).await?;
        let refused = identity.ask(forward.port, "/version").await;
        let why = refused.err().context("an expired certificate was taken")?;
        ensure!(format!("{why:#}").contains("expired"), "{why:#}");
        let before = lives_of(sandbox).await?;

        sandbox
            .kubectl(&["scale", operator, "--replicas=1"])
            .await?;
        sandbox.await_operators().await?;
        until(
            "there are new certificates, and members serve with them",
            PATIENCE,
            async || {
                let identity = client(sandbox, "c").await?;
                if all_serve_as(sandbox, &identity, &identity.name).await? {
                    return Ok(Look::Done(()));
                }
                Ok(Look::NotYet("nobody is served".into()))
            },
        )
        .await?;
        sandbox.await_members("c", 3).await?;
        ensure!(lives_of(sandbox).await? == before, "a member was restarted");
        let identity = client(sandbox, "c").await?;
        let writer = Writer::start_tls(sandbox, "c", &identity).await?;
        writer.await_more(20).await?;
        writer.finish("after").await.map(drop)
    })
    .await;
}

/// How many authorities clients are to trust, and whether the next one is waiting.
async fn authorities(sandbox: &Sandbox) -> Result<(usize, bool)> {
    let mut most = 0;
    let mut waits = false;
    for secret in ["c-client-ca", "c-peer-ca"] {
        let trusted = value(sandbox, secret, "ca.crt").await?;
        most = most.max(trusted.matches("BEGIN CERTIFICATE").count());
        waits |= value(sandbox, secret, "next.crt").await.is_ok();
    }
    Ok((most, waits))
}

#[tokio::test]
async fn authorities_are_replaced_while_clients_write() {
    discreet_cluster("tls_rotation_ca", async |sandbox| {
        // Clients are given a third of it to take the next certificates.
        let spec = "  TLS: {generated: {certificateDuration: 4m}}\n";
        sandbox
            .apply(&cluster_with(
                &sandbox.env,
                "c",
                3,
                &format!("{spec}{DURABLE}"),
            )?)
            .await?;
        sandbox.await_members("c", 3).await?;
        let old = client(sandbox, "c").await?;
        let writer = Writer::start_tls(sandbox, "c", &old).await?;
        let ask = "etcd.database.coreos.com/rotate-authority=once";
        sandbox
            .kubectl(&["annotate", "etcdcluster", "c", ask])
            .await?;

        // Both are trusted, while the one before still signs: clients take the Secret now.
        let both = until(
            "clients are told of both authorities",
            PATIENCE,
            async || {
                let now = client(sandbox, "c").await?;
                Ok(match now.ca.matches("BEGIN CERTIFICATE").count() {
                    2 => Look::Done(now),
                    count => Look::NotYet(format!("{count} authorities")),
                })
            },
        )
        .await?;
        writer.finish("the next authority").await?;
        let writer = Writer::start_tls(sandbox, "c", &both).await?;
        let slow = PATIENCE * 3;
        until("the next authority signs", slow, async || {
            let (count, waits) = authorities(sandbox).await?;
            Ok(if count == 2 && !waits {
                Look::Done(())
            } else {
                Look::NotYet(format!("{count} {waits}"))
            })
        })
        .await?;
        let new = until(
            "clients have a certificate by the new authority",
            PATIENCE,
            async || {
                let now = client(sandbox, "c").await?;
                let own =
                    |identity: &Identity| identity.own.as_ref().map(|own| own.certificate.clone());
                Ok(if own(&now) == own(&both) {
                    Look::NotYet("the one before".into())
                } else {
                    Look::Done(now)
                })
            },
        )
        .await?;
        writer.finish("certificates by the new authority").await?;
        let writer = Writer::start_tls(sandbox, "c", &new).await?;
        until(
            "the authority before is trusted no longer",
            slow,
            async || {
                let (count, waits) = authorities(sandbox).await?;
                Ok(if count == 1 && !waits {
                    Look::Done(())
                } else {
                    Look::NotYet(format!("{count} {waits}"))
                })
            },
        )
        .await?;
        until(
            "members refuse who has a certificate by the one before",
            slow,
            async || {
                for pod in sandbox.member_pods("c").await? {
                    let pod = pod.name_any();
                    let old = Identity {
                        ca: new.ca.clone(),
                        ..old.clone()
                    };
                    let way = Keyspace::of_tls_member(&sandbox.env, &sandbox.namespace, &pod, &old);
                    if way.await.is_ok() {
                        return Ok(Look::NotYet(format!("{pod} lets it in")));
                    }
                }
                Ok(Look::Done(()))
            },
        )
        .await?;
        sandbox.await_members("c", 3).await?;
        writer
            .finish("without the authority before")
            .await
            .map(drop)
    })
    .await;
}

/// Invariant 20: members that talk TLS and members that do not cannot reach each other.
#[tokio::test]
async fn a_cluster_that_runs_is_not_switched() {
    // There is no Secret that could leak.
    cluster_scenario("tls_switch_refused", async |sandbox| {
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, "")?)
            .await?;
        sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        let patch = r#"{"spec":{"TLS":{"generated":{}}}}"#;
        sandbox
            .kubectl(&["patch", "etcdcluster", "c", "--type=merge", "-p", patch])
            .await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        await_object(
            &clusters,
            "c",
            "the switch is refused",
            PATIENCE,
            |object| {
                condition(object, "Degraded")
                    .is_some_and(|found| found["reason"] == "TLSSwitchRefused")
            },
        )
        .await?;
        // It is maintained as it was.
        let pods = sandbox.member_pods("c").await?;
        let lost = pods.first().map(ResourceExt::name_any).context("no pod")?;
        sandbox.lose_pod("c", &lost).await?;
        sandbox.await_members("c", 3).await?;
        for argument in arguments(sandbox).await? {
            ensure!(!argument.contains("https://"), "{argument}");
        }
        let back = r#"{"spec":{"TLS":null}}"#;
        sandbox
            .kubectl(&["patch", "etcdcluster", "c", "--type=merge", "-p", back])
            .await?;
        await_object(&clusters, "c", "nothing is wrong", PATIENCE, |object| {
            has_condition(object, "Degraded", "False")
        })
        .await?;
        writer.finish("a switch that is refused").await.map(drop)
    })
    .await;
}
