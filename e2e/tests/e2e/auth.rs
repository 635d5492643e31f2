//! Clusters with etcd's own authentication: run, scaled, healed, backed up and restored, with passwords that change.

use anyhow::{Result, ensure};
use e2e::bucket::Bucket;
use e2e::leaks::{discreet, discreet_cluster, nothing_leaks};
use e2e::manifests::{self, aws_secret, restore_with};
use e2e::objects::{Kind, await_complete, await_object, condition, conditions_line, has_condition};
use e2e::wait::{Look, until};
use e2e::{Keyspace, PATIENCE, Sandbox};

use crate::backup_restore_s3::backup;
use crate::fixtures::{DURABLE, cluster_with};

const KEYS: usize = 200;
const FIRST: &str = "correct-horse-battery";
const SECOND: &str = "staple-is-the-second";

pub(crate) fn secret(password: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: root}}\ntype: kubernetes.io/basic-auth\nstringData: \
         {{username: root, password: {password}}}\n"
    )
}

pub(crate) async fn keys_as(sandbox: &Sandbox, cluster: &str, password: &str) -> Result<Keyspace> {
    let (env, namespace) = (&sandbox.env, &sandbox.namespace);
    Keyspace::of_cluster_as(env, namespace, cluster, ("root", password)).await
}

pub(crate) async fn lets_in(sandbox: &Sandbox, cluster: &str, password: &str) -> Result<bool> {
    let (env, namespace) = (&sandbox.env, &sandbox.namespace);
    Keyspace::lets_in(env, namespace, cluster, ("root", password)).await
}

/// Waits until etcd takes this password.
pub(crate) async fn await_password(sandbox: &Sandbox, cluster: &str, password: &str) -> Result<()> {
    until("etcd takes the password", PATIENCE, async || {
        Ok(if lets_in(sandbox, cluster, password).await? {
            Look::Done(())
        } else {
            Look::NotYet("it does not let root in".to_owned())
        })
    })
    .await
}

/// What there is in the beginning: the Secret with the first password, and a cluster with these lines under `spec`.
async fn begin(sandbox: &Sandbox, size: usize, more: &str) -> Result<()> {
    sandbox.apply(&secret(FIRST)).await?;
    sandbox
        .apply(&cluster_with(&sandbox.env, "c", size, more)?)
        .await?;
    sandbox.await_members("c", size).await.map(drop)
}

/// Keys are written, and whoever wrote them turns authentication on.
async fn fill_and_close(sandbox: &Sandbox) -> Result<()> {
    let open = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    open.fill("kept/", KEYS, |_| ()).await?;
    open.enable_auth(FIRST).await
}

/// A bucket, and the Secret for it.
async fn bucket(sandbox: &Sandbox) -> Result<Bucket> {
    let s3 = sandbox.env.s3()?;
    sandbox.apply(&aws_secret(s3, "aws")).await?;
    Bucket::create(s3, &sandbox.namespace).await
}

/// Backs the cluster up, to its end.
async fn back_up(sandbox: &Sandbox, bucket: &Bucket, name: &str) -> Result<String> {
    let file = format!("{name}.backup");
    sandbox
        .apply(&backup(sandbox, name, &bucket.name, &file)?)
        .await?;
    await_complete(&sandbox.objects(Kind::EtcdBackup), name, PATIENCE).await?;
    Ok(format!("{}/{file}", bucket.name))
}

/// The keys are there for whoever has this password.
async fn has_the_keys(sandbox: &Sandbox, cluster: &str, password: &str) -> Result<i64> {
    let keys = keys_as(sandbox, cluster, password).await?;
    keys.verify("kept/", KEYS).await
}

/// Waits for a problem of the cluster, by its reason.
async fn await_degraded(sandbox: &Sandbox, cluster: &str, reason: &str) -> Result<String> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let seen = await_object(&clusters, cluster, reason, PATIENCE, |object| {
        condition(object, "Degraded").is_some_and(|one| one["reason"] == reason)
    })
    .await?;
    let message = condition(&seen, "Degraded").map(|one| one["message"].to_string());
    Ok(message.unwrap_or_default())
}

