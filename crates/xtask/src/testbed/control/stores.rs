//! The object stores of the tests. They listen on the IP address of the bridge, which pods and the host can reach.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::Result;

use super::{Testbed, daemon_runs, start};
use crate::progress;

pub(crate) const S3_PORT: u16 = 7070;
pub(crate) const S3_REGION: &str = "us-east-1";

/// The port of the Google Cloud Storage server, which accepts any credentials.
pub(crate) const GCS_PORT: u16 = 7071;

/// The port of the Azure Blob Storage server.
pub(crate) const ABS_PORT: u16 = 7072;
/// The account of the Azure Blob Storage server, and its key, which is not secret.
pub(crate) const ABS_ACCOUNT: &str = "testbed";
pub(crate) const ABS_KEY: &str = "dGVzdGJlZA==";

/// The bucket (Google) or container (Azure) of all tests. In S3, each test creates its own bucket.
pub(crate) const BUCKET: &str = "backups";

pub(super) fn start_s3(testbed: &Testbed) -> Result<()> {
    let state = &testbed.state;
    fs::create_dir_all(testbed.run_folder.join("s3/buckets"))?;
    fs::create_dir_all(testbed.run_folder.join("s3/sidecar"))?;
    start(
        testbed,
        "versitygw",
        "versitygw",
        &format!(
            "--port=${{GATEWAY_HOST}}:{S3_PORT} --access={} --secret={} --region={S3_REGION}
             posix --sidecar=${{RUN}}/s3/sidecar ${{RUN}}/s3/buckets",
            state.s3_access_key, state.s3_secret_key
        ),
    )
}

pub(super) fn start_gcs(testbed: &Testbed) -> Result<()> {
    fs::create_dir_all(testbed.run_folder.join("gcs").join(BUCKET))?;
    start(
        testbed,
        "fake-gcs-server",
        "fake-gcs-server",
        &format!(
            "-backend=filesystem -filesystem-root=${{RUN}}/gcs -scheme=http
             -host=${{GATEWAY_HOST}} -port={GCS_PORT}"
        ),
    )
}

/// The script that starts Azurite. `None` if Node.js is not installed.
fn azurite(testbed: &Testbed) -> Option<std::path::PathBuf> {
    let script = testbed.programs.bin.join("azurite.js");
    script.is_file().then_some(script)
}

pub(crate) fn has_azurite(testbed: &Testbed) -> bool {
    azurite(testbed).is_some()
}

pub(super) fn start_azurite(testbed: &Testbed) -> Result<()> {
    let Some(script) = azurite(testbed) else {
        progress::say("continuing without Azurite, because Node.js is missing");
        return Ok(());
    };
    let folder = testbed.run_folder.join("azurite");
    fs::create_dir_all(&folder)?;
    let ready = folder.join("ready");
    let _ = fs::remove_file(&ready);
    start(
        testbed,
        "azurite",
        "node",
        &format!(
            "{} {ABS_ACCOUNT} {ABS_KEY} {BUCKET} {} --blobHost ${{GATEWAY}} --blobPort {ABS_PORT}
             --silent --skipApiVersionCheck --disableTelemetry --location {}",
            script.display(),
            ready.display(),
            folder.display()
        ),
    )
}

/// Waits until all started object stores accept connections.
pub(super) fn wait(testbed: &Testbed) -> Result<()> {
    let gateway = testbed.state.addresses().gateway();
    let listens = |port: u16| {
        TcpStream::connect_timeout(&SocketAddr::new(gateway, port), Duration::from_secs(1)).is_ok()
    };
    for (daemon, port) in [
        ("versitygw", S3_PORT),
        ("fake-gcs-server", GCS_PORT),
        ("azurite", ABS_PORT),
    ] {
        if !daemon_runs(testbed, daemon) {
            continue;
        }
        let shown = format!("{daemon} (logs/{daemon}.log)");
        testbed.wait_for(&shown, Duration::from_secs(30), || {
            let prepared = daemon != "azurite" || testbed.run_folder.join("azurite/ready").exists();
            listens(port) && prepared
        })?;
    }
    Ok(())
}
