//! The operator crashes before it writes certificates, passwords and network policies, and the next process continues.
//! The tests in `full` crash before each of these writes. `tls_rotation_generated.rs` has crashes during a rotation.

use std::cell::Cell;

use anyhow::{Result, ensure};
use e2e::leaks::cluster_scenario_without_leaks;
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, until};
use k8s_openapi::api::core::v1::Secret;

use crate::auth::secret;
use crate::fixtures::{DURABLE, cluster_with};
use crate::operator_crash::{CrashingOperator, await_desired_members};
use crate::tls_generated::client;

/// Failpoints before the writes for a new cluster with generated certificates.
const ISSUING: &[&str] = &[
    "before-make-authority",
    "before-issue-certificate",
    "before-tell-certificates",
];
/// Failpoints before the writes of a rotation of the CAs.
const ROTATION: &[&str] = &[
    "before-prepare-authority",
    "before-write-trust-bundle",
    "before-switch-authority",
    "before-retire-authority",
];
/// The failpoint before the operator adds the CAs of running members to a trust bundle that was lost.
const LOST_BUNDLE: &[&str] = &["before-rejoin-authority"];
/// The failpoint before the write that adds a missing label to a Secret.
const UNLABELED: &[&str] = &["before-mark-secret"];
/// The failpoint before the write that deletes the certificates of a removed member.
const MEMBER_REMOVAL: &[&str] = &["before-discard-certificate"];
/// Failpoints before the writes that enable authentication.
const ENABLING_AUTH: &[&str] = &["before-record-passwords", "before-enable-auth"];
/// The failpoint before the operator changes the password in etcd to the new password in the Secret.
const PASSWORD: &[&str] = &["before-change-password"];
/// Failpoints before the writes that disable authentication.
const DISABLING_AUTH: &[&str] = &["before-disable-auth", "before-forget-passwords"];
const POLICY: &[&str] = &["before-apply-network-policy"];
const NO_POLICY: &[&str] = &["before-delete-network-policy"];

/// All failpoints of the tests in this file.
pub(crate) const POINTS: [&[&str]; 10] = [
    ISSUING,
    ROTATION,
    LOST_BUNDLE,
    UNLABELED,
    MEMBER_REMOVAL,
    ENABLING_AUTH,
    PASSWORD,
    DISABLING_AUTH,
    POLICY,
    NO_POLICY,
];

const KEYS: usize = 100;

async fn patch(sandbox: &Sandbox, spec: &str) -> Result<()> {
    let patch = format!("{{\"spec\":{spec}}}");
    let args = ["patch", "etcdcluster", "c", "--type=merge", "-p", &patch];
    sandbox.kubectl(&args).await.map(drop)
}

fn password(round: usize) -> String {
    format!("correct-horse-round-{round}")
}

/// A client of the cluster `c` without a login.
async fn anonymous(sandbox: &Sandbox) -> Result<Keyspace> {
    let (env, namespace) = (&sandbox.env, &sandbox.namespace);
    let identity = client(sandbox, "c").await?;
    Keyspace::of_tls_cluster(env, namespace, "c", &identity).await
}

/// A client of the cluster `c` that has logged in as root.
async fn root(sandbox: &Sandbox, password: &str) -> Result<Keyspace> {
    let (env, namespace) = (&sandbox.env, &sandbox.namespace);
    let identity = client(sandbox, "c").await?;
    Keyspace::of_tls_cluster_as(env, namespace, "c", &identity, ("root", password)).await
}

/// Waits until etcd accepts this password for root, and reads all keys.
async fn await_root(sandbox: &Sandbox, password: &str) -> Result<()> {
    let keys = until("etcd accepts the password", DEADLINE, async || {
        Ok(Poll::Done(root(sandbox, password).await?))
    })
    .await?;
    keys.verify("kept/", KEYS).await.map(drop)
}

