//! Clients connect through gRPC proxies with TLS. The proxies combine the watches of the clients, and are replaced when
//! the certificate of the proxies changes.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::metrics::Page;
use e2e::tls::Identity;
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, Writer, cluster_scenario, step, until};
use etcd_client::{Event, WatchStream};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Pod, Secret, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt;
use kube::api::ListParams;
use serde_json::json;

use crate::fixtures::{DURABLE, cluster_with};
use crate::tls_generated::{GENERATED, client};

const PROXY: &str = "c-proxy";
/// The number of watches through each of the two proxies.
const WATCHES: usize = 250;
/// The maximum number of watches at all members for the 500 watches of the clients.
const SHARED: f64 = 50.0;
/// The number of watches of a direct client, which members do not combine.
const DIRECT: usize = 60;

#[tokio::test]
async fn clients_share_watches_and_survive_rollouts_of_proxies() {
    cluster_scenario("grpc_proxy", async |sandbox| {
        let spec = format!("{GENERATED}{DURABLE}  grpcProxy: {{replicas: 2}}\n");
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, &spec)?)
            .await?;
        sandbox.await_members("c", 3).await?;
        step("start the proxies", await_rollout(sandbox, None)).await?;
        step("share watches", shares_watches(sandbox)).await?;
        step("renew the certificate", renews(sandbox)).await?;
        step("revert a change", reverts_change(sandbox)).await?;
        step("remove the proxies", removes(sandbox)).await
    })
    .await;
}

/// A TLS client of the proxies.
async fn identity(sandbox: &Sandbox) -> Result<Identity> {
    let identity = client(sandbox, "c").await?;
    Ok(Identity {
        name: format!("{PROXY}.{}.svc", sandbox.namespace),
        ..identity
    })
}

/// The digest of the certificates with which the proxies were started.
fn digest(deployment: &Deployment) -> Option<&String> {
    let template = &deployment.spec.as_ref()?.template;
    let annotations = template.metadata.as_ref()?.annotations.as_ref()?;
    annotations.get("etcd.database.coreos.com/certificates")
}

/// Waits until two proxies serve, and the digest of their certificate differs from `before`. Returns the digest.
async fn await_rollout(sandbox: &Sandbox, before: Option<&str>) -> Result<String> {
    let deployments = sandbox.api::<Deployment>();
    until("two proxies serve", DEADLINE, async || {
        let found = deployments.get(PROXY).await?;
        let status = found.status.clone().unwrap_or_default();
        let digest = digest(&found).context("the proxies use no TLS")?;
        let is_complete = status.observed_generation == found.metadata.generation
            && status.replicas == Some(2)
            && status.updated_replicas == Some(2)
            && status.ready_replicas == Some(2);
        Ok(if is_complete && Some(digest.as_str()) != before {
            Poll::Done(digest.clone())
        } else {
            Poll::NotYet(format!("{digest}: {status:?}"))
        })
    })
    .await
}

async fn proxy_pods(sandbox: &Sandbox) -> Result<Vec<Pod>> {
    let params = ListParams::default().labels("app=etcd-grpc-proxy,etcd_cluster=c");
    let pods = sandbox.api::<Pod>().list(&params).await?.items.into_iter();
    let stays = |pod: &Pod| pod.metadata.deletion_timestamp.is_none();
    Ok(pods.filter(stays).collect())
}

/// The number of watches at all members.
async fn watches_at_members(sandbox: &Sandbox) -> Result<f64> {
    let mut watches = 0.0;
    for pod in sandbox.member_pods("c").await? {
        let page = Page::of_member(sandbox, &pod.name_any()).await?;
        watches += page.sum("etcd_debugging_mvcc_watcher_total", "");
    }
    Ok(watches)
}

