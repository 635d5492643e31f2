//! Clusters with TLS are backed up by name and by endpoints, and restored. The Secrets have the data keys of
//! cert-manager: `tls.crt`, `tls.key` and `ca.crt`.

use anyhow::{Result, ensure};
use e2e::bucket::Bucket;
use e2e::leaks::scenario_without_leaks;
use e2e::manifests::{self, aws_secret};
use e2e::objects::{Kind, await_complete, await_object, conditions_line, field};
use e2e::store_state::StoreState;
use e2e::tls::{self, Authority};
use e2e::{DEADLINE, Keyspace, Sandbox};
use k8s_openapi::api::core::v1::Secret;
use kube::api::DynamicObject;

use crate::certificates::{
    STATIC, arguments, await_tls_ready, client, make_secrets, pod_dns_names,
};
use crate::fixtures::cluster_with;
use crate::restore_in_place::await_replaced;

const KEYS: usize = 500;

/// Backs up the cluster by its name, and by an https endpoint with a client certificate.
async fn back_up(sandbox: &Sandbox, bucket: &Bucket, authority: &Authority) -> Result<()> {
    let (s3, namespace) = (sandbox.env.s3()?, &sandbox.namespace);
    let backups = sandbox.objects(Kind::EtcdBackup);
    let by_name = manifests::backup(s3, "by-name", "c", &format!("{}/by-name", bucket.name));
    sandbox.apply(&by_name).await?;
    await_complete(&backups, "by-name", DEADLINE).await?;

    let client = tls::secret(
        "backup-client",
        tls::CERT_MANAGER_KEYS,
        &authority.client()?,
        &authority.pem,
    );
    sandbox.apply(&client).await?;
    let path = format!("{}/by-endpoint", bucket.name);
    let reference = "etcdCluster: {name: c}";
    let endpoints = format!(
        "etcdEndpoints: [\"https://c-client.{namespace}.svc:2379\"]\n  clientTLSSecret: backup-client"
    );
    let by_endpoint =
        manifests::backup(s3, "by-endpoint", "c", &path).replace(reference, &endpoints);
    sandbox.apply(&by_endpoint).await?;
    await_complete(&backups, "by-endpoint", DEADLINE).await?;

    // The certificate `foreign` is signed by another CA, so etcd rejects it. The EtcdBackup must report the
    // rejection.
    let stranger = Authority::new("a stranger")?;
    let foreign = tls::secret("foreign", tls::CLIENT, &stranger.client()?, &authority.pem);
    sandbox.apply(&foreign).await?;
    let refused = by_endpoint
        .replace("backup-client", "foreign")
        .replace("name: by-endpoint", "name: refused")
        .replace("/by-endpoint", "/refused");
    sandbox.apply(&refused).await?;
    await_object(
        &backups,
        "refused",
        "the rejection is reported",
        DEADLINE,
        |object| conditions_line(object).contains("EtcdUnreachable"),
    )
    .await?;
    sandbox
        .kubectl(&["delete", "etcdbackup", "refused"])
        .await?;
    Ok(())
}

/// Ensures that no member mounts the operator's private key, because this key grants all permissions in etcd.
async fn no_member_has_operator_secret(sandbox: &Sandbox) -> Result<()> {
    for pod in sandbox.member_pods("c").await? {
        let volumes = pod.spec.and_then(|spec| spec.volumes).unwrap_or_default();
        let secrets: Vec<String> = volumes
            .into_iter()
            .filter_map(|volume| volume.secret?.secret_name)
            .collect();
        ensure!(secrets == ["peer", "server"], "{secrets:?}");
    }
    Ok(())
}

/// The UIDs and resource versions of the cluster's Secrets, which show whether a Secret was changed.
async fn secrets(sandbox: &Sandbox) -> Result<Vec<(Option<String>, Option<String>)>> {
    let mut found = Vec::new();
    for name in ["peer", "server", "operator"] {
        let secret = sandbox.api::<Secret>().get(name).await?.metadata;
        found.push((secret.uid, secret.resource_version));
    }
    Ok(found)
}

