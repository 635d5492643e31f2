//! Real members and real proxies, with TLS on both sides and with the flags of the operator. Only addresses and paths
//! differ from those in a pod.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use api::EtcdCluster;
use api::version::EtcdVersion;
use etcd::testing::{EtcdProcess, Programs, Start, free_port};
use etcd_client::{
    Certificate, Client, ConnectOptions, Event, Identity, Member, TlsOptions, WatchStream,
};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The minor releases of etcd, with the versions for which proxies are built.
const RELEASES: [(&str, &str); 4] = [
    ("3.4", "3.4.23"),
    ("3.5", "3.5.35"),
    ("3.6", "3.6.16"),
    ("3.7", "3.7.3"),
];
/// The number of clients that watch the same key.
const WATCHERS: usize = 100;
/// The maximum number of watches at the member for all clients of a proxy.
const SHARED: f64 = 10.0;
const TIMEOUT: Duration = Duration::from_mins(1);

/// A CA, and a directory with certificates that it has signed.
struct Certificates {
    issuer: Issuer<'static, KeyPair>,
    ca: String,
    dir: TempDir,
}

impl Certificates {
    fn new() -> Self {
        let mut own = CertificateParams::default();
        own.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        own.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let ca = own.self_signed(&key).unwrap().pem();
        Self {
            issuer: Issuer::new(own, key),
            ca,
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// Issues a certificate for servers and clients. Writes it to the files that a mounted Secret has.
    fn issue(&self, folder: &str, common_name: Option<&str>) -> (String, String) {
        let names = ["localhost", "127.0.0.1"].map(str::to_owned);
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name = DistinguishedName::new();
        if let Some(name) = common_name {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate().unwrap();
        let pem = params.signed_by(&key, &self.issuer).unwrap().pem();
        let path = self.dir.path().join(folder);
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("tls.crt"), &pem).unwrap();
        fs::write(path.join("tls.key"), key.serialize_pem()).unwrap();
        fs::write(path.join("ca.crt"), &self.ca).unwrap();
        (pem, key.serialize_pem())
    }

    fn path(&self, folder: &str, file: &str) -> String {
        let path = self.dir.path().join(folder).join(file);
        path.display().to_string()
    }
}

/// Starts a member that requires client certificates. Returns the port of its metrics.
async fn member(minor: &str, certificates: &Certificates) -> (EtcdProcess, u16) {
    certificates.issue("member", Some("member"));
    let metrics = free_port();
    let start = Start {
        flags: vec![
            format!("--cert-file={}", certificates.path("member", "tls.crt")),
            format!("--key-file={}", certificates.path("member", "tls.key")),
            format!(
                "--trusted-ca-file={}",
                certificates.path("member", "ca.crt")
            ),
            "--client-cert-auth=true".to_owned(),
            format!("--listen-metrics-urls=http://127.0.0.1:{metrics}"),
        ],
        ..Start::default()
    };
    let member = EtcdProcess::start(&Programs::find(minor), &start).await;
    (member, metrics)
}

/// A running proxy.
struct Proxy {
    child: Child,
    dir: TempDir,
    url: String,
    metrics: u16,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Proxy {
    /// Starts a proxy with the flags of the operator. Does not wait until it serves.
    fn start(
        (minor, version): (&str, &str),
        settings: &Value,
        member: &EtcdProcess,
        certificates: &Certificates,
    ) -> Self {
        let (listen, metrics) = (free_port(), free_port());
        let url = format!("https://localhost:{listen}");
        let spec = json!({ "TLS": { "generated": {} }, "grpcProxy": settings });
        let cluster = EtcdCluster::new("db", serde_json::from_value(spec).unwrap());
        let proxy = cluster.spec.grpc_proxy.clone().unwrap();
        let version = EtcdVersion::parse(version).unwrap();
        let local = |argument: String| match argument.split_once('=') {
            Some(("--endpoints", _)) => format!("--endpoints={}", member.client_url),
            Some(("--listen-addr", _)) => format!("--listen-addr=127.0.0.1:{listen}"),
            Some(("--metrics-addr", _)) => format!("--metrics-addr=http://127.0.0.1:{metrics}"),
            Some(("--advertise-client-url", _)) => format!("--advertise-client-url={url}"),
            Some((flag, path)) if path.starts_with("/etc/etcdtls/proxy/client-tls/") => {
                let file = Path::new(path).file_name().unwrap().to_str().unwrap();
                format!("{flag}={}", certificates.path("to-members", file))
            }
            Some((flag, path)) if path.starts_with("/etc/etcdtls/proxy/server-tls/") => {
                let file = Path::new(path).file_name().unwrap().to_str().unwrap();
                format!("{flag}={}", certificates.path("to-clients", file))
            }
            _ => argument.clone(),
        };
        let arguments = proxy::arguments(&cluster, &proxy, &version);
        let dir = tempfile::tempdir().unwrap();
        let child = Command::new(&Programs::find(minor).etcd)
            .args(arguments.into_iter().map(local))
            .env("ETCD_UNSUPPORTED_ARCH", std::env::consts::ARCH)
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(dir.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        Self {
            child,
            dir,
            url,
            metrics,
        }
    }

    /// Waits until the readiness probe of the pod would succeed.
    async fn serves(&mut self) {
        let end = Instant::now() + TIMEOUT;
        loop {
            let health = page(self.metrics, "/health").await;
            let is_healthy = |text: &String| text.contains(r#""health":"true""#);
            if health.as_ref().is_some_and(is_healthy) {
                return;
            }
            let has_ended = self.child.try_wait().unwrap().is_some();
            assert!(
                !has_ended && Instant::now() < end,
                "{health:?}: {}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }
}

/// The response to a request over HTTP without TLS. `None` if nothing listens.
async fn page(port: u16, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut response = Vec::new();
    stream.read_to_end(&mut response).await.ok()?;
    Some(String::from_utf8_lossy(&response).into_owned())
}

/// The number of watches at the member.
async fn watches(metrics: u16) -> f64 {
    let text = page(metrics, "/metrics").await.unwrap();
    let lines = text.lines();
    let mut values =
        lines.filter_map(|line| line.strip_prefix("etcd_debugging_mvcc_watcher_total "));
    values.next().unwrap().parse().unwrap()
}

async fn client(url: &str, certificates: &Certificates) -> Client {
    let (certificate, key) = certificates.issue("client", Some("client"));
    let tls = TlsOptions::new()
        .ca_certificate(Certificate::from_pem(&certificates.ca))
        .identity(Identity::from_pem(certificate, key))
        .domain_name("localhost");
    let options = ConnectOptions::new()
        .with_tls(tls)
        .with_connect_timeout(Duration::from_secs(10));
    Client::connect([url], Some(options)).await.unwrap()
}

/// Waits until the watch reports this value.
async fn await_value(watch: &mut WatchStream, expected: &str) {
    let seen = async {
        loop {
            let response = watch.message().await.unwrap().unwrap();
            let mut pairs = response.events().iter().filter_map(Event::kv);
            if pairs.any(|pair| pair.value() == expected.as_bytes()) {
                return;
            }
        }
    };
    let seen = tokio::time::timeout(TIMEOUT, seen).await;
    seen.expect("the watch reports the value");
}

async fn watches_are_shared(release: (&str, &str)) {
    let certificates = Certificates::new();
    certificates.issue("to-members", None);
    certificates.issue("to-clients", None);
    let (member, metrics) = member(release.0, &certificates).await;
    let mut proxy = Proxy::start(release, &json!({}), &member, &certificates);
    proxy.serves().await;
    let mut client = client(&proxy.url, &certificates).await;
    client.put("key", "first", None).await.unwrap();
    let before = watches(metrics).await;
    let mut all = Vec::new();
    for _ in 0..WATCHERS {
        all.push(client.watch("key", None).await.unwrap());
    }
    // A proxy combines the watches of its clients only when the watches report an event, so the test changes the key
    // repeatedly.
    let end = Instant::now() + TIMEOUT;
    for turn in 0.. {
        client.put("key", format!("{turn}"), None).await.unwrap();
        let found = watches(metrics).await - before;
        if found <= SHARED {
            break;
        }
        assert!(Instant::now() < end, "{release:?}: {found} watches");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    client.put("key", "last", None).await.unwrap();
    for watch in &mut all {
        await_value(watch, "last").await;
    }
}

#[tokio::test]
async fn clients_of_proxy_share_watches_on_3_4() {
    watches_are_shared(RELEASES[0]).await;
}

#[tokio::test]
async fn clients_of_proxy_share_watches_on_3_5() {
    watches_are_shared(RELEASES[1]).await;
}

#[tokio::test]
async fn clients_of_proxy_share_watches_on_3_6() {
    watches_are_shared(RELEASES[2]).await;
}

#[tokio::test]
async fn clients_of_proxy_share_watches_on_3_7() {
    watches_are_shared(RELEASES[3]).await;
}

#[tokio::test]
async fn proxy_adds_prefix_to_keys_and_hides_members() {
    let certificates = Certificates::new();
    certificates.issue("to-members", None);
    certificates.issue("to-clients", None);
    for release in RELEASES {
        let (member, _) = member(release.0, &certificates).await;
        let settings = json!({ "namespacePrefix": "/team-a/" });
        let mut proxy = Proxy::start(release, &settings, &member, &certificates);
        proxy.serves().await;
        let mut through = client(&proxy.url, &certificates).await;
        let direct_url = member.client_url.replace("127.0.0.1", "localhost");
        let mut direct = client(&direct_url, &certificates).await;
        through.put("key", "value", None).await.unwrap();
        let found = direct.get("/team-a/key", None).await.unwrap();
        assert_eq!(found.kvs()[0].value(), b"value", "{release:?}");
        direct.put("key", "outside", None).await.unwrap();
        let found = through.get("key", None).await.unwrap();
        assert_eq!(found.kvs()[0].value(), b"value", "{release:?}");
        // The member list contains only the URL of the proxy, so clients that read the list stay connected to the
        // proxies.
        let members = through.member_list().await.unwrap();
        let urls: Vec<&String> = members
            .members()
            .iter()
            .flat_map(Member::client_urls)
            .collect();
        assert_eq!(urls, [&proxy.url], "{release:?}");
    }
}

#[tokio::test]
async fn proxy_rejects_clients_without_certificate() {
    let certificates = Certificates::new();
    certificates.issue("to-members", None);
    certificates.issue("to-clients", None);
    let (member, _) = member("3.6", &certificates).await;
    let mut proxy = Proxy::start(RELEASES[2], &json!({}), &member, &certificates);
    proxy.serves().await;
    let tls = TlsOptions::new()
        .ca_certificate(Certificate::from_pem(&certificates.ca))
        .domain_name("localhost");
    let options = ConnectOptions::new().with_tls(tls);
    let options = options.with_timeout(Duration::from_secs(10));
    let answer = async {
        let mut client = Client::connect([&proxy.url], Some(options)).await?;
        client.get("key", None).await
    };
    assert!(answer.await.is_err());
    let mut accepted = client(&proxy.url, &certificates).await;
    accepted.get("key", None).await.unwrap();
}

/// A proxy ends if its client certificate has a common name. Therefore the operator issues a client certificate without
/// a common name, and rejects a static Secret whose client certificate has a common name.
#[tokio::test]
async fn proxy_ends_if_client_certificate_has_common_name() {
    let certificates = Certificates::new();
    certificates.issue("to-members", Some("root"));
    certificates.issue("to-clients", None);
    for release in RELEASES {
        let (member, _) = member(release.0, &certificates).await;
        let mut proxy = Proxy::start(release, &json!({}), &member, &certificates);
        let end = Instant::now() + TIMEOUT;
        while proxy.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "{release:?}: the proxy still runs");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let log = proxy.log();
        assert!(log.contains("non empty Common Name"), "{release:?}: {log}");
    }
}
