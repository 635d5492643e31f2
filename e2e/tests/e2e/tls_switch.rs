//! TLS is switched on and off while clients write. In between, members accept clients with and without TLS, so that the
//! user can change the clients. Clients that change in this time are always served.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::leaks::{cluster_scenario_without_leaks, ensure_no_leaks, scenario_without_leaks};
use e2e::manifests::aws_secret;
use e2e::objects::{Kind, await_complete, await_object, condition, field, has_condition};
use e2e::tls::Identity;
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, RollingCheck, Sandbox, Writer, cluster_scenario, step, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;

use crate::backup_restore_s3::backup;
use crate::certificates::{arguments, make_secrets, service_dns_names};
use crate::fixtures::{DURABLE, cluster_with};
use crate::operator_crash::{CrashingOperator, await_desired_members};
use crate::restore_in_place::{RESTORE_LOCK, in_place_restore};
use crate::rollout::MAX_WRITE_GAP;
use crate::tls_generated::client as generated_client;

/// Time limit for a switch, which needs three rolling updates of three members.
const SWITCH_TIMEOUT: Duration = Duration::from_mins(10);
const KEYS: usize = 50;

/// Failpoints before the writes of a switch.
pub(crate) const CRASHES: &[&str] = &["before-record-tls", "before-update-peer-urls"];

/// The beginning of a change of `spec.TLS` to generated certificates. [`switch_on`] completes the JSON object.
const GENERATED: &str = r#"{"static":null,"generated":{},"#;

/// A change of `spec.TLS` after which members accept clients with and without TLS.
const BOTH: &str = r#"{"acceptPlaintext":true}"#;

async fn set(sandbox: &Sandbox, tls: &str) -> Result<()> {
    let patch = format!(r#"{{"spec":{{"TLS":{tls}}}}}"#);
    let patch = ["patch", "etcdcluster", "c", "--type=merge", "-p", &patch];
    sandbox.kubectl(&patch).await.map(drop)
}

/// Waits until three members use the requested TLS settings.
pub(crate) async fn switched(sandbox: &Sandbox, peers: &str, accepts: bool) -> Result<()> {
    await_tls_mode(sandbox, peers, accepts).await?;
    sandbox.await_members("c", 3).await.map(drop)
}

/// Waits until the status reports these TLS settings and, with TLS, the condition `TLSReady` for the current
/// generation.
async fn await_tls_mode(sandbox: &Sandbox, peers: &str, accepts: bool) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = format!("peers use {peers}, plaintext accepted: {accepts}");
    await_object(&clusters, "c", &what, SWITCH_TIMEOUT, |object| {
        let seen =
            field(object, "/status/observedGeneration").as_i64() == object.metadata.generation;
        let ready = match condition(object, "TLSReady") {
            None => peers == "Plain",
            Some(_) => has_condition(object, "TLSReady", "True"),
        };
        let policy = field(object, "/status/TLS/policy");
        seen && ready
            && field(object, "/status/TLS/peers") == peers
            && (policy["acceptPlaintext"] == true) == accepts
            && has_condition(object, "Available", "True")
            && has_condition(object, "Degraded", "False")
    })
    .await
    .map(drop)
}

async fn finish_with_short_gap(writer: Writer, what: &str) -> Result<()> {
    let tally = writer.finish(what).await?;
    // The gap between writes must be short, because clients reconnect when their member stops, and a leader first
    // transfers its leadership.
    ensure!(tally.gap < MAX_WRITE_GAP, "{what}: {tally}");
    Ok(())
}

/// Sets `spec.TLS`, and waits until the switch is complete. Ensures that members restart one at a time.
async fn switch(sandbox: &Sandbox, tls: &str, (peers, accepts): (&str, bool)) -> Result<()> {
    let check = RollingCheck::start(sandbox, "c", 3).await?;
    set(sandbox, tls).await?;
    switched(sandbox, peers, accepts).await?;
    let ended = check.finish().await.context("TLS was switched")?;
    ensure!(ended >= 3, "{ended} pods were terminated");
    Ok(())
}

