//! TLS between members alone, and towards clients alone.

use anyhow::ensure;
use e2e::Writer;
use e2e::leaks::discreet_cluster;

use crate::certificates::{
    arguments, await_tls_ready, client, lives, make_secrets, of_pods, of_services,
};
use crate::fixtures::cluster_with;

#[tokio::test]
async fn members_talk_tls_to_each_other_and_clients_do_not() {
    discreet_cluster("tls_peer_only", async |sandbox| {
        make_secrets(sandbox, &of_pods(sandbox, "c"), false).await?;
        let tls = "  TLS: {static: {member: {peerSecret: peer}}}\n";
        let manifest = cluster_with(&sandbox.env, "c", 3, tls)?;
        sandbox.apply(&manifest).await?;
        await_tls_ready(sandbox, "").await?;
        let arguments = arguments(sandbox).await?;
        let has = |text: &str| arguments.iter().any(|argument| argument.starts_with(text));
        ensure!(has("--listen-peer-urls=https://") && has("--listen-client-urls=http://"));
        let writer = Writer::start(sandbox, "c").await?;
        sandbox.scale("c", 5).await?;
        sandbox.await_members("c", 5).await?;
        writer.finish("TLS between members alone").await.map(drop)
    })
    .await;
}

#[tokio::test]
async fn clients_talk_tls_to_members_that_do_not_among_themselves() {
    discreet_cluster("tls_client_only", async |sandbox| {
        let authority = make_secrets(sandbox, &of_services(sandbox), false).await?;
        let tls = "  TLS: {static: {member: {serverSecret: server}, operatorSecret: operator}}\n";
        let manifest = cluster_with(&sandbox.env, "c", 3, tls)?;
        sandbox.apply(&manifest).await?;
        sandbox.await_members("c", 3).await?;
        let arguments = arguments(sandbox).await?;
        let has = |text: &str| arguments.iter().any(|argument| argument.starts_with(text));
        ensure!(has("--listen-peer-urls=http://") && has("--listen-client-urls=https://"));
        let identity = client(&authority, sandbox, "c")?;
        lives(sandbox, &identity, "TLS towards clients alone").await
    })
    .await;
}
