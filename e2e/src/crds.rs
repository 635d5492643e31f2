//! Installs the CRDs of the chart once for all tests of one `cargo xtask test`.

use std::fs::File;
use std::io::Write as _;

use anyhow::{Context, Result};
use tokio::sync::OnceCell;

use crate::{Env, chart, kubectl};

/// The environment variable with the path of a lock file. `cargo xtask test` creates this empty file, and all its test
/// processes share the file.
const RUN_LOCK: &str = "E2E_RUN_LOCK";
/// CRDs are cluster-scoped, so all tests of a process share one installation.
static CRDS: OnceCell<()> = OnceCell::const_new();

/// The names of the CRDs.
pub(crate) const NAMES: [&str; 6] = [
    "etcdclusters.etcd.database.coreos.com",
    "etcdbackups.etcd.database.coreos.com",
    "etcdrestores.etcd.database.coreos.com",
    "etcdmirrors.etcd.database.coreos.com",
    "etcdroles.etcd.database.coreos.com",
    "etcdusers.etcd.database.coreos.com",
];

/// Installs the CRDs, unless this process has already installed them.
///
/// # Errors
/// Fails if Helm or kubectl fails.
pub(crate) async fn install_once(env: &Env) -> Result<()> {
    CRDS.get_or_try_init(|| install_once_per_run(env)).await?;
    Ok(())
}

/// Installs the CRDs, unless another process of the same `cargo xtask test` has already installed them.
async fn install_once_per_run(env: &Env) -> Result<()> {
    let Ok(path) = std::env::var(RUN_LOCK) else {
        return install(env).await;
    };
    let mut file = tokio::task::spawn_blocking(move || {
        let file = File::options().append(true).open(&path)?;
        file.lock()?;
        anyhow::Ok(file)
    })
    .await?
    .context(RUN_LOCK)?;
    if file.metadata().context(RUN_LOCK)?.len() == 0 {
        install(env).await?;
        file.write_all(b"the CRDs are installed\n")
            .context(RUN_LOCK)?;
    }
    Ok(())
}

/// Deletes the CRDs with all objects of their kinds, and waits until they are deleted.
///
/// # Errors
/// Fails if kubectl fails, for example because an object has a finalizer that no operator removes.
pub(crate) async fn delete(env: &Env) -> Result<()> {
    let words = ["delete", "crd", "--ignore-not-found", "--timeout=120s"];
    kubectl::run(env, &[&words[..], &NAMES].concat())
        .await
        .map(drop)
}

/// Renders the CRDs from the chart and applies them, like an administrator who installs the CRDs separately.
///
/// # Errors
/// Fails if Helm or kubectl fails.
pub(crate) async fn install(env: &Env) -> Result<()> {
    let chart = env.chart.to_string_lossy().into_owned();
    let rendered = chart::helm(
        env,
        &[
            "template",
            "crds",
            &chart,
            "--set",
            "crds.install=true",
            "--show-only",
            "templates/crds.yaml",
        ],
    )
    .await?;
    kubectl::run_with_input(
        env,
        &["apply", "--server-side", "--force-conflicts", "-f", "-"],
        Some(&rendered),
    )
    .await?;
    kubectl::run(
        env,
        &[
            "wait",
            "--for=condition=Established",
            "--timeout=60s",
            "crd/etcdclusters.etcd.database.coreos.com",
            "crd/etcdbackups.etcd.database.coreos.com",
            "crd/etcdrestores.etcd.database.coreos.com",
            "crd/etcdmirrors.etcd.database.coreos.com",
            "crd/etcdroles.etcd.database.coreos.com",
            "crd/etcdusers.etcd.database.coreos.com",
        ],
    )
    .await?;
    Ok(())
}