/// A user turns authentication on and changes the password; the operators go on with what the Secret says.
#[tokio::test]
async fn auth_enabled() {
    discreet("auth_enabled", async |sandbox| {
        begin(sandbox, 3, "  auth: {secret: root}\n").await?;
        fill_and_close(sandbox).await?;
        keys_as(sandbox, "c", FIRST).await?;

        // Members are lost, added and removed as ever; a learner asks for a token and gives none out.
        let pods = sandbox.member_pods("c").await?;
        let lost = pods
            .first()
            .and_then(|pod| pod.metadata.name.clone())
            .unwrap_or_default();
        sandbox.lose_pod("c", &lost).await?;
        sandbox.await_members("c", 3).await?;
        sandbox.scale("c", 5).await?;
        sandbox.await_members("c", 5).await?;
        sandbox.scale("c", 3).await?;
        sandbox.await_members("c", 3).await?;
        has_the_keys(sandbox, "c", FIRST).await?;

        // Until the Secret follows, the operator says which one does not fit.
        keys_as(sandbox, "c", FIRST)
            .await?
            .change_password(SECOND)
            .await?;
        let said = await_degraded(sandbox, "c", "EtcdAccessDenied").await?;
        ensure!(
            said.contains("Secret root") && said.contains("spec.auth.secret"),
            "{said}"
        );
        sandbox.apply(&secret(SECOND)).await?;
        sandbox.await_members("c", 3).await?;
        has_the_keys(sandbox, "c", SECOND).await.map(drop)
    })
    .await;
}

/// The operator turns it on, changes the password, backs up, restores into a new cluster with the users of the
/// backup, and turns it off.
#[tokio::test]
async fn auth_turn_on() {
    discreet("auth_turn_on", async |sandbox| {
        let bucket = bucket(sandbox).await?;
        let with = |enabled| format!("{DURABLE}  auth: {{secret: root, enabled: {enabled}}}\n");
        begin(sandbox, 3, &with(true)).await?;
        await_password(sandbox, "c", FIRST).await?;
        let keys = keys_as(sandbox, "c", FIRST).await?;
        let written = keys.fill("kept/", KEYS, |_| ()).await?;

        back_up(sandbox, &bucket, "first").await?;

        // The Secret is changed: etcd follows.
        sandbox.apply(&secret(SECOND)).await?;
        await_password(sandbox, "c", SECOND).await?;
        ensure!(
            !lets_in(sandbox, "c", FIRST).await?,
            "the password before still fits"
        );
        sandbox.await_members("c", 3).await?;
        let path = back_up(sandbox, &bucket, "second").await?;
        nothing_leaks(sandbox).await?;

        // Back with the users of the backup, under another name.
        let manifest = restore_with(sandbox.env.s3()?, "back", "{name: d}", &path, "");
        sandbox.apply(&manifest).await?;
        await_complete(&sandbox.objects(Kind::EtcdRestore), "back", PATIENCE).await?;
        sandbox.await_members("d", 3).await?;
        ensure!(has_the_keys(sandbox, "d", SECOND).await? >= written);

        // Off again, where the operator had turned it on.
        let off = cluster_with(&sandbox.env, "c", 3, &with(false))?;
        sandbox.apply(&off).await?;
        let (env, namespace) = (&sandbox.env, &sandbox.namespace);
        until("authentication is off", PATIENCE, async || {
            let open = Keyspace::of_cluster(env, namespace, "c").await?;
            Ok(match open.verify("kept/", KEYS).await {
                Ok(_) => Look::Done(()),
                Err(error) => Look::NotYet(format!("{error:#}")),
            })
        })
        .await?;
        sandbox.await_members("c", 3).await.map(drop)
    })
    .await;
}

/// A backup from before the password was changed holds the one before; the restore says so, and goes on once the
/// Secret has it.
#[tokio::test]
async fn auth_restore_of_another_password() {
    discreet("auth_restore_password", async |sandbox| {
        let bucket = bucket(sandbox).await?;
        begin(sandbox, 1, "  auth: {secret: root, enabled: true}\n").await?;
        await_password(sandbox, "c", FIRST).await?;
        keys_as(sandbox, "c", FIRST)
            .await?
            .fill("kept/", KEYS, |_| ())
            .await?;
        let path = back_up(sandbox, &bucket, "first").await?;
        // That the operator looks by itself, the test before shows.
        sandbox.apply(&secret(SECOND)).await?;
        sandbox.look_at("c").await?;
        await_password(sandbox, "c", SECOND).await?;

        let manifest = restore_with(sandbox.env.s3()?, "back", "{name: d}", &path, "");
        sandbox.apply(&manifest).await?;
        let restores = sandbox.objects(Kind::EtcdRestore);
        await_object(
            &restores,
            "back",
            "the password does not fit",
            PATIENCE,
            |object| {
                object.data["status"]
                    .to_string()
                    .contains("passwords of the backup")
            },
        )
        .await?;
        sandbox.apply(&secret(FIRST)).await?;
        await_complete(&restores, "back", PATIENCE).await?;
        has_the_keys(sandbox, "d", FIRST).await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        await_object(&clusters, "d", "available", PATIENCE, |object| {
            has_condition(object, "Available", "True")
        })
        .await?;
        Ok(())
    })
    .await;
}

