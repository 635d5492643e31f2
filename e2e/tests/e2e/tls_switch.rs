//! TLS switched on and off while members run and clients write: members take both kinds of client, all clients are
//! changed, and members take one kind. Clients that follow that order are served all along.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::leaks::{discreet, discreet_cluster};
use e2e::manifests::aws_secret;
use e2e::objects::{Kind, await_complete, await_object, condition, field, has_condition};
use e2e::tls::Identity;
use e2e::wait::Look;
use e2e::{Keyspace, OneByOne, PATIENCE, Sandbox, Writer, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;

use crate::backup_restore_s3::backup;
use crate::certificates::{arguments, client, make_secrets, of_services};
use crate::fixtures::{DURABLE, cluster_with};
use crate::operator_crash::{Victim, is_as_asked_for};
use crate::restore_in_place::{CLAIM, over};
use crate::rollout::SERVED;
use crate::tls_generated::client as generated_client;

/// Three times around three members, and where they have no volumes each is followed by another.
const SWITCHED: Duration = Duration::from_mins(10);
const KEYS: usize = 50;

/// The writes of a switch.
pub(crate) const CRASHES: &[&str] = &["before-record-tls", "before-update-peer-urls"];

const STATIC: &str = r#"{"static":{"member":{"peerSecret":"peer","serverSecret":"server"},"operatorSecret":"operator"},"#;

/// Both kinds of client are let in.
const BOTH: &str = r#"{"acceptPlaintext":true}"#;

async fn set(sandbox: &Sandbox, tls: &str) -> Result<()> {
    let patch = format!(r#"{{"spec":{{"TLS":{tls}}}}}"#);
    let patch = ["patch", "etcdcluster", "c", "--type=merge", "-p", &patch];
    sandbox.kubectl(&patch).await.map(drop)
}

/// Three members, every one of which talks as `spec.TLS` says.
async fn switched(sandbox: &Sandbox, peers: &str, accepts: bool) -> Result<()> {
    talks(sandbox, peers, accepts).await?;
    sandbox.await_members("c", 3).await.map(drop)
}

/// Waits until every member talks as `spec.TLS` says, as a user does: `TLSReady` of this generation is true, or there is
/// no TLS.
async fn talks(sandbox: &Sandbox, peers: &str, accepts: bool) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = format!("members are at {peers}, plain text taken: {accepts}");
    await_object(&clusters, "c", &what, SWITCHED, |object| {
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

async fn served(writer: Writer, what: &str) -> Result<()> {
    let tally = writer.finish(what).await?;
    // A client's connection to a member ends with it, and a leader hands over.
    ensure!(tally.gap < SERVED, "{what}: {tally}");
    Ok(())
}

/// Sets `spec.TLS` to this and waits until members are there; they are ended one by one.
async fn goes(sandbox: &Sandbox, tls: &str, (peers, accepts): (&str, bool)) -> Result<()> {
    let ends = OneByOne::begin(sandbox, "c", 3).await?;
    set(sandbox, tls).await?;
    switched(sandbox, peers, accepts).await?;
    let ended = ends.end().await.context("TLS was switched")?;
    ensure!(ended >= 3, "{ended} pods were ended");
    Ok(())
}

/// A client writes while `spec.TLS` is set to this, until members are there; then it is changed, and another follows.
async fn step(
    sandbox: &Sandbox,
    (client, what): (Option<&Identity>, &str),
    tls: &str,
    there: (&str, bool),
) -> Result<()> {
    let writer = match client {
        Some(identity) => Writer::start_tls(sandbox, "c", identity).await?,
        None => Writer::start(sandbox, "c").await?,
    };
    goes(sandbox, tls, there).await?;
    served(writer, what).await
}

/// Every member lets this one in.
async fn all_let_in(sandbox: &Sandbox, identity: &Identity) -> Result<()> {
    for pod in sandbox.member_pods("c").await? {
        let pod = pod.name_any();
        let identity = Identity {
            name: format!("{pod}.{}.svc", sandbox.namespace),
            ..identity.clone()
        };
        until("every member takes TLS", PATIENCE, async || {
            let answer =
                Keyspace::of_tls_member(&sandbox.env, &sandbox.namespace, &pod, &identity).await;
            Ok(match answer {
                Ok(_) => Look::Done(()),
                Err(error) => Look::NotYet(format!("{pod}: {error:#}")),
            })
        })
        .await?;
    }
    Ok(())
}

/// From plain text to TLS and nothing else: who writes without TLS is changed between the two steps.
async fn on(
    sandbox: &Sandbox,
    tls: &str,
    identity: impl AsyncFn() -> Result<Identity>,
) -> Result<()> {
    let plain = Writer::start(sandbox, "c").await?;
    let both = format!(r#"{tls}"acceptPlaintext":true}}"#);
    goes(sandbox, &both, ("Tls", true)).await?;
    plain.await_more(1).await?;
    let identity = identity().await?;
    all_let_in(sandbox, &identity).await?;
    served(plain, "without TLS, while it is switched on").await?;
    let encrypted = (Some(&identity), "with TLS, when plain text is over");
    let alone = format!(r#"{tls}"acceptPlaintext":null}}"#);
    step(sandbox, encrypted, &alone, ("Tls", false)).await?;
    for argument in arguments(sandbox).await? {
        let listens = argument.starts_with("--listen-") && argument.contains("http://");
        ensure!(
            !listens || argument.starts_with("--listen-metrics-urls="),
            "{argument}"
        );
    }
    Ok(())
}

/// From TLS to plain text and nothing else.
async fn off(sandbox: &Sandbox, identity: &Identity) -> Result<()> {
    let encrypted = (Some(identity), "with TLS, when both are taken");
    step(sandbox, encrypted, BOTH, ("Tls", true)).await?;
    let plain = (None, "without TLS, while it is switched off");
    step(sandbox, plain, "null", ("Plain", false)).await?;
    for argument in arguments(sandbox).await? {
        ensure!(!argument.contains("https://"), "{argument}");
    }
    Ok(())
}

/// Members keep their volumes, and so their identities.
#[tokio::test]
async fn tls_is_switched_on_while_members_run_and_clients_write() {
    discreet_cluster("tls_switch_on", async |sandbox| {
        let authority = make_secrets(sandbox, &of_services(sandbox), false).await?;
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, DURABLE)?)
            .await?;
        sandbox.await_members("c", 3).await?;
        let before = sandbox.member_pods("c").await?;
        on(sandbox, STATIC, async || client(&authority, sandbox, "c")).await?;
        let names = |pods: Vec<k8s_openapi::api::core::v1::Pod>| -> Vec<String> {
            pods.iter().map(ResourceExt::name_any).collect()
        };
        let after = sandbox.member_pods("c").await?;
        ensure!(names(before) == names(after), "members were replaced");
        Ok(())
    })
    .await;
}

/// Members without volumes are followed by others, stage by stage.
#[tokio::test]
async fn tls_is_switched_off_while_members_run_and_clients_write() {
    discreet_cluster("tls_switch_off", async |sandbox| {
        let authority = make_secrets(sandbox, &of_services(sandbox), false).await?;
        let tls = crate::certificates::STATIC;
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, tls)?)
            .await?;
        sandbox.await_members("c", 3).await?;
        off(sandbox, &client(&authority, sandbox, "c")?).await
    })
    .await;
}

/// From certificates of others to generated ones, which do not trust each other: clients go over plain text, and so do
/// members.
#[tokio::test]
async fn static_certificates_are_exchanged_for_generated_ones_while_members_run_and_clients_write()
{
    discreet_cluster("tls_static_to_generated", async |sandbox| {
        let authority = make_secrets(sandbox, &of_services(sandbox), false).await?;
        let tls = format!("{}{DURABLE}", crate::certificates::STATIC);
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, &tls)?)
            .await?;
        sandbox.await_members("c", 3).await?;
        let identity = client(&authority, sandbox, "c")?;
        let encrypted = (
            Some(&identity),
            "with static certificates, when both are taken",
        );
        step(sandbox, encrypted, BOTH, ("Tls", true)).await?;
        let generated = r#"{"static":null,"generated":{},"#;
        on(sandbox, generated, async || {
            generated_client(sandbox, "c").await
        })
        .await
    })
    .await;
}

