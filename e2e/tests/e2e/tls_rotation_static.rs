//! Secrets that others keep, changed under a cluster that runs: new certificates take effect without a restart, in members
//! and in all three operators, and authorities are replaced in steps, never at once.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use e2e::bucket::Bucket;
use e2e::leaks::{discreet, discreet_cluster};
use e2e::manifests::{self, aws_secret};
use e2e::objects::{Kind, await_complete, await_object, has_condition};
use e2e::tls::{self, Authority, Identity};
use e2e::wait::Look;
use e2e::{Keyspace, PATIENCE, Sandbox, Writer, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;

use crate::backup_restore_s3::backup;
use crate::certificates::{STATIC, client, make_secrets, of_services};
use crate::fixtures::{DURABLE, cluster_with};
use crate::tls_bad_secrets::{await_fault, uids};
use crate::tls_generated::{all_serve_as, lives_of};
use crate::tls_static::is_let_in;

const KEYS: usize = 200;
/// So long the operators' first certificate lives.
const FIRST_LIFE: Duration = Duration::from_secs(150);
/// A name that only the new certificates have.
const MORE: &str = "rotated.example";

/// Puts certificates by this authority into the Secrets of the members and of the operators; all trust `ca`.
async fn put(sandbox: &Sandbox, by: &Authority, names: &[String], ca: &str) -> Result<()> {
    for (name, keys, signed) in [
        ("peer", tls::PEER, by.sign(names)?),
        ("server", tls::SERVER, by.sign(names)?),
        ("operator", tls::CLIENT, by.client()?),
    ] {
        let secret = tls::secret(name, keys, &signed, ca);
        sandbox.apply(&secret).await?;
    }
    Ok(())
}

/// The operators' pods, and how often they were started again.
async fn operators(sandbox: &Sandbox) -> Result<Vec<(String, i32)>> {
    let selector = ListParams::default().labels("app.kubernetes.io/name=etcd-operator");
    let pods = sandbox.api::<Pod>().list(&selector).await?;
    let life = |pod: &Pod| {
        let statuses = pod
            .status
            .as_ref()
            .and_then(|it| it.container_statuses.as_ref());
        let restarts = statuses.into_iter().flatten().map(|one| one.restart_count);
        (pod.uid().unwrap_or_default(), restarts.sum())
    };
    let mut all: Vec<_> = pods.iter().map(life).collect();
    all.sort();
    ensure!(all.len() == 3, "{} operators", all.len());
    Ok(all)
}

/// Waits until every member shows a certificate with this name, on this port.
async fn await_name(sandbox: &Sandbox, port: u16, identity: &Identity, name: &str) -> Result<()> {
    let identity = Identity {
        name: name.to_owned(),
        ..identity.clone()
    };
    let what = format!("every member shows a certificate for {name} on port {port}");
    until(&what, PATIENCE, async || {
        for pod in sandbox.member_pods("c").await? {
            let pod = format!("pod/{}", pod.name_any());
            if !is_let_in(sandbox, &pod, port, &identity).await? {
                return Ok(Look::NotYet(format!("{pod} shows the one before")));
            }
        }
        Ok(Look::Done(()))
    })
    .await
}

/// Whoever still used the operators' first certificate would not get in any more.
#[tokio::test]
async fn certificates_of_others_are_taken_without_a_restart() {
    discreet("tls_rotation_static", async |sandbox| {
        let s3 = sandbox.env.s3()?;
        let bucket = Bucket::create(s3, &sandbox.namespace).await?;
        sandbox.apply(&aws_secret(s3, "aws")).await?;
        let mut names = of_services(sandbox);
        let authority = make_secrets(sandbox, &names, false).await?;
        let first = authority.client_for(FIRST_LIFE)?;
        let ends = Instant::now() + FIRST_LIFE;
        let secret = tls::secret("operator", tls::CLIENT, &first, &authority.pem);
        sandbox.apply(&secret).await?;
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, STATIC)?)
            .await?;
        sandbox.await_members("c", 3).await?;
        let identity = client(&authority, sandbox, "c")?;
        let (env, namespace) = (&sandbox.env, &sandbox.namespace);
        let keys = Keyspace::of_tls_cluster(env, namespace, "c", &identity).await?;
        keys.fill("kept/", KEYS, |_| ()).await?;
        sandbox
            .apply(&backup(sandbox, "first", &bucket.name, "first.backup")?)
            .await?;
        let backups = sandbox.objects(Kind::EtcdBackup);
        await_complete(&backups, "first", PATIENCE).await?;
        let writer = Writer::start_tls(sandbox, "c", &identity).await?;
        let (members, processes) = (lives_of(sandbox).await?, operators(sandbox).await?);

        names.push(MORE.to_owned());
        put(sandbox, &authority, &names, &authority.pem).await?;
        await_name(sandbox, 2379, &identity, MORE).await?;
        await_name(sandbox, 2380, &identity, MORE).await?;
        ensure!(
            lives_of(sandbox).await? == members,
            "a member was restarted"
        );
        tokio::time::sleep(ends.saturating_duration_since(Instant::now())).await;

        // Every operator has to connect anew: to a member that was not there, for a backup, and for a restore.
        let lost = sandbox.member_pods("c").await?;
        let lost = lost.first().map(ResourceExt::name_any).unwrap_or_default();
        sandbox.lose_pod("c", &lost).await?;
        sandbox.await_members("c", 3).await?;
        writer.finish("certificates of others").await?;
        sandbox
            .apply(&backup(sandbox, "second", &bucket.name, "second.backup")?)
            .await?;
        await_complete(&backups, "second", PATIENCE).await?;
        let path = format!("{}/second.backup", bucket.name);
        let over = manifests::restore_with(s3, "over", "{name: c}", &path, "  overwrite: true\n");
        sandbox.apply(&over).await?;
        await_complete(&sandbox.objects(Kind::EtcdRestore), "over", PATIENCE).await?;
        sandbox.await_members("c", 3).await?;
        let keys = Keyspace::of_tls_cluster(env, namespace, "c", &identity).await?;
        keys.verify("kept/", KEYS).await?;
        ensure!(
            operators(sandbox).await? == processes,
            "an operator was restarted"
        );
        Ok(())
    })
    .await;
}

