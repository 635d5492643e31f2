//! Tests of the S3 client with a real server: errors, retries and leftover data of failed uploads.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use api::storage::{ObjectLock, ObjectLockMode, ServerSideEncryption};
use bytes::Bytes;
use store::testing::{ACCESS_KEY, S3Server, SECRET_KEY, content, download, upload};
use store::{Error, S3Access, S3Config, S3Keys, S3Store, Store};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const MIB: usize = 1 << 20;

async fn reach(config: S3Config) -> S3Store {
    S3Store::new(config).await.unwrap()
}

/// A proxy between client and server. It can cut connections, and detects checksum trailers.
struct Proxy {
    endpoint: String,
    trailers: Arc<AtomicBool>,
    cuts: Arc<AtomicUsize>,
}

/// The connections that the proxy cuts.
#[derive(Clone, Copy)]
struct Cuts {
    /// Number of connections that the proxy cuts.
    times: usize,
    /// Number of bytes from the client after which the proxy cuts a connection.
    sent: usize,
    /// Number of bytes from the server after which the proxy cuts a connection.
    received: usize,
}

const NEVER: Cuts = Cuts {
    times: 0,
    sent: usize::MAX,
    received: usize::MAX,
};

impl Proxy {
    async fn start(server: &S3Server, cuts: Cuts) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Self {
            endpoint: format!("http://{}", listener.local_addr().unwrap()),
            trailers: Arc::default(),
            cuts: Arc::default(),
        };
        let target = server.endpoint.trim_start_matches("http://").to_owned();
        let (trailers, cut) = (proxy.trailers.clone(), proxy.cuts.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(&target).await.unwrap();
                tokio::spawn(pass(client, server, cuts, trailers.clone(), cut.clone()));
            }
        });
        proxy
    }

    fn config(&self, server: &S3Server) -> S3Config {
        S3Config {
            endpoint: Some(self.endpoint.clone()),
            ..server.config("bucket")
        }
    }
}

async fn pass(
    mut client: TcpStream,
    mut server: TcpStream,
    cuts: Cuts,
    trailers: Arc<AtomicBool>,
    cut: Arc<AtomicUsize>,
) {
    let (mut up, mut down) = (vec![0; 65_536], vec![0; 65_536]);
    let (mut sent, mut received) = (0, 0);
    loop {
        tokio::select! {
            read = client.read(&mut up) => {
                let Ok(read @ 1..) = read else { return };
                let text = String::from_utf8_lossy(&up[..read]).to_lowercase();
                if text.contains("x-amz-trailer") || text.contains("aws-chunked") || text.contains("streaming-") {
                    trailers.store(true, Ordering::SeqCst);
                }
                sent += read;
                if server.write_all(&up[..read]).await.is_err() { return }
            }
            read = server.read(&mut down) => {
                let Ok(read @ 1..) = read else { return };
                received += read;
                if client.write_all(&down[..read]).await.is_err() { return }
            }
        }
        if (sent > cuts.sent || received > cuts.received) && cut.load(Ordering::SeqCst) < cuts.times
        {
            cut.fetch_add(1, Ordering::SeqCst);
            return;
        }
    }
}

#[tokio::test]
async fn s3_client_sends_no_checksum_trailers() {
    let server = S3Server::start(&["bucket"]);
    let proxy = Proxy::start(&server, NEVER).await;
    let store = reach(proxy.config(&server)).await;
    store.put("small", content(100)).await.unwrap();
    upload(&store, "large", &content(20 * MIB), MIB)
        .await
        .unwrap();
    assert!(download(&store, "large").await.unwrap() == content(20 * MIB));
    assert!(!proxy.trailers.load(Ordering::SeqCst));
}

#[tokio::test]
async fn s3_upload_completes_despite_connection_losses() {
    let server = S3Server::start(&["bucket"]);
    let cuts = Cuts {
        times: 4,
        sent: 3 * MIB,
        received: usize::MAX,
    };
    let proxy = Proxy::start(&server, cuts).await;
    let store = reach(proxy.config(&server)).await;
    let content = content(30 * MIB);
    upload(&store, "object", &content, 100_000).await.unwrap();
    assert_eq!(proxy.cuts.load(Ordering::SeqCst), 4);
    assert!(download(&store, "object").await.unwrap() == content);
}

