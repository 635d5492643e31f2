//! Tests with hostile stores.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::names::{MANAGER_BACKUP, MANAGER_RESTORE};
use api::{EtcdBackup, EtcdCluster, EtcdRestore};
use etcd::testing::{EtcdProcess, Programs, Start};
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use serde_json::{Value, json};

use crate::hostile::{HostileServer, Reply, Then};
use crate::process::{Calls, OperatorProcess};
use crate::server::ApiServer;
use crate::{HONEST, TENANTS, backs_up_honest_tenant, create_in, prepared};

/// Maximum number of concurrent reads of listings and manifests in an operator.
const READS: usize = 4;

/// The type of store that the hostile server imitates.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    S3,
    Google,
    Azure,
}

impl Kind {
    fn of(request: &str) -> Self {
        if request.contains("/storage/v1/") {
            Self::Google
        } else if request.contains("comp=list") {
            Self::Azure
        } else {
            Self::S3
        }
    }

    /// The storage block of an EtcdBackup.
    fn storage(self, store: &HostileServer, path: &str) -> Value {
        let endpoint = &store.endpoint;
        match self {
            Self::S3 => json!({ "storageType": "S3", "s3": s3(store, path) }),
            Self::Google => json!({
                "storageType": "GCS",
                "gcs": { "path": path, "gcpSecret": "google", "endpoint": endpoint },
            }),
            Self::Azure => json!({
                "storageType": "ABS",
                "abs": { "path": path, "absSecret": "azure", "endpoint": endpoint },
            }),
        }
    }

    /// A page of a listing with 1,000 long names and the marker of the next page.
    fn page(self, next: usize) -> String {
        const ENTRIES: usize = 1_000;
        let name = "k".repeat(140);
        match self {
            Self::S3 => {
                let entry = format!("<Contents><Key>{name}</Key><Size>1</Size></Contents>");
                let entries = entry.repeat(ENTRIES);
                format!(
                    "<ListBucketResult><IsTruncated>true</IsTruncated>\
                     <NextContinuationToken>{next}</NextContinuationToken>{entries}</ListBucketResult>"
                )
            }
            Self::Google => {
                let entry = format!("{{\"name\":\"{name}\",\"size\":\"1\"}}");
                let entries = vec![entry; ENTRIES].join(",");
                format!("{{\"nextPageToken\":\"{next}\",\"items\":[{entries}]}}")
            }
            Self::Azure => {
                let time = "Tue, 24 Nov 2026 00:00:00 GMT";
                let entry = format!(
                    "<Blob><Name>{name}</Name><Properties><Creation-Time>{time}</Creation-Time>\
                     <Last-Modified>{time}</Last-Modified><Etag>0x1</Etag><Content-Length>1</Content-Length>\
                     <Content-Type>text/plain</Content-Type><BlobType>BlockBlob</BlobType></Properties></Blob>"
                );
                let entries = entry.repeat(ENTRIES);
                format!(
                    "<EnumerationResults><Blobs>{entries}</Blobs><NextMarker>{next}</NextMarker>\
                     </EnumerationResults>"
                )
            }
        }
    }

    /// The number of the requested page.
    fn page_of(self, request: &str) -> usize {
        let parameter = match self {
            Self::S3 => "continuation-token=",
            Self::Google => "pageToken=",
            Self::Azure => "marker=",
        };
        let token = request.split(parameter).nth(1);
        let digits = token.map(|token| token.split(|c: char| !c.is_ascii_digit()));
        let page = digits.and_then(|mut digits| digits.next()?.parse().ok());
        page.unwrap_or(0)
    }
}

fn s3(store: &HostileServer, path: &str) -> Value {
    json!({ "path": path, "awsSecret": "aws", "endpoint": store.endpoint, "forcePathStyle": true })
}

/// Returns one page of a listing of 80 pages with 1,000 long names each. The last page is slow, and names page 1 as its
/// next page, so that the listing fails.
fn endless_listing(request: &str, calls: &Calls) -> Reply {
    const PAGES: usize = 80;
    let kind = Kind::of(request);
    let page = kind.page_of(request);
    if page == PAGES {
        calls.last(Duration::from_secs(8));
    }
    let next = if page == PAGES { 1 } else { page + 1 };
    Reply::new(kind.page(next), Then::End)
}

