//! Users and roles as resources: clients with a password and with a certificate get exactly the permissions of their
//! EtcdRoles. The operator corrects changes in etcd, applies changes of the password in the Secret, and deletes users
//! and roles with their objects.

use anyhow::{Result, ensure};
use e2e::leaks::{cluster_scenario_without_leaks, ensure_no_leaks};
use e2e::objects::{Kind, await_object, condition, has_condition};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, step, until};
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use serde_json::json;

use crate::auth;
use crate::fixtures::newest_version;
use crate::tls_generated::{GENERATED, client};
use crate::upgrade::manifest;

const ROOT: &str = "correct-horse-battery";
const FIRST: &str = "first-of-the-application";
const SECOND: &str = "second-of-the-application";
const KEYS: usize = 5;

/// The common name of the generated client certificate.
const CERTIFICATE: &str = "c-client";

fn password(password: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: app}}\nstringData: {{password: {password}}}\n"
    )
}

/// Two EtcdRoles and two EtcdUsers: `app` has a password, and `certificate` has a client certificate. Both may read the
/// key `revision`, which the client of the test reads.
fn users() -> String {
    let head = "apiVersion: etcd.database.coreos.com/v1beta2";
    let cluster = "etcdCluster: {name: c}";
    format!(
        "{head}\nkind: EtcdRole\nmetadata: {{name: writer}}\nspec:\n  {cluster}\n  permissions:\n  \
         - {{access: ReadWrite, prefix: app/}}\n  - {{access: Read, key: revision}}\n---\n\
         {head}\nkind: EtcdRole\nmetadata: {{name: reader}}\nspec:\n  {cluster}\n  permissions:\n  \
         - {{access: Read, prefix: \"\"}}\n---\n\
         {head}\nkind: EtcdUser\nmetadata: {{name: app}}\nspec:\n  {cluster}\n  roles: [writer]\n  \
         password: {{secret: app}}\n---\n\
         {head}\nkind: EtcdUser\nmetadata: {{name: certificate}}\nspec:\n  {cluster}\n  userName: {CERTIFICATE}\n  \
         roles: [reader]\n  clientCertificate: true\n"
    )
}

async fn await_ready(sandbox: &Sandbox, kind: Kind, name: &str) -> Result<()> {
    let objects = sandbox.objects(kind);
    let found = await_object(&objects, name, "Ready", DEADLINE, |object| {
        has_condition(object, "Ready", "True")
    });
    found.await.map(drop)
}

/// A client that authenticates with a password, over TLS.
async fn keys_as(sandbox: &Sandbox, user: &str, password: &str) -> Result<Keyspace> {
    let identity = client(sandbox, "c").await?;
    let (env, namespace) = (&sandbox.env, &sandbox.namespace);
    Keyspace::of_tls_cluster_as(env, namespace, "c", &identity, (user, password)).await
}

/// Waits until a client with this password can write below `app/`.
async fn await_write(sandbox: &Sandbox, password: &str) -> Result<()> {
    until("the user app can write", DEADLINE, async || {
        let keys = keys_as(sandbox, "app", password).await?;
        Ok(match keys.write("app/probe", b"value".to_vec()).await {
            Ok(()) => Poll::Done(()),
            Err(error) => Poll::NotYet(format!("{error:#}")),
        })
    })
    .await
}

async fn is_created(sandbox: &Sandbox, version: &str) -> Result<()> {
    sandbox.apply(&auth::secret(ROOT)).await?;
    let more = format!("{GENERATED}  auth: {{secret: root, enabled: true}}\n");
    sandbox.apply(&manifest("c", 1, version, &more)).await?;
    // The EtcdRoles and EtcdUsers are created before the cluster has formed.
    sandbox.apply(&users()).await?;
    sandbox.await_members("c", 1).await?;
    let objects = sandbox.objects(Kind::EtcdUser);
    await_object(
        &objects,
        "app",
        "the Secret is missing",
        DEADLINE,
        |object| condition(object, "Ready").is_some_and(|ready| ready["reason"] == "SecretMissing"),
    )
    .await?;
    sandbox.apply(&password(FIRST)).await?;
    for role in ["writer", "reader"] {
        await_ready(sandbox, Kind::EtcdRole, role).await?;
    }
    for user in ["app", "certificate"] {
        await_ready(sandbox, Kind::EtcdUser, user).await?;
    }
    sandbox
        .await_event(Kind::EtcdUser, "app", &["Normal UserCreated"])
        .await
}

