//! Secrets that do not hold: it is said which and what, nobody is started with them, and a cluster that runs is left
//! alone.

use anyhow::{Result, ensure};
use e2e::leaks::discreet_cluster;
use e2e::objects::{Kind, await_object, condition, conditions_line};
use e2e::tls::{self, Authority, Signed};
use e2e::wait::Look;
use e2e::{PATIENCE, Sandbox, Writer, until};
use kube::ResourceExt;
use serde_json::json;

use crate::certificates::{STATIC, await_tls_ready, client, of_services};
use crate::fixtures::cluster_with;

/// Puts another certificate into the Secret of the members towards clients.
async fn serve_with(sandbox: &Sandbox, signed: &Signed, ca: &str) -> Result<()> {
    let secret = tls::secret("server", tls::SERVER, signed, ca);
    sandbox.apply(&secret).await.map(drop)
}

/// The same with one that does not hold, which the operator is asked to look at.
async fn does_not_hold(sandbox: &Sandbox, signed: &Signed, ca: &str) -> Result<()> {
    serve_with(sandbox, signed, ca).await?;
    sandbox.look_at("c").await
}

/// Waits until `TLSReady` is false for this reason, and the condition, an Event and no member say so.
pub(crate) async fn await_fault(sandbox: &Sandbox, reason: &str, fragments: &[&str]) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = format!("TLSReady is False because of {reason}, saying {fragments:?}");
    await_object(&clusters, "c", &what, PATIENCE, |object| {
        condition(object, "TLSReady").is_some_and(|found| {
            let message = found["message"].as_str().unwrap_or_default();
            found["status"] == "False"
                && found["reason"] == reason
                && fragments.iter().all(|fragment| message.contains(fragment))
        })
    })
    .await?;
    until(&format!("an Event says {reason}"), PATIENCE, async || {
        let events = sandbox.events(Kind::EtcdCluster, "c").await?;
        let said = format!(" {reason}: ");
        Ok(if events.iter().any(|event| event.contains(&said)) {
            Look::Done(())
        } else {
            Look::NotYet(events.join("; "))
        })
    })
    .await
}

#[tokio::test]
async fn nobody_is_started_with_certificates_that_do_not_hold() {
    discreet_cluster("tls_bad_secrets", async |sandbox| {
        let names = of_services(sandbox);
        let manifest = cluster_with(&sandbox.env, "c", 3, STATIC)?;
        sandbox.apply(&manifest).await?;
        await_fault(
            sandbox,
            "SecretMissing",
            &["peerSecret", "Secret peer", "create it"],
        )
        .await?;

        // At no moment do all of them hold.
        let authority = Authority::new("the test's authority")?;
        let good = authority.sign(&names)?;
        let stranger = Authority::new("a stranger")?;
        let without_key = json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": { "name": "server" },
            "stringData": { "server.crt": good.certificate, "server-ca.crt": authority.pem },
        });
        sandbox.apply(&without_key.to_string()).await?;
        for (name, keys, signed) in [
            ("peer", tls::PEER, authority.sign(&names)?),
            ("operator", tls::CLIENT, authority.client()?),
        ] {
            let secret = tls::secret(name, keys, &signed, &authority.pem);
            sandbox.apply(&secret).await?;
        }
        await_fault(sandbox, "KeyMissing", &["serverSecret", "server.key"]).await?;
        let mismatched = Signed {
            key: authority.sign(&names)?.key,
            ..good.clone()
        };
        does_not_hold(sandbox, &mismatched, &authority.pem).await?;
        await_fault(sandbox, "KeyMismatch", &["Secret server", "server.key"]).await?;
        does_not_hold(sandbox, &authority.sign_expired(&names)?, &authority.pem).await?;
        await_fault(
            sandbox,
            "CertificateExpired",
            &["Secret server", "server.crt"],
        )
        .await?;
        let elsewhere = authority.sign(&["elsewhere.example".to_owned()])?;
        does_not_hold(sandbox, &elsewhere, &authority.pem).await?;
        await_fault(
            sandbox,
            "NameNotCovered",
            &["elsewhere.example", "issue one for"],
        )
        .await?;
        does_not_hold(sandbox, &stranger.sign(&names)?, &authority.pem).await?;
        await_fault(
            sandbox,
            "UnknownAuthority",
            &["Secret server", "Secret operator"],
        )
        .await?;
        ensure!(
            sandbox.member_pods("c").await?.is_empty(),
            "a member was started"
        );

        // Put right, it forms by itself.
        serve_with(sandbox, &good, &authority.pem).await?;
        await_tls_ready(sandbox, "").await?;

        // A Secret goes bad: it is said, and nobody is touched.
        let identity = client(&authority, sandbox, "c")?;
        let writer = Writer::start_tls(sandbox, "c", &identity).await?;
        let before = uids(sandbox).await?;
        sandbox.kubectl(&["delete", "secret", "peer"]).await?;
        await_fault(sandbox, "SecretMissing", &["Secret peer"]).await?;
        sandbox.scale("c", 5).await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        await_object(&clusters, "c", "the growth waits", PATIENCE, |object| {
            conditions_line(object).contains("until the certificates hold")
        })
        .await?;
        ensure!(uids(sandbox).await? == before, "the cluster was touched");
        let peer = tls::secret("peer", tls::PEER, &authority.sign(&names)?, &authority.pem);
        sandbox.apply(&peer).await?;
        sandbox.await_members("c", 5).await?;
        writer.finish("a Secret goes bad and good").await.map(drop)
    })
    .await;
}

pub(crate) async fn uids(sandbox: &Sandbox) -> Result<Vec<Option<String>>> {
    let pods = sandbox.member_pods("c").await?;
    Ok(pods.iter().map(ResourceExt::uid).collect())
}
