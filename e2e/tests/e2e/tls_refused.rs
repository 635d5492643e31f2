//! The client port and the peer port of a member accept only clients with a certificate of the CA of this port. With
//! generated certificates, the peer port rejects client certificates. The port for health and metrics reveals no keys.

use anyhow::{Context, Result, ensure};
use e2e::kubectl::PortForward;
use e2e::tls::{Authority, Identity, Signed};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, until};
use etcd_client::Client;
use kube::ResourceExt;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Duration, timeout};

use crate::certificates::client_name;
use crate::tls_generated::{client, value};

/// The length of the random part at the end of a CA's name.
const RANDOM_NAME_LENGTH: usize = 12;

/// Ensures that both ports of a member reject clients without a certificate, with an expired certificate, and with a
/// certificate of another CA. One static CA signs the certificates of both ports.
pub(crate) async fn rejects_strangers(sandbox: &Sandbox, authority: &Authority) -> Result<()> {
    let pods = sandbox.member_pods("c").await?;
    let pod = format!("pod/{}", pods.first().context("no pod")?.name_any());
    let name = client_name(sandbox, "c");
    let stranger = Authority::new("a stranger")?;

    let good = crate::certificates::client(authority, sandbox, "c")?;
    until("a good client writes", DEADLINE, async || {
        put(sandbox, &pod, &good).await.map(Poll::Done)
    })
    .await?;
    let foreign = Identity {
        own: Some(stranger.client()?),
        ..good.clone()
    };
    let expired = authority.identity(Some(&authority.expired_client()?), &name);
    let nothing = authority.identity(None, &name);
    for (what, identity) in [
        ("no certificate", &nothing),
        ("a foreign authority's certificate", &foreign),
        ("an expired certificate", &expired),
    ] {
        ensure!(
            put(sandbox, &pod, identity).await.is_err(),
            "{what}: a write was accepted"
        );
        for port in [2379, 2380] {
            ensure!(
                !is_accepted(sandbox, &pod, port, identity).await?,
                "{what}: accepted on port {port}"
            );
        }
    }
    for port in [2379, 2380] {
        await_accepted(sandbox, &pod, port, &good).await?;
        rejects_plain_http(sandbox, &pod, port).await?;
    }
    // A client that trusts only another CA must reject the member's certificate.
    let suspicious = stranger.identity(good.own.as_ref(), &name);
    ensure!(put(sandbox, &pod, &suspicious).await.is_err());
    serves_no_data(sandbox, &pod).await
}

/// Ensures that each port of a member with generated certificates rejects certificates of the CA of the other port.
pub(crate) async fn rejects_other_authorities(sandbox: &Sandbox) -> Result<()> {
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
    accepts_only(sandbox, (&member, 2379), &clients, asked).await?;
    let asked = (&authority_of_peers, &of_client);
    accepts_only(sandbox, (&member, 2380), &peers, asked).await?;
    serves_no_data(sandbox, &format!("pod/{member}")).await
}

/// The CA in a Secret with its private key, so that the test can sign certificates.
pub(crate) async fn authority(sandbox: &Sandbox, secret: &str, word: &str) -> Result<Authority> {
    let certificate = value(sandbox, secret, "tls.crt").await?;
    let der = CertificateDer::from_pem_slice(certificate.as_bytes())?;
    let text: String = der.iter().map(|byte| char::from(*byte)).collect();
    let begin = format!("etcd {word} authority ");
    let at = text.find(&begin).context("the authority has no name")?;
    let name = &text[at..at + begin.len() + RANDOM_NAME_LENGTH];
    let key = value(sandbox, secret, "tls.key").await?;
    Authority::of(name, &certificate, &key)
}

/// Ensures that this port accepts the client `good` and certificates of the CA `authority`, and rejects other clients.
async fn accepts_only(
    sandbox: &Sandbox,
    (pod, port): (&str, u16),
    good: &Identity,
    (authority, other): (&Authority, &Signed),
) -> Result<()> {
    let pod = format!("pod/{pod}");
    await_accepted(sandbox, &pod, port, good).await?;
    let stranger = Authority::new("a stranger")?.client()?;
    let expired = authority.expired_client()?;
    // The port must accept a valid certificate of the same CA. This shows that the port rejects the expired certificate
    // only because it has expired.
    let valid = authority.client()?;
    let with = |own: Option<&Signed>| Identity {
        own: own.cloned(),
        ..good.clone()
    };
    let by_authority = await_accepted(sandbox, &pod, port, &with(Some(&valid))).await;
    by_authority.context("a certificate that the authority signed")?;
    for (what, own) in [
        ("no certificate", None),
        ("a foreign authority's certificate", Some(&stranger)),
        ("an expired certificate", Some(&expired)),
        (
            "a certificate of the cluster's other authority",
            Some(other),
        ),
    ] {
        ensure!(
            !is_accepted(sandbox, &pod, port, &with(own)).await?,
            "{what}: accepted on port {port}"
        );
    }
    rejects_plain_http(sandbox, &pod, port).await
}