/// Authentication that a user has turned on, and an EtcdCluster beside it that knows of it, or a backup of endpoints
/// alone: each names the Secret itself. The restored cluster has the users of the backup.
#[tokio::test]
async fn auth_of_the_user() {
    discreet("auth_of_the_user", async |sandbox| {
        let (env, namespace, s3) = (&sandbox.env, &sandbox.namespace, sandbox.env.s3()?);
        let bucket = bucket(sandbox).await?;
        begin(sandbox, 1, "  auth: {secret: root}\n").await?;
        fill_and_close(sandbox).await?;
        let of = |name: &str, more: &str| {
            let path = format!("{}/{name}", bucket.name);
            let by_name = manifests::backup(s3, name, "c", &path);
            let endpoints =
                format!("etcdEndpoints: [\"http://c-client.{namespace}.svc:2379\"]{more}");
            by_name.replace("etcdCluster: {name: c}", &endpoints)
        };
        let backups = sandbox.objects(Kind::EtcdBackup);
        sandbox.apply(&of("denied", "")).await?;
        await_object(&backups, "denied", "it is not let in", PATIENCE, |object| {
            conditions_line(object).contains("authSecret")
        })
        .await?;
        sandbox
            .apply(&of("by-endpoint", "\n  authSecret: root"))
            .await?;
        await_complete(&backups, "by-endpoint", PATIENCE).await?;

        // Over the living one, which says itself how it is reached, and into a new one, which is told.
        let path = format!("{}/by-endpoint", bucket.name);
        let version = crate::fixtures::newest_version(env)?;
        let template = format!(
            "{{name: d, template: {{spec: {{size: 1, version: \"{version}\", auth: {{secret: root}}}}}}}}"
        );
        let restores = sandbox.objects(Kind::EtcdRestore);
        sandbox
            .apply(&restore_with(s3, "new", &template, &path, ""))
            .await?;
        sandbox
            .apply(&restore_with(s3, "over", "{name: c}", &path, "  overwrite: true\n"))
            .await?;
        for (restore, cluster) in [("new", "d"), ("over", "c")] {
            await_complete(&restores, restore, PATIENCE).await?;
            sandbox.await_members(cluster, 1).await?;
            has_the_keys(sandbox, cluster, FIRST).await?;
            let nobody = Keyspace::of_cluster(env, namespace, cluster).await?;
            ensure!(nobody.verify("kept/", KEYS).await.is_err(), "it is open");
        }
        Ok(())
    })
    .await;
}

/// Members keep logins in memory: when all of them were started again, the operator's is worth nothing, and it goes on
/// with another.
#[tokio::test]
async fn an_operator_whose_login_no_member_knows_any_more_logs_in_anew() {
    discreet_cluster("auth_all_restarted", async |sandbox| {
        sandbox.apply(&secret(FIRST)).await?;
        let auth = format!("{DURABLE}  auth: {{secret: root, enabled: true}}\n");
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, &auth)?)
            .await?;
        sandbox.await_members("c", 3).await?;
        await_password(sandbox, "c", FIRST).await?;
        keys_as(sandbox, "c", FIRST)
            .await?
            .fill("kept/", KEYS, |_| ())
            .await?;
        let pods = sandbox.member_pods("c").await?;
        let before: Vec<_> = pods.into_iter().map(|pod| pod.metadata.uid).collect();
        let selector = "--selector=etcd_cluster=c";
        let force = ["--force", "--grace-period=0", "--wait=false"];
        let words = [&["delete", "pod", selector], &force[..]].concat();
        sandbox.kubectl(&words).await?;
        until("every member has another pod", PATIENCE, async || {
            let pods = sandbox.member_pods("c").await?;
            let old = pods.iter().any(|pod| before.contains(&pod.metadata.uid));
            Ok(if !old && pods.len() == 3 {
                Look::Done(())
            } else {
                Look::NotYet(format!("{} pods, some of before: {old}", pods.len()))
            })
        })
        .await?;
        // What takes a login.
        sandbox.scale("c", 1).await?;
        sandbox.await_members("c", 1).await?;
        keys_as(sandbox, "c", FIRST)
            .await?
            .verify("kept/", KEYS)
            .await
            .map(drop)
    })
    .await;
}