/// Waits until every member was started with as many authorities for its peers, and nothing is left to do.
async fn await_started_with(sandbox: &Sandbox, count: usize) -> Result<()> {
    let what = format!("every member was started with {count} authorities");
    until(&what, PATIENCE * 2, async || {
        for pod in sandbox.member_pods("c").await? {
            let noted = pod
                .annotations()
                .get("etcd.database.coreos.com/authorities");
            let noted = noted.map(String::as_str).unwrap_or_default();
            let peers = noted.split(';').next().unwrap_or_default();
            if peers.split('+').count() != count {
                return Ok(Look::NotYet(format!("{}: {noted}", pod.name_any())));
            }
        }
        Ok(Look::Done(()))
    })
    .await?;
    sandbox.await_members("c", 3).await.map(drop)
}

/// Invariant 20: authorities that share nothing with those of the members that run are no reason to restart anybody; in
/// steps they are replaced while clients write.
#[tokio::test]
async fn authorities_of_others_are_replaced_in_steps_and_never_at_once() {
    discreet_cluster("tls_static_authorities", async |sandbox| {
        let names = of_services(sandbox);
        let old = make_secrets(sandbox, &names, false).await?;
        let new = Authority::new("the next authority")?;
        let both = format!("{}{}", old.pem, new.pem);
        let manifest = cluster_with(&sandbox.env, "c", 3, &format!("{STATIC}{DURABLE}"))?;
        sandbox.apply(&manifest).await?;
        sandbox.await_members("c", 3).await?;
        let trusts_both = |identity: Identity| Identity {
            ca: both.clone(),
            ..identity
        };
        let before = trusts_both(client(&old, sandbox, "c")?);
        let writer = Writer::start_tls(sandbox, "c", &before).await?;
        let lives = uids(sandbox).await?;
        let of_peers = |by: &Authority, ca: &str| -> Result<String> {
            Ok(tls::secret("peer", tls::PEER, &by.sign(&names)?, ca))
        };
        sandbox.apply(&of_peers(&new, &new.pem)?).await?;
        sandbox.look_at("c").await?;
        await_fault(
            sandbox,
            "AuthorityReplaced",
            &["Secret peer", "peer-ca.crt", "c-"],
        )
        .await?;
        ensure!(uids(sandbox).await? == lives, "a member was restarted");
        sandbox.apply(&of_peers(&old, &old.pem)?).await?;
        sandbox.look_at("c").await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        await_object(&clusters, "c", "the Secrets hold", PATIENCE, |object| {
            has_condition(object, "TLSReady", "True")
        })
        .await?;
        ensure!(uids(sandbox).await? == lives, "a member was restarted");

        // That the operator and the kubelets look by themselves, the test before shows.
        put(sandbox, &old, &names, &both).await?;
        sandbox.look_at("c").await?;
        await_started_with(sandbox, 2).await?;
        put(sandbox, &new, &names, &both).await?;
        sandbox.have_kubelets_look("c").await?;
        let after = trusts_both(client(&new, sandbox, "c")?);
        let of_new = Identity {
            ca: new.pem.clone(),
            ..after.clone()
        };
        until("members show the new certificates", PATIENCE, async || {
            Ok(if all_serve_as(sandbox, &of_new, &of_new.name).await? {
                Look::Done(())
            } else {
                Look::NotYet("some show the ones before".to_owned())
            })
        })
        .await?;
        writer.finish("both authorities").await?;
        let writer = Writer::start_tls(sandbox, "c", &after).await?;
        put(sandbox, &new, &names, &new.pem).await?;
        sandbox.look_at("c").await?;
        await_started_with(sandbox, 1).await?;
        writer.finish("the new authority alone").await?;
        ensure!(
            !all_serve_as(sandbox, &before, &before.name).await?,
            "a certificate by the one before is taken"
        );
        Ok(())
    })
    .await;
}
