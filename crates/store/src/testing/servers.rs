//! Starts real object stores for tests, each with a new directory and its own port. Dropping the handle ends the
//! process. If the program is not installed, the test fails with the command that installs it.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::{AbsAccess, AbsConfig, GcsAccess, GcsConfig, S3Access, S3Config, S3Keys};

/// The access key of [`S3Server`].
pub const ACCESS_KEY: &str = "testaccess";
/// The secret of [`ACCESS_KEY`].
pub const SECRET_KEY: &str = "testsecret";

/// The account of [`AzureServer`].
pub const ACCOUNT: &str = "testaccount";
/// The key of [`ACCOUNT`].
pub const ACCOUNT_KEY: &str = "dGVzdHNlY3JldHRlc3RzZWNyZXQ=";

/// Finds the file `path` in the directories of the testbed's cache whose names start with `folder`, and returns the
/// newest one. If the environment variable `variable` is set, returns its value.
fn program(folder: &str, path: &str, variable: &str, remedy: &str) -> PathBuf {
    if let Some(named) = std::env::var_os(variable) {
        return named.into();
    }
    let base = std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty());
    let base = base.map_or_else(
        || PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache"),
        PathBuf::from,
    );
    let mut found: Vec<PathBuf> = std::fs::read_dir(base.join("etcd-operator-testbed"))
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(folder))
        .map(|entry| entry.path().join(path))
        .filter(|path| path.is_file())
        .collect();
    found.sort_by_key(|path| path.metadata().and_then(|data| data.modified()).ok());
    found.pop().unwrap_or_else(|| {
        panic!("{path} is not installed: {remedy}, or set {variable} to the file")
    })
}

/// A server process and its data.
struct Server {
    child: Child,
    dir: TempDir,
    address: SocketAddr,
}

impl Server {
    /// Starts the command with an address and a data directory, and waits until the server listens.
    fn start(prepare: impl Fn(&Path), command: impl Fn(SocketAddr, &Path) -> Command) -> Self {
        Self::start_until(prepare, command, |address, _| {
            // A connection whose local address is `address` does not count: while no server listens, the kernel may
            // connect the socket to itself (TCP self-connect).
            let connected = TcpStream::connect(address).and_then(|stream| stream.local_addr());
            connected.is_ok_and(|own| own != address)
        })
    }