/// Ensures that the cluster has all data of the backup, and that the EtcdRestore reports the revision of the backup.
async fn is_back(keys: &Keyspace, before: &StoreState, restored: &DynamicObject) -> Result<()> {
    let revision = field(restored, "/status/restoredRevision").as_i64();
    ensure!(revision == Some(before.revision), "{revision:?}");
    ensure!(keys.verify("kept/", KEYS).await? >= before.revision);
    before.ensure_same(&StoreState::at(keys, before.revision).await?)
}

#[tokio::test]
async fn cluster_with_tls_is_backed_up_and_restored() {
    scenario_without_leaks("tls_backup_restore", async |sandbox| {
        let s3 = sandbox.env.s3()?;
        let bucket = Bucket::create(s3, &sandbox.namespace).await?;
        sandbox.apply(&aws_secret(s3, "aws")).await?;
        let authority = make_secrets(sandbox, &pod_dns_names(sandbox, "c"), true).await?;
        let manifest = cluster_with(&sandbox.env, "c", 3, STATIC)?;
        sandbox.apply(&manifest).await?;
        await_tls_ready(sandbox, "c", "").await?;
        no_member_has_operator_secret(sandbox).await?;
        let identity = client(&authority, sandbox, "c")?;
        let (env, namespace) = (&sandbox.env, &sandbox.namespace);
        let keys = Keyspace::of_tls_cluster(env, namespace, "c", &identity).await?;
        keys.fill("kept/", KEYS, |_| ()).await?;
        keys.fill_mixed("mixed/", 40).await?;
        let before = StoreState::now(&keys).await?;
        back_up(sandbox, &bucket, &authority).await?;
        drop(keys);
        sandbox.delete_cluster("c").await?;

        let path = format!("{}/by-endpoint", bucket.name);
        let template = "{name: c, template: {spec: {size: 3, version: \"VERSION\", TLS: {static: {member: \
                        {peerSecret: peer, serverSecret: server}, operatorSecret: operator}}}}}";
        let version = crate::fixtures::newest_version(env)?;
        let template = template.replace("VERSION", &version);
        let restore = manifests::restore_with(s3, "back", &template, &path, "");
        sandbox.apply(&restore).await?;
        let them = sandbox.objects(Kind::EtcdRestore);
        let restored = await_complete(&them, "back", DEADLINE).await?;
        let there = sandbox.await_members("c", 3).await?;
        let plain = arguments(sandbox, "c").await?;
        ensure!(!plain.iter().any(|one| one.starts_with("--listen-client-urls=http://")));
        let keys = Keyspace::of_tls_cluster(env, namespace, "c", &identity).await?;
        is_back(&keys, &before, &restored).await?;
        keys.fill("later/", 10, |_| ()).await?;
        drop(keys);
        let secrets_before = secrets(sandbox).await?;

        // The restore in place reads the backup `by-name`, whose manifest contains the spec of the cluster.
        let path = format!("{}/by-name", bucket.name);
        let more = "  overwrite: true\n";
        let over = manifests::restore_with(s3, "over", "{name: c}", &path, more);
        sandbox.apply(&over).await?;
        let restored = await_complete(&them, "over", DEADLINE).await?;
        await_replaced(sandbox, &restored).await?;
        let after = sandbox.await_members("c", 3).await?;
        ensure!(after.metadata.uid == there.metadata.uid, "the EtcdCluster was recreated");
        ensure!(secrets(sandbox).await? == secrets_before, "a Secret was replaced or changed");
        let keys = Keyspace::of_tls_cluster(env, namespace, "c", &identity).await?;
        is_back(&keys, &before, &restored).await?;
        keys.verify("later/", 0).await?;
        Ok(())
    })
    .await;
}