/// Runs a client that writes during a switch of `spec.TLS`. Fails if acknowledged writes are lost, or if a gap between
/// writes is too long.
pub(crate) async fn switch_under_load(
    sandbox: &Sandbox,
    (client, what): (Option<&Identity>, &str),
    tls: &str,
    there: (&str, bool),
) -> Result<()> {
    let writer = match client {
        Some(identity) => Writer::start_tls(sandbox, "c", identity).await?,
        None => Writer::start(sandbox, "c").await?,
    };
    switch(sandbox, tls, there).await?;
    finish_with_short_gap(writer, what).await
}

/// Waits until every member accepts this client over TLS.
async fn await_tls_accepted(sandbox: &Sandbox, identity: &Identity) -> Result<()> {
    for pod in sandbox.member_pods("c").await? {
        let pod = pod.name_any();
        let identity = Identity {
            name: format!("{pod}.{}.svc", sandbox.namespace),
            ..identity.clone()
        };
        until("every member accepts TLS", DEADLINE, async || {
            let answer =
                Keyspace::of_tls_member(&sandbox.env, &sandbox.namespace, &pod, &identity).await;
            Ok(match answer {
                Ok(_) => Poll::Done(()),
                Err(error) => Poll::NotYet(format!("{pod}: {error:#}")),
            })
        })
        .await?;
    }
    Ok(())
}

/// Switches TLS on. For some time, members accept clients with and without TLS, so that the clients can change.
async fn switch_on(
    sandbox: &Sandbox,
    tls: &str,
    identity: impl AsyncFn() -> Result<Identity>,
) -> Result<()> {
    let plain = Writer::start(sandbox, "c").await?;
    let both = format!(r#"{tls}"acceptPlaintext":true}}"#);
    switch(sandbox, &both, ("Tls", true)).await?;
    plain.await_more(1).await?;
    let identity = identity().await?;
    await_tls_accepted(sandbox, &identity).await?;
    finish_with_short_gap(plain, "clients without TLS, while TLS is switched on").await?;
    let encrypted = (
        Some(&identity),
        "clients with TLS, after plaintext is disabled",
    );
    let alone = format!(r#"{tls}"acceptPlaintext":null}}"#);
    switch_under_load(sandbox, encrypted, &alone, ("Tls", false)).await?;
    for argument in arguments(sandbox, "c").await? {
        let listens = argument.starts_with("--listen-") && argument.contains("http://");
        ensure!(
            !listens || argument.starts_with("--listen-metrics-urls="),
            "{argument}"
        );
    }
    Ok(())
}

/// Switches TLS off.
async fn switch_off(sandbox: &Sandbox, identity: &Identity) -> Result<()> {
    let encrypted = (
        Some(identity),
        "clients with TLS, while both kinds of clients are accepted",
    );
    switch_under_load(sandbox, encrypted, BOTH, ("Tls", true)).await?;
    let plain = (None, "clients without TLS, while TLS is switched off");
    switch_under_load(sandbox, plain, "null", ("Plain", false)).await?;
    for argument in arguments(sandbox, "c").await? {
        ensure!(!argument.contains("https://"), "{argument}");
    }
    Ok(())
}

/// The names of the members' pods.
async fn names(sandbox: &Sandbox) -> Result<Vec<String>> {
    let pods = sandbox.member_pods("c").await?;
    Ok(pods.iter().map(ResourceExt::name_any).collect())
}

/// Without `acceptPlaintext`, the operator refuses to switch TLS of a running cluster, because this would lock out the
/// clients. While the operator refuses the switch, it replaces lost members.
async fn rejects_switch_at_once(sandbox: &Sandbox) -> Result<()> {
    let writer = Writer::start(sandbox, "c").await?;
    set(sandbox, r#"{"generated":{}}"#).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(
        &clusters,
        "c",
        "the switch is rejected",
        DEADLINE,
        |object| {
            condition(object, "Degraded").is_some_and(|found| found["reason"] == "TLSSwitchRefused")
        },
    )
    .await?;
    let lost = names(sandbox).await?.into_iter().next();
    sandbox.lose_pod("c", &lost.context("no pod")?).await?;
    sandbox.await_members("c", 3).await?;
    for argument in arguments(sandbox, "c").await? {
        ensure!(!argument.contains("https://"), "{argument}");
    }
    set(sandbox, "null").await?;
    await_object(&clusters, "c", "Degraded=False", DEADLINE, |object| {
        has_condition(object, "Degraded", "False")
    })
    .await?;
    writer.finish("rejected switch").await.map(drop)
}

/// The members have volumes, so they must keep their names.
#[tokio::test]
async fn tls_is_switched_on_and_off_under_load() {
    cluster_scenario("tls_switch", async |sandbox| {
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, DURABLE)?)
            .await?;
        sandbox.await_members("c", 3).await?;
        let before = names(sandbox).await?;
        let rejected = rejects_switch_at_once(sandbox);
        step("ask for TLS without acceptPlaintext", rejected).await?;
        let switch_on = switch_on(sandbox, GENERATED, async || {
            generated_client(sandbox, "c").await
        });
        step("switch TLS on", switch_on).await?;
        // The search for leaked secrets runs before TLS is switched off, because the cluster may have no Secret
        // afterwards.
        ensure_no_leaks(sandbox).await?;
        let identity = generated_client(sandbox, "c").await?;
        step("switch TLS off", switch_off(sandbox, &identity)).await?;
        ensure!(names(sandbox).await? == before, "members were replaced");
        Ok(())
    })
    .await;
}

