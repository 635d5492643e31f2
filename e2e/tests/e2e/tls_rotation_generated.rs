//! The operator rotates the generated CAs in steps, while clients write and the operator crashes.

use anyhow::{Result, ensure};
use e2e::tls::Identity;
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, Writer, until};
use kube::ResourceExt;

use crate::operator_crash::CrashingOperator;
use crate::tls_generated::{client, value};

/// The failpoint at which all members trust the next CA, but the old CA still signs certificates.
const CRASH: &[&str] = &["before-switch-authority"];
/// The minimum validity that the API accepts. Clients then have one minute to read their next certificate.
const SHORT: &str = r#"{"spec":{"TLS":{"generated":{"certificateDuration":"3m"}}}}"#;

/// The number of CAs that clients trust, or that members trust if this number is larger. The second value is true if a
/// next CA is pending.
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

/// Waits until the number of [`authorities`] is `expected`, and no next CA is pending.
async fn await_authorities(sandbox: &Sandbox, what: &str, expected: usize) -> Result<()> {
    until(what, DEADLINE * 2, async || {
        let (count, waits) = authorities(sandbox).await?;
        Ok(if count == expected && !waits {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{count} authorities, next one pending: {waits}"))
        })
    })
    .await
}

/// Waits until the client Secret has another certificate than `before`.
async fn await_next_certificate(sandbox: &Sandbox, before: &Identity) -> Result<Identity> {
    until(
        "clients have a certificate of the next authority",
        DEADLINE,
        async || {
            let now = client(sandbox, "c").await?;
            let own =
                |identity: &Identity| identity.own.as_ref().map(|own| own.certificate.clone());
            Ok(if own(&now) == own(before) {
                Poll::NotYet("the old certificate".into())
            } else {
                Poll::Done(now)
            })
        },
    )
    .await
}

/// Waits until every member rejects the old certificate. The client trusts the new CA, so only its own certificate can
/// be the reason.
async fn await_rejected(sandbox: &Sandbox, old: &Identity, ca: &str) -> Result<()> {
    let old = Identity {
        ca: ca.to_owned(),
        ..old.clone()
    };
    until(
        "members reject a certificate of the old authority",
        DEADLINE,
        async || {
            for pod in sandbox.member_pods("c").await? {
                let pod = pod.name_any();
                let (env, namespace) = (&sandbox.env, &sandbox.namespace);
                let access = Keyspace::of_tls_member(env, namespace, &pod, &old);
                if access.await.is_ok() {
                    return Ok(Poll::NotYet(format!("{pod} accepts it")));
                }
            }
            Ok(Poll::Done(()))
        },
    )
    .await
}

/// Invariant 20: after the rotation, members reject old certificates. The old certificates are valid for months, so
/// only their CA can be the reason.
pub(crate) async fn rotate_authorities(sandbox: &Sandbox) -> Result<()> {
    let old = client(sandbox, "c").await?;
    let writer = Writer::start_tls(sandbox, "c", &old).await?;
    sandbox
        .kubectl(&["patch", "etcdcluster", "c", "--type=merge", "-p", SHORT])
        .await?;
    let mut operator = CrashingOperator {
        sandbox,
        crashes: 0,
    };
    let annotation = "etcd.database.coreos.com/rotate-authority=once";
    operator
        .crash_at_each(CRASH, async |_| {
            sandbox
                .kubectl(&["annotate", "etcdcluster", "c", annotation, "--overwrite"])
                .await
                .map(drop)
        })
        .await?;

    // While the old CA signs certificates, clients must trust both CAs.
    let both = client(sandbox, "c").await?;
    ensure!(both.ca.matches("BEGIN CERTIFICATE").count() == 2);
    writer.finish("the next authority is trusted").await?;
    let writer = Writer::start_tls(sandbox, "c", &both).await?;
    ensure!(operator.run_without_failpoints().await? == CRASH.len());
    await_authorities(sandbox, "the next authority signs", 2).await?;
    let new = await_next_certificate(sandbox, &both).await?;
    writer.finish("certificates of the next authority").await?;
    let mut writer = Writer::start_tls(sandbox, "c", &new).await?;
    await_authorities(sandbox, "the old authority is not trusted", 1).await?;
    await_rejected(sandbox, &old, &new.ca).await?;
    sandbox.await_members("c", 3).await?;
    // Certificates are now valid for three minutes, so the writer may need a new certificate.
    writer.read_as(&client(sandbox, "c").await?);
    writer.finish("without the old authority").await.map(drop)
}
