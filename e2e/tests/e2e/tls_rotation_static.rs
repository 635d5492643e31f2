//! The static Secrets of a running cluster change. Members and operators use the new certificates without a restart.
//! The CA is replaced in steps.

use anyhow::{Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{self, aws_secret};
use e2e::objects::{Kind, await_complete, await_object, has_condition};
use e2e::tls::{self, Authority, Identity};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, Writer, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;

use crate::backup_restore_s3::backup;
use crate::certificates::{client, until_with_reads};
use crate::tls_bad_secrets::{await_fault, uids};
use crate::tls_generated::{all_serve_as, restarts_by_uid};
use crate::tls_refused::is_accepted;

const KEYS: usize = 200;
/// A DNS name that is only in the new certificates.
const MORE: &str = "rotated.example";

/// Writes certificates of the CA `by` to the Secrets of members and operators, which then trust the CAs in `ca`.
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

/// The UID and the restarts of each operator pod.
pub(crate) async fn operators(sandbox: &Sandbox) -> Result<Vec<(String, i32)>> {
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

/// Waits until every member presents a certificate with this name on this port.
async fn await_name(sandbox: &Sandbox, port: u16, identity: &Identity, name: &str) -> Result<()> {
    let identity = Identity {
        name: name.to_owned(),
        ..identity.clone()
    };
    let what = format!("every member presents a certificate for {name} on port {port}");
    until_with_reads(sandbox, &what, async || {
        for pod in sandbox.member_pods("c").await? {
            let pod = format!("pod/{}", pod.name_any());
            if !is_accepted(sandbox, &pod, port, &identity).await? {
                return Ok(Poll::NotYet(format!("{pod} presents the old certificate")));
            }
        }
        Ok(Poll::Done(()))
    })
    .await
}

/// Waits until every member was started with this number of trusted peer CAs, and no work is pending.
async fn await_started_with(sandbox: &Sandbox, count: usize) -> Result<()> {
    let what = format!("every member was started with {count} authorities");
    until(&what, DEADLINE * 2, async || {
        for pod in sandbox.member_pods("c").await? {
            let noted = pod
                .annotations()
                .get("etcd.database.coreos.com/authorities");
            let noted = noted.map(String::as_str).unwrap_or_default();
            let peers = noted.split(';').next().unwrap_or_default();
            if peers.split('+').count() != count {
                return Ok(Poll::NotYet(format!("{}: {noted}", pod.name_any())));
            }
        }
        Ok(Poll::Done(()))
    })
    .await?;
    sandbox.await_members("c", 3).await.map(drop)
}

/// Writes new certificates of the same CA to the Secrets. Ensures that members present the new certificates without a
/// restart.
pub(crate) async fn renews(
    sandbox: &Sandbox,
    authority: &Authority,
    names: &[String],
) -> Result<()> {
    let identity = client(authority, sandbox, "c")?;
    let members = restarts_by_uid(sandbox).await?;
    let names = [names, &[MORE.to_owned()]].concat();
    put(sandbox, authority, &names, &authority.pem).await?;
    await_name(sandbox, 2379, &identity, MORE).await?;
    await_name(sandbox, 2380, &identity, MORE).await?;
    ensure!(
        restarts_by_uid(sandbox).await? == members,
        "a member was restarted"
    );
    Ok(())
}

/// Replaces the CA in the peer Secret by a CA that no running member trusts. Ensures that the operator reports the
/// replaced CA, and restarts no member.
async fn replaced_at_once_is_reported(
    sandbox: &Sandbox,
    (old, new): (&Authority, &Authority),
    names: &[String],
) -> Result<()> {
    let before = uids(sandbox).await?;
    let of_peers = |by: &Authority| -> Result<String> {
        Ok(tls::secret("peer", tls::PEER, &by.sign(names)?, &by.pem))
    };
    sandbox.apply(&of_peers(new)?).await?;
    sandbox.trigger_reconcile("c").await?;
    await_fault(
        sandbox,
        "AuthorityReplaced",
        &["Secret peer", "peer-ca.crt", "c-"],
    )
    .await?;
    ensure!(uids(sandbox).await? == before, "a member was restarted");
    sandbox.apply(&of_peers(old)?).await?;
    sandbox.trigger_reconcile("c").await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(
        &clusters,
        "c",
        "the Secrets are valid",
        DEADLINE,
        |object| has_condition(object, "TLSReady", "True"),
    )
    .await?;
    ensure!(uids(sandbox).await? == before, "a member was restarted");
    Ok(())
}

/// Invariant 20: the CA is replaced in steps while clients write. In the end, members reject certificates of the old
/// CA, and all operators connect with their new certificates: for the cluster, for a backup, and for a restore.
pub(crate) async fn replaces_authority(
    sandbox: &Sandbox,
    old: &Authority,
    names: &[String],
) -> Result<()> {
    let s3 = sandbox.env.s3()?;
    let bucket = Bucket::create(s3, &sandbox.namespace).await?;
    sandbox.apply(&aws_secret(s3, "aws")).await?;
    let back_up = async |name: &str| -> Result<()> {
        let manifest = backup(sandbox, name, &bucket.name, &format!("{name}.backup"))?;
        sandbox.apply(&manifest).await?;
        await_complete(&sandbox.objects(Kind::EtcdBackup), name, DEADLINE).await?;
        Ok(())
    };
    back_up("first").await?;

    let new = Authority::new("the next authority")?;
    let both = format!("{}{}", old.pem, new.pem);
    let trusts_both = |identity: Identity| Identity {
        ca: both.clone(),
        ..identity
    };
    let before = trusts_both(client(old, sandbox, "c")?);
    let writer = Writer::start_tls(sandbox, "c", &before).await?;
    replaced_at_once_is_reported(sandbox, (old, &new), names).await?;

    put(sandbox, old, names, &both).await?;
    sandbox.trigger_reconcile("c").await?;
    await_started_with(sandbox, 2).await?;
    put(sandbox, &new, names, &both).await?;
    let after = trusts_both(client(&new, sandbox, "c")?);
    let of_new = Identity {
        ca: new.pem.clone(),
        ..after.clone()
    };
    until_with_reads(
        sandbox,
        "members present the new certificates",
        async || {
            Ok(if all_serve_as(sandbox, &of_new, &of_new.name).await? {
                Poll::Done(())
            } else {
                Poll::NotYet("a member presents its old certificate".to_owned())
            })
        },
    )
    .await?;
    writer.finish("both authorities").await?;
    let writer = Writer::start_tls(sandbox, "c", &after).await?;
    put(sandbox, &new, names, &new.pem).await?;
    sandbox.trigger_reconcile("c").await?;
    await_started_with(sandbox, 1).await?;
    writer.finish("the new authority alone").await?;
    ensure!(
        !all_serve_as(sandbox, &before, &before.name).await?,
        "a certificate of the old authority is accepted"
    );

    let (env, namespace) = (&sandbox.env, &sandbox.namespace);
    let keys = Keyspace::of_tls_cluster(env, namespace, "c", &of_new).await?;
    keys.fill("kept/", KEYS, |_| ()).await?;
    back_up("second").await?;
    keys.fill("later/", 10, |_| ()).await?;
    drop(keys);
    let path = format!("{}/second.backup", bucket.name);
    let over = manifests::restore_with(s3, "over", "{name: c}", &path, "  overwrite: true\n");
    sandbox.apply(&over).await?;
    await_complete(&sandbox.objects(Kind::EtcdRestore), "over", DEADLINE).await?;
    sandbox.await_members("c", 3).await?;
    let keys = Keyspace::of_tls_cluster(env, namespace, "c", &of_new).await?;
    keys.verify("kept/", KEYS).await?;
    keys.verify("later/", 0).await.map(drop)
}
