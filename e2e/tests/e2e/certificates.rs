//! Clusters with TLS from Secrets: what the tests share.

use anyhow::{Result, ensure};
use e2e::objects::{Kind, await_object, condition};
use e2e::tls::{self, Authority, Identity};
use e2e::{PATIENCE, Sandbox, Writer};
use kube::ResourceExt;

/// Lines under `spec` for TLS between members and towards clients.
pub(crate) const STATIC: &str = "  TLS:
    static:
      member: {peerSecret: peer, serverSecret: server}
      operatorSecret: operator
";

/// The names v1beta2's documentation asks for: the pods' form, and the client Service.
pub(crate) fn of_pods(sandbox: &Sandbox, cluster: &str) -> Vec<String> {
    let namespace = &sandbox.namespace;
    vec![
        format!("*.{cluster}.{namespace}.svc"),
        format!("{cluster}-client.{namespace}.svc"),
        "localhost".to_owned(),
    ]
}

/// The names of members with Services of their own; the client Service's is one of them.
pub(crate) fn of_services(sandbox: &Sandbox) -> Vec<String> {
    vec![format!("*.{}.svc", sandbox.namespace)]
}

/// The name clients expect.
pub(crate) fn client_name(sandbox: &Sandbox, cluster: &str) -> String {
    format!("{cluster}-client.{}.svc", sandbox.namespace)
}

/// Makes the Secrets `peer`, `server` and `operator`, of one authority, with the keys of v1beta2 or the usual ones.
pub(crate) async fn make_secrets(
    sandbox: &Sandbox,
    names: &[String],
    usual: bool,
) -> Result<Authority> {
    let authority = Authority::new("the test's authority")?;
    let keys = |own: [&'static str; 3]| if usual { tls::USUAL } else { own };
    let peer = authority.sign(names)?;
    let server = authority.sign(names)?;
    let operator = authority.client()?;
    for (name, keys, signed) in [
        ("peer", keys(tls::PEER), &peer),
        ("server", keys(tls::SERVER), &server),
        ("operator", keys(tls::CLIENT), &operator),
    ] {
        let secret = tls::secret(name, keys, signed, &authority.pem);
        sandbox.apply(&secret).await?;
    }
    Ok(authority)
}

/// A client of the cluster that the authority has certified.
pub(crate) fn client(authority: &Authority, sandbox: &Sandbox, cluster: &str) -> Result<Identity> {
    let own = authority.client()?;
    Ok(authority.identity(Some(&own), &client_name(sandbox, cluster)))
}

/// Waits until three members are ready, and `TLSReady` is true and says this.
pub(crate) async fn await_tls_ready(sandbox: &Sandbox, says: &str) -> Result<()> {
    sandbox.await_members("c", 3).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, "c", "TLSReady", PATIENCE, |object| {
        condition(object, "TLSReady").is_some_and(|found| {
            let message = found["message"].as_str().unwrap_or_default();
            found["status"] == "True" && message.contains(says)
        })
    })
    .await
    .map(drop)
}

/// A client that writes all along while a member is lost, members are added and removed; nothing is lost.
pub(crate) async fn lives(sandbox: &Sandbox, identity: &Identity, what: &str) -> Result<()> {
    let writer = Writer::start_tls(sandbox, "c", identity).await?;
    let pods = sandbox.member_pods("c").await?;
    if let Some(pod) = pods.first() {
        sandbox.lose_pod("c", &pod.name_any()).await?;
    }
    sandbox.await_members("c", 3).await?;
    sandbox.scale("c", 5).await?;
    sandbox.await_members("c", 5).await?;
    sandbox.scale("c", 3).await?;
    sandbox.await_members("c", 3).await?;
    let tally = writer.finish(what).await?;
    ensure!(tally.acknowledged > 50, "{tally}");
    Ok(())
}

/// The arguments of every member's etcd.
pub(crate) async fn arguments(sandbox: &Sandbox) -> Result<Vec<String>> {
    let pods = sandbox.member_pods("c").await?;
    let specs = pods.into_iter().filter_map(|pod| pod.spec);
    Ok(specs
        .flat_map(|spec| spec.containers)
        .flat_map(|container| container.args.unwrap_or_default())
        .collect())
}
