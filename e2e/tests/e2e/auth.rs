//! Clusters with authentication: members and passwords change, and backups are restored.

use anyhow::{Result, ensure};
use e2e::bucket::Bucket;
use e2e::leaks::{ensure_no_leaks, scenario_without_leaks};
use e2e::manifests::{self, aws_secret, restore_with};
use e2e::objects::{Kind, await_complete, await_object, condition, conditions_line, has_condition};
use e2e::wait::{Poll, until};
use e2e::{DEADLINE, Keyspace, Sandbox, step};

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

pub(crate) async fn accepts_password(
    sandbox: &Sandbox,
    cluster: &str,
    password: &str,
) -> Result<bool> {
    let (env, namespace) = (&sandbox.env, &sandbox.namespace);
    Keyspace::accepts_login(env, namespace, cluster, ("root", password)).await
}

/// Waits until etcd accepts the password for root.
pub(crate) async fn await_password(sandbox: &Sandbox, cluster: &str, password: &str) -> Result<()> {
    until("etcd accepts the password", DEADLINE, async || {
        Ok(if accepts_password(sandbox, cluster, password).await? {
            Poll::Done(())
        } else {
            Poll::NotYet("etcd rejects the password".to_owned())
        })
    })
    .await
}

/// Creates the Secret with the first password, and a cluster with the additional lines `more` under `spec`.
async fn create_cluster(sandbox: &Sandbox, size: usize, more: &str) -> Result<()> {
    sandbox.apply(&secret(FIRST)).await?;
    sandbox
        .apply(&cluster_with(&sandbox.env, "c", size, more)?)
        .await?;
    sandbox.await_members("c", size).await.map(drop)
}

/// Writes keys, and enables authentication with an etcd client, not through the operator.
async fn fill_and_enable_auth(sandbox: &Sandbox) -> Result<()> {
    let open = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    open.fill("kept/", KEYS, |_| ()).await?;
    open.enable_auth(FIRST).await
}

/// Creates a bucket, and the Secret with its credentials.
async fn bucket(sandbox: &Sandbox) -> Result<Bucket> {
    let s3 = sandbox.env.s3()?;
    sandbox.apply(&aws_secret(s3, "aws")).await?;
    Bucket::create(s3, &sandbox.namespace).await
}

/// Backs up the cluster, and waits until the backup is complete. Returns the path of the backup.
async fn back_up(sandbox: &Sandbox, bucket: &Bucket, name: &str) -> Result<String> {
    let file = format!("{name}.backup");
    sandbox
        .apply(&backup(sandbox, name, &bucket.name, &file)?)
        .await?;
    await_complete(&sandbox.objects(Kind::EtcdBackup), name, DEADLINE).await?;
    Ok(format!("{}/{file}", bucket.name))
}

/// Ensures that a client with this password can read all keys, and returns the revision.
async fn has_the_keys(sandbox: &Sandbox, cluster: &str, password: &str) -> Result<i64> {
    let keys = keys_as(sandbox, cluster, password).await?;
    keys.verify("kept/", KEYS).await
}

/// Waits until the condition Degraded has this reason, and returns its message.
async fn await_degraded(sandbox: &Sandbox, cluster: &str, reason: &str) -> Result<String> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let seen = await_object(&clusters, cluster, reason, DEADLINE, |object| {
        condition(object, "Degraded").is_some_and(|one| one["reason"] == reason)
    })
    .await?;
    let message = condition(&seen, "Degraded").map(|one| one["message"].to_string());
    Ok(message.unwrap_or_default())
}

/// Lines under `spec` that make the operator enable or disable authentication.
fn managed(enabled: bool) -> String {
    format!("{DURABLE}  auth: {{secret: root, enabled: {enabled}}}\n")
}