#[tokio::test]
async fn s3_download_completes_despite_connection_losses() {
    let server = S3Server::start(&["bucket"]);
    let content = content(20 * MIB);
    upload(
        &reach(server.config("bucket")).await,
        "object",
        &content,
        MIB,
    )
    .await
    .unwrap();
    let cuts = Cuts {
        times: 6,
        sent: usize::MAX,
        received: 2 * MIB,
    };
    let proxy = Proxy::start(&server, cuts).await;
    let store = reach(proxy.config(&server)).await;
    assert!(download(&store, "object").await.unwrap() == content);
    assert_eq!(proxy.cuts.load(Ordering::SeqCst), 6);
}

#[tokio::test]
async fn download_fails_if_object_is_replaced_during_download() {
    let server = S3Server::start(&["bucket"]);
    let direct = reach(server.config("bucket")).await;
    upload(&direct, "object", &content(20 * MIB), MIB)
        .await
        .unwrap();
    let cuts = Cuts {
        times: 1,
        sent: usize::MAX,
        received: 2 * MIB,
    };
    let proxy = Proxy::start(&server, cuts).await;
    let stream = reach(proxy.config(&server))
        .await
        .get("object")
        .await
        .unwrap();
    upload(&direct, "object", &Bytes::from(vec![7; 20 * MIB]), MIB)
        .await
        .unwrap();
    let read: Result<Vec<Bytes>, Error> = futures::TryStreamExt::try_collect(stream.chunks).await;
    assert!(read.is_err());
}