async fn shares_watches(sandbox: &Sandbox) -> Result<()> {
    let identity = identity(sandbox).await?;
    let before = watches_at_members(sandbox).await?;
    let (mut all, mut keys) = (Vec::new(), Vec::new());
    for pod in proxy_pods(sandbox).await? {
        let (env, namespace, pod) = (&sandbox.env, &sandbox.namespace, pod.name_any());
        let through = Keyspace::of_tls_member(env, namespace, &pod, &identity).await?;
        // The member list from a proxy contains only the URL of the proxies, so clients that read the list stay
        // connected to the proxies.
        let expected = format!("https://{PROXY}.{namespace}.svc:2379");
        let urls = through.client_urls().await?;
        ensure!(urls == [expected], "the proxy reports {urls:?}");
        all.extend(through.watches("watched", WATCHES).await?);
        keys.push((pod, through));
    }
    ensure!(all.len() == 2 * WATCHES, "{} proxies", keys.len());
    let (_, writer) = keys.first().context("no proxy")?;
    // A proxy combines watches only when they report an event, so the test changes the key repeatedly.
    until("members have few watches", DEADLINE, async || {
        writer.write("watched", b"event".to_vec()).await?;
        let found = watches_at_members(sandbox).await? - before;
        Ok(if found <= SHARED {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{found} watches"))
        })
    })
    .await?;
    writer.write("watched", b"last".to_vec()).await?;
    for watch in &mut all {
        await_value(watch, b"last").await?;
    }
    // For each event that a proxy receives once and sends to several clients, the metric counts all clients but one.
    let mut combined = 0.0;
    for (pod, _) in &keys {
        let page = Page::of_proxy(sandbox, pod).await?;
        combined += page.sum("etcd_grpc_proxy_events_coalescing_total", "");
    }
    ensure!(
        combined > 400.0,
        "the proxies report {combined} combined events"
    );

    // Watches of a direct client are not combined, so the metric of the members counts each of them.
    let before = watches_at_members(sandbox).await?;
    let own = client(sandbox, "c").await?;
    let direct = Keyspace::of_tls_cluster(&sandbox.env, &sandbox.namespace, "c", &own).await?;
    let _watches = direct.watches("watched", DIRECT).await?;
    until("members count direct watches", DEADLINE, async || {
        let found = watches_at_members(sandbox).await? - before;
        Ok(if found > SHARED {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{found} watches"))
        })
    })
    .await
}

async fn await_value(watch: &mut WatchStream, expected: &[u8]) -> Result<()> {
    let seen = async {
        loop {
            let response = watch.message().await?.context("the watch ended")?;
            let mut pairs = response.events().iter().filter_map(Event::kv);
            if pairs.any(|pair| pair.value() == expected) {
                return anyhow::Ok(());
            }
        }
    };
    let seen = tokio::time::timeout(Duration::from_mins(1), seen).await;
    seen.context("the watch does not report the last value")?
}

/// The operator issues a certificate with another name, and replaces the proxies while a client writes through their
/// Service.
async fn renews(sandbox: &Sandbox) -> Result<()> {
    let before = await_rollout(sandbox, None).await?;
    let identity = identity(sandbox).await?;
    let writer = Writer::start_retrying_through(sandbox, PROXY, &identity).await?;
    writer.await_more(20).await?;
    let patch = r#"{"spec":{"TLS":{"generated":{"serverNames":["etcd.example.net"]}}}}"#;
    sandbox
        .kubectl(&["patch", "etcdcluster", "c", "--type=merge", "-p", patch])
        .await?;
    await_rollout(sandbox, Some(&before)).await?;
    let named = Identity {
        name: "etcd.example.net".to_owned(),
        ..identity
    };
    for pod in proxy_pods(sandbox).await? {
        let pod = pod.name_any();
        Keyspace::of_tls_member(&sandbox.env, &sandbox.namespace, &pod, &named).await?;
    }
    writer.await_more(20).await?;
    let tally = writer.finish("rollout of the proxies").await?;
    ensure!(tally.unknown == 0, "writes failed despite retries: {tally}");
    Ok(())
}

async fn reverts_change(sandbox: &Sandbox) -> Result<()> {
    sandbox
        .kubectl(&["scale", "deployment", PROXY, "--replicas=3"])
        .await?;
    await_rollout(sandbox, None).await.map(drop)
}

async fn removes(sandbox: &Sandbox) -> Result<()> {
    let patch = json!({ "spec": { "grpcProxy": null } }).to_string();
    sandbox
        .kubectl(&["patch", "etcdcluster", "c", "--type=merge", "-p", &patch])
        .await?;
    until("the proxies are deleted", DEADLINE, async || {
        let left = [
            sandbox.api::<Deployment>().get_opt(PROXY).await?.is_some(),
            sandbox.api::<Service>().get_opt(PROXY).await?.is_some(),
            sandbox
                .api::<PodDisruptionBudget>()
                .get_opt(PROXY)
                .await?
                .is_some(),
            sandbox
                .api::<Secret>()
                .get_opt("c-proxy-tls")
                .await?
                .is_some(),
            !proxy_pods(sandbox).await?.is_empty(),
        ];
        Ok(if left.contains(&true) {
            Poll::NotYet(format!(
                "Deployment, Service, budget, Secret, pods: {left:?}"
            ))
        } else {
            Poll::Done(())
        })
    })
    .await?;
    sandbox.await_members("c", 3).await.map(drop)
}