async fn hibernates(sandbox: &Sandbox) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    merge(sandbox, r#"{"spec":{"hibernate":true}}"#).await?;
    await_object(
        &clusters,
        "c",
        "the cluster is hibernated",
        SWITCH_TIMEOUT,
        |object| field(object, "/status/phase") == "Hibernated",
    )
    .await
    .map(drop)
}

async fn merge(sandbox: &Sandbox, patch: &str) -> Result<()> {
    let patch = ["patch", "etcdcluster", "c", "--type=merge", "-p", patch];
    sandbox.kubectl(&patch).await.map(drop)
}

/// Resumes the hibernated cluster, whose spec now has TLS between members. Members start without TLS as before, and
/// the operator then switches TLS on. The operator crashes at each failpoint of the switch.
async fn wakes_up_and_crashes(sandbox: &Sandbox) -> Result<()> {
    let mut operator = CrashingOperator {
        sandbox,
        crashes: 0,
    };
    let wake = async |_| {
        let tls = r#"{"static":{"member":{"peerSecret":"peer"}}}"#;
        let patch = format!(r#"{{"spec":{{"hibernate":false,"TLS":{tls}}}}}"#);
        merge(sandbox, &patch).await
    };
    let (record, change) = CRASHES.split_at(1);
    operator.crash_at_each(record, wake).await?;
    let started = arguments(sandbox, "c").await?;
    let has_tls = started.iter().any(|argument| argument.contains("https://"));
    ensure!(!started.is_empty() && !has_tls, "{started:?}");
    operator.crash_at_each(change, wake).await?;
    ensure!(operator.run_without_failpoints().await? == CRASHES.len());
    switched(sandbox, "Tls", false).await?;
    await_desired_members(sandbox, "c", 3).await?;
    let arguments = arguments(sandbox, "c").await?;
    let has = |text: &str| arguments.iter().any(|argument| argument.starts_with(text));
    ensure!(has("--listen-peer-urls=https://") && !has("--listen-peer-urls=http://"));
    ensure!(has("--listen-client-urls=http://") && !has("--listen-client-urls=https://"));
    Ok(())
}

/// While a cluster is hibernated, TLS between its members is enabled with static Secrets. A client writes from before
/// the hibernation until the end.
#[tokio::test]
async fn hibernated_cluster_switches_tls_after_resume() {
    cluster_scenario_without_leaks("tls_switch_hibernated", async |sandbox| {
        make_secrets(sandbox, &service_dns_names(sandbox), false).await?;
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, DURABLE)?)
            .await?;
        switched(sandbox, "Plain", false).await?;
        let writer = Writer::start(sandbox, "c").await?;
        step("hibernate", hibernates(sandbox)).await?;
        let switched = wakes_up_and_crashes(sandbox);
        step(
            "wake the cluster, switch TLS and crash the operator",
            switched,
        )
        .await?;
        sandbox.scale("c", 4).await?;
        sandbox.await_members("c", 4).await?;
        writer.await_more(10).await?;
        writer.finish("TLS between members").await.map(drop)
    })
    .await;
}

