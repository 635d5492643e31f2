//! A second release of the chart is installed in another namespace, without `--take-ownership` or `--force-conflicts`.
//! The second release uses the CRDs of the first release. If these CRDs are older than the CRDs of the chart, Helm
//! rejects the second release. The second release continues to work after the first release is uninstalled.

use anyhow::{Context, Result, bail, ensure};
use e2e::sandbox::RELEASE;
use e2e::{Sandbox, chart, step};

use crate::fixtures::cluster;
use crate::scopes;

const CRDS: [&str; 6] = [
    "etcdclusters.etcd.database.coreos.com",
    "etcdbackups.etcd.database.coreos.com",
    "etcdrestores.etcd.database.coreos.com",
    "etcdmirrors.etcd.database.coreos.com",
    "etcdroles.etcd.database.coreos.com",
    "etcdusers.etcd.database.coreos.com",
];

/// Removes the annotations with which Helm records the release that owns the CRDs. Earlier tests may have set them.
async fn forget_owner(sandbox: &Sandbox) -> Result<()> {
    for crd in CRDS {
        let words = [
            "annotate",
            "crd",
            crd,
            "meta.helm.sh/release-name-",
            "meta.helm.sh/release-namespace-",
        ];
        sandbox.kubectl(&words).await?;
    }
    Ok(())
}

/// Ensures that the release in this namespace owns all CRDs.
async fn ensure_owner(sandbox: &Sandbox, namespace: &str) -> Result<()> {
    for crd in CRDS {
        let text = sandbox.kubectl(&["get", "crd", crd, "-o", "json"]).await?;
        let object: serde_json::Value = serde_json::from_str(&text)?;
        let owner = &object["metadata"]["annotations"]["meta.helm.sh/release-namespace"];
        ensure!(owner == namespace, "{crd} belongs to {owner}");
    }
    Ok(())
}

async fn install(sandbox: &Sandbox, settings: &[&str]) -> Result<String> {
    let namespace = &sandbox.namespace;
    let printed = chart::install(&sandbox.env, RELEASE, namespace, settings).await?;
    sandbox.await_operators().await?;
    Ok(printed)
}

async fn manages_a_cluster(sandbox: &Sandbox) -> Result<()> {
    sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
    sandbox.await_members("c", 1).await.map(drop)
}

async fn installs_without_flags(first: &Sandbox, second: &Sandbox) -> Result<()> {
    first.install_crds().await?;
    forget_owner(first).await?;
    install(first, &["--take-ownership", "--force-conflicts"]).await?;
    ensure_owner(first, &first.namespace).await?;

    let printed = install(second, &[]).await?;
    let owner = format!("the release {RELEASE} in the namespace {}", first.namespace);
    ensure!(printed.contains(&owner), "{printed}");
    ensure_owner(first, &first.namespace).await?;
    manages_a_cluster(first).await?;
    manages_a_cluster(second).await?;
    // While the two releases share the CRDs, each release can be upgraded.
    install(second, &[]).await?;
    install(first, &[]).await?;
    ensure_owner(first, &first.namespace).await
}

/// If the installed CRDs are older than the CRDs of the chart, Helm rejects the second release. The message names the
/// first release, which owns the CRDs and must be upgraded before the second release.
async fn older_crds_are_upgraded_by_their_owner(first: &Sandbox, second: &Sandbox) -> Result<()> {
    let older = "app.kubernetes.io/version=0.0.1";
    let words = ["label", "crd", CRDS[0], older, "--overwrite"];
    first.kubectl(&words).await?;
    let Err(error) = install(second, &[]).await else {
        bail!("the second release changed CRDs of the first release");
    };
    ensure!(error.to_string().contains(&first.namespace), "{error}");
    // `--force-conflicts` is needed, because kubectl is the field manager of the label above. Without this flag, Helm
    // does not overwrite the value of another field manager.
    install(first, &["--force-conflicts"]).await?;
    install(second, &[]).await.map(drop)
}

/// After the first release is uninstalled, the CRDs stay, and the second release continues to work.
async fn outlives_the_owner(first: &Sandbox, second: &Sandbox) -> Result<()> {
    first.delete_cluster("c").await?;
    let uninstall = ["uninstall", RELEASE, "-n", &first.namespace, "--wait"];
    chart::helm(&first.env, &uninstall).await?;
    second.scale("c", 3).await?;
    second.await_members("c", 3).await?;
    let printed = install(second, &[]).await;
    printed.map(drop).context("upgrade without the owner")
}

async fn share_crds(first: &Sandbox, second: &Sandbox) -> Result<()> {
    let installed = installs_without_flags(first, second);
    step("install a second release", installed).await?;
    let older = older_crds_are_upgraded_by_their_owner(first, second);
    step("keep older CRDs of another release", older).await?;
    let outlives = outlives_the_owner(first, second);
    step("uninstall the owner", outlives).await?;
    let listed = scopes::watch_namespaces(second, first);
    step("watch_namespaces", listed).await?;
    step("scope_all", scopes::scope_all(second, first)).await?;
    forget_owner(second).await
}

/// The test runner runs a test in a module `alone` while no other test runs. This test changes the release that owns
/// the CRDs, and other tests depend on the CRDs.
mod alone {
    use e2e::sandbox::{RELEASE, bare_scenario};
    use e2e::{Sandbox, chart};

    use super::share_crds;

    #[tokio::test]
    async fn second_release_does_not_change_crds_of_first_release() {
        bare_scenario("chart_first_release", async |first| {
            let second = Sandbox::create("chart_second_release").await?;
            let outcome = share_crds(first, &second).await;
            if outcome.is_err() {
                second.print_state().await;
            }
            // The second release is uninstalled before its namespace is deleted, because the ClusterRoles of the
            // release are cluster-scoped and would outlive the namespace.
            let uninstall = ["uninstall", RELEASE, "-n", &second.namespace, "--wait"];
            let uninstalled = chart::helm(&second.env, &uninstall).await;
            second.delete().await;
            outcome?;
            uninstalled.map(drop)
        })
        .await;
    }
}