async fn rejects_plain_http(sandbox: &Sandbox, pod: &str, port: u16) -> Result<()> {
    let plain = get(sandbox, pod, port, "/health").await;
    ensure!(
        !plain.as_ref().is_ok_and(|answer| answer.contains("200 OK")),
        "plain HTTP on port {port}: {plain:?}"
    );
    Ok(())
}

/// Ensures that the port for health and metrics reports the member's health, but none of its keys.
async fn serves_no_data(sandbox: &Sandbox, pod: &str) -> Result<()> {
    until("the member reports its health", DEADLINE, async || {
        let health = get(sandbox, pod, 2381, "/readyz").await?;
        Ok(if health.contains("200 OK") {
            Poll::Done(())
        } else {
            Poll::NotYet(health)
        })
    })
    .await?;
    for path in [
        "/v3/kv/range",
        "/v3/maintenance/snapshot",
        "/v3/cluster/member/list",
        "/v3/auth/user/list",
        "/v2/keys",
        "/members",
        "/raft",
        "/debug/pprof/",
        "/debug/requests",
        "/",
    ] {
        let answer = answer(sandbox, pod, 2381, path).await?;
        ensure!(answer.contains("404"), "{path}: {answer}");
    }
    Ok(())
}

async fn connect(
    sandbox: &Sandbox,
    pod: &str,
    port: u16,
    identity: &Identity,
) -> Result<(Client, PortForward)> {
    let forward = PortForward::open(&sandbox.env, &sandbox.namespace, pod, port).await?;
    let url = format!("https://127.0.0.1:{}", forward.port);
    let options = identity
        .options()
        .with_connect_timeout(Duration::from_secs(5));
    Ok((Client::connect([url], Some(options)).await?, forward))
}

async fn put(sandbox: &Sandbox, pod: &str, identity: &Identity) -> Result<()> {
    let (client, _forward) = connect(sandbox, pod, 2379, identity).await?;
    let mut client = client.kv_client();
    let answer = client.put("key", "value", None);
    timeout(Duration::from_secs(5), answer).await??;
    Ok(())
}

/// True if the server responds to a request over TLS, whatever the status of the response. A server that rejects the
/// certificate sends no response.
pub(crate) async fn is_accepted(
    sandbox: &Sandbox,
    pod: &str,
    port: u16,
    identity: &Identity,
) -> Result<bool> {
    let forward = PortForward::open(&sandbox.env, &sandbox.namespace, pod, port).await?;
    Ok(identity.ask(forward.port, "/version").await.is_ok())
}

/// Waits until the server responds to a request over TLS. On a busy machine, a request may time out.
async fn await_accepted(
    sandbox: &Sandbox,
    pod: &str,
    port: u16,
    identity: &Identity,
) -> Result<()> {
    let what = format!("port {port} accepts the good client");
    until(&what, DEADLINE, async || {
        let forward = PortForward::open(&sandbox.env, &sandbox.namespace, pod, port).await?;
        identity
            .ask(forward.port, "/version")
            .await
            .map(|_| Poll::Done(()))
    })
    .await
}

/// Like [`get`], but waits until a response arrives.
async fn answer(sandbox: &Sandbox, pod: &str, port: u16, path: &str) -> Result<String> {
    until(&format!("a response for {path}"), DEADLINE, async || {
        let answer = get(sandbox, pod, port, path).await?;
        Ok(if answer.starts_with("HTTP/1.") {
            Poll::Done(answer)
        } else {
            Poll::NotYet(answer)
        })
    })
    .await
}

/// Sends a plaintext HTTP request, and returns the response.
async fn get(sandbox: &Sandbox, pod: &str, port: u16, path: &str) -> Result<String> {
    let forward = PortForward::open(&sandbox.env, &sandbox.namespace, pod, port).await?;
    let mut stream = TcpStream::connect(("127.0.0.1", forward.port)).await?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    timeout(Duration::from_secs(5), stream.read_to_end(&mut answer)).await??;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
