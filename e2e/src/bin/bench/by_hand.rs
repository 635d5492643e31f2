//! The manual restore with which `bench restore` compares the restore operator. This module also creates the backup for
//! the manual restore and for the restore operator.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::Sandbox;
use e2e::bucket::Bucket;
use e2e::env::S3;
use etcd_client::Client;
use serde::Serialize;

/// The minor version of etcd that the benchmark measures.
pub(crate) const MINOR: &str = "3.6";
pub(crate) const KEY: &str = "bench/etcd.backup";
const MIB: usize = 1 << 20;
/// How long etcd may take to start on a large restored database.
const START_TIMEOUT: Duration = Duration::from_mins(15);

/// The steps of one manual restore, each with its duration in seconds.
#[derive(Debug, Serialize)]
pub(crate) struct ByHand {
    pub(crate) download: f64,
    pub(crate) restore: f64,
    /// Seconds from the start of the etcd process until it serves clients.
    pub(crate) start: f64,
}

impl ByHand {
    pub(crate) fn total(&self) -> f64 {
        self.download + self.restore + self.start
    }
}

/// Waits until the kernel has written all pending data to disk.
pub(crate) async fn flush_disk() -> Result<()> {
    let synced = tokio::process::Command::new("sync").status().await?;
    ensure!(synced.success(), "sync");
    Ok(())
}

/// The path of an etcd program, such as `etcdutl`, of version [`MINOR`] in the cache of the testbed.
fn program(name: &str) -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache"),
        PathBuf::from,
    );
    let prefix = format!("etcd-{MINOR}-");
    let mut folders = std::fs::read_dir(base.join("etcd-operator-testbed"))?.flatten();
    let found = folders.find(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
    let found = found.with_context(|| format!("the cache of the testbed contains no {prefix}*"))?;
    Ok(found.path().join(name))
}

/// A local etcd process. The process is killed when this value is dropped.
struct Running {
    child: Child,
    url: String,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    fn start(data: &Path, name: &str, more: &[&str]) -> Result<Self> {
        let free = || -> Result<u16> {
            Ok(std::net::TcpListener::bind("127.0.0.1:0")?
                .local_addr()?
                .port())
        };
        let (url, peer) = (
            format!("http://127.0.0.1:{}", free()?),
            format!("http://127.0.0.1:{}", free()?),
        );
        let child = Command::new(program("etcd")?)
            .arg(format!("--name={name}"))
            .arg(format!("--data-dir={}", data.display()))
            .args([
                format!("--listen-client-urls={url}"),
                format!("--advertise-client-urls={url}"),
            ])
            .args([
                format!("--listen-peer-urls={peer}"),
                format!("--initial-advertise-peer-urls={peer}"),
            ])
            .arg(format!("--initial-cluster={name}={peer}"))
            .args(["--quota-backend-bytes=8589934592", "--log-level=error"])
            .args(more)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("etcd")?;
        Ok(Self { child, url })
    }

    async fn serves(&self) -> Result<Client> {
        let end = Instant::now() + START_TIMEOUT;
        while Instant::now() < end {
            if let Ok(mut client) = Client::connect([&self.url], None).await
                && client
                    .status()
                    .await
                    .is_ok_and(|status| status.leader() != 0)
            {
                return Ok(client);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        anyhow::bail!("etcd at {} does not serve", self.url)
    }
}

/// Writes random values, which do not compress, to a local etcd, and uploads a snapshot of this etcd to the bucket.
pub(crate) async fn store(bucket: &Bucket, mebibytes: usize) -> Result<()> {
    let folder = tempfile::tempdir()?;
    // The Raft log is kept short, because etcd keeps recent log entries in memory, and each entry of this test data
    // contains a value of 1 MiB.
    let short = ["--snapshot-count=100", "--snapshot-catchup-entries=100"];
    let more = ["--unsafe-no-fsync", short[0], short[1]];
    let etcd = Running::start(&folder.path().join("data"), "source", &more)?;
    let mut client = etcd.serves().await?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for index in 0..mebibytes {
        let mut value = Vec::with_capacity(MIB);
        while value.len() < MIB {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            value.extend_from_slice(&state.to_le_bytes());
        }
        client
            .put(format!("/{index:05}"), value, None)
            .await
            .context("put")?;
    }
    let file = folder.path().join("snapshot.db");
    let saved = Command::new(program("etcdctl")?)
        .args(["--endpoints", &etcd.url, "snapshot", "save"])
        .arg(&file)
        .output()?;
    ensure!(
        saved.status.success(),
        "etcdctl: {}",
        String::from_utf8_lossy(&saved.stderr)
    );
    bucket.upload(KEY, &file).await
}

/// Restores the backup without an operator: downloads the backup, runs `etcdutl snapshot restore`, and starts etcd.
pub(crate) async fn by_hand(
    sandbox: &Sandbox,
    bucket: &Bucket,
    aws: Option<&Path>,
) -> Result<ByHand> {
    let folder = tempfile::tempdir()?;
    let (file, data) = (
        folder.path().join("snapshot.db"),
        folder.path().join("data"),
    );
    let begun = Instant::now();
    match aws {
        Some(aws) => fetch_with(aws, sandbox.env.s3()?, bucket, &file)?,
        None => bucket.download(KEY, &file).await?,
    }
    let downloaded = begun.elapsed().as_secs_f64();
    let restored = Command::new(program("etcdutl")?)
        .args(["snapshot", "restore"])
        .arg(&file)
        .arg(format!("--data-dir={}", data.display()))
        .output()?;
    ensure!(
        restored.status.success(),
        "etcdutl: {}",
        String::from_utf8_lossy(&restored.stderr)
    );
    let is_restored = begun.elapsed().as_secs_f64();
    let etcd = Running::start(&data, "default", &[])?;
    etcd.serves().await?;
    Ok(ByHand {
        download: downloaded,
        restore: is_restored - downloaded,
        start: begun.elapsed().as_secs_f64() - is_restored,
    })
}

/// Downloads the backup with `aws s3 cp` and its default settings.
fn fetch_with(aws: &Path, s3: &S3, bucket: &Bucket, file: &Path) -> Result<()> {
    let fetched = Command::new(aws)
        .args([
            "--endpoint-url",
            &s3.endpoint,
            "s3",
            "cp",
            "--only-show-errors",
        ])
        .arg(format!("s3://{}/{KEY}", bucket.name))
        .arg(file)
        .env("AWS_ACCESS_KEY_ID", &s3.access_key)
        .env("AWS_SECRET_ACCESS_KEY", &s3.secret_key)
        .env("AWS_DEFAULT_REGION", &s3.region)
        .output()
        .with_context(|| aws.display().to_string())?;
    ensure!(
        fetched.status.success(),
        "{}: {}",
        aws.display(),
        String::from_utf8_lossy(&fetched.stderr)
    );
    Ok(())
}
