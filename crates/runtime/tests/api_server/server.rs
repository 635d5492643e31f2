//! A real kube-apiserver with a real etcd, without kubelets and controllers.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use etcd::testing::{EtcdProcess, Programs, Start, built, free_port};
use kube::config::AuthInfo;
use kube::{Client, Config};
use tempfile::TempDir;

/// The token of a user with all rights.
pub(crate) const TOKEN: &str = "test-token";

pub(crate) struct ApiServer {
    child: Child,
    dir: TempDir,
    #[allow(
        dead_code,
        reason = "most tests use the etcd of this API server only indirectly"
    )]
    pub(crate) etcd: EtcdProcess,
    pub(crate) url: String,
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The path of kube-apiserver. One binary of the testbed contains all Kubernetes programs, and the name of the
/// executable selects the program.
fn program(dir: &Path) -> PathBuf {
    let built = built("kube-", "kube")
        .expect("kube-apiserver is not installed: run `cargo xtask testbed build`");
    let named = dir.join("kube-apiserver");
    std::os::unix::fs::symlink(built, &named).expect("a link");
    named
}

/// A key to sign ServiceAccount tokens. An etcd with `--auto-tls` generates it. Any key works, because the tests
/// request no tokens.
async fn signing_key(programs: &Programs) -> Vec<u8> {
    let flags = vec!["--auto-tls".to_owned()];
    let etcd = EtcdProcess::start(
        programs,
        &Start {
            flags,
            ..Start::default()
        },
    )
    .await;
    let key = etcd.data_dir().join("fixtures/client/key.pem");
    std::fs::read(key).expect("etcd's own key")
}

impl ApiServer {
    pub(crate) async fn start() -> Self {
        let programs = Programs::find("3.6");
        let etcd = EtcdProcess::start(&programs, &Start::default()).await;
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        std::fs::write(
            path("tokens"),
            format!("{TOKEN},test,test,system:masters\n"),
        )
        .expect("tokens");
        std::fs::write(path("key"), signing_key(&programs).await).expect("key");
        let port = free_port();
        let child = Command::new(program(dir.path()))
            .arg(format!("--etcd-servers={}", etcd.client_url))
            .arg(format!("--cert-dir={}", path("certs").display()))
            .arg(format!("--token-auth-file={}", path("tokens").display()))
            .arg(format!(
                "--service-account-key-file={}",
                path("key").display()
            ))
            .arg(format!(
                "--service-account-signing-key-file={}",
                path("key").display()
            ))
            .arg(format!("--secure-port={port}"))
            .args([
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                "--authorization-mode=RBAC",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--service-cluster-ip-range=10.9.0.0/24",
                "--disable-admission-plugins=ServiceAccount",
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(path("log")).expect("a log"))
            .spawn()
            .expect("kube-apiserver can be run");
        let mut server = Self {
            child,
            url: format!("https://127.0.0.1:{port}"),
            dir,
            etcd,
        };
        server.await_ready().await;
        server
    }

    async fn await_ready(&mut self) {
        let client = self.client();
        let end = Instant::now() + Duration::from_mins(1);
        while Instant::now() < end {
            let ready = http::Request::get("/readyz")
                .body(Vec::new())
                .expect("a request");
            if client
                .request_text(ready)
                .await
                .is_ok_and(|text| text == "ok")
            {
                return;
            }
            if self.child.try_wait().expect("a child").is_some() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        panic!(
            "kube-apiserver did not become ready: {}",
            &log[log.len().saturating_sub(4000)..]
        );
    }

    pub(crate) fn config(&self) -> Config {
        let mut config = Config::new(self.url.parse().expect("a URL"));
        // At each start, kube-apiserver generates a new certificate. The client does not know the CA of this
        // certificate, and accepts any certificate.
        config.accept_invalid_certs = true;
        config.auth_info = AuthInfo {
            token: Some(TOKEN.to_owned().into()),
            ..AuthInfo::default()
        };
        config
    }

    pub(crate) fn client(&self) -> Client {
        Client::try_from(self.config()).expect("a client")
    }
}
