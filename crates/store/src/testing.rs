//! Starts a real S3 server for tests, and the questions every store has to answer alike.
//!
//! For tests only. A machine without the server fails the test with the command that brings it; nothing is skipped.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    clippy::missing_panics_doc
)]

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::TryStreamExt;
use tempfile::TempDir;

use crate::{Error, S3Access, S3Config, S3Keys, Store};

/// A running versitygw with an empty directory; dropping it ends the process and removes the data.
pub struct S3Server {
    child: Child,
    dir: TempDir,
    /// What clients connect to.
    pub endpoint: String,
}

/// The key the server knows.
pub const ACCESS_KEY: &str = "testaccess";
/// Its secret.
pub const SECRET_KEY: &str = "testsecret";

/// The program, as the testbed built it; the environment variable `VERSITYGW_BIN` names another one.
fn program() -> PathBuf {
    if let Some(named) = std::env::var_os("VERSITYGW_BIN") {
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
        .filter(|entry| {
            entry
                .file_name()
                .to_string_lossy()
                .starts_with("versitygw-")
        })
        .map(|entry| entry.path().join("versitygw"))
        .filter(|path| path.is_file())
        .collect();
    found.sort_by_key(|path| path.metadata().and_then(|data| data.modified()).ok());
    found.pop().unwrap_or_else(|| {
        panic!("no versitygw on this machine: run `cargo xtask testbed build`, or set VERSITYGW_BIN to the program")
    })
}

impl S3Server {
    /// Starts the server with the buckets named.
    pub fn start(buckets: &[&str]) -> Self {
        let program = program();
        for _ in 0..5 {
            let dir = tempfile::tempdir().expect("a temporary directory");
            for bucket in buckets {
                std::fs::create_dir(dir.path().join(bucket)).expect("a bucket");
            }
            let address = TcpListener::bind("127.0.0.1:0")
                .and_then(|listener| listener.local_addr())
                .expect("a loopback port");
            let child = Command::new(&program)
                .args([
                    "--quiet",
                    "--keep-alive",
                    "--access",
                    ACCESS_KEY,
                    "--secret",
                    SECRET_KEY,
                ])
                .args(["--port", &address.to_string(), "posix"])
                .arg(dir.path())
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("versitygw can be run");
            let mut server = Self {
                child,
                dir,
                endpoint: format!("http://{address}"),
            };
            let end = Instant::now() + Duration::from_secs(10);
            while Instant::now() < end
                && server.child.try_wait().expect("a child process").is_none()
            {
                if TcpStream::connect(address).is_ok() {
                    return server;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        panic!("versitygw does not start; is {} usable?", program.display());
    }

    /// How to reach a bucket of this server.
    pub fn config(&self, bucket: &str) -> S3Config {
        S3Config {
            bucket: bucket.to_owned(),
            endpoint: Some(self.endpoint.clone()),
            region: None,
            force_path_style: true,
            access: S3Access::Keys(S3Keys::new(ACCESS_KEY, SECRET_KEY)),
            ca: None,
        }
    }

    /// The directory a bucket's objects lie in.
    pub fn bucket_dir(&self, bucket: &str) -> PathBuf {
        self.dir.path().join(bucket)
    }

    /// The file system entries below a bucket that belong to unfinished uploads.
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

impl Drop for S3Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Bytes that differ everywhere, so that a part in the wrong place is seen.
pub fn content(size: usize) -> Bytes {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(size);
    bytes.into()
}

/// Writes an object as a stream of chunks of `chunk` bytes.
pub async fn upload(
    store: &dyn Store,
    key: &str,
    content: &Bytes,
    chunk: usize,
) -> Result<u64, Error> {
    let mut upload = store.begin(key).await?;
    let mut rest = content.clone();
    while !rest.is_empty() {
        upload.write(rest.split_to(chunk.min(rest.len()))).await?;
    }
    upload.commit().await.map(|committed| committed.size)
}

/// Reads an object whole.
pub async fn download(store: &dyn Store, key: &str) -> Result<Bytes, Error> {
    let stream = store.get(key).await?;
    let chunks: Vec<Bytes> = stream.chunks.try_collect().await?;
    let whole: Bytes = chunks.concat().into();
    assert_eq!(
        whole.len() as u64,
        stream.size,
        "the size announced for {key}"
    );
    Ok(whole)
}

/// What every store has to do, whatever it is.
pub async fn conforms(store: &dyn Store) {
    // Nothing is there before, and asking for it is no failure but for reading.
    assert_eq!(store.head("a/nothing").await.unwrap(), None);
    assert_eq!(store.list("").await.unwrap(), []);
    store.delete("a/nothing").await.unwrap();
    let missing = store.get("a/nothing").await.err();
    assert!(
        matches!(missing, Some(Error::NoSuchObject { .. })),
        "{missing:?}"
    );

    // Objects of every size come back as they were, also those that replace another.
    for size in [
        0,
        1,
        1000,
        5 << 20,
        (8 << 20) - 1,
        8 << 20,
        (8 << 20) + 1,
        27_000_001,
    ] {
        let content = content(size);
        let stored = upload(store, "a/b/object", &content, 300_007)
            .await
            .unwrap();
        assert_eq!(stored, size as u64);
        let found = store.head("a/b/object").await.unwrap().unwrap();
        assert_eq!(
            (found.size, found.key.as_str()),
            (size as u64, "a/b/object")
        );
        assert!(found.modified_unix_seconds.is_some());
        assert!(
            download(store, "a/b/object").await.unwrap() == content,
            "{size} bytes differ"
        );
    }
    store.put("a/b/small", content(70)).await.unwrap();
    assert_eq!(download(store, "a/b/small").await.unwrap(), content(70));

    // Before the commit nothing is visible, and what was there stays; after an abortion too.
    for abort in [true, false] {
        let mut given_up = store.begin("a/b/small").await.unwrap();
        let mut new = store.begin("a/b/new").await.unwrap();
        for _ in 0..20 {
            given_up.write(content(1 << 20)).await.unwrap();
            new.write(content(1 << 20)).await.unwrap();
        }
        assert_eq!(store.head("a/b/new").await.unwrap(), None);
        assert_eq!(store.head("a/b/small").await.unwrap().unwrap().size, 70);
        if abort {
            given_up.abort().await.unwrap();
            new.abort().await.unwrap();
        }
    }
    assert_eq!(store.head("a/b/new").await.unwrap(), None);
    assert_eq!(download(store, "a/b/small").await.unwrap(), content(70));

    // What a process left that died is removed, if it is of this very key and old enough.
    let mut left = Vec::new();
    for key in ["a/b/left", "a/b/left-other"] {
        let mut upload = store.begin(key).await.unwrap();
        for _ in 0..20 {
            upload.write(content(1 << 20)).await.unwrap();
        }
        left.push(upload);
    }
    store
        .discard_unfinished("a/b/left", 1_000_000_000)
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    let now = i64::try_from(now.as_secs()).unwrap();
    store.discard_unfinished("a/b/left", now).await.unwrap();
    let other = left.pop().unwrap().commit().await.unwrap();
    assert_eq!(other.size, 20 << 20);
    assert!(
        left.pop().unwrap().commit().await.is_err(),
        "it was not removed"
    );
    store.delete("a/b/left-other").await.unwrap();
    store
        .discard_unfinished("a/b/nothing", 4_000_000_000)
        .await
        .unwrap();

    // A listing is by the beginning of the key, and has all pages.
    for index in 0..1005 {
        store
            .put(&format!("many/{index:04}"), content(1))
            .await
            .unwrap();
    }
    store.put("many-others", content(1)).await.unwrap();
    let keys = |objects: Vec<crate::Object>| -> Vec<String> {
        objects.into_iter().map(|object| object.key).collect()
    };
    let expected: Vec<String> = (0..1005).map(|index| format!("many/{index:04}")).collect();
    assert_eq!(keys(store.list("many/").await.unwrap()), expected);
    assert_eq!(store.list("many").await.unwrap().len(), 1006);
    assert_eq!(
        keys(store.list("a/b/").await.unwrap()),
        ["a/b/object", "a/b/small"]
    );
    store.delete("many/0007").await.unwrap();
    assert_eq!(store.list("many/").await.unwrap().len(), 1004);
}