/// The operator enables authentication, changes the password, and disables authentication. A restored cluster has the
/// users and passwords of the backup.
#[tokio::test]
async fn operator_enables_and_disables_auth_and_changes_password() {
    scenario_without_leaks("auth", async |sandbox| {
        let bucket = bucket(sandbox).await?;
        create_cluster(sandbox, 3, &managed(true)).await?;
        await_password(sandbox, "c", FIRST).await?;
        let keys = keys_as(sandbox, "c", FIRST).await?;
        let written = keys.fill("kept/", KEYS, |_| ()).await?;
        drop(keys);
        let path = back_up(sandbox, &bucket, "first").await?;
        let changed = password_changes_and_backup_keeps_its_own(sandbox, &bucket, &path, written);
        step("change the password and restore a backup", changed).await?;
        let restarted = members_change_with_new_logins(sandbox);
        step("restart, add and remove members", restarted).await?;
        step("disable authentication", disable_auth(sandbox)).await
    })
    .await;
}

/// Changes the password while clients use the cluster, and restores `path`, a backup with the first password. Finally
/// changes back to the first password.
async fn password_changes_and_backup_keeps_its_own(
    sandbox: &Sandbox,
    bucket: &Bucket,
    path: &str,
    written: i64,
) -> Result<()> {
    sandbox.apply(&secret(SECOND)).await?;
    // The Secret contains the second password, but the restored cluster has the first password. The EtcdRestore must
    // report this difference.
    let manifest = restore_with(sandbox.env.s3()?, "back", "{name: d}", path, "");
    sandbox.apply(&manifest).await?;
    let restores = sandbox.objects(Kind::EtcdRestore);
    await_object(
        &restores,
        "back",
        "the password mismatch is reported",
        DEADLINE,
        |object| {
            object.data["status"]
                .to_string()
                .contains("passwords of the backup")
        },
    )
    .await?;
    // The test does not trigger a reconcile here, because the operator reads the changed Secret within a minute.
    await_password(sandbox, "c", SECOND).await?;
    ensure!(
        !accepts_password(sandbox, "c", FIRST).await?,
        "etcd still accepts the previous password"
    );
    sandbox.await_members("c", 3).await?;
    back_up(sandbox, bucket, "second").await?;
    ensure_no_leaks(sandbox).await?;

    sandbox.apply(&secret(FIRST)).await?;
    sandbox.trigger_reconcile("c").await?;
    await_complete(&restores, "back", DEADLINE).await?;
    sandbox.await_members("d", 3).await?;
    ensure!(has_the_keys(sandbox, "d", FIRST).await? >= written);
    sandbox.delete_cluster("d").await?;
    await_password(sandbox, "c", FIRST).await?;
    sandbox.await_members("c", 3).await.map(drop)
}

/// etcd keeps login tokens in memory, so the operator must log in again after all members have restarted. A learner
/// requires a token, but cannot issue one.
async fn members_change_with_new_logins(sandbox: &Sandbox) -> Result<()> {
    let pods = sandbox.member_pods("c").await?;
    let before: Vec<_> = pods.into_iter().map(|pod| pod.metadata.uid).collect();
    let selector = "--selector=etcd_cluster=c";
    let force = ["--force", "--grace-period=0", "--wait=false"];
    let words = [&["delete", "pod", selector], &force[..]].concat();
    sandbox.kubectl(&words).await?;
    until("every member has a new pod", DEADLINE, async || {
        let pods = sandbox.member_pods("c").await?;
        let old = pods.iter().any(|pod| before.contains(&pod.metadata.uid));
        Ok(if !old && pods.len() == 3 {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{} pods, old ones among them: {old}", pods.len()))
        })
    })
    .await?;
    for size in [5, 3] {
        sandbox.scale("c", size).await?;
        sandbox.await_members("c", size).await?;
    }
    has_the_keys(sandbox, "c", FIRST).await.map(drop)
}

async fn disable_auth(sandbox: &Sandbox) -> Result<()> {
    let off = cluster_with(&sandbox.env, "c", 3, &managed(false))?;
    sandbox.apply(&off).await?;
    let (env, namespace) = (&sandbox.env, &sandbox.namespace);
    until("authentication is off", DEADLINE, async || {
        let open = Keyspace::of_cluster(env, namespace, "c").await?;
        Ok(match open.verify("kept/", KEYS).await {
            Ok(_) => Poll::Done(()),
            Err(error) => Poll::NotYet(format!("{error:#}")),
        })
    })
    .await?;
    sandbox.await_members("c", 3).await.map(drop)
}