/// Waits until no unfinished upload exists, because a dropped upload is aborted in the background.
async fn await_nothing_unfinished(server: &S3Server) {
    for _ in 0..600 {
        if server.unfinished("bucket").is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("left: {:?}", server.unfinished("bucket"));
}

#[tokio::test]
async fn aborted_or_dropped_upload_leaves_no_data() {
    let server = S3Server::start(&["bucket"]);
    let store = reach(server.config("bucket")).await;
    for abort in [true, false] {
        let mut upload = store.begin("object").await.unwrap();
        for _ in 0..40 {
            upload.write(content(MIB)).await.unwrap();
        }
        assert!(
            !server.unfinished("bucket").is_empty(),
            "the server shows no unfinished upload before the abort"
        );
        if abort {
            upload.abort().await.unwrap();
            assert_eq!(
                server.unfinished("bucket"),
                Vec::<std::path::PathBuf>::new()
            );
        } else {
            drop(upload);
            await_nothing_unfinished(&server).await;
        }
    }
    assert_eq!(store.list("").await.unwrap(), []);
}

#[tokio::test]
async fn s3_errors_contain_cause_but_no_secret() {
    let server = S3Server::start(&["bucket"]);
    let with = |change: fn(&mut S3Config)| {
        let mut config = server.config("bucket");
        change(&mut config);
        config
    };
    let no_bucket = with(|config| config.bucket = "other".to_owned());
    let unknown_key =
        with(|config| config.access = S3Access::Keys(S3Keys::new("unknown", "nothing")));
    let wrong_secret =
        with(|config| config.access = S3Access::Keys(S3Keys::new("testaccess", "wrong")));
    let unreachable = with(|config| config.endpoint = Some("http://127.0.0.1:1".to_owned()));
    for (config, expected) in [
        (no_bucket, "bucket \"other\" does not exist: create it"),
        (unknown_key, "access denied"),
        (wrong_secret, "correct the secret key"),
        (
            unreachable,
            "the store at http://127.0.0.1:1 cannot be reached",
        ),
    ] {
        let store = reach(config).await;
        for size in [10, 20 * MIB] {
            let error = upload(&store, "key", &content(size), MIB)
                .await
                .unwrap_err()
                .to_string();
            assert!(
                error.contains(expected),
                "{size}: {expected:?} is not in {error:?}"
            );
            assert!(
                !error.contains("testsecret") && !error.contains("wrong"),
                "{error}"
            );
        }
    }
}

/// A client with the permissions of the bucket's owner.
fn owner(server: &S3Server) -> aws_sdk_s3::Client {
    use aws_sdk_s3::config::{BehaviorVersion, Credentials, Region};
    let credentials = Credentials::new(ACCESS_KEY, SECRET_KEY, None, None, "test");
    let config = aws_sdk_s3::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .endpoint_url(&server.endpoint)
        .region(Region::new("us-east-1"))
        .force_path_style(true)
        .credentials_provider(credentials)
        .build();
    aws_sdk_s3::Client::from_conf(config)
}

#[tokio::test]
async fn objects_are_stored_with_object_lock_or_not_at_all() {
    let server = S3Server::start(&[]);
    let owner = owner(&server);
    let created = owner
        .create_bucket()
        .bucket("locked")
        .object_lock_enabled_for_bucket(true);
    created.send().await.unwrap();
    let mut config = server.config("locked");
    config.protection.lock = Some(ObjectLock {
        mode: ObjectLockMode::Governance,
        days: 3,
    });
    let store = reach(config).await;
    for (key, size) in [("small", 10), ("large", 20 * MIB)] {
        upload(&store, key, &content(size), MIB).await.unwrap();
        let held = owner.head_object().bucket("locked").key(key).send();
        let held = held.await.unwrap();
        assert_eq!(held.object_lock_mode().unwrap().as_str(), "GOVERNANCE");
        let until = held.object_lock_retain_until_date().unwrap().secs();
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap();
        let hours = (until - i64::try_from(now.as_secs()).unwrap()) / 3600;
        assert!((70..=72).contains(&hours), "{hours} hours");
    }
    // If the bucket does not support locks, the upload must fail, because the backup would be stored without a lock.
    let plain = S3Server::start(&["bucket"]);
    let mut config = plain.config("bucket");
    config.protection.lock = Some(ObjectLock {
        mode: ObjectLockMode::Governance,
        days: 3,
    });
    let store = reach(config).await;
    for size in [10, 20 * MIB] {
        let stored = upload(&store, "key", &content(size), MIB).await;
        assert!(stored.is_err(), "{size}: stored without a lock");
    }
    assert_eq!(store.list("").await.unwrap(), []);
}

#[tokio::test]
async fn upload_fails_and_leaves_no_data_if_store_ignores_encryption() {
    let server = S3Server::start(&["bucket"]);
    let mut config = server.config("bucket");
    config.protection.encryption = Some(ServerSideEncryption::Aes256);
    let store = reach(config).await;
    for size in [10, 20 * MIB] {
        let error = upload(&store, "key", &content(size), MIB)
            .await
            .unwrap_err();
        assert!(
            error.to_string().contains("serverSideEncryption"),
            "{error}"
        );
    }
    assert_eq!(store.list("").await.unwrap(), []);
    await_nothing_unfinished(&server).await;
}

/// Invariant 12: the store rejects a request whose content does not match its checksum.
#[tokio::test]
async fn invariant_12_upload_damaged_in_transit_fails_and_leaves_no_object() {
    let server = S3Server::start(&["bucket"]);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let target = server.endpoint.trim_start_matches("http://").to_owned();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = TcpStream::connect(&target).await.unwrap();
            tokio::spawn(async move {
                let (mut up, mut down) = (vec![0; 65_536], vec![0; 65_536]);
                let mut passed = 0;
                loop {
                    tokio::select! {
                        read = client.read(&mut up) => {
                            let Ok(read @ 1..) = read else { return };
                            // After the first 100,000 bytes, the last byte of each piece is damaged, so the head of
                            // the request stays unchanged.
                            if passed > 100_000 { up[read - 1] ^= 1 }
                            passed += read;
                            if server.write_all(&up[..read]).await.is_err() { return }
                        }
                        read = server.read(&mut down) => {
                            let Ok(read @ 1..) = read else { return };
                            if client.write_all(&down[..read]).await.is_err() { return }
                        }
                    }
                }
            });
        }
    });
    let store = reach(S3Config {
        endpoint: Some(endpoint),
        ..server.config("bucket")
    })
    .await;
    for size in [MIB, 20 * MIB] {
        assert!(upload(&store, "object", &content(size), MIB).await.is_err());
    }
    let direct = reach(server.config("bucket")).await;
    assert_eq!(direct.list("").await.unwrap(), []);
}
