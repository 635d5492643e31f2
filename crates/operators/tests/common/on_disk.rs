//! Starts a real etcd on a data directory, with the arguments of a member's pod.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use etcd::testing::{Programs, free_port, on_path};
use etcd::{Access, Etcd, EtcdClient, Status};

/// The path of the restore tool of this minor release.
pub(crate) fn tool(programs: &Programs, minor: &str) -> PathBuf {
    if minor != "3.4" {
        return programs.etcdutl();
    }
    let next_to_etcd = programs.etcd.with_file_name("etcdctl");
    if next_to_etcd.exists() {
        next_to_etcd
    } else {
        on_path("etcdctl").expect("etcdctl 3.4: `apt-get install etcd-client`")
    }
}

/// A running etcd on an existing data directory.
pub(crate) struct Member {
    child: Child,
    pub(crate) client_url: String,
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Member {
    /// Starts etcd as `member::Start::OnDisk` does: with `--initial-cluster-state=existing`, and only this member in
    /// `--initial-cluster`.
    pub(crate) fn start(programs: &Programs, data: &Path, peer_url: &str) -> Self {
        Self::start_as(Command::new(&programs.etcd), data, peer_url)
    }

    /// Starts `command` with the arguments of [`Self::start`]. `command` is etcd, or a program that executes etcd
    /// (exec).
    pub(crate) fn start_as(mut command: Command, data: &Path, peer_url: &str) -> Self {
        let client_url = format!("http://127.0.0.1:{}", free_port());
        let name = "main-aaaaaaaaaa";
        let child = command
            .args([
                format!("--name={name}"),
                format!("--data-dir={}", data.display()),
                format!("--listen-peer-urls={peer_url}"),
                format!("--initial-advertise-peer-urls={peer_url}"),
                format!("--listen-client-urls={client_url}"),
                format!("--advertise-client-urls={client_url}"),
                format!("--initial-cluster={name}={peer_url}"),
                "--initial-cluster-state=existing".into(),
                "--initial-cluster-token=restore-uid".into(),
            ])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, client_url }
    }

    /// Waits until etcd serves, and returns its status. `None` if the process ends first.
    pub(crate) async fn serves(&mut self) -> Option<Status> {
        let client = EtcdClient::new(Access::default());
        let end = Instant::now() + Duration::from_secs(30);
        while Instant::now() < end {
            if self.child.try_wait().unwrap().is_some() {
                return None;
            }
            if let Ok(status) = client.status(&self.client_url).await
                && status.leader.is_some()
            {
                return Some(status);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("etcd neither serves nor ends in time");
    }

    pub(crate) async fn value(&self, key: &str) -> Option<String> {
        let mut client = etcd_client::Client::connect([&self.client_url], None)
            .await
            .unwrap();
        let answer = client.get(key, None).await.unwrap();
        answer
            .kvs()
            .first()
            .map(|kv| kv.value_str().unwrap().to_owned())
    }
}
