//! Faults between a client and its store. After a short fault, the upload must succeed. If the fault continues, the
//! upload must fail with an error that names the cause. No unfinished upload may remain.
#![allow(clippy::unwrap_used, clippy::panic)]

mod answers;
mod checksums;
mod locks;
mod proxy;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use proxy::{Fault, Harm, Proxy, Request};
use store::testing::{AzureServer, GoogleServer, S3Server, content, download, upload};
use store::{AbsConfig, AbsStore, Error, GcsConfig, GcsStore, S3Config, S3Store, Store};

const MIB: usize = 1 << 20;
const KEY: &str = "a/backup";
const ALWAYS: usize = usize::MAX;

/// A store with two clients. `proxied` sends its requests through the proxy, and `direct` sends its requests directly
/// to the store.
struct Rig {
    name: &'static str,
    proxy: Proxy,
    proxied: Arc<dyn Store>,
    direct: Arc<dyn Store>,
    s3: Option<S3Server>,
    _google: Option<GoogleServer>,
    _azure: Option<AzureServer>,
}

impl Rig {
    async fn s3() -> Self {
        let server = S3Server::start(&["bucket"]);
        let proxy = Proxy::start(&server.endpoint).await;
        let direct = server.config("bucket");
        let proxied = S3Config {
            endpoint: Some(proxy.url(&server.endpoint)),
            ..direct.clone()
        };
        Self {
            name: "S3",
            proxied: Arc::new(S3Store::new(proxied).await.unwrap()),
            direct: Arc::new(S3Store::new(direct).await.unwrap()),
            proxy,
            s3: Some(server),
            _google: None,
            _azure: None,
        }
    }

    async fn google() -> Self {
        let server = GoogleServer::start(&["bucket"]);
        let proxy = Proxy::start(&server.endpoint).await;
        let direct = server.config("bucket");
        let proxied = GcsConfig {
            endpoint: Some(proxy.url(&server.endpoint)),
            ..direct.clone()
        };
        Self {
            name: "Google",
            proxied: Arc::new(GcsStore::new(proxied).await.unwrap()),
            direct: Arc::new(GcsStore::new(direct).await.unwrap()),
            proxy,
            s3: None,
            _google: Some(server),
            _azure: None,
        }
    }

    async fn azure() -> Self {
        let server = AzureServer::start(&["bucket"]);
        let proxy = Proxy::start(&server.endpoint).await;
        let direct = server.config("bucket");
        let proxied = AbsConfig {
            endpoint: Some(proxy.url(&server.endpoint)),
            ..direct.clone()
        };
        Self {
            name: "Azure",
            proxied: Arc::new(AbsStore::new(&proxied).unwrap()),
            direct: Arc::new(AbsStore::new(&direct).unwrap()),
            proxy,
            s3: None,
            _google: None,
            _azure: Some(server),
        }
    }

    /// Uploads an object. If a write fails, aborts the upload, as the backup operator does.
    async fn upload(&self, content: &Bytes) -> Result<u64, Error> {
        let mut upload = self.proxied.begin(KEY).await?;
        for chunk in content.chunks(300_007) {
            if let Err(error) = upload.write(content.slice_ref(chunk)).await {
                let _ = upload.abort().await;
                return Err(error);
            }
        }
        upload.commit().await.map(|committed| committed.size)
    }

    /// Asserts that an upload succeeds despite the fault, and that the store has the sent data.
    async fn survives(&self, fault: Fault) {
        for size in [100_000, 30 * MIB] {
            let case = format!("{} {:?} {size}", self.name, fault.harm);
            let content = content(size);
            self.proxy.harm(std::slice::from_ref(&fault));
            let stored = self.upload(&content).await;
            let stored = stored.unwrap_or_else(|error| panic!("{case}: {error}"));
            assert_eq!(stored, size as u64, "{case}");
            assert!(self.proxy.done() > 0, "{case}: the fault did not occur");
            assert!(
                download(self.direct.as_ref(), KEY).await.unwrap() == content,
                "{case}"
            );
            self.clean(&case).await;
        }
    }

    /// Asserts that an upload fails within 90 seconds with one of the `expected` texts, and that the store keeps no
    /// data of the upload.
    async fn fails(&self, fault: Fault, expected: &[&str]) {
        for size in [100_000, 30 * MIB] {
            let case = format!("{} {:?} {size}", self.name, fault.harm);
            self.proxy.harm(std::slice::from_ref(&fault));
            let begun = Instant::now();
            let error = self.upload(&content(size)).await;
            let Err(error) = error else {
                panic!("{case}: the failed upload reports success");
            };
            let text = error.to_string();
            assert!(
                expected.iter().any(|expected| text.contains(expected)),
                "{case}: {text:?}"
            );
            let took = begun.elapsed();
            assert!(took < Duration::from_secs(90), "{case}: took {took:?}");
            self.proxy.harm(&[]);
            assert_eq!(self.direct.head(KEY).await.unwrap(), None, "{case}");
            self.clean(&case).await;
        }
    }

