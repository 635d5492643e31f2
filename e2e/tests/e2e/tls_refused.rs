//! Who is refused where the operator makes the certificates: on every port whoever has none of the authority that is
//! asked there, also when it is the cluster's other one.

use anyhow::{Context, Result, ensure};
use e2e::Sandbox;
use e2e::leaks::discreet_cluster;
use e2e::tls::{Authority, Identity, Signed};
use kube::ResourceExt;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::certificates::client_name;
use crate::fixtures::cluster_with;
use crate::tls_generated::{GENERATED, client, value};
use crate::tls_static::{await_let_in, get, is_let_in, serves_no_data};

/// How much of an authority's name is drawn.
const DRAWN: usize = 12;

/// The authority of a Secret, as whoever has its key may use it.
async fn authority(sandbox: &Sandbox, secret: &str, word: &str) -> Result<Authority> {
    let certificate = value(sandbox, secret, "tls.crt").await?;
    let der = CertificateDer::from_pem_slice(certificate.as_bytes())?;
    let text: String = der.iter().map(|byte| char::from(*byte)).collect();
    let begin = format!("etcd {word} authority ");
    let at = text.find(&begin).context("the authority has no name")?;
    let name = &text[at..at + begin.len() + DRAWN];
    let key = value(sandbox, secret, "tls.key").await?;
    Authority::of(name, &certificate, &key)
}

/// On this port the good one is let in, and nobody else.
async fn lets_in_alone(
    sandbox: &Sandbox,
    (pod, port): (&str, u16),
    good: &Identity,
    (authority, other): (&Authority, &Signed),
) -> Result<()> {
    let pod = format!("pod/{pod}");
    await_let_in(sandbox, &pod, port, good).await?;
    let stranger = Authority::new("a stranger")?.client()?;
    let expired = authority.expired_client()?;
    // What was signed with the authority's key is as good as what the operator makes; so it is the time that counts.
    let valid = authority.client()?;
    let with = |own: Option<&Signed>| Identity {
        own: own.cloned(),
        ..good.clone()
    };
    let by_authority = await_let_in(sandbox, &pod, port, &with(Some(&valid))).await;
    by_authority.context("a certificate by the authority")?;
    for (who, own) in [
        ("no certificate", None),
        ("a foreign authority's certificate", Some(&stranger)),
        ("an expired certificate", Some(&expired)),
        (
            "a certificate of the cluster's other authority",
            Some(other),
        ),
    ] {
        ensure!(
            !is_let_in(sandbox, &pod, port, &with(own)).await?,
            "{who}: let in on port {port}"
        );
    }
    let plain = get(sandbox, &pod, port, "/health").await;
    ensure!(
        !plain.as_ref().is_ok_and(|answer| answer.contains("200 OK")),
        "plain HTTP on port {port}: {plain:?}"
    );
    Ok(())
}

/// Invariant 20.
#[tokio::test]
async fn nobody_without_a_generated_certificate_gets_in() {
    discreet_cluster("tls_refused_generated", async |sandbox| {
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 1, GENERATED)?)
            .await?;
        sandbox.await_members("c", 1).await?;
        let pods = sandbox.member_pods("c").await?;
        let member = pods.first().context("no pod")?.name_any();
        let clients = client(sandbox, "c").await?;
        ensure!(clients.name == client_name(sandbox, "c"));
        let secret = format!("{member}-peer-tls");
        let of_peer = Signed {
            certificate: value(sandbox, &secret, "tls.crt").await?,
            key: value(sandbox, &secret, "tls.key").await?,
        };
        let peers = Identity {
            ca: value(sandbox, &secret, "ca.crt").await?,
            own: Some(of_peer.clone()),
            name: format!("{member}.{}.svc", sandbox.namespace),
        };
        let of_client = clients.own.clone().context("no certificate for clients")?;
        let authority_of_clients = authority(sandbox, "c-client-ca", "client").await?;
        let authority_of_peers = authority(sandbox, "c-peer-ca", "peer").await?;
        let asked = (&authority_of_clients, &of_peer);
        lets_in_alone(sandbox, (&member, 2379), &clients, asked).await?;
        let asked = (&authority_of_peers, &of_client);
        lets_in_alone(sandbox, (&member, 2380), &peers, asked).await?;
        serves_no_data(sandbox, &format!("pod/{member}")).await
    })
    .await;
}
