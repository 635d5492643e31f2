//! TLS Secrets with mistakes. The operator reports each mistake, starts no member with such a Secret, and does not
//! change running members.

use anyhow::{Result, ensure};
use e2e::objects::{Kind, await_object, condition, conditions_line};
use e2e::tls::{self, Authority, Signed};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, until};
use kube::ResourceExt;
use serde_json::json;

use crate::certificates::await_tls_ready;

/// Replaces the server certificate of all members.
async fn serve_with(sandbox: &Sandbox, signed: &Signed, ca: &str) -> Result<()> {
    let secret = tls::secret("server", tls::SERVER, signed, ca);
    sandbox.apply(&secret).await.map(drop)
}

/// Waits until `TLSReady` is False with this reason and all fragments in its message, and for an Event with this
/// reason.
pub(crate) async fn await_fault(sandbox: &Sandbox, reason: &str, fragments: &[&str]) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = format!("TLSReady=False ({reason}) with {fragments:?}");
    await_object(&clusters, "c", &what, DEADLINE, |object| {
        condition(object, "TLSReady").is_some_and(|found| {
            let message = found["message"].as_str().unwrap_or_default();
            found["status"] == "False"
                && found["reason"] == reason
                && fragments.iter().all(|fragment| message.contains(fragment))
        })
    })
    .await?;
    until(&format!("an Event {reason}"), DEADLINE, async || {
        let events = sandbox.events(Kind::EtcdCluster, "c").await?;
        let said = format!(" {reason}: ");
        Ok(if events.iter().any(|event| event.contains(&said)) {
            Poll::Done(())
        } else {
            Poll::NotYet(events.join("; "))
        })
    })
    .await
}

/// Creates the Secrets of the cluster `c` with several mistakes, and corrects the mistakes one by one. The EtcdCluster
/// must exist. No member may start until all Secrets are valid.
pub(crate) async fn invalid_secrets_start_no_member(
    sandbox: &Sandbox,
    names: &[String],
) -> Result<Authority> {
    await_fault(
        sandbox,
        "SecretMissing",
        &["peerSecret", "Secret peer", "create it"],
    )
    .await?;

    // In each of the following steps, at least one Secret is missing or invalid, so the operator must start no member.
    let authority = Authority::new("the test's authority")?;
    let good = authority.sign(names)?;
    let without_key = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": { "name": "server" },
        "stringData": { "server.crt": good.certificate, "server-ca.crt": authority.pem },
    });
    sandbox.apply(&without_key.to_string()).await?;
    for (name, keys, signed) in [
        ("peer", tls::PEER, authority.sign(names)?),
        ("operator", tls::CLIENT, authority.client()?),
    ] {
        let secret = tls::secret(name, keys, &signed, &authority.pem);
        sandbox.apply(&secret).await?;
    }
    await_fault(sandbox, "KeyMissing", &["serverSecret", "server.key"]).await?;
    let mismatched = Signed {
        key: authority.sign(names)?.key,
        ..good.clone()
    };
    let stranger = Authority::new("a stranger")?;
    for (signed, reason, fragments) in [
        (mismatched, "KeyMismatch", ["Secret server", "server.key"]),
        (
            authority.sign_expired(names)?,
            "CertificateExpired",
            ["Secret server", "server.crt"],
        ),
        (
            authority.sign(&["elsewhere.example".to_owned()])?,
            "NameNotCovered",
            ["elsewhere.example", "issue a certificate for"],
        ),
        (
            stranger.sign(names)?,
            "UnknownAuthority",
            ["Secret server", "Secret operator"],
        ),
    ] {
        serve_with(sandbox, &signed, &authority.pem).await?;
        sandbox.trigger_reconcile("c").await?;
        await_fault(sandbox, reason, &fragments).await?;
    }
    ensure!(
        sandbox.member_pods("c").await?.is_empty(),
        "a member was started"
    );

    // The operator must notice the corrected Secret without a trigger.
    serve_with(sandbox, &good, &authority.pem).await?;
    await_tls_ready(sandbox, "c", "").await?;
    Ok(authority)
}

/// A Secret of a running cluster is deleted, and the cluster is scaled from three members to five. The cluster grows
/// only when the Secret exists again.
pub(crate) async fn lost_secret_stops_changes(
    sandbox: &Sandbox,
    authority: &Authority,
    names: &[String],
) -> Result<()> {
    let before = uids(sandbox).await?;
    sandbox.kubectl(&["delete", "secret", "peer"]).await?;
    sandbox.trigger_reconcile("c").await?;
    await_fault(sandbox, "SecretMissing", &["Secret peer"]).await?;
    sandbox.scale("c", 5).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, "c", "the growth waits", DEADLINE, |object| {
        conditions_line(object).contains("until the certificates are valid")
    })
    .await?;
    ensure!(uids(sandbox).await? == before, "a pod was changed");
    let peer = tls::secret("peer", tls::PEER, &authority.sign(names)?, &authority.pem);
    sandbox.apply(&peer).await?;
    sandbox.await_members("c", 5).await.map(drop)
}

pub(crate) async fn uids(sandbox: &Sandbox) -> Result<Vec<Option<String>>> {
    let pods = sandbox.member_pods("c").await?;
    Ok(pods.iter().map(ResourceExt::uid).collect())
}
