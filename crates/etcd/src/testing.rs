//! Starts real etcd processes for tests, with free loopback ports and temporary directories. Dropping the handle ends
//! the process.
//!
//! For tests only. If etcd is not installed, the test fails with the command that installs it.
#![allow(clippy::expect_used, clippy::panic, clippy::missing_panics_doc)]

use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::{Access, Etcd, EtcdClient};

/// The paths of etcd's programs.
#[derive(Clone, Debug)]
pub struct Programs {
    /// The path of the server.
    pub etcd: PathBuf,
}

impl Programs {
    /// Finds the etcd server that the testbed has built for a minor version such as `3.6`. For `3.4`, the system's
    /// package is accepted too. The environment variable `ETCD_BIN` overrides the path.
    pub fn find(minor: &str) -> Self {
        let named = std::env::var_os("ETCD_BIN").map(PathBuf::from);
        let built = || built(&format!("etcd-{minor}-"), "etcd");
        let system = || (minor == "3.4").then(|| on_path("etcd")).flatten();
        let etcd = named.or_else(built).or_else(system).unwrap_or_else(|| {
            panic!(
                "etcd {minor} is not installed: run `cargo xtask testbed build` (3.4: `apt-get install etcd-server`), \
                 or set ETCD_BIN to the program"
            )
        });
        Self { etcd }
    }

    /// The path of `etcdutl`, next to the server or on the `PATH`.
    pub fn etcdutl(&self) -> PathBuf {
        let sibling = self.etcd.with_file_name("etcdutl");
        if sibling.exists() {
            return sibling;
        }
        on_path("etcdutl").unwrap_or_else(|| {
            panic!(
                "etcdutl is missing next to {}: run `cargo xtask testbed build`",
                self.etcd.display()
            )
        })
    }
}

/// The directory with the programs that the testbed has built.
pub fn cache() -> PathBuf {
    let base = std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty());
    let base = base.map_or_else(
        || PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache"),
        PathBuf::from,
    );
    base.join("etcd-operator-testbed")
}

/// Finds a program in the directories of the testbed's cache whose names start with `prefix`. If several directories
/// have the program, returns the newest.
pub fn built(prefix: &str, program: &str) -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(cache())
        .ok()?
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path().join(program))
        .filter(|path| path.is_file())
        .collect();
    found.sort_by_key(|path| path.metadata().and_then(|data| data.modified()).ok());
    found.pop()
}

/// Finds a program on the `PATH`.
pub fn on_path(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
}

/// Returns a port that no other test program uses. The ports are below `ip_local_port_range`, so the system does not
/// assign them to other connections. Each process reserves blocks of ports with file locks, which the system releases
/// when the process ends.
pub fn free_port() -> u16 {
    static PORTS: Mutex<Ports> = Mutex::new(Ports {
        locks: Vec::new(),
        left: 0..0,
    });
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok();
    let mut ports = PORTS.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let Ports { left, .. } = &mut *ports;
        if let Some(port) = left.find(is_free) {
            return port;
        }
        ports.reserve();
    }
}

const FIRST_PORT: u16 = 16_384;
const PORTS_PER_BLOCK: u16 = 32;
const BLOCK_COUNT: u16 = 500;

struct Ports {
    /// Lock files of the reserved port blocks, which stay locked until the process ends.
    locks: Vec<File>,
    left: Range<u16>,
}

impl Ports {
    /// Reserves a block of ports that no other process has reserved.
    fn reserve(&mut self) {
        let folder = std::env::temp_dir().join("etcd-operator-test-ports");
        std::fs::create_dir_all(&folder).expect("a folder for locks");
        let begin = u16::try_from(std::process::id() % u32::from(BLOCK_COUNT)).unwrap_or_default();
        let blocks = (0..BLOCK_COUNT).map(|turn| (begin + turn) % BLOCK_COUNT);
        for block in blocks {
            let file = File::create(folder.join(format!("{block}.lock"))).expect("a lock");
            if file.try_lock().is_ok() {
                let first = FIRST_PORT + block * PORTS_PER_BLOCK;
                self.left = first..first + PORTS_PER_BLOCK;
                self.locks.push(file);
                return;
            }
        }
        panic!("all ports for tests are reserved: see {}", folder.display());
    }
}

/// A running etcd member. Dropping the handle ends the process and deletes its data.
pub struct EtcdProcess {
    command: Command,
    child: Child,
    dir: TempDir,
    /// Name in the member list.
    pub name: String,
    /// URL for clients.
    pub client_url: String,
    /// URL for peers.
    pub peer_url: String,
}

/// Options for the start of a member.
#[derive(Clone, Debug, Default)]
pub struct Start {
    /// Flags of etcd, in addition to name, directory, URLs and cluster.
    pub flags: Vec<String>,
    /// The existing members of the cluster that the new member joins, each as `name=peer URL`.
    pub join: Vec<String>,
    /// Environment variables of the process, with their values.
    pub variables: Vec<(String, String)>,
}

