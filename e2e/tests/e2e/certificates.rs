//! Shared functions of the tests with static TLS Secrets.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use e2e::objects::{Kind, await_object, condition};
use e2e::tls::{self, Authority, Identity};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, until};
use kube::ResourceExt;

/// The interval at which [`until_with_reads`] makes the operator and the kubelets read Secrets.
const READ_TRIGGER_INTERVAL: Duration = Duration::from_secs(3);
/// The additional pause of [`until_with_reads`] between two polls, because each poll starts several processes.
const POLL_PAUSE: Duration = Duration::from_millis(500);

/// Lines under `spec` that enable TLS with static Secrets, for members and clients.
pub(crate) const STATIC: &str = "  TLS:
    static:
      member: {peerSecret: peer, serverSecret: server}
      operatorSecret: operator
";

/// The DNS names that v1beta2 requires in certificates: the names of the pods and of the client Service, and localhost.
pub(crate) fn pod_dns_names(sandbox: &Sandbox, cluster: &str) -> Vec<String> {
    let namespace = &sandbox.namespace;
    vec![
        format!("*.{cluster}.{namespace}.svc"),
        format!("{cluster}-client.{namespace}.svc"),
        "localhost".to_owned(),
    ]
}

/// A DNS name that matches the Services of the members and the client Service.
pub(crate) fn service_dns_names(sandbox: &Sandbox) -> Vec<String> {
    vec![format!("*.{}.svc", sandbox.namespace)]
}

/// The DNS name of the client Service, which clients verify.
pub(crate) fn client_name(sandbox: &Sandbox, cluster: &str) -> String {
    format!("{cluster}-client.{}.svc", sandbox.namespace)
}

/// Creates the Secrets `peer`, `server` and `operator` with certificates of one CA. The data keys of these Secrets are
/// those of v1beta2. If `cert_manager_keys` is true, they are those of cert-manager.
pub(crate) async fn make_secrets(
    sandbox: &Sandbox,
    names: &[String],
    cert_manager_keys: bool,
) -> Result<Authority> {
    let authority = Authority::new("the test's authority")?;
    let keys = |own: [&'static str; 3]| {
        if cert_manager_keys {
            tls::CERT_MANAGER_KEYS
        } else {
            own
        }
    };
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

/// The settings of a TLS client with a certificate of this CA.
pub(crate) fn client(authority: &Authority, sandbox: &Sandbox, cluster: &str) -> Result<Identity> {
    let own = authority.client()?;
    Ok(authority.identity(Some(&own), &client_name(sandbox, cluster)))
}

/// Waits until three members are ready, and `TLSReady` is True with `says` in its message.
pub(crate) async fn await_tls_ready(sandbox: &Sandbox, cluster: &str, says: &str) -> Result<()> {
    sandbox.await_members(cluster, 3).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, cluster, "TLSReady", DEADLINE, |object| {
        condition(object, "TLSReady").is_some_and(|found| {
            let message = found["message"].as_str().unwrap_or_default();
            found["status"] == "True" && message.contains(says)
        })
    })
    .await
    .map(drop)
}

/// Like [`until`], but makes the operator and the kubelets read the Secrets of the cluster `c` every few seconds.
/// Without these triggers, the operator and the kubelets read the Secrets once a minute.
pub(crate) async fn until_with_reads<T>(
    sandbox: &Sandbox,
    what: &str,
    mut poll: impl AsyncFnMut() -> Result<Poll<T>>,
) -> Result<T> {
    let mut read: Option<Instant> = None;
    until(what, DEADLINE * 2, async || {
        if read.is_none_or(|at| at.elapsed() > READ_TRIGGER_INTERVAL) {
            sandbox.trigger_reconcile("c").await?;
            sandbox.trigger_kubelet_sync("c").await?;
            read = Some(Instant::now());
        }
        let seen = poll().await;
        if !matches!(seen, Ok(Poll::Done(_))) {
            tokio::time::sleep(POLL_PAUSE).await;
        }
        seen
    })
    .await
}

/// Deletes the pod of one of three members, scales the cluster to five members, and then back to three.
pub(crate) async fn change_members(sandbox: &Sandbox, cluster: &str) -> Result<()> {
    let pods = sandbox.member_pods(cluster).await?;
    if let Some(pod) = pods.first() {
        sandbox.lose_pod(cluster, &pod.name_any()).await?;
    }
    sandbox.await_members(cluster, 3).await?;
    sandbox.scale(cluster, 5).await?;
    sandbox.await_members(cluster, 5).await?;
    sandbox.scale(cluster, 3).await?;
    sandbox.await_members(cluster, 3).await.map(drop)
}

/// The command-line arguments of etcd in all members.
pub(crate) async fn arguments(sandbox: &Sandbox, cluster: &str) -> Result<Vec<String>> {
    let pods = sandbox.member_pods(cluster).await?;
    let specs = pods.into_iter().filter_map(|pod| pod.spec);
    Ok(specs
        .flat_map(|spec| spec.containers)
        .flat_map(|container| container.args.unwrap_or_default())
        .collect())
}

/// Ensures that all URLs in the arguments of members use TLS. Only the URL for metrics may use plaintext.
pub(crate) async fn urls_have_tls(sandbox: &Sandbox, cluster: &str) -> Result<()> {
    for argument in arguments(sandbox, cluster).await? {
        ensure!(
            !argument.contains("http://") || argument.starts_with("--listen-metrics-urls="),
            "{argument}"
        );
    }
    Ok(())
}