/// Starts the backup operator, and an etcd that only the honest tenant may back up.
async fn started(server: &ApiServer, directory: &Path) -> (OperatorProcess, EtcdProcess) {
    let source = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let host = source.client_url.trim_start_matches("http://");
    let arguments = [
        format!("--local-directory={}", directory.display()),
        format!("--etcd-endpoints={HONEST}={host}"),
    ];
    let operator = OperatorProcess::start(MANAGER_BACKUP, server, &arguments);
    (operator, source)
}

/// A periodic EtcdBackup of a hostile tenant.
fn hostile_backup(number: usize, kind: Kind, store: &HostileServer) -> Value {
    let mut backup = json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
        "metadata": { "name": format!("backup-{number}") },
        "spec": kind.storage(store, &format!("bucket/{number}")),
    });
    backup["spec"]["etcdEndpoints"] = json!(["http://127.0.0.1:1"]);
    backup["spec"]["backupPolicy"] = json!({ "backupIntervalInSecond": 3600 });
    backup
}

/// Many EtcdBackups of three tenants list a hostile store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_store_listings_do_not_fill_memory_of_backup_operator() {
    let began = Instant::now();
    let calls = Arc::new(Calls::default());
    let counted = calls.clone();
    let store = HostileServer::start(move |request| endless_listing(request, &counted));
    let (server, client) = prepared().await;
    let directory = tempfile::tempdir().unwrap();
    let (operator, source) = started(&server, directory.path()).await;
    for (number, tenant) in (0..36).zip(TENANTS.into_iter().cycle()) {
        let backup = hostile_backup(number, Kind::S3, &store);
        create_in::<EtcdBackup>(&client, tenant, backup).await;
    }
    let all_run = async || calls.most() >= READS;
    operator.until("hostile listings", all_run).await;
    backs_up_honest_tenant(&operator, &client, &source).await;
    let several_ended = async || calls.ended() >= 2 * READS;
    operator.until("more hostile listings", several_ended).await;
    assert!(calls.most() <= READS, "{} listings at a time", calls.most());
    println!("{:?}", began.elapsed());
}

/// One tenant lists an S3 store that sends one byte every 29 s, just within the time limit of a read. The two other
/// tenants list stores of Google and Azure.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_store_of_each_kind_does_not_fill_memory_of_backup_operator() {
    let began = Instant::now();
    let [google, azure, slow] = [(); 3].map(|()| Arc::new(Calls::default()));
    let counted = [google.clone(), azure.clone(), slow.clone()];
    let store = HostileServer::start(move |request| {
        let [google, azure, slow] = &counted;
        match Kind::of(request) {
            Kind::S3 => {
                slow.last(Duration::ZERO);
                Reply::new("<ListBucketResult>", Then::Slow(Duration::from_secs(29)))
            }
            Kind::Google => endless_listing(request, google),
            Kind::Azure => endless_listing(request, azure),
        }
    });
    let (server, client) = prepared().await;
    let directory = tempfile::tempdir().unwrap();
    let (operator, source) = started(&server, directory.path()).await;
    for tenant in TENANTS {
        let google = json!({ "access-token": "token", "endpoint": store.endpoint });
        let azure = json!({ "storage-account": "account", "storage-key": "a2V5" });
        for (name, data) in [("google", google), ("azure", azure)] {
            let secret = json!({ "metadata": { "name": name }, "stringData": data });
            create_in::<Secret>(&client, tenant, secret).await;
        }
    }
    let kinds = [Kind::S3, Kind::Google, Kind::Azure];
    let tenants = TENANTS.into_iter().zip(kinds).cycle();
    for (number, (tenant, kind)) in (0..36).zip(tenants) {
        let backup = hostile_backup(number, kind, &store);
        create_in::<EtcdBackup>(&client, tenant, backup).await;
    }
    let all_run = async || [&google, &azure, &slow].iter().all(|one| one.most() > 0);
    operator.until("hostile stores of each kind", all_run).await;
    backs_up_honest_tenant(&operator, &client, &source).await;
    let several_ended = async || google.ended() >= 2 && azure.ended() >= 2;
    operator.until("more hostile listings", several_ended).await;
    println!("{:?}", began.elapsed());
}

/// A manifest of the maximum size, whose last bytes are sent slowly. The manifest of the honest tenant's backup does
/// not exist.
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
    Reply::new(
        vec![b' '; SIZE - 200],
        Then::Slow(Duration::from_millis(20)),
    )
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