/// The user enables authentication and changes the password. The operators log in with the Secret in `spec.auth.secret`
/// of the EtcdCluster, or in `spec.authSecret` of an EtcdBackup with `etcdEndpoints`.
#[tokio::test]
async fn operators_log_in_if_user_manages_auth() {
    scenario_without_leaks("auth_of_the_user", async |sandbox| {
        let bucket = bucket(sandbox).await?;
        create_cluster(sandbox, 1, "  auth: {secret: root}\n").await?;
        fill_and_enable_auth(sandbox).await?;
        has_the_keys(sandbox, "c", FIRST).await?;
        let changed = secret_follows_the_password(sandbox);
        step("change the password, then the Secret", changed).await?;
        let backed_up = endpoints_are_backed_up(sandbox, &bucket);
        let path = step("back up by endpoints", backed_up).await?;
        step("restore", is_restored(sandbox, &path)).await
    })
    .await;
}

/// Until the user updates the Secret, the operator reports that etcd rejects the password in the Secret.
async fn secret_follows_the_password(sandbox: &Sandbox) -> Result<()> {
    keys_as(sandbox, "c", FIRST)
        .await?
        .change_password(SECOND)
        .await?;
    let message = await_degraded(sandbox, "c", "EtcdAccessDenied").await?;
    ensure!(
        message.contains("Secret root") && message.contains("spec.auth.secret"),
        "{message}"
    );
    sandbox.apply(&secret(SECOND)).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, "c", "Degraded=False", DEADLINE, |object| {
        has_condition(object, "Degraded", "False")
    })
    .await?;
    sandbox.await_members("c", 1).await?;
    has_the_keys(sandbox, "c", SECOND).await.map(drop)
}

/// Backs up the cluster through `etcdEndpoints`, and returns the path of the backup.
async fn endpoints_are_backed_up(sandbox: &Sandbox, bucket: &Bucket) -> Result<String> {
    let (namespace, s3) = (&sandbox.namespace, sandbox.env.s3()?);
    let of = |name: &str, more: &str| {
        let path = format!("{}/{name}", bucket.name);
        let by_name = manifests::backup(s3, name, "c", &path);
        let endpoints = format!("etcdEndpoints: [\"http://c-client.{namespace}.svc:2379\"]{more}");
        by_name.replace("etcdCluster: {name: c}", &endpoints)
    };
    let backups = sandbox.objects(Kind::EtcdBackup);
    sandbox.apply(&of("denied", "")).await?;
    await_object(&backups, "denied", "access is denied", DEADLINE, |object| {
        conditions_line(object).contains("authSecret")
    })
    .await?;
    sandbox
        .apply(&of("by-endpoint", "\n  authSecret: root"))
        .await?;
    await_complete(&backups, "by-endpoint", DEADLINE).await?;
    Ok(format!("{}/by-endpoint", bucket.name))
}

/// Restores the backup in place and into a new cluster. Both EtcdClusters name the Secret with the password.
async fn is_restored(sandbox: &Sandbox, path: &str) -> Result<()> {
    let (env, namespace, s3) = (&sandbox.env, &sandbox.namespace, sandbox.env.s3()?);
    let version = crate::fixtures::newest_version(env)?;
    let template = format!(
        "{{name: d, template: {{spec: {{size: 1, version: \"{version}\", auth: {{secret: root}}}}}}}}"
    );
    let restores = sandbox.objects(Kind::EtcdRestore);
    sandbox
        .apply(&restore_with(s3, "new", &template, path, ""))
        .await?;
    sandbox
        .apply(&restore_with(
            s3,
            "over",
            "{name: c}",
            path,
            "  overwrite: true\n",
        ))
        .await?;
    for (restore, cluster) in [("new", "d"), ("over", "c")] {
        await_complete(&restores, restore, DEADLINE).await?;
        sandbox.await_members(cluster, 1).await?;
        has_the_keys(sandbox, cluster, SECOND).await?;
        let anonymous = Keyspace::of_cluster(env, namespace, cluster).await?;
        ensure!(
            anonymous.verify("kept/", KEYS).await.is_err(),
            "etcd accepts anonymous clients"
        );
    }
    Ok(())
}
