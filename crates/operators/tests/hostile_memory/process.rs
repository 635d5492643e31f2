//! An operator process, and its memory use.

use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use etcd::testing::free_port;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::MAX_WAIT;
use crate::server::{self, ApiServer};

/// Maximum memory of an operator in bytes.
const LIMIT: u64 = 256 << 20;

/// Counts the calls to a hostile server: those in progress, the most that were in progress at the same time, and those
/// that have ended.
#[derive(Default)]
pub(crate) struct Calls {
    running: AtomicUsize,
    most: AtomicUsize,
    ended: AtomicUsize,
}

impl Calls {
    /// Blocks for this time, and counts the call as in progress during this time.
    pub(crate) fn last(&self, time: Duration) {
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(running, Ordering::SeqCst);
        std::thread::sleep(time);
        self.running.fetch_sub(1, Ordering::SeqCst);
        self.ended.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn most(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }

    pub(crate) fn ended(&self) -> usize {
        self.ended.load(Ordering::SeqCst)
    }
}

/// A running operator with its files.
pub(crate) struct OperatorProcess {
    child: Child,
    dir: TempDir,
}

impl Drop for OperatorProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl OperatorProcess {
    /// Starts the operator for all namespaces. The name of the program selects the operator.
    pub(crate) fn start(name: &str, server: &ApiServer, arguments: &[String]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join(name);
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_etcd-operator"), &program).unwrap();
        let config = dir.path().join("kubeconfig");
        std::fs::write(&config, kubeconfig(server).to_string()).unwrap();
        let child = Command::new(program)
            .args(["--cluster-wide", "--scope=All", "--create-crd=false"])
            .arg(format!("--listen-addr=127.0.0.1:{}", free_port()))
            .args(arguments)
            .env("KUBECONFIG", &config)
            .env("MY_POD_NAMESPACE", "default")
            .env("MY_POD_NAME", "operator")
            .env("OPERATOR_IMAGE", "operator:test")
            .stdin(Stdio::null())
            .stdout(File::create(dir.path().join("log")).unwrap())
            .stderr(File::create(dir.path().join("errors")).unwrap())
            .spawn()
            .unwrap();
        Self { child, dir }
    }

    /// The peak memory of the process in bytes.
    fn peak(&self) -> u64 {
        let status = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(status).unwrap_or_default();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let Some(peak) = peak else {
            panic!("the operator has ended: {}", self.log());
        };
        let kilobytes = peak.trim().trim_end_matches(" kB");
        kilobytes.parse::<u64>().unwrap() << 10
    }

    fn log(&self) -> String {
        let read = |name: &str| std::fs::read_to_string(self.dir.path().join(name));
        let log = read("log").unwrap_or_default() + &read("errors").unwrap_or_default();
        log[log.len().saturating_sub(4000)..].to_owned()
    }

    /// Waits until `check` returns true, and checks the memory of the process after each call of `check`.
    pub(crate) async fn until(&self, what: &str, mut check: impl AsyncFnMut() -> bool) {
        let end = Instant::now() + MAX_WAIT;
        while !check().await {
            let peak = self.peak();
            assert!(
                peak < LIMIT,
                "the operator uses {} MiB while the test waits for {what}",
                peak >> 20
            );
            assert!(Instant::now() < end, "{what}: {}", self.log());
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let peak = self.peak();
        println!("{what}: {} MiB at most", peak >> 20);
        assert!(
            peak < LIMIT,
            "the operator used {} MiB during: {what}",
            peak >> 20
        );
    }
}

fn kubeconfig(server: &ApiServer) -> Value {
    let config = server.config();
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{ "name": "test", "cluster": {
            "server": config.cluster_url.to_string(), "insecure-skip-tls-verify": true,
        } }],
        "users": [{ "name": "test", "user": { "token": server::TOKEN } }],
        "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
    })
}
