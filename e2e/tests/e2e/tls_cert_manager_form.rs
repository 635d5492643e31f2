//! Secrets as cert-manager writes them: `tls.crt`, `tls.key` and `ca.crt`.

use anyhow::{Result, ensure};
use e2e::Sandbox;
use e2e::leaks::discreet_cluster;
use k8s_openapi::api::core::v1::Pod;

use crate::certificates::{STATIC, await_tls_ready, client, lives, make_secrets, of_services};
use crate::fixtures::cluster_with;

#[tokio::test]
async fn a_cluster_lives_on_secrets_of_cert_manager() {
    discreet_cluster("tls_cert_manager_form", async |sandbox| {
        let authority = make_secrets(sandbox, &of_services(sandbox), true).await?;
        let manifest = cluster_with(&sandbox.env, "c", 3, STATIC)?;
        sandbox.apply(&manifest).await?;
        await_tls_ready(sandbox, "").await?;
        no_member_sees_the_operators_secret(sandbox).await?;
        let identity = client(&authority, sandbox, "c")?;
        lives(sandbox, &identity, "cert-manager's keys").await
    })
    .await;
}

/// The key of a client that may do everything is in no member's pod.
async fn no_member_sees_the_operators_secret(sandbox: &Sandbox) -> Result<()> {
    let pods: Vec<Pod> = sandbox.member_pods("c").await?;
    for pod in pods {
        let volumes = pod.spec.and_then(|spec| spec.volumes).unwrap_or_default();
        let secrets: Vec<String> = volumes
            .into_iter()
            .filter_map(|volume| volume.secret?.secret_name)
            .collect();
        ensure!(secrets == ["peer", "server"], "{secrets:?}");
    }
    Ok(())
}
