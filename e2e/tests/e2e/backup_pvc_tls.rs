//! A cluster with TLS and authentication is backed up to a PVC. The backup pod reads certificates and a password from
//! Secrets, and must not leak them.

use anyhow::ensure;
use e2e::leaks::ensure_no_leaks;
use e2e::objects::{Kind, await_complete, await_object, conditions_line, field};
use e2e::tls;
use e2e::{DEADLINE, Keyspace, scenario};

use crate::backup_pvc::{BACKUP_PVC, pvc_backup};
use crate::certificates::{STATIC, client, make_secrets, pod_dns_names};
use crate::fixtures::cluster_with;

const KEYS: usize = 200;
const PASSWORD: &str = "correct-horse-battery";

#[tokio::test]
async fn pvc_backup_works_with_tls_and_auth() {
    scenario("backup_pvc_tls", async |sandbox| {
        let authority = make_secrets(sandbox, &pod_dns_names(sandbox, "c"), false).await?;
        let root = format!(
            "apiVersion: v1\nkind: Secret\nmetadata: {{name: root}}\ntype: kubernetes.io/basic-auth\nstringData: \
             {{username: root, password: {PASSWORD}}}\n"
        );
        sandbox.apply(&root).await?;
        sandbox.apply(BACKUP_PVC).await?;
        let more = format!("{STATIC}  auth: {{secret: root, enabled: true}}\n");
        let manifest = cluster_with(&sandbox.env, "c", 1, &more)?;
        sandbox.apply(&manifest).await?;
        sandbox.await_members("c", 1).await?;
        let identity = client(&authority, sandbox, "c")?;
        let reached = async || {
            let (env, namespace) = (&sandbox.env, &sandbox.namespace);
            Keyspace::of_tls_cluster_as(env, namespace, "c", &identity, ("root", PASSWORD)).await
        };
        let keys = reached().await?;
        let written = keys.fill("kept/", KEYS, |_| ()).await?;

        // The EtcdBackup `by-name` names the cluster, so the operator uses the Secrets of the cluster. The EtcdBackup
        // `by-endpoint` names no cluster: it contains the URL of the client Service and the names of two Secrets.
        let backups = sandbox.objects(Kind::EtcdBackup);
        sandbox.apply(&pvc_backup("by-name", "")).await?;
        let signed = authority.client()?;
        let secret = tls::secret("backup-client", tls::CERT_MANAGER_KEYS, &signed, &authority.pem);
        sandbox.apply(&secret).await?;
        let endpoint = format!(
            "etcdEndpoints: [\"https://c-client.{}.svc:2379\"]\n  clientTLSSecret: backup-client",
            sandbox.namespace
        );
        let by_endpoint = |name: &str, more: &str| {
            pvc_backup(name, more).replace("etcdCluster: {name: c}", &endpoint)
        };
        let with_password = by_endpoint("by-endpoint", "  authSecret: root\n");
        sandbox.apply(&with_password).await?;
        for name in ["by-name", "by-endpoint"] {
            let done = await_complete(&backups, name, DEADLINE).await?;
            ensure!(field(&done, "/status/etcdRevision").as_i64() >= Some(written));
        }
        // The EtcdBackup `refused` names no Secret with a password, so etcd denies access to its backup pod. The
        // EtcdBackup must report this error.
        sandbox.apply(&by_endpoint("refused", "")).await?;
        await_object(&backups, "refused", "the rejection is reported", DEADLINE, |object| {
            let said = conditions_line(object);
            said.contains("AccessDenied") || said.contains("EtcdUnreachable")
        })
        .await?;
        sandbox
            .kubectl(&["delete", "etcdbackup", "refused"])
            .await?;
        ensure_no_leaks(sandbox).await?;

        keys.fill("later/", 10, |_| ()).await?;
        drop(keys);
        let over = "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {name: over}\nspec:\n  \
                    etcdCluster: {name: c}\n  overwrite: true\n  backupStorageType: PVC\n  \
                    pvc: {claimName: backups, path: etcd/by-endpoint}\n";
        sandbox.apply(over).await?;
        await_complete(&sandbox.objects(Kind::EtcdRestore), "over", DEADLINE).await?;
        sandbox.await_members("c", 1).await?;
        let keys = reached().await?;
        ensure!(keys.verify("kept/", KEYS).await? >= written);
        keys.verify("later/", 0).await?;
        Ok(())
    })
    .await;
}