async fn has_only_granted_permissions(sandbox: &Sandbox) -> Result<()> {
    let keys = keys_as(sandbox, "app", FIRST).await?;
    keys.fill("app/", KEYS, |_| ()).await?;
    let denied = keys.write("other", b"value".to_vec()).await;
    ensure!(denied.is_err(), "app may write outside of its prefix");
    let identity = client(sandbox, "c").await?;
    let (env, namespace) = (&sandbox.env, &sandbox.namespace);
    let keys = Keyspace::of_tls_cluster(env, namespace, "c", &identity).await?;
    keys.verify("app/", KEYS).await?;
    let denied = keys.write("app/0", b"value".to_vec()).await;
    ensure!(denied.is_err(), "the user with a certificate may write");
    Ok(())
}

async fn changes_are_followed(sandbox: &Sandbox) -> Result<()> {
    let root = keys_as(sandbox, "root", ROOT).await?;
    root.revoke_role("app", "writer").await?;
    await_write(sandbox, FIRST).await?;
    sandbox
        .await_event(Kind::EtcdUser, "app", &["Warning UserChanged", "writer"])
        .await?;
    // No trigger is needed, because the operator reads the changed Secret within a minute.
    sandbox.apply(&password(SECOND)).await?;
    await_write(sandbox, SECOND).await?;
    // The test awaits no Event `PasswordChanged`, because the operator records it only if etcd acknowledges the change.
    let secret = sandbox.api::<Secret>().get("app").await?;
    let version = json!(secret.resource_version());
    let users = sandbox.objects(Kind::EtcdUser);
    await_object(
        &users,
        "app",
        "the changed Secret is recorded",
        DEADLINE,
        |user| user.data["status"]["password"]["resourceVersion"] == version,
    )
    .await?;
    ensure_no_leaks(sandbox).await
}

async fn is_deleted(sandbox: &Sandbox) -> Result<()> {
    let root = keys_as(sandbox, "root", ROOT).await?;
    sandbox.kubectl(&["delete", "etcduser", "app"]).await?;
    let users = root.users().await?;
    let expected = users.iter().all(|user| user != "app");
    ensure!(expected, "the user app still exists: {users:?}");
    ensure!(
        users.iter().any(|user| user == CERTIFICATE),
        "another user was deleted: {users:?}"
    );
    drop(root);
    // The finalizers must not block the deletion of objects whose cluster no longer exists.
    sandbox.delete_cluster("c").await?;
    let all = ["delete", "etcdusers,etcdroles", "--all", "--timeout=60s"];
    let printed = sandbox.kubectl(&all).await?;
    let deleted = printed.lines().filter(|line| line.contains("deleted"));
    ensure!(deleted.count() == 3, "{printed}");
    Ok(())
}

/// The newest version, or the newest version of a minor release.
fn version(sandbox: &Sandbox, minor: Option<&str>) -> Result<String> {
    let env = &sandbox.env;
    minor.map_or_else(|| newest_version(env), |minor| env.newest_of(minor))
}

async fn users_and_roles(name: &str, minor: Option<&str>) {
    cluster_scenario_without_leaks(name, async |sandbox| {
        let version = version(sandbox, minor)?;
        step("create", is_created(sandbox, &version)).await?;
        step("use", has_only_granted_permissions(sandbox)).await?;
        step("change", changes_are_followed(sandbox)).await?;
        step("delete", is_deleted(sandbox)).await
    })
    .await;
}

#[tokio::test]
async fn users_and_roles_follow_their_objects() {
    users_and_roles("users_roles", None).await;
}

/// The tests with earlier minor releases of etcd run only with `--full`. The tests of the crate `etcd` make the same
/// calls to each minor release.
mod full {
    use super::users_and_roles;

    #[tokio::test]
    async fn users_and_roles_follow_their_objects_on_3_4() {
        users_and_roles("users_roles_3_4", Some("3.4")).await;
    }

    #[tokio::test]
    async fn users_and_roles_follow_their_objects_on_3_5() {
        users_and_roles("users_roles_3_5", Some("3.5")).await;
    }

    #[tokio::test]
    async fn users_and_roles_follow_their_objects_on_3_6() {
        users_and_roles("users_roles_3_6", Some("3.6")).await;
    }
}
