//! The operator generates certificates, renews them without restarts, and replaces them after they have expired. The
//! operator rotates the CAs while clients write.

use anyhow::{Context, Result, ensure};
use e2e::kubectl::PortForward;
use e2e::leaks::cluster_scenario_without_leaks;
use e2e::tls::{Authority, Identity, Signed};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, Writer, step, until};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::json;

use crate::certificates::{change_members, client_name, until_with_reads, urls_have_tls};
use crate::fixtures::{DURABLE, cluster_with};
use crate::tls_refused::{authority, rejects_other_authorities};
use crate::tls_rotation_generated::rotate_authorities;

/// Lines under `spec` that enable generated certificates.
pub(crate) const GENERATED: &str = "  TLS: {generated: {}}\n";

/// The value of a key in a Secret as text.
pub(crate) async fn value(sandbox: &Sandbox, secret: &str, key: &str) -> Result<String> {
    let secret = sandbox.api::<Secret>().get(secret).await?;
    let data = secret.data.unwrap_or_default();
    let value = data.get(key).with_context(|| format!("no {key}"))?;
    Ok(String::from_utf8(value.0.clone())?)
}

/// A TLS client with the certificate from the generated client Secret.
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

/// The UID and the restarts of each pod.
pub(crate) async fn restarts_by_uid(sandbox: &Sandbox) -> Result<Vec<(String, i32)>> {
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

/// True if every member accepts this client and presents a certificate with this name.
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

/// Invariant 20: until the rotation of the CAs, a client can write with its first certificate.
#[tokio::test]
async fn generated_certificates_are_issued_renewed_and_rotated() {
    cluster_scenario_without_leaks("tls_generated", async |sandbox| {
        let spec = format!("{GENERATED}{DURABLE}");
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, &spec)?)
            .await?;
        sandbox.await_members("c", 3).await?;
        step("check the pods and their Secrets", has_own_secrets(sandbox)).await?;
        let rejects = rejects_other_authorities(sandbox);
        step("connect without a certificate", rejects).await?;
        let identity = client(sandbox, "c").await?;
        let writer = Writer::start_tls(sandbox, "c", &identity).await?;
        step("renew certificates", renews(sandbox, &identity)).await?;
        let changed = members_are_added_and_removed(sandbox);
        step("lose, add and remove members", changed).await?;
        let expired = expired_certificates_are_replaced(sandbox, &identity);
        step("let certificates expire", expired).await?;
        let tally = writer.finish("generated certificates").await?;
        ensure!(tally.acknowledged > 50, "{tally}");
        let rotated = rotate_authorities(sandbox);
        step("rotate the authorities", rotated).await
    })
    .await;
}

/// Ensures that each pod mounts only certificates of its own member: no private key of a CA, and no certificate of an
/// operator or client. Ensures that peers and clients have different CAs.
async fn has_own_secrets(sandbox: &Sandbox) -> Result<()> {
    urls_have_tls(sandbox, "c").await?;
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
            ensure!(own.contains(&secret), "{name} mounts the Secret {secret}");
        }
    }
    let of_peers = value(sandbox, "c-peer-ca", "ca.crt").await?;
    let of_clients = value(sandbox, "c-client-ca", "ca.crt").await?;
    ensure!(
        of_peers != of_clients,
        "peers and clients have the same certificate authority"
    );
    Ok(())
}

async fn renews(sandbox: &Sandbox, identity: &Identity) -> Result<()> {
    let before = restarts_by_uid(sandbox).await?;
    ensure!(!all_serve_as(sandbox, identity, "etcd.example.net").await?);
    let patch = r#"{"spec":{"TLS":{"generated":{"serverNames":["etcd.example.net"]}}}}"#;
    sandbox
        .kubectl(&["patch", "etcdcluster", "c", "--type=merge", "-p", patch])
        .await?;
    until(
        "every member serves with its new certificate",
        DEADLINE,
        async || {
            if all_serve_as(sandbox, identity, "etcd.example.net").await? {
                return Ok(Poll::Done(()));
            }
            Ok(Poll::NotYet(
                "a member serves with its old certificate".into(),
            ))
        },
    )
    .await?;
    // The Secret with the operators' certificate is deleted. The operator must issue a new certificate in its next
    // reconcile.
    let own = value(sandbox, "c-operator-tls", "tls.crt").await?;
    sandbox
        .kubectl(&["delete", "secret", "c-operator-tls"])
        .await?;
    sandbox.trigger_reconcile("c").await?;
    until(
        "the operators have a certificate again",
        DEADLINE,
        async || {
            Ok(match value(sandbox, "c-operator-tls", "tls.crt").await {
                Ok(now) if now != own => Poll::Done(()),
                other => Poll::NotYet(format!("{:?}", other.is_ok())),
            })
        },
    )
    .await?;
    sandbox.await_members("c", 3).await?;
    ensure!(
        restarts_by_uid(sandbox).await? == before,
        "a member was restarted"
    );
    Ok(())
}

