//! A cluster with TLS from the Secrets of v1beta2: it forms, loses and replaces members, grows and shrinks; and
//! nobody without a certificate gets in.

use anyhow::{Context, Result, ensure};
use e2e::kubectl::PortForward;
use e2e::leaks::discreet_cluster;
use e2e::objects::field;
use e2e::tls::{self, Authority, Identity};
use e2e::wait::Look;
use e2e::{PATIENCE, Sandbox, Writer, until};
use etcd_client::Client;
use kube::ResourceExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Duration, timeout};

use crate::certificates::{
    STATIC, arguments, await_tls_ready, client, client_name, lives, make_secrets, of_pods,
    of_services,
};
use crate::fixtures::cluster_with;

/// The Secrets of v1beta2's documentation: their names cover the pods' form of address alone.
#[tokio::test]
async fn a_cluster_lives_on_certificates_of_the_pods_form() {
    discreet_cluster("tls_static", async |sandbox| {
        let authority = make_secrets(sandbox, &of_pods(sandbox, "c"), false).await?;
        let manifest = cluster_with(&sandbox.env, "c", 3, STATIC)?;
        sandbox.apply(&manifest).await?;
        await_tls_ready(sandbox, "Pod form").await?;
        let formed = sandbox.await_members("c", 3).await?;
        ensure!(field(&formed, "/spec/memberAddress").is_null());
        for argument in arguments(sandbox).await? {
            ensure!(
                !argument.contains("http://") || argument.starts_with("--listen-metrics-urls="),
                "{argument}"
            );
        }
        let identity = client(&authority, sandbox, "c")?;
        lives(sandbox, &identity, "TLS of the pods' form").await
    })
    .await;
}

/// Invariant 20: whoever has no certificate of the authority is refused, and the listener that asks for none serves
/// no data.
#[tokio::test]
async fn nobody_without_a_certificate_gets_in() {
    discreet_cluster("tls_refused", async |sandbox| {
        let authority = make_secrets(sandbox, &of_services(sandbox), false).await?;
        let manifest = cluster_with(&sandbox.env, "c", 1, STATIC)?;
        sandbox.apply(&manifest).await?;
        sandbox.await_members("c", 1).await?;
        let pods = sandbox.member_pods("c").await?;
        let pod = format!("pod/{}", pods.first().context("no pod")?.name_any());
        let name = client_name(sandbox, "c");
        let stranger = Authority::new("a stranger")?;

        let good = client(&authority, sandbox, "c")?;
        until("a good client writes", PATIENCE, async || {
            put(sandbox, &pod, &good).await.map(Look::Done)
        })
        .await?;
        let foreign = Identity {
            own: Some(stranger.client()?),
            ..good.clone()
        };
        let expired = authority.identity(Some(&authority.expired_client()?), &name);
        let nothing = authority.identity(None, &name);
        for (who, identity) in [
            ("no certificate", &nothing),
            ("a foreign authority's certificate", &foreign),
            ("an expired certificate", &expired),
        ] {
            ensure!(
                put(sandbox, &pod, identity).await.is_err(),
                "{who}: a write was taken"
            );
            for port in [2379, 2380] {
                ensure!(
                    !is_let_in(sandbox, &pod, port, identity).await?,
                    "{who}: let in on port {port}"
                );
            }
        }
        for port in [2379, 2380] {
            await_let_in(sandbox, &pod, port, &good).await?;
            let plain = get(sandbox, &pod, port, "/health").await;
            ensure!(
                !plain.as_ref().is_ok_and(|answer| answer.contains("200 OK")),
                "plain HTTP on port {port}: {plain:?}"
            );
        }
        // And a client does not talk to a server of another authority.
        let suspicious = stranger.identity(good.own.as_ref(), &name);
        ensure!(put(sandbox, &pod, &suspicious).await.is_err());

        serves_no_data(sandbox, &pod).await
    })
    .await;
}

/// The listener that asks nobody for a certificate says how the member is, and nothing of what it holds.
pub(crate) async fn serves_no_data(sandbox: &Sandbox, pod: &str) -> Result<()> {
    until("it says how it is", PATIENCE, async || {
        let health = get(sandbox, pod, 2381, "/readyz").await?;
        Ok(if health.contains("200 OK") {
            Look::Done(())
        } else {
            Look::NotYet(health)
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

/// Whether the handshake gets through: then there is an answer of the server, whatever it says.
pub(crate) async fn is_let_in(
    sandbox: &Sandbox,
    pod: &str,
    port: u16,
    identity: &Identity,
) -> Result<bool> {
    let forward = PortForward::open(&sandbox.env, &sandbox.namespace, pod, port).await?;
    Ok(identity.ask(forward.port, "/version").await.is_ok())
}

/// Waits until the handshake gets through: a busy machine may take longer for one than a client waits.
pub(crate) async fn await_let_in(
    sandbox: &Sandbox,
    pod: &str,
    port: u16,
    identity: &Identity,
) -> Result<()> {
    let what = format!("the good client is let in on port {port}");
    until(&what, PATIENCE, async || {
        let forward = PortForward::open(&sandbox.env, &sandbox.namespace, pod, port).await?;
        identity
            .ask(forward.port, "/version")
            .await
            .map(|_| Look::Done(()))
    })
    .await
}

/// As [`get`], until there is an answer.
async fn answer(sandbox: &Sandbox, pod: &str, port: u16, path: &str) -> Result<String> {
    until(&format!("an answer to {path}"), PATIENCE, async || {
        let answer = get(sandbox, pod, port, path).await?;
        Ok(if answer.starts_with("HTTP/1.") {
            Look::Done(answer)
        } else {
            Look::NotYet(answer)
        })
    })
    .await
}

/// The answer to a plain HTTP request.
pub(crate) async fn get(sandbox: &Sandbox, pod: &str, port: u16, path: &str) -> Result<String> {
    let forward = PortForward::open(&sandbox.env, &sandbox.namespace, pod, port).await?;
    let mut stream = TcpStream::connect(("127.0.0.1", forward.port)).await?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    timeout(Duration::from_secs(5), stream.read_to_end(&mut answer)).await??;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// The TLS example of v0.9.4, unchanged, with Secrets as its documentation asks for.
#[tokio::test]
async fn the_old_example_with_tls_runs() {
    discreet_cluster("tls_old_example", async |sandbox| {
        let path = crate::fixtures::root().join("e2e/fixtures/v0.9.4/example-tls-cluster.yaml");
        let old = std::fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
        let names = of_pods(sandbox, "example");
        let authority = Authority::new("the old way")?;
        for (name, keys, signed) in [
            ("etcd-peer-tls", tls::PEER, authority.sign(&names)?),
            ("etcd-server-tls", tls::SERVER, authority.sign(&names)?),
            ("etcd-client-tls", tls::CLIENT, authority.client()?),
        ] {
            let secret = tls::secret(name, keys, &signed, &authority.pem);
            sandbox.apply(&secret).await?;
        }
        sandbox.apply(&old).await?;
        sandbox.await_members("example", 3).await?;
        let identity = client(&authority, sandbox, "example")?;
        let writer = Writer::start_tls(sandbox, "example", &identity).await?;
        writer.await_more(20).await?;
        writer.finish("the old example with TLS").await.map(drop)
    })
    .await;
}