fn command(
    programs: &Programs,
    dir: &Path,
    name: &str,
    urls: (&str, &str),
    cluster: (&str, &str),
) -> Command {
    let (client, peer) = urls;
    let log = std::fs::File::create(dir.join("log")).expect("a log file");
    let mut command = Command::new(&programs.etcd);
    command
        .arg(format!("--name={name}"))
        .arg(format!("--data-dir={}", dir.join("data").display()))
        .arg(format!("--listen-client-urls={client}"))
        .arg(format!("--advertise-client-urls={client}"))
        .arg(format!("--listen-peer-urls={peer}"))
        .arg(format!("--initial-advertise-peer-urls={peer}"))
        .arg(format!("--initial-cluster={}", cluster.0))
        .arg(format!("--initial-cluster-state={}", cluster.1))
        .env("ETCD_UNSUPPORTED_ARCH", std::env::consts::ARCH)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    command
}

impl EtcdProcess {
    /// Starts a cluster of one member, and waits until it serves.
    pub async fn start(programs: &Programs, start: &Start) -> Self {
        for _ in 0..5 {
            let peer_url = format!("http://127.0.0.1:{}", free_port());
            let mut process = Self::spawn(programs, "m0", &peer_url, start, "new");
            if process.serves().await {
                return process;
            }
        }
        panic!(
            "etcd does not start: check that {} can run",
            programs.etcd.display()
        );
    }

    /// Starts `count` members as one new cluster, and waits until all of them serve.
    pub async fn start_cluster(programs: &Programs, count: usize, start: &Start) -> Vec<Self> {
        'again: for _ in 0..5 {
            let peers: Vec<(String, String)> = (0..count)
                .map(|index| {
                    (
                        format!("m{index}"),
                        format!("http://127.0.0.1:{}", free_port()),
                    )
                })
                .collect();
            let all: Vec<String> = peers
                .iter()
                .map(|(name, url)| format!("{name}={url}"))
                .collect();
            let mut members: Vec<Self> = peers
                .iter()
                .map(|(name, url)| {
                    let others = all
                        .iter()
                        .filter(|other| !other.starts_with(&format!("{name}=")));
                    let start = Start {
                        join: others.cloned().collect(),
                        ..start.clone()
                    };
                    Self::spawn(programs, name, url, &start, "new")
                })
                .collect();
            for member in &mut members {
                if !member.serves().await {
                    continue 'again;
                }
            }
            return members;
        }
        panic!(
            "etcd does not start: check that {} can run",
            programs.etcd.display()
        );
    }

    /// Starts a member that was added to an existing cluster with `peer_url`. Does not wait until it serves.
    pub fn join(programs: &Programs, name: &str, peer_url: &str, start: &Start) -> Self {
        Self::spawn(programs, name, peer_url, start, "existing")
    }

    fn spawn(programs: &Programs, name: &str, peer_url: &str, start: &Start, state: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let is_tls = |flag: &String| flag == "--auto-tls" || flag.starts_with("--cert-file=");
        let secure = start.flags.iter().any(is_tls);
        let scheme = if secure { "https" } else { "http" };
        let client_url = format!("{scheme}://127.0.0.1:{}", free_port());
        let mut cluster = vec![format!("{name}={peer_url}")];
        cluster.extend(start.join.iter().cloned());
        let mut command = command(
            programs,
            dir.path(),
            name,
            (&client_url, peer_url),
            (&cluster.join(","), state),
        );
        command.envs(start.variables.iter().cloned());
        let child = command.args(&start.flags).spawn();
        Self {
            command,
            child: child.expect("etcd can be run"),
            dir,
            name: name.to_owned(),
            client_url,
            peer_url: peer_url.to_owned(),
        }
    }

    /// Waits until the member knows a leader. Returns false if the process has ended.
    pub async fn serves(&mut self) -> bool {
        let client = EtcdClient::new(Access::default());
        let end = Instant::now() + Duration::from_mins(1);
        while Instant::now() < end {
            if self.child.try_wait().expect("a child process").is_some() {
                return false;
            }
            match client.status(&self.client_url).await {
                Ok(status) if status.leader.is_some() => return true,
                // An open port counts as ready if the member uses TLS, because this client has no CA certificate and
                // cannot call the member.
                Err(crate::Error::Tls(_)) if self.listens() => return true,
                _ => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
        let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        panic!("etcd does not serve within 60 s: {log}");
    }

    fn listens(&self) -> bool {
        let address = self.client_url.rsplit('/').next().unwrap_or_default();
        std::net::TcpStream::connect(address).is_ok()
    }

    /// Kills the process. Its data remains until the handle is dropped.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Kills the process and starts it again with its data. Does not wait until it serves.
    pub fn restart(&mut self) {
        self.kill();
        self.child = self.command.spawn().expect("etcd can be run");
    }

    /// Stops the process with SIGTERM, and waits until it has ended.
    pub fn stop(&mut self) {
        let _ = Command::new("kill")
            .arg(self.child.id().to_string())
            .status();
        let _ = self.child.wait();
    }

    /// Stops the process and starts another release with the same options and data. Does not wait until it serves.
    pub fn change_release(&mut self, programs: &Programs) {
        self.stop();
        let log = self.dir.path().join("log");
        let log = std::fs::File::options().append(true).open(log);
        let variables = self.command.get_envs();
        let variables = variables.filter_map(|(name, value)| Some((name, value?)));
        let mut command = Command::new(&programs.etcd);
        command
            .args(self.command.get_args())
            .envs(variables)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.expect("a log file"));
        self.command = command;
        self.child = self.command.spawn().expect("etcd can be run");
    }

    /// The data directory of this member.
    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }
}

impl Drop for EtcdProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