async fn members_are_added_and_removed(sandbox: &Sandbox) -> Result<()> {
    change_members(sandbox, "c").await?;
    let of_cluster = ListParams::default().labels("etcd_cluster=c");
    // The expected Secrets are two for the CAs, one for the operators, one for clients, and two for each of the three
    // members.
    let secrets = until(
        "certificates of removed members are deleted",
        DEADLINE,
        async || {
            let secrets = sandbox.api::<Secret>().list(&of_cluster).await?.items;
            let names: Vec<_> = secrets.iter().map(ResourceExt::name_any).collect();
            Ok(if secrets.len() == 4 + 2 * 3 {
                Poll::Done(secrets)
            } else {
                Poll::NotYet(format!("{names:?}"))
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
    Ok(())
}

/// Replaces every certificate by an expired certificate of the same CA, as if the operator had not run for a long
/// time.
async fn expire(sandbox: &Sandbox) -> Result<()> {
    let of_clients = authority(sandbox, "c-client-ca", "client").await?;
    let of_peers = authority(sandbox, "c-peer-ca", "peer").await?;
    let mut expired: Vec<(String, Signed)> = Vec::new();
    for pod in sandbox.member_pods("c").await? {
        let pod = pod.name_any();
        let names = [
            format!("{pod}.{}.svc", sandbox.namespace),
            client_name(sandbox, "c"),
        ];
        let signed = |by: &Authority| by.sign_expired(&names);
        expired.push((format!("{pod}-peer-tls"), signed(&of_peers)?));
        expired.push((format!("{pod}-server-tls"), signed(&of_clients)?));
    }
    for secret in ["c-operator-tls", "c-client-tls"] {
        expired.push((secret.to_owned(), of_clients.expired_client()?));
    }
    let secrets = sandbox.api::<Secret>();
    for (secret, signed) in &expired {
        let data =
            json!({ "stringData": { "tls.crt": signed.certificate, "tls.key": signed.key } });
        let patch = Patch::Merge(data);
        secrets
            .patch(secret, &PatchParams::default(), &patch)
            .await?;
    }
    Ok(())
}

/// True if a new connection to this port fails because the certificate of the member has expired.
async fn is_expired(sandbox: &Sandbox, pod: &str, port: u16, ca: &str) -> Result<bool> {
    let identity = Identity {
        ca: ca.to_owned(),
        own: None,
        name: format!("{pod}.{}.svc", sandbox.namespace),
    };
    let target = format!("pod/{pod}");
    let forward = PortForward::open(&sandbox.env, &sandbox.namespace, &target, port).await?;
    let error = identity.ask(forward.port, "/version").await.err();
    Ok(error.is_some_and(|error| format!("{error:#}").contains("expired")))
}

/// Waits until new connections to both ports of every member fail because of expired certificates.
async fn await_expired(sandbox: &Sandbox) -> Result<()> {
    let of_clients = value(sandbox, "c-client-ca", "ca.crt").await?;
    let of_peers = value(sandbox, "c-peer-ca", "ca.crt").await?;
    until_with_reads(sandbox, "every certificate has expired", async || {
        for pod in sandbox.member_pods("c").await? {
            let pod = pod.name_any();
            for (port, ca) in [(2379, &of_clients), (2380, &of_peers)] {
                if !is_expired(sandbox, &pod, port, ca).await? {
                    return Ok(Poll::NotYet(format!("{pod} serves on port {port}")));
                }
            }
        }
        Ok(Poll::Done(()))
    })
    .await
}

/// Starts the operator after the certificates have expired, and waits until members serve clients.
async fn recovers_from_expiry(sandbox: &Sandbox) -> Result<()> {
    let before = restarts_by_uid(sandbox).await?;
    let start = ["scale", "deployment/etcd-operator", "--replicas=1"];
    sandbox.kubectl(&start).await?;
    sandbox.await_operators().await?;
    until(
        "members serve with new certificates",
        DEADLINE,
        async || {
            let identity = client(sandbox, "c").await?;
            if all_serve_as(sandbox, &identity, &identity.name).await? {
                return Ok(Poll::Done(()));
            }
            Ok(Poll::NotYet("the members do not serve".into()))
        },
    )
    .await?;
    sandbox.await_members("c", 3).await?;
    ensure!(
        restarts_by_uid(sandbox).await? == before,
        "a member was restarted"
    );
    Ok(())
}

async fn stop_operator(sandbox: &Sandbox) -> Result<()> {
    let stop = ["scale", "deployment/etcd-operator", "--replicas=0"];
    sandbox.kubectl(&stop).await?;
    // A terminating operator could renew a certificate, so the test waits until its pod is deleted.
    sandbox.await_operator_pods("etcd-operator", 0).await
}

async fn expired_certificates_are_replaced(sandbox: &Sandbox, identity: &Identity) -> Result<()> {
    stop_operator(sandbox).await?;
    ensure!(all_serve_as(sandbox, identity, &identity.name).await?);
    expire(sandbox).await?;
    await_expired(sandbox).await?;
    recovers_from_expiry(sandbox).await
}

mod full {
    use std::time::Duration;

    use super::*;

    /// The minimum validity that the API accepts.
    const SHORT: &str = "  TLS: {generated: {certificateDuration: 3m}}\n";
    /// The time after which all certificates have expired.
    const EXPIRED: Duration = Duration::from_secs(190);

    #[tokio::test]
    async fn cluster_recovers_after_all_certificates_expire() {
        cluster_scenario_without_leaks("tls_expired", async |sandbox| {
            let spec = format!("{SHORT}{DURABLE}");
            sandbox
                .apply(&cluster_with(&sandbox.env, "c", 3, &spec)?)
                .await?;
            sandbox.await_members("c", 3).await?;
            let identity = client(sandbox, "c").await?;
            let writer = Writer::start_tls(sandbox, "c", &identity).await?;
            writer.await_more(20).await?;
            writer.finish("before the expiry").await?;
            stop_operator(sandbox).await?;
            let identity = client(sandbox, "c").await?;
            ensure!(all_serve_as(sandbox, &identity, &identity.name).await?);
            tokio::time::sleep(EXPIRED).await;
            await_expired(sandbox).await?;
            recovers_from_expiry(sandbox).await?;
            let identity = client(sandbox, "c").await?;
            let writer = Writer::start_tls(sandbox, "c", &identity).await?;
            writer.await_more(20).await?;
            writer.finish("after the expiry").await.map(drop)
        })
        .await;
    }
}
