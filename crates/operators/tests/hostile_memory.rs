//! Hostile stores send long listings and large manifests to many objects at the same time. The operators keep their
//! memory small, and continue to serve other tenants (ADR 24).
//!
//! The operators run as in their pods, against a real kube-apiserver. Each test takes 20 to 40 seconds, most of them for
//! the start of the API server and for the time that a hostile reply takes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../store/tests/hostile/server.rs"]
#[allow(
    dead_code,
    reason = "only the tests of the crate `store` use the whole module"
)]
mod hostile;
#[path = "../../runtime/tests/api_server/server.rs"]
mod server;

use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use api::names::{MANAGER_BACKUP, MANAGER_RESTORE};
use api::{EtcdBackup, EtcdCluster, EtcdRestore};
use etcd::testing::{EtcdProcess, Programs, Start, free_port};
use hostile::{HostileServer, Reply, Then};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Namespace, Secret};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::PostParams;
use kube::{Api, Client, CustomResourceExt, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use server::ApiServer;
use tempfile::TempDir;

/// The highest permitted memory of an operator.
const LIMIT: u64 = 256 << 20;
/// How long a test waits for any condition.
const MAX_WAIT: Duration = Duration::from_secs(90);
const HONEST: &str = "honest";
/// The namespaces of the hostile tenants.
const TENANTS: [&str; 3] = ["hostile-a", "hostile-b", "hostile-c"];
/// The operator reads from stores for this number of objects at the same time.
const READS: usize = 4;

/// Counts the calls that are in progress.
#[derive(Default)]
struct Calls {
    running: AtomicUsize,
    most: AtomicUsize,
    ended: AtomicUsize,
}

impl Calls {
    /// Keeps a call in progress for this time.
    fn last(&self, time: Duration) {
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(running, Ordering::SeqCst);
        std::thread::sleep(time);
        self.running.fetch_sub(1, Ordering::SeqCst);
        self.ended.fetch_add(1, Ordering::SeqCst);
    }

    fn most(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }

    fn ended(&self) -> usize {
        self.ended.load(Ordering::SeqCst)
    }
}

/// A running operator with its files.
struct OperatorProcess {
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
    fn start(name: &str, server: &ApiServer, arguments: &[String]) -> Self {
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

    /// The largest memory of the process so far, in bytes.
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

    /// Waits until the condition is true. Checks the memory meanwhile.
    async fn until(&self, what: &str, mut check: impl AsyncFnMut() -> bool) {
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

/// Creates an object. Repeats the request until the API server knows the kind.
async fn create<K>(api: &Api<K>, object: Value)
where
    K: Resource + Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    let object: K = serde_json::from_value(object).unwrap();
    let end = Instant::now() + MAX_WAIT;
    while let Err(error) = api.create(&PostParams::default(), &object).await {
        assert!(Instant::now() < end, "{error}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn create_in<K>(client: &Client, namespace: &str, object: Value)
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + Serialize
        + DeserializeOwned,
{
    create(&Api::<K>::namespaced(client.clone(), namespace), object).await;
}

/// An API server with the CRDs, and with a namespace and credentials for each tenant.
async fn prepared() -> (ApiServer, Client) {
    let server = ApiServer::start().await;
    let client = server.client();
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in [EtcdBackup::crd(), EtcdCluster::crd(), EtcdRestore::crd()] {
        create(&definitions, serde_json::to_value(definition).unwrap()).await;
    }
    let namespaces: Api<Namespace> = Api::all(client.clone());
    for tenant in TENANTS.into_iter().chain([HONEST]) {
        create(&namespaces, json!({ "metadata": { "name": tenant } })).await;
        let credentials = "[default]\naws_access_key_id=id\naws_secret_access_key=key\n";
        let secret = json!({
            "metadata": { "name": "aws" },
            "stringData": { "credentials": credentials, "config": "[default]\nregion=us-east-1\n" },
        });
        create_in::<Secret>(&client, tenant, secret).await;
    }
    (server, client)
}

fn s3(store: &HostileServer, path: &str) -> Value {
    json!({ "path": path, "awsSecret": "aws", "endpoint": store.endpoint, "forcePathStyle": true })
}

/// Pages of a listing with 80,000 long names. The last page comes late, and repeats a page, so the listing fails.
fn endless_listing(request: &str, calls: &Calls) -> Reply {
    const PAGES: usize = 80;
    let token = request.split("continuation-token=").nth(1);
    let digits = token.map(|token| token.split(|c: char| !c.is_ascii_digit()));
    let page = digits.and_then(|mut digits| digits.next()?.parse().ok());
    let page: usize = page.unwrap_or(0);
    if page == PAGES {
        calls.last(Duration::from_secs(8));
    }
    let next = if page == PAGES { 1 } else { page + 1 };
    let name = "k".repeat(140);
    let entry = format!("<Contents><Key>{name}</Key><Size>1</Size></Contents>");
    let entries = entry.repeat(1_000);
    Reply::new(
        format!(
            "<ListBucketResult><IsTruncated>true</IsTruncated>\
             <NextContinuationToken>{next}</NextContinuationToken>{entries}</ListBucketResult>"
        ),
        Then::End,
    )
}

/// Many EtcdBackups of three tenants list a hostile store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_store_listings_do_not_fill_memory_of_backup_operator() {
    let began = Instant::now();
    let calls = Arc::new(Calls::default());
    let counted = calls.clone();
    let store = HostileServer::start(move |request| endless_listing(request, &counted));
    let (server, client) = prepared().await;
    let source = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let host = source.client_url.trim_start_matches("http://").to_owned();
    let directory = tempfile::tempdir().unwrap();
    let arguments = [
        format!("--local-directory={}", directory.path().display()),
        format!("--etcd-endpoints={HONEST}={host}"),
    ];
    let operator = OperatorProcess::start(MANAGER_BACKUP, &server, &arguments);
    for (number, tenant) in (0..36).zip(TENANTS.into_iter().cycle()) {
        let backup = json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
            "metadata": { "name": format!("backup-{number}") },
            "spec": {
                "etcdEndpoints": ["http://127.0.0.1:1"], "storageType": "S3",
                "backupPolicy": { "backupIntervalInSecond": 3600 },
                "s3": s3(&store, &format!("bucket/{number}")),
            },
        });
        create_in::<EtcdBackup>(&client, tenant, backup).await;
    }
    let all_run = async || calls.most() >= READS;
    operator.until("hostile listings", all_run).await;

    let backup = json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
        "metadata": { "name": HONEST },
        "spec": {
            "etcdEndpoints": [source.client_url], "storageType": "Local",
            "local": { "path": "etcd/main" },
        },
    });
    create_in::<EtcdBackup>(&client, HONEST, backup).await;
    let backups: Api<EtcdBackup> = Api::namespaced(client.clone(), HONEST);
    let succeeded = async || {
        let backup = backups.get(HONEST).await.unwrap();
        backup.status.is_some_and(|status| status.succeeded)
    };
    operator
        .until("the backup of another tenant", succeeded)
        .await;
    let several_ended = async || calls.ended() >= 2 * READS;
    operator.until("more hostile listings", several_ended).await;
    assert!(calls.most() <= READS, "{} listings at a time", calls.most());
    println!("{:?}", began.elapsed());
}

/// A manifest of the largest size, whose last bytes come late. The backup of the honest tenant has no manifest.
fn large_manifest(request: &str, calls: &Calls) -> Reply {
    const SIZE: usize = 4 << 20;
    if request.contains("/bucket/honest/db.manifest.json") {
        let missing = "<Error><Code>NoSuchKey</Code><Message>missing</Message></Error>";
        return Reply::new(missing, Then::End).with_status("404 Not Found");
    }
    if request.starts_with("HEAD") {
        return Reply::new("", Then::End).with_header("content-length: 100");
    }
    calls.last(Duration::ZERO);
    Reply::new(vec![b' '; SIZE - 200], Then::Slow)
        .with_status("206 Partial Content")
        .with_header("etag: \"tag\"")
        .with_header(&format!("content-range: bytes 0-{}/{SIZE}", SIZE - 1))
        .with_header(&format!("content-length: {SIZE}"))
}

/// Many EtcdRestores of three tenants read large manifests from a hostile store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_store_manifests_do_not_fill_memory_of_restore_operator() {
    let began = Instant::now();
    let calls = Arc::new(Calls::default());
    let counted = calls.clone();
    let store = HostileServer::start(move |request| large_manifest(request, &counted));
    let (server, client) = prepared().await;
    let operator = OperatorProcess::start(MANAGER_RESTORE, &server, &[]);
    let restore = |name: &str, path: &str| {
        json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdRestore",
            "metadata": { "name": name },
            "spec": {
                "etcdCluster": { "name": name, "template": { "spec": { "size": 1, "version": "3.6.16" } } },
                "backupStorageType": "S3", "s3": s3(&store, path),
            },
        })
    };
    for (number, tenant) in (0..64).zip(TENANTS.into_iter().cycle()) {
        let name = format!("restore-{number}");
        let restore = restore(&name, &format!("bucket/{number}"));
        create_in::<EtcdRestore>(&client, tenant, restore).await;
    }
    let all_run = async || calls.ended() >= READS;
    operator.until("hostile manifests", all_run).await;

    let honest = restore(HONEST, "bucket/honest/db");
    create_in::<EtcdRestore>(&client, HONEST, honest).await;
    let clusters: Api<EtcdCluster> = Api::namespaced(client.clone(), HONEST);
    let created = async || clusters.get_opt(HONEST).await.unwrap().is_some();
    operator
        .until("the restore of another tenant", created)
        .await;
    let several_ended = async || calls.ended() >= 3 * READS;
    operator
        .until("more hostile manifests", several_ended)
        .await;
    println!("{:?}", began.elapsed());
}