    /// Like [`Server::start`], but waits until `ready` returns true.
    fn start_until(
        prepare: impl Fn(&Path),
        command: impl Fn(SocketAddr, &Path) -> Command,
        ready: impl Fn(SocketAddr, &Path) -> bool,
    ) -> Self {
        let mut program = None;
        for _ in 0..5 {
            let dir = tempfile::tempdir().expect("a temporary directory");
            prepare(dir.path());
            let address = TcpListener::bind("127.0.0.1:0")
                .and_then(|listener| listener.local_addr())
                .expect("a loopback port");
            let mut command = command(address, dir.path());
            program = Some(command.get_program().to_owned());
            let child = command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn();
            let child = child.unwrap_or_else(|error| {
                panic!("{}: {error}", command.get_program().display());
            });
            let mut server = Self {
                child,
                dir,
                address,
            };
            let end = Instant::now() + Duration::from_secs(30);
            while Instant::now() < end
                && server.child.try_wait().expect("a child process").is_none()
            {
                if ready(address, server.dir.path()) {
                    return server;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        panic!("{program:?} does not start: check that it can run");
    }

    fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running versitygw.
pub struct S3Server {
    server: Server,
    /// URL for clients.
    pub endpoint: String,
}

impl S3Server {
    /// Starts the server and creates these buckets.
    pub fn start(buckets: &[&str]) -> Self {
        Self::start_with(buckets, &[])
    }

    /// Like [`S3Server::start`], with additional arguments of versitygw.
    pub fn start_with(buckets: &[&str], arguments: &[&str]) -> Self {
        let remedy = "run `cargo xtask testbed build`";
        let program = program("versitygw-", "versitygw", "VERSITYGW_BIN", remedy);
        let server = Server::start(
            |dir| {
                std::fs::create_dir(dir.join("versions")).expect("a folder");
                std::fs::create_dir(dir.join("data")).expect("a folder");
                for bucket in buckets {
                    std::fs::create_dir(dir.join("data").join(bucket)).expect("a bucket");
                }
            },
            |address, dir| {
                let mut command = Command::new(&program);
                command
                    .args(["--quiet", "--keep-alive"])
                    .args(["--access", ACCESS_KEY, "--secret", SECRET_KEY])
                    .args(["--port", &address.to_string()])
                    .args(arguments)
                    .args(["posix", "--versioning-dir"])
                    .arg(dir.join("versions"))
                    .arg(dir.join("data"));
                command
            },
        );
        let scheme = if arguments.contains(&"--cert") {
            "https"
        } else {
            "http"
        };
        Self {
            endpoint: format!("{scheme}://{}", server.address),
            server,
        }
    }

    /// The configuration for a bucket of this server.
    pub fn config(&self, bucket: &str) -> S3Config {
        S3Config {
            bucket: bucket.to_owned(),
            endpoint: Some(self.endpoint.clone()),
            force_path_style: true,
            access: S3Access::Keys(S3Keys::new(ACCESS_KEY, SECRET_KEY)),
            ..S3Config::default()
        }
    }

    /// The directory with the objects of a bucket.
    pub fn bucket_dir(&self, bucket: &str) -> PathBuf {
        self.server.dir.path().join("data").join(bucket)
    }

    /// The files of unfinished uploads to a bucket.
    pub fn unfinished(&self, bucket: &str) -> Vec<PathBuf> {
        fn files(dir: &Path, found: &mut Vec<PathBuf>) {
            for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                if entry.path().is_dir() {
                    files(&entry.path(), found);
                } else {
                    found.push(entry.path());
                }
            }
        }
        let mut found = Vec::new();
        files(
            &self.bucket_dir(bucket).join(".sgwtmp/multipart"),
            &mut found,
        );
        found
    }
}

/// A running fake-gcs-server.
pub struct GoogleServer {
    _server: Server,
    /// URL for clients.
    pub endpoint: String,
}

impl GoogleServer {
    /// Starts the server and creates these buckets.
    pub fn start(buckets: &[&str]) -> Self {
        let remedy = "run `cargo xtask testbed build`";
        let program = program(
            "fake-gcs-server-",
            "fake-gcs-server",
            "FAKE_GCS_SERVER_BIN",
            remedy,
        );
        let server = Server::start(
            |_| {},
            |address, _| {
                let mut command = Command::new(&program);
                command
                    .args([
                        "-backend",
                        "memory",
                        "-scheme",
                        "http",
                        "-log-level",
                        "error",
                    ])
                    .args(["-host", &address.ip().to_string()])
                    .args(["-port", &address.port().to_string()]);
                command
            },
        );
        for bucket in buckets {
            let body = format!("{{\"name\":\"{bucket}\"}}");
            let request = format!(
                "POST /storage/v1/b?project=test HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\
                 content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
                server.address,
                body.len()
            );
            let mut stream = TcpStream::connect(server.address).expect("fake-gcs-server");
            stream.write_all(request.as_bytes()).expect("a request");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("an answer");
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
        Self {
            endpoint: server.endpoint(),
            _server: server,
        }
    }

    /// The configuration for a bucket of this server. The server accepts any token.
    pub fn config(&self, bucket: &str) -> GcsConfig {
        GcsConfig {
            bucket: bucket.to_owned(),
            endpoint: Some(self.endpoint.clone()),
            access: GcsAccess::Token(http::HeaderValue::from_static("Bearer test")),
        }
    }
}

/// A running Azurite.
pub struct AzureServer {
    _server: Server,
    /// URL for clients, including the account.
    pub endpoint: String,
}

impl AzureServer {
    /// Starts the server and creates these containers.
    pub fn start(containers: &[&str]) -> Self {
        let remedy = "install Node.js 18 or newer with npm (Debian: `apt-get install nodejs npm`) and run \
                      `cargo xtask testbed build`";
        let program = program("azurite-", "serve.js", "AZURITE_SERVE_JS", remedy);
        let server = Server::start_until(
            |_| {},
            |address, dir| {
                let mut command = Command::new("node");
                command
                    .arg(&program)
                    .args([ACCOUNT, ACCOUNT_KEY, &containers.join(",")])
                    .arg(dir.join("ready"))
                    .args(["--blobHost", &address.ip().to_string()])
                    .args(["--blobPort", &address.port().to_string()])
                    .args(["--silent", "--skipApiVersionCheck", "--disableTelemetry"])
                    .arg("--location")
                    .arg(dir);
                command
            },
            |_, dir| dir.join("ready").exists(),
        );
        Self {
            endpoint: format!("{}/{ACCOUNT}", server.endpoint()),
            _server: server,
        }
    }

    /// The configuration for a container of this server.
    pub fn config(&self, container: &str) -> AbsConfig {
        AbsConfig {
            container: container.to_owned(),
            endpoint: Some(self.endpoint.clone()),
            access: AbsAccess::Key {
                account: ACCOUNT.to_owned(),
                key: ACCOUNT_KEY.to_owned(),
                cloud: crate::AbsCloud::default(),
            },
        }
    }
}