/// The user requests a switch during a restore in place. The operators connect to the seed with the TLS settings with
/// which the seed was created, and the switch starts after the restore. A backup does not wait for the switch.
#[tokio::test]
async fn tls_switch_waits_for_restore_but_not_for_backup() {
    scenario_without_leaks("tls_switch_restore", async |sandbox| {
        let s3 = sandbox.env.s3()?;
        let bucket = Bucket::create(s3, &sandbox.namespace).await?;
        sandbox.apply(&aws_secret(s3, "aws")).await?;
        let spec = format!("  TLS: {{generated: {{}}}}\n{DURABLE}");
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 1, &spec)?)
            .await?;
        await_tls_mode(sandbox, "Tls", false).await?;
        let (env, namespace) = (&sandbox.env, &sandbox.namespace);
        let identity = generated_client(sandbox, "c").await?;
        let keys = Keyspace::of_tls_cluster(env, namespace, "c", &identity).await?;
        keys.fill("kept/", KEYS, |_| ()).await?;
        drop(keys);
        let backups = sandbox.objects(Kind::EtcdBackup);
        sandbox
            .apply(&backup(sandbox, "first", &bucket.name, "etcd.backup")?)
            .await?;
        await_complete(&backups, "first", DEADLINE).await?;

        sandbox
            .apply(&in_place_restore(sandbox, &bucket, "")?)
            .await?;
        let pods = sandbox.api::<Pod>();
        let seeds = ListParams::default().labels(RESTORE_LOCK);
        until("the seed pod exists", DEADLINE, async || {
            Ok(match pods.list(&seeds).await?.items.first() {
                Some(_) => Poll::Done(()),
                None => Poll::NotYet("no seed pod".to_owned()),
            })
        })
        .await?;
        set(sandbox, r#"{"acceptPlaintext":true}"#).await?;
        await_complete(&sandbox.objects(Kind::EtcdRestore), "over", DEADLINE).await?;
        sandbox
            .apply(&backup(sandbox, "second", &bucket.name, "second.backup")?)
            .await?;
        await_complete(&backups, "second", DEADLINE).await?;
        await_tls_mode(sandbox, "Tls", true).await?;
        sandbox.await_members("c", 1).await?;
        let keys = Keyspace::of_cluster(env, namespace, "c").await?;
        keys.verify("kept/", KEYS).await.map(drop)
    })
    .await;
}

mod full {
    use super::*;
    use crate::certificates::{STATIC, client};

    /// Members without volumes are replaced in each step of the switch.
    #[tokio::test]
    async fn tls_is_switched_off_without_volumes() {
        cluster_scenario_without_leaks("tls_switch_off", async |sandbox| {
            let authority = make_secrets(sandbox, &service_dns_names(sandbox), false).await?;
            sandbox
                .apply(&cluster_with(&sandbox.env, "c", 3, STATIC)?)
                .await?;
            sandbox.await_members("c", 3).await?;
            switch_off(sandbox, &client(&authority, sandbox, "c")?).await
        })
        .await;
    }

    /// Static and generated certificates have different CAs, so clients cannot use TLS while the certificates change.
    /// During this change, members accept clients without TLS.
    #[tokio::test]
    async fn static_certificates_are_replaced_by_generated_ones() {
        cluster_scenario_without_leaks("tls_static_to_generated", async |sandbox| {
            let authority = make_secrets(sandbox, &service_dns_names(sandbox), false).await?;
            let tls = format!("{STATIC}{DURABLE}");
            sandbox
                .apply(&cluster_with(&sandbox.env, "c", 3, &tls)?)
                .await?;
            sandbox.await_members("c", 3).await?;
            let identity = client(&authority, sandbox, "c")?;
            let encrypted = (
                Some(&identity),
                "clients with static certificates, while both kinds of clients are accepted",
            );
            switch_under_load(sandbox, encrypted, BOTH, ("Tls", true)).await?;
            switch_on(sandbox, GENERATED, async || {
                generated_client(sandbox, "c").await
            })
            .await
        })
        .await;
    }
}
