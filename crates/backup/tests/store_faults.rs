//! Tests with a faulty proxy between the operator and the store. After each fault, the backup is complete, or it has
//! failed with a reason. No incomplete backup is reported as complete.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use api::manifest::{BackupManifest, manifest_key};
use backup::reason::Reason;
use backup::snapshot::EndpointLimits;
use backup::transfer::{EarlierAttempt, Meter, ObjectName, Owner, Transfer, earlier_attempt};
use etcd::testing::{EtcdProcess, Programs, Start};
use etcd::{Access, EtcdClient};
use jiff::Timestamp;
use store::testing::{S3Server, download};
use store::{S3Config, S3Store, Store};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

const OWNER: Owner<'_> = Owner {
    uid: "uid",
    cluster: None,
    encrypted: false,
    verify_content: true,
};

#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The proxy returns this status code.
    Answer(u16),
    /// The proxy closes the connection after this number of bytes from the client.
    Cut(usize),
    /// The proxy closes the connection after this number of bytes from the store.
    Mute(usize),
    /// The proxy delays each chunk by this time.
    Slow(Duration),
}

struct Proxy {
    endpoint: String,
    remaining: Arc<AtomicUsize>,
}

impl Proxy {
    /// The proxy injects the fault into its first `times` connections.
    async fn start(server: &S3Server, fault: Fault, times: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Self {
            endpoint: format!("http://{}", listener.local_addr().unwrap()),
            remaining: Arc::new(AtomicUsize::new(times)),
        };
        let target = server.endpoint.trim_start_matches("http://").to_owned();
        let remaining = proxy.remaining.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let taken = remaining.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| {
                    count.checked_sub(1)
                });
                let server = TcpStream::connect(&target).await.unwrap();
                tokio::spawn(pass(client, server, taken.is_ok().then_some(fault)));
            }
        });
        proxy
    }
}

async fn pass(mut client: TcpStream, mut server: TcpStream, fault: Option<Fault>) {
    let (mut up, mut down) = (vec![0; 65_536], vec![0; 65_536]);
    let (mut sent, mut received) = (0, 0);
    loop {
        let read = tokio::select! {
            read = client.read(&mut up) => {
                let Ok(read @ 1..) = read else { return };
                sent += read;
                if let Some(Fault::Answer(status)) = fault {
                    let body = format!("<Error><Code>Injected{status}</Code></Error>");
                    let answer = format!(
                        "HTTP/1.1 {status} Injected\r\ncontent-type: application/xml\r\nconnection: close\r\n\
                         content-length: {}\r\n\r\n{body}",
                        body.len()
                    );
                    let _ = client.write_all(answer.as_bytes()).await;
                    // The proxy reads the remaining request before it closes the connection. If the proxy closed the
                    // connection earlier, the client would not read the response.
                    let drain = async { while matches!(client.read(&mut up).await, Ok(1..)) {} };
                    let _ = tokio::time::timeout(Duration::from_millis(300), drain).await;
                    return;
                }
                server.write_all(&up[..read]).await.map(|()| read)
            }
            read = server.read(&mut down) => {
                let Ok(read @ 1..) = read else { return };
                received += read;
                if matches!(fault, Some(Fault::Mute(limit)) if received > limit) { return }
                client.write_all(&down[..read]).await.map(|()| read)
            }
        };
        if read.is_err() || matches!(fault, Some(Fault::Cut(limit)) if sent > limit) {
            return;
        }
        if let Some(Fault::Slow(pause)) = fault {
            tokio::time::sleep(pause).await;
        }
    }
}

fn numbered(time: Timestamp) -> ObjectName {
    ObjectName::Numbered {
        path: "etcd".to_owned(),
        time,
        leftover: None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_faults_cause_no_false_success_of_backup() {
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let mut client = etcd_client::Client::connect([&etcd.client_url], None)
        .await
        .unwrap();
    for index in 0..100 {
        client
            .put(format!("/{index}"), vec![b'v'; 1 << 18], None)
            .await
            .unwrap();
    }
    let server = S3Server::start(&["bucket"]);
    let plain = S3Store::new(server.config("bucket")).await.unwrap();
    let faults = [
        (Fault::Answer(403), 40),
        (Fault::Answer(404), 40),
        (Fault::Answer(500), 40),
        (Fault::Answer(503), 3),
        (Fault::Cut(0), 40),
        (Fault::Cut(3 << 20), 6),
        (Fault::Mute(0), 6),
        (Fault::Slow(Duration::from_millis(2)), 1000),
    ];
    for (case, (fault, times)) in faults.into_iter().enumerate() {
        let proxy = Proxy::start(&server, fault, times).await;
        let config = S3Config {
            endpoint: Some(proxy.endpoint.clone()),
            ..server.config("bucket")
        };
        let store: Arc<dyn Store> = Arc::new(S3Store::new(config).await.unwrap());
        let begun = Timestamp::from_second(1_800_000_000 + i64::try_from(case).unwrap()).unwrap();
        let mut troubles = Vec::new();
        // Like the operator, each iteration first searches for a complete backup. If there is no complete backup, the
        // iteration starts an attempt.
        let stored = loop {
            assert!(troubles.len() < 60, "{fault:?}: {troubles:?}");
            let attempt = async {
                let name = numbered(begun);
                let name = match earlier_attempt(store.as_ref(), name, OWNER, begun).await? {
                    EarlierAttempt::Complete(stored) => return Ok(stored),
                    EarlierAttempt::Incomplete(name) => name,
                };
                let transfer = Transfer {
                    etcd: Arc::new(EtcdClient::new(Access::default())),
                    endpoints: vec![etcd.client_url.clone()],
                    store: store.clone(),
                    name,
                    compress: false,
                    encryption: None,
                    uid: "uid".to_owned(),
                    cluster: None,
                    limits: EndpointLimits::default(),
                    since: Timestamp::now(),
                };
                transfer
                    .run(&Meter::default(), &CancellationToken::new())
                    .await
            };
            match attempt.await {
                Ok(stored) => break stored,
                Err(trouble) => {
                    let known = [
                        Reason::AccessDenied,
                        Reason::BucketMissing,
                        Reason::StoreUnreachable,
                        Reason::ChecksumMismatch,
                    ];
                    assert!(known.contains(&trouble.reason), "{fault:?}: {trouble:?}");
                    troubles.push(trouble);
                }
            }
        };
        let key = stored.location.strip_prefix("s3://bucket/").unwrap();
        let content = download(&plain, key).await.unwrap();
        assert_eq!(
            i64::try_from(content.len()).unwrap(),
            stored.size,
            "{fault:?}"
        );
        let manifest = download(&plain, &manifest_key(key)).await.unwrap();
        let manifest: BackupManifest = serde_json::from_slice(&manifest).unwrap();
        let mut inspector = etcd::Inspector::new();
        inspector.push(&content);
        let inspected = inspector.finish().unwrap();
        assert_eq!(hex::encode(inspected.sha256), manifest.sha256, "{fault:?}");
        let all = plain.list("").await.unwrap();
        assert_eq!(all.len(), 2 * (case + 1), "{fault:?}: {all:?}");
        println!("{fault:?}: {} failed attempts before", troubles.len());
    }
    assert_eq!(
        server.unfinished("bucket"),
        Vec::<std::path::PathBuf>::new()
    );
}