/// The operator crashes in these states:
///
/// - Secrets with CAs exist, but no Secret with a certificate.
/// - etcd has the user root, but authentication is disabled.
/// - The operator has recorded two passwords, and etcd accepts one of them.
/// - The operator has recorded passwords, but authentication is disabled.
#[tokio::test]
async fn clients_keep_access_after_operator_crashes() {
    cluster_scenario_without_leaks("crash_access", async |sandbox| {
        sandbox.apply(&secret(&password(0))).await?;
        let mut operator = CrashingOperator {
            sandbox,
            crashes: 0,
        };
        let closed = "  TLS: {generated: {}}\n  auth: {secret: root}\n";
        let manifest = cluster_with(&sandbox.env, "c", 1, &format!("{closed}{DURABLE}"))?;
        operator
            .crash_at_each(&["before-issue-certificate"], async |_| {
                sandbox.apply(&manifest).await.map(drop)
            })
            .await?;
        operator
            .crash_at_each(&["before-enable-auth"], async |times| {
                if times == 0 {
                    sandbox.await_members("c", 1).await?;
                    let keys = anonymous(sandbox).await?;
                    keys.fill("kept/", KEYS, |_| ()).await?;
                }
                patch(sandbox, r#"{"auth":{"enabled":true}}"#).await
            })
            .await?;
        let round = Cell::new(0);
        operator
            .crash_at_each(&["before-change-password"], async |times| {
                if times == 0 {
                    await_root(sandbox, &password(round.get())).await?;
                }
                round.set(round.get() + 1);
                sandbox.apply(&secret(&password(round.get()))).await?;
                sandbox.trigger_reconcile("c").await
            })
            .await?;
        operator
            .crash_at_each(&["before-forget-passwords"], async |times| {
                if times == 0 {
                    await_root(sandbox, &password(round.get())).await?;
                }
                patch(sandbox, r#"{"auth":{"enabled":false}}"#).await
            })
            .await?;
        ensure!(operator.run_without_failpoints().await? == 4);
        until("no password is recorded", DEADLINE, async || {
            let record = sandbox.api::<Secret>().get_opt("c-auth").await?;
            Ok(match record {
                None => Poll::Done(()),
                Some(_) => Poll::NotYet("the record still exists".to_owned()),
            })
        })
        .await?;
        await_desired_members(sandbox, "c", 1).await?;
        let open = anonymous(sandbox).await?;
        open.verify("kept/", KEYS).await.map(drop)
    })
    .await;
}

mod full {
    use std::cell::RefCell;

    use e2e::Writer;
    use k8s_openapi::api::networking::v1::NetworkPolicy;

    use super::*;
    use crate::auth::{accepts_password, keys_as};
    use crate::tls_generated::value;

    #[tokio::test]
    async fn certificate_changes_resume_after_crash_before_every_write() {
        cluster_scenario_without_leaks("crash_certificates", async |sandbox| {
            let mut operator = CrashingOperator {
                sandbox,
                crashes: 0,
            };
            // `made` contains the names of the clusters that the closure below has created. Each call creates a new
            // cluster, because an existing cluster may have passed the failpoint.
            let made = RefCell::new(Vec::new());
            let tls = "  TLS: {generated: {certificateDuration: 4m}}\n";
            operator
                .crash_at_each(ISSUING, async |number| {
                    let name = if number == 0 {
                        "c".to_owned()
                    } else {
                        format!("c{number}")
                    };
                    let manifest =
                        cluster_with(&sandbox.env, &name, 3, &format!("{tls}{DURABLE}"))?;
                    made.borrow_mut().push(name);
                    sandbox.apply(&manifest).await.map(drop)
                })
                .await?;
            let keys = async || {
                let identity = client(sandbox, "c").await?;
                Keyspace::of_tls_cluster(&sandbox.env, &sandbox.namespace, "c", &identity).await
            };
            let authority = Cell::new(false);
            operator
                .crash_at_each(ROTATION, async |number| {
                    if !authority.replace(true) {
                        sandbox.await_members("c", 3).await?;
                        keys().await?.fill("kept/", KEYS, |_| ()).await?;
                    }
                    let ask = format!("etcd.database.coreos.com/rotate-authority=round-{number}");
                    sandbox
                        .kubectl(&["annotate", "etcdcluster", "c", &ask, "--overwrite"])
                        .await
                        .map(drop)
                })
                .await?;
            operator
                .crash_at_each(LOST_BUNDLE, async |_| {
                    let patch = r#"{"data":{"ca.crt":null}}"#;
                    let args = ["patch", "secret", "c-peer-ca", "--type=merge", "-p", patch];
                    sandbox.kubectl(&args).await.map(drop)
                })
                .await?;
            operator
                .crash_at_each(UNLABELED, async |_| {
                    let args = ["label", "secret", "c-peer-ca", "etcd_cluster-"];
                    sandbox.kubectl(&args).await.map(drop)
                })
                .await?;
            let size = Cell::new(3);
            operator
                .crash_at_each(MEMBER_REMOVAL, async |_| {
                    size.set(size.get() - 1);
                    sandbox.scale("c", size.get()).await
                })
                .await?;
            let groups = [ISSUING, ROTATION, LOST_BUNDLE, UNLABELED, MEMBER_REMOVAL];
            let points = groups.concat().len();
            ensure!(operator.run_without_failpoints().await? == points);
            until("one authority is trusted", DEADLINE, async || {
                for secret in ["c-client-ca", "c-peer-ca"] {
                    let trusted = value(sandbox, secret, "ca.crt").await?;
                    let count = trusted.matches("BEGIN CERTIFICATE").count();
                    if count != 1 {
                        return Ok(Poll::NotYet(format!("{secret}: {count} authorities")));
                    }
                }
                Ok(Poll::Done(()))
            })
            .await?;
            for name in made.into_inner() {
                let size = if name == "c" { size.get() } else { 3 };
                await_desired_members(sandbox, &name, size).await?;
            }
            keys().await?.verify("kept/", KEYS).await?;
            let identity = client(sandbox, "c").await?;
            let writer = Writer::start_tls(sandbox, "c", &identity).await?;
            writer.await_more(10).await?;
            writer
                .finish("crashes while certificates are issued")
                .await
                .map(drop)
        })
        .await;
    }

    /// Waits until etcd accepts this password for root, and reads all keys.
    async fn await_password(sandbox: &Sandbox, password: &str) -> Result<()> {
        until("etcd accepts the password", DEADLINE, async || {
            Ok(if accepts_password(sandbox, "c", password).await? {
                Poll::Done(())
            } else {
                Poll::NotYet("etcd rejects the password".to_owned())
            })
        })
        .await?;
        let keys = keys_as(sandbox, "c", password).await?;
        keys.verify("kept/", KEYS).await.map(drop)
    }

    #[tokio::test]
    async fn auth_and_policy_changes_resume_after_crash_before_every_write() {
        cluster_scenario_without_leaks("crash_access", async |sandbox| {
            sandbox.apply(&secret(&password(0))).await?;
            let auth = "  auth: {secret: root}\n";
            sandbox
                .apply(&cluster_with(&sandbox.env, "c", 1, auth)?)
                .await?;
            sandbox.await_members("c", 1).await?;
            let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
            keys.fill("kept/", KEYS, |_| ()).await?;
            let mut operator = CrashingOperator {
                sandbox,
                crashes: 0,
            };
            operator
                .crash_at_each(ENABLING_AUTH, async |_| {
                    patch(sandbox, r#"{"auth":{"enabled":true}}"#).await
                })
                .await?;
            let round = Cell::new(0);
            operator
                .crash_at_each(PASSWORD, async |times| {
                    // Only the first call waits until etcd accepts the current password. In later calls, the current
                    // password has not reached etcd, because the operator crashed before it sent the password.
                    if times == 0 {
                        await_password(sandbox, &password(round.get())).await?;
                    }
                    round.set(round.get() + 1);
                    sandbox.apply(&secret(&password(round.get()))).await?;
                    sandbox.trigger_reconcile("c").await
                })
                .await?;
            operator
                .crash_at_each(POLICY, async |_| {
                    patch(sandbox, r#"{"networkPolicy":{"enabled":true}}"#).await
                })
                .await?;
            operator
                .crash_at_each(NO_POLICY, async |times| {
                    // The NetworkPolicy must exist, because the operator reaches the failpoint only when it deletes a
                    // NetworkPolicy.
                    if times == 0 {
                        until("the policy exists", DEADLINE, async || {
                            let policy =
                                sandbox.api::<NetworkPolicy>().get_opt("c-members").await?;
                            Ok(match policy {
                                Some(_) => Poll::Done(()),
                                None => Poll::NotYet("none".to_owned()),
                            })
                        })
                        .await?;
                    }
                    patch(sandbox, r#"{"networkPolicy":{"enabled":false}}"#).await
                })
                .await?;
            operator
                .crash_at_each(DISABLING_AUTH, async |times| {
                    if times == 0 {
                        await_password(sandbox, &password(round.get())).await?;
                    }
                    patch(sandbox, r#"{"auth":{"enabled":false}}"#).await
                })
                .await?;
            ensure!(operator.run_without_failpoints().await? == 7);
            until(
                "the record and the policy are deleted",
                DEADLINE,
                async || {
                    let record = sandbox.api::<Secret>().get_opt("c-auth").await?;
                    let policy = sandbox.api::<NetworkPolicy>().get_opt("c-members").await?;
                    Ok(if record.is_none() && policy.is_none() {
                        Poll::Done(())
                    } else {
                        Poll::NotYet(format!("{} {}", record.is_some(), policy.is_some()))
                    })
                },
            )
            .await?;
            await_desired_members(sandbox, "c", 1).await?;
            let open = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
            open.verify("kept/", KEYS).await.map(drop)
        })
        .await;
    }
}