    /// Asserts that the store has no data other than the object [`KEY`], and deletes this object.
    async fn clean(&self, case: &str) {
        self.proxy.harm(&[]);
        if let Some(server) = &self.s3 {
            // A dropped upload is discarded in the background, so the test waits.
            let end = Instant::now() + Duration::from_secs(10);
            while !server.unfinished("bucket").is_empty() && Instant::now() < end {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            assert!(server.unfinished("bucket").is_empty(), "{case}");
        }
        self.direct.delete(KEY).await.unwrap();
        assert_eq!(self.direct.list("").await.unwrap(), [], "{case}");
    }
}

/// True for requests that send the content of an object, for all kinds of stores.
fn data(request: &Request) -> bool {
    request.method == "PUT" || (request.method == "POST" && request.target.contains("multipart"))
}

/// True for the request that commits the object, for all kinds of stores.
fn commit(request: &Request) -> bool {
    let range = request.header("content-range").unwrap_or_default();
    let google = !range.is_empty() && !range.ends_with("/*") && !range.starts_with("bytes */*");
    let amazon = request.method == "POST" && request.target.contains("uploadId=");
    let azure = request.method == "PUT" && request.target.contains("comp=blocklist");
    let parted = request.target.contains("partNumber=") || request.target.contains("comp=block&");
    let whole = request.method == "PUT"
        && range.is_empty()
        && !parted
        && !request.target.ends_with("comp=block");
    let multipart = request.target.contains("uploadType=multipart");
    google || multipart || amazon || azure || whole
}

fn any(_: &Request) -> bool {
    true
}

fn get(request: &Request) -> bool {
    request.method == "GET"
}

fn listing(request: &Request) -> bool {
    request.target.contains("list") || request.target.contains("prefix=")
}

const fn fault(on: fn(&Request) -> bool, times: usize, harm: Harm) -> Fault {
    Fault { on, times, harm }
}

async fn store_faults(rig: Rig) {
    // If the fault ends after `times` requests, the upload succeeds.
    for (on, times, harm) in [
        (data as fn(&Request) -> bool, 2, Harm::Answer(500, "")),
        (data, 2, Harm::Answer(503, "")),
        (data, 2, Harm::CutRequest(50_000)),
        (any, 2, Harm::CutRequest(0)),
        (data, 2, Harm::CutAnswer(0)),
        (commit, 1, Harm::CutAnswer(0)),
        (commit, 1, Harm::CutAnswer(20)),
        (commit, 1, Harm::Answer(500, "")),
        (any, 4, Harm::Delay(Duration::from_millis(400))),
    ] {
        rig.survives(fault(on, times, harm)).await;
    }
    // If the fault continues, the upload fails.
    for (harm, expected) in [
        (Harm::Answer(403, ""), &["access denied"][..]),
        (Harm::Answer(404, ""), &["does not exist: create it"]),
        (Harm::Answer(500, ""), &["500"]),
        (Harm::CutRequest(10), &["cannot be reached"]),
    ] {
        rig.fails(fault(any, ALWAYS, harm), expected).await;
    }
    reads_resume(&rig).await;
    stale_listings(&rig).await;
}

/// A broken read continues at the last offset, or fails if it cannot continue.
async fn reads_resume(rig: &Rig) {
    let content = content(20 * MIB);
    upload(rig.direct.as_ref(), KEY, &content, MIB)
        .await
        .unwrap();
    rig.proxy.harm(&[fault(get, 3, Harm::CutAnswer(3 * MIB))]);
    assert!(
        download(rig.proxied.as_ref(), KEY).await.unwrap() == content,
        "{}",
        rig.name
    );
    assert_eq!(rig.proxy.done(), 3, "{}", rig.name);
    rig.proxy.harm(&[fault(get, ALWAYS, Harm::CutAnswer(400))]);
    let read = tokio::time::timeout(Duration::from_secs(90), async {
        let object = rig.proxied.get(KEY).await?;
        let chunks: Vec<Bytes> = futures::TryStreamExt::try_collect(object.chunks).await?;
        Ok::<_, Error>(chunks)
    });
    assert!(read.await.unwrap().is_err(), "{}", rig.name);
    rig.clean("broken reads").await;
}

/// A stale listing does not change the result of an upload.
async fn stale_listings(rig: &Rig) {
    assert_eq!(rig.proxied.list("a/").await.unwrap(), []);
    rig.proxy.harm(&[fault(listing, ALWAYS, Harm::Stale)]);
    let content = content(20 * MIB);
    assert_eq!(rig.upload(&content).await.unwrap(), 20 << 20);
    assert_eq!(rig.proxied.list("a/").await.unwrap(), [], "{}", rig.name);
    assert_eq!(rig.proxied.head(KEY).await.unwrap().unwrap().size, 20 << 20);
    rig.clean("stale listing").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s3_transfers_survive_short_faults_and_fail_on_permanent_faults() {
    store_faults(Rig::s3().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn google_transfers_survive_short_faults_and_fail_on_permanent_faults() {
    store_faults(Rig::google().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn azure_transfers_survive_short_faults_and_fail_on_permanent_faults() {
    store_faults(Rig::azure().await).await;
}

/// Invariant 12: an upload fails if its data is damaged on the way to the store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invariant_12_upload_of_damaged_data_fails_for_every_store() {
    for rig in [Rig::s3().await, Rig::google().await, Rig::azure().await] {
        for size in [100_000, 30 * MIB] {
            rig.proxy.harm(&[fault(data, ALWAYS, Harm::Damage)]);
            let stored = rig.upload(&content(size)).await;
            assert!(
                stored.is_err(),
                "{} {size}: the upload of damaged data reports success",
                rig.name
            );
        }
    }
}