/// A cluster that sleeps while its TLS is switched comes back as it was, and is switched then.
#[tokio::test]
async fn a_cluster_that_hibernates_is_switched_when_it_is_back() {
    discreet_cluster("tls_switch_generated", async |sandbox| {
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, DURABLE)?)
            .await?;
        sandbox.await_members("c", 3).await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        await_object(&clusters, "c", "it is recorded", SWITCHED, |object| {
            field(object, "/status/TLS/peers") == "Plain"
        })
        .await?;
        let merge = async |patch: &str| {
            let patch = ["patch", "etcdcluster", "c", "--type=merge", "-p", patch];
            sandbox.kubectl(&patch).await.map(drop)
        };
        merge(r#"{"spec":{"hibernate":true}}"#).await?;
        await_object(&clusters, "c", "it hibernates", SWITCHED, |object| {
            field(object, "/status/phase") == "Hibernated"
        })
        .await?;
        merge(r#"{"spec":{"hibernate":false,"TLS":{"generated":{},"acceptPlaintext":true}}}"#)
            .await?;
        switched(sandbox, "Tls", true).await?;
        let identity = generated_client(sandbox, "c").await?;
        all_let_in(sandbox, &identity).await.context("generated")
    })
    .await;
}

/// A switch that is asked for while a restore in place is under way: the seed was made without it, is asked as it was
/// made, and is switched when it is handed over. A backup does not wait for the switch.
#[tokio::test]
async fn a_switch_waits_for_a_restore_in_place_and_no_backup_waits_for_the_switch() {
    discreet("tls_switch_restore", async |sandbox| {
        let s3 = sandbox.env.s3()?;
        let bucket = Bucket::create(s3, &sandbox.namespace).await?;
        sandbox.apply(&aws_secret(s3, "aws")).await?;
        let spec = format!("  TLS: {{generated: {{}}}}\n{DURABLE}");
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 1, &spec)?)
            .await?;
        talks(sandbox, "Tls", false).await?;
        let (env, namespace) = (&sandbox.env, &sandbox.namespace);
        let identity = generated_client(sandbox, "c").await?;
        let keys = Keyspace::of_tls_cluster(env, namespace, "c", &identity).await?;
        keys.fill("kept/", KEYS, |_| ()).await?;
        drop(keys);
        let backups = sandbox.objects(Kind::EtcdBackup);
        sandbox
            .apply(&backup(sandbox, "first", &bucket.name, "etcd.backup")?)
            .await?;
        await_complete(&backups, "first", PATIENCE).await?;

        sandbox.apply(&over(sandbox, &bucket, "")?).await?;
        let pods = sandbox.api::<Pod>();
        let seeds = ListParams::default().labels(CLAIM);
        until("the seed's pod", PATIENCE, async || {
            Ok(match pods.list(&seeds).await?.items.first() {
                Some(_) => Look::Done(()),
                None => Look::NotYet("there is none".to_owned()),
            })
        })
        .await?;
        set(sandbox, r#"{"acceptPlaintext":true}"#).await?;
        await_complete(&sandbox.objects(Kind::EtcdRestore), "over", PATIENCE).await?;
        sandbox
            .apply(&backup(sandbox, "second", &bucket.name, "second.backup")?)
            .await?;
        await_complete(&backups, "second", PATIENCE).await?;
        talks(sandbox, "Tls", true).await?;
        sandbox.await_members("c", 1).await?;
        let keys = Keyspace::of_cluster(env, namespace, "c").await?;
        keys.verify("kept/", KEYS).await.map(drop)
    })
    .await;
}

/// The operator dies before each kind of write of a switch, and goes on from what it finds.
#[tokio::test]
async fn an_operator_that_dies_while_it_switches_goes_on() {
    discreet_cluster("crash_tls_switch", async |sandbox| {
        make_secrets(sandbox, &of_services(sandbox), false).await?;
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, DURABLE)?)
            .await?;
        switched(sandbox, "Plain", false).await?;
        let writer = Writer::start(sandbox, "c").await?;
        let mut victim = Victim {
            sandbox,
            crashes: 0,
        };
        victim
            .dies_at(CRASHES, async |_| {
                set(sandbox, r#"{"static":{"member":{"peerSecret":"peer"}}}"#).await
            })
            .await?;
        ensure!(victim.lives_on().await? == CRASHES.len());
        switched(sandbox, "Tls", false).await?;
        is_as_asked_for(sandbox, "c", 3).await?;
        writer
            .finish("crashes while TLS is switched")
            .await
            .map(drop)
    })
    .await;
}
